from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from multinode.errors import ContactLost
from multinode.launch.hang_watch import StallClock
from multinode.launch.session import Chunk, Ended, Event, Hello, Message, StatusReport
from multinode.records.run import Run, Stall, StallRecord
from tests.node.localnode import wait_until

from .scripted import DEADLINE_S, HELLO, RUNNING, Execution, Talk

SILENT_S = 0.5


def diagnosis(node: str, *, stopped: int | None = None) -> dict[str, Any]:
    """What a node answers: two workers, one of them perhaps stopped."""
    first = 0 if node == "a" else 2
    processes = [
        {"role": "worker", "pid": 200 + rank, "rank": rank, "state": "T" if rank == stopped else "S", "newer": 1}
        for rank in (first, first + 1)
    ]
    return {
        "kind": "diagnosis",
        "schema": 1,
        "time_s": 1.0,
        "processes": processes,
        "last_steps": [],
        "ras": {"is": "unknown", "reason": "no RAS"},
    }


class Hanging:
    """Nodes a and b whose job says one line and then nothing, until `go_on`; rank 3 is stopped on b."""

    def __init__(self, root: Path, *, stall_s: float = SILENT_S, **options: Any) -> None:
        self.execution = Execution(root, "a", "b", stall_s=stall_s, **options)
        self.asked: list[tuple[str, str]] = []
        self.go_on = threading.Event()
        self.error: str | None = None
        self.follow: Callable[[Talk], None] = self._go_on

    def play(self, talk: Talk) -> None:
        if talk.verb == "diagnose":
            request = talk.received.get(timeout=DEADLINE_S)
            self.asked.append((talk.node.name, request["run_id"]))
            if self.error is not None and talk.node.name == "b":
                talk.say({"kind": "error", "message": self.error, "hint": None})
            else:
                talk.say(diagnosis(talk.node.name, stopped=3))
            return
        talk.say(HELLO, RUNNING)
        talk.chunk("log", 0, b"loading\n")
        self.follow(talk)

    def run(self, follow: Callable[[Talk], None]) -> Run:
        """The run, in which both nodes do so once their job has said its line."""
        self.follow = follow
        return self.execution.run(self.play)

    def _go_on(self, talk: Talk) -> None:
        assert self.go_on.wait(DEADLINE_S)
        talk.chunk("log", 8, b"on\n")
        talk.end()

    def told(self) -> list[str]:
        """The sentence at each progress that was shown, once for each change."""
        words = [progress.stall.message if progress.stall else "" for progress in self.execution.seen]
        return [word for index, word in enumerate(words) if index == 0 or words[index - 1] != word]


def test_a_run_that_hangs_is_told_while_it_hangs_and_goes_on(tmp_path: Path) -> None:
    hanging = Hanging(tmp_path)

    def play(talk: Talk) -> None:
        if talk.verb != "diagnose" and talk.node.name == "a":
            talk.say(HELLO, RUNNING)
            wait_until(lambda: hanging.told()[-1:] not in ([], [""]))
            hanging.go_on.set()
            talk.chunk("log", 0, b"on\n")
            wait_until(lambda: hanging.told()[-1] == "")
            talk.end()
        else:
            hanging.play(talk)

    run = hanging.execution.run(play)
    sentence = "rank 3 on b is stopped (state T) by SIGSTOP"
    assert (run.status, run.first_failure) == ("succeeded", None)
    assert sorted(hanging.asked) == [("a", "r.0"), ("b", "r.1")]
    assert hanging.told() == ["", sentence, ""]
    (stall,) = run.stalls
    assert (stall.message, stall.node, stall.node_rank, stall.rank) == (sentence, "b", 1, 3)
    assert stall.hint == "resume it, on b: kill -CONT 203"
    assert SILENT_S <= stall.silent_s < DEADLINE_S
    assert stall.resumed_s is not None
    assert stall.resumed_s >= stall.time_s
    kept = hanging.execution.directory.read("stall.json", StallRecord)
    assert kept is not None
    assert kept.stalls == run.stalls
    assert [[process.pid for process in node.processes] for node in kept.nodes] == [[200, 201], [202, 203]]
    assert hanging.execution.directory.read("run.json", Run) == run


