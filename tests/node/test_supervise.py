"""Who survives what: the watchers, the job and its workers under every death that a node sees."""

from __future__ import annotations

import json
import os
import signal
import stat
import time
from pathlib import Path

import pytest

from tests.golden import Golden

from .localnode import PYTHON, SLEEPER, LocalNode, is_alive, wait_until


def test_a_job_runs_and_its_output_and_exit_code_arrive_exactly(node: LocalNode) -> None:
    payload = bytes(range(256)) * 3
    argv = node.script(f"import os, sys\nos.write(1, {payload!r})\nos.write(2, b'end')\nsys.exit(7)\n")
    with node.supervise(argv) as talk:
        records = talk.read_all()
        assert talk.process.wait() == 0
    assert talk.data("log") == payload + b"end"
    hello, end = records[0], records[-1]
    assert hello["kind"] == "hello"
    assert hello["run_dir"] == str(node.run_dir())
    assert hello["supervisor_pid"] == node.watcher()["pid"]
    assert (end["kind"], end["cause"], end["exit_code"], end["signal"]) == ("end", "exited", 7, None)
    assert end["processes_left"] == 0
    assert end["ended_s"] >= end["started_s"]
    assert (node.run_dir() / "agent.err").read_bytes() == b""


@pytest.mark.parametrize("code", [0, 3])
def test_what_nccl_warned_of_comes_home_where_the_job_did_not_end_well(node: LocalNode, code: int) -> None:
    argv = node.script(
        "import os, sys\n"
        "with open(os.environ['MULTINODE_RUN_DIR'] + '/nccl.a.7.log', 'w') as file:\n"
        "    file.write('a:7:9 [0] NCCL INFO ring\\na:7:9 [0] x.cc:1 NCCL WARN socket: refused\\n')\n"
        f"sys.exit({code})\n"
    )
    with node.supervise(argv) as talk:
        talk.read_all()
    records = [json.loads(line) for line in talk.data("samples/nccl.jsonl").splitlines()]
    told = [(record["kind"], record["message"]) for record in records]
    assert told == ([("nccl_warning", "a:7:9 [0] x.cc:1 NCCL WARN socket: refused")] if code else [])


def test_the_environment_is_what_was_asked_for(node: LocalNode) -> None:
    argv = node.script("import json, os, sys\nprint(json.dumps([dict(os.environ), sys.argv[1:], os.getcwd()]))\n")
    tricky = "a 'b' \"c\"\n$(touch injected) `id`; echo \\"
    request = node.request(
        [*argv, tricky, "--out={run_dir}/x"],
        env={"TRICKY": tricky, "WHERE": "{run_dir}/cfg.yaml", "EMPTY": ""},
        unset=["RANK", "PET_*"],
        cwd="~/work",
        path_first="~/bin",
        profile=True,
    )
    (node.home / "work").mkdir()
    ssh_env = {"RANK": "3", "RANKING": "kept", "PET_NNODES": "9", "PYTHONPATH": "/mine"}
    code, _ = node.call("supervise", {**request, "detach": True}, env=ssh_env)
    assert code == 0
    node.wait_for_end()
    run_dir = str(node.run_dir())
    env, arguments, cwd = json.loads((node.run_dir() / "log").read_text())
    assert arguments == [tricky, f"--out={run_dir}/x"]
    assert cwd == str(node.home / "work")
    assert env["TRICKY"] == tricky
    assert env["WHERE"] == f"{run_dir}/cfg.yaml"
    assert env["EMPTY"] == ""
    assert env["RANKING"] == "kept"
    assert "RANK" not in env
    assert "PET_NNODES" not in env
    assert env["PATH"].split(":")[0] == str(node.home / "bin")
    assert env["MULTINODE_RUN_ID"] == "r"
    assert env["MULTINODE_RUN_DIR"] == run_dir
    assert env["MULTINODE_SAMPLES"] == f"{run_dir}/samples"
    assert "MULTINODE_FAILURES_ONLY" not in env
    instrument, mine = env["PYTHONPATH"].split(":")
    assert instrument.endswith(".pyz/multinode_agent/worker/start")
    assert mine == "/mine"
    assert not list(node.home.rglob("injected"))


