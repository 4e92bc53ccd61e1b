from __future__ import annotations

import re
from typing import Any

import pytest

from multinode.analyse.job.flops import Utilisation
from multinode.analyse.run.observed import Observed, ObservedNode, observe
from multinode.analyse.stats.unknown import UnknownError
from multinode.analyse.steps.throughput import Throughput
from multinode.analyse.steps.utilisation import read_model_work, utilisation_of
from multinode.core.run.samples import ModelSample
from multinode.core.run.synthetic import with_synthetic

from .trainings import FULL, LORA, TINY, training_job

SPEED = Throughput(tgs=8000.0, tokens_per_sample=512.0)


def on_gpus(*of_nodes: list[int]) -> Observed:
    """A worker a node; each node says so often of which ranks' model that it is on an RTX 4090."""
    nodes = [
        ObservedNode(name=f"node{number}", node_rank=number, ranks=(number,), samples=tuple(map(gpu, ranks)))
        for number, ranks in enumerate(of_nodes)
    ]
    return observe("r", nodes)


def gpu(rank: int) -> ModelSample:
    return ModelSample(
        rank=rank,
        wrapper="ddp",
        parameters=1,
        trainable=1,
        device="cuda",
        device_name="NVIDIA GeForce RTX 4090",
    )


def used(observed: Observed) -> Utilisation:
    found = utilisation_of(read_model_work(training_job(FULL), TINY), observed, SPEED)
    assert isinstance(found, Utilisation)
    return found


def test_a_worker_that_tells_its_model_again_takes_no_mfu_away() -> None:
    once = used(on_gpus([0], [1]))
    assert once.mfu is not None
    assert used(on_gpus([0, 0, 0], [1, 1])) == once


def test_a_worker_whose_gpu_is_not_known_leaves_no_mfu_and_no_other_node_speaks_for_it() -> None:
    assert used(on_gpus([0], [])).mfu is None
    assert used(on_gpus([0, 1], [])).mfu is None


@pytest.mark.parametrize(
    "changes",
    [
        {"stage": "dpo"},
        {"stage": "rm"},
        {"stage": "ppo"},
        {"stage": "kto"},
        {"use_dora": True},
        {"additional_target": "embed_tokens"},
        {"adapter_name_or_path": "earlier"},
    ],
)
def test_trainings_whose_flops_are_not_counted_have_a_reason_and_no_shape(changes: dict[str, Any]) -> None:
    work = read_model_work(training_job(LORA | changes), TINY)
    assert work.shape is None
    (key,) = changes
    assert f"{key}: {changes[key]}" in work.reason
    with pytest.raises(UnknownError, match=re.escape(work.reason)):
        utilisation_of(work, on_gpus([0], [1]), SPEED)


@pytest.mark.parametrize("changes", [{}, {"stage": "pt"}, {"quantization_bit": 4}])
def test_an_adapter_on_a_quantised_base_computes_what_any_adapter_does(changes: dict[str, Any]) -> None:
    work = read_model_work(training_job(LORA | changes), TINY)
    assert (work.shape is not None, work.adapter_parameters, work.reason) == (True, 156_160, "")


def test_made_up_rows_attend_causally_over_all_their_tokens_and_nothing_is_a_bound() -> None:
    packed = training_job(FULL | {"packing": True, "max_steps": 20})
    for job, is_bound in ((packed, True), (with_synthetic(packed), False)):
        found = utilisation_of(read_model_work(job, TINY), on_gpus([0], [1]), SPEED)
        assert isinstance(found, Utilisation)
        assert "attention over 512 tokens, counted half (causal)" in found.rule
        assert ("upper bound" in found.rule) is is_bound
