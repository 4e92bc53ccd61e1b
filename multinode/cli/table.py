"""`multinode table`: the tables of sweeps and imports: sorted, filtered, priced, relative to a row, in any form."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from multinode.cli.inputs import parse_option
from multinode.cli.options import Deadline, Json, PricesFile, Where
from multinode.cli.output import print_document, print_table
from multinode.errors import UsageError
from multinode.store.run_directory import runs_root
from multinode.store.text_file import require_directory, write_text
from multinode.units import parse_duration

if TYPE_CHECKING:
    from multinode.analyse.grid.cells import CellTable
    from multinode.core.cluster.prices import Prices

__all__ = ["print_cells", "register"]

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


def register(app: typer.Typer) -> None:
    """Add the verb to the command."""
    app.command()(table)


def table(
    run_ids: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RUN]...", help="Sweeps and imports: an id, the beginning of one, or `last`."),
    ] = None,
    sort: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="Sort by this value, the least first; -COLUMN: the greatest.")
    ] = None,
    where: Where = None,
    baseline: Annotated[
        str | None, typer.Option(metavar="CELL", help="The row that the others are relative to; else the first.")
    ] = None,
    prices: PricesFile = None,
    deadline: Deadline = None,
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
    from multinode.analyse.grid.cell_table import Look
    from multinode.workflows.grid.sweep_table import View, load_tables

    _refuse(form, output, as_json=as_json)
    view = View(
        look=Look(baseline=baseline, sort=sort, where=tuple(where or ())),
        prices=_prices(prices),
        deadline_s=_deadline(deadline),
    )
    found = load_tables(runs_root(), run_ids or ["last"], view)
    form = form or _FORMS[_ending(output)]
    if output is not None:
        write_text(output, _text(found, form))
        typer.echo(output, err=as_json)
    if as_json:
        print_document(found)
    elif output is None and form == "table":
        print_cells(found, sort)
    elif output is None:
        typer.echo(_text(found, form), nl=False)


def print_cells(found: CellTable, sort: str | None = None) -> None:
    """A table on stdout, in as many columns as the terminal has; what it is sorted by is among them."""
    from rich.console import Console

    from multinode.analyse.grid.cells import our_name
    from multinode.report.grid.cell_sheet import cells_terminal

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


def _prices(path: Path | None) -> Prices | None:
    from multinode.store.hostfile import load_prices

    return load_prices(path)[0] if path is not None else None


def _deadline(text: str | None) -> float | None:

    return parse_option("--deadline", text, parse_duration) if text is not None else None


def _text(found: CellTable, form: str) -> str:
    if form == "html":
        from multinode.report.grid.cell_page import cell_page

        return cell_page(found)
    if form == "csv":
        from multinode.report.grid.cell_export import cell_csv

        return cell_csv(found)
    if form == "markdown":
        from multinode.report.grid.cell_export import cell_markdown

        return "".join(cell_markdown(found))
    return _plain_text(found)


def _plain_text(found: CellTable) -> str:
    import io

    from rich.console import Console

    from multinode.report.grid.cell_sheet import cells_terminal

    file = io.StringIO()
    Console(file=file, width=_WIDE, color_system=None).print(cells_terminal(found, _WIDE))
    return file.getvalue()
