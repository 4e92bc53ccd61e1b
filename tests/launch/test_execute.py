from __future__ import annotations

import json
import re
import threading
import time
from pathlib import Path

import pytest

from multinode.records.progress import RunProgress
from multinode.records.run import Run

from .scripted import DEADLINE_S, HELLO, RUNNING, Execution, Talk


@pytest.fixture
def pair(tmp_path: Path) -> Execution:
    return Execution(tmp_path, "a", "b")


def test_a_run_that_goes_well_succeeds_and_all_of_it_is_kept(pair: Execution) -> None:
    both_run = threading.Barrier(2)
    samples = b'{"kind":"step","rank":0,"step":9,"time_s":1,"mono_ns":1}\n'

    def play(talk: Talk) -> None:
        assert talk.verb == "supervise"
        talk.say(HELLO, RUNNING)
        both_run.wait(DEADLINE_S)
        talk.chunk("log", 0, b"hello from ")
        talk.chunk("log", 11, talk.node.name.encode() + b"\xff\n")
        talk.chunk("samples/rank-0.jsonl", 0, samples)
        talk.say({"kind": "alive", "time_s": 0.0}, {"kind": "note", "message": "the lease could not be renewed"})
        talk.end()

    run = pair.run(play)
    assert (run.status, run.first_failure, run.world_size) == ("succeeded", None, 4)
    assert [(node.name, node.state, node.status.cause, node.status.exit_code) for node in run.nodes] == [
        ("a", "ended", "exited", 0),
        ("b", "ended", "exited", 0),
    ]
    assert run.ended_s is not None
    assert pair.directory.read("run.json", Run) == run
    assert [pair.directory.log_path(rank).read_bytes() for rank in (0, 1)] == [
        b"hello from a\xff\n",
        b"hello from b\xff\n",
    ]
    assert list(pair.directory.sample_lines(0)) == [samples]
    assert [node.message for node in pair.seen[-1].nodes] == ["done", "done"]
    assert pair.seen[-1].nodes[0].step == 9


def test_each_node_is_asked_for_its_own_part_of_the_plan(pair: Execution) -> None:
    requests = {}

    def play(talk: Talk) -> None:
        requests[talk.node.name] = talk.received.get(timeout=DEADLINE_S)
        talk.say(HELLO)
        talk.end()

    pair.run(play)
    assert [requests[name]["run_id"] for name in "ab"] == ["r.0", "r.1"]
    for name in "ab":
        request = requests[name]
        command = request["command"]
        assert command["argv"] == ["train", name]
        assert (command["env"], command["unset"], command["cwd"]) == ({"A": "b c"}, ["RANK"], "/work")
        assert (request["lease_s"], request["grace_s"], request["detach"]) == (60.0, 5.0, False)
        assert request["place"]["endpoint"]["ifname"] == "ens1f0"


def test_when_the_job_fails_on_one_node_the_others_are_asked_to_stop(pair: Execution) -> None:
    def play(talk: Talk) -> None:
        talk.say(HELLO, RUNNING)
        if talk.node.name == "b":
            talk.chunk("log", 0, b"loading\nMemoryError\n")
            talk.end(exit_code=1)
            return
        assert talk.stop()["grace_s"] == 5.0

    run = pair.run(play)
    assert run.status == "failed"
    assert run.first_failure is not None
    assert (run.first_failure.node, run.first_failure.exit_code) == ("b", 1)
    assert run.first_failure.log_tail == "loading\nMemoryError"
    assert [node.status.cause for node in run.nodes] == ["stopped", "exited"]


def test_the_others_are_stopped_before_the_failed_node_has_sent_its_whole_log(pair: Execution) -> None:
    stopped = threading.Event()

    def play(talk: Talk) -> None:
        talk.say(HELLO, RUNNING)
        if talk.node.name == "b":
            talk.say({"kind": "status", "state": "ended", "exit_code": 1, "cause": "exited"})
            assert stopped.wait(DEADLINE_S)
            talk.end(exit_code=1)
            return
        talk.order("stop")
        stopped.set()
        talk.end(exit_code=None, signal="SIGTERM", cause="stopped")

    assert pair.run(play).status == "failed"


