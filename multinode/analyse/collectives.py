"""Collectives in numbers: algbw, busbw and their factors, exactly as nccl-tests defines them (its PERFORMANCE.md)."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

import msgspec

from multinode.core.samples import CollectiveSample
from multinode.units import format_rate, format_size, goodput_gb_per_s

__all__ = ["CollectiveRow", "bus_factor", "collective_rows", "collective_verdict"]


_FULL = 0.9


class CollectiveRow(msgspec.Struct, frozen=True, kw_only=True):
    """One size of a sweep.

    Attributes:
        size_bytes: S as nccl-tests prints it.
        count: elements.
        iters: timed iterations.
        time_us: median over iterations of the slowest worker's time.
        p95_us: likewise the 95th percentile.
        algbw_gb_per_s: size over time, 1e9 bytes a second.
        busbw_gb_per_s: algbw times the collective's factor.
        num_wrong: elements whose value was not exact, summed over the workers.
        share_of_ceiling: busbw over the goodput ceiling of the slowest link; None where no link rate is known.
    """

    size_bytes: int
    count: int
    iters: int
    time_us: float
    p95_us: float
    algbw_gb_per_s: float
    busbw_gb_per_s: float
    num_wrong: int
    share_of_ceiling: float | None = None


def bus_factor(op: str, ranks: int) -> float:
    """What algbw is multiplied with to get busbw, for `ranks` workers.

    Raises:
        ValueError: the collective is unknown.
    """
    if op == "all_reduce":
        return 2 * (ranks - 1) / ranks
    if op in {"all_gather", "reduce_scatter", "all_to_all"}:
        return (ranks - 1) / ranks
    if op in {"broadcast", "reduce", "sendrecv"}:
        return 1.0
    raise ValueError(f"unknown collective {op!r}")


def collective_rows(
    samples: Iterable[CollectiveSample], ranks: int, link_gbit_per_s: float | None
) -> tuple[CollectiveRow, ...]:
    """A row for each size that all `ranks` workers have measured, in the order of sizes."""
    by_size: dict[int, list[CollectiveSample]] = {}
    for sample in samples:
        by_size.setdefault(sample.size_bytes, []).append(sample)
    return tuple(_row(by_size[size], ranks, link_gbit_per_s) for size in sorted(by_size) if len(by_size[size]) == ranks)


def collective_verdict(rows: Sequence[CollectiveRow], link_gbit_per_s: float | None) -> str:
    """One sentence on the largest size."""
    if not rows:
        return "No size was measured by all workers."
    wrong = sum(row.num_wrong for row in rows)
    if wrong:
        return f"{wrong} values were wrong: do not trust this network, its cards or its memory."
    last = rows[-1]
    reached = f"all_reduce reaches {last.busbw_gb_per_s:.3f} GB/s at {format_size(last.size_bytes)}"
    if last.share_of_ceiling is None or link_gbit_per_s is None:
        return f"{reached}; what the link could carry is not known."
    share = f"{last.share_of_ceiling:.0%} of what TCP can carry over {format_rate(link_gbit_per_s)}"
    return (
        f"{reached}, {share}: {'the link is used in full' if last.share_of_ceiling >= _FULL else 'it could be more'}."
    )


def _row(workers: Sequence[CollectiveSample], ranks: int, link_gbit_per_s: float | None) -> CollectiveRow:
    first = workers[0]
    iterations = sorted(max(times) for times in zip(*(worker.times_us for worker in workers), strict=False))
    time_us = statistics.median(iterations)
    algbw = first.size_bytes / time_us / 1000
    busbw = algbw * bus_factor(first.op, ranks)
    return CollectiveRow(
        size_bytes=first.size_bytes,
        count=first.count,
        iters=len(iterations),
        time_us=time_us,
        p95_us=iterations[min(len(iterations) - 1, -(-95 * len(iterations) // 100) - 1)],
        algbw_gb_per_s=algbw,
        busbw_gb_per_s=busbw,
        num_wrong=sum(worker.num_wrong for worker in workers),
        share_of_ceiling=busbw / goodput_gb_per_s(link_gbit_per_s) if link_gbit_per_s else None,
    )
