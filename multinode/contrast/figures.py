"""Contrast and its sides: the figures of one node against many. Data only."""

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
    """The same job on some nodes, measured once or several times; None comes with a reason in `missing`.

    Attributes:
        role: `baseline`, `candidate`, `point` (of a scaling curve, between the two) or `each-node` (one node alone, to
            tell a slow node from a slow network).
        run_ids: its runs, one a repeat.
        settings: of the training; None is unknown.
        global_batch: samples of an optimizer step, of all workers.
        versions: of torch, the engine and NCCL, by package.
        samples_per_s: nominal, of all workers, over the steady state.
        tokens_per_s: padding counted; `tgs` of one worker.
        step_time_ms: of an optimizer step: the repeats' medians.
        step_spread: of the steps of the repeat that scattered most.
        steady_steps: measured steps, of all repeats.
        split: where a step's time goes, mean of the repeats.
        exposed_ms: exposed communication; `exposed_share` of the step.
        bytes_per_step: of the last repeat.
        bottleneck: of the last repeat.
        link_gbit_per_s: of its slowest node's NIC, as the plan has it; None on one node, or unknown.
        stragglers: nodes that a repeat names, the latest first.
        late_ms: what the others wait for the latest of them, mean of the repeats; 0 where none is.
        power_w: of all its GPUs; `energy_j_per_sample` theirs.
        price_per_hour: of its nodes together.
        whole: what the job asks for when it is not cut short.
        dataset_samples: samples of the data set, as the training had it.
        whole_s: time that the user's full run would take; `whole_cost` its price.
        cost_per_million_tokens: price of a million tokens, padding counted.
        disturbed: other load and thermals that were seen; `disturbances` a sentence each.
        missing: reason by name of every figure that is None.
    """

    role: str
    run_ids: tuple[str, ...]
    node_names: tuple[str, ...]
    nodes: int
    workers_per_node: int
    world_size: int
    settings: Settings | None = None
    global_batch: int | None = None
    versions: dict[str, str] = {}
    samples_per_s: Estimate
    tokens_per_s: Estimate | None = None
    tgs: Estimate | None = None
    step_time_ms: Estimate
    step_spread: Spread
    steady_steps: int
    split: WorkerSplit | None = None
    exposed_ms: Estimate | None = None
    exposed_share: float | None = None
    bytes_per_step: BytesPerStep = BytesPerStep()
    bottleneck: Bottleneck
    link_gbit_per_s: float | None = None
    stragglers: tuple[str, ...] = ()
    late_ms: float | None = None
    power_w: float | None = None
    energy_j_per_sample: float | None = None
    price_per_hour: float | None = None
    whole: FullRun = FullRun()
    dataset_samples: int | None = None
    whole_s: Estimate | None = None
    whole_cost: float | None = None
    cost_per_million_tokens: float | None = None
    disturbed: tuple[Disturbance, ...] = ()
    disturbances: tuple[str, ...] = ()
    missing: dict[str, str] = {}


class CurvePoint(msgspec.Struct, frozen=True, kw_only=True):
    """One point of a scaling curve.

    Attributes:
        speedup: over the side with the fewest nodes.
        efficiency: speed-up over the ratio of workers; of a curve with the same workers, the speed-up itself.
    """

    nodes: int
    world_size: int
    samples_per_s: Estimate
    speedup: Estimate
    efficiency: float


class NodeSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """One node alone.

    Attributes:
        relative: a worker's samples/s over those of a worker of the fastest node.
    """

    node: str
    workers: int
    samples_per_s: Estimate
    step_time_ms: Estimate
    relative: float


class SlowdownAttribution(msgspec.Struct, frozen=True, kw_only=True):
    """What a step of the candidate costs beyond ideal scaling, in ms; None is unknown.

    Attributes:
        ideal_ms: the candidate's step if the network cost nothing and each node were as fast as the fastest alone.
        node: the slowest node; None where none stands out. `relative` its speed, of the fastest's or the others'.
        node_ms: what it adds.
        network_ms: communication exposed on the candidate beyond the baseline's own.
        other_ms: what neither explains; below zero where they explain too much.
        cause: `network`, `node`, `none` (the candidate loses nothing that a user would notice) or `unknown`.
        sentence: the same in one sentence.
    """

    ideal_ms: float | None = None
    node: str | None = None
    relative: float | None = None
    node_ms: float | None = None
    network_ms: float | None = None
    other_ms: float | None = None
    cause: str = "unknown"
    sentence: str = ""


class Contrast(msgspec.Struct, frozen=True, kw_only=True):
    """One node against many; `contrast.json`.

    Attributes:
        mode: `same-workers` (as many workers on both sides), `scale-out` (every node full, the same batch per worker),
            `fixed-global-batch` (every node full, the same samples per step) or `compare` (two stored runs).
        why: why this mode.
        baseline: the side with fewer nodes.
        candidate: that with more.
        speedup: samples/s of the candidate over the baseline's.
        efficiency: speed-up over the ratio of workers: 1 is a network that costs nothing.
        scaling: which efficiency that is: `weak` (the same batch per worker), `strong` (the same samples per step) or
            `same workers`.
        curve: by nodes; empty without sides in between.
        each_node: every node alone; empty where that was not asked for.
        loss: where the candidate's time goes.
        verdict: one sentence.
        reasons: up to three more, with the figures behind it.
        differences: what differs between the sides and is not under comparison, a sentence each.
        forecast: what other networks and settings would give, by these runs; None with `forecast_reason`.
        advice: what would change the verdict, best first.
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
