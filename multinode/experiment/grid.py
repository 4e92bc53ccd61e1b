"""Grid and its cells: the settings of a job and a cluster that a sweep covers. Data only."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec

from multinode.cluster.cluster import Node
from multinode.job.job import Job, LlamaFactoryJob
from multinode.job.planning import LaunchOptions
from multinode.records.run import Failure
from multinode.secret_values import is_secret

BATCH = "per_device_train_batch_size"
"""The setting whose larger values need more memory."""
_BATCHES = frozenset({BATCH, "batch", "batch_size", "train_batch_size", "micro_batch_size", "per_device_batch_size"})


def is_batch(key: str) -> bool:
    """Whether a setting or script argument of this name is a batch."""
    return key in _BATCHES


class Grid(msgspec.Struct, frozen=True, kw_only=True):
    """A sweep: every combination of these."""

    # values by key of the job, or by name of a script argument, in the given order
    settings: dict[str, tuple[Any, ...]] = {}
    # the spelling of a script argument by its name in `settings`: `--batch-size` by `batch_size`; empty for a YAML job
    arguments: dict[str, str] = {}
    nodes: tuple[int, ...]  # numbers of nodes, from the top of the hostfile
    workers_per_node: tuple[int | None, ...] = (None,)  # on each; None uses the hostfile
    repeats: int = 1  # measurements per cell
    # whether repeats are interleaved, every second round in reverse, so that drift affects all; otherwise those of a
    # cell are consecutive
    interleave: bool = True


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One combination."""

    label: str  # its name, unique in its grid and valid in file names: `2x1-lora-batch4`
    settings: dict[str, Any] = {}  # set in the job, by key
    nodes: int  # from the top of the hostfile
    workers_per_node: int | None = None  # on each; None uses the hostfile


class CellRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a cell."""

    cell: Cell
    # `waiting`, `running`, `measured`, `out_of_memory`, `skipped` or `failed`; a cell with a successful run is
    # `measured`, even if repeats are due
    state: str = "waiting"
    run_ids: tuple[str, ...] = ()  # successful runs, one per repeat
    current: str | None = None  # the run in progress, not yet judged, if any
    attempts: int = 0  # number of started runs
    failed_runs: int = 0  # failed runs that are not repeated
    took_s: tuple[float, ...] = ()  # wall time of every judged run, including overhead
    out_of: str | None = None  # whose memory ran out: `gpu`, or `node` (kernel OOM killer); None in other states
    reason: str = ""  # why it or a repeat was skipped or failed, or what ran out where; otherwise empty
    failure: Failure | None = None  # the first failure of its runs, if any


class GridRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`grid.json` of a sweep: rewritten at every change of a cell, so that it can resume after a crash."""

    schema: str = "multinode.grid/1"
    fingerprint: str  # of everything that decides the figures; equal for the same command
    command: str  # the job, for people
    grid: Grid
    cells: tuple[CellRecord, ...]  # in the order of the grid
    # samples per optimizer step of a worker in the job's own file (batch x accumulation), before the grid's settings;
    # None if unknown
    worker_batch: int | None = None
    steps: int | None = None  # measured per run; None uses the job's, or `minutes`
    minutes: float | None = None  # training time per run; None trains its steps
    synthetic: bool = False  # whether data are synthetic

    @property
    def limit_s(self) -> float | None:
        """Training time per run, in seconds; None trains its steps."""
        return None if self.minutes is None else 60 * self.minutes


_LENGTH = 32
_NO_MATTER = frozenset(
    {"price", "price_gpu", "price_purchase", "price_purchase_gpu", "user", "port", "key", "jump", "ssh_config"}
    | {"slurm_job"}
)


def fingerprint(
    jobs: Mapping[str, Job], nodes: tuple[Node, ...], options: LaunchOptions, measured: Mapping[str, Any]
) -> str:
    """Equal for the same jobs, nodes, options and measurement; its inputs cannot be recovered from it.

    Prices, SSH ports and secrets do not change it.

    Args:
        jobs: of every cell, by its label.
        nodes: of the grid.
        options: layout of each cell.
        measured: the grid and how its cells are measured, as plain data.
    """
    environment = options.environment
    document = {
        "jobs": {label: _trained(job) for label, job in jobs.items()},
        "nodes": [_placed(one) for one in nodes],
        "engine": options.engine,
        "grad_compress": options.grad_compress,
        "env": _without_secrets(environment.env),
        "prelude": environment.prelude,
        "code": options.code.digest if options.code is not None else None,
        "measured": _with_texts(dict(measured)),
    }
    return hashlib.sha256(msgspec.json.encode(document, order="sorted")).hexdigest()[:_LENGTH]


def _trained(job: Job) -> tuple[Any, ...]:
    return (job.text, _with_texts(job.config), job.deepspeed_text) if isinstance(job, LlamaFactoryJob) else job.argv


def _with_texts(value: Any) -> Any:
    """The same with text keys: YAML allows any, as in `max_memory: {0: 20GiB}`, JSON does not."""
    if isinstance(value, msgspec.Struct):
        value = msgspec.structs.asdict(value)
    if isinstance(value, dict):
        return {
            key if isinstance(key, str) else f"{type(key).__name__} {key!r}": _with_texts(one)
            for key, one in value.items()
        }
    return [_with_texts(one) for one in value] if isinstance(value, list | tuple) else value


def _placed(node: Node) -> dict[str, Any]:
    """Everything on a line of the hostfile except prices and SSH settings."""
    said = {name: value for name, value in msgspec.structs.asdict(node).items() if name not in _NO_MATTER}
    return said | {"env": _without_secrets(node.env)}


def _without_secrets(env: Mapping[str, str]) -> dict[str, str | None]:
    return {name: None if is_secret(name) else value for name, value in env.items()}
