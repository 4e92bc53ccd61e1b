from __future__ import annotations

import os
import signal
import subprocess
import time

from .localnode import PYTHON, SLEEPER, LocalNode, is_alive

STUBBORN = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SLEEPER
POLITE = """
import signal, sys, time
def leave(*_):
    print("saved", flush=True)
    sys.exit(5)
signal.signal(signal.SIGTERM, leave)
print("ready", flush=True)
time.sleep(600)
"""
# Has a new child whenever one is killed, and dies only when both go at once.
HYDRA = f"""
import signal, subprocess, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
while True:
    subprocess.run([*{PYTHON!r}, "-c", "import time; time.sleep(600)", __file__], start_new_session=True)
"""


def test_a_job_may_use_its_grace_to_save(node: LocalNode) -> None:
    node.start(POLITE)
    answer = node.stop(10)
    assert (answer["cause"], answer["exit_code"], answer["signal"]) == ("stopped", 5, None)
    assert answer["processes_left"] == 0
    assert (node.run_dir() / "log").read_bytes().endswith(b"saved\n")


def test_who_ignores_term_is_killed_after_the_grace_and_not_before(node: LocalNode) -> None:
    node.start(STUBBORN)
    began = time.monotonic()
    answer = node.stop(1.0)
    assert time.monotonic() - began >= 1.0
    assert (answer["cause"], answer["signal"], answer["processes_left"]) == ("stopped", "SIGKILL", 0)
    node.expect_empty()


def test_a_job_that_keeps_having_children_ends_all_the_same(node: LocalNode) -> None:
    node.start(HYDRA)
    assert node.stop(0.5)["processes_left"] == 0
    node.expect_empty()


def test_a_suspended_job_ends_within_its_grace(node: LocalNode) -> None:
    node.start(POLITE)
    os.kill(node.status()["job_pid"], signal.SIGSTOP)
    assert node.stop(10)["exit_code"] == 5


def test_a_second_order_in_a_hurry_shortens_the_grace_of_the_first(node: LocalNode) -> None:
    node.start(STUBBORN)
    began = time.monotonic()
    with node.follow() as talk:
        talk.send({"op": "stop", "grace_s": 60})
        talk.read_until(kind="status", state="stopping")
        talk.send({"op": "stop", "grace_s": 0.2})
        end = talk.read_all()[-1]
    assert (end["kind"], end["cause"], end["signal"]) == ("end", "stopped", "SIGKILL")
    assert time.monotonic() - began < 15


def test_a_run_that_has_ended_is_reported_as_it_ended(node: LocalNode) -> None:
    node.run(["false"])
    answer = node.stop()
    assert (answer["cause"], answer["exit_code"], answer["processes_left"]) == ("exited", 1, 0)


def test_an_unknown_run_is_swept_by_its_id_and_by_nothing_less(node: LocalNode) -> None:
    argv = node.script(SLEEPER)
    env = {**node.env, "MULTINODE_RUN_ID": "r-1"}
    with (
        subprocess.Popen(argv, env=env, stdout=subprocess.PIPE) as stray,
        subprocess.Popen(argv, env={**env, "MULTINODE_RUN_ID": "r-10"}, stdout=subprocess.PIPE) as other,
    ):
        for process in (stray, other):
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
        answer = node.stop(run_id="r-1")
        assert (answer["cause"], answer["processes_left"]) == ("unknown", 0)
        assert stray.wait(10) == -signal.SIGTERM
        assert other.poll() is None
        other.kill()


def test_a_run_whose_watchers_are_dead_is_ended_by_the_verb(node: LocalNode) -> None:
    node.start(SLEEPER)
    node.kill_watchers()
    answer = node.stop()
    assert (answer["cause"], answer["processes_left"]) == ("supervisor_lost", 0)
    assert node.status()["state"] == "ended"
    node.expect_empty()


def test_a_run_whose_watchers_died_and_whose_files_were_taken_away_is_ended_all_the_same(node: LocalNode) -> None:
    node.start(SLEEPER)
    node.kill_watchers()
    (node.run_dir() / "supervisor.json").unlink()
    assert node.stop()["processes_left"] == 0
    node.expect_empty()


def test_a_pid_that_means_another_process_by_now_is_no_watcher(node: LocalNode) -> None:
    node.start(SLEEPER)
    watcher_file = node.run_dir() / "supervisor.json"
    text, pid = watcher_file.read_text(), node.watcher()["pid"]
    node.kill_watchers()
    # This very process stands for one that got the pid anew; it must neither count as alive nor be touched.
    watcher_file.write_text(text.replace(f'"pid": {pid}', f'"pid": {os.getpid()}'))
    assert node.stop()["cause"] == "supervisor_lost"
    assert is_alive(os.getpid())
