"""A sweep as it lies on disk: its grid, and the run of every cell that was measured."""

from __future__ import annotations

from pathlib import Path

import msgspec

from multinode.cluster.cluster import Node
from multinode.cluster.facts import Gpu, NodeFacts
from multinode.findings.finding import Finding
from multinode.records.run_directory import RunDirectory
from multinode.runs.stored_run import StoredRun
from multinode.series.grid import Grid, GridRecord
from tests import make
from tests.sweep.cells import GPU, SWEEP_RUN, MeasuredCell, measured_cell

__all__ = ["store_sweep"]

OOM = {"state": "out_of_memory", "out_of": "gpu", "why": Finding(message="CUDA out of memory on box1")}
CELLS = (
    measured_cell(1, "lora", 1),
    measured_cell(1, "lora", 2),
    measured_cell(2, "lora", 2),
    measured_cell(1, "full", 2, **OOM),
)
_NODE = Node(name="box", price=0.8, price_purchase_gpu=1600.0)


def store_sweep(root: Path, run_id: str = SWEEP_RUN.run_id, cells: tuple[MeasuredCell, ...] = CELLS) -> RunDirectory:
    """The sweep without its table; its runs lie beside it, with nodes that have a price and two GPUs."""
    for run in (run for cell in cells for run in cell.runs):
        if not (root / run.run_id).exists():
            _store_run(root, run)
    directory = RunDirectory.create(root, run_id)
    record = GridRecord(
        fingerprint="f",
        command=SWEEP_RUN.job,
        grid=Grid(nodes=(1, 2)),
        cells=tuple(cell.record for cell in cells),
    )
    directory.write("grid.json", record)
    directory.write("run.json", msgspec.structs.replace(SWEEP_RUN, run_id=run_id))
    return directory


def _store_run(root: Path, run: StoredRun) -> None:
    run_id = run.run_id
    nodes = [msgspec.structs.replace(_NODE, name=name) for name in run.node_names]
    workers = run.workers[0]
    plan = make.plan(
        *run.node_names,
        workers=workers,
        each={"gpus": tuple(range(workers))},
        run_id=run_id,
        engine="llamafactory",
        job=SWEEP_RUN.job,
    )
    directory = make.store(
        root,
        run_id,
        run=msgspec.structs.replace(SWEEP_RUN, run_id=run_id, kind="launch", part_of=SWEEP_RUN.run_id, has_parts=False),
        plan=plan,
        summary=run.summary,
        workload=run.workload,
        cluster=make.cluster(*nodes, source="hosts.txt"),
    )
    gpus = tuple(Gpu(index=index, name=GPU) for index in range(workers))
    directory.write("facts.json", [NodeFacts(node=node.name, gpus=gpus) for node in nodes])
