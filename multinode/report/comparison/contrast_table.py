"""The contrast in a terminal of 100 columns, and as Markdown."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from rich.table import Table

from multinode.analyse.comparison.contrast_figures import Contrast
from multinode.report.advice.advice_sheet import advice_sheet, describe_gain
from multinode.report.comparison.contrast_sheets import (
    contrast_verdict_sheet,
    differing_settings_sheet,
    each_node_sheet,
    measured_sides,
    side_sheet,
)
from multinode.report.prediction.forecast_sheets import break_even_sheet, what_if_sheet
from multinode.report.render.escaping import sanitize
from multinode.report.render.markdown import code_markdown, sheet_markdown, text_markdown
from multinode.report.render.sheet import Sheet
from multinode.report.render.table import sheet_table

__all__ = ["contrast_lines", "contrast_markdown", "contrast_table"]

# So many columns of figures beside their names fit into 100.
_MOST_ADVICE = 3
_MOST_LINKS = 2
_MOST_SIDES = 4
_WIDTH = 100
_NAME_WIDTH = 11


def contrast_table(contrast: Contrast) -> Table:
    """Its tables below each other; many sides make several, each with the baseline in it."""
    grid = Table.grid()
    for sheet in _sheets(contrast):
        if sheet.rows:
            grid.add_row(sheet_table(sheet))
            grid.add_row("")
    return grid


def contrast_lines(contrast: Contrast) -> Iterator[str]:
    """Verdict, reasons, differences, disturbances, and the link that it would take."""
    rows = contrast_verdict_sheet(contrast).rows
    # What was measured stands in the verdict.
    fitting = [one for one in contrast.advice if one.fits is not False and not one.measured]
    advised = [("advice", f"{one.name}: {describe_gain(one)}, predicted") for one in fitting[:_MOST_ADVICE]]
    beats = [("break-even", f"{name}: {told}") for name, told in break_even_sheet(contrast.forecast).rows[:_MOST_LINKS]]
    for name, text in (*rows, *beats, *advised):
        before = f"{name:<{_NAME_WIDTH}} "
        yield textwrap.fill(sanitize(text), _WIDTH, initial_indent=before, subsequent_indent=" " * len(before))


def _sheets(contrast: Contrast) -> Iterator[Sheet]:
    baseline, *others = measured_sides(contrast)
    for first in range(0, len(others), _MOST_SIDES - 1):
        yield side_sheet(contrast, (baseline, *others[first : first + _MOST_SIDES - 1]))
    yield differing_settings_sheet(contrast)
    yield each_node_sheet(contrast)


def contrast_markdown(contrast: Contrast) -> Iterator[str]:
    """Its parts, without the heading of the run that it is."""
    yield sheet_markdown(contrast_verdict_sheet(contrast))
    yield sheet_markdown(side_sheet(contrast, measured_sides(contrast)))
    yield sheet_markdown(differing_settings_sheet(contrast))
    yield sheet_markdown(each_node_sheet(contrast))
    yield sheet_markdown(advice_sheet(contrast.advice))
    for one in contrast.advice:
        if one.command:
            yield f"{text_markdown(one.name)}:\n\n{code_markdown(one.command)}\n"
    yield sheet_markdown(what_if_sheet(contrast.forecast))
    yield sheet_markdown(break_even_sheet(contrast.forecast))
