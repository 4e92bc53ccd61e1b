from __future__ import annotations

import pytest

from multinode.diagnose.hang import find_lagging

# As NCCL's own example of a rank that sleeps prints it, with another process id.
MISMATCH = """\
Group     Comms      Nodes     Ranks     Ranks     Ranks   Status  Errors
    #  in group   per comm  per node  per comm  in group
    0         1          2         4         8         8  RUNNING  MISMATCH

Errors
======


Warnings
========

#0-0 (78db921d1c117b4a) MISMATCH
  Communicator ranks have different AllReduce operation counts
  7 ranks have launched up to operation 64
  Rank 7 has launched up to operation 60 -- GPU 3 managed by process 1650386 on node node1

"""
# As the NCCL documentation has it ("RAS", NCCL 2.24): counts of all operations together.
OF_2_24 = """\
#0-0 (27a079b828ff1a75) MISMATCH
  Communicator ranks have different collective operation counts
  26 ranks have launched up to operation 6650
  6 ranks have launched up to operation 6649
  Rank 0 -- GPU 0 managed by process 483072 on node 192.0.2.10
  Rank 2 -- GPU 2 managed by process 483074 on node 192.0.2.10
  Rank 7 -- GPU 7 managed by process 483079 on node 192.0.2.10
"""
# From the texts of src/ras/client_support.cc.
UNKNOWN = """\
  Communicator ranks have different Broadcast operation counts
  Rank 0 has launched up to operation 3 -- [process information not found]
  Rank 1 has not launched any operations -- [process information not found]

  Communicator ranks have different ReduceScatter operation counts
  2 ranks have not launched any operations
  Rank 2 -- [process information not found]
  Rank 3 -- GPU 1 managed by process 12 on node 192.0.2.11
  2 ranks have launched up to operation 5
"""
AHEAD = """\
  Communicator ranks have different AllReduce operation counts
  7 ranks have launched up to operation 63
  Rank 7 has launched up to operation 64 -- GPU 3 managed by process 5 on node node1
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (MISMATCH, [(7, 1650386, "AllReduce", 60, 64)]),
        (OF_2_24, [(rank, 483072 + rank, "collective", 6649, 6650) for rank in (0, 2, 7)]),
        (
            UNKNOWN,
            [(1, None, "Broadcast", 0, 3), (2, None, "ReduceScatter", 0, 5), (3, 12, "ReduceScatter", 0, 5)],
        ),
        # The ranks that lag are not listed where they are most.
        (AHEAD, []),
        ("", []),
        ("Rank 3 -- GPU 1 managed by process 12 on node 192.0.2.11\n", []),
    ],
)
def test_ranks_that_launched_fewer_operations(text: str, expected: list[object]) -> None:
    assert list(find_lagging(text)) == expected
