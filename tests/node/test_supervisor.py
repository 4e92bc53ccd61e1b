"""Who survives what: the watchers, the job and its workers under every death that a node sees."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from .localnode import PYTHON, SLEEPER, LocalNode, is_alive, wait_until

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