def test_one_standstill_is_told_once_and_the_next_one_again(tmp_path: Path) -> None:
    hanging = Hanging(tmp_path)

    def follow(talk: Talk) -> None:
        if talk.node.name == "b":
            wait_until(lambda: len(hanging.asked) == 2)
            # As long again without progress is the same standstill.
            time.sleep(2 * SILENT_S)
            assert len(hanging.asked) == 2
            talk.chunk("samples/rank-2.jsonl", 0, b'{"kind":"step","rank":2,"step":1,"time_s":1,"mono_ns":1}\n')
            wait_until(lambda: len(hanging.asked) == 4)
        else:
            wait_until(lambda: len(hanging.execution.seen) > 0 and len(hanging.asked) == 4)
        wait_until(lambda: len(hanging.told()) >= 4)
        talk.end()

    run = hanging.run(follow)
    assert run.status == "succeeded"
    assert len(run.stalls) == 2


def test_a_run_that_hangs_is_stopped_where_that_was_asked_for(tmp_path: Path) -> None:
    hanging = Hanging(tmp_path, on_stall="stop")

    def follow(talk: Talk) -> None:
        assert talk.stop()["grace_s"] == 5.0

    run = hanging.run(follow)
    assert run.status == "failed"
    failure = run.first_failure
    assert failure is not None
    assert (failure.node, failure.node_rank, failure.rank, failure.kind) == ("b", 1, 3, "hang")
    assert failure.message == "rank 3 on b is stopped (state T) by SIGSTOP"
    assert failure.hint == "resume it, on b: kill -CONT 203"
    assert len(run.stalls) == 1


def test_a_node_that_cannot_be_diagnosed_is_told_and_hides_nothing_of_the_others(tmp_path: Path) -> None:
    hanging = Hanging(tmp_path)
    hanging.error = "no such verb: diagnose"

    def follow(talk: Talk) -> None:
        wait_until(lambda: hanging.told()[-1:] not in ([], [""]))
        talk.end()

    run = hanging.run(follow)
    (stall,) = run.stalls
    # Of rank 0 and 1 nothing speaks against them.
    assert stall.message == "b did not report what its ranks are doing: no such verb: diagnose"
    kept = hanging.execution.directory.read("stall.json", StallRecord)
    assert kept is not None
    assert [(node.node, node.error is None) for node in kept.nodes] == [("a", True), ("b", False)]


@pytest.mark.parametrize("busy", ["a", "b"])
def test_a_job_of_which_only_one_node_speaks_does_not_hang(tmp_path: Path, busy: str) -> None:
    # Longer than a loaded machine keeps a thread waiting, and shorter than the node speaks.
    stall_s = 3.0
    hanging = Hanging(tmp_path, stall_s=stall_s)
    done = threading.Event()

    def follow(talk: Talk) -> None:
        if talk.node.name == busy:
            for line in range(30):
                talk.chunk("log", 8 + line, b".")
                time.sleep(stall_s / 20)
            done.set()
        assert done.wait(DEADLINE_S)
        talk.end()

    assert hanging.run(follow).stalls == ()
    assert hanging.asked == []


def test_without_a_stall_time_nobody_is_asked(tmp_path: Path) -> None:
    execution = Execution(tmp_path, "a", stall_s=None)

    def play(talk: Talk) -> None:
        assert talk.verb == "supervise"
        talk.say(HELLO, RUNNING)
        talk.chunk("log", 0, b"x")
        time.sleep(2 * SILENT_S)
        talk.end()

    assert execution.run(play).stalls == ()


