from __future__ import annotations

import time
from pathlib import Path

import pytest

from multinode.errors import AuthError, ContactLost, NodeFailed
from multinode.launch.session import Chunk, Ended, Event, Hello, Message, Status
from multinode.launch.tracker import Tracker
from multinode.store.run_directory import RunDirectory

from .scripted import make_plan

STEP = b'{"kind":"step","rank":%d,"step":%d,"time_s":1,"mono_ns":1,"step_time_us":1000}\n'
RAISED = b'{"kind":"exception","rank":2,"time_s":1,"type":"ValueError","message":"x"}\n'


@pytest.fixture
def tracker(tmp_path: Path) -> Tracker:
    return Tracker(make_plan("a", "b"), RunDirectory.create(tmp_path, "r"))


def told(message: Message, *, node_rank: int = 1) -> Event:
    return Event(node_rank=node_rank, message=message, over=isinstance(message, Ended))


def test_a_nodes_state_follows_what_it_says_and_the_others_is_untouched(tracker: Tracker) -> None:
    assert [node.state for node in tracker.progress.nodes] == ["waiting", "waiting"]
    told_in_turn: list[tuple[Message, str]] = [(Hello(time_s=0), "starting"), (Status(state="running"), "running")]
    for message, state in told_in_turn:
        tracker.take(told(message))
        assert [node.state for node in tracker.progress.nodes] == ["waiting", state]
        assert [node.state for node in tracker.node_runs] == ["waiting", state]


def test_until_the_first_step_a_node_shows_what_it_does_and_then_no_more(tracker: Tracker) -> None:
    worker = b'{"kind":"worker","rank":2,"local_rank":0,"world_size":4,"time_s":1,"source":"trainer"}\n'
    told_in_turn: list[tuple[Message, str]] = [
        (Hello(time_s=0), "starting"),
        (Status(state="running"), "running, no output yet"),
        (Chunk(file="log", offset=0, data=b"Loading checkpoint shards:  50%"), "running, model load 50%"),
        (Chunk(file="samples/rank-2.jsonl", offset=0, data=worker), "running, first step"),
        (Chunk(file="samples/rank-2.jsonl", offset=0, data=STEP % (2, 1)), "running"),
        (Chunk(file="log", offset=0, data=b"Loading checkpoint shards:  50%"), "running"),
        (Ended(state="ended", cause="exited", exit_code=0), "done"),
    ]
    assert tracker.progress.nodes[1].doing == "connecting"
    for message, doing in told_in_turn:
        tracker.take(told(message))
        assert tracker.progress.nodes[1].doing == doing


def test_a_run_that_is_taken_up_shows_what_its_log_said_last(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path, "r")
    directory.append_log(1, b"Tokenizing\n")
    tracker = Tracker(make_plan("a", "b"), directory)
    tracker.take(told(Status(state="running")))
    assert tracker.progress.nodes[1].doing == "running, tokenisation"


@pytest.mark.parametrize(
    ("end", "words", "failed"),
    [
        (Ended(state="ended", cause="exited", exit_code=0), "done", False),
        (Ended(state="ended", cause="exited", exit_code=3), "exit code 3", True),
        (Ended(state="ended", cause="exited", signal="SIGSEGV"), "ended by SIGSEGV", True),
        (Ended(state="ended", cause="stopped", signal="SIGTERM"), "stopped", True),
        (Ended(state="ended", cause="lease_expired", signal="SIGTERM"), "lease expired", True),
        (Ended(state="ended", cause="supervisor_lost"), "supervisor lost", True),
    ],
)
def test_an_end_is_told_in_few_words(tracker: Tracker, end: Ended, words: str, *, failed: bool) -> None:
    tracker.take(told(end))
    assert tracker.progress.nodes[1].message == words
    assert tracker.any_failed is failed
    assert not tracker.all_over
    tracker.take(told(Ended(state="ended", cause="exited", exit_code=0), node_rank=0))
    assert tracker.all_over


def test_steps_become_progress_and_exceptions_become_evidence(tracker: Tracker) -> None:
    tracker.take(told(Chunk(file="samples/rank-2.jsonl", offset=0, data=STEP % (2, 1) + STEP % (2, 2))))
    tracker.take(told(Chunk(file="samples/rank-2.jsonl", offset=9, data=RAISED)))
    assert tracker.progress.nodes[1].step == 2
    first, second = tracker.evidence()
    assert first.exceptions == []
    assert [sample.type for sample in second.exceptions] == ["ValueError"]


def test_the_log_becomes_evidence(tracker: Tracker) -> None:
    tracker.take(told(Chunk(file="log", offset=0, data=b"boom\n")))
    assert [evidence.log for evidence in tracker.evidence()] == ["", "boom\n"]


def test_the_clock_offset_is_the_nodes_clock_minus_ours(tracker: Tracker) -> None:
    tracker.take(told(Hello(time_s=time.time() + 3600)))
    offset_s = tracker.evidence()[1].clock_offset_s
    assert offset_s is not None
    assert 3590 < offset_s <= 3600


def test_contact_that_comes_back_leaves_no_error_behind(tracker: Tracker) -> None:
    tracker.take(told(Status(state="running")))
    tracker.take(Event(node_rank=1, error=ContactLost("silent")))
    assert "reconnecting" in tracker.progress.nodes[1].message
    assert not tracker.any_failed
    tracker.take(told(Hello(time_s=0)))
    tracker.take(told(Status(state="running")))
    assert (tracker.progress.nodes[1].message, tracker.evidence()[1].error) == ("", None)


@pytest.mark.parametrize("error", [NodeFailed("/work does not exist"), AuthError("refused")])
def test_an_error_before_anything_was_asked_means_that_nothing_started(
    tracker: Tracker, error: NodeFailed | AuthError
) -> None:
    tracker.take(Event(node_rank=1, error=error, over=True))
    assert (tracker.node_runs[1].state, tracker.node_runs[1].cause) == ("ended", "not_started")
    assert tracker.any_failed


def test_an_error_of_a_running_node_means_that_it_is_lost(tracker: Tracker) -> None:
    tracker.take(told(Status(state="running")))
    tracker.take(Event(node_rank=1, error=NodeFailed("no such run"), over=True))
    assert (tracker.node_runs[1].state, tracker.node_runs[1].cause) == ("lost", None)


def test_giving_up_loses_whoever_has_not_ended(tracker: Tracker) -> None:
    tracker.take(told(Ended(state="ended", cause="stopped"), node_rank=0))
    tracker.note_stopping()
    assert [node.state for node in tracker.progress.nodes] == ["ended", "stopping"]
    tracker.give_up()
    assert [node.state for node in tracker.node_runs] == ["ended", "lost"]
    assert tracker.evidence()[1].error is not None


def test_why_a_job_was_not_started_is_the_evidence_of_its_node(tracker: Tracker) -> None:
    message = "the prelude ended with exit code 1, and the job was not started: false"
    tracker.take(told(Ended(state="ended", cause="not_started", exit_code=1, message=message)))
    assert tracker.progress.nodes[1].message == "not started"
    evidence = tracker.evidence()[1]
    assert evidence.error is not None
    assert (evidence.error.node, evidence.error.message) == ("b", message)
