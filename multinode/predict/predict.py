"""Prediction from a Calibration and a Scenario; the residual of a run on several nodes. Pure.

Composes the cost model; the interval is the same model at both ends of the unknowns.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import msgspec

from multinode.errors import UsageError
from multinode.predict.calibration import Calibration, Measured, Residual, largest
from multinode.predict.cost_model import (
    Overlap,
    Scenario,
    StepParts,
    averaging_calls,
    hideable_part,
    lever_work,
    low_rank_calls,
    overlaps,
    step_parts,
)
from multinode.predict.leave_one_out import ResidualQuantile
from multinode.predict.network_model import (
    Assumed,
    NetworkModel,
    UncertaintySource,
    comm_times,
    network_doubts,
    widest,
)
from multinode.profile.bottleneck import Bottleneck, find_bottleneck
from multinode.profile.step_split import StepSplit, WorkerSplit
from multinode.profile.summary import Summary
from multinode.traffic.algorithms import Layout
from multinode.traffic.step_calls import Call, GroupScope, Strategy, passing_bytes, with_gradients
from multinode.units import format_count

Basis = Literal["back-test", "measured", "assumed"]
"""Source of an interval."""
_MS_PER_S = 1e3
# No two runs of the same training agree more closely.
_LEAST_DOUBT = 0.02
_PER_DOUBLING_OF_BATCH = 0.1
_PER_DOUBLING_OF_ACCUMULATION = 0.03
# Their exchange inside a node, and their contention for its memory and bus.
_PER_DOUBLING_OF_WORKERS = 0.1
_OTHER_STRATEGY = 0.1
_ONCE_PER_ROUND = 0.05
# For PowerSGD and averages, if the optimizer was not timed.
_UNKNOWN_WORK = 0.2
_ALIKE = 0.01
# Error of a measured rho: the same training on another day.
_RHO_DOUBT = 0.1


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """The prediction of a scenario."""

    scenario: Scenario
    step_time_ms: float  # of an optimizer step
    samples_per_s: float  # of all workers
    interval: tuple[float, float]  # of samples_per_s: low, high
    # of the interval: `back-test` (90%, from the residuals of stored runs), `measured` (from the variation of its
    # steps) or `assumed`
    basis: Basis
    parts: StepParts
    ends: tuple[StepParts, StepParts]  # the step at the slow and at the fast end of the unknowns
    bottleneck: Bottleneck  # the main limit, as for a measured run
    doubts: tuple[UncertaintySource, ...] = ()  # reasons for the width of the interval


class _End(msgspec.Struct, frozen=True, kw_only=True):
    """One end of the unknowns: of the network, and of a worker's own work as a factor."""

    network: Assumed = Assumed()
    own: float = 1.0


def predict(calibration: Calibration, scenario: Scenario) -> Prediction:
    """A step of the scenario, and its uncertainty.

    Raises:
        ValueError: the strategy gathers all parameters, whose number is unknown.
    """
    calls = calls_of(calibration, scenario)
    doubts = _doubts(calibration, scenario, calls)
    stretch, own = widest(doubts, "network"), widest(doubts, "compute")
    fast = _End(network=Assumed(end=-1, stretch=1 / stretch), own=1 / own / widest(doubts, "cores"))
    slow = _End(network=Assumed(end=1, stretch=stretch), own=own)
    parts, *ends = (_parts(calibration, scenario, calls, end) for end in (_End(), slow))
    ends.append(_parts(calibration, scenario, _at_best(calibration, scenario, calls), fast))
    rate, low, high = (scenario.samples / one.step_ms * _MS_PER_S for one in (parts, *ends))
    least = max(doubt.relative for doubt in doubts if doubt.part == "step")
    assumed = (min(low, rate / (1 + least)), max(high, rate * (1 + least)))
    interval = assumed
    basis: Basis = "measured" if scenario == calibration.residual.at else "assumed"
    # The back-test covers several nodes only.
    if basis == "assumed" and calibration.quantile is not None and scenario.layout.nodes > 1:
        interval, basis = _by_back_test(calibration.quantile, scenario, rate, assumed)
        doubts = (*doubts, calibration.quantile.doubt)
    return Prediction(
        scenario=scenario,
        step_time_ms=parts.step_ms,
        samples_per_s=rate,
        interval=interval,
        basis=basis,
        parts=parts,
        ends=(ends[0], ends[1]),
        bottleneck=find_bottleneck(split_of(parts)),
        doubts=doubts,
    )