def test_without_instrumentation_the_interpreter_is_left_alone(node: LocalNode) -> None:
    argv = node.script("import os\nprint(sorted(n for n in os.environ if n in ('PYTHONPATH', 'MULTINODE_SAMPLES')))\n")
    assert node.run(argv).data("log") == b"[]\n"


def test_a_measurement_of_ours_records_failures_alone(node: LocalNode) -> None:
    argv = node.script("import os\nprint(os.environ['MULTINODE_FAILURES_ONLY'])\n")
    assert node.run(argv, profile=True, failures_only=True).data("log") == b"1\n"


def test_a_program_is_found_along_path_first(node: LocalNode) -> None:
    (node.home / "bin").mkdir()
    program = node.home / "bin" / "trainer"
    program.write_text("#!/bin/sh\necho mine\n")
    program.chmod(0o755)
    assert node.run(["trainer"], path_first="~/bin").data("log") == b"mine\n"


def test_files_are_private_and_the_umask_of_the_job_is_the_users(node: LocalNode) -> None:
    argv = node.script("open('checkpoint', 'w').close()\n")
    files = [{"path": "conf/job.yaml", "text": "model: \u00e9\n"}]
    request = node.request(argv, files=files, env={"TOKEN": "secret"})
    with node.talk("supervise", request, umask=0o022) as talk:
        talk.read_all()
    run_dir = node.run_dir()
    assert (run_dir / "conf/job.yaml").read_text(encoding="utf-8") == "model: \u00e9\n"
    for path in [run_dir, *run_dir.rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    assert stat.S_IMODE((node.home / "checkpoint").stat().st_mode) == 0o644


def test_what_cannot_be_started_is_refused_and_nothing_is_left(node: LocalNode, golden: Golden) -> None:
    node.run(["true"], run_id="once")
    true = ["true"]
    requests = {
        **{
            f"a file at {path!r}": node.request(true, files=[{"path": path, "text": "x"}])
            for path in ("../evil", "/tmp/evil", "a/../../evil", "status.json", "")
        },
        **{f"run id {run_id!r}": node.request(true, run_id) for run_id in ("../r", "a/b", "", ".hidden", "a b")},
        "a run id that was used": node.request(true, "once"),
        "no such directory": node.request(true, cwd="/no/such/dir"),
        "no such program": node.request(["no-such-program"]),
        "no such script": node.request(["./absent.sh"]),
        "an argument with NUL": node.request(["true", "a\0b"]),
        "a variable with =": node.request(true, env={"A=B": "c"}),
    }
    told = "".join(f"# {case}\n  {node.error('supervise', request)}\n" for case, request in requests.items())
    golden.check("supervise_refused.txt", told.replace(str(node.home), "HOME"))
    assert not node.run_dir().exists()
    assert not list(node.home.rglob("evil"))


def test_a_program_that_the_kernel_refuses_ends_as_not_started(node: LocalNode) -> None:
    program = node.home / "garbage"
    program.write_bytes(b"\x00garbage")
    program.chmod(0o755)
    end = node.run([str(program)]).records[-1]
    assert (end["kind"], end["cause"], end["exit_code"], end["job_pid"]) == ("end", "not_started", None, None)
    assert "Exec format error" in end["message"]
    assert "garbage" in end["message"]
    assert "Exec format error" in node.error("supervise", node.request([str(program)], "r2", detach=True))


def test_a_detached_run_goes_on_alone_and_can_be_followed_later(node: LocalNode) -> None:
    node.start(SLEEPER, lease_s=None)
    assert node.status()["state"] == "running"
    with node.follow() as talk:
        talk.read_log_until(b"ready\n")
        end = talk.stop()
    assert (end["kind"], end["cause"], end["signal"]) == ("end", "stopped", "SIGTERM")


def test_the_watchers_hold_nothing_of_the_connection(node: LocalNode) -> None:
    node.start(SLEEPER)
    watcher = node.watcher()
    job_pid = node.status()["job_pid"]
    assert (os.getsid(job_pid), os.getpgid(job_pid)) == (job_pid, job_pid)
    sessions = set()
    for pid in (watcher["pid"], watcher["sentinel_pid"]):
        files = {path.name: str(path.readlink()) for path in Path(f"/proc/{pid}/fd").iterdir()}
        held = {name: path for name, path in files.items() if path != "/dev/kmsg"}
        assert held == {"0": os.devnull, "1": os.devnull, "2": str(node.run_dir() / "agent.err")}
        assert str(Path(f"/proc/{pid}/cwd").readlink()) == "/"
        sessions.add(os.getsid(pid))
    assert sessions == {watcher["pid"], watcher["sentinel_pid"]}
    node.stop()


def test_nics_and_processor_are_sampled_before_during_and_after(node: LocalNode) -> None:
    records = node.samples("node.jsonl", ["sleep", "0.7"], ifnames=["lo", "nosuch0"], sample_interval_s=0.2)
    nics = [record for record in records if record["kind"] == "nic"]
    assert len(nics) >= 4
    assert {record["ifname"] for record in nics} == {"lo"}
    assert nics[0].keys() >= {"rx_bytes", "tx_packets", "rx_errors", "tx_dropped", "time_s", "mono_ns", "schema"}
    clock = [record["mono_ns"] for record in nics]
    assert clock == sorted(set(clock))
    assert nics[0]["time_s"] <= node.status()["ended_s"] - 0.7
    processor = [record for record in records if record["kind"] == "cpu"]
    assert processor[0]["busy_percent"] is None
    assert 0 <= processor[-1]["busy_percent"] <= 100
    assert processor[-1]["memory_available_gib"] > 0
    notes = [record["message"] for record in records if record["kind"] == "note"]
    assert len(notes) == 1
    assert "nosuch0" in notes[0]


def test_the_last_sample_is_taken_after_the_end_of_the_job(node: LocalNode) -> None:
    records = node.samples("node.jsonl", ["sleep", "0.3"], ifnames=["lo"], sample_interval_s=60.0)
    times = [record["mono_ns"] for record in records if record["kind"] == "nic"]
    assert times[-1] - times[0] >= 0.3e9


# As torchrun does: workers in sessions of their own, which the death of the parent does not touch.
TORCHRUN_LIKE = f"""
import subprocess, sys
worker = "import signal, time; signal.signal(15, signal.SIG_IGN); print('worker', flush=True); time.sleep(600)"
workers = [subprocess.Popen([*{PYTHON!r}, "-c", worker, __file__], start_new_session=True) for _ in range(2)]
for each in workers:
    each.wait()
"""

# As daemons do: two forks, a session of its own, and not one variable left that would tell whose it is.
DAEMON = f"""
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        source = "import time; print('daemon', flush=True); time.sleep(600)"
        os.execve({PYTHON[0]!r}, [*{PYTHON!r}, "-c", source, __file__], {{}})
    os._exit(0)
os.wait()
time.sleep(float(sys.argv[1]))
"""


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not is_alive(pid))


