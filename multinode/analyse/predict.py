"""predict: Calibration and Scenario -> Prediction: a step's time on another network or with other settings. Pure.

Composes the cost model; the interval is the same model at both ends of what is not known.
"""

from __future__ import annotations

import math

import msgspec

from multinode.analyse.bottleneck import Bottleneck, find_bottleneck
from multinode.analyse.calibration import Calibration
from multinode.analyse.carried_network import Assumed, CarriedNetwork, Doubt, Link, comm_times, network_doubts, widest
from multinode.analyse.cost_model import StepCall, StepParts, bucketed_overlap, passing_bytes, step_parts
from multinode.analyse.step_split import StepSplit, WorkerSplit
from multinode.analyse.traffic import Layout, Strategy

__all__ = ["Prediction", "Scenario", "predict"]

_MS_PER_S = 1e3
# Not two runs of one training agree better.
_LEAST_DOUBT = 0.02
_PER_DOUBLING_OF_BATCH = 0.1
_PER_DOUBLING_OF_ACCUMULATION = 0.03
_ALIKE = 0.01
# Of rho, where it was measured: the same training on another day.
_RHO_DOUBT = 0.1
_REDUCTIONS = frozenset({"all_reduce", "reduce_scatter", "broadcast"})


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked for.

    Attributes:
        link: between the nodes.
        layout: the workers.
        per_device_batch: samples of a worker's micro-batch, above zero.
        accumulation: micro-batches a step.
        strategy: how the model is shared out.
        gradient_factor: what the bytes of gradients are multiplied with: 0.5 is a hook that sends fp32 as half.
        bucket_bytes: the most that a reduction carries at once; None as calibrated.
        overlap: whether computation may hide communication at all.
    """

    link: Link
    layout: Layout
    per_device_batch: float
    accumulation: int = 1
    strategy: Strategy = Strategy.DDP
    gradient_factor: float = 1.0
    bucket_bytes: float | None = None
    overlap: bool = True

    @property
    def samples(self) -> float:
        """Of one optimizer step, of all workers."""
        return self.layout.workers * self.per_device_batch * self.accumulation


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """What a scenario gives.

    Attributes:
        scenario: what was asked for.
        step_time_ms: of an optimizer step.
        samples_per_s: of all workers.
        interval: of samples_per_s: low, high.
        parts: of the step.
        bottleneck: what holds it up most, as of a run that was measured.
        doubts: why the interval is as wide.
    """

    scenario: Scenario
    step_time_ms: float
    samples_per_s: float
    interval: tuple[float, float]
    parts: StepParts
    bottleneck: Bottleneck
    doubts: tuple[Doubt, ...] = ()


class _End(msgspec.Struct, frozen=True, kw_only=True):
    """One end of what is not known: of the network, and of a worker's own work as a factor."""

    network: Assumed = Assumed()
    own: float = 1.0


def predict(calibration: Calibration, scenario: Scenario) -> Prediction:
    """A step of the scenario, and how far that can be trusted.

    Raises:
        ValueError: the strategy gathers all parameters, and how many there are is not known.
    """
    calls = _calls(calibration, scenario)
    doubts = _doubts(calibration, scenario, calls)
    stretch, own = widest(doubts, "network"), widest(doubts, "compute")
    fast = _End(network=Assumed(end=-1, stretch=1 / stretch), own=1 / own)
    slow = _End(network=Assumed(end=1, stretch=stretch), own=own)
    parts = _parts(calibration, scenario, calls, _End())
    rates = [scenario.samples / _parts(calibration, scenario, calls, end).step_ms * _MS_PER_S for end in (fast, slow)]
    rate = scenario.samples / parts.step_ms * _MS_PER_S
    least = max(doubt.relative for doubt in doubts if doubt.part == "step")
    return Prediction(
        scenario=scenario,
        step_time_ms=parts.step_ms,
        samples_per_s=rate,
        interval=(min(rates[1], rate / (1 + least)), max(rates[0], rate * (1 + least))),
        parts=parts,
        bottleneck=_bottleneck(parts),
        doubts=doubts,
    )


def _calls(calibration: Calibration, scenario: Scenario) -> tuple[StepCall, ...]:
    work = calibration.work
    if scenario.bucket_bytes is not None:
        # The calls as the engine cut them are of another size of bucket.
        work = msgspec.structs.replace(work, bucket_bytes=scenario.bucket_bytes, calls={})
    return tuple(
        msgspec.structs.replace(call, size_bytes=call.size_bytes * scenario.gradient_factor)
        if call.collective in _REDUCTIONS
        else call
        for call in work.calls_of(scenario.strategy, scenario.layout)
    )


