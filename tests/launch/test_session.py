from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from multinode.diagnose.evidence import NodeEvidence
from multinode.errors import ContactLost
from multinode.launch.context import ExecuteOptions, supervise_requests
from multinode.launch.session import Chunk, Ended, Event, EventQueue, Hello
from multinode.records.run import NodeRun
from tests import make
from tests.diagnose.test_failure import GLOO, NCCL, ended, find, raised

from .scripted import DEADLINE_S, HELLO, RUNNING, Execution, Talk

PIECE = Event(node_rank=0, message=Chunk(file="log", offset=0, data=b"x"))


@pytest.mark.parametrize(
    "event",
    [
        Event(node_rank=1, message=Hello(time_s=0.0)),
        Event(node_rank=1, message=Ended(state="ended"), over=True),
        Event(node_rank=1, error=ContactLost("gone")),
    ],
)
def test_what_a_node_says_of_itself_ends_the_wait_and_brings_what_came_before(event: Event) -> None:
    events = EventQueue()
    for one in (PIECE, PIECE, event):
        events.put(one, DEADLINE_S)
    assert events.take(3600.0) == [PIECE, PIECE, event]
    assert events.take(0.0) == []


def test_pieces_of_files_wait_for_the_next_look_unless_there_is_no_room_for_more() -> None:
    events = EventQueue(most_bytes=2)
    events.put(PIECE, DEADLINE_S)
    assert events.take(0.01) == [PIECE]
    for _ in range(2):
        events.put(PIECE, DEADLINE_S)
    assert events.take(3600.0) == [PIECE, PIECE]


@pytest.mark.parametrize(("nodes", "poll_s"), [(2, 0.1), (64, 0.5), (128, 1.0), (1000, 1.0)])
def test_each_of_many_nodes_speaks_less_often_and_one_keeps_the_plan(nodes: int, poll_s: float) -> None:
    requests = supervise_requests(make.plan(*(f"n{rank}" for rank in range(nodes)), workers=2), ExecuteOptions())
    assert {request["poll_s"] for request in requests} == {poll_s}
    keepers = [request["run_id"] for request in requests if any(one["path"] == "plan.json" for one in request["files"])]
    assert keepers == ["r.0"]


def test_a_node_that_takes_no_word_any_more_is_reached_anew_and_its_lease_goes_on(tmp_path: Path) -> None:
    alone = Execution(tmp_path, "a", lease_s=0.8)

    def play(talk: Talk) -> None:
        talk.say(HELLO, RUNNING)
        talk.order("lease")
        if talk.verb == "supervise":
            talk.is_deaf = True
            # It speaks on, as a node does whose way in is blocked.
            end = time.monotonic() + DEADLINE_S / 2
            while not talk.closed.wait(0.05):
                assert time.monotonic() < end, "the lease has run out"
                talk.say({"kind": "alive", "time_s": 0.0})
        else:
            talk.order("lease")
            talk.end()

    assert alone.run(play).status == "succeeded"


def test_a_node_that_was_given_up_is_sought_no_longer(tmp_path: Path) -> None:
    pair = Execution(tmp_path, "a", "b", verify_s=0.5)

    def play(talk: Talk) -> None:
        talk.say(HELLO, RUNNING)
        if talk.node.name == "b":
            talk.hang_up()
            return
        pair.stop.ask("Ctrl-C")
        pair.stop.ask("Ctrl-C")
        talk.order("stop")
        talk.end(exit_code=None, signal="SIGKILL", cause="stopped")

    assert pair.run(play).status == "lost"
    end = time.monotonic() + DEADLINE_S
    while any(thread.name == "follow-b" for thread in threading.enumerate()):
        assert time.monotonic() < end, "b is still sought, and held"
        time.sleep(0.05)


VANISHED_S = 5.0
LOST = NodeEvidence(
    run=NodeRun(name="node1", node_rank=1, state="lost", lost_s=VANISHED_S),
    error=ContactLost("no answer in time"),
    log="step 7\n",
)