def _by_back_test(
    quantile: ResidualQuantile, scenario: Scenario, rate: float, assumed: tuple[float, float]
) -> tuple[tuple[float, float], Basis]:
    low, high = rate / (1 + quantile.relative), rate * (1 + quantile.relative)
    if quantile.covers(*assumed) and not scenario.is_another_algorithm:
        return (low, high), "back-test"
    return (min(assumed[0], low), max(assumed[1], high)), "assumed"


def calls_of(calibration: Calibration, scenario: Scenario) -> tuple[Call, ...]:
    """The calls of a step of the scenario."""
    work = calibration.work
    if scenario.bucket_bytes is not None:
        # The recorded calls have another bucket size.
        work = msgspec.structs.replace(work, bucket_bytes=scenario.bucket_bytes, calls={})
    calls = with_gradients(work.calls_of(scenario.strategy, scenario.layout), scenario.gradient_factor)
    if scenario.averaging is not None and scenario.averages:
        calls = averaging_calls(calls, scenario.averaging, work.load)
        # DDP broadcasts its buffers inside each node then.
        return (*calls, *(call for call in calibration.script if call.collective != "broadcast"))
    if scenario.low_rank is not None:
        calls = low_rank_calls(calls, scenario.low_rank, hideable=calibration.network.backend == "gloo")
    return (*calls, *calibration.script)


def _is_within_unknown(calibration: Calibration, scenario: Scenario) -> bool:
    return scenario.strategy is Strategy.ZERO1 and calibration.work.load.optimizer_within_node is None


def _at_best(calibration: Calibration, scenario: Scenario, calls: tuple[Call, ...]) -> tuple[Call, ...]:
    if not _is_within_unknown(calibration, scenario):
        return calls
    within = [msgspec.structs.replace(call, reach=GroupScope.NODE) for call in calls if not call.hideable]
    return (*(call for call in calls if call.hideable), *within)


def _parts(calibration: Calibration, scenario: Scenario, calls: tuple[Call, ...], end: _End) -> StepParts:
    costs, residual = calibration.costs, _residual(calibration, scenario)
    larger, own = scenario.per_device_batch / calibration.per_device_batch, end.own * residual.own
    costs = msgspec.structs.replace(
        costs,
        compute_ms=costs.compute_ms * larger * own,
        optimizer_ms=costs.optimizer_ms * (1 + _lever_work(scenario)) * own,
        host_ms=costs.host_ms * own,
        data_ms=costs.data_ms * larger * own,
    )
    assumed = msgspec.structs.replace(end.network, bulk=residual.comm)
    comm = comm_times(calibration.network, calls, scenario.link, scenario.layout, assumed)
    overlap = _overlap(calibration, scenario, calls, end.network.end)
    parts = step_parts(costs, comm, accumulation=scenario.accumulation, overlap=overlap)
    local_ms = _local_ms(calibration, scenario, calls) * end.own
    # Calls inside each node are added to the exchange between nodes. A ring over all nodes also passes between the
    # workers of each, so it is no faster than theirs alone.
    apart = any(call.reach is GroupScope.NODE for call in calls)
    exposed_ms = parts.exposed_ms + local_ms if apart else max(parts.exposed_ms, local_ms)
    exposed_ms = max(0.0, exposed_ms + _extra_ms(residual, scenario, calls))
    return msgspec.structs.replace(parts, comm_ms=max(parts.comm_ms, exposed_ms), exposed_ms=exposed_ms)


