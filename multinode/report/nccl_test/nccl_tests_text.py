"""A sweep as nccl-tests prints it, for eyes and programs that know that format (nccl-tests' src/common.cu)."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence

from multinode.analyse.collectives.collectives import CollectiveRow
from multinode.core.measure.benchmark import CollectiveTest

__all__ = ["nccl_tests_text"]

# torch.distributed has these in one buffer; the others have two. The columns of the way that was not run say N/A.
_IN_PLACE = frozenset({"all_reduce", "broadcast"})
_NOT_RUN = ("N/A", "N/A", "N/A", "N/A")
_LONG_US = 10_000
_MIDDLE_US = 100


def nccl_tests_text(rows: Sequence[CollectiveRow], test: CollectiveTest, devices: Sequence[str]) -> str:
    """The sweep's rows, a block a collective, each with the head and the foot that nccl-tests gives it.

    Args:
        rows: in the order in which they were measured.
        test: what was asked for.
        devices: a line for each worker, in the order of ranks.
    """
    names = dict.fromkeys(row.collective for row in rows)
    blocks = [_block([row for row in rows if row.collective == name], test, devices) for name in names]
    return "\n".join(blocks)


def _block(rows: Sequence[CollectiveRow], test: CollectiveTest, devices: Sequence[str]) -> str:
    sizes = [row.size_bytes for row in rows]
    # The rows' sizes are rounded to what divides among the workers.
    asked = [one.size_bytes for one in test.messages if one.collective == rows[0].collective]
    counts = f"warmup iters: {test.warmup_iters} iters: {test.iters} agg iters: 1 validation: {int(test.check > 0)}"
    lines = [
        f"# Collective test: {rows[0].collective}",
        f"# nThread 1 nGpus 1 minBytes {min(sizes)} maxBytes {max(sizes)} step: {_step(asked)} {counts} graph: 0",
        "#",
        "# Using devices",
        *(f"#  {device}" for device in devices),
        "#",
        f"#{'':62}out-of-place{'':23}in-place{'':10}",
        _head("size", "count", "type", "redop", "root", *("time", "algbw", "busbw", "#wrong") * 2),
        _head("(B)", "(elements)", "", "", "", *("(us)", "(GB/s)", "(GB/s)", "") * 2),
        *(_row(row) for row in rows),
    ]
    wrong = sum(row.num_wrong or 0 for row in rows)
    average = statistics.fmean(row.busbw_gb_per_s for row in rows)
    return "\n".join(
        [
            *lines,
            f"# Out of bounds values : {wrong} {'FAILED' if wrong else 'OK'}",
            # Programs look for this line; for people an average over sizes means nothing.
            f"# Avg bus bandwidth    : {average:g} ",
            "#",
        ]
    )


def _head(*words: str) -> str:
    size, count, dtype, redop, root, *measured = words
    sides = [measured[:4], measured[4:]]
    text = "".join(f"  {time:>7}  {algbw:>6}  {busbw:>6} {wrong:>6}" for time, algbw, busbw, wrong in sides)
    return f"# {size:>10}  {count:>12}  {dtype:>8}  {redop:>6}  {root:>6}{text}"


def _row(row: CollectiveRow) -> str:
    root = "0" if row.collective == "broadcast" else "-1"
    measured = (
        _time(row.time_us),
        f"{row.algbw_gb_per_s:.2f}",
        f"{row.busbw_gb_per_s:.2f}",
        "N/A" if row.num_wrong is None else str(row.num_wrong),
    )
    sides = (_NOT_RUN, measured) if row.collective in _IN_PLACE else (measured, _NOT_RUN)
    text = "".join(f"  {time:>7}  {algbw:>6}  {busbw:>6}  {wrong:>5}" for time, algbw, busbw, wrong in sides)
    return f"{row.size_bytes:>12}  {row.count:>12}  {row.dtype:>8}  {row.redop:>6}  {root:>6}{text}"


def _time(time_us: float) -> str:
    if time_us >= _LONG_US:
        return f"{time_us:.0f}"
    return f"{time_us:.1f}" if time_us >= _MIDDLE_US else f"{time_us:.2f}"


def _step(sizes: Sequence[int]) -> str:
    """How one size follows from the one before; 0 where there is no such rule, as among the sizes of a training."""
    pairs = list(itertools.pairwise(sizes))
    factors = {after / before for before, after in pairs}
    steps = {after - before for before, after in pairs}
    if len(factors) == 1 and (factor := factors.pop()).is_integer():
        return f"{factor:.0f}(factor)"
    return f"{steps.pop() if len(steps) == 1 else 0}(bytes)"
