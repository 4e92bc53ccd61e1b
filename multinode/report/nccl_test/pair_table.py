"""The matrix of a stream between every two nodes: senders below each other, receivers beside each other."""

from __future__ import annotations

from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table

from multinode.analyse.nccl_test.pair_speeds import Odd, PairSpeed
from multinode.report.render.table import make_table

__all__ = ["pair_table"]

# Sixteen columns of a figure and its mark, with a name before them, fit into 120.
_CELL_WIDTH = 5
_NAMES_WIDTH = 80


def pair_table(pairs: Sequence[PairSpeed], odd: Sequence[Odd] = (), *, nodes: Sequence[str] = ()) -> Table:
    """Payload in Gbit/s; what is odd has a `!` behind it, what was not measured a dash.

    Args:
        pairs: what was measured.
        odd: what is odd about it.
        nodes: in the order in which they are shown; those that are not named follow as they come.
    """
    names = tuple(dict.fromkeys([*nodes, *(name for one in pairs for name in (one.source, one.target))]))
    speeds = {(one.source, one.target): one for one in pairs}
    heads = _heads(names)
    table = make_table(caption="Gbit/s; ! is odd" if odd else "Gbit/s")
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
    """What stands above the columns: the names, or where they would not fit the node ranks, as before every row."""
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
    """At most four characters."""
    if 0 < gbit_per_s < 0.005:  # noqa: PLR2004 - what would round to nothing
        return "<.01"
    for digits, below in ((2, 9.995), (1, 99.95)):
        if gbit_per_s < below:
            return f"{gbit_per_s:.{digits}f}"
    return f"{gbit_per_s:.0f}"
