"""Reading the memory in which workers write their last collectives; a worker may write anything there."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multinode.node import last_calls as memory
from multinode.records.flight import FlightDump, decode_flight
from multinode.records.samples import FlightSample, parse_samples


def block(rank: int, *calls: tuple[int, str, int, int], members: tuple[int, int, int] = (0, 1, 4)) -> bytearray:
    """Calls of the default group: number, operation, elements, and how far it is."""
    data = bytearray(memory.BLOCK_BYTES)
    memory.HEAD.pack_into(data, 0, memory.MAGIC, rank)
    at = memory.group_at(0)
    memory.GROUP.pack_into(data, at, b"0", b"default_pg", *members)
    for number, op, elements, how_far in calls:
        place = at + memory.GROUP_BYTES + number % memory.CALLS * memory.CALL_BYTES
        dtype = b"Float" if elements else b""
        memory.CALL.pack_into(data, place, number, elements, number, 88, op.encode(), dtype, b"train.py", how_far)
    return data


@pytest.fixture
def descriptor(tmp_path: Path) -> Iterator[int]:
    opened = os.open(tmp_path / "last-calls", os.O_RDWR | os.O_CREAT)
    yield opened
    os.close(opened)


def read(descriptor: int) -> dict[int, FlightDump]:
    """The dumps by rank, as the controller reads them; none may be lost on the way."""
    records = list(memory.read_last_calls(descriptor))
    lines = [json.dumps(record).encode() for record in records]
    samples = list(parse_samples(lines))
    assert len(samples) == len(lines)
    dumps = {}
    for sample in samples:
        assert isinstance(sample, FlightSample)
        assert sample.source == "calls"
        dump = decode_flight(sample.flight)
        assert dump is not None
        dumps[sample.rank] = dump
    return dumps


def write(descriptor: int, rank: int, data: bytes | bytearray) -> None:
    os.pwrite(descriptor, data, rank * memory.BLOCK_BYTES)


def test_the_calls_of_each_rank_are_read_with_their_group_and_line(descriptor: int) -> None:
    # Ranks of another node lie between them.
    for rank in (1, 9):
        write(descriptor, rank, block(rank, (6, "barrier", 0, memory.ENDED), (7, "all_reduce", 8, memory.ENTERED)))
    dumps = read(descriptor)
    assert [*dumps] == [1, 9]
    barrier, reduced = dumps[9].entries
    assert (barrier.op, barrier.number, barrier.has_ended, barrier.input_sizes) == ("barrier", 6, True, ())
    assert (reduced.op, reduced.number, reduced.has_ended) == ("all_reduce", 7, False)
    assert (reduced.input_sizes, reduced.input_dtypes) == (((8,),), ("Float",))
    assert (reduced.frames[0].filename, reduced.frames[0].line) == ("train.py", 88)
    assert dumps[9].pg_config["0"].members == (0, 1, 2, 3)


def test_what_a_worker_calls_after_one_has_failed_is_left_out(descriptor: int) -> None:
    calls = [
        (5, "all_reduce", 8, memory.ISSUED),
        (6, "all_reduce", 8, memory.ENTERED),
        (7, "barrier", 0, memory.ENTERED),
    ]
    write(descriptor, 0, block(0, *calls))
    assert [entry.number for entry in read(descriptor)[0].entries] == [5, 6]


def test_ranks_in_no_regular_distance_are_left_out(descriptor: int) -> None:
    write(descriptor, 0, block(0, (1, "all_reduce", 8, memory.ENTERED), members=(0, 0, 0)))
    assert read(descriptor)[0].pg_config["0"].members == ()


def test_of_more_than_a_record_holds_the_last_are_kept(descriptor: int) -> None:
    full = block(0)
    for group in range(memory.GROUPS):
        at = memory.group_at(group)
        memory.GROUP.pack_into(full, at, b"group %d" % group, b"d" * 64, 0, 1, 64)
        for turn in range(memory.CALLS):
            place = at + memory.GROUP_BYTES + turn * memory.CALL_BYTES
            when = turn * memory.GROUPS + group
            memory.CALL.pack_into(full, place, turn, 8, when, 1, b"all_reduce", b"Float", b"f" * 44, memory.ENDED)
    write(descriptor, 0, full)
    (record,) = memory.read_last_calls(descriptor)
    assert len(record["flight"]) <= 16_000
    assert read(descriptor)[0].entries[-1].number == memory.CALLS - 1


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(bytes(memory.BLOCK_BYTES), id="never-written"),
        pytest.param(bytes(block(0, (1, "all_reduce", 8, memory.ENTERED))[:-1]), id="cut"),
        pytest.param(bytes(block(3, (1, "all_reduce", 8, memory.ENTERED))), id="another-rank"),
        pytest.param(bytes(block(0, (1, "all_reduce", 8, 0))), id="written-in-part"),
        pytest.param(bytes(block(0)), id="no-call"),
    ],
)
def test_memory_without_calls_has_no_record(descriptor: int, data: bytes) -> None:
    write(descriptor, 0, data)
    assert read(descriptor) == {}


@given(
    garbage=st.binary(min_size=1, max_size=400),
    at=st.integers(0, memory.group_at(2)),
    rank=st.integers(0, 3),
)
def test_whatever_a_worker_writes_can_be_read(
    tmp_path_factory: pytest.TempPathFactory, garbage: bytes, at: int, rank: int
) -> None:
    data = block(rank, (1, "all_reduce", 8, memory.ENTERED), (2, "all_reduce", 8, memory.ENDED))
    data[at : at + len(garbage)] = garbage
    path = tmp_path_factory.mktemp("memory") / "last-calls"
    opened = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        write(opened, rank, data)
        assert set(read(opened)) <= {rank}
    finally:
        os.close(opened)
