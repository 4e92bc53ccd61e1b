"""The last collectives of each worker, in memory that outlives it.

Python does not run in a worker that gloo aborts, or that torchrun ends by SIGTERM. So a worker writes each collective
down before it calls it (worker/last_calls.py). The memory is a file without a name that the supervisor holds, to which
a link in the run's directory leads: a full or hanging disk must not stop a training.

It has a block for each rank: a head, then groups, each with a ring of its last calls.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterator
from typing import NamedTuple, Optional

from .channel import Record
from .flight import MOST_BYTES_AT_END, fit

NAME = "last-calls"
"""Name of the link in the run's directory."""
BLOCK_BYTES = 16384
MAGIC = b"MNCALLS1"
# magic and rank
HEAD = struct.Struct("<8sI")
HEAD_BYTES = 64
# name and description; first rank, distance between ranks, and number of ranks, 0 if they have no common distance
GROUP = struct.Struct("<32s64sIII")
GROUP_BYTES = 128
# number in the group, elements, wall clock in ns, line, operation, dtype, file, and how far it is. The last comes last,
# so that a call that was written in part has none.
CALL = struct.Struct("<QQQI32s16s44sB")
CALL_BYTES = 128
CALLS = 8
"""Calls that are kept of each group."""
GROUPS = (BLOCK_BYTES - HEAD_BYTES) // (GROUP_BYTES + CALLS * CALL_BYTES)
"""Groups that are kept of each rank."""

ENTERED, ISSUED, ENDED = 1, 2, 3
"""How far a call is: the worker waits in it; it goes on in the background, where its end is not seen; it has ended."""

# A run has fewer workers on a node, and a group fewer members.
_MOST_BLOCKS = 256
_MOST_MEMBERS = 1 << 14


def group_at(index: int) -> int:
    """Offset of a group in its block; its calls follow it."""
    return HEAD_BYTES + index * (GROUP_BYTES + CALLS * CALL_BYTES)


class _Call(NamedTuple):
    number: int
    elements: int
    time_ns: int
    line: int
    op: str
    dtype: str
    file: str
    how_far: int


def read_last_calls(descriptor: int) -> Iterator[Record]:
    """A record `flight` for each worker that wrote calls, in the form of torch's flight recorder.

    A worker may have written anything.
    """
    at = 0
    # Behind the last block there is no data.
    with contextlib.suppress(OSError):
        for _ in range(_MOST_BLOCKS):
            # Memory of ranks on other nodes was never written.
            rank = os.lseek(descriptor, at, os.SEEK_DATA) // BLOCK_BYTES
            told = _parse(os.pread(descriptor, BLOCK_BYTES, rank * BLOCK_BYTES), rank)
            if told is not None:
                yield {"kind": "flight", "rank": rank, "flight": told, "source": "calls"}
            at = (rank + 1) * BLOCK_BYTES


def _parse(data: bytes, rank: int) -> Optional[str]:
    """JSON of a block's calls; None if it has none."""
    if len(data) < BLOCK_BYTES or HEAD.unpack_from(data) != (MAGIC, rank):
        return None
    groups: dict[str, Record] = {}
    calls: list[tuple[Record, _Call]] = []
    for index in range(GROUPS):
        at = group_at(index)
        name, description, first, step, count = GROUP.unpack_from(data, at)
        group = {"name": _text(name), "desc": _text(description), "ranks": _members(first, step, count)}
        made = [_read_call(data, at + GROUP_BYTES + turn * CALL_BYTES) for turn in range(CALLS)]
        made = [call for call in made if ENTERED <= call.how_far <= ENDED and call.op]
        if made:
            groups[_text(name)] = group
            calls += [(group, call) for call in made]
    entries = [_entry(group, call) for group, call in _until_failed(calls)]
    return fit({"rank": rank, "pg_config": groups, "entries": entries}, MOST_BYTES_AT_END)


def _read_call(data: bytes, at: int) -> _Call:
    number, elements, time_ns, line, op, dtype, file, how_far = CALL.unpack_from(data, at)
    return _Call(number, elements, time_ns, line, _text(op), _text(dtype), _text(file), how_far)


def _until_failed(calls: list[tuple[Record, _Call]]) -> list[tuple[Record, _Call]]:
    """The calls in their order, up to the first that the worker waited in and that failed: later ones clean up."""
    ordered = sorted(calls, key=lambda call: call[1].time_ns)
    failed = next((index for index, (_, call) in enumerate(ordered) if call.how_far == ENTERED), len(ordered))
    return ordered[: failed + 1]


def _entry(group: Record, call: _Call) -> Record:
    sizes = [[call.elements]] if call.dtype else []
    return {
        "profiling_name": call.op,
        "process_group": [group["name"], group["desc"]],
        "collective_seq_id": call.number,
        "input_sizes": sizes,
        "output_sizes": sizes,
        "input_dtypes": [call.dtype] if call.dtype else [],
        "retired": call.how_far == ENDED,
        "time_created_ns": call.time_ns,
        "frames": [{"filename": call.file, "line": call.line}] if call.file else [],
    }


def _members(first: int, step: int, count: int) -> list[int]:
    return [first + step * index for index in range(count)] if count <= _MOST_MEMBERS else []


def _text(data: bytes) -> str:
    return data.rstrip(b"\0").decode(errors="replace")
