"""Build the table of a sweep; load stored tables. Reads and writes disk."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import msgspec

from multinode.cluster.cluster import Cluster
from multinode.cluster.facts import NodeFacts
from multinode.contrast.compare import load_side_run
from multinode.errors import MultinodeError, UsageError
from multinode.experiment.cell_prices import with_prices
from multinode.experiment.cell_rows import MeasuredCell, devices_of
from multinode.experiment.cell_table import Look, SweptCells, look_at, table_of_sweep
from multinode.experiment.cell_words import combined, with_notes, with_price_notes
from multinode.experiment.cells import MEASURED, CellTable
from multinode.experiment.grid import CellRecord, GridRecord
from multinode.experiment.sweep_store import GRID_FILE
from multinode.records.plan import LaunchPlan
from multinode.records.run import Run
from multinode.records.run_directory import RunDirectory, list_runs

TABLE_FILE = "sweep.json"
_SCHEMA = "multinode.sweep/1"


class _Marked(msgspec.Struct, frozen=True):
    """The schema of any document."""

    schema: str = ""


def build_table(directory: RunDirectory, root: Path) -> CellTable:
    """Build the table of a sweep from its results so far, and store it in the sweep's directory.

    Args:
        directory: of the sweep.
        root: of all runs, including the cells'.
    """
    table = _make_table(directory, root)
    directory.write(TABLE_FILE, table)
    return table


def load_table(directory: RunDirectory) -> CellTable | None:
    """The stored table of a sweep or import; None for any other run.

    The table of an unfinished sweep is built from its results so far.

    Raises:
        MultinodeError: it is from another release, or damaged.
    """
    if _is_unfinished(directory):
        return _make_table(directory, directory.path.parent)
    marked = directory.read(TABLE_FILE, _Marked)
    if marked is None:
        return None
    if marked.schema != _SCHEMA:
        raise MultinodeError(
            f"the table of run {directory.run_id} is from another release ({marked.schema or 'no schema'})",
            hint="measure or import it again",
        )
    return directory.read(TABLE_FILE, CellTable)


def load_tables(root: Path, names: Sequence[str], look: Look | None = None) -> CellTable:
    """Stored tables combined into one, as requested.

    Args:
        root: of all runs.
        names: of sweeps and imports: ids, their beginnings, or `last`; duplicates count once.
        look: how to show them.

    Raises:
        UsageError: a run does not exist, has no table, or `look` names something that the table lacks.
        MultinodeError: a table cannot be read.
    """
    directories = {(found := _open(root, name)).run_id: found for name in names}
    tables = []
    for run_id, directory in directories.items():
        table = load_table(directory)
        if table is None:
            raise UsageError(
                f"run {run_id} has no table",
                hint="create one with multinode sweep or multinode import; two runs of another kind: multinode compare",
            )
        tables.append(table)
    whole, asked = combined(tables), look or Look()
    return with_notes(with_price_notes(look_at(whole, asked), whole, asked.prices))


def _open(root: Path, name: str) -> RunDirectory:
    # `last` means the newest run that has a table.
    files = (TABLE_FILE, GRID_FILE)
    able = (path.name for path in reversed(list_runs(root)) if any((path / file).is_file() for file in files))
    return RunDirectory.open(root, next(able, name) if name == "last" else name)


def _is_unfinished(directory: RunDirectory) -> bool:
    if not (directory.path / GRID_FILE).is_file():
        return False
    run = directory.read("run.json", Run)
    return run is None or run.status == "running" or not (directory.path / TABLE_FILE).is_file()


def _make_table(directory: RunDirectory, root: Path) -> CellTable:
    record = directory.read(GRID_FILE, GridRecord)
    if record is None:
        raise UsageError(
            f"run {directory.run_id} is not a sweep: it has no {GRID_FILE}", hint="list sweeps: multinode runs"
        )
    run = directory.read("run.json", Run)
    table = table_of_sweep(
        SweptCells(
            run_id=directory.run_id,
            job=record.command,
            cells=tuple(_measured(cell, root) for cell in record.cells),
            worker_batch=record.worker_batch,
            most_workers=run.world_size if run is not None else None,
        )
    )
    return with_notes(with_prices(table, None))


def _measured(record: CellRecord, root: Path) -> MeasuredCell:
    if record.state != MEASURED:
        return MeasuredCell(record=record)
    directories = [found for run_id in record.run_ids if (found := RunDirectory(root / run_id)).path.is_dir()]
    runs = tuple(load_side_run(directory) for directory in directories)
    if not runs:
        return MeasuredCell(record=record)
    last = directories[-1]
    plan, cluster = last.read("plan.json", LaunchPlan), last.read("cluster.json", Cluster)
    if plan is None:
        return MeasuredCell(record=record, runs=runs)
    facts = {one.node: one for one in last.read("facts.json", list[NodeFacts]) or ()}
    price = _price_purchase(plan, cluster) if cluster is not None else None
    return MeasuredCell(record=record, runs=runs, devices=devices_of(plan, facts), price_purchase=price)


def _price_purchase(plan: LaunchPlan, cluster: Cluster) -> float | None:
    nodes = {node.name: node for node in cluster.nodes}
    told = [nodes[node.node].purchase(len(node.ranks)) if node.node in nodes else None for node in plan.nodes]
    known = [price for price in told if price is not None]
    return math.fsum(known) if known and len(known) == len(told) else None