@pytest.mark.parametrize(
    ("survivor", "consequence"),
    [
        (NodeEvidence(run=ended(0, exit_code=1), exceptions=[GLOO]), "rank 0 raised RuntimeError: [../gloo"),
        (NodeEvidence(run=ended(0, exit_code=1), exceptions=[NCCL]), "rank 0 raised DistBackendError: NCCL error"),
        (
            NodeEvidence(run=ended(0, exit_code=1, ended_s=9.0), log="Watchdog caught collective operation timeout"),
            "the job exited with code 1",
        ),
        (
            NodeEvidence(run=ended(0, exit_code=None, signal="SIGABRT", ended_s=9.0), log="ProcessGroupNCCL\nAborted"),
            "a worker was killed by SIGABRT",
        ),
        (NodeEvidence(run=ended(0, exit_code=1)), "the job exited with code 1"),
        # By a clock that is a minute slow, and of a moment before the last word as far as clocks can tell.
        (
            NodeEvidence(run=ended(0, exit_code=1), exceptions=[replace(GLOO, time_s=-56.0)], clock_offset_s=-60.5),
            "rank 0 raised RuntimeError: [../gloo",
        ),
    ],
)
def test_what_peers_of_a_lost_node_raise_is_a_consequence(survivor: NodeEvidence, consequence: str) -> None:
    failure = find(survivor, LOST)
    assert (failure.node, failure.kind, failure.time_s) == ("node1", "node_lost", VANISHED_S)
    assert failure.message == "contact was lost and not restored: no answer in time"
    assert len(failure.consequences) == 1
    assert failure.consequences[0].startswith(f"node0: {consequence}")


@pytest.mark.parametrize(
    "other",
    [
        NodeEvidence(run=ended(0, exit_code=1), exceptions=[raised(0, 9.0)]),
        NodeEvidence(run=ended(0, exit_code=1), exceptions=[raised(0, 9.0), raised(1, 9.5, message="gloo")]),
        NodeEvidence(run=ended(0, exit_code=1), exceptions=[raised(0, 2.0, "RuntimeError", "gloo: Connection reset")]),
        NodeEvidence(run=ended(0, exit_code=None, signal="SIGKILL", ended_s=9.0)),
        NodeEvidence(run=ended(0, exit_code=None, signal="SIGABRT", ended_s=9.0), log="free(): invalid pointer"),
        NodeEvidence(run=ended(0, exit_code=1, ended_s=9.0), log="OSError: No space left on device"),
        NodeEvidence(run=ended(0, cause="not_started", exit_code=None)),
    ],
    ids=["exception", "exception-first", "before", "killed", "crashed", "disk", "not-started"],
)
def test_what_has_a_cause_of_its_own_or_came_before_is_no_consequence(other: NodeEvidence) -> None:
    failure = find(other, LOST)
    assert (failure.node, failure.consequences) == ("node0", ())


def test_of_several_lost_nodes_the_first_to_fall_silent_is_told() -> None:
    later = NodeEvidence(run=NodeRun(name="node2", node_rank=2, state="lost", lost_s=8.0))
    unheard = NodeEvidence(run=NodeRun(name="node3", node_rank=3, state="lost"))
    assert find(later, unheard, LOST).node == "node1"


def test_a_detached_run_is_left_when_it_runs_everywhere_and_needs_no_lease(tmp_path: Path) -> None:
    pair = Execution(tmp_path, "a", "b", lease_s=None, leave_when_running=True)

    def play(talk: Talk) -> None:
        request = talk.received.get(timeout=DEADLINE_S)
        assert request["lease_s"] is None
        talk.say(HELLO, {"kind": "status", "state": "starting"})
        talk.say(RUNNING)
        talk.closed_by_us.wait(DEADLINE_S)
        talk.hang_up()

    run = pair.run(play)
    assert (run.status, run.detached, run.ended_s) == ("running", True, None)
    assert [node.state for node in run.nodes] == ["running", "running"]


def test_a_node_that_does_not_start_stops_a_detached_run(tmp_path: Path) -> None:
    pair = Execution(tmp_path, "a", "b", lease_s=None, leave_when_running=True)

    def play(talk: Talk) -> None:
        talk.say(HELLO)
        if talk.node.name == "b":
            talk.end(exit_code=2)
            return
        talk.say(RUNNING)
        talk.stop()

    run = pair.run(play)
    assert (run.status, run.first_failure.node if run.first_failure else None) == ("failed", "b")