def test_a_node_that_refuses_to_start_is_the_failure_and_the_others_are_stopped(pair: Execution) -> None:
    def play(talk: Talk) -> None:
        if talk.node.name == "a":
            talk.say({"kind": "error", "message": "/work does not exist", "hint": "mkdir /work"})
            return
        talk.say(HELLO, RUNNING)
        talk.stop()

    run = pair.run(play)
    assert run.status == "failed"
    assert run.nodes[0].status.cause == "not_started"
    assert run.first_failure is not None
    assert (run.first_failure.node, run.first_failure.message, run.first_failure.hint) == (
        "a",
        "/work does not exist",
        "a says: mkdir /work",
    )


def test_a_lost_contact_is_found_again_where_it_broke_off(pair: Execution) -> None:
    reconnecting = threading.Event()

    def play(talk: Talk) -> None:
        request = talk.received.get(timeout=DEADLINE_S)
        talk.say(HELLO, RUNNING)
        if talk.node.name == "a":
            assert reconnecting.wait(DEADLINE_S)
            talk.end()
        elif talk.verb == "supervise":
            talk.chunk("log", 0, b"one\n")
            talk.chunk("samples/node.jsonl", 0, b"{}\n")
            talk.chunk("log", 4, b"tw")
            talk.hang_up()
        else:
            assert talk.verb == "follow"
            assert request["run_id"] == "r.1"
            assert request["offsets"] == {"log": 6, "samples/node.jsonl": 3}
            talk.chunk("log", 6, b"o\n")
            talk.end()
            reconnecting.set()

    run = pair.run(play)
    assert run.status == "succeeded"
    assert pair.directory.log_path(1).read_bytes() == b"one\ntwo\n"
    told = re.compile(r"contact lost at \d\d:\d\d:\d\d, the job may be running; reconnecting")
    assert any(told.fullmatch(shown.nodes[1].message) for shown in pair.seen)


def test_each_loss_of_contact_has_its_own_time_to_be_mended(tmp_path: Path) -> None:
    alone = Execution(tmp_path, "a", lease_s=0.01, silence_s=1.2)

    def play(talk: Talk) -> None:
        known = talk.received.get(timeout=DEADLINE_S)["offsets"].get("log", 0)
        talk.say(HELLO, RUNNING)
        talk.chunk("log", known, b"x")
        if known == 3:
            talk.end()
        else:
            talk.hang_up()

    assert alone.run(play).status == "succeeded"
    assert alone.directory.log_path(0).read_bytes() == b"xxxx"


def test_a_lease_is_renewed_while_the_run_goes_on_and_at_once_when_contact_is_back(tmp_path: Path) -> None:
    alone = Execution(tmp_path, "a", lease_s=0.8)

    def play(talk: Talk) -> None:
        talk.say(HELLO, RUNNING)
        for _ in range(3):
            assert talk.order("lease") == {"op": "lease", "lease_s": 0.8}
        if talk.verb == "supervise":
            talk.hang_up()
        else:
            talk.end()

    assert alone.run(play).status == "succeeded"


def test_one_request_to_stop_gives_the_grace_period_and_a_second_one_none(pair: Execution) -> None:
    def play(talk: Talk) -> None:
        talk.say(HELLO, RUNNING)
        if talk.node.name == "a":
            pair.stop.ask("Ctrl-C")
            assert talk.order("stop")["grace_s"] == 5.0
            talk.say({"kind": "status", "state": "stopping"})
            pair.stop.ask("Ctrl-C")
        # The other node may come to hear of the first request only when there has been a second one.
        while talk.order("stop")["grace_s"] != 0.0:
            pass
        talk.end(exit_code=None, signal="SIGKILL", cause="stopped", processes_left=0)

    run = pair.run(play)
    assert (run.status, run.first_failure, run.stop_reason) == ("stopped", None, "Ctrl-C")
    assert [(node.state, node.status.processes_left) for node in run.nodes] == [("ended", 0), ("ended", 0)]


