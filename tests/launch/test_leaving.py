"""Runs that are left alone, and taken up again."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from .scripted import DEADLINE_S, HELLO, RUNNING, Execution, Talk


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
        talk.order("stop")
        talk.end(exit_code=None, signal="SIGTERM", cause="stopped")

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


@pytest.mark.parametrize(("since_s", "status"), [(-5.0, "stopped"), (5.0, "failed")])
def test_a_peer_that_fails_once_another_controller_has_stopped_a_node_is_a_consequence(
    tmp_path: Path, since_s: float, status: str
) -> None:
    def play(talk: Talk) -> None:
        talk.say({**HELLO, "time_s": time.time()}, RUNNING)
        if talk.node.name == "b":
            talk.end(exit_code=1)
            return
        talk.order("stop")
        talk.end(exit_code=None, signal="SIGTERM", cause="stopped", ended_s=time.time() + since_s)

    assert Execution(tmp_path, "a", "b").run(play).status == status
