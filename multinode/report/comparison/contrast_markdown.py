"""contrast_markdown: a contrast as Markdown: verdict, reasons, both sides, what would change it, what if."""

from __future__ import annotations

from collections.abc import Iterator

from multinode.analyse.comparison.contrast_figures import Contrast
from multinode.report.comparison.contrast_sheets import (
    contrast_verdict_sheet,
    differing_settings_sheet,
    each_node_sheet,
)
from multinode.report.comparison.contrast_sides import measured_sides, side_sheet
from multinode.report.prediction.contrast_outlook import advice_sheet, break_even_sheet, what_if_sheet
from multinode.report.render.markdown import code_markdown, sheet_markdown, text_markdown

__all__ = ["contrast_markdown"]


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
