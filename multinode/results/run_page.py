"""run_page: the answer of runs in each of its forms: a page with charts, Markdown, CSV, JSON, a terminal's text."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePath

import msgspec

from multinode.contrast.figures import Contrast
from multinode.contrast.side import load_contrast
from multinode.errors import UsageError
from multinode.launch.outcome import key_figures
from multinode.profile.export import csv_files
from multinode.records.files import document_text, write_text
from multinode.records.run import Run
from multinode.render.csv_text import blocks_csv
from multinode.render.sheet import Block, Column, Prose, Sheet, blocks_markdown, percent
from multinode.render.table import WIDE, screen_text
from multinode.render.terminal import block_parts
from multinode.results.forms import AnswerForm, answer_path
from multinode.results.result_files import results_of, show_run
from multinode.runs.stored_run import StoredRun, load_run
from multinode.sweep.figures import CellTable
from multinode.sweep.measure import load_table
from multinode.sweep.screen import cell_csv
from multinode.sweep.screen import show as show_table
from multinode.sweep.table import combine
from multinode.units import UNKNOWN, format_duration, format_sig


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


def _blocks(run: StoredRun, width: int = WIDE) -> Iterator[Block]:
    """Everything known of a run, below its name."""
    yield from _head(run.run)
    yield from show_run(run, PurePath(run.run_id), width)


def _head(run: Run) -> Iterator[Block]:
    started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.started_s))
    took = f", took {format_duration(run.ended_s - run.started_s)}" if run.ended_s is not None else ""
    names = ", ".join(node.name for node in run.nodes)
    yield Prose(run.job, "heading", detail="page")
    where = f"; {run.extent}: {names}" if names else ""
    yield Prose(f"run {run.run_id}, {run.outcome}{where}; began {started}{took}", "note", detail="page")


def _tiles(run: StoredRun) -> dict[str, str]:
    contrast = run.result(load_contrast)
    if isinstance(contrast, Contrast):
        return {
            "speed-up": format_sig(contrast.speedup.value),
            "efficiency": percent(contrast.efficiency, ".0f"),
        }
    return dict(key_figures(run.summary)) if run.summary is not None else {}


_CELLS = "cells.csv"


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The runs of a report."""

    runs: tuple[StoredRun, ...]

    @property
    def sample_folders(self) -> tuple[Path, ...]:
        """Raw samples of the runs without a table, a JSON object per line."""
        return tuple(run.directory.path / "samples" for run in self.runs if run.result(load_table) is None)

    @property
    def cells(self) -> CellTable | None:
        """The tables of all runs as one, where several were named and each has one."""
        tables = [cells for run in self.runs if (cells := run.result(load_table)) is not None]
        return combine(tables) if len(tables) == len(self.runs) > 1 else None


def load_report(root: Path, names: Sequence[str], say: Callable[[str], None] = lambda _: None) -> Report:
    """Read runs by id, beginning of an id, or `last`. Duplicates are read once; `say` is told of long reading."""
    runs = {(stored := load_run(root, name, say)).run_id: stored for name in names}
    for stored in runs.values():
        _ = stored.summary, stored.sampled and stored.sampled.observed, [*results_of(stored)]
    return Report(runs=tuple(runs.values()))


def report_blocks(report: Report, width: int = WIDE) -> Iterator[Block]:
    """Everything known of the runs; `width` is that of a terminal, in characters."""
    if report.cells is not None:
        yield from show_table(report.cells, width)
        return
    if len(report.runs) > 1:
        yield _overview(report.runs)
    for run in report.runs:
        yield from _blocks(run, width)


def report_markdown(report: Report) -> str:
    """The report as Markdown for an issue or a wiki, without charts."""
    return answer_text(report, "markdown")


def answer_text(report: Report, form: AnswerForm) -> str:
    """The answer in a form, as a file has it.

    Raises:
        UsageError: JSON of several runs that are no tables.
    """
    table = report.cells
    if table is None and form in {"csv", "json"} and len(report.runs) == 1:
        table = report.runs[0].result(load_table)
    if table is not None:
        return table_text(table, form)
    texts: dict[AnswerForm, Callable[[], str]] = {
        "html": lambda: run_page(report.runs),
        "markdown": lambda: run_markdown(report.runs),
        "json": lambda: document_text(answer_document(report)),
        "csv": lambda: blocks_csv((run.run_id, _blocks(run)) for run in report.runs),
        "table": lambda: screen_text(block_parts(report_blocks(report), details=True)),
    }
    return texts[form]()


def table_text(table: CellTable, form: AnswerForm) -> str:
    """A table in a form, as a file has it."""
    if form == "html":
        return _table_page(table)
    if form == "json":
        return document_text(table)
    if form == "csv":
        return cell_csv(table)
    blocks = show_table(table)
    return blocks_markdown(blocks) if form == "markdown" else screen_text(block_parts(blocks, details=True))


def answer_document(report: Report) -> object:
    """The document of a run, or the tables of several as one.

    Raises:
        UsageError: there are several runs, and they have no tables.
    """
    if report.cells is not None:
        return report.cells
    if len(report.runs) > 1:
        raise UsageError(
            "--json prints one run, or several runs that all have tables",
            hint="print each run separately: multinode show RUN --json",
        )
    run = report.runs[0]
    table = run.result(load_table)
    return table if table is not None else run.document()


def _table_page(table: CellTable) -> str:
    """The page of one table, or of several in one."""
    from multinode.render.page import page, section

    head = (
        Prose(table.job, "heading"),
        Prose(f"{len(table.cells)} cells of {table.run_id.replace(',', ' and ')}", "note"),
    )
    return page(f"multinode: {table.run_id}", [section("run-1", (*head, *show_table(table)))])


def write_answer(report: Report, form: AnswerForm, output: Path) -> tuple[Path, ...]:
    """Write it to a file, or into a directory under the name of its first run, replacing an earlier one.

    CSV in a directory, which is created if missing, has the samples of the runs too, in several files.
    """
    if form == "csv" and (output.is_dir() or not output.suffix):
        return _write_csv(report, output)
    path = answer_path(output, [run.run_id for run in report.runs], form)
    write_text(path, answer_text(report, form))
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
    files = {_CELLS: cell_csv(combine(tables))} if tables else {}
    if len(tables) == len(runs):
        return files
    return csv_files(run.sampled.observed for run in runs if run.sampled is not None) | files
