"""cell_markdown: a table of cells as Markdown for an issue or a wiki."""

from __future__ import annotations

from collections.abc import Iterator

from multinode.analyse.grid.cells import CellTable
from multinode.report.grid.cell_sheet import cells_sheet, lead, marks_sheet, unmeasured_sheet
from multinode.report.render.markdown import sheet_markdown, text_markdown

__all__ = ["cell_markdown"]


def cell_markdown(table: CellTable) -> Iterator[str]:
    """Its parts: the sentence, the table with all its columns, what was not measured, what is marked."""
    yield f"{text_markdown(lead(table))}\n\n"
    if table.cheapest is not None:
        yield f"{text_markdown(table.cheapest.sentence)}\n\n"
    for sheet in (cells_sheet(table), unmeasured_sheet(table), marks_sheet(table)):
        yield sheet_markdown(sheet)
