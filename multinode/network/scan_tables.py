"""The tables of nccl-test: a size scan for people or in nccl-tests format, and streams between all nodes."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table

from multinode.records.benchmark import CollectiveTest
from multinode.render.sheet import UNKNOWN
from multinode.render.table import make_table
from multinode.traffic.algorithms import CollectiveRow
from multinode.traffic.pair_speeds import Odd, PairSpeed

_COLUMNS = (
    ("size", "(B)"),
    ("time", "(us)"),
    ("algbw", "(GB/s)"),
    ("busbw", "(GB/s)"),
    ("#wrong", ""),
    ("p95", "(us)"),
    ("of link", "(busbw)"),
    ("of TCP", "(busbw)"),
)
# torch.distributed has these in one buffer; the others have two. Columns of the missing variant are N/A.
_IN_PLACE = frozenset({"all_reduce", "broadcast"})
_NOT_RUN = ("N/A", "N/A", "N/A", "N/A")
_LONG_US = 10_000
_MIDDLE_US = 100
# Sixteen columns with a name fit 120 characters.
_CELL_WIDTH = 5
_NAMES_WIDTH = 80


def collective_table(rows: Sequence[CollectiveRow], title: str) -> Table:
    """One row per size, with units below the headers.

    `of link` is busbw as a share of the TCP line rate of the slowest NIC, `of TCP` of raw TCP between the same NICs in
    the same run.
    """
    table = make_table(title)
    for name, unit in _COLUMNS:
        table.add_column(f"{name}\n{unit}", justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            str(row.size_bytes),
            f"{row.time_us:.2f}",
            f"{row.algbw_gb_per_s:.3f}",
            f"{row.busbw_gb_per_s:.3f}",
            "N/A" if row.num_wrong is None else str(row.num_wrong),
            f"{row.p95_us:.2f}",
            _share(row.share_of_ceiling),
            _share(row.share_of_tcp),
        )
    return table


def _share(share: float | None) -> str:
    return UNKNOWN if share is None else f"{share:.1%}"


def nccl_tests_text(rows: Sequence[CollectiveRow], test: CollectiveTest, devices: Sequence[str]) -> str:
    """The rows of the scan, one block per collective, with the header and footer of nccl-tests.

    Args:
        rows: in order of measurement.
        test: the request.
        devices: one line per worker, by rank.
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
            # Programs parse this line; an average over sizes has no meaning for people.
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
    """The rule between consecutive sizes; 0 without one, as for the sizes of a training."""
    pairs = list(itertools.pairwise(sizes))
    factors = {after / before for before, after in pairs}
    steps = {after - before for before, after in pairs}
    if len(factors) == 1 and (factor := factors.pop()).is_integer():
        return f"{factor:.0f}(factor)"
    return f"{steps.pop() if len(steps) == 1 else 0}(bytes)"


def pair_table(pairs: Sequence[PairSpeed], odd: Sequence[Odd] = (), *, nodes: Sequence[str] = ()) -> Table:
    """Payload in Gbit/s; outliers are marked with `!`, unmeasured pairs with a dash.

    Args:
        pairs: the measurements.
        odd: the outliers.
        nodes: in display order; others follow.
    """
    names = tuple(dict.fromkeys([*nodes, *(name for one in pairs for name in (one.source, one.target))]))
    speeds = {(one.source, one.target): one for one in pairs}
    heads = _heads(names)
    table = make_table(caption="Gbit/s; ! is an outlier" if odd else "Gbit/s")
    # The rule between the columns leaves a space already.
    table.padding = (0, 0)
    table.add_column("from \\ to", overflow="fold")
    for head in heads:
        table.add_column(escape(head), justify="right", no_wrap=True)
    for name, head in zip(names, heads, strict=True):
        label = name if head == name else f"{head} {name}"
        table.add_row(escape(label), *(_cell(speeds.get((name, peer)), odd) if peer != name else "" for peer in names))
    return table


def _heads(names: Sequence[str]) -> tuple[str, ...]:
    width = sum(max(len(name), _CELL_WIDTH) + 1 for name in (*names, max(names, key=len, default="")))
    fits = width <= _NAMES_WIDTH or all(len(name) <= _CELL_WIDTH for name in names)
    return tuple(names) if fits else tuple(str(rank) for rank in range(len(names)))


def _cell(one: PairSpeed | None, odd: Sequence[Odd]) -> str:
    if one is None:
        return "[dim]-[/]"
    figure = "fail" if one.gbit_per_s is None else _figure(one.gbit_per_s)
    if any(each.covers(one.source, one.target) for each in odd):
        return f"[bold red]{figure}![/]"
    # Figures stay below each other, with and without a mark.
    return f"{figure} " if odd else figure


def _figure(gbit_per_s: float) -> str:
    if 0 < gbit_per_s < 0.005:  # noqa: PLR2004 - what would round to nothing
        return "<.01"
    for digits, below in ((2, 9.995), (1, 99.95)):
        if gbit_per_s < below:
            return f"{gbit_per_s:.{digits}f}"
    return f"{gbit_per_s:.0f}"
