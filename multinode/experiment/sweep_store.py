"""Sweeps on the controller's disk: the directory that the same command finds again, and its files."""

from __future__ import annotations

import contextlib
import hashlib
import time
from pathlib import Path

import msgspec

from multinode.errors import MultinodeError
from multinode.experiment.grid import CellRecord, GridRecord, fingerprint
from multinode.experiment.grid_state import without_runs
from multinode.experiment.sweep_cell import AskedGrid
from multinode.job.engine_commands import choose_engine
from multinode.job.job import Job, LlamaFactoryJob, describe_job
from multinode.launch.context import Launch
from multinode.launch.launch import create_parent
from multinode.records.run import NodeRun, Run
from multinode.records.run_directory import RunDirectory

GRID_FILE = "grid.json"


def find_sweep(root: Path, wanted: str) -> tuple[RunDirectory, GridRecord] | None:
    """The newest sweep with this fingerprint, if any."""
    written: list[tuple[int, Path]] = []
    for path in root.glob(f"*/{GRID_FILE}"):
        # One that is removed meanwhile is not sought either.
        with contextlib.suppress(OSError):
            written.append((path.stat().st_mtime_ns, path.parent))
    for _, place in sorted(written, reverse=True):
        directory = RunDirectory(place)
        try:
            record = load_grid(directory)
        except MultinodeError:
            # Written by another release, or truncated by a full disk.
            continue
        if record.fingerprint == wanted:
            return directory, record
    return None


def new_record(asked: AskedGrid) -> GridRecord:
    """The grid before its first run."""
    nodes = asked.launch.cluster.nodes[: max(asked.grid.nodes)]
    training = asked.training
    return GridRecord(
        fingerprint=fingerprint(
            asked.jobs,
            nodes,
            asked.launch.options,
            {"grid": asked.grid, "training": training, "scripts": _digest_scripts(asked.job)},
        ),
        command=describe_job(asked.job),
        grid=asked.grid,
        cells=tuple(CellRecord(cell=cell) for cell in asked.cells),
        worker_batch=_worker_batch(asked.job),
        steps=training.steps,
        minutes=training.minutes,
        synthetic=training.synthetic,
    )


def create_sweep(root: Path, asked: AskedGrid, record: GridRecord, workers: int) -> RunDirectory:
    """A directory for a new sweep; `workers` are those of its largest cell on all nodes."""
    cluster = asked.launch.cluster.first(max(asked.grid.nodes))
    what = msgspec.structs.replace(asked.launch, cluster=cluster)
    return create_grid(root, what, record, workers, _engine(asked))


def create_grid(root: Path, what: Launch, record: GridRecord, workers: int, engine: str) -> RunDirectory:
    """A directory for new runs of a grid, on all nodes of the launch."""
    directory = create_parent(root, what)
    run = Run(
        run_id=directory.run_id,
        job=record.command,
        engine=engine,
        status="running",
        started_s=time.time(),
        world_size=workers,
        nodes=tuple(NodeRun(name=node.name, node_rank=rank) for rank, node in enumerate(what.cluster.nodes)),
        kind=what.execute.kind,
    )
    directory.write("run.json", run)
    keep_grid(directory, record)
    return directory


def load_grid(directory: RunDirectory) -> GridRecord:
    """The state of a sweep; runs whose figures were removed from disk are due again.

    Raises:
        MultinodeError: it cannot be read.
    """
    record = directory.read(GRID_FILE, GridRecord)
    if record is None:
        raise MultinodeError(f"{directory.path} is not a sweep: it has no {GRID_FILE}")
    root = directory.path.parent
    made = [run_id for cell in record.cells for run_id in cell.run_ids]
    return without_runs(record, [run_id for run_id in made if not (root / run_id / "summary.json").is_file()])


def keep_grid(directory: RunDirectory, record: GridRecord) -> None:
    """Store the state."""
    directory.write(GRID_FILE, record)


def keep_status(directory: RunDirectory, status: str) -> None:
    """Store the status, `running` or how it ended, which makes it the newest in the list of runs."""
    run = directory.read("run.json", Run)
    if run is not None:
        ended_s = None if status == "running" else time.time()
        directory.write("run.json", msgspec.structs.replace(run, status=status, ended_s=ended_s))


def free_run_id(root: Path, wanted: str) -> str:
    """The name, with a number if it is taken: run names are never reused."""
    name, number = wanted, 1
    while (root / name).exists():
        number += 1
        name = f"{wanted}-try{number}"
    return name


def _engine(asked: AskedGrid) -> str:
    return (asked.launch.options.engine or choose_engine(asked.job)).name


def _digest_scripts(job: Job) -> dict[str, str]:
    """A changed script is another training."""
    if isinstance(job, LlamaFactoryJob):
        return {}
    paths = [Path(word) for word in job.argv if word.endswith((".py", ".sh"))]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths if path.is_file()}


def _worker_batch(job: Job) -> int | None:
    if not isinstance(job, LlamaFactoryJob):
        return None
    batch, accumulation = job.settings.per_device_train_batch_size, job.settings.gradient_accumulation_steps
    return batch * accumulation if batch is not None and accumulation is not None else None
