from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
from pathlib import Path

from .localnode import SLEEPER, LocalNode, is_alive, wait_until

COUNTER = """
import os, time
samples = open(os.path.join(os.environ["MULTINODE_RUN_DIR"], "samples", "rank-0.jsonl"), "w")
for n in range(300):
    print("line", n, flush=True)
    samples.write('{"n": %d}\\n' % n)
    samples.flush()
    time.sleep(0.005)
"""
# Writes half a record, and the other half only when it is told to.
HALVES = """
import os, time
run_dir = os.environ["MULTINODE_RUN_DIR"]
samples = os.path.join(run_dir, "samples", "rank-0.jsonl")
with open(samples, "w") as file:
    file.write('{"n": 0}\\n{"n"')
    file.flush()
    print("half", flush=True)
    while not os.path.exists(os.path.join(run_dir, "tmp", "go")):
        time.sleep(0.01)
    file.write(': 1}\\n{"torn')
"""
MIB_64 = 64 << 20


def test_a_follower_that_comes_back_gets_neither_gap_nor_repeat(node: LocalNode) -> None:
    with node.supervise(node.script(COUNTER)) as first:
        first.read_log_until(b"line 50\n")
        first.kill()
    names = ["log", "samples/rank-0.jsonl"]
    got = {name: first.data(name) for name in names}
    offsets = {name: len(data) for name, data in got.items()}
    with node.follow(offsets=offsets) as second:
        end = second.read_all()[-1]
    assert (end["kind"], end["exit_code"]) == ("end", 0)
    whole = {name: got[name] + second.data(name, offsets[name]) for name in names}
    assert whole["log"] == b"".join(b"line %d\n" % n for n in range(300))
    assert [json.loads(line)["n"] for line in whole["samples/rank-0.jsonl"].splitlines()] == list(range(300))


def test_samples_come_in_whole_lines_until_the_end(node: LocalNode) -> None:
    with node.supervise(node.script(HALVES)) as talk:
        talk.read_log_until(b"half")
        for _ in range(2):
            talk.read_until(kind="alive")
        assert talk.data("samples/rank-0.jsonl") == b'{"n": 0}\n'
        (node.run_dir() / "tmp" / "go").touch()
        talk.read_all()
    assert talk.data("samples/rank-0.jsonl") == b'{"n": 0}\n{"n": 1}\n{"torn'


def test_a_record_longer_than_a_chunk_arrives_whole(node: LocalNode) -> None:
    source = (
        "import os\nopen(os.environ['MULTINODE_RUN_DIR'] + '/samples/rank-0.jsonl', 'w').write('x' * 200000 + '\\n')"
    )
    talk = node.run(node.script(source + "\nprint('ready', flush=True)\n"))
    assert talk.data("samples/rank-0.jsonl") == b"x" * 200000 + b"\n"


def test_a_big_backlog_streams_in_bounded_memory(node: LocalNode) -> None:
    argv = ["dd", "if=/dev/zero", "bs=1M", "count=64", "status=none"]
    code, _ = node.call("supervise", node.request(argv, detach=True))
    assert code == 0
    node.wait_for_end()
    peak_kib = 0
    with node.follow() as talk:
        while (record := talk.read()) is not None:
            if record["kind"] == "chunk" and record["file"] == "log":
                peak_kib = _peak_memory_kib(talk.process.pid) or peak_kib
    assert talk.data("log") == bytes(MIB_64)
    assert 0 < peak_kib < 40_000


def test_of_many_nodes_each_waits_before_it_speaks_and_obeys_at_once(node: LocalNode) -> None:
    with node.supervise(node.script(SLEEPER), poll_s=3600.0) as talk:
        talk.read_until(state="running")
        # From now on nothing but an order ends the wait.
        end = talk.stop()
    assert (end["kind"], end["cause"]) == ("end", "stopped")


def test_what_is_new_in_several_files_is_told_at_once(node: LocalNode) -> None:
    node.start(SLEEPER)
    samples = node.run_dir() / "samples"
    for rank in range(3):
        (samples / f"rank-{rank}.jsonl").write_text("{}\n")
    with node.talk("follow", {"run_id": "r", "offsets": {}, "poll_s": 3600.0}) as talk:
        names = [talk.read_until(kind="chunk")["file"] for _ in range(5)]
    assert names == ["log", "samples/node.jsonl", *(f"samples/rank-{rank}.jsonl" for rank in range(3))]
    node.stop()


