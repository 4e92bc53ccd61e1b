"""The frame of a table of cells: all its figures, those it shows, and what is the same in every row. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from multinode.figures.figure import MONEY, Figure
from multinode.figures.frame import Frame
from multinode.findings.finding import Finding
from multinode.model.workload import JOB_SETTINGS, LORA_RANK, METHOD
from multinode.sweep.comparability import currencies, currency_unit
from multinode.sweep.figures import BY_NAME, CELL_FIGURES, LABEL, MEASURED, CellRow, CellTable, cell_row
from multinode.units import UNKNOWN


def cell_frame(cells: Sequence[CellRow], title: str = "", notes: tuple[Finding, ...] = ()) -> Frame:
    """The cells as a frame, with a figure for each key that the sweep set; without a title if one of ours tells it."""
    shown = {setting.keys[0] for setting in JOB_SETTINGS if setting.keys}
    titles = {key: "" if key in shown and cell.source != "imported" else key for cell in cells for key in cell.varied}
    varied = [Figure[Any](key, title) for key, title in titles.items() if key not in BY_NAME]
    identities = [figure for figure in CELL_FIGURES if not figure.is_measured]
    measured = [figure for figure in CELL_FIGURES if figure.is_measured]
    rows = [cell_row(cell, titles) for cell in cells]
    return Frame(rows=tuple(rows), figures=(*identities, *varied, *measured), title=title, notes=notes)


def shown_frame(table: CellTable) -> Frame:
    """The cells under the figures that a table has room for: without what is the same in every row or in none.

    What is the same in every row is in `constants`.
    """
    rows = table.cells
    whole = cell_frame(rows, table.job, table.notes)
    figures = [
        msgspec.structs.replace(figure, unit=money_unit(figure.unit, rows))
        for figure in whole.figures
        if figure.title and not figure.only_csv
    ]
    told = whole.only(figures).varying([figure for figure, _ in constants(rows)])
    return whole.only([LABEL, *(figure for figure in told.figures if figure.name != LABEL.name)])


def constants(cells: Sequence[CellRow]) -> tuple[tuple[Figure[Any], str], ...]:
    """What is the same in every row, and its text; of a row without figures what is not known differs in nothing."""
    same: list[tuple[Figure[Any], str]] = []
    frame = cell_frame(cells)
    for figure in frame.figures:
        if not figure.title or figure.only_csv or figure.is_measured or figure.name == LABEL.name:
            continue
        texts = {text for row in frame.rows if (text := figure.tell(row)) != UNKNOWN or row.item.state == MEASURED}
        # Of a method without adapters the rank is not unknown: there is none.
        is_of_all = figure.name != LORA_RANK.name or any(shown.name == METHOD.name for shown, _ in same)
        if len(texts) == 1 and texts != {UNKNOWN} and is_of_all:
            same.append((figure, texts.pop()))
    return tuple(same)


def money_unit(unit: str, rows: Sequence[CellRow]) -> str:
    """A unit with the currency of these rows in the place of `{money}`; with `units` where it is not known and one."""
    paid = currencies(rows)
    return unit.replace(f"for 1 {MONEY}", f"for 1 {currency_unit(paid, one=True)}").replace(MONEY, currency_unit(paid))
