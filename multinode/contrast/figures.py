"""Contrast and its sides: figures of one node and many. Data only."""

from __future__ import annotations

import msgspec

from multinode.job.workload import FullRun, Settings
from multinode.predict.advice import Advice
from multinode.predict.forecast import Forecast
from multinode.profile.bottleneck import Bottleneck
from multinode.profile.likely_causes import Disturbance
from multinode.profile.step_bytes import BytesPerStep
from multinode.profile.step_split import WorkerSplit
from multinode.stats.estimate import Estimate, Spread


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """The same job on some nodes, measured once or several times; every None has a reason in `missing`."""

    # `baseline`, `candidate`, `point` (of a scaling curve, between the two) or `each-node` (one node alone, to tell a
    # slow node from a slow network)
    role: str
    run_ids: tuple[str, ...]  # one per repeat
    node_names: tuple[str, ...]
    nodes: int
    workers_per_node: int
    world_size: int
    settings: Settings | None = None  # of the training; None if unknown
    global_batch: int | None = None  # samples per optimizer step of all workers
    versions: dict[str, str] = {}  # of torch, the engine and NCCL, by package
    samples_per_s: Estimate  # nominal, of all workers, over the measured steps
    tokens_per_s: Estimate | None = None  # including padding; `tgs` per worker
    tgs: Estimate | None = None
    step_time_ms: Estimate  # of an optimizer step: medians of the repeats
    step_spread: Spread  # of the repeat with the largest variation of steps
    steady_steps: int  # measured steps of all repeats
    split: WorkerSplit | None = None  # of the step, mean of the repeats
    exposed_ms: Estimate | None = None  # exposed communication; `exposed_share` of the step
    exposed_share: float | None = None
    bytes_per_step: BytesPerStep = BytesPerStep()  # of the last repeat
    bottleneck: Bottleneck  # of the last repeat
    link_gbit_per_s: float | None = None  # of its slowest node's NIC; None on one node, or if unknown
    stragglers: tuple[str, ...] = ()  # nodes named by a repeat, the latest first
    late_ms: float | None = None  # wait of the others for the latest, mean of the repeats; 0 without any
    power_w: float | None = None  # of all its GPUs; likewise `energy_j_per_sample`
    energy_j_per_sample: float | None = None
    price_per_hour: float | None = None  # of all its nodes
    whole: FullRun = FullRun()  # the full run of the job
    dataset_samples: int | None = None  # samples of the dataset, as in the training
    whole_s: Estimate | None = None  # time of the user's full run; `whole_cost` its price
    whole_cost: float | None = None
    cost_per_million_tokens: float | None = None  # including padding
    disturbed: tuple[Disturbance, ...] = ()  # other load and thermals; `disturbances` one sentence each
    disturbances: tuple[str, ...] = ()
    missing: dict[str, str] = {}  # reason by name of every None


class CurvePoint(msgspec.Struct, frozen=True, kw_only=True):
    """One point of a scaling curve."""

    nodes: int
    world_size: int
    samples_per_s: Estimate
    speedup: Estimate  # over the side with the fewest nodes
    efficiency: float  # speed-up over the ratio of workers; with the same workers, the speed-up itself


class NodeSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """One node alone."""

    node: str
    workers: int
    samples_per_s: Estimate
    step_time_ms: Estimate
    relative: float  # a worker's samples/s over those of a worker of the fastest node


class SlowdownAttribution(msgspec.Struct, frozen=True, kw_only=True):
    """Cost of a candidate's step beyond ideal scaling, in ms; None if unknown."""

    # the candidate's step with a network of no cost and nodes as fast as the fastest alone
    ideal_ms: float | None = None
    # the slowest node, if one stands out. `relative` its speed over that of the fastest or the others.
    node: str | None = None
    relative: float | None = None
    node_ms: float | None = None  # its cost
    network_ms: float | None = None  # exposed communication of the candidate beyond the baseline's
    other_ms: float | None = None  # the unexplained rest; negative if they explain too much
    cause: str = "unknown"  # `network`, `node`, `none` (no noticeable loss) or `unknown`
    sentence: str = ""  # the same in one sentence


class Contrast(msgspec.Struct, frozen=True, kw_only=True):
    """One node and many; `contrast.json`.

    Attributes:
        mode: `same-workers` (the same workers on both sides), `scale-out` (every node full, the same batch per worker),
            `fixed-global-batch` (every node full, the same samples per step) or `compare` (two stored runs).
        why: reason of the mode.
        baseline: the side with fewer nodes.
        candidate: the side with more.
        speedup: samples/s of the candidate over the baseline's.
        efficiency: speed-up over the ratio of workers: 1 is ideal scaling.
        scaling: kind of efficiency: `weak` (the same batch per worker), `strong` (the same samples per step) or `same
            workers`.
        curve: by nodes; empty without sides in between.
        each_node: every node alone; empty if not requested.
        loss: where the candidate's time goes.
        verdict: one sentence.
        reasons: up to three more, with figures.
        differences: between the sides beyond those compared, one sentence each.
        forecast: predictions for other networks and settings; None with `forecast_reason`.
        advice: changes that would affect the verdict, best first.
        rule: which steps are measured.
    """

    schema: str = "multinode.contrast/2"
    mode: str
    why: str
    job: str
    baseline: Side
    candidate: Side
    others: tuple[Side, ...] = ()
    speedup: Estimate
    efficiency: float
    scaling: str
    curve: tuple[CurvePoint, ...] = ()
    each_node: tuple[NodeSpeed, ...] = ()
    loss: SlowdownAttribution = SlowdownAttribution()
    verdict: str = ""
    reasons: tuple[str, ...] = ()
    differences: tuple[str, ...] = ()
    forecast: Forecast | None = None
    forecast_reason: str = ""
    advice: tuple[Advice, ...] = ()
    rule: str