def test_a_node_without_contact_is_asked_to_stop_when_it_is_back(pair: Execution) -> None:
    def play(talk: Talk) -> None:
        talk.say(HELLO, RUNNING)
        if talk.node.name == "b" and talk.verb == "supervise":
            talk.hang_up()
            pair.stop.ask("Ctrl-C")
            return
        talk.stop()

    assert pair.run(play).status == "stopped"


def test_a_stop_that_another_controller_asked_for_is_no_failure(pair: Execution) -> None:
    def play(talk: Talk) -> None:
        talk.say(HELLO, RUNNING)
        talk.end(exit_code=None, signal="SIGTERM", cause="stopped")

    run = pair.run(play)
    assert (run.status, run.first_failure) == ("stopped", None)


def test_a_node_that_never_says_it_stopped_is_given_up_and_lost(
    tmp_path: Path,
) -> None:
    pair = Execution(tmp_path, "a", "b", verify_s=0.5)
    given_up = threading.Event()

    def play(talk: Talk) -> None:
        talk.say(HELLO, RUNNING)
        if talk.node.name == "a":
            pair.stop.ask("Ctrl-C")
            pair.stop.ask("Ctrl-C")
            talk.order("stop")
            talk.end(exit_code=None, signal="SIGKILL", cause="stopped")
        else:
            while not given_up.is_set():
                talk.say({"kind": "alive", "time_s": 0.0})
                given_up.wait(0.1)
            talk.hang_up()

    threading.Timer(3, given_up.set).start()
    began = time.monotonic()
    run = pair.run(play)
    assert time.monotonic() - began < DEADLINE_S
    assert run.status == "lost"
    assert [node.state for node in run.nodes] == ["ended", "lost"]
    assert run.first_failure is not None
    assert run.first_failure.node == "b"
    assert "did not confirm that it has stopped" in run.first_failure.message


def test_a_node_that_stays_away_longer_than_its_lease_is_lost(tmp_path: Path) -> None:
    alone = Execution(tmp_path, "a", lease_s=0.2, silence_s=0.5)

    sought_s = []

    def play(talk: Talk) -> None:
        if talk.verb == "supervise":
            talk.say(HELLO, RUNNING)
        else:
            sought_s.append(time.time())
        talk.hang_up()

    began_s = time.time()
    run = alone.run(play)
    assert run.status == "lost"
    assert run.first_failure is not None
    assert run.first_failure.message == "contact was lost and not restored: the cable is out"
    # Since the one word that came, whatever was tried later.
    assert began_s <= (run.nodes[0].lost_s or 0.0) <= sought_s[0]
    assert run.first_failure.time_s == run.nodes[0].lost_s
    assert re.match(r"lost at \d\d:\d\d:\d\d: the cable is out", alone.seen[-1].nodes[0].message)


def test_a_node_that_was_lost_while_it_started_may_be_running_and_is_no_refused_start(
    tmp_path: Path,
) -> None:
    alone = Execution(tmp_path, "a", lease_s=0.2, silence_s=0.5)
    run = alone.run(lambda talk: talk.hang_up())
    assert (run.status, run.nodes[0].state, run.nodes[0].status.cause) == ("lost", "lost", None)


def test_a_node_that_was_lost_while_it_started_and_says_that_nothing_runs_was_not_started(tmp_path: Path) -> None:
    alone = Execution(tmp_path, "a")

    def play(talk: Talk) -> None:
        if talk.verb == "supervise":
            talk.hang_up()
        else:
            talk.say({"kind": "error", "message": "no run r.0 on this node"})

    run = alone.run(play)
    assert (run.status, run.nodes[0].status.cause) == ("failed", "not_started")


@pytest.mark.parametrize(
    "lie",
    [
        {"kind": "hello"},
        {"kind": "hello", "time_s": "noon"},
        {"kind": "chunk"},
        {"kind": "chunk", "file": "log", "offset": 0, "data": "no base64!"},
        {"kind": "chunk", "file": "log", "offset": -1, "data": ""},
        {"kind": "chunk", "file": "log", "offset": 1000, "data": "eA=="},
        {"kind": "chunk", "file": ["log"], "offset": 0, "data": "eA=="},
        {"kind": "status", "state": "asleep"},
        {"kind": "status", "state": "ended", "exit_code": "zero"},
        {"kind": "end"},
        {"kind": "end", "state": "running"},
    ],
)
def test_a_node_that_lies_fails_the_run_and_breaks_nothing(pair: Execution, lie: dict[str, object]) -> None:
    def play(talk: Talk) -> None:
        talk.say(HELLO, RUNNING)
        if talk.node.name == "b":
            talk.say(lie)
            return
        talk.stop()

    run = pair.run(play)
    assert run.status == "lost"
    assert run.first_failure is not None
    assert run.first_failure.node == "b"