def _lever_work(scenario: Scenario) -> float:
    return lever_work(scenario.averaging if scenario.averages else None, scenario.low_rank)


def _residual(calibration: Calibration, scenario: Scenario) -> Residual:
    return calibration.residual if scenario.layout.nodes > 1 else Residual()


def _extra_ms(residual: Residual, scenario: Scenario, calls: tuple[Call, ...]) -> float:
    if not residual.extra_ms or not residual.sent_bytes:
        return residual.extra_ms
    return residual.extra_ms * sent_bytes(scenario, calls) / residual.sent_bytes


def overlap_of(calibration: Calibration, scenario: Scenario) -> float:
    """Compute per micro-batch, in ms, that a slow link can hide communication behind; 0 hides nothing."""
    overlap = _overlap(calibration, scenario, calls_of(calibration, scenario), 0)
    return hideable_part(overlap.calls) * overlap.hide_ms


def sent_bytes(scenario: Scenario, calls: Sequence[Call]) -> float:
    """Bytes that a worker sends, and receives, per step in rings over all workers or, for averages, nodes."""
    if scenario.averages:
        leaders = [call for call in calls if call.reach is GroupScope.LEADERS]
        return passing_bytes(leaders, scenario.accumulation, scenario.layout)
    return passing_bytes(calls, scenario.accumulation, scenario.layout)


def _overlap(calibration: Calibration, scenario: Scenario, calls: tuple[Call, ...], end: int) -> Overlap:
    """What computation hides, at one end of the unknowns.

    Without recorded calls the last bucket is unknown, and rho replaces the timeline.
    """
    costs, cut = calibration.costs, bool(scenario.bucket_bytes) or calibration.work.is_cut(scenario.strategy)
    # Longer computation does not hide more.
    hide_ms = costs.hideable_ms * scenario.per_device_batch / calibration.per_device_batch
    measured = _measured_rho(calibration, scenario)
    least = costs.least_overlap if _is_as_measured(calibration, scenario) else 0.0
    if not _overlaps(calibration, scenario):
        rho = 0.0
    elif measured is not None:
        rho = min(1.0, max(0.0, measured - end * _RHO_DOUBT))
    else:
        rho = {-1: 1.0, 0: 1.0 if cut else max(least, hideable_part(calls)), 1: max(0.0, least - _RHO_DOUBT)}[end]
    return Overlap(hide_ms=rho * hide_ms, calls=calls if cut and (measured is not None or end >= 0) else ())


def _overlaps(calibration: Calibration, scenario: Scenario) -> bool:
    return scenario.overlap and overlaps(scenario.strategy, calibration.network.backend)


def _measured_rho(calibration: Calibration, scenario: Scenario) -> float | None:
    return calibration.costs.overlap if _is_as_measured(calibration, scenario) else None


def _is_as_measured(calibration: Calibration, scenario: Scenario) -> bool:
    return scenario.strategy is calibration.work.strategy and scenario.bucket_bytes is None


def _local_ms(calibration: Calibration, scenario: Scenario, calls: tuple[Call, ...]) -> float:
    if scenario.layout.workers_per_node == 1 or not calibration.local_ms:
        return 0.0
    measured = calibration.work.calls_of(calibration.work.strategy, calibration.layout)
    before = passing_bytes(measured, calibration.accumulation, calibration.layout)
    # On one node nothing is sent between nodes.
    node = Layout(nodes=1, workers_per_node=scenario.layout.workers_per_node)
    now = passing_bytes(calls, scenario.accumulation, node)
    return calibration.local_ms * now / before if before else calibration.local_ms


