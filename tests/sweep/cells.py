"""Tables of cells: a sweep of 16 cells on two nodes with an OOM and what was skipped for it, and published figures.

The sweep's figures follow from a step that takes 60 ms and 25 ms per sample (LoRA; 40% more in full), over 10 Gbit/s.
The published ones are of Baichuan2-7B fine-tuned on several GPUs, prices those of the second-hand market in 2024.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import msgspec

from multinode.cluster.prices import Price, Prices
from multinode.findings.finding import Finding
from multinode.model.workload import FullRun, JobSettings, Workload
from multinode.profile.machine_use import GpuUse, NodeUse
from multinode.profile.step_split import StepSplit
from multinode.profile.summary import Comm, StepTimes
from multinode.profile.throughput import Utilisation
from multinode.runs.stored_run import StoredRun
from multinode.series.grid import CellRecord, GridCell
from multinode.stats.estimate import exactly
from multinode.stats.unknown import UNMEASURED, Unknown
from multinode.sweep.contradictions import Contradiction
from multinode.sweep.figures import CellRow, CellTable
from multinode.sweep.notes import with_notes
from multinode.sweep.prices import with_price_notes, with_prices
from multinode.sweep.table import relative_to, table_of_sweep
from tests import make
from tests.contrast.made_up_sides import measured
from tests.profile.observing import RUN

__all__ = ["PRICES", "PUBLISHED", "SWEEP", "SWEEP_RUN", "measured_cell", "swept"]

GPU = "NVIDIA GeForce RTX 4090"
_TOKENS_A_SAMPLE = 512
_FIXED_MS, _SAMPLE_MS = 60.0, 25.0
_GRADIENTS_MS = {"lora": 34.0, "full": 410.0}
_SLOWER = {"lora": 1.0, "full": 1.4}
_MEMORY_GIB = {"lora": 9.5, "full": 15.25}
_RULE = "the first 5 of 35 steps are excluded as warm-up"


class MeasuredCell(NamedTuple):
    """A cell and its runs."""

    record: CellRecord
    runs: tuple[StoredRun, ...] = ()


def measured_cell(nodes: int, method: str, batch: int, **record: Any) -> MeasuredCell:
    """A cell that was measured twice with two workers a node; with a state among `record`, one without figures."""
    label = f"{nodes}x2-{method}-batch{batch}"
    settings = {"per_device_train_batch_size": batch, "finetuning_type": method}
    cell = GridCell(label=label, settings=settings, nodes=nodes)
    if record:
        return MeasuredCell(record=CellRecord(cell=cell, **record))
    runs = tuple(_run(f"20260301-ab-{label}-{turn}", nodes, method, batch, turn) for turn in (1, 2))
    known = CellRecord(cell=cell, state="measured", run_ids=tuple(run.run_id for run in runs))
    return MeasuredCell(record=known, runs=runs)


def _run(run_id: str, nodes: int, method: str, batch: int, turn: int) -> StoredRun:
    names = ("box1", "box2")[:nodes]
    exposed_ms = _GRADIENTS_MS[method] if nodes > 1 else 1.5
    step_ms = (_FIXED_MS + _SAMPLE_MS * batch) * _SLOWER[method] + exposed_ms + turn
    rate = 2 * nodes * batch / step_ms * 1000
    tgs = rate * _TOKENS_A_SAMPLE / (2 * nodes)
    gib = _MEMORY_GIB[method] + 1.1 * batch
    split = make.split(step_ms, compute_ms=step_ms - exposed_ms, exposed_ms=exposed_ms)
    summary = make.summary(
        run_id=run_id,
        steps=35,
        steady_steps=30,
        rule=_RULE,
        step_time_ms=StepTimes(median=measured(step_ms, 0.02, 30), p95=step_ms * 1.05, cv=0.02),
        samples_per_s=measured(rate, 0.02, 30),
        tokens_per_s=measured(rate * _TOKENS_A_SAMPLE, 0.02, 30),
        tgs=measured(tgs, 0.02, 30),
        comm=Comm(exposed_ms=measured(exposed_ms, 0.02, 30)),
        tokens_per_sample=float(_TOKENS_A_SAMPLE),
        dataset_samples=1100,
        split=StepSplit(source="ddp", mean=split),
        nodes=tuple(
            NodeUse(
                node=name,
                node_rank=rank,
                ranks=(2 * rank, 2 * rank + 1),
                gpus=tuple(GpuUse(index=index, power_w=300.0 + 5 * batch) for index in range(2)),
                peak_worker_memory_gib={2 * rank: gib, 2 * rank + 1: gib - 0.2},
            )
            for rank, name in enumerate(names)
        ),
        utilisation=Utilisation(
            model_tflops=tgs * 4.2e-3,
            hardware_tflops=tgs * 5.6e-3,
            mfu=tgs * 4.2e-3 / 165.2,
            hfu=tgs * 5.6e-3 / 165.2,
            denominator="165.2 TFLOP/s per GPU",
            rule="4 x P",
        ),
    )
    settings = JobSettings(
        model="Qwen/Qwen2.5-1.5B",
        method=method,
        lora_rank=8 if method == "lora" else None,
        stage="sft",
        dataset="identity",
        strategy="ZeRO-2",
        per_device_batch=batch,
        accumulation=1,
        sequence_length=1024,
        packing=False,
        precision="bf16",
        recompute=True,
        overlap=False,
    )
    return make.stored_run(
        msgspec.structs.replace(RUN, run_id=run_id),
        summary=summary,
        plan=make.plan(*names, workers=2),
        node_names=names,
        workers=(2,) * nodes,
        workload=Workload(settings=settings, whole=FullRun(epochs=3.0)),
        price_per_hour=0.8 * nodes,
        price_purchase=3200.0 * nodes,
        devices=({GPU: 2},) * nodes,
        link_gbit_per_s=10.0 if nodes > 1 else None,
    )


def swept(*cells: MeasuredCell, run_id: str = "20260301-ab", **known: Any) -> CellTable:
    """The table of these cells."""
    return with_notes(table_of_sweep(run_id, "sft.yaml (LLaMA-Factory sft)", cells, **known))


def _sixteen() -> list[MeasuredCell]:
    """Full fine-tuning runs out of memory with eight samples on a node, and is killed by the kernel on two."""
    grid = itertools.product((1, 2), ("lora", "full"), (1, 2, 4, 8))
    cells = [measured_cell(nodes, method, batch) for nodes, method, batch in grid]
    out = "CUDA out of memory on box1: tried to allocate 2.1 GiB; 1.3 of 24 GiB were free"
    killed = "box2's kernel killed a worker because memory ran out"
    cells[6] = measured_cell(1, "full", 4, state="out_of_memory", out_of="gpu", why=Finding(message=out))
    cells[7] = measured_cell(1, "full", 8, state="skipped", why=Finding(message="batch 4 ran out of memory"))
    cells[14] = measured_cell(2, "full", 4, state="out_of_memory", out_of="node", why=Finding(message=killed))
    cells[15] = measured_cell(2, "full", 8, state="skipped", why=Finding(message="batch 4 ran out of memory"))
    return cells


SWEEP = with_prices(swept(*_sixteen()), None)
SWEEP_RUN = make.run(
    "box1",
    "box2",
    run_id=SWEEP.run_id,
    job=SWEEP.job,
    engine="llamafactory",
    started_s=1_800_000_000.0,
    ended_s=1_800_003_600.0,
    world_size=4,
    kind="sweep",
    has_parts=True,
)

PRICES = Prices(
    currency="CNY",
    date="2024-02-24",
    source="second-hand market",
    devices={
        "RTX 4090": Price(purchase=15000),
        "RTX 3090": Price(purchase=6000),
        "A800": Price(purchase=80000),
    },
)
_PUBLISHED = (
    ("RTX 4090", 1, "full ZeRO-3 offload", 1, 0.085, 15075.9),
    ("RTX 4090", 1, "full ZeRO-3 offload", 2, 0.215, 15961.9),
    ("RTX 4090", 1, "full ZeRO-3 offload", 4, 0.342, 16925.9),
    ("RTX 4090", 1, "full ZeRO-3 offload", 8, 0.653, 21845.9),
    ("RTX 4090", 2, "full ZeRO-3 offload", 4, 0.909, 19869.9),
    ("RTX 4090", 2, "full ZeRO-3 offload", 8, 1.554, 23397.9),
    ("RTX 4090", 1, "LoRA", 1, 1.138, 21399.9),
    ("RTX 4090", 1, "LoRA", 2, 1.341, 22411.9),
    ("RTX 4090", 1, "LoRA", 4, None, None),
    ("RTX 4090", 2, "LoRA", 2, 2.609, 24331.9),
    ("RTX 4090", 1, "QLoRA paged", 1, 1.933, 16363.9),
    ("RTX 4090", 1, "QLoRA paged", 2, 1.804, 18327.9),
    ("RTX 4090", 1, "QLoRA paged", 4, 1.576, 24119.9),
    ("RTX 4090", 1, "QLoRA paged", 8, None, None),
    ("RTX 4090", 2, "QLoRA paged", 2, 3.497, 19035.9),
    ("RTX 3090", 2, "full ZeRO-3 offload", 4, 0.722, 21898.0),
    ("A800", 2, "full ZeRO-3 offload", 4, 1.136, 19556.0),
    ("H800", 2, "full ZeRO-3 offload", 4, 2.51, 19869.0),
)


def _published(row: tuple[str, int, str, int, float | None, float | None]) -> CellRow:
    device, workers, method, batch, rate, mib = row
    return CellRow(
        label=f"{device} x {workers}, {method}, batch {batch}",
        source="imported",
        state="out_of_memory" if rate is None else "measured",
        out_of="gpu" if rate is None else None,
        why=Finding(message="the table says OOM") if rate is None else None,
        device=device,
        nodes=1,
        workers_per_node=workers,
        world_size=workers,
        settings=JobSettings(model="baichuan2-7b", method=method, per_device_batch=batch, sequence_length=1024),
        samples_per_s=UNMEASURED if rate is None else exactly(rate),
        peak_memory_gib=UNMEASURED if mib is None else mib / 1024,
    )


_IMPORTED = relative_to(
    CellTable(run_id="20260302-cd", job="published.csv", cells=tuple(_published(row) for row in _PUBLISHED))
)
PUBLISHED = with_notes(with_price_notes(with_prices(_IMPORTED, PRICES), _IMPORTED, PRICES))


def renamed(table: CellTable, text: str) -> CellTable:
    """The table with this text wherever a table has words of a stranger."""
    rows = [
        msgspec.structs.replace(
            row,
            label=f"{text} {number}",
            device=text,
            why=Finding(message=text),
            varied={text: f"{text} {number}"},
            currency=text,
            disturbances=(Finding(message=text),),
            contradictions=(Contradiction(message=text, sides=()),),
            tgs=Unknown(text),
            settings=msgspec.structs.replace(row.settings, model=f"{text} {number % 2}", method=f"{text} {number % 3}"),
        )
        for number, row in enumerate(table.cells)
    ]
    named = msgspec.structs.replace(
        table, cells=tuple(rows), job=text, run_id=text, notes=(Finding(message=text),), rule=text
    )
    return with_notes(relative_to(named))
