from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from multinode.check.model_count import with_count
from multinode.cluster.cluster import Node
from multinode.cluster.facts import NodeFacts
from multinode.errors import ContactLost, JobError
from multinode.job.job import ScriptJob, parse_training
from multinode.model.training import read_training
from multinode.stats.unknown import Entries
from multinode.transport.base import Outcomes
from tests import make

CLUSTER = make.cluster("a", "b", "c")
JOB = parse_training("model_name_or_path: m\nstage: sft\nfinetuning_type: full\n", "sft.yaml")


def facts(name: str, kind: str | None) -> NodeFacts:
    return NodeFacts(node=name) if kind is None else NodeFacts(node=name, model=Entries(values={"model_type": kind}))


def probed(**kinds: str | None) -> Outcomes[NodeFacts]:
    return Outcomes({name: facts(name, kind) for name, kind in kinds.items()}, {"c": ContactLost("c is gone")})


def test_the_first_node_that_has_the_model_counts_for_all() -> None:
    asked = []

    def ask(node: Node, question: Mapping[str, Any], _deadline_s: float) -> NodeFacts:
        asked.append((node.name, question["arguments"]["finetuning_type"]))
        return NodeFacts(model=Entries(values={"model_type": "gpt_oss", "counted": {}}))

    found = with_count(CLUSTER, probed(a=None, b="gpt_oss"), JOB, ask)
    assert asked == [("b", "full")]
    assert found.found["b"].model_config == {"model_type": "gpt_oss", "counted": {}}
    assert (found.found["b"].node, found.found["a"].model_config, [*found.failed]) == ("b", None, ["c"])


@pytest.mark.parametrize(("kind", "job"), [("qwen2", JOB), ("gpt_oss", ScriptJob(argv=("train.py",))), (None, JOB)])
def test_nobody_is_asked_what_is_known_or_cannot_be_built(kind: str | None, job: Any) -> None:
    def ask(node: Node, _question: Mapping[str, Any], _deadline_s: float) -> NodeFacts:
        raise AssertionError(node.name)

    before = probed(a=kind, b=kind)
    assert with_count(CLUSTER, before, job, ask) == before


def test_a_node_that_does_not_answer_costs_the_count_alone_and_is_told_where_it_is_missed() -> None:
    def ask(_node: Node, _question: Mapping[str, Any], _deadline_s: float) -> NodeFacts:
        raise ContactLost("no answer within 150 s")

    model = with_count(CLUSTER, probed(a="gpt_oss", b="gpt_oss"), JOB, ask).found["a"].model_config
    with pytest.raises(JobError, match="no node could build the model: no answer within 150 s"):
        read_training(JOB, model)
