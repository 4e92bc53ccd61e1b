"""cell_page: what a page shows of a table of cells: the sentence and key figures, charts, then the tables.

The page itself and its style are `page`'s; several runs beside each other are `run_page`'s.
"""

from __future__ import annotations

import html
from collections.abc import Iterator
from typing import NamedTuple

from multinode.experiment.cell_charts import MOST_BARS, bar_chart, memory_chart, tokens_chart
from multinode.experiment.cell_sheet import (
    cells_sheet,
    lead,
    marks_sheet,
    missing_sheet,
    money_unit,
    tell,
    unmeasured_sheet,
)
from multinode.experiment.cells import CellTable, currencies, has_figures, other_job, value_of
from multinode.experiment.columns import BOUGHT_WITH, COLUMNS, MONEY
from multinode.render.page import chart_html, lead_html, page, section_html, sheet_html, tiles_html
from multinode.render.sheet import html_text, sanitize

_TOO_MANY = f'<p class="note">The first {MOST_BARS} cells are drawn; the table has all of them.</p>\n'
_LONGEST_AXIS = 30
# A cell's name is read in one line where there is room for it.
_STYLE = "<style>.cells td:first-child { min-width: 13rem; }</style>\n"


class _Bars(NamedTuple):
    """A chart of bars that may be drawn: its title, the ending of its name, its axis, and a row's value on it."""

    title: str
    ending: str
    axis: str
    value: str
    scale: float = 1.0


def cell_page(table: CellTable) -> str:
    """The whole page of one table."""
    head = (
        f"<h1>{html_text(table.job)}</h1>\n"
        f'<p class="note">{len(table.cells)} cells of {html_text(table.run_id.replace(",", " and "))}</p>\n'
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
    note = _TOO_MANY if len(table.cells) > MOST_BARS else ""
    for wanted in _wanted(table):
        level = 1.0 if wanted.ending == "relative" else None
        chart = bar_chart(table, wanted.value, _axis(wanted.axis), scale=wanted.scale, level=level)
        if chart is not None and not (wanted.ending == "network" and _is_alone(table)):
            yield section_html(
                wanted.title, [chart_html(chart.figure, f"{name}-{wanted.ending}", rows=chart.rows), note]
            )


def _wanted(table: CellTable) -> Iterator[_Bars]:
    hourly = money_unit(f"samples for 1 {MONEY}", table.cells)
    bought = money_unit(f"samples/s for {BOUGHT_WITH:,} {MONEY}", table.cells)
    relative = f"relative to {table.baseline}"
    yield _Bars("samples/s by cell", "speed", "samples/s", "samples_per_s")
    yield _Bars(relative, "relative", "times the baseline's samples/s", "relative")
    yield _Bars("samples per hourly cost", "hourly", hourly, "samples_per_money")
    yield _Bars("speed per purchase price", "purchase", bought, "samples_per_s_per_purchase", BOUGHT_WITH)
    # On one node it does not pass the network: it is what two workers cost there.
    yield _Bars("exposed communication", "network", "exposed, % of a step", "network_share", 100)


def _axis(text: str) -> str:
    text = sanitize(text)
    return html.escape(text if len(text) <= _LONGEST_AXIS else f"{text[: _LONGEST_AXIS - 3]}...")


def _is_alone(table: CellTable) -> bool:
    return all(row.world_size == 1 or not row.network_share for row in table.cells)


# What one looks at first: its name, the value of a row, and whether the most or the least is the best.
_KEY_FIGURES = (
    ("most samples/s", "samples_per_s", 1),
    ("highest tokens/s per worker (TGS)", "tgs", 1),
    ("highest MFU", "mfu", 1),
    ("lowest memory per worker (GiB)", "peak_memory_gib", -1),
    ("most samples per unit of money", "samples_per_money", 1),
    ("cheapest full run", "whole_cost", -1),
)


def _key_figures(table: CellTable) -> Iterator[tuple[str, str]]:
    rows = [row for row in table.cells if has_figures(row)]
    # What is paid in two currencies, or for two jobs, has no cheapest.
    unlike = set()
    if len(currencies(rows)) > 1:
        unlike = {"samples_per_money", "whole_cost"}
    elif other_job([row for row in rows if row.whole_cost is not None]):
        unlike = {"whole_cost"}
    for title, name, sign in _KEY_FIGURES:
        known = [(found, row) for row in rows if name not in unlike and (found := value_of(row, name)) is not None]
        if known:
            _, row = max(known, key=lambda one: sign * one[0])
            yield f"{title}: {row.label}", tell(COLUMNS[name], row)
