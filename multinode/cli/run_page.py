"""run_page: runs as one self-contained page: verdict and key figures, then the curves, then every table."""

from __future__ import annotations

import html
import time
from collections.abc import Iterator, Sequence

import msgspec

from multinode.bench.figures import BenchReport
from multinode.bench.screen import bench_lines, bench_sheets
from multinode.contrast.figures import Contrast
from multinode.contrast.page import contrast_html
from multinode.contrast.screen import contrast_markdown
from multinode.experiment.cell_page import cells_html
from multinode.experiment.cell_sheet import cell_markdown
from multinode.experiment.cells import CellTable
from multinode.launch.outcome import attempt_sheet, failure_notes
from multinode.network.scan_chart import scan_chart
from multinode.network.screen import scan_lines
from multinode.network.size_scan import ScanReport
from multinode.profile.charts import loss_chart, split_chart, step_time_chart, timeline
from multinode.profile.observed import Observed
from multinode.profile.summary import Summary
from multinode.profile.summary_sheets import summary_sheets, verdict_sheet
from multinode.records.run import Run
from multinode.render.page import chart_html, page, section_html, sheet_html, text_html, tiles_html
from multinode.render.sheet import (
    UNKNOWN,
    Column,
    Sheet,
    code_markdown,
    figure,
    format_sig,
    html_text,
    percent,
    sheet_markdown,
    text_markdown,
)
from multinode.units import format_duration


class ReportedRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run and all that is known of it."""

    run: Run
    summary: Summary | None = None  # its figures; None where it never got so far
    observed: Observed | None = None  # its samples; None where it has no nodes of its own, as a contrast
    scan: ScanReport | None = None  # what an nccl-test measured; None of any other run
    contrast: Contrast | None = None  # what a contrast found; None of any other run
    cells: CellTable | None = None  # the table of a sweep or an import; None of any other run
    bench: BenchReport | None = None  # what a bench found out; None of any other run
    unread: str = ""  # what of it cannot be shown, and why, in a sentence; else empty

    @property
    def has_result(self) -> bool:
        """Whether there is something to show beside samples, or a word on why there is not."""
        return bool(self.unread) or any(
            found is not None for found in (self.scan, self.contrast, self.cells, self.bench)
        )


_CLOCKS = (
    "Times are in seconds since the end of the run's first step, by each node's own clock; the measured steps are "
    "shaded. Long curves show the minimum and maximum of each stretch."
)


def run_page(runs: Sequence[ReportedRun]) -> str:
    """The page; at least one run."""
    title = " and ".join(one.run.run_id for one in runs)
    overview = [sheet_html(_overview(runs))] if len(runs) > 1 else []
    sections = (_section(one, f"run-{number}") for number, one in enumerate(runs, 1))
    return page(f"multinode: {title}", [*overview, *sections])


def _overview(runs: Sequence[ReportedRun]) -> Sheet:
    names = ["run", "state"]
    tiles = [_tiles(one) for one in runs]
    shown = list(dict.fromkeys(name for one in tiles for name in one))
    rows = [
        (one.run.run_id, one.run.status, *(mine.get(name, UNKNOWN) for name in shown), one.run.job)
        for one, mine in zip(runs, tiles, strict=True)
    ]
    columns = [Column(name, words=True) for name in names] + [Column(name) for name in shown]
    return Sheet(title="runs", columns=(*columns, Column("job", words=True)), rows=tuple(rows))


def _section(one: ReportedRun, name: str) -> str:
    return f'<section class="run" id="{name}">\n{"".join(_parts(one, name))}</section>\n'


def _parts(one: ReportedRun, name: str) -> Iterator[str]:
    yield _head(one.run)
    summary, observed = one.summary, one.observed
    if one.unread:
        yield f"<p><b>{html_text(one.unread)}</b></p>\n"
    if one.contrast is not None:
        yield from contrast_html(one.contrast, name)
    if one.cells is not None:
        yield from cells_html(one.cells, name)
    if one.bench is not None:
        yield section_html("verdict", [text_html("\n".join(bench_lines(one.bench)))])
        yield from (sheet_html(sheet) for sheet in bench_sheets(one.bench))
        yield text_html("\n".join(one.bench.notes))
    if summary is not None:
        yield tiles_html(_key_figures(summary))
        yield sheet_html(verdict_sheet(summary))
    if one.scan is not None:
        chart = chart_html(scan_chart(one.scan.rows, one.scan.levels, ""), f"{name}-sweep", rows=2)
        yield section_html(f"collectives: {one.scan.title}", [chart, text_html("\n".join(scan_lines(one.scan)))])
    if observed is not None and any(node.samples for node in observed.nodes):
        yield from _curves(observed, summary, name)
    elif not one.has_result:
        yield "<p>This run has no recorded samples.</p>\n"
    if summary is not None:
        yield from (sheet_html(sheet) for sheet in summary_sheets(summary) if sheet.title != "verdict")


def _curves(observed: Observed, summary: Summary | None, name: str) -> Iterator[str]:
    steps = step_time_chart(observed)
    if steps is not None:
        note = f'<p class="note">{html.escape(observed.rule)}</p>\n'
        yield section_html("step time", [chart_html(steps, f"{name}-steps"), note])
    split = split_chart(summary.split) if summary is not None else None
    if split is not None and summary is not None:
        bars = -(-len(summary.split.workers) // 8)
        yield section_html("where each worker's step goes", [chart_html(split, f"{name}-split", rows=bars)])
    lanes = timeline(observed)
    if lanes is not None:
        note = f'<p class="note">{_CLOCKS}</p>\n'
        yield section_html("machines over time", [chart_html(lanes[0], f"{name}-time", rows=lanes[1]), note])
    loss = loss_chart(observed)
    if loss is not None:
        yield section_html("loss", [chart_html(loss, f"{name}-loss")])


def _head(run: Run) -> str:
    started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.started_s))
    took = f", took {format_duration(run.ended_s - run.started_s)}" if run.ended_s is not None else ""
    names = ", ".join(node.name for node in run.nodes)
    workers = f"{run.extent}: {names}"
    lines = [
        f"<h1>{html_text(run.job)}</h1>\n",
        f'<p class="note">{html_text(f"run {run.run_id}, {run.status}; {workers}")}; began {started}{took}</p>\n',
    ]
    if run.first_failure is not None:
        lines.append(f"<p><b>{html_text(run.first_failure.node)}: {html_text(run.first_failure.message)}</b></p>\n")
        notes = (f"<li>{name}: {html_text(text)}</li>" for name, text in failure_notes(run.first_failure))
        lines.append(f"<ul>{''.join(notes)}</ul>\n")
    if run.attempts:
        lines.append(sheet_html(attempt_sheet(run.attempts)))
    return "".join(lines)


def _tiles(one: ReportedRun) -> dict[str, str]:
    if one.contrast is not None:
        return {
            "speed-up": format_sig(one.contrast.speedup.value),
            "efficiency": percent(one.contrast.efficiency, ".0f"),
        }
    return dict(_key_figures(one.summary)) if one.summary is not None else {}


def _key_figures(summary: Summary) -> Iterator[tuple[str, str]]:
    used = summary.utilisation
    shares = [card.share for node in summary.nodes for card in node.cards if card.share is not None]
    figures = (
        ("step time (ms)", figure(summary.step_time_ms.median if summary.step_time_ms else None)),
        ("samples/s", figure(summary.samples_per_s)),
        ("TGS (tokens/s per worker)", figure(summary.tgs, ",.1f")),
        ("exposed communication", percent(summary.comm.exposed_share)),
        ("of the busiest link", percent(max(shares, default=None))),
        ("MFU", percent(used.mfu if used else None)),
        ("TFLOP/s per GPU", figure(used.model_tflops if used else None)),
    )
    yield from ((name, value) for name, value in figures if value != UNKNOWN)


def run_markdown(runs: Sequence[ReportedRun]) -> str:
    """Every run under its job's name, most important first."""
    return "\n".join("".join(_markdown_parts(one)).rstrip() + "\n" for one in runs)