def _doubts(calibration: Calibration, scenario: Scenario, calls: tuple[Call, ...]) -> tuple[UncertaintySource, ...]:
    network = calibration.network
    between = scenario.layout.nodes > 1
    scatter = calibration.scatter
    least = max(scatter, network.error if between else 0.0, _LEAST_DOUBT)
    found = [UncertaintySource(part="step", relative=least, why=_why_least(scatter, network, between=between))]
    if scatter:
        found.append(
            UncertaintySource(part="compute", relative=scatter, why=f"{calibration.scatter_of} by {scatter:.0%}")
        )
    for name, ratio, rate in (
        ("the batch", scenario.per_device_batch / calibration.per_device_batch, _PER_DOUBLING_OF_BATCH),
        ("accumulation", scenario.accumulation / calibration.accumulation, _PER_DOUBLING_OF_ACCUMULATION),
    ):
        if abs(math.log2(ratio)) > _ALIKE:
            why = f"{name} is {ratio:.3g} times that of the measured run"
            found.append(UncertaintySource(part="compute", relative=rate * abs(math.log2(ratio)), why=why))
    found += _doubts_of_workers(calibration, scenario)
    if scenario.strategy is not calibration.work.strategy:
        why = f"the engine's own work is that of the measured {calibration.work.strategy}"
        found.append(UncertaintySource(part="compute", relative=_OTHER_STRATEGY, why=why))
    found += calibration.doubts
    found += _doubts_of_levers(calibration, scenario)
    inside = not between or any(call.reach is GroupScope.NODE for call in calls)
    if inside and network.local_gb_per_s is not None and scenario.layout.workers_per_node > 1:
        low, high = network.local_gb_per_s
        why = f"the exchange between workers of one node was not measured: assumed at {low:.2g} to {high:.2g} GB/s"
        # It moves the rate to its ends.
        found.append(UncertaintySource(part="network", relative=0.0, why=why))
    if not between:
        return tuple(found)
    if _is_within_unknown(calibration, scenario):
        why = "it is unknown whether the optimizer states are sharded within each node (optimizer_within_node)"
        # It moves the fast end.
        found.append(UncertaintySource(part="network", relative=0.0, why=why))
    found += _doubts_of_residual(calibration.residual, scenario)
    found += network_doubts(network, calls, scenario.link, scenario.layout)
    hides = any(call.hideable and call.reach is not GroupScope.NODE for call in calls)
    if hides and _overlaps(calibration, scenario) and _measured_rho(calibration, scenario) is None:
        least = calibration.costs.least_overlap if _is_as_measured(calibration, scenario) else 0.0
        start = f"the {least:.0%} that it used" if least else "nothing"
        why = f"the part that computation hides was not measured: from {start} to everything possible"
        # It moves rho to its ends.
        found.append(UncertaintySource(part="overlap", relative=0.0, why=why))
    return tuple(found)


def _doubts_of_levers(calibration: Calibration, scenario: Scenario) -> Iterator[UncertaintySource]:
    if scenario.averages:
        why = "the nodes' wait for each other once per round was not measured"
        yield UncertaintySource(part="compute", relative=_ONCE_PER_ROUND, why=why)
    costs, work = calibration.costs, _lever_work(scenario)
    if work:
        step_ms = scenario.accumulation * costs.compute_ms + costs.optimizer_ms * (1 + work)
        part = costs.optimizer_ms * work / step_ms if costs.optimizer_ms else _UNKNOWN_WORK
        what = "PowerSGD" if scenario.low_rank is not None else "an average of parameters"
        why = f"the compute of {what} is estimated from the optimizer's time"
        yield UncertaintySource(part="compute", relative=part, why=why)


def _doubts_of_workers(calibration: Calibration, scenario: Scenario) -> list[UncertaintySource]:
    known, asked = calibration.known_workers(scenario.layout.nodes), scenario.layout.workers_per_node
    if asked <= known:
        return []
    told = format_count(known, "worker")
    why = f"{told} per node measured, {asked} requested: their contention is unknown"
    return [UncertaintySource(part="compute", relative=_PER_DOUBLING_OF_WORKERS * math.log2(asked / known), why=why)]


