"""stop of a run that another process follows: its recorded end counts, also where the call to one node failed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from multinode.cluster.cluster import Node
from multinode.errors import ConnectError, NodeFailed, NodeGone
from multinode.launch import attach
from multinode.launch.attach import find_recorded, nodes_of, stop, whole_of
from multinode.launch.context import STOP_FILE, RunContext, StopOrder
from multinode.launch.node_runs import stop_by_id
from multinode.records.plan import LaunchPlan
from multinode.records.run import NodeRun, Run, new_run
from multinode.records.run_directory import RunDirectory
from multinode.records.status import Status
from multinode.runs.stored_run import StoredRun
from multinode.transport.agent import AgentTransport
from multinode.transport.fake import FakeTransport
from tests import make
from tests.golden import Golden, error_of

STOPPED = {"kind": "stopped", "state": "ended", "processes_left": 0}


def store(directory: RunDirectory, plan: LaunchPlan) -> None:
    directory.write("plan.json", plan)
    directory.write("run.json", new_run(plan, 1.0))
    directory.write_cluster(make.cluster(*(place.node for place in plan.places)), "")


@pytest.fixture
def known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StoredRun]:
    """A run whose lock is held, as by the process that follows it."""
    monkeypatch.setattr(attach, "ANSWER_S", 0.5)
    plan = make.plan("a", "b", workers=2)
    directory = RunDirectory.create(tmp_path, plan.run_id)
    store(directory, plan)
    with directory.lock():
        yield StoredRun(directory)


@pytest.mark.parametrize("ended_by", ["a", "b"])
@pytest.mark.parametrize("unreachable", ["", "b", "ab"])
def test_the_recorded_end_counts_and_without_one_the_error_of_the_node(
    known: StoredRun, unreachable: str, ended_by: str
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
        failed = error_of(stop, known, context, 0.1)
        assert (failed.node, failed.message) == (unreachable[0], "the step has ended")


class FollowedSinceThen(RunDirectory):
    """A run that nobody followed when it was asked about, and that somebody does by now."""

    @property
    def is_locked(self) -> bool:
        return False


def test_a_stop_that_another_stop_forestalls_records_what_that_one_does(known: StoredRun) -> None:
    def answer(*_: object) -> list[bytes]:
        ended = msgspec.structs.replace(known.run, status="stopped", stop_reason="stop")
        known.directory.write("run.json", ended)
        return [json.dumps(STOPPED).encode() + b"\n"]

    late = StoredRun(FollowedSinceThen(known.directory.path))
    context = RunContext(FakeTransport(answer), known.directory.path.parent)
    assert stop(late, context, 0.1).run.status == "stopped"


def test_an_end_that_nobody_records_is_an_error(known: StoredRun, golden: Golden) -> None:
    answers = FakeTransport(lambda *_: [json.dumps(STOPPED).encode() + b"\n"])
    unrecorded = error_of(stop, known, RunContext(answers, known.directory.path.parent), 0.1)
    golden.check_errors("end_not_recorded", {"stop": unrecorded})
    recorded = known.directory.read("run.json", Run)
    assert recorded is not None
    assert (recorded.status, {node for node, *_ in answers.ran}) == ("running", {"a", "b"})


def record(known: StoredRun, status: str, *nodes: NodeRun) -> StoredRun:
    run = msgspec.structs.replace(known.run, status=status, nodes=nodes)
    known.directory.write("run.json", run)
    return StoredRun(known.directory)


@pytest.fixture
def left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StoredRun:
    """A run that nobody follows."""
    monkeypatch.setattr(attach, "ANSWER_S", 0.5)
    plan = make.plan("a", "b", workers=2)
    directory = RunDirectory.create(tmp_path, plan.run_id)
    store(directory, plan)
    return StoredRun(directory)


def over(name: str, node_rank: int, **fields: Any) -> NodeRun:
    whole = {"state": "ended", "cause": "stopped", "processes_left": 0, **fields}
    return NodeRun(name=name, node_rank=node_rank, state=whole["state"], status=Status(**whole))


UNCLEAR: dict[str, dict[str, Any]] = {
    "lost": {"state": "lost", "cause": None, "processes_left": None},
    "left running by a controller that died": {"state": "running", "cause": None, "processes_left": None},
    "with processes left": {"processes_left": 2},
    "not known on the node": {"cause": "not_started"},
}


@pytest.mark.parametrize("how", UNCLEAR)
def test_a_node_that_has_not_said_that_it_is_over_is_asked_whatever_was_recorded(left: StoredRun, how: str) -> None:
    known = record(left, "lost", over("a", 0, exit_code=1, cause="exited"), over("b", 1, **UNCLEAR[how]))
    nodes = FakeTransport(
        lambda *_: [json.dumps({**STOPPED, "cause": "stopped", "signal": "SIGTERM"}).encode() + b"\n"]
    )
    run = stop(known, RunContext(nodes, known.directory.path.parent), 0.1).run
    (asked,) = nodes.ran
    assert (asked[0], json.loads(asked[2])["run_id"]) == ("b", "r.1")
    assert (run.status, run.stop_reason) == ("stopped", "stop")
    assert run.nodes == (known.run.nodes[0], over("b", 1, signal="SIGTERM"))
    assert known.directory.read("run.json", Run) == run


def test_a_run_that_every_node_said_to_be_over_is_left_as_it_is(left: StoredRun) -> None:
    known = record(left, "succeeded", over("a", 0, cause="exited"), over("b", 1, cause="exited"))
    nodes = FakeTransport(lambda *_: [])
    assert stop(known, RunContext(nodes, known.directory.path.parent), 0.1).run == known.run
    assert nodes.ran == []


def test_a_node_that_cannot_be_asked_leaves_the_run_lost_and_is_told(left: StoredRun) -> None:
    known = record(left, "lost", over("a", 0, state="lost"), over("b", 1, state="lost"))

    def answer(node: Node, *_: object) -> list[bytes]:
        if node.name == "b":
            raise ConnectError("no route", node="b")
        return [json.dumps({**STOPPED, "cause": "unknown"}).encode() + b"\n"]

    context = RunContext(FakeTransport(answer), known.directory.path.parent)
    said: list[str] = []
    context.say = said.append
    run = stop(known, context, 0.1).run
    assert (run.status, [node.state for node in run.nodes]) == ("lost", ["ended", "lost"])
    assert said == ["b: the run may still be running there: no route"]
    assert run.nodes[0].status.cause == "stopped"


def test_nothing_runs_any_more_where_the_allocation_has_ended(left: StoredRun) -> None:
    known = record(left, "lost", over("a", 0, state="lost"), over("b", 1, state="lost"))

    def answer(node: Node, *_: object) -> list[bytes]:
        raise NodeGone("its allocation has ended", node=node.name)

    run = stop(known, RunContext(FakeTransport(answer), known.directory.path.parent), 0.1).run
    assert (run.status, [node.state for node in run.nodes]) == ("stopped", ["ended", "ended"])


def test_a_run_of_which_there_is_no_record_is_stopped_where_something_of_it_is(left: StoredRun) -> None:
    here: dict[str, dict[str, Any]] = {
        "a": {"runs": [{"run_id": "r-x.0"}, {"run_id": "r-x-1.0"}, {"run_id": "other.0"}], "living": []},
        "b": {"runs": [{"run_id": "r-x.0", "machine": "a"}], "living": ["r-x.1"]},
    }
    asked: list[tuple[str, str]] = []

    def answer(node: Node, command: str, stdin: bytes) -> list[bytes]:
        if command.endswith("runs"):
            return [json.dumps({"kind": "runs", **here[node.name]}).encode() + b"\n"]
        asked.append((node.name, json.loads(stdin)["run_id"]))
        return [json.dumps(STOPPED).encode() + b"\n"]

    agent = AgentTransport(FakeTransport(answer))
    stops = stop_by_id(agent, nodes_of(left), "r-x", 0.1)
    assert sorted(asked) == [("a", "r-x-1.0"), ("a", "r-x.0"), ("b", "r-x.1")]
    assert [(one.node, one.runs, one.processes_left) for one in stops] == [
        ("a", ("r-x-1.0", "r-x.0"), 0),
        ("b", ("r-x.1",), 0),
    ]
    unknown = error_of(stop_by_id, agent, nodes_of(left), "nosuch", 0.1)
    assert unknown.message == "no run 'nosuch' on the nodes of hosts"


def test_a_run_that_somebody_else_may_have_written_is_not_taken_for_the_one_of_an_attempt_of_ours(
    tmp_path: Path,
) -> None:
    attempt, whole = RunDirectory.create(tmp_path, "r-1"), RunDirectory.create(tmp_path, "r")
    plan = make.plan("a", workers=2)
    attempt.write("plan.json", plan)
    attempt.write_cluster(make.cluster("a"), "a\n")
    attempt.write("run.json", new_run(plan, 1.0, part_of="r"))
    whole.write("run.json", msgspec.structs.replace(new_run(plan, 1.0), has_parts=True))
    found = whole_of(find_recorded(tmp_path, "r-1"))
    assert found is not None
    assert found.directory.path == whole.path
    whole.path.chmod(0o777)
    assert whole_of(find_recorded(tmp_path, "r-1")) is None


def test_nodes_of_a_run_that_is_restarted_are_told_at_once_and_no_other_attempt_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nobody is waited for before the nodes are told.
    monkeypatch.setattr(attach, "ANSWER_S", 3600.0)
    attempt, whole = RunDirectory.create(tmp_path, "r-1"), RunDirectory.create(tmp_path, "r")
    plan = msgspec.structs.replace(make.plan("a", "b", workers=2), run_id="r-1")
    run = new_run(plan, 1.0, part_of="r")
    store(attempt, plan)
    attempt.write("run.json", run)
    whole.write("run.json", msgspec.structs.replace(run, run_id="r", part_of=None, has_parts=True))
    told: list[tuple[str, str]] = []

    def answer(node: Node, _: str, stdin: bytes) -> list[bytes]:
        assert whole.read(STOP_FILE, StopOrder) == StopOrder(0.1)
        told.append((node.name, json.loads(stdin)["run_id"]))
        # The process that restarts the run sees that its attempt is over.
        nodes = (over("a", 0), over("b", 1))
        ended = msgspec.structs.replace(run, status="stopped", stop_reason="stop", nodes=nodes)
        attempt.write("run.json", ended)
        whole.write("run.json", msgspec.structs.replace(ended, run_id="r", part_of=None, has_parts=True))
        return [json.dumps(STOPPED).encode() + b"\n"]

    with whole.lock(), attempt.lock():
        stopped = stop(find_recorded(tmp_path, "r"), RunContext(FakeTransport(answer), tmp_path), 0.1)
    assert (stopped.run.status, sorted(told)) == ("stopped", [("a", "r-1.0"), ("b", "r-1.1")])
