"""What a worker writes of each collective before it calls it, beside torch's own flight recorder; over real gloo."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from multinode.node.last_calls import BLOCK_BYTES, read_last_calls
from multinode.records.flight import FlightDump, FlightEntry, decode_flight

from .gloo_pair import Told, run_pair

pytestmark = pytest.mark.torch

BEGIN = """
import multinode_agent.worker.flight
import multinode_agent.worker.last_calls as last_calls
os.close(os.open(FOLDER + "/last-calls", os.O_RDWR | os.O_CREAT))
calls = last_calls.open_last_calls({"MULTINODE_RUN_DIR": FOLDER}, RANK)
traffic = worker.traffic.Traffic(steps, guard, last_calls=calls)
watch([*worker.compiler.HOOKS, *traffic.hooks()])
torch = begin()
import torch.distributed as dist
ones = torch.ones
"""
CALLS = """
dist.all_reduce(ones(8))
dist.send(ones(3), 1) if RANK == 0 else dist.recv(ones(3), 0)
dist.all_gather([ones(4), ones(4)], ones(4))
work = dist.all_reduce(ones(5, dtype=torch.bfloat16), async_op=True)
work.wait()
dist.broadcast(ones(2, 3, dtype=torch.int64), 0)
dist.barrier()
pair = dist.new_group([0, 1], group_desc="tp")
dist.all_reduce(ones(6), group=pair)
"""
TELL = "\ntell((multinode_agent.worker.flight.dump(RANK) or b'').decode())\n"
FAILS = """
def reduce(size):
    dist.all_reduce(ones(size))

reduce(8)
# The peer never comes, as it ends.
if RANK == 0:
    try:
        reduce(16)
    except RuntimeError:
        pass
"""


def dumps(folder: Path) -> dict[int, FlightDump]:
    opened = os.open(folder / "last-calls", os.O_RDONLY)
    try:
        read = {record["rank"]: decode_flight(record["flight"]) for record in read_last_calls(opened)}
    finally:
        os.close(opened)
    return {rank: dump for rank, dump in read.items() if dump is not None}


def essence(entry: FlightEntry) -> tuple[Any, ...]:
    sizes = entry.output_sizes if entry.op == "all_gather" else entry.input_sizes
    elements = sum(_product(size) for size in sizes)
    return entry.process_group[1], entry.number, entry.op, elements, tuple(entry.input_dtypes)


def _product(size: tuple[int, ...]) -> int:
    product = 1
    for length in size:
        product *= length
    return product


def test_numbers_sizes_and_groups_are_those_of_torchs_flight_recorder(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    told: list[Told] = run_pair(folder, BEGIN + CALLS + TELL)
    written = dumps(folder)
    for rank in (0, 1):
        recorded = decode_flight(told[rank].said)
        assert recorded is not None
        expected = [essence(entry) for entry in recorded.entries if not entry.is_p2p]
        assert len(expected) == 6
        assert [essence(entry) for entry in written[rank].entries] == expected
        members = {group.desc: group.members for group in written[rank].pg_config.values()}
        assert members == {"default_pg": (0, 1), "tp": (0, 1)}
        assert told[rank].stderr == ""


def test_only_a_call_that_has_ended_when_it_returns_is_over(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run_pair(folder, BEGIN + CALLS + TELL)
    over = {(entry.process_group[1], entry.number): entry.has_ended for entry in dumps(folder)[0].entries}
    # The third goes on in the background, and its end is not seen.
    assert [key for key, has_ended in over.items() if not has_ended] == [("default_pg", 3)]


def test_a_call_that_failed_is_open_with_the_line_of_the_script(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run_pair(folder, BEGIN + FAILS + "\nimport os\nos._exit(0)\n")
    last = dumps(folder)[0].entries[-1]
    assert (last.number, last.input_sizes, last.has_ended) == (2, ((16,),), False)
    assert [entry.has_ended for entry in dumps(folder)[1].entries] == [True]
    # Of a script that is no file.
    assert (last.frames[0].filename, last.frames[0].line > 0) == ("<string>", True)


def test_a_group_beyond_the_memory_and_no_memory_cost_no_training(tmp_path: Path) -> None:
    many = "\nfor _ in range(20):\n    dist.all_reduce(ones(2), group=dist.new_group([0, 1]))\n"
    folder = tmp_path / "run"
    told = run_pair(folder, BEGIN + many)
    assert [each.stderr for each in told] == ["", ""]
    assert len(dumps(folder)[0].pg_config) == 14
    assert (folder / "last-calls").stat().st_size == 2 * BLOCK_BYTES
    without = run_pair(tmp_path / "other" / "run", BEGIN.replace("os.close(", "# ") + "\ntell(calls is None)\n")
    assert [each.said for each in without] == [True, True]


def test_a_worker_that_starts_anew_leaves_nothing_of_the_one_before(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    again = "\nlast_calls.open_last_calls({'MULTINODE_RUN_DIR': FOLDER}, RANK)\n"
    run_pair(folder, BEGIN + CALLS + again)
    assert dumps(folder) == {}