def _doubts_of_residual(residual: Residual, scenario: Scenario) -> Iterator[UncertaintySource]:
    """Uncertainty from the model's error at the measured point, and from the error that remains.

    The workers' own work relative to one node is known no better than two runs agree, and on a faster link it is a
    larger share of the step.
    """
    size = residual.left if scenario == residual.at else max(residual.left, residual.size)
    if size > _LEAST_DOUBT:
        why = f"on several nodes the model alone was off by a factor of {1 + size:.3g}"
        yield UncertaintySource(part="step", relative=size, why=why)
    off = max(residual.own, 1 / residual.own) - 1
    if scenario != residual.at and off > _LEAST_DOUBT:
        why = f"the workers' own work took {residual.own:.3g} times as long as on one node, possibly by chance"
        yield UncertaintySource(part="compute", relative=off, why=why)


def _why_least(scatter: float, network: NetworkModel, *, between: bool) -> str:
    if between and network.error > max(scatter, _LEAST_DOUBT):
        return "at least the error of the size scan"
    return "at least the variation of the steps" if scatter > _LEAST_DOUBT else "at least the variation between runs"


def split_of(parts: StepParts) -> StepSplit:
    """The step split, as for a measured run."""
    mean = WorkerSplit(
        rank=-1,
        step_ms=parts.step_ms,
        compute_ms=parts.compute_ms,
        exposed_ms=parts.exposed_ms,
        data_ms=parts.data_ms,
        optimizer_ms=parts.optimizer_ms,
        host_ms=parts.host_ms,
    )
    return StepSplit(source="model", mean=mean)


_AGAIN = "measure it again, or name another run"
_LEAST_MS, _MOST_MS = 1e-6, 1e9
# The residual cannot explain a larger error; the rest is uncertainty.
_LEAST_FACTOR, _MOST_FACTOR = 1 / 16, 16.0
# Maximum error of a nominal rate; beyond it the link rate does not limit the calls.
_MOST_COMM = 1.25
# Fraction of a step that a user would notice.
_NOTICEABLE = 0.05
# Rounding must not decide.
_ROUNDING = 1e-9


def carry_residual(calibration: Calibration, several: Measured, scenario: Scenario) -> Calibration:
    """The same calibration, adjusted so that it predicts the measured value for that run.

    Exposed communication beyond the model scales with the bytes sent; an excess of the model reduces the time of calls;
    everything else, such as waits for a slower node, is attributed to the workers' own work.

    Args:
        calibration: from that run among others.
        several: on several nodes.
        scenario: of that run, its gradients as sent.
    """
    step_ms = _step_ms(several.summary, scenario)
    try:
        alone = predict(calibration, scenario).parts
    except ValueError:
        # If the traffic is unknown, this is reported when it is needed.
        return calibration
    exposed_ms = _exposed_ms(several.summary, step_ms, alone)
    residual = _of_exposed(_Calibrated(calibration, scenario), exposed_ms)
    residual = _of_own(_Calibrated(calibration, scenario), residual, step_ms)
    residual = msgspec.structs.replace(residual, size=_missed(step_ms, alone.step_ms))
    notes = (*calibration.notes, *_notes(several.summary.run_id, step_ms, alone, residual))
    return msgspec.structs.replace(calibration, residual=residual, notes=notes)


class _Calibrated(NamedTuple):
    """A calibration, and the scenario of its residual."""

    calibration: Calibration
    scenario: Scenario

    def parts(self, residual: Residual) -> StepParts:
        """The parts of the step with that residual."""
        return predict(msgspec.structs.replace(self.calibration, residual=residual), self.scenario).parts


