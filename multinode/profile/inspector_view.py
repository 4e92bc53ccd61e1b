"""All-reduces recorded by NCCL's Inspector: their bandwidth, and its agreement with ours. Pure.

The plugin reports sizes as in NCCL's calls, which is one rank's share for reduce-scatter and all-gather, and busbw with
nccl-tests' factors. It reports when a record was written, not when the operation ran. Before NCCL 2.30.3 it kept one
finished operation per communicator between two writes: gaps in the numbers show this.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import msgspec

from multinode.profile.observed import Observed
from multinode.records.samples import NcclOpSample
from multinode.stats.estimate import UnknownError
from multinode.traffic.algorithms import bus_factor

# Commit b3aeda4a of NCCL added a ring of operations; the plugin loads into NCCL 2.28 and newer.
NEWER_PLUGIN = "and a plugin built from NCCL 2.30.3 or newer records all, with any NCCL version"

# NCCL's names, and torch's.
_OPS = {
    "AllReduce": "all_reduce",
    "AllGather": "all_gather",
    "ReduceScatter": "reduce_scatter",
    "Broadcast": "broadcast",
    "Reduce": "reduce",
}
_SHARED = frozenset({"AllGather", "ReduceScatter"})
_GB_PER_S = 1e-3  # of bytes in a microsecond
# The plugin writes whole microseconds: half of one matters for a short operation.
_ALIKE = 0.02
_LEAST_US = 100.0
# It is configured to write twice a second (job/planning.py).
_WRITTEN_WITHIN_S = 1.0


class InspectorView(msgspec.Struct, frozen=True, kw_only=True):
    """All-reduces of all workers in the measured steps."""

    busbw_gb_per_s: float  # factor x bytes / time, each of the worker that waited least
    sizes_bytes: tuple[int, ...] = ()  # of a step's all-reduces; empty if not all were recorded
    bytes_per_step: float | None = None  # of all of them; None if not all were recorded
    operations: int  # number recorded on all workers
    recorded: float = 1.0  # recorded share of the numbered operations, of the worker that recorded least


def total_bytes(op: NcclOpSample) -> int:
    """S as in nccl-tests: the whole gathered or scattered buffer."""
    return op.size_bytes * (op.comm_ranks if op.op in _SHARED else 1)


def busbw_gb_per_s(op: NcclOpSample) -> float:
    """Our busbw, from size and time.

    Raises:
        ValueError: the operation has no factor.
    """
    if op.op not in _OPS:
        raise ValueError(f"unknown operation {op.op}")
    factor = 1.0 if op.op == "Reduce" else bus_factor(_OPS[op.op], op.comm_ranks)
    return factor * total_bytes(op) / op.time_us * _GB_PER_S


def view_inspector(observed: Observed) -> InspectorView:
    """The recorded all-reduces.

    Raises:
        UnknownError: the plugin recorded none, or its figures are inconsistent.
    """
    ops = [op for op in _in_window(observed) if op.op == "AllReduce" and op.comm_ranks == observed.world_size]
    if not ops:
        raise UnknownError("NCCL's Inspector recorded no all-reduce of all workers in the measured steps")
    odd = sum(not _agrees(op) for op in ops if op.time_us >= _LEAST_US)
    if odd:
        raise UnknownError(
            f"NCCL's Inspector reports a bandwidth for {odd} operations that contradicts their bytes and times"
        )
    whole, recorded = _of_all_workers(ops), _recorded(ops)
    if not whole:
        few = "" if recorded == 1.0 else f": of its operations {recorded:.0%} were, {NEWER_PLUGIN}"
        raise UnknownError(f"NCCL's Inspector recorded no all-reduce on all workers{few}")
    sizes = [total_bytes(workers[0]) for workers in whole]
    took_us = math.fsum(min(op.time_us for op in workers) for workers in whole)
    busbw = bus_factor("all_reduce", observed.world_size) * sum(sizes) / took_us * _GB_PER_S
    if not math.isfinite(busbw):
        raise UnknownError("the times of NCCL's Inspector are implausible")
    if recorded < 1.0:
        return InspectorView(busbw_gb_per_s=busbw, operations=len(whole), recorded=recorded)
    steps = observed.counted[-1] - observed.counted[0] + 1
    counts = {size: round(count / steps) for size, count in Counter(sizes).items()}
    return InspectorView(
        busbw_gb_per_s=busbw,
        sizes_bytes=tuple(size for size, count in sorted(counts.items(), reverse=True) for _ in range(count)),
        bytes_per_step=sum(sizes) / steps,
        operations=len(whole),
    )


def _in_window(observed: Observed) -> Iterable[NcclOpSample]:
    if not observed.counted:
        return
    first, last = observed.counted[0], observed.counted[-1]
    for node in observed.nodes:
        times = {
            number: [observed.steps[number][rank].time_s for rank in node.ranks if rank in observed.steps[number]]
            for number in (first, last)
        }
        took_s = [
            (observed.steps[first][rank].step_time_us or 0.0) / 1e6
            for rank in node.ranks
            if rank in observed.steps[first]
        ]
        if times[first] and times[last]:
            begin_s, end_s = min(times[first]) - max(took_s), max(times[last]) + _WRITTEN_WITHIN_S
            yield from (op for op in node.of(NcclOpSample) if begin_s < op.written_s <= end_s)


def _recorded(ops: Sequence[NcclOpSample]) -> float:
    numbers: defaultdict[tuple[str, int], set[int]] = defaultdict(set)
    for op in ops:
        numbers[op.comm, op.comm_rank].add(op.number)
    return min(len(some) / (max(some) - min(some) + 1) for some in numbers.values())


def _agrees(op: NcclOpSample) -> bool:
    return math.isclose(busbw_gb_per_s(op), op.busbw_gb_per_s, rel_tol=_ALIKE)


def _of_all_workers(ops: Sequence[NcclOpSample]) -> list[list[NcclOpSample]]:
    by_operation: dict[tuple[str, int], dict[int, NcclOpSample]] = {}
    for op in ops:
        by_operation.setdefault((op.comm, op.number), {})[op.comm_rank] = op
    return [
        list(workers.values())
        for workers in by_operation.values()
        if len(workers) == next(iter(workers.values())).comm_ranks
        and len({op.size_bytes for op in workers.values()}) == 1
    ]