def test_a_run_is_taken_up_where_it_was_left_without_a_gap_or_a_doubled_byte(tmp_path: Path) -> None:
    pair = Execution(tmp_path, "a", "b", attach=True)
    step = b'{"kind":"step","rank":0,"step":3,"time_s":1,"mono_ns":1}\n'
    pair.directory.append_log(0, b"one\ntw")
    pair.directory.append_samples(0, "rank-0.jsonl", step)

    def play(talk: Talk) -> None:
        request = talk.received.get(timeout=DEADLINE_S)
        assert talk.verb == "follow"
        offsets = {"log": 6, "samples/rank-0.jsonl": len(step)} if talk.node.name == "a" else {}
        assert request["offsets"] == offsets
        talk.say(HELLO, RUNNING)
        talk.chunk("log", offsets.get("log", 0), b"o\nthree\n")
        talk.end()

    run = pair.run(play)
    assert run.status == "succeeded"
    assert pair.directory.log_path(0).read_bytes() == b"one\ntwo\nthree\n"
    assert pair.seen[-1].nodes[0].step == 3


def test_who_only_watches_leaves_the_run_alone(tmp_path: Path) -> None:
    pair = Execution(tmp_path, "a", "b", lease_s=None, attach=True, leave_on_stop=True)

    def play(talk: Talk) -> None:
        talk.say(HELLO, RUNNING)
        pair.stop.ask("SIGINT")
        talk.closed_by_us.wait(DEADLINE_S)
        assert all(order.get("op") != "stop" for order in talk.orders())
        talk.hang_up()

    assert pair.run(play).status == "running"


@pytest.mark.parametrize("clock_s", [-3600.0, -5.0, 0.0, 5.0, 3600.0])
@pytest.mark.parametrize(("is_ours", "status"), [(False, "stopped"), (True, "failed")])
def test_a_peer_that_fails_once_another_controller_has_stopped_a_node_is_a_consequence_whatever_the_clocks_say(
    tmp_path: Path, clock_s: float, status: str, *, is_ours: bool
) -> None:
    def play(talk: Talk) -> None:
        talk.say({**HELLO, "time_s": time.time()}, RUNNING)
        if talk.node.name == "b":
            talk.end(exit_code=1)
            return
        order = talk.order("stop")["order"] if is_ours else "another"
        ended_s = time.time() + clock_s
        talk.end(exit_code=None, signal="SIGTERM", cause="stopped", ended_s=ended_s, stopped_by=order)

    assert Execution(tmp_path, "a", "b").run(play).status == status


def test_a_node_that_a_signal_stopped_before_we_asked_it_was_stopped(tmp_path: Path) -> None:
    def play(talk: Talk) -> None:
        talk.say(HELLO, RUNNING)
        if talk.node.name == "a":
            talk.end(exit_code=None, signal="SIGTERM", cause="stopped")
            return
        talk.order("stop")
        talk.end(exit_code=1)

    assert Execution(tmp_path, "a", "b").run(play).status == "stopped"


def test_who_only_reads_stops_nothing_when_a_node_fails(tmp_path: Path) -> None:
    pair = Execution(tmp_path, "a", "b", lease_s=None, attach=True)
    failed = threading.Event()

    def play(talk: Talk) -> None:
        talk.say(HELLO, RUNNING)
        if talk.node.name == "a":
            talk.end(exit_code=1)
            failed.set()
            return
        assert failed.wait(DEADLINE_S)
        time.sleep(1.0)
        assert [order for order in talk.orders() if order.get("op") == "stop"] == []
        talk.end()

    assert pair.run(play).status == "failed"


@pytest.mark.parametrize("clock_s", [-3600.0, -5.0, -0.5, 0.0, 3600.0])
def test_which_worker_raised_first_is_told_by_when_it_came_whatever_the_clock_of_its_node_says(
    tmp_path: Path, clock_s: float
) -> None:
    first = threading.Event()
    pair = Execution(tmp_path, "a", "b")

    def raise_on(talk: Talk, rank: int, message: str) -> None:
        said = {"kind": "exception", "rank": rank, "time_s": time.time(), "type": "ValueError", "message": message}
        if talk.node.name == "a":
            said["time_s"] = time.time() + clock_s
        talk.chunk(f"samples/rank-{rank}.jsonl", 0, json.dumps(said).encode() + b"\n")

    def play(talk: Talk) -> None:
        talk.say({**HELLO, "time_s": time.time()}, RUNNING)
        if talk.node.name == "b":
            raise_on(talk, 2, "the first")
            time.sleep(0.5)
            first.set()
            talk.end(exit_code=1)
            return
        assert first.wait(DEADLINE_S)
        raise_on(talk, 0, "the second")
        talk.end(exit_code=1)

    failure = pair.run(play).first_failure
    assert failure is not None
    assert (failure.node, failure.message) == ("b", "rank 2 raised ValueError: the first")
    assert failure.consequences == ()
