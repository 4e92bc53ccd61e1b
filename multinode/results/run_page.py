"""run_page: runs as one self-contained page, or as Markdown: verdict and key figures, curves, then every table."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal, cast

import msgspec

from multinode.bench.measure import load_bench
from multinode.bench.screen import show as show_bench
from multinode.contrast.screen import contrast_blocks
from multinode.contrast.side import load_contrast
from multinode.contrast.unfinished import load_unfinished, unfinished_blocks
from multinode.errors import UsageError
from multinode.launch.ending import failure_notes, hang_words
from multinode.network.measure import load_scan
from multinode.network.nccl_tuning import show as show_nccl_tune
from multinode.network.screen import show as show_scan
from multinode.network.tune import load_nccl_tune
from multinode.profile.export import csv_files
from multinode.profile.summary import Summary
from multinode.profile.summary_sheets import summary_sheets, verdict_sheet
from multinode.records.files import choose_form, write_text
from multinode.records.run import Attempt, Run
from multinode.render.sheet import Block, Chart, Charts, Column, Prose, Sheet, Tiles, blocks_markdown, figure, percent
from multinode.runs.stored_run import StoredRun, load_run
from multinode.stats.estimate import value_of
from multinode.stats.unknown import or_none
from multinode.sweep.cell_sheet import cell_blocks, cell_csv, combined
from multinode.sweep.cells import CellTable
from multinode.sweep.sweep import load_table
from multinode.units import UNKNOWN, format_duration, format_sig

# What a verb may have left beside figures and samples.
_READERS = (load_contrast, load_unfinished, load_scan, load_table, load_bench, load_nccl_tune)


def _has_result(run: StoredRun) -> bool:
    """Whether there is something to show beside samples, or a word on why there is not."""
    return any(run.result(load_contrast)) or any(run.result(read) is not None for read in _READERS[1:])


_CLOCKS = (
    "Times are in seconds since the end of the run's first step, by each node's own clock; the measured steps are "
    "shaded. Long curves show the minimum and maximum of each stretch."
)


def run_page(runs: Sequence[StoredRun]) -> str:
    """The page; at least one run."""
    from multinode.render.blocks import blocks_html
    from multinode.render.page import page, section

    title = " and ".join(run.run.run_id for run in runs)
    names = [f"run-{number}" for number in range(1, len(runs) + 1)]
    sections = (section(name, _blocks(run)) for run, name in zip(runs, names, strict=True))
    return page(f"multinode: {title}", [blocks_html([_overview(runs)] if len(runs) > 1 else []), *sections])


def run_markdown(runs: Sequence[StoredRun]) -> str:
    """Every run under its job's name, most important first, without charts."""
    return "\n".join(blocks_markdown(_blocks(run)).rstrip() + "\n" for run in runs)


def _overview(runs: Sequence[StoredRun]) -> Sheet:
    names = ["run", "state"]
    tiles = [_tiles(run) for run in runs]
    shown = list(dict.fromkeys(name for tile in tiles for name in tile))
    rows = [
        (run.run.run_id, run.run.status, *(mine.get(name, UNKNOWN) for name in shown), run.run.job)
        for run, mine in zip(runs, tiles, strict=True)
    ]
    columns = [Column(name, words=True) for name in names] + [Column(name) for name in shown]
    return Sheet(title="runs", columns=(*columns, Column("job", words=True)), rows=tuple(rows))


def _blocks(run: StoredRun) -> Iterator[Block]:
    """Everything known of a run."""
    yield from _head(run.run)
    scan, (_, unread) = run.result(load_scan), run.result(load_contrast)
    # A scan has no training, so figures of one do not apply.
    summary = run.summary if scan is None else None
    if unread:
        yield Prose(unread, "strong")
    yield from _contrast_blocks(run)
    if (cells := run.result(load_table)) is not None:
        yield from cell_blocks(cells)
    if (bench := run.result(load_bench)) is not None:
        yield from show_bench(bench)
    if summary is not None:
        yield Tiles(tuple(_key_figures(summary)))
        yield verdict_sheet(summary)
    if scan is not None:
        yield from show_scan(scan)
    if (nccl_tune := run.result(load_nccl_tune)) is not None:
        yield from show_nccl_tune(nccl_tune)
    if run.sampled is not None and any(node.samples for node in run.sampled.observed.nodes):
        yield Charts(lambda: _step_charts(run))
    elif not _has_result(run):
        yield Prose("This run has no recorded samples.")
    if summary is not None:
        yield from (sheet for sheet in summary_sheets(summary) if sheet.title != "verdict")