def _markdown_parts(one: ReportedRun) -> Iterator[str]:
    run = one.run
    nodes = ", ".join(node.name for node in run.nodes)
    told = f"run {run.run_id}, {run.status}; {run.extent}: {nodes}"
    yield f"## {text_markdown(run.job)}\n\n{text_markdown(told)}.\n\n"
    if run.first_failure is not None:
        yield f"**{text_markdown(f'{run.first_failure.node}: {run.first_failure.message}')}**\n\n"
        yield "".join(f"- {name}: {text_markdown(text)}\n" for name, text in failure_notes(run.first_failure)) + "\n"
    if one.unread:
        yield f"{text_markdown(one.unread)}\n\n"
    if run.attempts:
        yield sheet_markdown(attempt_sheet(run.attempts))
    if one.contrast is not None:
        yield from contrast_markdown(one.contrast)
    if one.cells is not None:
        yield from cell_markdown(one.cells)
    if one.bench is not None:
        yield code_markdown("\n".join(bench_lines(one.bench))) + "\n"
        yield from (sheet_markdown(sheet) for sheet in bench_sheets(one.bench))
        yield code_markdown("\n".join(one.bench.notes)) + "\n"
    if one.scan is not None:
        yield code_markdown("\n".join(scan_lines(one.scan))) + "\n"
    if one.summary is not None:
        yield from (sheet_markdown(sheet) for sheet in summary_sheets(one.summary))