@pytest.mark.parametrize("data", [b"\xff\xfe\n", b'{"kind":"step","rank":"x"}\n', b"{" * 99_999 + b"\n", b"torn"])
def test_samples_that_are_none_are_kept_as_they_came_and_break_nothing(tmp_path: Path, data: bytes) -> None:
    alone = Execution(tmp_path, "a")

    def play(talk: Talk) -> None:
        talk.say(HELLO, RUNNING)
        talk.chunk("samples/rank-0.jsonl", 0, data)
        talk.end()

    assert alone.run(play).status == "succeeded"
    assert b"".join(alone.directory.sample_lines(0)) == data


def test_the_worker_that_raised_is_named_with_its_own_traceback(pair: Execution) -> None:
    sample = {
        "kind": "exception",
        "rank": 3,
        "time_s": 1.0,
        "type": "ValueError",
        "message": "bad data",
        "traceback": "Traceback ...",
    }

    def play(talk: Talk) -> None:
        talk.say(HELLO, RUNNING)
        if talk.node.name == "b":
            talk.chunk("samples/rank-3.jsonl", 0, json.dumps(sample).encode() + b"\n")
        talk.end(exit_code=1)

    failure = pair.run(play).first_failure
    assert failure is not None
    assert (failure.node, failure.rank, failure.message) == ("b", 3, "rank 3 raised ValueError: bad data")
    assert failure.log_tail == "Traceback ..."


def test_what_could_not_be_written_is_told_once_and_counted(pair: Execution) -> None:
    def play(talk: Talk) -> None:
        talk.say(HELLO, RUNNING)
        if talk.node.name == "a":
            pair.directory.log_path(0).mkdir()
            talk.chunk("log", 0, b"first\n")
            pair.wait_until(lambda progress: progress.troubles != ())
            pair.directory.log_path(0).rmdir()
            talk.chunk("log", 6, b"second\n")
        talk.end()

    run = pair.run(play)
    assert (run.status, run.missing_bytes) == ("succeeded", len(b"first\nsecond\n"))
    assert pair.directory.read("run.json", Run) == run
    assert not pair.directory.log_path(0).exists()
    (told,) = pair.seen[-1].troubles
    assert "Is a directory" in told
    assert "multinode attach r; the run continues" in told


def test_a_view_that_blocks_or_fails_and_a_defect_of_ours_delay_no_lease_and_end_no_run(tmp_path: Path) -> None:
    four = Execution(tmp_path, "a", "b", "c", "d", lease_s=0.8)
    released = threading.Event()

    def observe(_: RunProgress) -> None:
        released.wait(DEADLINE_S)
        raise MemoryError("a view")

    four.observe = observe

    def play(talk: Talk) -> None:
        talk.say(HELLO, RUNNING)
        if talk.node.name == "a":
            # Frozen: it neither reads nor writes.
            assert released.wait(DEADLINE_S)
            talk.end()
            return
        began = time.monotonic()
        # Three leases long, and more than is kept of what waits.
        offset = 0
        while time.monotonic() - began < 3 * 0.8:
            assert talk.order("lease")["lease_s"] == 0.8
            talk.chunk("log", offset, bytes(1 << 17))
            offset += 1 << 17
        released.set()
        talk.end()

    run = four.run(play)
    assert run.status == "succeeded"


def test_while_it_runs_the_record_on_disk_says_so(pair: Execution) -> None:
    found = []

    def play(talk: Talk) -> None:
        found.append(pair.directory.read("run.json", Run))
        talk.say(HELLO)
        talk.end()

    pair.run(play)
    assert {record.status for record in found if record is not None} == {"running"}
