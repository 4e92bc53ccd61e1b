"""import: a table of figures measured elsewhere -> a stored table, like a sweep's. Reads and writes disk."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from multinode.analyse.grid.cell_prices import with_prices
from multinode.analyse.grid.cell_table import make_table
from multinode.analyse.grid.cells import CellTable
from multinode.analyse.grid.imported_rows import imported_rows
from multinode.core.grid.imported_table import FORMS, HINT, Extras, ImportedTable, parse_table
from multinode.core.run.run import Run
from multinode.errors import UsageError
from multinode.store.hostfile import load_prices
from multinode.store.run_directory import RunDirectory
from multinode.store.text_file import read_text
from multinode.workflows.grid.sweep_table import TABLE_FILE
from multinode.workflows.run.launch import make_run_id

__all__ = ["Foreign", "Imported", "import_table", "load_imported_table"]

_RULE = "Figures as the table has them; what it does not have follows from them by arithmetic, or is missing."


class Foreign(msgspec.Struct, frozen=True, kw_only=True):
    """What is imported.

    Attributes:
        path: of the table, a CSV or YAML.
        name: for people; None takes the file's.
        extras: what holds for all rows.
        prices: of a prices file; None takes the table's own prices alone.
    """

    path: Path
    name: str | None = None
    extras: Extras = Extras()
    prices: Path | None = None


class Imported(msgspec.Struct, frozen=True, kw_only=True):
    """What was stored: the table, and where its run directory is."""

    table: CellTable
    directory: Path


def import_table(root: Path, foreign: Foreign) -> Imported:
    """Import a table, and keep it as a run: the file as it is, the prices file as well, and the table made of them.

    Args:
        root: of all runs.
        foreign: what is imported.

    Raises:
        UsageError: a file cannot be read, or a line of it is wrong.
        MultinodeError: the run cannot be written.
    """
    started_s = time.time()
    read, data = load_imported_table(foreign.path, foreign.extras)
    prices, prices_text = load_prices(foreign.prices) if foreign.prices is not None else (None, "")
    run_id = make_run_id()
    table = with_prices(_table(read, run_id, foreign.name or foreign.path.name), prices)
    directory = RunDirectory.create(root, run_id)
    directory.write_bytes(f"imported{foreign.path.suffix.lower()}", data)
    if prices is not None:
        directory.write_bytes("prices.yaml", prices_text.encode())
    directory.write(TABLE_FILE, table)
    # A directory is a run once it has this: last, so that no half of an import is ever listed.
    directory.write("run.json", _record(table, started_s))
    return Imported(table=table, directory=directory.path)


def _table(read: ImportedTable, run_id: str, name: str) -> CellTable:
    ignored = f"Columns that were passed over: {', '.join(read.ignored)}."
    table = CellTable(
        run_id=run_id,
        job=name,
        rule=_RULE,
        cells=imported_rows(read.rows),
        notes=(ignored,) if read.ignored else (),
    )
    return make_table(table)


def _record(table: CellTable, started_s: float) -> Run:
    return Run(
        run_id=table.run_id,
        job=table.job,
        engine="import",
        status="succeeded",
        started_s=started_s,
        ended_s=time.time(),
        world_size=0,
        nodes=(),
        kind="import",
    )


def load_imported_table(path: Path, extras: Extras) -> tuple[ImportedTable, bytes]:
    """The table, and the file's bytes as they are.

    Args:
        path: of the file; its ending tells the form.
        extras: what holds for all rows.

    Raises:
        UsageError: it cannot be read, or a line of it is wrong; the message has its place.
    """
    if path.suffix.lower() not in FORMS:
        raise UsageError(f"{path} is neither CSV nor YAML by its name: expected {', '.join(FORMS)}", hint=HINT)
    return parse_table(read_text(path, "the table", HINT), str(path), extras), path.read_bytes()
