"""The tables of sweeps and imports: sorted, filtered, priced, relative to a row, in any form."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from multinode.cli.options import Deadline, Details, Json, PricesFile, Where
from multinode.cli.output import note, print_blocks, print_directory, print_document, screen_width
from multinode.cli.panels import examples
from multinode.decoding import parse_option
from multinode.errors import UsageError
from multinode.records.files import write_text
from multinode.records.run_directory import runs_root
from multinode.results.forms import AnswerForm, answer_path, choose_answer_form
from multinode.units import parse_duration

if TYPE_CHECKING:
    from multinode.render.sheet import Block
    from multinode.sweep.figures import CellTable
    from multinode.sweep.table import Look


@dataclasses.dataclass(frozen=True, kw_only=True)
class ViewOptions:
    """How a table is looked at."""

    sort: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="Sort by this column. Use -COLUMN for descending order.")
    ] = None
    where: Where = None
    baseline: Annotated[
        str | None, typer.Option(metavar="CELL", help="Row to compare the other rows with. Default: the first row.")
    ] = None
    prices: PricesFile = None
    deadline: Deadline = None

    @property
    def is_given(self) -> bool:
        """Whether any of them was asked for."""
        return any((self.sort, self.where, self.baseline, self.prices, self.deadline))

    def read(self, *, beside: bool = True) -> Look:
        """What is asked for; `beside` a baseline, where one is named."""
        from multinode.records.prices import load_prices
        from multinode.sweep.table import Look

        return Look(
            baseline=self.baseline if beside else None,
            sort=self.sort,
            where=tuple(self.where or ()),
            prices=load_prices(self.prices)[0] if self.prices is not None else None,
            deadline_s=parse_option("--deadline", self.deadline, parse_duration) if self.deadline is not None else None,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class FormOptions:
    """In which form an answer is shown, and where."""

    form: Annotated[
        AnswerForm | None,
        typer.Option(
            "--format",
            help=(
                "Output format. `html` is a page with charts, `markdown` is for an issue or a wiki, and `csv` contains "
                "the cells of a sweep or the figures of any other run. Default: from the suffix of --output, or a "
                "table."
            ),
        ),
    ] = None
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE|DIR",
            help=(
                "Output file (.html, .md, .csv, .json or .txt) or directory. With csv and a directory, multinode also "
                "writes the samples."
            ),
        ),
    ] = None

    details: Details = False

    @property
    def is_given(self) -> bool:
        """Whether a form was asked for."""
        return self.form is not None or self.output is not None

    def choose(self, *, as_json: bool, usual: AnswerForm = "table") -> AnswerForm:
        """The form; what contradicts itself is refused before anything is read.

        Raises:
            UsageError: it does.
        """
        form = choose_answer_form(self.form, self.output, usual)
        if self.output is None and form == "html":
            raise UsageError("html needs an output file", hint="use --output table.html")
        if self.output is None and form not in {"table", "json"} and as_json:
            raise UsageError(
                f"--format {form} and --json both print on stdout", hint="write one of them to a file: -o FILE"
            )
        return form


def show_tables(run_ids: list[str], look: ViewOptions, form: FormOptions, *, as_json: bool) -> None:
    """The table of one or more sweeps or imports, with the given options."""
    from multinode.sweep.measure import load_tables

    form.choose(as_json=as_json)
    show_table(load_tables(runs_root(), run_ids, look.read()), form, look.sort, as_json=as_json)


def show_table(table: CellTable, form: FormOptions, sort: str | None, *, as_json: bool) -> None:
    """Write it, or print it."""
    from multinode.results.run_page import table_text

    if _is_written(form, table.run_id.split(","), lambda chosen: table_text(table, chosen), table, as_json=as_json):
        return
    print_cells(table, sort, details=form.details)


def show_blocks(
    form: FormOptions, title: str, blocks: Sequence[Block], document: object, *, as_json: bool, below: Iterable[Block]
) -> None:
    """Write an answer that is not stored, or print it, on a terminal with the commands `below` it."""
    from multinode.results.answer import answer_in

    names = (title.replace(" ", "-"),)
    if _is_written(form, names, lambda chosen: answer_in(chosen, title, blocks, document), document, as_json=as_json):
        return
    print_blocks((*blocks, *below), details=form.details)


def write_answer(
    form: FormOptions, title: str, blocks: Sequence[Block], document: object, *, as_json: bool
) -> FormOptions:
    """Write an answer to a file beside what is printed, if one is named; returns the form of the latter."""
    if form.output is None:
        return form
    from multinode.results.answer import answer_in

    chosen = form.choose(as_json=as_json)
    path = answer_path(form.output, (title,), chosen)
    write_text(path, answer_in(chosen, title, blocks, document))
    note(f"answer: {path}")
    return dataclasses.replace(form, form=None, output=None)


def _is_written(
    form: FormOptions, names: Sequence[str], text: Callable[[AnswerForm], str], document: object, *, as_json: bool
) -> bool:
    """Write or print an answer in the given form; returns False for the tables of a terminal."""
    chosen = form.choose(as_json=as_json)
    if form.output is not None:
        path = answer_path(form.output, names, chosen)
        write_text(path, text(chosen))
        typer.echo(path, err=as_json)
    if as_json:
        print_document(document)
    elif form.output is None and chosen != "table":
        typer.echo(text(chosen), nl=False)
    return as_json or form.output is not None or chosen != "table"


def print_cells(table: CellTable, sort: str | None = None, *, details: bool = False) -> None:
    """A table on stdout that fits the terminal; the sort column is always included."""
    from multinode.sweep.frame import cell_frame
    from multinode.sweep.screen import show

    first = cell_frame(table.cells).figure(sort.removeprefix("-")).name if sort is not None else None
    print_blocks(show(table, screen_width(), first), details=details)


def register(app: typer.Typer) -> None:
    """Add the verb to the command."""
    app.command("import", epilog=examples("import theirs.csv", "import theirs.md --column 'Speed=tokens/s'"))(import_)


def import_(
    path: Annotated[
        Path, typer.Argument(metavar="TABLE", help="Benchmarks as CSV, TSV, Markdown, aligned text, JSON or YAML.")
    ],
    prices: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="YAML file of GPU prices. Prices in the table take precedence."),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the table. Default: the file name.")] = None,
    default: Annotated[
        list[str] | None,
        typer.Option(
            metavar="COLUMN=VALUE",
            help="Value for rows that have none in this column, such as samples=1100. Repeatable.",
        ),
    ] = None,
    ignore: Annotated[list[str] | None, typer.Option(metavar="TITLE", help="Ignore this column. Repeatable.")] = None,
    column: Annotated[
        list[str] | None,
        typer.Option(metavar="TITLE=COLUMN", help="Map a title to a column, such as 'Speed=tokens/s'. Repeatable."),
    ] = None,
    skip_unknown: Annotated[
        bool, typer.Option("--skip-unknown", help="Ignore all numeric columns with unknown titles.")
    ] = False,
    number: Annotated[
        int | None,
        typer.Option(
            "--table",
            metavar="N",
            help=(
                "Number of the table to import, starting at 1, if the file has several. Default: the only table with "
                "results."
            ),
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Import benchmarks measured elsewhere and store them as a run. Imported rows are marked.

    multinode reports contradictions in the table.
    """
    from multinode.tables.imported_rows import import_table
    from multinode.tables.imported_table import Extras

    extras = Extras(
        defaults=_pairs("--default", "COLUMN=VALUE", "--default samples=1100 --default epochs=1", default or []),
        ignore=tuple(ignore or ()),
        columns=_pairs("--column", "TITLE=COLUMN", "--column 'Speed=tokens/s'", column or []),
        skip_unknown=skip_unknown,
        table=number,
    )
    imported = import_table(runs_root(), path, extras, name=name, prices_path=prices)
    if as_json:
        print_document(imported.table)
    else:
        print_cells(imported.table)
    print_directory(imported.directory)


def _pairs(option: str, form: str, example: str, words: list[str]) -> dict[str, str]:
    """What stands before the equals sign, and behind it; a title may have one itself."""
    prices: dict[str, str] = {}
    for word in words:
        left, equals, right = word.rpartition("=") if option == "--column" else word.partition("=")
        if not equals or not left or left in prices:
            twice = "is given twice" if left in prices else f"is not {form}"
            raise UsageError(f"{option} {word} {twice}", hint=f"for example: {example}")
        prices[left] = right
    return prices
