from __future__ import annotations

import msgspec

from multinode.profile.calls import last_models
from multinode.profile.observed import Observed, ObservedNode, observe
from multinode.profile.summary import summarise
from multinode.records.samples import ModelSample


def model(rank: int, parameters: int) -> ModelSample:
    return ModelSample(rank=rank, wrapper="ddp", parameters=parameters, trainable=parameters)


def told(*of_nodes: tuple[ModelSample, ...]) -> Observed:
    """One worker a node, and what each node says of models."""
    nodes = [
        ObservedNode(name=f"node{rank}", node_rank=rank, ranks=(rank,), samples=samples)
        for rank, samples in enumerate(of_nodes)
    ]
    return observe("r", nodes)


def test_the_last_word_of_each_worker_counts_and_the_lowest_rank_comes_first() -> None:
    observed = told((model(0, 1), model(0, 2)), (model(1, 3),))
    turned = msgspec.structs.replace(observed, nodes=observed.nodes[::-1])
    for one in (observed, turned):
        assert [(rank, last.parameters) for rank, last in last_models(one).items()] == [(0, 2), (1, 3)]


def test_a_node_is_believed_about_its_own_workers_alone() -> None:
    observed = told((model(0, 10),), (model(1, 10), model(0, 7)))
    assert last_models(observed)[0].parameters == 10
    summary = summarise(observed)
    assert (summary.parameters, summary.trainable) == (10, 10)
