"""The sweep: cells of a grid, each an ordinary run. Nothing is measured twice. Prints nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import msgspec

from multinode.errors import Interrupted, MultinodeError, UsageError
from multinode.experiment.grid import GridRecord
from multinode.experiment.grid_progress import state_line
from multinode.experiment.grid_state import is_finished, retry_failed
from multinode.experiment.series import Measure, Series
from multinode.experiment.sweep_cell import AskedGrid, cell_launch, cell_workers, measure_cell
from multinode.experiment.sweep_store import create_sweep, find_sweep, keep_status, new_record
from multinode.launch.context import Launch, RunContext
from multinode.launch.launch import probe_nodes, same_threads
from multinode.records.run_directory import RunDirectory

Conclude = Callable[[RunDirectory, Path], object]


class Resume(msgspec.Struct, frozen=True, kw_only=True):
    """How to treat an earlier sweep of the same command."""

    anew: bool = False  # ignore it, and measure everything again
    retry_failed: bool = False  # measure its failed cells again, but not those out of memory


class Swept(msgspec.Struct, frozen=True, kw_only=True):
    """A finished sweep."""

    record: GridRecord
    directory: Path  # its directory; its runs are in the same root


def find_finished(asked: AskedGrid, runs: Path, resume: Resume) -> Swept | None:
    """The newest sweep of the same command that is complete; contacts no node."""
    found = None if resume.anew else find_sweep(runs, new_record(asked).fingerprint)
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
    directory = _take_up(asked, context, resume, most)
    with directory.lock():
        series = Series(context, directory, lambda cell, _: launches[cell.label], measure)
        try:
            if resume.retry_failed:
                series.keep(retry_failed(series.record))
            series.run()
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


def _take_up(asked: AskedGrid, context: RunContext, resume: Resume, workers: int) -> RunDirectory:
    """The directory of the sweep that goes on, or of a new one, whose largest cell has so many workers."""
    record = new_record(asked)
    found = None if resume.anew else find_sweep(context.runs, record.fingerprint)
    if found is not None:
        directory, record = found
        if directory.is_locked:
            raise UsageError(
                f"this sweep is already running: {directory.run_id}",
                hint="wait until it ends; a second one (--fresh) would disturb both",
            )
        context.say(f"resuming sweep {directory.run_id} ({state_line(record)}); use --fresh to start over")
        return directory
    directory = create_sweep(context.runs, asked, record, workers)
    context.say(f"sweep {directory.run_id}: {state_line(record)}")
    return directory


def _end(context: RunContext, directory: RunDirectory, status: str, conclude: Conclude) -> None:
    try:
        conclude(directory, context.runs)
    except MultinodeError as error:
        context.say(f"its table cannot be created yet: {error}")
    # With a full disk nothing can be stored, but the reason is still reported.
    with contextlib.suppress(MultinodeError):
        keep_status(directory, status)