def test_a_file_of_samples_with_a_strange_name_is_passed_over_and_noted_once(node: LocalNode, tmp_path: Path) -> None:
    node.start(SLEEPER)
    samples = node.run_dir() / "samples"
    secret = tmp_path / "secret"
    secret.write_text("token")
    for name in ("a b.jsonl", "..%2f.jsonl", f"{'x' * 120}.jsonl", "\u00e9.jsonl"):
        (samples / name).write_text("{}\n")
    (samples / "link.jsonl").symlink_to(secret)
    os.mkfifo(samples / "pipe.jsonl")
    with node.follow() as talk:
        end = talk.stop()
    assert end["kind"] == "end"
    assert {record["file"] for record in talk.records if record["kind"] == "chunk"} == {"log", "samples/node.jsonl"}
    records = [json.loads(line) for line in talk.data("samples/node.jsonl").splitlines()]
    notes = [record["message"] for record in records if record["kind"] == "note"]
    assert [note for note in notes if "are ignored" in note] == [
        "samples in '..%2f.jsonl' and 3 more are ignored: that is not the name of a samples file"
    ]


def test_it_shows_that_it_is_alive_every_second(node: LocalNode) -> None:
    with node.supervise(node.script(SLEEPER)) as talk:
        times = [talk.read_until(kind="alive")["time_s"] for _ in range(4)]
        talk.stop()
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert sum(gaps) / len(gaps) <= 1.1


def test_each_change_of_status_is_told_once(node: LocalNode) -> None:
    with node.supervise(node.script(SLEEPER)) as talk:
        talk.read_log_until(b"ready")
        talk.send({"op": "stop", "grace_s": 5})
        records = talk.read_all()
    statuses = [record for record in records if record["kind"] == "status"]
    states = [record["state"] for record in statuses]
    order = ["starting", "running", "stopping", "ended"]
    assert states == sorted(states, key=order.index)
    assert {"running", "ended"} <= set(states)
    assert all(earlier != later for earlier, later in itertools.pairwise(statuses))


def test_a_controller_that_goes_away_leaves_the_run_alone(node: LocalNode) -> None:
    with node.supervise(node.script(SLEEPER)) as talk:
        talk.read_log_until(b"ready")
        assert talk.hang_up() == 0
    assert node.status()["state"] == "running"
    assert is_alive(node.status()["job_pid"])
    node.stop()


def test_a_reader_that_goes_away_ends_the_verb_quietly(node: LocalNode, tmp_path: Path) -> None:
    node.start(SLEEPER)
    reader, writer = os.pipe()
    errors = tmp_path / "stderr"
    with errors.open("wb") as stderr, node.follow(stderr=stderr) as talk:
        talk.read_until(kind="hello")
        assert talk.process.stdout is not None
        # Closes our end of its stdout under the thread that reads it, which then finds the end of an empty pipe.
        os.dup2(reader, talk.process.stdout.fileno())
        os.close(writer)
        os.close(reader)
        assert talk.process.wait(10) == 1
    assert errors.read_bytes() == b""
    node.stop()


def test_what_is_no_order_is_passed_over(node: LocalNode) -> None:
    with node.supervise(node.script(SLEEPER)) as talk:
        for line in (b"not json\n", b"[1]\n", b'{"op": "dance"}\n', b"\n"):
            talk.send(line)
        end = talk.stop()
        assert end["cause"] == "stopped", end


def test_it_ends_a_run_whose_watchers_are_both_dead(node: LocalNode) -> None:
    with node.supervise(node.script(SLEEPER)) as talk:
        talk.read_log_until(b"ready")
        node.kill_watchers()
        end = talk.read_all()[-1]
    assert (end["kind"], end["cause"], end["processes_left"]) == ("end", "supervisor_lost", 0)
    assert node.status()["cause"] == "supervisor_lost"
    wait_until(lambda: not node.processes())


def test_a_reader_whose_file_system_does_not_answer_ends_no_run(node: LocalNode) -> None:
    node.start(SLEEPER)
    place = node.run_dir() / "supervisor.json"
    aside = place.rename(node.run_dir() / "aside.json")
    # What is there and cannot be read, as a file of a server that is away.
    place.mkdir()
    os.utime(node.run_dir() / "request.json", (0, 0))
    with node.follow() as talk:
        for _ in range(3):
            talk.read_until(kind="alive")
        assert is_alive(node.status()["job_pid"])
        # For a moment it is not there at all, which means nothing where a run is young.
        os.utime(node.run_dir() / "request.json")
        place.rmdir()
        aside.rename(place)
        assert talk.stop()["cause"] == "stopped"


def test_a_reader_whose_run_directory_is_taken_away_ends_no_run_and_hears_its_end(node: LocalNode) -> None:
    node.start(SLEEPER)
    job_pid = node.status()["job_pid"]
    with node.follow() as talk:
        talk.read_until(kind="alive")
        shutil.rmtree(node.run_dir())
        for _ in range(3):
            talk.read_until(kind="alive")
        assert is_alive(job_pid)
        os.kill(job_pid, signal.SIGKILL)
        assert talk.read_all()[-1]["kind"] == "end"


def test_a_run_that_is_not_there_is_an_error(node: LocalNode) -> None:
    assert "no run r" in node.error("follow", {"run_id": "r", "offsets": {}})


def _peak_memory_kib(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("VmHWM")), 0)