def _step_ms(summary: Summary, scenario: Scenario) -> float:
    rate = summary.samples_per_s or 0.0
    step_ms = scenario.samples / rate * _MS_PER_S if rate > 0 else 0.0
    if not _LEAST_MS <= step_ms <= _MOST_MS:
        reason = summary.missing.get("samples_per_s", f"{rate:g} samples/s is implausible")
        raise UsageError(f"run {summary.run_id} has no samples/s to predict from: {reason}", hint=_AGAIN)
    return step_ms


def _exposed_ms(summary: Summary, step_ms: float, alone: StepParts) -> float:
    mean = summary.split.mean
    if mean is None or mean.exposed_ms is None or mean.step_ms <= 0:
        return max(0.0, step_ms - (alone.step_ms - alone.exposed_ms))
    return min(1.0, max(0.0, mean.exposed_ms / mean.step_ms)) * step_ms


def _of_exposed(model: _Calibrated, exposed_ms: float) -> Residual:
    """The residual with which the model exposes this much, or as little as it can.

    By the time of calls, as long as the link limits them; the rest as time beyond all calls.
    """
    calibration, scenario = model

    def parts(comm: float) -> StepParts:
        return model.parts(Residual(at=scenario, comm=comm))

    calls = calls_of(calibration, scenario)
    passes = scenario.accumulation if any(call.per_micro_batch for call in calls) else 1
    hide_ms = passes * _overlap(calibration, scenario, calls, 0).hide_ms
    comm, comm_ms = 1.0, parts(1.0).comm_ms
    if comm_ms > hide_ms:
        goal_ms = max(exposed_ms, parts(_LEAST_FACTOR).exposed_ms) * (1 + _ROUNDING)
        # Even with maximum overlap they took no less.
        least = min(1 / _MOST_COMM, max(_LEAST_FACTOR, (exposed_ms + hide_ms) / comm_ms))
        comm = largest(least, _MOST_COMM, lambda factor: parts(factor).exposed_ms <= goal_ms)
    extra_ms = exposed_ms - parts(comm).exposed_ms
    extra_ms = extra_ms if abs(extra_ms) > _ROUNDING * exposed_ms else 0.0
    return Residual(at=scenario, comm=comm, extra_ms=extra_ms, sent_bytes=sent_bytes(scenario, calls))


def _of_own(model: _Calibrated, residual: Residual, step_ms: float) -> Residual:
    parts = model.parts(residual)
    own = (step_ms - parts.exposed_ms) / (parts.step_ms - parts.exposed_ms)
    residual = msgspec.structs.replace(residual, own=min(_MOST_FACTOR, max(_LEAST_FACTOR, own)))
    left = _missed(step_ms, model.parts(residual).step_ms)
    return msgspec.structs.replace(residual, left=left if left > _ROUNDING else 0.0)


def _missed(measured_ms: float, predicted_ms: float) -> float:
    return max(measured_ms / predicted_ms, predicted_ms / measured_ms) - 1


def _notes(run_id: str, step_ms: float, alone: StepParts, residual: Residual) -> Iterator[str]:
    if residual.size > _NOTICEABLE:
        causes = "; ".join(_causes(step_ms, residual))
        yield (
            f"a step of run {run_id} took {step_ms:.3g} ms, but {alone.step_ms:.3g} ms by the model alone: "
            f"{causes}; predictions for several nodes include this"
        )


def _causes(step_ms: float, residual: Residual) -> Iterator[str]:
    if residual.extra_ms > _NOTICEABLE * step_ms:
        yield f"{residual.extra_ms:.3g} ms of it is exposed communication that the network data do not explain"
    if abs(residual.comm - 1) > _NOTICEABLE:
        yield f"its calls took {residual.comm:.2f} times as long as the network data predict"
    if abs(residual.own - 1) > _NOTICEABLE:
        yield (
            f"its workers' own work and their waits for each other took {residual.own:.2f} times as long as on one node"
        )
