"""How many collectives a worker has launched, kept where a diagnosis finds it; over real gloo."""

from __future__ import annotations

from pathlib import Path

import pytest

from .gloo_pair import run_pair

pytestmark = pytest.mark.torch

COUNTED = """
import time
import multinode_sequence
multinode_sequence._INTERVAL_S = 0.05
multinode_sequence.start(FOLDER, RANK)
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


def test_collectives_of_all_workers_are_counted_in_groups_that_hold_them_all(tmp_path: Path) -> None:
    for told in run_pair(tmp_path / "run", COUNTED):
        pid, *kept = told.said
        assert kept == [str(pid), "4"]
