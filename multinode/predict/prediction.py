"""Prediction from a Calibration and a Scenario; the residual of a run on several nodes. Pure.

Composes the cost model; the interval is the same model in all draws of what is unknown.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

from multinode.errors import UsageError
from multinode.findings.finding import Finding
from multinode.findings.rule import RuleGroup
from multinode.predict.calibration import Calibration, CalibrationRun, Residual, largest
from multinode.predict.cost_model import (
    Overlap,
    Scenario,
    StepCosts,
    StepParts,
    averaging_calls,
    hideable_part,
    low_rank_calls,
    overlaps,
    step_parts,
)
from multinode.predict.draws import DRAWS, OTHERWISE, Draw, interval, linear
from multinode.predict.network_model import (
    CommTimes,
    DoubtRules,
    UncertaintySource,
    comm_times,
    network_doubts,
)
from multinode.profile.bottleneck import Bottleneck, find_bottleneck
from multinode.profile.step_split import StepSplit, WorkerSplit
from multinode.stats.estimate import value_of
from multinode.stats.unknown import or_none, reason_of
from multinode.traffic.algorithms import Layout
from multinode.traffic.step_calls import SMALL_BYTES, Call, GroupScope, Strategy, passing_bytes, with_gradients
from multinode.units import format_count, format_figure, format_ms, format_rate

Basis = Literal["back-test", "measured", "assumed"]
"""Source of an interval."""
_MS_PER_S = 1e3
LEAST_DOUBT = 0.02
"""No two runs of the same training agree more closely."""
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


class Prediction:
    """The prediction of a scenario.

    Attributes:
        scenario: what is predicted.
        calls: of a step of it.
        parts: of the step, with the usual value of every unknown.
        step_time_ms: of an optimizer step.
        samples_per_s: of all workers.

    Raises:
        ValueError: the strategy gathers all parameters, whose number is unknown.
    """

    def __init__(self, calibration: Calibration, scenario: Scenario) -> None:
        self._calibration, self.scenario = calibration, scenario
        several = scenario.layout.nodes > 1
        self._residual = calibration.residual if several else Residual()
        self._quantile = calibration.quantile if several and scenario != calibration.residual.at else None
        self.calls = calls_of(calibration, scenario)
        self._own_doubts = tuple(_doubts(calibration, scenario, self.calls))
        self._factors = {
            part: 1 + math.hypot(*(doubt.relative for doubt in self._own_doubts if doubt.part == part))
            for part in ("network", "compute", "cores")
        }
        self.parts = self.step_of(Draw())
        self.step_time_ms = self.parts.step_ms
        self.samples_per_s = scenario.samples / self.step_time_ms * _MS_PER_S

    @functools.cached_property
    def draws(self) -> tuple[StepParts, ...]:
        """The step in each of DRAWS, without the error of the whole step."""
        return tuple(map(self.step_of, DRAWS))

    @functools.cached_property
    def basis(self) -> Basis:
        """Of the interval."""
        if self.scenario == self._calibration.residual.at:
            return "measured"
        if self._quantile is None or self.scenario.is_another_algorithm:
            return "assumed"
        assumed = interval(self.samples_per_s, self._speeds(), _error(self._own_doubts))
        return "back-test" if self._quantile.covers(*assumed) else "assumed"

    @functools.cached_property
    def interval(self) -> tuple[float, float]:
        """Of samples_per_s: low, high."""
        if self.basis == "back-test":
            return self.samples_per_s / (1 + self.error), self.samples_per_s * (1 + self.error)
        return interval(self.samples_per_s, self._speeds(), self.error)

    @property
    def error(self) -> float:
        """Relative error of the whole step, whatever is known of its parts."""
        if self.basis == "back-test" and self._quantile is not None:
            return self._quantile.relative
        return _error(self.doubts)

    @property
    def doubts(self) -> tuple[UncertaintySource, ...]:
        """Reasons for the width of the interval."""
        return (*self._own_doubts, *([self._quantile.doubt] if self._quantile is not None else []))

    @property
    def hidden_ms(self) -> float:
        """Compute per micro-batch, in ms, that a slow link can hide communication behind; 0 hides nothing."""
        overlap = self.overlap(Draw())
        return hideable_part(overlap.calls) * overlap.hide_ms

    @property
    def bottleneck(self) -> Bottleneck:
        """The main limit, as for a measured run."""
        return find_bottleneck(split_of(self.parts), nodes=self.scenario.layout.nodes)

    def with_residual(self, residual: Residual) -> Prediction:
        """Copy of the prediction with another residual."""
        return Prediction(msgspec.structs.replace(self._calibration, residual=residual), self.scenario)

    def overlap(self, draw: Draw) -> Overlap:
        """What computation hides.

        Without recorded calls the last bucket is unknown, and rho replaces the timeline.
        """
        calibration, scenario = self._calibration, self.scenario
        costs, cut = self._costs(draw), bool(scenario.bucket_bytes) or calibration.work.is_cut(scenario.strategy)
        # Longer computation does not hide more.
        hide_ms = costs.hideable_ms * scenario.per_device_batch / calibration.per_device_batch
        measured = _measured_rho(calibration, scenario)
        least = _least_rho(calibration, scenario)
        if not _overlaps(calibration, scenario):
            rho = 0.0
        elif measured is not None:
            rho = min(1.0, max(0.0, measured - draw.overlap * _RHO_DOUBT))
        else:
            usual = 1.0 if cut else max(least, hideable_part(self.calls))
            rho = linear(draw.overlap, 1.0, usual, max(0.0, least - _RHO_DOUBT))
        is_timed = cut and (measured is not None or draw.overlap > -OTHERWISE)
        return Overlap(hide_ms=rho * hide_ms, calls=self.calls if is_timed else ())

    def _speeds(self) -> list[float]:
        return [self.scenario.samples / parts.step_ms * _MS_PER_S for parts in self.draws]

    def _costs(self, draw: Draw) -> StepCosts:
        costs = self._calibration.costs
        share = linear(draw.fixed, 0.0, 0.0, costs.most_fixed)
        return costs.with_fixed(share, self._calibration.accumulation) if share else costs

    def step_of(self, draw: Draw, own: float = 1.0) -> StepParts:
        """The step in one draw.

        Args:
            draw: of what is unknown.
            own: factor on the workers' own work.
        """
        calibration, scenario, costs = self._calibration, self.scenario, self._costs(draw)
        larger = scenario.per_device_batch / calibration.per_device_batch
        drawn = self._factors["compute"] ** draw.compute * self._factors["cores"] ** min(0.0, draw.cores)
        own *= drawn * self._residual.own * calibration.own_of.get(draw, 1.0)
        costs = msgspec.structs.replace(
            costs,
            compute_ms=costs.compute_ms * larger * own,
            optimizer_ms=costs.optimizer_ms * (1 + scenario.lever_work) * own,
            host_ms=costs.host_ms * own,
            data_ms=costs.data_ms * larger * own,
        )
        comm = self._comm(draw)
        parts = step_parts(costs, comm, accumulation=scenario.accumulation, overlap=self.overlap(draw))
        local_ms = self._local_ms * drawn
        # Calls inside each node are added to the exchange between nodes. A ring over all nodes also passes between the
        # workers of each, so it is no faster than theirs alone.
        apart = any(call.reach is GroupScope.NODE for call in self.calls)
        exposed_ms = parts.exposed_ms + local_ms if apart else max(parts.exposed_ms, local_ms)
        exposed_ms = max(0.0, exposed_ms + self._extra_ms)
        return msgspec.structs.replace(parts, comm_ms=max(parts.comm_ms, exposed_ms), exposed_ms=exposed_ms)

    def _comm(self, draw: Draw) -> CommTimes:
        calls, scenario = self._timed_calls, self.scenario
        if draw.rate < -OTHERWISE and _is_within_unknown(self._calibration, scenario):
            calls = tuple(
                call if call.hideable else msgspec.structs.replace(call, reach=GroupScope.NODE) for call in calls
            )
        times = comm_times(self._calibration.network, calls, scenario.link, scenario.layout, draw.rate)
        return times * math.pow(self._factors["network"], draw.network)

    @functools.cached_property
    def _timed_calls(self) -> tuple[Call, ...]:
        slower = self._residual.comm
        return tuple(
            call if call.size_bytes < SMALL_BYTES else msgspec.structs.replace(call, times=call.times * slower)
            for call in self.calls
        )

    @functools.cached_property
    def _extra_ms(self) -> float:
        residual = self._residual
        if not residual.extra_ms or not residual.sent_bytes:
            return residual.extra_ms
        return residual.extra_ms * sent_bytes(self.scenario, self.calls) / residual.sent_bytes

    @functools.cached_property
    def _local_ms(self) -> float:
        calibration, scenario = self._calibration, self.scenario
        if scenario.layout.workers_per_node == 1 or not calibration.local_ms:
            return 0.0
        measured = calibration.work.calls_of(calibration.work.strategy, calibration.layout)
        before = passing_bytes(measured, calibration.accumulation, calibration.layout)
        # On one node nothing is sent between nodes.
        node = Layout(nodes=1, workers_per_node=scenario.layout.workers_per_node)
        now = passing_bytes(self.calls, scenario.accumulation, node)
        return calibration.local_ms * now / before if before else calibration.local_ms


def _error(doubts: Sequence[UncertaintySource]) -> float:
    return max(doubt.relative for doubt in doubts if doubt.part == "step")


def calls_of(calibration: Calibration, scenario: Scenario) -> tuple[Call, ...]:
    """The calls of a step of the scenario."""
    work = calibration.work
    if scenario.bucket_bytes is not None:
        # The recorded calls have another bucket size.
        work = msgspec.structs.replace(work, bucket_bytes=scenario.bucket_bytes, calls={})
    calls = with_gradients(work.calls_of(scenario.strategy, scenario.layout), scenario.gradient_factor)
    if scenario.averaging is not None:
        calls = averaging_calls(calls, scenario.averaging, work.load)
        # DDP broadcasts its buffers inside each node then.
        return (*calls, *(call for call in calibration.script if call.collective != "broadcast"))
    if scenario.low_rank is not None:
        calls = low_rank_calls(calls, scenario.low_rank, hideable=calibration.network.backend == "gloo")
    return (*calls, *calibration.script)


def _is_within_unknown(calibration: Calibration, scenario: Scenario) -> bool:
    return scenario.strategy is Strategy.ZERO1 and calibration.work.load.optimizer_within_node is None


def sent_bytes(scenario: Scenario, calls: Sequence[Call]) -> float:
    """Bytes that a worker sends, and receives, per step in rings over all workers or, for averages, nodes."""
    if scenario.averaging is not None:
        leaders = [call for call in calls if call.reach is GroupScope.LEADERS]
        return passing_bytes(leaders, scenario.accumulation, scenario.layout)
    return passing_bytes(calls, scenario.accumulation, scenario.layout)


def _overlaps(calibration: Calibration, scenario: Scenario) -> bool:
    return scenario.overlap and overlaps(scenario.strategy, calibration.network.backend)


def _measured_rho(calibration: Calibration, scenario: Scenario) -> float | None:
    return calibration.costs.overlap if _is_as_measured(calibration, scenario) else None


def _least_rho(calibration: Calibration, scenario: Scenario) -> float:
    return calibration.costs.least_overlap if _is_as_measured(calibration, scenario) else 0.0


def _is_as_measured(calibration: Calibration, scenario: Scenario) -> bool:
    return scenario.strategy is calibration.work.strategy and scenario.bucket_bytes is None


DOUBTS = DoubtRules("Uncertainty of a prediction: the scenario and the model")
_OTHER_BATCH = DOUBTS.doubt(
    "other-batch",
    "compute",
    about="a batch or accumulation that was not measured",
    message="{name} is {times} times that of the measured run",
)
_FIXED_PART = DOUBTS.doubt(
    "fixed-part",
    "fixed",
    about="work that occurs once per step, regardless of the batch size",
    message="up to {most:.0%} of the step time may not depend on the number of samples",
)
_MORE_WORKERS = DOUBTS.doubt(
    "more-workers",
    "compute",
    about="more workers per node than measured",
    message="the measured runs had at most {measured} per node, but the prediction is for {requested}; the contention "
    "between more workers is unknown",
)
_OTHER_ENGINE = DOUBTS.doubt(
    "other-strategy",
    "compute",
    about="a strategy that was not measured",
    message="the overhead of the engine was measured only with {strategy}",
)
_INSIDE = DOUBTS.doubt(
    "inside-a-node",
    "network",
    about="communication between workers of one node that was not measured",
    message="communication between workers of one node was not measured; {low} to {high} GB/s is assumed",
)
_SHARDED_STATES = DOUBTS.doubt(
    "sharded-states",
    "network",
    about="optimizer states that may be sharded within each node",
    message="it is unknown whether the optimizer states are sharded within each node (optimizer_within_node)",
)
_HIDDEN_PART = DOUBTS.doubt(
    "hidden-part",
    "overlap",
    about="an overlap that was not measured",
    message=(
        "the overlap with compute was not measured; the range covers everything from {start} to the largest possible "
        "overlap"
    ),
)
_ROUNDS = DOUBTS.doubt(
    "rounds",
    "compute",
    about="waits between nodes in each round, if nodes synchronize less often",
    message="the time that nodes wait for each other in each round was not measured",
)
_LEVER_COMPUTE = DOUBTS.doubt(
    "lever-compute",
    "compute",
    about="compute time of PowerSGD or of parameter averaging",
    message="the time of {lever} is estimated from the time of the optimizer",
)
_MODEL_OFF = DOUBTS.doubt(
    "model-off",
    "step",
    about="the error of the model for the measured run",
    message="without the measured run, the prediction for several nodes was off by a factor of {factor}",
)
_OWN_WORK = DOUBTS.doubt(
    "own-work",
    "compute",
    about="time outside exposed communication that is longer or shorter on several nodes than on one",
    message="on several nodes, everything except exposed communication took {times} times as long as on one node; this "
    "may be chance",
)
_BETWEEN_RUNS = DOUBTS.doubt(
    "between-runs", "step", about="the variation between runs", message="the range includes the variation between runs"
)
_SCATTER = DOUBTS.doubt(
    "scatter", "step", about="the variation of the measured runs", message="{differing} by {scatter:.0%}"
)
_SIZE_SCAN = DOUBTS.doubt(
    "size-scan",
    "step",
    about="the error of times that are estimated from nccl-test",
    message="the range includes the error of times that are estimated from nccl-test",
)
_WHOLE_STEP = DOUBTS.doubt(
    "whole-step",
    "network",
    about="a step on several nodes whose communication is unknown",
    message="the step was measured on {nodes} nodes, but its communication was not measured separately",
)


def _doubts(calibration: Calibration, scenario: Scenario, calls: tuple[Call, ...]) -> tuple[UncertaintySource, ...]:
    network = calibration.network
    between = scenario.layout.nodes > 1
    doubts = [_least_doubt(calibration, between=between)]
    for name, ratio, rate in (
        ("the batch", scenario.per_device_batch / calibration.per_device_batch, _PER_DOUBLING_OF_BATCH),
        ("accumulation", scenario.accumulation / calibration.accumulation, _PER_DOUBLING_OF_ACCUMULATION),
    ):
        if abs(math.log2(ratio)) > _ALIKE:
            relative = rate * abs(math.log2(ratio))
            doubts.append(_OTHER_BATCH.found(None, relative=relative, name=name, times=format_figure(ratio)))
    doubts += _doubt_of_fixed(calibration, scenario)
    doubts += _doubts_of_workers(calibration, scenario)
    if scenario.strategy is not calibration.work.strategy:
        doubts.append(_OTHER_ENGINE.found(None, relative=_OTHER_STRATEGY, strategy=str(calibration.work.strategy)))
    doubts += calibration.doubts
    doubts += _doubts_of_levers(calibration, scenario)
    inside = not between or any(call.reach is GroupScope.NODE for call in calls)
    if inside and network.local_gb_per_s is not None and scenario.layout.workers_per_node > 1:
        low, high = (format_figure(end, digits=2) for end in network.local_gb_per_s)
        # The draws of the rate cover it.
        doubts.append(_INSIDE.found(None, low=low, high=high))
    if not between:
        return tuple(doubts)
    if _is_within_unknown(calibration, scenario):
        # Some draws take the other.
        doubts.append(_SHARDED_STATES.found(None))
    doubts += _doubts_of_residual(calibration.residual, scenario)
    doubts += network_doubts(network, calls, scenario.link, scenario.layout)
    hides = any(call.hideable and call.reach is not GroupScope.NODE for call in calls)
    if hides and _overlaps(calibration, scenario) and _measured_rho(calibration, scenario) is None:
        least = _least_rho(calibration, scenario)
        # The draws of rho cover it.
        doubts.append(_HIDDEN_PART.found(None, start=f"an overlap of {least:.0%}" if least else "no overlap"))
    return tuple(doubts)


def _doubts_of_levers(calibration: Calibration, scenario: Scenario) -> Iterator[UncertaintySource]:
    if scenario.averaging is not None:
        yield _ROUNDS.found(None, relative=_ONCE_PER_ROUND)
    costs, work = calibration.costs, scenario.lever_work
    if work:
        step_ms = scenario.accumulation * costs.compute_ms + costs.optimizer_ms * (1 + work)
        part = costs.optimizer_ms * work / step_ms if costs.optimizer_ms else _UNKNOWN_WORK
        lever = "PowerSGD" if scenario.low_rank is not None else "parameter averaging"
        yield _LEVER_COMPUTE.found(None, relative=part, lever=lever)


def _doubt_of_fixed(calibration: Calibration, scenario: Scenario) -> Iterator[UncertaintySource]:
    measured, requested = (each.per_device_batch * each.accumulation for each in (calibration, scenario))
    most = calibration.costs.most_fixed
    if most and abs(math.log2(requested / measured)) > _ALIKE:
        # The draws of the share cover it.
        yield _FIXED_PART.found(None, most=most)


def _doubts_of_workers(calibration: Calibration, scenario: Scenario) -> Iterator[UncertaintySource]:
    measured, requested = calibration.known_workers(scenario.layout.nodes), scenario.layout.workers_per_node
    if requested > measured:
        relative = _PER_DOUBLING_OF_WORKERS * math.log2(requested / measured)
        workers = format_count(measured, "worker")
        yield _MORE_WORKERS.found(None, relative=relative, measured=workers, requested=requested)


def _doubts_of_residual(residual: Residual, scenario: Scenario) -> Iterator[UncertaintySource]:
    """Uncertainty from the model's error at the measured point, and from the error that remains.

    The workers' own work relative to one node is known no better than two runs agree, and on a faster link it is a
    larger share of the step.
    """
    size = residual.left if scenario == residual.at else max(residual.left, residual.size)
    if size > LEAST_DOUBT:
        yield _MODEL_OFF.found(None, relative=size, factor=format_figure(1 + size))
    off = max(residual.own, 1 / residual.own) - 1
    if scenario != residual.at and off > LEAST_DOUBT:
        yield _OWN_WORK.found(None, relative=off, times=format_figure(residual.own))


def _least_doubt(calibration: Calibration, *, between: bool) -> UncertaintySource:
    scatter = calibration.scatter
    doubts = (
        _BETWEEN_RUNS.found(None, relative=LEAST_DOUBT),
        _SCATTER.found(None, relative=scatter, scatter=scatter, differing=calibration.scatter_of),
        _SIZE_SCAN.found(None, relative=calibration.network.error if between else 0.0),
    )
    return max(doubts, key=lambda doubt: doubt.relative)


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

RESIDUALS = RuleGroup("Assumptions of a prediction: the measured step of several nodes")
_RESIDUAL = RESIDUALS.rule(
    "residual",
    about="a measured step that is longer or shorter than the cost model predicts",
    message="a step of run {run_id} took {step_ms}, but the cost model predicts {predicted_ms}: {causes}. Predictions "
    "for several nodes include this difference",
    figures=("run_id", "step_ms", "predicted_ms", "unexplained_ms", "calls_factor", "own_work_factor"),
)
_UNEXPLAINED = RESIDUALS.rule(
    "unexplained-communication",
    about="exposed communication that is longer than the network data predict",
    message="{unexplained_ms} of the measured step is exposed communication that the network data do not explain",
    figures=("unexplained_ms",),
)
_CALLS_OFF = RESIDUALS.rule(
    "time-of-calls",
    about="collectives that took more or less time than the network data predict",
    message="the collectives took {calls_factor:.2f} times as long as the network data predict",
    figures=("calls_factor",),
)
_OWN_WORK_OFF = RESIDUALS.rule(
    "time-of-own-work",
    about="time outside exposed communication that is longer or shorter than on one node",
    message="everything except exposed communication, including waits between workers, took {own_work_factor:.2f} "
    "times as long as on one node",
    figures=("own_work_factor",),
)


def carry_residual(calibration: Calibration, several: CalibrationRun, scenario: Scenario) -> Calibration:
    """Adjust a calibration so that it predicts the measured value for that run.

    Exposed communication beyond the model scales with the bytes sent; an excess of the model reduces the time of calls;
    everything else, such as waits for a slower node, is attributed to the workers' own work.

    Args:
        calibration: from that run among others.
        several: on several nodes.
        scenario: of that run, its gradients as sent.
    """
    step_ms = _step_ms(several, scenario)
    try:
        alone = Prediction(calibration, scenario)
    except ValueError:
        # If the traffic is unknown, this is reported when it is needed.
        return calibration
    residual = _of_exposed(alone, _exposed_ms(several, step_ms, alone.parts))
    residual = _of_own(alone, residual, step_ms)
    residual = msgspec.structs.replace(residual, size=_missed(step_ms, alone.step_time_ms))
    notes = (*calibration.notes, *_notes(several.name, step_ms, alone.parts, residual))
    return msgspec.structs.replace(calibration, residual=residual, notes=notes)


def _step_ms(run: CalibrationRun, scenario: Scenario) -> float:
    rate = value_of(run.speed.samples_per_s) or 0.0
    step_ms = scenario.samples / rate * _MS_PER_S if rate > 0 else 0.0
    if not _LEAST_MS <= step_ms <= _MOST_MS:
        reason = reason_of(run.speed.samples_per_s) or f"{rate:g} samples/s is implausible"
        raise UsageError(f"run {run.name} has no samples/s to predict from: {reason}", hint=_AGAIN)
    return step_ms


def _exposed_ms(run: CalibrationRun, step_ms: float, alone: StepParts) -> float:
    mean, exposed_ms = or_none(run.split.mean), or_none(run.split.exposed_ms)
    if mean is None or exposed_ms is None or mean.step_ms <= 0:
        return max(0.0, step_ms - (alone.step_ms - alone.exposed_ms))
    return min(1.0, max(0.0, exposed_ms / mean.step_ms)) * step_ms


def _of_exposed(alone: Prediction, exposed_ms: float) -> Residual:
    """The residual with which the model exposes this much, or as little as it can.

    By the time of calls, as long as the link limits them; the rest as time beyond all calls.
    """
    scenario = alone.scenario

    def parts(comm: float) -> StepParts:
        return alone.with_residual(Residual(at=scenario, comm=comm)).parts

    passes = scenario.accumulation if any(call.per_micro_batch for call in alone.calls) else 1
    hide_ms = passes * alone.overlap(Draw()).hide_ms
    comm, comm_ms = 1.0, parts(1.0).comm_ms
    if comm_ms > hide_ms:
        goal_ms = max(exposed_ms, parts(_LEAST_FACTOR).exposed_ms) * (1 + _ROUNDING)
        # Even with maximum overlap they took no less.
        least = min(1 / _MOST_COMM, max(_LEAST_FACTOR, (exposed_ms + hide_ms) / comm_ms))
        comm = largest(least, _MOST_COMM, lambda factor: parts(factor).exposed_ms <= goal_ms)
    extra_ms = exposed_ms - parts(comm).exposed_ms
    extra_ms = extra_ms if abs(extra_ms) > _ROUNDING * exposed_ms else 0.0
    return Residual(at=scenario, comm=comm, extra_ms=extra_ms, sent_bytes=sent_bytes(scenario, alone.calls))


def with_base(calibration: Calibration, scenario: Scenario, step_ms: float) -> Calibration:
    """The calibration from a step of several nodes, of which the split is unknown, as from one node.

    In each draw its own work is what the draw's exposed communication leaves of the step.

    Args:
        calibration: as if the step were all own work.
        scenario: of the step.
        step_ms: its time.

    Raises:
        UsageError: the network takes longer for its communication.
    """
    at = Prediction(calibration, scenario)
    if (least_ms := at.step_of(Draw(), _LEAST_FACTOR).exposed_ms) >= step_ms:
        rate = format_rate(scenario.link.gbit_per_s)
        raise UsageError(
            f"a step of {format_ms(step_ms)} is too short for its communication, {format_ms(least_ms)} at {rate}",
            hint="check the network, the strategy and the batches",
        )

    def own(draw: Draw) -> float:
        return largest(_LEAST_FACTOR, 1.0, lambda factor: at.step_of(draw, factor).step_ms <= step_ms)

    # The draws of the network cover it.
    doubt = _WHOLE_STEP.found(None, nodes=scenario.layout.nodes)
    return msgspec.structs.replace(
        calibration, own_of={draw: own(draw) for draw in (Draw(), *DRAWS)}, doubts=(*calibration.doubts, doubt)
    )


def _of_own(alone: Prediction, residual: Residual, step_ms: float) -> Residual:
    parts = alone.with_residual(residual).parts
    own = (step_ms - parts.exposed_ms) / (parts.step_ms - parts.exposed_ms)
    residual = msgspec.structs.replace(residual, own=min(_MOST_FACTOR, max(_LEAST_FACTOR, own)))
    left = _missed(step_ms, alone.with_residual(residual).step_time_ms)
    return msgspec.structs.replace(residual, left=left if left > _ROUNDING else 0.0)


def _missed(measured_ms: float, predicted_ms: float) -> float:
    return max(measured_ms / predicted_ms, predicted_ms / measured_ms) - 1


def _notes(run_id: str, step_ms: float, alone: StepParts, residual: Residual) -> Iterator[Finding]:
    if residual.size > _NOTICEABLE:
        causes = tuple(_causes(step_ms, residual))
        yield _RESIDUAL.found(
            None,
            run_id=run_id,
            step_ms=step_ms,
            predicted_ms=alone.step_ms,
            causes="; ".join(cause.message for cause in causes),
            **{name: value for cause in causes for name, value in cause.figures.items()},
        )


def _causes(step_ms: float, residual: Residual) -> Iterator[Finding]:
    if residual.extra_ms > _NOTICEABLE * step_ms:
        yield _UNEXPLAINED.found(None, unexplained_ms=residual.extra_ms)
    if abs(residual.comm - 1) > _NOTICEABLE:
        yield _CALLS_OFF.found(None, calls_factor=residual.comm)
    if abs(residual.own - 1) > _NOTICEABLE:
        yield _OWN_WORK_OFF.found(None, own_work_factor=residual.own)
