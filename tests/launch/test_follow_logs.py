"""logs -f, attach and stop of a run that nobody else follows: a node that cannot be followed is never passed over."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from multinode.cluster.cluster import Node
from multinode.errors import (
    AuthError,
    ConnectError,
    ContactLost,
    HostKeyError,
    MultinodeError,
    NodeFailed,
    ResolveError,
    UsageError,
)
from multinode.launch.attach import attach, follow_logs
from multinode.launch.context import ExecuteOptions, RunContext, StopRequest
from multinode.records.plan import Observation, TraceWindow
from multinode.records.run import Run, new_run
from multinode.records.run_directory import RunDirectory
from multinode.runs.stored_run import StoredRun
from multinode.transport.agent import AgentArchive, AgentTransport
from tests import make
from tests.golden import Golden, error_of, raised
from tests.launch.scripted import DEADLINE_S, HELLO, RUNNING, ScriptedNodes, Talk

NODES = ("a", "b")
SOON = ExecuteOptions(silence_s=0.2, grace_s=0.1, verify_s=0.3)
TIMED_OUT = ConnectError("no SSH connection: timed out", hint="ping it")
TRACE = b'{"kind":"trace","rank":0,"first_step":1,"last_step":2,"file":"rank-0.json.gz"}\n'


class Nodes(ScriptedNodes):
    """`errors` says which of them cannot be reached, and why."""

    def __init__(self, play: Callable[[Talk], None], errors: dict[str, MultinodeError]) -> None:
        super().__init__(play)
        self.errors = errors

    def open(self, node: Node, command: str, *, deadline_s: float) -> Talk:
        if (error := self.errors.get(node.name)) is not None:
            raise type(error)(error.message, node=node.name, hint=error.hint)
        return super().open(node, command, deadline_s=deadline_s)


@pytest.fixture
def known(tmp_path: Path) -> StoredRun:
    plan = make.plan(*NODES, workers=2)
    directory = RunDirectory.create(tmp_path, plan.run_id)
    run = msgspec.structs.replace(new_run(plan, 1.0), lease_s=0.1)
    directory.write("run.json", run)
    directory.write("plan.json", plan)
    directory.write_cluster(make.cluster(*NODES), "")
    return StoredRun(directory)


def goes_well(talk: Talk) -> None:
    talk.say(HELLO, RUNNING)
    talk.chunk("log", 0, b"one\n")
    talk.end()


def context(known: StoredRun, nodes: ScriptedNodes) -> RunContext:
    return RunContext(AgentTransport(nodes, AgentArchive(b"")), known.directory.path.parent)


def follow(known: StoredRun, nodes: ScriptedNodes) -> dict[str, bytes]:
    try:
        return dict(follow_logs(known, (0, 1), context(known, nodes), SOON))
    finally:
        nodes.check()


def recorded(known: StoredRun) -> Run:
    run = known.directory.read("run.json", Run)
    assert run is not None
    return run


def test_logs_are_followed_to_the_end(known: StoredRun) -> None:
    assert follow(known, Nodes(goes_well, {})) == dict.fromkeys(NODES, b"one\n")
    assert recorded(known).status == "succeeded"


@pytest.mark.parametrize("names", ["ab", "b"])
@pytest.mark.parametrize("error", [TIMED_OUT, ContactLost("sshd did not answer in time")])
def test_a_node_that_stays_out_of_reach_is_the_error_and_lost(
    known: StoredRun, error: MultinodeError, names: str, golden: Golden
) -> None:
    """Also where all of them are at the same moment: that one was never started is for the node to say."""
    lost = raised(ContactLost, follow, known, Nodes(goes_well, dict.fromkeys(names, error)))
    golden.check_errors(f"out_of_reach_{type(error).__name__}_{names}", {"logs -f": lost})
    run = recorded(known)
    assert run.status == "lost"
    assert [node.name for node in run.nodes if node.state == "lost"] == list(names)


def test_a_node_that_comes_into_reach_is_followed(known: StoredRun) -> None:
    nodes = Nodes(goes_well, {"b": TIMED_OUT})
    seen = context(known, nodes)
    # So many looks at the progress, which shows that it is being sought.
    seen.observe = lambda progress: nodes.errors.clear() if "reconnecting" in progress.nodes[1].message else None
    options = msgspec.structs.replace(SOON, silence_s=DEADLINE_S)
    assert attach(known, seen, options).run.status == "succeeded"


@pytest.mark.parametrize("kind", [UsageError, ResolveError, HostKeyError, AuthError])
def test_what_only_we_can_put_right_leaves_the_run_alone(
    known: StoredRun, kind: type[MultinodeError], golden: Golden
) -> None:
    left = threading.Event()

    def goes_on(talk: Talk) -> None:
        talk.say(HELLO, RUNNING)
        assert talk.closed_by_us.wait(DEADLINE_S)
        assert [order["op"] for order in talk.orders() if order.get("op") == "stop"] == []
        left.set()
        talk.hang_up()

    error = raised(kind, follow, known, Nodes(goes_on, {"b": kind("its key is protected", hint="ssh-add")}))
    golden.check_errors("ours_to_put_right", {"logs -f": error}, shown={kind.__name__: "ERROR"})
    assert left.is_set()
    run = recorded(known)
    assert (run.status, run.first_failure) == ("running", None)


@pytest.mark.parametrize("kind", [ConnectError, AuthError, NodeFailed])
def test_a_stop_that_did_not_reach_a_node_has_not_stopped_the_run(known: StoredRun, kind: type[MultinodeError]) -> None:
    request = StopRequest()
    request.ask("stop")
    nodes = Nodes(goes_well, dict.fromkeys("ab", kind("no way to it")))
    run = attach(known, context(known, nodes).with_stop(request), SOON).run
    assert run.status == "lost"
    assert run.first_failure is not None
    assert (run.first_failure.node, "no way to it" in run.first_failure.message) == ("a", True)


def test_a_node_that_knows_no_such_run_is_the_error(known: StoredRun, golden: Golden) -> None:
    def play(talk: Talk) -> None:
        if talk.node.name == "b":
            talk.say({"kind": "error", "message": "no run r.1 on this node"})
        else:
            goes_well(talk)

    golden.check_errors("no_such_run", {"logs -f": error_of(follow, known, Nodes(play, {}))})


def test_a_lost_node_is_the_error_also_while_what_comes_after_the_end_takes_its_time(
    known: StoredRun, golden: Golden
) -> None:
    """The record says it before the thread that follows is done: here it waits for a trace."""
    traced_steps = Observation(trace=TraceWindow(steps=2, ranks=(0,)))
    known.directory.write("plan.json", msgspec.structs.replace(known.require_plan(), observation=traced_steps))
    traced = StoredRun(known.directory)
    told = threading.Event()

    def play(talk: Talk) -> None:
        if talk.verb == "fetch":
            assert told.wait(DEADLINE_S)
            talk.hang_up()
            return
        talk.say(HELLO, RUNNING)
        talk.chunk("samples/rank-0.jsonl", 0, TRACE)
        talk.end()

    nodes = Nodes(play, {"b": TIMED_OUT})
    error = error_of(lambda: list(follow_logs(traced, (0, 1), context(traced, nodes), SOON)))
    golden.check_errors("lost_while_a_trace_is_fetched", {"logs -f": error})
    told.set()
    nodes.check()