def _parts(calibration: Calibration, scenario: Scenario, calls: tuple[StepCall, ...], end: _End) -> StepParts:
    costs = calibration.costs
    larger = scenario.per_device_batch / calibration.per_device_batch
    hideable_ms = costs.t_hide_ms * larger * end.own
    costs = msgspec.structs.replace(
        costs,
        compute_ms=costs.compute_ms * larger * end.own,
        optimizer_ms=costs.optimizer_ms * end.own,
        host_ms=costs.host_ms * end.own,
        data_ms=costs.data_ms * larger * end.own,
        # Computing that takes longer than thought does not hide more for it.
        hideable_ms=hideable_ms if end.own == 1 else costs.t_hide_ms * larger,
    )
    comm = comm_times(calibration.network, calls, scenario.link, scenario.layout, end.network)
    parts = step_parts(
        costs, comm, accumulation=scenario.accumulation, overlap=_rho(calibration, scenario, calls, end.network.end)
    )
    # A ring over all nodes passes between the workers of each as well: it is no faster than theirs alone.
    local_ms = _local_ms(calibration, scenario, calls) * end.own
    if parts.exposed_ms >= local_ms:
        return parts
    return msgspec.structs.replace(parts, comm_ms=max(parts.comm_ms, local_ms), exposed_ms=local_ms)


def _rho(calibration: Calibration, scenario: Scenario, calls: tuple[StepCall, ...], end: int) -> float:
    if not scenario.overlap:
        return 0.0
    measured = _measured_rho(calibration, scenario)
    if measured is not None:
        return min(1.0, max(0.0, measured - end * _RHO_DOUBT))
    return {-1: 1.0, 0: bucketed_overlap(calls), 1: 0.0}[end]


def _measured_rho(calibration: Calibration, scenario: Scenario) -> float | None:
    """It is of the calls that it was measured with."""
    same = scenario.strategy is calibration.work.strategy and scenario.bucket_bytes is None
    return calibration.costs.overlap if same else None


def _local_ms(calibration: Calibration, scenario: Scenario, calls: tuple[StepCall, ...]) -> float:
    """Exposed communication among the workers of one node, by the bytes that a worker sends."""
    if scenario.layout.workers_per_node == 1 or not calibration.local_ms:
        return 0.0
    measured = calibration.work.calls_of(calibration.work.strategy, calibration.layout)
    before = passing_bytes(measured, calibration.accumulation, max(2, calibration.layout.workers))
    now = passing_bytes(calls, scenario.accumulation, scenario.layout.workers_per_node)
    return calibration.local_ms * now / before if before else calibration.local_ms


def _doubts(calibration: Calibration, scenario: Scenario, calls: tuple[StepCall, ...]) -> tuple[Doubt, ...]:
    network = calibration.network
    between = scenario.layout.nodes > 1
    scatter = calibration.scatter
    least = max(scatter, network.error if between else 0.0, _LEAST_DOUBT)
    found = [Doubt(part="step", relative=least, why=_why_least(scatter, network, between=between))]
    if scatter:
        found.append(Doubt(part="compute", relative=scatter, why=f"its step times scatter by {scatter:.0%}"))
    for name, ratio, rate in (
        ("the batch", scenario.per_device_batch / calibration.per_device_batch, _PER_DOUBLING_OF_BATCH),
        ("accumulation", scenario.accumulation / calibration.accumulation, _PER_DOUBLING_OF_ACCUMULATION),
    ):
        if abs(math.log2(ratio)) > _ALIKE:
            why = f"{name} is {ratio:.3g} times that of the run that was measured"
            found.append(Doubt(part="compute", relative=rate * abs(math.log2(ratio)), why=why))
    if not between:
        return tuple(found)
    found += network_doubts(network, calls, scenario.link, scenario.layout)
    if scenario.overlap and _measured_rho(calibration, scenario) is None:
        why = "how much computation hides was not measured: from nothing to all that it could"
        # It moves rho to its ends, and stretches nothing.
        found.append(Doubt(part="overlap", relative=0.0, why=why))
    return tuple(found)


def _why_least(scatter: float, network: CarriedNetwork, *, between: bool) -> str:
    if between and network.error > max(scatter, _LEAST_DOUBT):
        return "no narrower than the sweep's own error"
    return "no narrower than the steps scatter" if scatter > _LEAST_DOUBT else "no two runs agree better"


def _bottleneck(parts: StepParts) -> Bottleneck:
    """By the rule for runs that were measured."""
    mean = WorkerSplit(
        rank=-1,
        step_ms=parts.step_ms,
        compute_ms=parts.compute_ms,
        exposed_ms=parts.exposed_ms,
        data_ms=parts.data_ms,
        optimizer_ms=parts.optimizer_ms,
        host_ms=parts.host_ms,
    )
    return find_bottleneck(StepSplit(source="model", mean=mean))
