"""compare_frames: two frames of one kind, row by row: their figures, the ratio, and whether that is a change. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from multinode.figures.figure import Figure, Row
from multinode.figures.frame import Frame
from multinode.stats.estimate import Estimate
from multinode.stats.unknown import Unknown, or_none
from multinode.units import UNKNOWN, format_figure


class ComparedFigure(msgspec.Struct, frozen=True, kw_only=True):
    """A figure that both records have."""

    name: str
    first: Estimate  # without an interval where the record has none; also `second`
    second: Estimate
    ratio: Estimate | Unknown  # the second over the first
    changed: bool | None = None  # whether the ratio's interval excludes 1; None without an interval


def compare_frames(
    first: Frame, second: Frame, of: Figure[Estimate], name: Callable[[Row], str]
) -> tuple[ComparedFigure, ...]:
    """The figure of all rows that both frames have, in the order of the first.

    Args:
        first: the baseline.
        second: another frame with the same figures.
        of: what is compared.
        name: of a row, in words.
    """
    later = second.over(first, of, RATIO).by_identity
    return tuple(
        ComparedFigure(name=name(row), first=before, second=now, ratio=row[RATIO], changed=_is_change(row[RATIO]))
        for base in first.rows
        if (row := later.get(first.identity(base))) is not None
        and (before := or_none(base[of])) is not None
        and (now := or_none(row[of])) is not None
    )


def _is_change(over: Estimate | Unknown) -> bool | None:
    if isinstance(over, Unknown) or over.is_exact:
        return None
    return not over.low <= 1 <= over.high


def _ratio(row: Row) -> str:
    over = row[RATIO]
    if isinstance(over, Unknown):
        return UNKNOWN
    return f"{format_figure(over.value)}x" if over.is_exact else over.text("times")


RATIO = Figure[Estimate](
    "ratio", "ratio", form="times_interval", about="value of the second record / value of the first", cell=_ratio
)


def compared_frame(
    rows: Iterable[ComparedFigure], named: Figure[str], run_ids: tuple[str, str], *, unit: str = "", title: str = ""
) -> Frame:
    """Both figures of each row beside each other, and their ratio.

    Args:
        rows: what was compared.
        named: what the name of a row is.
        run_ids: of the two records.
        unit: of the figures; empty if it is part of their names.
        title: above the table.
    """
    return Frame(
        title=title,
        rows=tuple(Row(row, msgspec.structs.asdict(row) | {named.name: row.name}) for row in rows),
        figures=(named, *(_of_record(*each, unit) for each in zip(("first", "second"), run_ids, strict=True)), RATIO),
    )


def _of_record(name: str, run_id: str, unit: str) -> Figure[Estimate]:
    own = Figure[Estimate](name, run_id, unit, form="interval", about="figure of the record")

    def tell(row: Row) -> str:
        figure = or_none(row[own])
        exact = figure is not None and figure.is_exact
        return format_figure(figure.value, digits=4) if figure is not None and exact else own.text(figure)

    return msgspec.structs.replace(own, cell=tell)
