"""`multinode import`: figures measured elsewhere, taken into the tables and comparisons of what is measured here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from multinode.cli.options import Json
from multinode.cli.output import print_directory, print_document
from multinode.cli.panels import examples
from multinode.cli.table import print_cells
from multinode.errors import UsageError
from multinode.records.run_directory import runs_root


def register(app: typer.Typer) -> None:
    """Add the verb to the command."""
    app.command("import", epilog=examples("import theirs.csv", "import theirs.md --column 'Speed=tokens/s'"))(import_)


def import_(
    path: Annotated[Path, typer.Argument(metavar="TABLE", help="Benchmarks as CSV, TSV, Markdown, JSON or YAML.")],
    prices: Annotated[
        Path | None, typer.Option(metavar="FILE", help="YAML of GPU prices. Prices in the table take precedence.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the table. Default: the file name.")] = None,
    default: Annotated[
        list[str] | None,
        typer.Option(metavar="COLUMN=VALUE", help="Value for rows without one, such as samples=1100. Repeatable."),
    ] = None,
    ignore: Annotated[list[str] | None, typer.Option(metavar="TITLE", help="Ignore this column. Repeatable.")] = None,
    column: Annotated[
        list[str] | None,
        typer.Option(metavar="TITLE=COLUMN", help="Map a title to a column: 'Speed=tokens/s'. Repeatable."),
    ] = None,
    skip_unknown: Annotated[
        bool, typer.Option("--skip-unknown", help="Ignore all columns with unknown titles.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Import benchmarks measured elsewhere as a run like a sweep. Imported rows are marked, contradictions reported."""
    from multinode.experiment.import_table import import_table
    from multinode.experiment.imported_table import Extras

    extras = Extras(
        defaults=_pairs("--default", "COLUMN=VALUE", "--default samples=1100 --default epochs=1", default or []),
        ignore=tuple(ignore or ()),
        columns=_pairs("--column", "TITLE=COLUMN", "--column 'Speed=tokens/s'", column or []),
        skip_unknown=skip_unknown,
    )
    imported = import_table(runs_root(), path, extras, name=name, prices_path=prices)
    if as_json:
        print_document(imported.table)
    else:
        print_cells(imported.table, more=f"multinode show {imported.table.run_id} --details")
    print_directory(imported.directory)


def _pairs(option: str, form: str, example: str, words: list[str]) -> dict[str, str]:
    """What stands before the equals sign, and behind it; a title may have one itself."""
    found: dict[str, str] = {}
    for word in words:
        left, equals, right = word.rpartition("=") if option == "--column" else word.partition("=")
        if not equals or not left or left in found:
            twice = "is given twice" if left in found else f"is not {form}"
            raise UsageError(f"{option} {word} {twice}", hint=f"for example: {example}")
        found[left] = right
    return found
