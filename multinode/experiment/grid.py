"""Grid and its cells: the settings of a job and of a cluster that a sweep goes through. Data only."""

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


_LENGTH = 32
_NO_MATTER = frozenset(
    {"price", "price_gpu", "price_purchase", "price_purchase_gpu", "user", "port", "key", "jump", "ssh_config"}
    | {"slurm_job"}
)


def fingerprint(
    jobs: Mapping[str, Job], nodes: tuple[Node, ...], options: LaunchOptions, measured: Mapping[str, Any]
) -> str:
    """The same text for the same jobs, nodes, options and way of measuring; it tells nothing of what it was made from.

    A price, a port of SSH or a secret that changes leaves the figures as they are, and so the fingerprint.

    Args:
        jobs: of every cell, by its label.
        nodes: those that the grid uses.
        options: how each cell is laid out.
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
    """What of a job decides what is trained; not where its file lies."""
    return (job.text, _with_texts(job.config), job.deepspeed_text) if isinstance(job, LlamaFactoryJob) else job.argv


def _with_texts(value: Any) -> Any:
    """The same with texts for keys: YAML's may be of any kind, as those of `max_memory: {0: 20GiB}`, and JSON's not."""
    if isinstance(value, msgspec.Struct):
        value = msgspec.structs.asdict(value)
    if isinstance(value, dict):
        return {
            key if isinstance(key, str) else f"{type(key).__name__} {key!r}": _with_texts(one)
            for key, one in value.items()
        }
    return [_with_texts(one) for one in value] if isinstance(value, list | tuple) else value


def _placed(node: Node) -> dict[str, Any]:
    """All that a line of the hostfile says, but what it costs and how SSH gets there: a key that is new counts."""
    said = {name: value for name, value in msgspec.structs.asdict(node).items() if name not in _NO_MATTER}
    return said | {"env": _without_secrets(node.env)}


def _without_secrets(env: Mapping[str, str]) -> dict[str, str | None]:
    return {name: None if is_secret(name) else value for name, value in env.items()}
