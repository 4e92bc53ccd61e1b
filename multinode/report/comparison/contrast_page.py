"""contrast_page: what a page shows of a contrast: verdict and key figures, charts, then every table.

The page itself and its style are `page`'s; several runs beside each other are `run_page`'s.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from multinode.analyse.comparison.contrast_figures import Contrast
from multinode.report.comparison.contrast_charts import bandwidth_chart, scaling_chart, step_chart
from multinode.report.comparison.contrast_sheets import (
    contrast_verdict_sheet,
    each_node_sheet,
    missing_sheet,
    settings_sheet,
)
from multinode.report.comparison.contrast_sides import cost_sheet, measured_sides, side_sheet
from multinode.report.prediction.contrast_outlook import advice_sheet, break_even_sheet, what_if_sheet
from multinode.report.render.page import chart_html, lead_html, section_html, sheet_html, text_html, tiles_html
from multinode.report.render.sheet import UNKNOWN, format_sig, percent

__all__ = ["contrast_html"]

# The height of a plot, in bars.
_BARS_A_PLOT = 4


def contrast_html(contrast: Contrast, name: str) -> Iterator[str]:
    """Its parts; `name` is unique on the page."""
    verdict = contrast_verdict_sheet(contrast)
    yield lead_html(contrast.verdict)
    yield tiles_html(_key_figures(contrast))
    yield sheet_html(msgspec.structs.replace(verdict, title="why", rows=verdict.rows[1:]))
    yield from _charts(contrast, name)
    yield sheet_html(side_sheet(contrast, measured_sides(contrast), costs=False))
    yield sheet_html(each_node_sheet(contrast))
    yield sheet_html(cost_sheet(contrast))
    yield sheet_html(advice_sheet(contrast.advice))
    yield _how(contrast)
    yield sheet_html(what_if_sheet(contrast.forecast))
    yield sheet_html(break_even_sheet(contrast.forecast))
    yield sheet_html(settings_sheet(contrast))
    yield sheet_html(missing_sheet(contrast))


def _key_figures(contrast: Contrast) -> Iterator[tuple[str, str]]:
    """What is known of the figures that one looks at first."""
    baseline, candidate = contrast.baseline, contrast.candidate
    figures = (
        ("speed-up", format_sig(contrast.speedup.value)),
        (f"efficiency ({contrast.scaling})", percent(contrast.efficiency, ".0f")),
        ("samples/s, baseline", format_sig(baseline.samples_per_s.value)),
        ("samples/s, candidate", format_sig(candidate.samples_per_s.value)),
        ("step time, baseline (ms)", format_sig(baseline.step_time_ms.value)),
        ("step time, candidate (ms)", format_sig(candidate.step_time_ms.value)),
        ("exposed communication, candidate", percent(candidate.exposed_share)),
    )
    yield from ((name, value) for name, value in figures if value != UNKNOWN)


def _charts(contrast: Contrast, name: str) -> Iterator[str]:
    split = step_chart(contrast)
    if split is not None:
        bars = -(-len(measured_sides(contrast)) // _BARS_A_PLOT)
        yield section_html("where a step goes", [chart_html(split, f"{name}-sides", rows=bars)])
    scaling = scaling_chart(contrast)
    if scaling is not None:
        yield section_html("scaling", [chart_html(scaling, f"{name}-scaling", rows=2)])
    links = bandwidth_chart(contrast)
    if links is not None:
        yield section_html("throughput over bandwidth", [chart_html(links, f"{name}-links", rows=2)])


def _how(contrast: Contrast) -> str:
    """The exact commands of the advice, to be copied."""
    told = [f"# {one.name}\n{one.command}" for one in contrast.advice if one.command]
    return section_html("how: options of multinode launch, or by hand", [text_html("\n\n".join(told))] if told else [])
