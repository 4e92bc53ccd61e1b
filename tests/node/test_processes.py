from __future__ import annotations

import os
import signal
import subprocess

import pytest

from multinode.node.processes import Family, Process, find_process, is_running, parse_process, split_stat

from .localnode import PYTHON

# /proc/PID/stat of Linux 6.1; the name was set with prctl.
STAT = (
    b"4242 (a) R (b c)) S 1 4242 4242 0 -1 4194560 1100 0 0 0 3 1 0 0 20 0 1 0 987654 9000000 800 18446744073709551615 "
    b"1 1 0 0 0 0 0 16781312 134217730 0 0 0 17 1 0 0 0 0 0 0 0 0 0 0 0 0 0\n"
)


def sleeper(env: dict[str, str]) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [*PYTHON, "-c", "import time; print(flush=True); time.sleep(600)"], env=env, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"\n"
    return process


def test_a_name_with_parentheses_is_read_past() -> None:
    assert parse_process(4242, split_stat(STAT)) == Process(4242, 1, 987654, alive=True)


@pytest.mark.parametrize(("state", "threads", "alive"), [(b"Z", b"1", False), (b"Z", b"3", True), (b"D", b"1", True)])
def test_a_zombie_is_not_alive_unless_its_threads_are(state: bytes, threads: bytes, *, alive: bool) -> None:
    line = STAT.replace(b"c)) S", b"c)) " + state).replace(b" 20 0 1 0 ", b" 20 0 " + threads + b" 0 ")
    assert parse_process(4242, split_stat(line)).alive is alive


def test_a_signal_reaches_the_process_it_was_meant_for_only() -> None:
    with sleeper({}) as process:
        now = find_process(process.pid)
        assert now is not None
        now._replace(start_ticks=now.start_ticks - 1).send(signal.SIGKILL)
        assert not is_running(now.pid, now.start_ticks - 1)
        assert is_running(now.pid, now.start_ticks)
        now.send(signal.SIGTERM)
        assert process.wait(10) == -signal.SIGTERM
        now.send(signal.SIGTERM)


def test_a_family_is_who_descends_or_carries_the_exact_id() -> None:
    mark = "MULTINODE_RUN_ID"
    family = Family("r1", root=None, spare=())
    envs = [{mark: "r1"}, {mark: "r10"}, {"X": f"{mark}=r1"}, {"X_" + mark: "r1"}, {"A": "b", mark: "r1", "C": "d"}]
    processes = [sleeper(env) for env in envs]
    try:
        assert {found.pid for found in family.find()} == {processes[0].pid, processes[4].pid}
        descendants = {found.pid for found in Family("none", root=os.getpid(), spare=()).find()}
        assert {process.pid for process in processes} <= descendants
        spared = Family("r1", root=None, spare={processes[0].pid}).find()
        assert [found.pid for found in spared] == [processes[4].pid]
    finally:
        for process in processes:
            with process:
                process.kill()