def test_workers_do_not_outlive_a_job_that_is_killed(node: LocalNode) -> None:
    node.start(TORCHRUN_LIKE, ready=b"worker worker", grace_s=0.3)
    os.kill(node.status()["job_pid"], signal.SIGKILL)
    status = node.wait_for_end()
    assert (status["cause"], status["signal"], status["exit_code"]) == ("exited", "SIGKILL", None)
    assert status["processes_left"] == 0
    node.expect_empty()


def test_a_daemon_without_environment_ends_with_its_job(node: LocalNode) -> None:
    node.start(DAEMON, "0.3", ready=b"daemon")
    status = node.wait_for_end()
    assert (status["cause"], status["exit_code"]) == ("exited", 0)
    node.expect_empty()


def test_the_sentinel_ends_the_run_when_the_supervisor_is_killed(node: LocalNode) -> None:
    node.start(TORCHRUN_LIKE, ready=b"worker worker", grace_s=0.3)
    kill(node.watcher()["pid"])
    status = node.wait_for_end()
    assert (status["cause"], status["signal"]) == ("supervisor_lost", "SIGTERM")
    assert "SIGKILL" in status["message"]
    assert status["processes_left"] == 0
    node.expect_empty()


def test_the_sentinel_finds_a_daemon_without_environment(node: LocalNode) -> None:
    node.start(DAEMON, "600", ready=b"daemon", grace_s=1)
    kill(node.watcher()["pid"])
    assert node.wait_for_end()["processes_left"] == 0
    node.expect_empty()


