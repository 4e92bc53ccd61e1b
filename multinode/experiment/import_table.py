"""Import a table measured elsewhere into a stored table like that of a sweep. Reads and writes disk."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from multinode.errors import UsageError
from multinode.experiment.cell_prices import with_prices
from multinode.experiment.cell_table import relative_to
from multinode.experiment.cell_words import with_notes, with_price_notes
from multinode.experiment.cells import CellTable
from multinode.experiment.imported_forms import FORMS, HINT
from multinode.experiment.imported_rows import imported_rows
from multinode.experiment.imported_table import Extras, parse_table
from multinode.experiment.sweep_table import TABLE_FILE
from multinode.records.files import read_text
from multinode.records.hostfile import load_prices
from multinode.records.run import Run, make_run_id
from multinode.records.run_directory import RunDirectory

_RULE = "Figures are those of the table; others are calculated from them or missing."


class Imported(msgspec.Struct, frozen=True, kw_only=True):
    """The stored table and its run directory."""

    table: CellTable
    directory: Path


def import_table(
    root: Path, path: Path, extras: Extras | None = None, *, name: str | None = None, prices_path: Path | None = None
) -> Imported:
    """Import a table as a run that keeps the file, the prices file and the resulting table.

    Args:
        root: of all runs.
        path: of the table; its suffix sets the format.
        extras: values for all rows.
        name: of the table; None uses the file's.
        prices_path: of a prices file; None uses only the table's own prices.

    Raises:
        UsageError: a file cannot be read, or a line of it is wrong; the message has the place.
        MultinodeError: the run cannot be written.
    """
    started_s = time.time()
    if path.suffix.lower() not in FORMS:
        raise UsageError(f"{path} has an unknown file type: expected {', '.join(FORMS)}", hint=HINT)
    read = parse_table(read_text(path, "the table", HINT), str(path), extras or Extras())
    prices, prices_text = load_prices(prices_path) if prices_path is not None else (None, "")
    run_id = make_run_id()
    table = relative_to(
        CellTable(
            run_id=run_id,
            job=name or path.name,
            rule=_RULE,
            cells=imported_rows(read.rows),
            notes=(f"Ignored columns: {', '.join(read.ignored)}.",) if read.ignored else (),
        )
    )
    table = with_notes(with_price_notes(with_prices(table, prices), table, prices))
    directory = RunDirectory.create(root, run_id)
    directory.write_bytes(f"imported{path.suffix.lower()}", path.read_bytes())
    if prices is not None:
        directory.write_bytes("prices.yaml", prices_text.encode())
    directory.write(TABLE_FILE, table)
    run = Run(
        run_id=run_id,
        job=table.job,
        engine="import",
        status="succeeded",
        started_s=started_s,
        ended_s=time.time(),
        world_size=0,
        nodes=(),
        kind="import",
    )
    # This file makes the directory a run. It is written last, so that an incomplete import is never listed.
    directory.write("run.json", run)
    return Imported(table=table, directory=directory.path)
