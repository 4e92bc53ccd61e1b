"""The sweep: cells of a grid, each an ordinary run, and its table. Nothing is measured twice."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from multinode.cluster.cluster import Cluster
from multinode.cluster.facts import NodeFacts
from multinode.contrast.compare import StoredSchema, load_side_run
from multinode.errors import Interrupted, MultinodeError, UsageError
from multinode.experiment.cell_rows import MeasuredCell, devices_of
from multinode.experiment.cell_sheet import combined, with_notes, with_price_notes
from multinode.experiment.cell_table import Look, SweptCells, look_at, table_of_sweep, with_prices
from multinode.experiment.cells import MEASURED, CellTable
from multinode.experiment.sweep_cell import AskedGrid, CellSeries, Measure, cell_launch, cell_workers, measure_cell
from multinode.job.job import Job, LlamaFactoryJob, describe_job
from multinode.launch.context import Launch, RunContext
from multinode.launch.grid import (
    CellRecord,
    GridRecord,
    fingerprint,
    is_finished,
    measuring_order,
    retry_failed,
)
from multinode.launch.launch import (
    probe_nodes,
    same_threads,
)
from multinode.launch.series import GRID_FILE, Resume, find_series, keep_status, take_up
from multinode.records.plan import LaunchPlan
from multinode.records.run import Run
from multinode.records.run_directory import RunDirectory, list_runs

Conclude = Callable[[RunDirectory, Path], object]


class Swept(msgspec.Struct, frozen=True, kw_only=True):
    """A finished sweep."""

    record: GridRecord
    directory: Path  # its directory; its runs are in the same root


def find_finished(asked: AskedGrid, runs: Path, resume: Resume) -> Swept | None:
    """The newest sweep of the same command that is complete; contacts no node."""
    found = None if resume.anew else find_series(runs, new_record(asked).fingerprint)
    if found is None:
        return None
    directory, record = found
    record = retry_failed(record) if resume.retry_failed else record
    return Swept(record=record, directory=directory.path) if is_finished(record) else None


def sweep(
    asked: AskedGrid, context: RunContext, resume: Resume, conclude: Conclude, measure: Measure = measure_cell
) -> Swept:
    """Measure every unmeasured cell, in an order that finds out-of-memory early.

    Args:
        asked: the grid and its job.
        context: the nodes.
        resume: how to treat an earlier sweep of the same command.
        conclude: makes the table of all results, whenever the sweep ends.
        measure: makes one run.
    """
    finished = find_finished(asked, context.runs, resume)
    if finished is not None:
        return finished
    launches, most = _launches(asked, context)
    what = msgspec.structs.replace(asked.launch, cluster=asked.launch.cluster.first(max(asked.grid.nodes)))
    directory = take_up(what, new_record(asked), context, resume, workers=most)
    with directory.lock():
        series = CellSeries(context, directory, lambda cell, _: launches[cell.label], measure)
        try:
            if resume.retry_failed:
                series.keep(retry_failed(series.record))
            series.run(list(measuring_order(asked.grid, asked.cells)))
        except BaseException as error:
            _end(context, directory, "stopped" if isinstance(error, Interrupted) else "failed", conclude)
            raise
        _end(context, directory, "succeeded", conclude)
    return Swept(record=series.record, directory=directory.path)


def require_plannable(asked: AskedGrid) -> None:
    """Check that every cell can be laid out, from the hostfile only."""
    for cell in asked.cells:
        cell_launch(asked, cell, cell_workers(asked, cell, {}))


def _launches(asked: AskedGrid, context: RunContext) -> tuple[dict[str, Launch], int]:
    """The launch of every cell by its label, so that what cannot be laid out is said before anything is measured.

    And the most workers that one of them has.
    """
    nodes = asked.launch.cluster.nodes[: max(asked.grid.nodes)]
    told = None not in asked.grid.workers_per_node or all(node.slots or node.gpus for node in nodes)
    cluster = asked.launch.cluster.first(len(nodes))
    facts = {} if told else probe_nodes(msgspec.structs.replace(asked.launch, cluster=cluster), context.agent)
    workers = {cell.label: cell_workers(asked, cell, facts) for cell in asked.cells}
    threaded = same_threads(asked.launch, list(map(max, workers.values())), context, "in every cell")
    asked = msgspec.structs.replace(asked, launch=threaded)
    launches = {cell.label: cell_launch(asked, cell, workers[cell.label]) for cell in asked.cells}
    return launches, max(map(sum, workers.values()))


def _end(context: RunContext, directory: RunDirectory, status: str, conclude: Conclude) -> None:
    try:
        conclude(directory, context.runs)
    except MultinodeError as error:
        context.say(f"its table cannot be created yet: {error}")
    # With a full disk nothing can be stored, but the reason is still reported.
    with contextlib.suppress(MultinodeError):
        keep_status(directory, status)


TABLE_FILE = "sweep.json"
_SCHEMA = "multinode.sweep/1"


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
    marked = directory.read(TABLE_FILE, StoredSchema)
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


def new_record(asked: AskedGrid) -> GridRecord:
    """The grid before its first run."""
    nodes = asked.launch.cluster.nodes[: max(asked.grid.nodes)]
    training = asked.training
    return GridRecord(
        fingerprint=fingerprint(
            asked.jobs,
            nodes,
            asked.launch.options,
            {"grid": asked.grid, "training": training},
        ),
        command=describe_job(asked.job),
        grid=asked.grid,
        cells=tuple(CellRecord(cell=cell) for cell in asked.cells),
        worker_batch=_worker_batch(asked.job),
        steps=training.steps,
        minutes=training.minutes,
        synthetic=training.synthetic,
    )


def _worker_batch(job: Job) -> int | None:
    if not isinstance(job, LlamaFactoryJob):
        return None
    batch, accumulation = job.settings.per_device_train_batch_size, job.settings.gradient_accumulation_steps
    return batch * accumulation if batch is not None and accumulation is not None else None
