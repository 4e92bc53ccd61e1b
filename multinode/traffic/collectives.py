"""Collectives in numbers: algbw, busbw and their factors, exactly as nccl-tests defines them (its PERFORMANCE.md)."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from multinode.records.samples import CollectiveSample
from multinode.stats.estimate import Bounds, estimate_median
from multinode.stats.spread import spread_of


class CollectiveRow(msgspec.Struct, frozen=True, kw_only=True):
    """One message of a size scan.

    Attributes:
        dtype: nccl-tests' name of the element type; `redop` that of the reduction, or `none`.
        size_bytes: S as nccl-tests prints it.
        count: elements, as nccl-tests prints them.
        iters: timed iterations.
        time_us: median over iterations of the slowest worker's time: what the operation takes.
        interval_us: its 95 % confidence interval; None in a scan of an earlier release.
        p95_us: as `time_us`, the 95th percentile.
        cv: likewise the coefficient of variation, standard deviation over mean; 0 of a single iteration.
        transfer_us: median over iterations of the fastest worker's time: what is left without waiting for others.
        algbw_gb_per_s: size over time, 1e9 bytes per second.
        busbw_gb_per_s: algbw times the collective's factor.
        num_wrong: elements whose value was not exact, summed over the workers; None where they were not verified.
        tcp_gb_per_s: what raw TCP reached in turns with it; None where it took none.
        share_of_ceiling: busbw over the goodput ceiling of the slowest link; None where no link rate is known.
        share_of_tcp: busbw over what raw TCP reached between the same cards, in turns with it or else with others; None
            where it was not tried.
    """

    collective: str = "all_reduce"
    dtype: str = "float"
    redop: str = "sum"
    size_bytes: int
    count: int
    iters: int
    time_us: float
    interval_us: Bounds | None = None
    p95_us: float
    cv: float = 0.0
    transfer_us: float
    algbw_gb_per_s: float
    busbw_gb_per_s: float
    num_wrong: int | None = None
    tcp_gb_per_s: float | None = None
    share_of_ceiling: float | None = None
    share_of_tcp: float | None = None


def bus_factor(collective: str, ranks: int) -> float:
    """What algbw is multiplied with to get busbw, for `ranks` workers.

    Raises:
        ValueError: the collective is unknown.
    """
    if collective == "all_reduce":
        return 2 * (ranks - 1) / ranks
    if collective in {"all_gather", "reduce_scatter", "all_to_all"}:
        return (ranks - 1) / ranks
    if collective in {"broadcast", "reduce", "sendrecv"}:
        return 1.0
    raise ValueError(f"unknown collective {collective!r}")


def collective_rows(
    samples: Iterable[CollectiveSample], ranks: int, tcp_gb_per_s: Mapping[int, float | None] | None = None
) -> tuple[CollectiveRow, ...]:
    """A row for each message that all `ranks` workers have measured, in the order in which they were measured.

    Args:
        samples: of all workers.
        ranks: how many those are.
        tcp_gb_per_s: what raw TCP reached in turns with a message, by its index.
    """
    tcp = tcp_gb_per_s or {}
    by_message: dict[int, list[CollectiveSample]] = {}
    for sample in samples:
        by_message.setdefault(sample.index, []).append(sample)
    complete = ((index, workers) for index, workers in sorted(by_message.items()) if len(workers) == ranks)
    return tuple(row for index, workers in complete if (row := _row(workers, ranks, tcp.get(index))) is not None)


def with_shares(
    rows: Iterable[CollectiveRow], ceiling_gb_per_s: float | None, tcp_gb_per_s: float | None
) -> tuple[CollectiveRow, ...]:
    """The rows with their shares of what a link carries at best, and of what raw TCP reached on it."""
    return tuple(
        msgspec.structs.replace(
            row,
            share_of_ceiling=row.busbw_gb_per_s / ceiling_gb_per_s if ceiling_gb_per_s else None,
            share_of_tcp=row.busbw_gb_per_s / tcp if tcp else None,
        )
        for row in rows
        for tcp in (row.tcp_gb_per_s or tcp_gb_per_s,)
    )


def _row(workers: Sequence[CollectiveSample], ranks: int, tcp_gb_per_s: float | None) -> CollectiveRow | None:
    first = workers[0]
    iterations = list(zip(*(worker.times_us for worker in workers), strict=False))
    if not iterations:
        return None
    times_us = [max(times) for times in iterations]
    slowest, median = spread_of(times_us), estimate_median(times_us)
    algbw = first.size_bytes / slowest.median / 1000
    verified = [worker.num_wrong for worker in workers if worker.num_wrong is not None]
    return CollectiveRow(
        collective=first.collective,
        dtype=first.dtype,
        redop=first.redop,
        size_bytes=first.size_bytes,
        count=first.count,
        iters=len(iterations),
        time_us=slowest.median,
        interval_us=(median.low, median.high),
        p95_us=slowest.p95,
        cv=slowest.cv,
        transfer_us=statistics.median(min(times) for times in iterations),
        algbw_gb_per_s=algbw,
        busbw_gb_per_s=algbw * bus_factor(first.collective, ranks),
        num_wrong=sum(verified) if len(verified) == len(workers) else None,
        tcp_gb_per_s=tcp_gb_per_s,
    )
