"""cell_page: what a page shows of a table of cells: the sentence and key figures, charts, then the tables.

The page itself and its style are `page`'s; several runs beside each other are `run_page`'s.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Iterator
from typing import NamedTuple

from multinode.analyse.grid.cells import CellRow, CellTable, currencies, has_figures, other_job
from multinode.analyse.stats.spread import Ranged
from multinode.core.grid.cell_columns import BOUGHT_WITH, MONEY
from multinode.report.grid.cell_charts import MOST_BARS, bar_chart, memory_chart, tokens_chart
from multinode.report.grid.cell_sheet import (
    cells_sheet,
    lead,
    marks_sheet,
    missing_sheet,
    money_text,
    money_unit,
    unmeasured_sheet,
)
from multinode.report.render.escaping import sanitize
from multinode.report.render.page import chart_html, lead_html, page, section_html, sheet_html, tiles_html
from multinode.report.render.sheet import format_sig, percent

__all__ = ["cell_page", "cells_html"]

_TOO_MANY = f'<p class="note">The first {MOST_BARS} cells are drawn; the table has all of them.</p>\n'
_LONGEST_AXIS = 30
# A cell's name is read in one line where there is room for it.
_STYLE = "<style>.cells td:first-child { min-width: 13rem; }</style>\n"


class _Bars(NamedTuple):
    """A chart of bars that may be drawn: its title, the ending of its name, its axis, and the value of a row."""

    title: str
    ending: str
    axis: str
    value: Callable[[CellRow], Ranged | float | None]


def cell_page(table: CellTable) -> str:
    """The whole page of one table."""
    head = (
        f"<h1>{_text(table.job)}</h1>\n"
        f'<p class="note">{len(table.cells)} cells of {_text(table.run_id.replace(",", " and "))}</p>\n'
    )
    section = f'<section class="run" id="run-1">\n{head}{"".join(cells_html(table, "run-1"))}</section>\n'
    return page(f"multinode: {table.run_id}", [section])


def cells_html(table: CellTable, name: str) -> Iterator[str]:
    """Its parts; `name` is unique on the page."""
    yield lead_html(lead(table))
    if table.cheapest is not None:
        yield lead_html(table.cheapest.sentence)
    yield tiles_html(_key_figures(table))
    yield from _bars(table, name)
    for title, ending, chart in (
        ("memory over the batch", "memory", memory_chart(table)),
        ("tokens/s over the sequence length", "tokens", tokens_chart(table)),
    ):
        if chart is not None:
            yield section_html(title, [chart_html(chart.figure, f"{name}-{ending}", rows=chart.rows)])
    yield f'{_STYLE}<div class="cells">{sheet_html(cells_sheet(table))}</div>\n'
    for sheet in (unmeasured_sheet(table), marks_sheet(table), missing_sheet(table)):
        yield sheet_html(sheet)


def _bars(table: CellTable, name: str) -> Iterator[str]:
    """The charts of bars that say something."""
    note = _TOO_MANY if len(table.cells) > MOST_BARS else ""
    for wanted in _wanted(table):
        level = 1.0 if wanted.ending == "relative" else None
        chart = bar_chart(table, wanted.value, _axis(wanted.axis), level=level)
        if chart is not None and not (wanted.ending == "network" and _is_alone(table)):
            yield section_html(
                wanted.title, [chart_html(chart.figure, f"{name}-{wanted.ending}", rows=chart.rows), note]
            )


def _wanted(table: CellTable) -> Iterator[_Bars]:
    hourly = money_unit(f"samples for 1 {MONEY}", table.cells)
    bought = money_unit(f"samples/s for {BOUGHT_WITH:,} {MONEY}", table.cells)
    relative = f"relative to {table.baseline}"
    yield _Bars("samples/s by cell", "speed", "samples/s", lambda row: row.samples_per_s)
    yield _Bars(relative, "relative", "times the baseline's samples/s", lambda row: row.relative)
    yield _Bars("samples for what an hour costs", "hourly", hourly, lambda row: row.samples_per_money)
    yield _Bars("speed for what the devices cost", "purchase", bought, _bought)
    # On one node it does not pass the network: it is what two workers cost there.
    yield _Bars("exposed communication", "network", "exposed, % of a step", _network_percent)


def _axis(text: str) -> str:
    """As long as a narrow page is wide; nothing in it is markup, though a currency is a stranger's word."""
    text = sanitize(text)
    return html.escape(text if len(text) <= _LONGEST_AXIS else f"{text[: _LONGEST_AXIS - 3]}...")


def _bought(row: CellRow) -> float | None:
    speed = row.samples_per_s_per_purchase
    return None if speed is None else BOUGHT_WITH * speed


def _network_percent(row: CellRow) -> float | None:
    return None if row.network_share is None else 100 * row.network_share


def _is_alone(table: CellTable) -> bool:
    """Whether no cell has a network to wait for."""
    return all(row.world_size == 1 or not row.network_share for row in table.cells)


def _key_figures(table: CellTable) -> Iterator[tuple[str, str]]:
    """The best of the figures that one looks at first, and whose it is."""
    rows = [row for row in table.cells if has_figures(row)]
    # What is paid in two currencies, or for two jobs, has no cheapest.
    of_one_currency = len(currencies(rows)) <= 1
    of_one_job = of_one_currency and not other_job([row for row in rows if row.whole_cost is not None])
    best: tuple[tuple[str, Callable[[CellRow], float | None], Callable[[float | None], str], int], ...] = (
        ("most samples/s", lambda row: _value(row.samples_per_s), format_sig, 1),
        ("most tokens/s a worker (TGS)", lambda row: _value(row.tgs), format_sig, 1),
        ("highest MFU", lambda row: row.mfu, percent, 1),
        ("least memory of a worker (GiB)", lambda row: row.peak_memory_gib, format_sig, -1),
        (
            "most samples for a unit of money",
            lambda row: row.samples_per_money if of_one_currency else None,
            format_sig,
            1,
        ),
        ("cheapest whole job", lambda row: row.whole_cost if of_one_job else None, money_text, -1),
    )
    for name, value, tell, sign in best:
        known = [(found, row) for row in rows if (found := value(row)) is not None]
        if known:
            found, row = max(known, key=lambda one: sign * one[0])
            yield f"{name}: {row.label}", tell(found)


def _value(measured: Ranged | None) -> float | None:
    return measured.value if measured is not None else None


def _text(text: str) -> str:
    return html.escape(sanitize(text))
