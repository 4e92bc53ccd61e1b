"""run_page: runs as one self-contained page, or as Markdown: verdict and key figures, curves, then every table."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal, cast

import msgspec

from multinode.bench.figures import BenchReport
from multinode.bench.measure import load_bench
from multinode.bench.screen import bench_lines, bench_sheets
from multinode.contrast.figures import Contrast
from multinode.contrast.screen import contrast_blocks
from multinode.contrast.side import load_contrast
from multinode.contrast.unfinished import UnfinishedContrast, load_unfinished, unfinished_blocks
from multinode.errors import UsageError
from multinode.launch.ending import failure_notes, hang_words
from multinode.network.screen import scan_lines
from multinode.network.size_scan import ScanReport
from multinode.profile.export import csv_files
from multinode.profile.observed import Observed
from multinode.profile.summary import Summary
from multinode.profile.summary_sheets import summary_sheets, verdict_sheet
from multinode.records.files import choose_form, write_text
from multinode.records.run import Attempt, Run
from multinode.records.run_directory import RunDirectory, list_runs
from multinode.render.sheet import Block, Chart, Column, Prose, Sheet, Tiles, blocks_markdown, figure, percent
from multinode.runs.stored_run import StoredRun, load_run
from multinode.sweep.cell_sheet import cell_blocks, cell_csv, combined
from multinode.sweep.cells import CellTable
from multinode.sweep.sweep import load_table
from multinode.units import UNKNOWN, format_duration, format_sig


class ReportedRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run and all that is known of it."""

    run: Run
    summary: Summary | None = None  # its figures; None where it never got so far
    observed: Observed | None = None  # its samples; None where it has no nodes of its own, as a contrast
    scan: ScanReport | None = None  # what an nccl-test measured; None of any other run
    contrast: Contrast | None = None  # what a contrast found; None of any other run
    unfinished: UnfinishedContrast | None = None  # what one has measured that has no result; None of any other run
    cells: CellTable | None = None  # the table of a sweep or an import; None of any other run
    bench: BenchReport | None = None  # what a bench found out; None of any other run
    unread: str = ""  # what of it cannot be shown, and why, in a sentence; else empty

    @property
    def has_result(self) -> bool:
        """Whether there is something to show beside samples, or a word on why there is not."""
        return bool(self.unread) or any(
            part is not None for part in (self.scan, self.contrast, self.unfinished, self.cells, self.bench)
        )


_CLOCKS = (
    "Times are in seconds since the end of the run's first step, by each node's own clock; the measured steps are "
    "shaded. Long curves show the minimum and maximum of each stretch."
)


def run_page(runs: Sequence[ReportedRun]) -> str:
    """The page; at least one run."""
    from multinode.render.blocks import blocks_html
    from multinode.render.page import page, section

    title = " and ".join(run.run.run_id for run in runs)
    names = [f"run-{number}" for number in range(1, len(runs) + 1)]
    sections = (section(name, _blocks(run, name)) for run, name in zip(runs, names, strict=True))
    return page(f"multinode: {title}", [blocks_html([_overview(runs)] if len(runs) > 1 else []), *sections])


def run_markdown(runs: Sequence[ReportedRun]) -> str:
    """Every run under its job's name, most important first, without charts."""
    return "\n".join(blocks_markdown(_blocks(run)).rstrip() + "\n" for run in runs)


def _overview(runs: Sequence[ReportedRun]) -> Sheet:
    names = ["run", "state"]
    tiles = [_tiles(run) for run in runs]
    shown = list(dict.fromkeys(name for tile in tiles for name in tile))
    rows = [
        (run.run.run_id, run.run.status, *(mine.get(name, UNKNOWN) for name in shown), run.run.job)
        for run, mine in zip(runs, tiles, strict=True)
    ]
    columns = [Column(name, words=True) for name in names] + [Column(name) for name in shown]
    return Sheet(title="runs", columns=(*columns, Column("job", words=True)), rows=tuple(rows))


def _blocks(run: ReportedRun, name: str | None = None) -> Iterator[Block]:
    """Everything known of a run; with charts if it has a `name` on a page."""
    yield from _head(run.run)
    charts = _charts(run, name) if name is not None else {}
    # A scan has no training, so figures of one do not apply.
    summary = run.summary if run.scan is None else None
    if run.unread:
        yield Prose(run.unread, "strong")
    yield from _contrast_blocks(run, charts.get("contrast", ()))
    if run.cells is not None:
        yield from cell_blocks(run.cells, charts.get("cells", ()))
    if run.bench is not None:
        yield Prose("\n".join(bench_lines(run.bench)), "verbatim", "verdict")
        yield from bench_sheets(run.bench)
        yield Prose("\n".join(run.bench.notes), "verbatim")
    if summary is not None:
        yield Tiles(tuple(_key_figures(summary)))
        yield verdict_sheet(summary)
    if run.scan is not None:
        yield from charts.get("scan", ())
        yield Prose("\n".join(scan_lines(run.scan)), "verbatim")
    if run.observed is not None and any(node.samples for node in run.observed.nodes):
        yield from charts.get("steps", ())
    elif not run.has_result:
        yield Prose("This run has no recorded samples.")
    if summary is not None:
        yield from (sheet for sheet in summary_sheets(summary) if sheet.title != "verdict")