def test_the_run_goes_on_without_its_sentinel(node: LocalNode) -> None:
    node.start(SLEEPER)
    kill(node.watcher()["sentinel_pid"])
    answer = node.stop()
    assert (answer["cause"], answer["processes_left"]) == ("stopped", 0)


def test_a_killed_verb_leaves_the_run_alone_until_the_lease_runs_out(node: LocalNode) -> None:
    request = node.request(node.script(SLEEPER), lease_s=2.0)
    began = time.monotonic()
    with node.talk("supervise", request) as talk:
        talk.read_log_until(b"ready")
        talk.kill()
    assert node.status()["state"] == "running"
    status = node.wait_for_end()
    assert (status["cause"], status["signal"]) == ("lease_expired", "SIGTERM")
    assert time.monotonic() - began >= 2.0


def test_a_renewed_lease_keeps_the_run_alive(node: LocalNode) -> None:
    with node.supervise(node.script(SLEEPER), lease_s=1.0) as talk:
        began = time.monotonic()
        while time.monotonic() - began < 2.5:
            talk.read_until(kind="alive")
            talk.send({"op": "lease", "lease_s": 1.5})
        assert node.status()["state"] == "running"
        end = talk.read_all()[-1]
    assert (end["kind"], end["cause"]) == ("end", "lease_expired")


def test_word_from_a_controller_gives_no_lease_to_a_run_without_one(node: LocalNode) -> None:
    node.start(SLEEPER, lease_s=None)
    with node.follow() as talk:
        talk.send({"op": "lease", "lease_s": 0.0})
        for _ in range(2):
            talk.read_until(kind="alive")
    assert node.status()["state"] == "running"
    node.stop()


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_signals_of_a_terminal_do_not_reach_the_run(node: LocalNode, number: int) -> None:
    node.start(SLEEPER)
    for pid in (node.watcher()["pid"], node.watcher()["sentinel_pid"]):
        os.kill(pid, number)
    assert node.stop()["cause"] == "stopped"


def test_term_to_the_supervisor_stops_the_run(node: LocalNode) -> None:
    node.start(SLEEPER)
    os.kill(node.watcher()["pid"], signal.SIGTERM)
    assert node.wait_for_end()["cause"] == "stopped"


def test_the_signals_that_we_ignore_are_not_ignored_by_the_job(node: LocalNode) -> None:
    node.start(SLEEPER)
    lines = Path(f"/proc/{node.status()['job_pid']}/status").read_text().splitlines()
    masks = {line.split()[0]: int(line.split()[1], 16) for line in lines if line.startswith(("SigBlk", "SigIgn"))}
    # The interpreter that runs this job ignores SIGPIPE and SIGXFSZ by itself.
    own = 1 << (signal.SIGPIPE - 1) | 1 << (signal.SIGXFSZ - 1)
    assert masks["SigBlk:"] == 0
    assert masks["SigIgn:"] & ~own == 0
    node.stop()


def test_a_status_that_cannot_be_written_does_not_keep_the_run_from_being_stopped(node: LocalNode) -> None:
    node.start(SLEEPER)
    status = node.run_dir() / "status.json"
    job_pid = node.status()["job_pid"]
    status.unlink()
    (status / "in-the-way").mkdir(parents=True)
    os.kill(node.watcher()["pid"], signal.SIGTERM)
    wait_until(lambda: not is_alive(job_pid))
    (status / "in-the-way").rmdir()
    status.rmdir()
    wait_until(status.exists)
    assert node.wait_for_end()["cause"] == "stopped"


def test_the_watchers_leave_when_the_run_directory_is_removed(node: LocalNode) -> None:
    node.start("import time\nprint('ready', flush=True)\ntime.sleep(1)\n")
    node.run_dir().rename(node.home / "elsewhere")
    node.expect_empty()
