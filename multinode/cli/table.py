"""`multinode table`: the tables of sweeps and imports: sorted, filtered, priced, relative to a row, in any form."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from multinode.cli.inputs import parse_option
from multinode.cli.options import Deadline, Json, PricesFile, Where, expand_options
from multinode.cli.output import print_document, print_table
from multinode.errors import UsageError
from multinode.store.run_directory import runs_root
from multinode.store.text_file import require_directory, write_text
from multinode.units import parse_duration

if TYPE_CHECKING:
    from multinode.analyse.grid.cell_table import Look
    from multinode.analyse.grid.cells import CellTable

__all__ = ["ViewOptions", "print_cells", "register"]

_Form = Literal["table", "markdown", "csv", "html"]

# A table in a file or a pipe is not cut to the width of a terminal that is not there.
_WIDE = 200
_FORMS: dict[str, _Form] = {
    ".html": "html",
    ".htm": "html",
    ".md": "markdown",
    ".csv": "csv",
    ".txt": "table",
    "": "table",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ViewOptions:
    """How a table is looked at."""

    sort: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="Sort by this value, the least first; -COLUMN: the greatest.")
    ] = None
    where: Where = None
    baseline: Annotated[
        str | None, typer.Option(metavar="CELL", help="The row that the others are relative to; else the first.")
    ] = None
    prices: PricesFile = None
    deadline: Deadline = None

    def read(self, *, beside: bool = True) -> Look:
        """What is asked for; `beside` a baseline, where one is named.

        Raises:
            UsageError: the prices cannot be read, or the deadline is none.
        """
        from multinode.analyse.grid.cell_table import Look
        from multinode.store.hostfile import load_prices

        return Look(
            baseline=self.baseline if beside else None,
            sort=self.sort,
            where=tuple(self.where or ()),
            prices=load_prices(self.prices)[0] if self.prices is not None else None,
            deadline_s=parse_option("--deadline", self.deadline, parse_duration) if self.deadline is not None else None,
        )


def register(app: typer.Typer) -> None:
    """Add the verb to the command."""
    app.command()(expand_options(table))


def table(
    *,
    run_ids: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RUN]...", help="Sweeps and imports: an id, the beginning of one, or `last`."),
    ] = None,
    look: ViewOptions,
    form: Annotated[
        _Form | None,
        typer.Option("--format", help="How it is shown; else as the ending of -o says, or as a table."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write it there: .html, .md, .csv or text.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show the table of a sweep or an import, or several in one; sorted, filtered, priced, relative to any row."""
    from multinode.workflows.grid.sweep_table import load_tables

    _refuse(form, output, as_json=as_json)
    found = load_tables(runs_root(), run_ids or ["last"], look.read())
    form = form or _FORMS[_ending(output)]
    if output is not None:
        write_text(output, _text(found, form))
        typer.echo(output, err=as_json)
    if as_json:
        print_document(found)
    elif output is None:
        print_cells(found, look.sort, form)


def print_cells(found: CellTable, sort: str | None = None, form: _Form = "table") -> None:
    """A table on stdout, in as many columns as the terminal has; what it is sorted by is among them."""
    from rich.console import Console

    from multinode.analyse.grid.cells import our_name
    from multinode.report.grid.cell_sheet import cells_terminal

    if form != "table":
        typer.echo(_text(found, form), nl=False)
        return
    console = Console()
    width = console.width if console.is_terminal else _WIDE
    print_table(cells_terminal(found, width, our_name(sort.removeprefix("-")) if sort is not None else None))


def _refuse(form: str | None, output: Path | None, *, as_json: bool) -> None:
    """What contradicts itself, before anything is read.

    Raises:
        UsageError: it does.
    """
    if output is not None:
        require_directory(output.parent)
        if form is None and _ending(output) not in _FORMS:
            known = ", ".join(filter(None, _FORMS))
            raise UsageError(f"-o {output}: no form is called {output.suffix}", hint=f"{known}; or say which --format")
    elif form == "html":
        raise UsageError("a page is for a file", hint="name it: -o table.html")
    elif form is not None and as_json:
        raise UsageError(f"--format {form} and --json both print on stdout", hint="name a file for one: -o FILE")


def _ending(output: Path | None) -> str:
    return output.suffix.lower() if output is not None else ""


def _text(found: CellTable, form: _Form) -> str:
    if form == "html":
        from multinode.report.grid.cell_page import cell_page

        return cell_page(found)
    if form == "table":
        from rich.console import Console

        from multinode.report.grid.cell_sheet import cells_terminal

        file = io.StringIO()
        Console(file=file, width=_WIDE, color_system=None).print(cells_terminal(found, _WIDE))
        return file.getvalue()
    from multinode.report.grid.cell_export import cell_csv, cell_markdown

    return cell_csv(found) if form == "csv" else "".join(cell_markdown(found))