def _contrast_blocks(run: ReportedRun, charts: Iterable[Block]) -> Iterator[Block]:
    if run.contrast is not None:
        yield from contrast_blocks(run.contrast, charts)
    if run.unfinished is not None:
        yield from unfinished_blocks(run.unfinished)


def _charts(run: ReportedRun, name: str) -> dict[str, Iterable[Block]]:
    from multinode.contrast.charts import contrast_charts
    from multinode.network.charts import scan_chart
    from multinode.sweep.cell_page import cell_charts

    charts: dict[str, Iterable[Block]] = {}
    if run.contrast is not None:
        charts["contrast"] = contrast_charts(run.contrast, name)
    if run.cells is not None:
        charts["cells"] = cell_charts(run.cells, name)
    if run.scan is not None:
        charts["scan"] = [scan_chart(run.scan, f"{name}-sweep")]
    if run.observed is not None:
        charts["steps"] = _step_charts(run.observed, run.summary, name)
    return charts


def _step_charts(observed: Observed, summary: Summary | None, name: str) -> Iterator[Chart]:
    from multinode.profile.charts import loss_chart, split_chart, step_time_chart, timeline

    steps = step_time_chart(observed)
    if steps is not None:
        yield Chart(title="step time", figure=steps, name=f"{name}-steps", note=observed.rule)
    split = split_chart(summary.split) if summary is not None else None
    if split is not None and summary is not None:
        bars = -(-len(summary.split.workers) // 8)
        yield Chart(title="where each worker's step goes", figure=split, name=f"{name}-split", rows=bars)
    lanes = timeline(observed)
    if lanes is not None:
        yield Chart(title="machines over time", figure=lanes[0], name=f"{name}-time", rows=lanes[1], note=_CLOCKS)
    loss = loss_chart(observed)
    if loss is not None:
        yield Chart(title="loss", figure=loss, name=f"{name}-loss")


def _head(run: Run) -> Iterator[Block]:
    started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.started_s))
    took = f", took {format_duration(run.ended_s - run.started_s)}" if run.ended_s is not None else ""
    names = ", ".join(node.name for node in run.nodes)
    yield Prose(run.job, "heading")
    where = f"; {run.extent}: {names}" if names else ""
    yield Prose(f"run {run.run_id}, {run.outcome}{where}; began {started}{took}", "note")
    if run.first_failure is not None:
        yield Prose(f"{run.first_failure.node}: {run.first_failure.message}", "strong")
        yield Prose("\n".join(f"{name}: {text}" for name, text in failure_notes(run.first_failure)), "items")
    if run.hang is not None:
        yield Prose(hang_words(run, run.hang), "strong")
        notes = (("hang", run.hang.message), ("fix", run.hang.hint))
        yield Prose("\n".join(f"{name}: {text}" for name, text in notes if text), "items")
    if run.attempts:
        yield attempt_sheet(run.attempts)


def _tiles(run: ReportedRun) -> dict[str, str]:
    if run.contrast is not None:
        return {
            "speed-up": format_sig(run.contrast.speedup.value),
            "efficiency": percent(run.contrast.efficiency, ".0f"),
        }
    return dict(_key_figures(run.summary)) if run.summary is not None else {}


def _exposed(summary: Summary) -> str:
    share, known = percent(summary.comm.exposed_share), summary.split.steps.words
    return f"{share} ({known})" if known and share != UNKNOWN else share


def _key_figures(summary: Summary) -> Iterator[tuple[str, str]]:
    used = summary.utilisation
    shares = [nic.share for node in summary.nodes for nic in node.nics if nic.share is not None]
    figures = (
        ("step time (ms)", figure(summary.step_time_ms.median if summary.step_time_ms else None)),
        ("samples/s", format_sig(summary.samples_per_s)),
        ("TGS (tokens/s per worker)", figure(summary.tgs, ",.1f")),
        ("exposed communication", _exposed(summary)),
        ("of the busiest link", percent(max(shares, default=None))),
        ("MFU", percent(used.mfu if used else None)),
        ("TFLOP/s per GPU", figure(used.model_tflops if used else None)),
    )
    yield from ((name, value) for name, value in figures if value != UNKNOWN)