def _contrast_blocks(run: StoredRun) -> Iterator[Block]:
    contrast, unread = run.result(load_contrast)
    if contrast is not None:
        yield from contrast_blocks(contrast)
    elif not unread and (unfinished := run.result(load_unfinished)) is not None:
        yield from unfinished_blocks(unfinished)


def _step_charts(run: StoredRun) -> Iterator[Chart]:
    if run.sampled is None:
        return
    observed, summary = run.sampled.observed, run.summary
    from multinode.profile.charts import loss_chart, split_chart, step_time_chart, timeline

    steps = step_time_chart(observed)
    if steps is not None:
        yield Chart(title="step time", figure=steps, name="steps", note=observed.rule)
    split = split_chart(summary.split) if summary is not None else None
    if split is not None and summary is not None:
        bars = -(-len(summary.split.workers) // 8)
        yield Chart(title="where each worker's step goes", figure=split, name="split", rows=bars)
    lanes = timeline(observed)
    if lanes is not None:
        yield Chart(title="machines over time", figure=lanes[0], name="time", rows=lanes[1], note=_CLOCKS)
    loss = loss_chart(observed)
    if loss is not None:
        yield Chart(title="loss", figure=loss, name="loss")


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


def _tiles(run: StoredRun) -> dict[str, str]:
    if (contrast := run.result(load_contrast)[0]) is not None:
        return {
            "speed-up": format_sig(contrast.speedup.value),
            "efficiency": percent(contrast.efficiency, ".0f"),
        }
    return dict(_key_figures(run.summary)) if run.summary is not None else {}


def _exposed(summary: Summary) -> str:
    share, known = percent(summary.comm.exposed_share), summary.split.steps.words
    return f"{share} ({known})" if known and share != UNKNOWN else share


def _key_figures(summary: Summary) -> Iterator[tuple[str, str]]:
    used, times = or_none(summary.utilisation), or_none(summary.step_time_ms)
    shares = [share for node in summary.nodes for nic in node.nics if (share := or_none(nic.share)) is not None]
    figures = (
        ("step time (ms)", figure(times.median.value if times else None)),
        ("samples/s", format_sig(value_of(summary.samples_per_s))),
        ("TGS (tokens/s per worker)", figure(value_of(summary.tgs), ",.1f")),
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

    runs: tuple[StoredRun, ...]

    @property
    def sample_folders(self) -> tuple[Path, ...]:
        """Raw samples of the runs without a table, a JSON object per line."""
        return tuple(run.directory.path / "samples" for run in self.runs if run.result(load_table) is None)

    @property
    def cells(self) -> CellTable | None:
        """The tables of all runs as one, where several were named and each has one."""
        tables = [cells for run in self.runs if (cells := run.result(load_table)) is not None]
        return combined(tables) if len(tables) == len(self.runs) > 1 else None


def load_report(root: Path, names: Sequence[str], say: Callable[[str], None] = lambda _: None) -> Report:
    """Read runs by id, beginning of an id, or `last`. Duplicates are read once; `say` is told of long reading."""
    runs = {(stored := load_run(root, name, say)).run_id: stored for name in names}
    for stored in runs.values():
        _ = stored.summary, stored.sampled and stored.sampled.observed
        for read in _READERS:
            stored.result(read)
    return Report(runs=tuple(runs.values()))


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


def _csv_files(runs: Sequence[StoredRun]) -> dict[str, str]:
    tables = [cells for run in runs if (cells := run.result(load_table)) is not None]
    files = {_CELLS: cell_csv(combined(tables))} if tables else {}
    if len(tables) == len(runs):
        return files
    return csv_files(run.sampled.observed for run in runs if run.sampled is not None) | files


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