def test_an_answer_that_comes_after_the_run_has_gone_on_is_not_told(tmp_path: Path) -> None:
    hanging = Hanging(tmp_path)
    went_on = threading.Event()

    def play(talk: Talk) -> None:
        if talk.verb == "diagnose":
            assert went_on.wait(DEADLINE_S)
        hanging.play(talk)

    def follow(talk: Talk) -> None:
        # What the controller has folded of this node shows in the log that it keeps.
        log = hanging.execution.directory.log_path(1)
        if talk.node.name == "b":
            wait_until(lambda: any(thread.name == "diagnose" for thread in threading.enumerate()))
            talk.chunk("log", 8, b"on\n")
            wait_until(lambda: log.read_bytes() == b"loading\non\n")
            went_on.set()
        wait_until(lambda: len(hanging.asked) == 2)
        talk.end()

    hanging.follow = follow
    assert hanging.execution.run(play).stalls == ()


def test_stalls_of_an_earlier_controller_are_kept_when_the_run_is_taken_up(tmp_path: Path) -> None:
    hanging = Hanging(tmp_path, attach=True)
    before = Stall(time_s=5.0, silent_s=300.0, message="rank 1 on a is stopped")
    hanging.execution.directory.write("stall.json", StallRecord(stalls=(before,), nodes=()))
    hanging.go_on.set()
    (stall,) = hanging.execution.run(hanging.play).stalls
    assert (stall.message, stall.silent_s, stall.resumed_s is not None) == (before.message, 300.0, True)


def test_a_run_that_is_stopped_while_it_hangs_ends_in_that_hang_whatever_its_job_says_then(tmp_path: Path) -> None:
    hanging = Hanging(tmp_path)

    def follow(talk: Talk) -> None:
        wait_until(lambda: hanging.told()[-1:] not in ([], [""]))
        if talk.node.name == "a":
            hanging.execution.stop.ask("SIGINT")
        talk.order("stop")
        talk.chunk("log", 8, b"Received 15 death signal\n")
        talk.end(cause="stopped", stopped_by=None)

    run = hanging.run(follow)
    assert (run.status, run.outcome) == ("stopped", "stopped by you")
    assert run.hang is not None
    assert (run.hang.rank, run.hang.resumed_s) == (3, None)


RUNS = StatusReport(state="running")


def clock(*said: tuple[float, int, Message]) -> StallClock:
    """A clock of two nodes that heard these: when, which node, what."""
    found = StallClock(2)
    for now, node_rank, message in said:
        found.take(Event(node_rank=node_rank, message=message), now)
    return found


def chunk(name: str) -> Chunk:
    return Chunk(file=name, offset=0, data=b"x")


def test_it_begins_when_the_job_runs_on_every_node() -> None:
    assert clock((0, 0, RUNS)).silent_s(100) == 0
    assert clock((0, 0, RUNS), (5, 1, RUNS)).silent_s(100) == 95


def test_it_begins_with_the_first_log_where_that_is_earlier() -> None:
    assert clock((0, 0, RUNS), (10, 0, chunk("log"))).silent_s(100) == 90


@pytest.mark.parametrize(
    ("message", "silent_s"),
    [
        (chunk("log"), 60),
        (chunk("samples/rank-3.jsonl"), 60),
        (chunk("samples/node.jsonl"), 100),
        (chunk("samples/gpu.jsonl"), 100),
        (Ended(state="ended"), 100),
    ],
)
def test_any_nodes_log_or_step_starts_it_anew_and_sampler_and_status_do_not(message: Message, silent_s: float) -> None:
    assert clock((0, 0, RUNS), (0, 1, RUNS), (40, 1, message)).silent_s(100) == silent_s


def test_it_stands_while_a_node_is_out_of_contact_and_begins_anew_after_that() -> None:
    found = clock((0, 0, RUNS), (0, 1, RUNS))
    found.take(Event(node_rank=1, error=ContactLost("gone")), 30)
    assert found.silent_s(100) == 0
    found.take(Event(node_rank=1, message=Hello(time_s=0)), 100)
    assert found.silent_s(130) == 30
