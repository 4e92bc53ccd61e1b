"""stop of a run that another process follows: its recorded end counts, also where the call to one node failed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from multinode.core.cluster.cluster import Cluster, Node
from multinode.core.run.run import Run, new_run
from multinode.errors import MultinodeError, NodeFailed
from multinode.store.run_directory import RunDirectory
from multinode.transport.fake import FakeTransport
from multinode.workflows.run import attach
from multinode.workflows.run.attach import Known, stop
from multinode.workflows.run.context import RunContext
from tests.launch.scripted import make_plan

STOPPED = {"kind": "stopped", "state": "ended", "processes_left": 0}


@pytest.fixture
def known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Known]:
    """A run whose lock is held, as by the process that follows it."""
    monkeypatch.setattr(attach, "_ANSWER_S", 0.5)
    plan = make_plan("a", "b")
    directory = RunDirectory.create(tmp_path, plan.run_id)
    run = new_run(plan, 1.0)
    directory.write("run.json", run)
    cluster = Cluster(nodes=(Node(name="a"), Node(name="b")), source="hosts")
    with directory.lock():
        yield Known(run=run, plan=plan, cluster=cluster, directory=directory)


@pytest.mark.parametrize("ended_by", ["a", "b"])
@pytest.mark.parametrize("unreachable", ["", "b", "ab"])
def test_the_recorded_end_counts_and_without_one_the_error_of_the_node(
    known: Known, unreachable: str, ended_by: str
) -> None:
    """As in a batch job: the node that is told ends it, and the channel to the other may go with it."""

    def answer(node: Node, *_: object) -> list[bytes]:
        if node.name == ended_by and node.name not in unreachable:
            ended = msgspec.structs.replace(known.run, status="stopped", stop_reason="stop")
            known.directory.write("run.json", ended)
        if node.name in unreachable:
            raise NodeFailed("the step has ended", node=node.name)
        return [json.dumps(STOPPED).encode() + b"\n"]

    context = RunContext(FakeTransport(answer), known.directory.path.parent)
    if ended_by not in unreachable:
        assert stop(known, context, 0.1).run.status == "stopped"
    else:
        with pytest.raises(NodeFailed, match="the step has ended") as raised:
            stop(known, context, 0.1)
        assert raised.value.node == unreachable[0]


def test_an_end_that_nobody_records_is_an_error(known: Known) -> None:
    answers = FakeTransport(lambda *_: [json.dumps(STOPPED).encode() + b"\n"])
    with pytest.raises(MultinodeError, match="has not recorded its end"):
        stop(known, RunContext(answers, known.directory.path.parent), 0.1)
    recorded = known.directory.read("run.json", Run)
    assert recorded is not None
    assert (recorded.status, {node for node, *_ in answers.ran}) == ("running", {"a", "b"})
