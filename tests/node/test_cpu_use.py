from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from multinode.node.processes import list_processes
from multinode.node.sample.sampler import Ticks, read_ticks
from tests.golden import Golden, raised

# Sleeps, works in a child that it waits for, in one that it leaves behind, and in one that still runs; then says so.
FAMILY = """
import os, sys, time
def work(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass
pid = os.fork()
if pid == 0:
    work(0.3)
    os._exit(0)
os.waitpid(pid, 0)
reader, writer = os.pipe()
if os.fork() == 0:
    if os.fork() == 0:
        work(0.2)
        os.write(writer, b".")
        time.sleep(60)
    os._exit(0)
os.wait()
os.read(reader, 1)
print("done", flush=True)
time.sleep(60)
"""
# A clock of all this, in a process that adopts orphans, as the supervisor does.
CLOCK = """
import os, signal, subprocess, sys
sys.path.insert(0, sys.argv[1])
from multinode.node.sample.sampler import JobClock
from multinode.node.processes import adopt_orphans
assert adopt_orphans()
spared = subprocess.Popen([sys.executable, "-c", "while True: pass"])
clock = JobClock(os.getpid(), {spared.pid})
before = clock.read_s()
job = subprocess.Popen([sys.executable, "-c", sys.stdin.read()], stdout=subprocess.PIPE)
job.stdout.readline()
during = clock.read_s() - before
job.kill()
job.wait()
after = clock.read_s() - before
spared.kill()
print(during, after)
for line in os.popen("ps -o pid= --ppid %d" % os.getpid()):
    try:
        os.kill(int(line), signal.SIGKILL)
    except ProcessLookupError:
        pass
"""


def test_a_job_is_all_its_processes_those_that_have_ended_too() -> None:
    root = str(Path(__file__).resolve().parents[2])
    argv = [sys.executable, "-I", "-c", CLOCK, root]
    done = subprocess.run(argv, input=FAMILY, capture_output=True, text=True, timeout=600, check=True)
    during, after = map(float, done.stdout.split())
    # Interpreters start in some hundredths of a second; a busy machine makes that more, and what is spared far more.
    assert 0.45 <= during <= 1.5
    assert 0.45 <= after <= during + 0.5


def test_reading_a_job_is_cheap_beside_reading_all_processes() -> None:
    from multinode.node.sample.sampler import JobClock

    children = [subprocess.Popen(["cat"], stdin=subprocess.PIPE) for _ in range(50)]
    try:
        clock = JobClock(children[0].pid, ())
        clock.read_s()
        began = time.process_time()
        for _ in range(20):
            clock.read_s()
        spent_s = (time.process_time() - began) / 20
        began = time.process_time()
        for _ in range(20):
            list_processes()
        assert spent_s < (time.process_time() - began) / 20
    finally:
        for child in children:
            child.communicate(timeout=600)


def test_guest_time_is_not_counted_twice(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    stat.write_text("cpu  100 5 50 800 20 1 4 20 70 3\ncpu0 1 2 3\n")
    assert read_ticks(str(stat)) == Ticks(all=1000, idle=820, iowait=20, steal=20)


def test_an_old_or_odd_kernel_is_an_error(tmp_path: Path, golden: Golden) -> None:
    stat = tmp_path / "stat"
    stat.write_text("cpu 1 2 3\n")
    errors = {"three columns": raised(ValueError, read_ticks, str(stat))}
    golden.check_errors("cpu_no_ticks", errors, tmp_path)
