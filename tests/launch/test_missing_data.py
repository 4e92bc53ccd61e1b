"""What could not be stored while a run was followed: `attach` of the ended run fetches it, and changes nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from multinode.launch import attach
from multinode.launch.context import ExecuteOptions, Launched, RunContext, StopRequest
from multinode.records.run import NodeRun
from multinode.records.run_directory import RunDirectory
from multinode.records.status import Status
from multinode.runs.stored_run import StoredRun
from multinode.transport.agent import AgentArchive, AgentTransport
from tests import make
from tests.launch.scripted import DEADLINE_S, HELLO, ScriptedNodes, Talk

LOGS = {"a": b"first\nsecond\n", "b": b"all of it\n"}
STORED = {0: b"first\n", 1: LOGS["b"]}
STEP = b'{"kind": "step", "rank": 0, "step": 7, "time_s": 1.0}\n'
MISSING = len(b"second\n") + len(STEP)


def ended(rank: int, name: str, **changes: object) -> NodeRun:
    node = NodeRun(name=name, node_rank=rank, state="ended", status=Status(state="ended", cause="stopped"))
    return msgspec.structs.replace(node, **changes)


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    """Of a stopped run, whose first node's log and samples are not stored to their end."""
    directory = RunDirectory.create(tmp_path / "runs", "r")
    plan = make.plan("a", "b", workers=2)
    directory.write("plan.json", plan)
    directory.write_cluster(make.cluster("a", "b"), "a\nb\n")
    for rank, log in STORED.items():
        directory.append_log(rank, log, 0)
    nodes = (ended(0, "a"), ended(1, "b"))
    run = make.run(*nodes, status="stopped", ended_s=9.0, world_size=4, stop_reason="SIGTERM", missing_bytes=MISSING)
    directory.write("run.json", run)
    return directory


def serve(talk: Talk) -> None:
    """What an agent does for `follow` of an ended run: the rest of each file, then the end."""
    offsets = talk.received.get(timeout=DEADLINE_S)["offsets"] if talk.verb == "follow" else {}
    at = offsets.get("log", 0)
    talk.say(HELLO)
    if rest := LOGS[talk.node.name][at:]:
        talk.chunk("log", at, rest)
    if talk.node.name == "a" and not offsets.get("samples/rank-0.jsonl"):
        talk.chunk("samples/rank-0.jsonl", 0, STEP)
    talk.end(cause="stopped")


def attached(
    directory: RunDirectory,
    play: Callable[[Talk], None],
    said: list[str] | None = None,
    stop: StopRequest | None = None,
) -> Launched:
    nodes = ScriptedNodes(play)
    agent = AgentTransport(nodes, AgentArchive(b""))
    say = (said if said is not None else []).append
    context = RunContext(agent, directory.path.parent, stop=stop, say=say)
    try:
        return attach.attach(StoredRun(directory), context, ExecuteOptions())
    finally:
        nodes.check()


def test_attach_of_an_ended_run_fetches_the_rest_and_keeps_its_record(directory: RunDirectory) -> None:
    before = directory.read_run()
    assert before is not None
    launched = attached(directory, serve)
    assert launched.run == msgspec.structs.replace(before, missing_bytes=0) == directory.read_run()
    assert [directory.log_path(rank).read_bytes() for rank in (0, 1)] == [LOGS["a"], LOGS["b"]]
    assert list(directory.sample_lines(0)) == [STEP]
    # Nothing is missing any more, so no node is asked.
    assert attached(directory, lambda _: pytest.fail("a node was asked")).run == launched.run


def test_what_a_node_no_longer_has_stays_missing_and_is_told(directory: RunDirectory) -> None:
    def play(talk: Talk) -> None:
        if talk.node.name == "a":
            talk.say({"kind": "error", "message": "no run r-0 here", "hint": None})
        else:
            serve(talk)

    said: list[str] = []
    assert attached(directory, play, said).run.missing_bytes == MISSING
    assert any("a: its log and samples were fetched only in part: no run r-0 here" in line for line in said)
    assert directory.log_path(0).read_bytes() == STORED[0]


def test_a_node_that_was_lost_is_not_asked_and_the_disk_may_be_full_again(directory: RunDirectory) -> None:
    run = directory.read_run()
    assert run is not None
    directory.write("run.json", msgspec.structs.replace(run, nodes=(run.nodes[0], ended(1, "b", state="lost"))))
    directory.log_path(0).unlink()
    directory.log_path(0).mkdir()
    asked: list[str] = []

    def play(talk: Talk) -> None:
        asked.append(talk.node.name)
        serve(talk)

    said: list[str] = []
    assert attached(directory, play, said).run.missing_bytes == len(LOGS["a"])
    assert asked == ["a"]
    assert directory.sizes(0) == {"samples/rank-0.jsonl": len(STEP)}
    assert any(line.startswith("a: ") and "Is a directory" in line for line in said)
    assert any(line.startswith("b was lost or not started") for line in said)


def test_a_request_to_stop_ends_the_fetching_and_what_is_missing_stays_recorded(directory: RunDirectory) -> None:
    stop = StopRequest()

    def play(talk: Talk) -> None:
        talk.say(HELLO)
        stop.ask("SIGINT")
        assert talk.closed_by_us.wait(DEADLINE_S)
        talk.hang_up()

    said: list[str] = []
    assert attached(directory, play, said, stop).run.missing_bytes == MISSING
    assert said == [f"{name}: its log and samples were fetched only in part: interrupted" for name in "ab"]
    # It is asked for already, so no node is asked.
    assert attached(directory, lambda _: pytest.fail("a node was asked"), stop=stop).run.missing_bytes == MISSING