ReportForm = Literal["html", "markdown", "csv"]
_ENDINGS = {".html": "html", ".htm": "html", ".md": "markdown"}
_SUFFIXES = {"html": "html", "markdown": "md"}
_CELLS = "cells.csv"


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Runs that are reported on."""

    runs: tuple[ReportedRun, ...]
    directories: tuple[Path, ...]  # where they lie; their raw samples are in `samples` there, a JSON object a line

    @property
    def cells(self) -> CellTable | None:
        """The tables of all runs as one, where several were named and each has one."""
        tables = [run.cells for run in self.runs if run.cells is not None]
        return combined(tables) if len(tables) == len(self.runs) > 1 else None


def load_report(root: Path, names: Sequence[str], say: Callable[[str], None] = lambda _: None) -> Report:
    """Read runs by id, beginning of an id, or `last`. Duplicates are read once."""
    stored_runs = {(stored := load_run(root, name)).run.run_id: stored for name in names}
    return Report(
        runs=tuple(_load(stored, say) for stored in stored_runs.values()),
        directories=tuple(stored.directory.path for stored in stored_runs.values()),
    )


def report_blocks(report: Report) -> Iterator[Block]:
    """Everything known of the runs, without charts."""
    if report.cells is not None:
        yield from cell_blocks(report.cells)
        return
    if len(report.runs) > 1:
        yield _overview(report.runs)
    for run in report.runs:
        yield from _blocks(run)


def report_markdown(report: Report) -> str:
    """The report as Markdown for an issue or a wiki, without charts."""
    return blocks_markdown(cell_blocks(report.cells)) if report.cells is not None else run_markdown(report.runs)


def choose_report_form(form: ReportForm | None, output: Path | None) -> ReportForm:
    """The form that is asked for, else that of the ending of `output`, before anything is read.

    Raises:
        UsageError: the ending is unknown, or CSV has no directory.
    """
    into = output is not None and (output.is_dir() or form == "csv")
    chosen = cast("ReportForm", choose_form(form, None if into else output, _ENDINGS))
    if chosen == "csv" and not into:
        raise UsageError("CSV needs an output directory", hint="use --format csv --output DIR")
    return chosen


def write_report(report: Report, form: ReportForm, output: Path) -> tuple[Path, ...]:
    """Write it to a file, or into a directory under the name of its first run, replacing an earlier one.

    CSV is several files in a directory, created if missing.
    """
    if form == "csv":
        return _write_csv(report, output)
    names = [run.run.run_id for run in report.runs]
    name = "-".join((names[0], *(["and-others"] if names[1:] else [])))
    path = output / f"{name}.{_SUFFIXES[form]}" if output.is_dir() else output
    if form == "markdown":
        text = report_markdown(report)
    elif report.cells is not None:
        from multinode.sweep.cell_page import cell_page

        text = cell_page(report.cells)
    else:
        text = run_page(report.runs)
    write_text(path, text)
    return (path,)


def _write_csv(report: Report, folder: Path) -> tuple[Path, ...]:
    files = _csv_files(report.runs)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{folder} cannot be created: {error.strerror}", hint=f"ls -ld {folder.parent}") from error
    for name, text in files.items():
        write_text(folder / name, text)
    return tuple(folder / name for name in files)


def _csv_files(runs: Sequence[ReportedRun]) -> dict[str, str]:
    tables = [run.cells for run in runs if run.cells is not None]
    files = {_CELLS: cell_csv(combined(tables))} if tables else {}
    if len(tables) == len(runs):
        return files
    return csv_files(run.observed for run in runs if run.observed is not None) | files


def _load(stored: StoredRun, say: Callable[[str], None]) -> ReportedRun:
    directory = stored.directory
    attempts = stored.run.attempts
    # The figures of a run that was restarted are those of its last attempt.
    last = directory.path.with_name(attempts[-1].run_id) if attempts else None
    # Another user's directory may have the name of an attempt that is no more.
    measured = RunDirectory(last) if last is not None and last in list_runs(directory.path.parent) else directory
    samples = StoredRun(measured, say)
    contrast, unread = load_contrast(directory)
    return ReportedRun(
        run=stored.run,
        summary=stored.summary,
        # A contrast has no nodes of its own: its sides' runs lie beside it.
        observed=samples.observed if samples.plan is not None else None,
        scan=directory.read("nccl-test.json", ScanReport),
        contrast=contrast,
        unfinished=load_unfinished(directory) if contrast is None and not unread else None,
        cells=load_table(directory),
        bench=load_bench(directory),
        unread=unread,
    )


def attempt_sheet(attempts: Sequence[Attempt]) -> Sheet:
    """One row per attempt: its steps, its workers, and the cost of its failure."""
    words, figures = ("run", "from", "ended"), ("workers", "global batch", "steps", "steps lost", "time lost")
    rows = [
        (
            attempt.run_id,
            attempt.checkpoint or "the beginning",
            _ending(attempt),
            figure(attempt.world_size or None, "d"),
            figure(attempt.global_batch, "d"),
            f"{attempt.first_step} to {attempt.last_step}",
            figure(attempt.lost_steps, "d"),
            format_duration(attempt.lost_s) if attempt.lost_s is not None else UNKNOWN,
        )
        for attempt in attempts
    ]
    columns = (*(Column(name, words=True) for name in words), *map(Column, figures))
    return Sheet(title="attempts", columns=columns, rows=tuple(rows))


def _ending(attempt: Attempt) -> str:
    failure = attempt.first_failure
    return attempt.status if failure is None else f"{attempt.status}: {failure.node}: {failure.message}"
