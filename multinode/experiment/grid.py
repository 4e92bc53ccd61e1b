"""Grid and its cells: the settings of a job and of a cluster that a sweep goes through. Data only."""

from __future__ import annotations

from typing import Any

import msgspec

from multinode.records.run import Failure

BATCH = "per_device_train_batch_size"
"""The setting whose larger values need more memory, all else equal."""
_BATCHES = frozenset({BATCH, "batch", "batch_size", "train_batch_size", "micro_batch_size", "per_device_batch_size"})


def is_batch(key: str) -> bool:
    """Whether a setting, or a script's argument of this name, is a batch."""
    return key in _BATCHES


class Grid(msgspec.Struct, frozen=True, kw_only=True):
    """What a sweep asks for: every combination of these.

    Attributes:
        settings: values by key of the job, or by name of a script's argument, in the order in which they were given.
        arguments: the script's argument as it is written, by the name that it has in `settings`: `--batch-size` by
            `batch_size`; empty of a YAML job.
        nodes: how many of the hostfile's first nodes.
        workers_per_node: on each of them; None leaves it to the hostfile.
        repeats: how often each cell is measured.
        interleave: whether the repeats are made in turns, every second one from the last cell to the first, so that
            what drifts hits all alike; else those of a cell one after the other.
    """

    settings: dict[str, tuple[Any, ...]] = {}
    arguments: dict[str, str] = {}
    nodes: tuple[int, ...]
    workers_per_node: tuple[int | None, ...] = (None,)
    repeats: int = 1
    interleave: bool = True


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One combination.

    Attributes:
        label: its name, unique in its grid and fit for a file: `2x1-lora-batch4`.
        settings: values that are set in the job, by key.
        nodes: of the hostfile's first.
        workers_per_node: on each of them; None leaves it to the hostfile.
    """

    label: str
    settings: dict[str, Any] = {}
    nodes: int
    workers_per_node: int | None = None


class CellRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a cell so far.

    Attributes:
        state: `waiting`, `running`, `measured`, `out_of_memory`, `skipped` or `failed`; one that has a run which ended
            well is `measured`, though repeats of it are still to come.
        run_ids: runs that ended well, one a repeat.
        current: the run that was begun last and has not been judged; None where none is under way.
        attempts: runs that were begun, in all.
        failed_runs: those that failed and are not made again.
        took_s: wall time of every run that was judged, with all that goes around it.
        out_of: whose memory did not suffice: `gpu`, `node` (the kernel's killer); None of any other state.
        reason: why it, or one of its repeats, was skipped or failed, or what ran out where; else empty.
        failure: the run's first failure; None where none failed.
    """

    cell: Cell
    state: str = "waiting"
    run_ids: tuple[str, ...] = ()
    current: str | None = None
    attempts: int = 0
    failed_runs: int = 0
    took_s: tuple[float, ...] = ()
    out_of: str | None = None
    reason: str = ""
    failure: Failure | None = None


class GridRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`grid.json` of a sweep: written anew whenever a cell's state changes, so that it can go on after a crash.

    Attributes:
        fingerprint: of everything that decides the figures; the same command has the same.
        command: the job in a few words.
        cells: in the order of the grid.
        worker_batch: samples of a worker's optimizer step as the job's own file has it (batch x accumulation), before
            the grid sets anything; None is unknown.
        steps: that count in each run; None leaves it to the job, or to `minutes`.
        minutes: of training in each run, after which it was stopped; None has it train its steps.
        synthetic: whether the data are made up.
    """

    schema: str = "multinode.grid/1"
    fingerprint: str
    command: str
    grid: Grid
    cells: tuple[CellRecord, ...]
    worker_batch: int | None = None
    steps: int | None = None
    minutes: float | None = None
    synthetic: bool = False

    @property
    def limit_s(self) -> float | None:
        """Of training in each run, in seconds; None has it train its steps."""
        return None if self.minutes is None else 60 * self.minutes
