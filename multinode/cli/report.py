"""`multinode report`: `show` that writes: a page that needs nothing from outside, Markdown, CSV or JSON."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from multinode.cli.live import show_stage
from multinode.cli.options import Json, RunIds, expand_options
from multinode.cli.output import note, print_blocks, print_document, screen_width
from multinode.cli.panels import examples
from multinode.cli.table import FormOptions
from multinode.records.run_directory import runs_root

if TYPE_CHECKING:
    from multinode.results.forms import AnswerForm
    from multinode.results.run_page import Report


def register(app: typer.Typer) -> None:
    """Add the verb to the command."""
    app.command(epilog=examples("report last", "report last --format markdown"))(expand_options(report))


def report(*, run_ids: RunIds = None, form: FormOptions, as_json: Json = False) -> None:
    """Write the results of runs to a file. By default, write a page with charts to RUN.html in this directory."""
    if form.output is None and form.form in {None, "html"}:
        form = dataclasses.replace(form, output=Path())
    chosen = form.choose(as_json=as_json, usual="html")
    loaded, written = _answer(run_ids or ["last"], form, chosen)
    if as_json and written:
        paths = [str(path) for path in written]
        names = [run.run_id for run in loaded.runs]
        record = {"schema": "multinode.report/2", "runs": names, "path": paths[0], "paths": paths}
        print_document(record | {"samples": [str(path) for path in loaded.sample_folders]})
    else:
        _print_answer(loaded, written, form, chosen, as_json=as_json)


def show_answer(run_ids: list[str], form: FormOptions, *, as_json: bool) -> None:
    """The answer of one or more runs in a form, in a file or on stdout."""
    chosen = form.choose(as_json=as_json)
    loaded, written = _answer(run_ids, form, chosen)
    _print_answer(loaded, written, form, chosen, as_json=as_json)


def _answer(run_ids: list[str], form: FormOptions, chosen: AnswerForm) -> tuple[Report, tuple[Path, ...]]:
    from multinode.results.run_page import load_report, write_answer

    with show_stage() as say:
        loaded = load_report(runs_root(), run_ids, say)
    return loaded, write_answer(loaded, chosen, form.output) if form.output is not None else ()


def _print_answer(
    loaded: Report, written: tuple[Path, ...], form: FormOptions, chosen: AnswerForm, *, as_json: bool
) -> None:
    from multinode.results.run_page import answer_document, answer_text, report_blocks

    for path in written:
        typer.echo(path, err=as_json)
    if as_json:
        print_document(answer_document(loaded))
    elif written:
        for path in loaded.sample_folders:
            note(f"raw samples, one JSON object per line: {path}")
    elif chosen == "table":
        print_blocks(report_blocks(loaded, screen_width()), details=form.details)
    else:
        typer.echo(answer_text(loaded, chosen), nl=False)
