"""How many collectives a worker has launched, kept where a diagnosis finds it; over real gloo."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from multinode.records.flight import decode_flight

from .gloo_pair import run_pair

COUNTED = """
import time
worker.hang._INTERVAL_S = 0.05
worker.hang.start_counting(FOLDER, RANK)
torch = begin()
alone = [torch.distributed.new_group([rank]) for rank in range(2)][RANK]
everybody = torch.distributed.new_group([0, 1])
for _ in range(3):
    torch.distributed.all_reduce(torch.ones(4))
torch.distributed.all_reduce(torch.ones(4), group=everybody)
# What not all workers take part in does not count.
for _ in range(RANK * 5):
    torch.distributed.all_reduce(torch.ones(4), group=alone)

def kept():
    with open(FOLDER + "/stacks/rank-%d.sequence" % RANK) as file:
        return file.read().split()

end = time.monotonic() + 60
while kept()[1:] != ["4"] and time.monotonic() < end:
    time.sleep(0.05)
tell([os.getpid(), *kept()])
"""


ASKED = """
import time
import multinode_agent.worker.flight
worker.hang._INTERVAL_S = 0.05
worker.hang.start_counting(FOLDER, RANK)
torch = begin()
pair = torch.distributed.new_group([0, 1], group_desc="tp")
for _ in range(40):
    torch.distributed.all_reduce(torch.ones(4))
torch.distributed.all_gather([torch.ones(3), torch.ones(3)], torch.ones(3), group=pair)

def answered():
    try:
        with open(FOLDER + "/stacks/rank-%d.flight" % RANK) as file:
            return file.read()
    except FileNotFoundError:
        return ""

with open(FOLDER + "/stacks/asked", "w") as file:
    file.write("question")
end = time.monotonic() + 60
while not answered() and time.monotonic() < end:
    time.sleep(0.05)
tell(answered())
"""


ENDS_WHILE_COUNTING = """
import atexit, sys, threading, types
from multinode.worker import hang
atexit.register(lambda: print([thread.name for thread in threading.enumerate()]))
counting = threading.Event()
def size():
    counting.set()
    return 2
sys.modules["torch.distributed.distributed_c10d"] = types.SimpleNamespace(
    is_initialized=lambda: True, get_world_size=size, _world=types.SimpleNamespace(pg_map={})
)
hang._INTERVAL_S = 0.001
hang.start_counting(sys.argv[1], 0)
assert counting.wait(60)
"""


@pytest.mark.torch
def test_collectives_of_all_workers_are_counted_in_groups_that_hold_them_all(tmp_path: Path) -> None:
    for told in run_pair(tmp_path / "run", COUNTED):
        pid, *kept = told.said
        assert kept == [str(pid), "4"]


@pytest.mark.torch
def test_a_worker_that_is_asked_writes_its_last_collectives_with_the_members_of_their_groups(tmp_path: Path) -> None:
    for rank, told in enumerate(run_pair(tmp_path / "run", ASKED)):
        question, _, text = told.said.partition("\n")
        dump = decode_flight(text)
        assert (question, dump is not None) == ("question", True)
        assert dump is not None
        gathered = dump.entries[-1]
        assert (gathered.op, gathered.number, gathered.process_group[1]) == ("all_gather", 1, "tp")
        assert dump.pg_config[gathered.process_group[0]].members == (0, 1)
        assert [entry.number for entry in dump.entries if entry.op == "all_reduce"] == [*range(9, 41)]
        assert dump.rank == rank


def test_its_thread_is_gone_before_the_interpreter_is_finalized(tmp_path: Path) -> None:
    # A thread that then comes back from torch's C++ ends the worker by SIGABRT, after the training has succeeded.
    command = [sys.executable, "-c", ENDS_WHILE_COUNTING, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    assert ended.stdout == "['MainThread']\n"
