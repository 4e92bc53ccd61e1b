"""CellRow and CellTable: a sweep's cells in figures, and figures measured elsewhere beside them. Data only."""

from __future__ import annotations

from typing import Any

import msgspec

from multinode.analyse.job.workload import Settings
from multinode.analyse.stats.ranged import Ranged
from multinode.analyse.stats.spread import Spread

__all__ = ["CellRow", "CellTable", "Cheapest"]


class CellRow(msgspec.Struct, frozen=True, kw_only=True):
    """One cell; None comes with a reason in `missing`, and in a state that has no figures in `reason`.

    Attributes:
        label: its name, unique in its table.
        source: `measured` here, or `imported`.
        state: `measured`, `out_of_memory`, `skipped`, `failed` or `waiting`.
        out_of: whose memory did not suffice, of the cell or of a repeat of one that was measured: `gpu` or `node`.
        reason: of a state that has no figures, or of repeats that failed.
        run_ids: its runs, one a repeat.
        node_names: its nodes, as the hostfile calls them; empty where they are not known.
        node_devices: of each of them how many workers compute on which device; empty where it is not known.
        varied: what the sweep set in the job, by key.
        device: what a worker computes on: `NVIDIA GeForce RTX 4090` as NVML has it, a processor as the kernel has it,
            `CPU` where that does not name it; None is unknown.
        nodes: how many; `workers_per_node` on each, `world_size` in all; None is unknown.
        global_batch: samples of an optimizer step, of all workers (HF: total train batch size).
        samples_per_s: of all workers, over the steady state; `tokens_per_s` likewise, padding counted.
        tgs: tokens a second and worker.
        tokens_per_sample: padded length, in the mean.
        model_tflops: TFLOP/s of a worker that the model needs; `hardware_tflops` with what is computed again.
        mfu: of the device's peak; `hfu` with what is computed again.
        step_time_ms: of an optimizer step; `step_spread` of the steps of the repeat that scattered most.
        network_share: of the step, exposed communication.
        peak_memory_gib: of the worker that needed most, on its GPU, else resident in its process.
        whole_s: time of the user's whole job at this rate.
        energy_j_per_sample: of all GPUs.
        price_per_hour: of its nodes together, or of its GPUs; `price_purchase` to buy them.
        currency: of its prices, one word; None where nobody told it, as the hostfile does not.
        filed_prices: which of the two a prices file gave, by name; another file's come in their place.
        whole_cost: of the whole job by the hour.
        samples_per_money: samples for a unit of money by the hour.
        samples_per_s_per_purchase: samples a second for a unit of money that the devices cost.
        cost_per_million_tokens: by the hour.
        relative: samples_per_s over the table's baseline's.
        disturbances: other load and thermals that were seen, a sentence each.
        contradictions: what of an imported row does not fit together, a sentence each.
        missing: reason by name of every figure of a measured row that is None.
    """

    label: str
    source: str = "measured"
    state: str = "measured"
    out_of: str | None = None
    reason: str = ""
    run_ids: tuple[str, ...] = ()
    node_names: tuple[str, ...] = ()
    node_devices: tuple[dict[str, int], ...] = ()
    varied: dict[str, Any] = {}
    device: str | None = None
    nodes: int | None = None
    workers_per_node: int | None = None
    world_size: int | None = None
    settings: Settings = Settings()
    global_batch: int | None = None
    dataset_samples: int | None = None
    samples_per_s: Ranged | None = None
    tokens_per_s: Ranged | None = None
    tgs: Ranged | None = None
    tokens_per_sample: float | None = None
    model_tflops: float | None = None
    hardware_tflops: float | None = None
    mfu: float | None = None
    hfu: float | None = None
    step_time_ms: Ranged | None = None
    step_spread: Spread | None = None
    network_share: float | None = None
    peak_memory_gib: float | None = None
    whole_s: Ranged | None = None
    energy_j_per_sample: float | None = None
    price_per_hour: float | None = None
    price_purchase: float | None = None
    currency: str | None = None
    filed_prices: tuple[str, ...] = ()
    whole_cost: float | None = None
    samples_per_money: float | None = None
    samples_per_s_per_purchase: float | None = None
    cost_per_million_tokens: float | None = None
    relative: Ranged | None = None
    disturbances: tuple[str, ...] = ()
    contradictions: tuple[str, ...] = ()
    missing: dict[str, str] = {}


class Cheapest(msgspec.Struct, frozen=True, kw_only=True):
    """The cheapest cell that ends the whole job in time.

    Attributes:
        label: the cell's; None where none ends in time or none has a price.
        sentence: which, when it ends and what it costs; or why none.
    """

    deadline_s: float
    label: str | None = None
    sentence: str


class CellTable(msgspec.Struct, frozen=True, kw_only=True):
    """The cells of one sweep, of several, or of an import.

    Attributes:
        run_id: of the sweep or import; of several, with commas between.
        rule: which steps count.
        baseline: label of the row that `relative` refers to; None where no row has a speed.
        cheapest: None where no deadline was asked for.
        notes: what a reader should know, a sentence each.
    """

    schema: str = "multinode.sweep/1"
    run_id: str
    job: str
    rule: str = ""
    baseline: str | None = None
    cells: tuple[CellRow, ...]
    cheapest: Cheapest | None = None
    notes: tuple[str, ...] = ()
