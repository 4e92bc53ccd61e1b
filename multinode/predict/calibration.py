"""Calibration from stored runs: the cost of a step without a network, and its overlap. Pure.

Reads only summaries; the network comes from an nccl-test.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec

from multinode.errors import UsageError
from multinode.findings.finding import Finding
from multinode.findings.rule import RuleGroup
from multinode.levers.levers import NONE, Levers
from multinode.predict.back_test import ResidualQuantile
from multinode.predict.cost_model import (
    HIDEABLE_SHARE,
    Overlap,
    Scenario,
    StepCosts,
    hideable_part,
    make_low_rank,
    overlaps,
    step_parts,
)
from multinode.predict.draws import Draw
from multinode.predict.network_model import (
    CommTimes,
    DoubtRules,
    Link,
    NetworkCase,
    NetworkModel,
    UncertaintySource,
    comm_times,
)
from multinode.profile.calls import SeenCall
from multinode.profile.step_split import StepSplit, WorkerSplit
from multinode.profile.summary import StepTimes, Summary
from multinode.profile.throughput import Throughput
from multinode.records.benchmark import COLLECTIVES
from multinode.stats.estimate import value_of
from multinode.stats.unknown import UNMEASURED, Unknown, found, known, or_none, or_zero, reason_of
from multinode.traffic.algorithms import Layout, MessageSteps, between_us, message_steps
from multinode.traffic.step_calls import SMALL_BYTES, Call, TrafficInputs, Work, passing_bytes, with_gradients
from multinode.units import format_ms

_MS_PER_S, _US_PER_MS = 1e3, 1e3
# A file may hold anything.
_ABSURD_COUNT = 1 << 24
# At 1 GB/s.
_BYTES_PER_MS = 1e6
_HALF_BYTES = 2
# Error of a worker's own work, if it comes from a run where the network affects every figure.
_UNSEEN_ALONE = 0.05
# The least share of a core that a worker is assumed to have, and the difference that is chance.
_LEAST_ON_CORE, _NOTICED = 0.25, 0.02
_HALVINGS = 40
# Busbw inside a node, GB/s: NCCL through host memory behind PCIe 3.0 x8, and over NVLink; gloo over loopback, with
# reductions on busy cores, and on idle ones.
_LOCAL_GB_PER_S = {"nccl": (3.0, 50.0), "gloo": (0.25, 2.5)}
# Of a step that nothing splits, the most that may be done once, not in each micro-batch: the optimizer and the host's
# other work, 4% to 28% in the twelve trainings of benchmarks/prediction_cells.tar.gz, and start-up, as a published mean
# may include it.
MOST_FIXED = 1 / 3
# Usual errors of the assumed overlap, and of calls in a training.
_RHO_SIGMA, _COMM_SIGMA = 0.3, 0.05


DOUBTS = DoubtRules("Uncertainty of a prediction: the measurements")
_NO_SINGLE_NODE = DOUBTS.doubt(
    "no-single-node",
    "compute",
    about="a prediction without a measured run on one node",
    message="no run on one node was measured",
)
_WAITED_FOR_CORE = DOUBTS.doubt(
    "waited-for-core",
    "cores",
    about="workers that waited for a core",
    message="workers of the measured run waited {waited} per step for a CPU core that other threads or processes used",
)

ASSUMPTIONS = RuleGroup("Assumptions of a prediction: the cost of a step")
_WITHOUT_SINGLE = ASSUMPTIONS.rule(
    "without-single-node",
    about="no run on one node",
    message="no run on one node was named. To estimate a step without the network, multinode takes the step time of "
    "run {run_id} and subtracts its exposed communication ({exposed_ms})",
    figures=("run_id", "exposed_ms"),
)
_WHOLE_IS_COMPUTE = ASSUMPTIONS.rule(
    "whole-step-is-compute",
    about="a step whose communication is unknown",
    message="the whole step counts as compute, including communication between the workers: {reason}",
)
_REST_IS_COMPUTE = ASSUMPTIONS.rule(
    "rest-is-compute",
    about="a step whose compute time is unknown",
    message="everything except communication, data and optimizer counts as compute",
)


class CalibrationRun(msgspec.Struct, frozen=True, kw_only=True):
    """What predictions need of a measured training: a stored run or a published figure."""

    name: str  # of the run, or of the published figure's key
    speed: Throughput  # its samples/s, with the batch, accumulation and length that they belong to
    step_time_ms: StepTimes | Unknown = UNMEASURED
    split: StepSplit = StepSplit()  # of a step; its mean is Unknown where nothing separates it
    calls: tuple[SeenCall, ...] = ()  # of a worker per step
    layout: Layout
    link: Link | None = None  # between its nodes; None is the one that the network was measured on
    levers: Levers = NONE  # that it was measured with
    overlap: bool = True  # whether computation was allowed to hide communication

    @classmethod
    def of(
        cls,
        summary: Summary,
        layout: Layout,
        *,
        link: Link | None = None,
        levers: Levers = NONE,
        overlap: bool = True,
    ) -> CalibrationRun:
        """The figures of a summary, and how its run was laid out and measured."""
        return cls(
            name=summary.run_id,
            speed=summary,
            step_time_ms=summary.step_time_ms,
            split=summary.split,
            calls=summary.comm.calls,
            layout=layout,
            link=link,
            levers=levers,
            overlap=overlap,
        )

    @property
    def batch(self) -> float:
        """Samples per micro-batch, from the settings or counted, else from the rate.

        Raises:
            UsageError: it has no samples per second, or implausible ones.
        """
        rate, times = self.speed.samples_per_s, self.step_time_ms
        if isinstance(rate, Unknown) or isinstance(times, Unknown):
            reason = reason_of(rate) or reason_of(times)
            raise UsageError(
                f"run {self.name} has no samples/s for a prediction: {reason}",
                hint="use a run of a LLaMA-Factory job, or more steps (--steps)",
            )
        mean = or_none(self.split.mean)
        step_ms = mean.step_ms if mean is not None else times.median.value
        samples = rate.value * step_ms / _MS_PER_S / (self.layout.workers * self.speed.accumulation)
        if not math.isfinite(samples) or times.median.value <= 0:
            raise UsageError(f"the summary of run {self.name} has implausible step times")
        # A micro-batch has a whole number of samples, unless the last one of an epoch was shorter.
        return or_none(self.speed.per_device_batch) or float(round(samples)) or samples


class Residual(msgspec.Struct, frozen=True, kw_only=True):
    """The difference between a run on several nodes and the model, applied to other predictions on several nodes."""

    at: Scenario | None = None  # the scenario of the run; None if it cannot be expressed
    comm: float = 1.0  # time of its calls over that of the network data; at most 1
    extra_ms: float = 0.0  # exposed communication per step beyond the model, for `sent_bytes` per worker
    sent_bytes: float = 0.0  # per worker and step, for which `extra_ms` were measured
    own: float = 1.0  # its workers' own work and waits, relative to one node
    size: float = 0.0  # error of the model without it; 1 means twice or half the time
    left: float = 0.0  # error with it


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """The inputs of predictions."""

    costs: StepCosts  # of a step, without communication
    local_ms: float = 0.0  # exposed communication per step inside one node
    layout: Layout  # of the measured run
    per_device_batch: float  # samples per micro-batch of one worker
    accumulation: int = 1  # micro-batches per step
    work: Work
    script: tuple[Call, ...] = ()  # tiny calls per step of the script itself between all workers
    network: NetworkModel  # measured or known data of the network between the nodes
    scatter: float = 0.0  # cv of the step times, or of the repeats if that is larger
    scatter_of: str = "its step times vary"  # which of the two, in words
    tokens_per_sample: float | None = None  # padded; None if unknown
    matrices: tuple[tuple[int, int, int], ...] = ()  # rows, columns and count of trained matrices; empty if unknown
    notes: tuple[Finding, ...] = ()  # assumptions
    doubts: tuple[UncertaintySource, ...] = ()  # of every prediction, in addition to the scenario's
    residual: Residual = Residual()  # of the run on several nodes, if there is one
    # factor on the own work in each draw, if it comes from a step of several nodes that nothing splits
    own_of: dict[Draw, float] = {}
    quantile: ResidualQuantile | None = None  # error of the model on stored runs; None if it was not tested

    def in_case(self, case: NetworkCase) -> Calibration:
        """Calibration for another way in which NCCL uses the network; the model has not been tested with it."""
        network = msgspec.structs.replace(self.network, case=case)
        return msgspec.structs.replace(self, network=network, quantile=None)

    def known_workers(self, nodes: int) -> int:
        """The most workers per node of a run on this many nodes."""
        several = self.residual.at.layout.workers_per_node if nodes > 1 and self.residual.at is not None else 1
        return max(self.layout.workers_per_node, several)


def calibrate(
    single: CalibrationRun,
    work: Work,
    network: NetworkModel,
    several: CalibrationRun | None = None,
    *,
    share: float = HIDEABLE_SHARE,
) -> Calibration:
    """The calibration from a run on one node and, if there is one, a run on several.

    The single run gives compute, data, optimizer and host time, without its own workers' communication. The run on
    several nodes gives only the overlap.

    Args:
        single: on one node.
        work: the communication of both.
        network: between several nodes.
        several: on them.
        share: of a micro-batch's compute that can hide communication: `hideable_share` of the training.

    Raises:
        UsageError: a run has no measured step or no samples per second, the single one ran on several nodes, or the
            network was measured on one.
    """
    if single.layout.nodes != 1:
        raise UsageError(
            f"run {single.name} ran on {single.layout.nodes} nodes: the cost of a step on one node is unknown",
            hint="add a run on one node, such as from multinode contrast",
        )
    seen = _calibrated(single, work, network, share)
    return seen if several is None else _with_overlap(_with_script(seen, several), several)


def calibrate_without_single(
    several: CalibrationRun, work: Work, network: NetworkModel, *, share: float = HIDEABLE_SHARE
) -> Calibration:
    """The calibration from a run on several nodes only: its own work is its step minus its exposed communication.

    The first node represents one node: its workers wait for no other node, and their local traffic is unmeasured.

    Raises:
        UsageError: as `calibrate`; or the exposed communication is unknown.
    """
    mean, exposed_ms = several.split.mean, several.split.exposed_ms
    if isinstance(exposed_ms, Unknown):
        raise UsageError(
            f"run {several.name} does not show the cost of a step without the network: {exposed_ms.reason}",
            hint="add a run on one node, such as from multinode contrast",
        )
    alone = several.layout.on(1)
    network = msgspec.structs.replace(network, local_gb_per_s=_local_gb_per_s(several, work, network.backend))
    split = msgspec.structs.replace(several.split, mean=_first_nodes(several.split, alone) or mean)
    seen = _calibrated(msgspec.structs.replace(several, split=split), work, network, share)
    note = _WITHOUT_SINGLE.found(None, run_id=several.name, exposed_ms=exposed_ms)
    doubts = (
        _NO_SINGLE_NODE.found(None, relative=_UNSEEN_ALONE),
        *_doubt_of_cores(several.split, alone),
    )
    seen = msgspec.structs.replace(seen, local_ms=0.0, layout=alone, notes=(*seen.notes, note), doubts=doubts)
    return _with_overlap(_with_script(seen, several), several)


def _with_script(seen: Calibration, several: CalibrationRun) -> Calibration:
    script = _script_calls(several)
    beside_ms, backend = several.split.beside_ms, seen.network.backend
    steps = [(call.times, message_steps(backend, call.collective, several.layout)) for call in script]
    between, inside = (math.fsum(times * each[place] for times, each in steps) for place in (0, 1))
    messages = MessageSteps(between, inside)
    large = any(call.source == "call" and call.size_bytes >= SMALL_BYTES for call in several.calls)
    network = seen.network
    if beside_ms and any(messages) and not large:
        round_trip_us = between_us(backend, messages, beside_ms * _US_PER_MS)
        network = msgspec.structs.replace(network, round_trip_us=round_trip_us)
    return msgspec.structs.replace(seen, script=script, network=network)


def _script_calls(run: CalibrationRun) -> tuple[Call, ...]:
    return tuple(
        Call(collective=call.op, size_bytes=call.size_bytes, times=call.count, hideable=False)
        for call in run.calls
        if call.op in COLLECTIVES
        and call.source == "call"
        and call.ranks == run.layout.workers > 1
        and 0 < call.size_bytes < SMALL_BYTES
        and 0 < call.count < _ABSURD_COUNT
    )


def _first_nodes(split: StepSplit, alone: Layout) -> WorkerSplit | None:
    mine = [worker for worker in split.workers if worker.rank < alone.workers]
    own_ms = [_alone_ms(worker) for worker in mine]
    if not mine:
        return None
    parts = ("step_ms", "compute_ms", "exposed_ms", "data_ms", "optimizer_ms", "host_ms")
    means: dict[str, Any] = {name: found(partial(_mean, mine, name)) for name in parts}
    return WorkerSplit(rank=-1, **means, wait_ms=max(own_ms) - statistics.fmean(own_ms))


def _mean(workers: Sequence[WorkerSplit], name: str) -> float:
    return statistics.fmean(known(getattr(worker, name)) for worker in workers)


def _alone_ms(worker: WorkerSplit) -> float:
    return worker.step_ms - or_zero(worker.exposed_ms) - or_zero(worker.wait_ms)


def _doubt_of_cores(split: StepSplit, alone: Layout) -> tuple[UncertaintySource, ...]:
    mine = [worker for worker in split.workers if worker.rank < alone.workers]
    if not mine:
        return ()
    own_ms, waited_ms = (math.fsum(each) / len(mine) for each in (map(_alone_ms, mine), map(_core_wait_ms, mine)))
    relative = own_ms / max(own_ms - waited_ms, own_ms * _LEAST_ON_CORE) - 1 if own_ms > 0 else 0.0
    if relative <= _NOTICED:
        return ()
    return (_WAITED_FOR_CORE.found(None, relative=relative, waited=format_ms(waited_ms)),)


def _core_wait_ms(worker: WorkerSplit) -> float:
    return worker.core_wait_ms or 0.0


def _local_gb_per_s(several: CalibrationRun, work: Work, backend: str) -> tuple[float, float]:
    comm_ms, accumulation = or_none(several.split.comm_ms), several.speed.accumulation
    factor = gradient_factor(work.load, several.levers)
    low, high = _LOCAL_GB_PER_S["gloo" if backend == "gloo" else "nccl"]
    try:
        calls = with_gradients(work.calls_of(work.strategy, several.layout), factor)
    except ValueError:
        # If the traffic is unknown, this is reported when it is needed.
        return low, high
    sent = passing_bytes(calls, accumulation, several.layout)
    seen = sent / comm_ms / _BYTES_PER_MS if comm_ms else 0.0
    return max(low, seen), max(high, seen)


def _calibrated(run: CalibrationRun, work: Work, network: NetworkModel, share: float) -> Calibration:
    if network.layout.nodes == 1:
        raise UsageError(
            "the collectives were measured on one node, which says nothing about a network",
            hint="measure on several nodes: multinode nccl-test --hosts H",
        )
    accumulation, times, batch = run.speed.accumulation, or_none(run.step_time_ms), run.batch
    costs, local_ms, notes = _costs(run, accumulation, run.layout.workers * batch * accumulation)
    return Calibration(
        costs=msgspec.structs.replace(costs, hideable_share=share),
        local_ms=local_ms,
        layout=run.layout,
        per_device_batch=batch,
        accumulation=accumulation,
        work=work,
        network=network,
        scatter=times.cv if times is not None else 0.0,
        tokens_per_sample=or_none(run.speed.tokens_per_sample),
        notes=notes,
    )


def _costs(run: CalibrationRun, accumulation: int, samples: float) -> tuple[StepCosts, float, tuple[Finding, ...]]:
    """Costs, exposed local communication and assumptions for a step of this many samples.

    The step time comes from the rate, which predictions use: a few long steps make the median step shorter.
    """
    mean, exposed_ms, rate = or_none(run.split.mean), run.split.exposed_ms, value_of(run.speed.samples_per_s)
    step_ms = samples / rate * _MS_PER_S if rate else 0.0
    if mean is None or isinstance(exposed_ms, Unknown):
        note = _WHOLE_IS_COMPUTE.found(None, reason=reason_of(exposed_ms))
        return StepCosts(compute_ms=step_ms / accumulation, most_fixed=MOST_FIXED), 0.0, (note,)
    scale = step_ms / mean.step_ms if step_ms and mean.step_ms else 1.0
    optimizer_ms, data_ms = or_zero(mean.optimizer_ms), or_zero(mean.data_ms)
    compute_ms, host_ms, notes = _own_ms(mean, optimizer_ms + data_ms)
    costs = StepCosts(
        # A step takes as long as its slowest worker: waits of the others count as its compute.
        compute_ms=scale * (compute_ms + or_zero(mean.wait_ms)) / accumulation,
        optimizer_ms=scale * optimizer_ms,
        # The rest of a mean may be slightly negative by rounding.
        host_ms=scale * max(0.0, host_ms),
        data_ms=scale * data_ms / accumulation,
    )
    return costs, scale * exposed_ms, notes


def _own_ms(mean: WorkerSplit, known_ms: float) -> tuple[float, float, tuple[Finding, ...]]:
    exposed_ms, wait_ms = or_zero(mean.exposed_ms), or_zero(mean.wait_ms)
    if not isinstance(mean.compute_ms, Unknown):
        return mean.compute_ms, or_zero(mean.host_ms), ()
    rest_ms = max(0.0, mean.step_ms - exposed_ms - wait_ms - known_ms)
    return rest_ms, 0.0, (_REST_IS_COMPUTE.found(None),)


def _with_overlap(seen: Calibration, several: CalibrationRun) -> Calibration:
    """Rho from the exposed communication of a run on several nodes, if more was sent than could be hidden.

    If computation could have hidden everything, only a lower bound of rho is known. If overlap was off, nothing is
    learned about rho.
    """
    work, accumulation = seen.work, several.speed.accumulation
    costs = _of_batch(seen, several.batch)
    exposed_ms = _exposed_ms(several, costs)
    if not several.overlap or not overlaps(work.strategy, seen.network.backend) or exposed_ms is None:
        return seen
    factor = gradient_factor(work.load, several.levers)
    calls = (*with_gradients(work.calls_of(work.strategy, several.layout), factor), *seen.script)
    comm = comm_times(seen.network, calls, several.link or seen.network.link, several.layout)
    passes = accumulation if comm.micro_batch_ms else 1
    hideable_ms = comm.step_ms + accumulation * comm.micro_batch_ms
    if hideable_ms <= passes * costs.hideable_ms:
        hidden_ms = hideable_ms - max(0.0, exposed_ms - comm.after_ms)
        least = max(0.0, hidden_ms / (passes * costs.hideable_ms)) if hidden_ms else 0.0
        return msgspec.structs.replace(seen, costs=msgspec.structs.replace(seen.costs, least_overlap=min(1.0, least)))
    overlap = Overlap(hide_ms=costs.hideable_ms, calls=calls if work.is_cut(work.strategy) else ())
    more_ms = exposed_ms - step_parts(costs, comm, accumulation=accumulation, overlap=overlap).exposed_ms
    hide_ms = passes * costs.hideable_ms * hideable_part(overlap.calls)
    rho = min(1.0, max(0.0, 1 - _of_overlap(hideable_ms, hide_ms) * more_ms))
    return msgspec.structs.replace(seen, costs=msgspec.structs.replace(seen.costs, overlap=rho))


def _of_batch(seen: Calibration, per_device_batch: float) -> StepCosts:
    larger, costs = per_device_batch / seen.per_device_batch, seen.costs
    return msgspec.structs.replace(costs, compute_ms=costs.compute_ms * larger, data_ms=costs.data_ms * larger)


def _of_overlap(comm_ms: float, hide_ms: float) -> float:
    """The parts of excess exposed time that belong to rho and to the time of calls.

    x = f C - rho H. One equation gives both by their weights, a priori 1 within _RHO_SIGMA and _COMM_SIGMA. If C is
    many times H, a little of C is all of H, and rho is hardly determined.
    """
    of_rho, of_comm = hide_ms * _RHO_SIGMA, comm_ms * _COMM_SIGMA
    if of_rho <= 0:
        return 0.0
    ratio = of_comm / of_rho
    return 1 / (1 + ratio * ratio) / hide_ms


def largest(low: float, high: float, holds: Callable[[float], bool]) -> float:
    """The largest value for which a monotonic predicate holds; `low` if it holds for none."""
    if holds(high):
        return high
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _exposed_ms(run: CalibrationRun, costs: StepCosts) -> float | None:
    exposed_ms, times = or_none(run.split.exposed_ms), or_none(run.step_time_ms)
    if exposed_ms is not None or times is None:
        return exposed_ms
    alone = step_parts(costs, CommTimes(), accumulation=run.speed.accumulation)
    return max(0.0, times.median.value - alone.step_ms)


def sent_as(calibration: Calibration, scenario: Scenario) -> Scenario:
    """The scenario with its gradients as its compression sends them.

    Raises:
        UsageError: the traffic of PowerSGD is unknown.
    """
    compression = scenario.levers.compression
    if compression is None:
        return scenario
    if compression.rank is None:
        return msgspec.structs.replace(
            scenario, gradient_factor=gradient_factor(calibration.work.load, scenario.levers)
        )
    if not calibration.matrices:
        raise UsageError(
            f"{compression.option}: the effect of PowerSGD cannot be predicted, because the model's shape is unknown",
            hint="measure it: multinode contrast, with and without the option",
        )
    low_rank = make_low_rank(calibration.matrices, calibration.work.load, compression.rank)
    return msgspec.structs.replace(scenario, low_rank=low_rank)


def gradient_factor(load: TrafficInputs, levers: Levers) -> float:
    """Fraction of bytes left by a 16-bit hook; 1.0 without one, and for gradients already that narrow."""
    return 1.0 if levers.compression is None else min(1.0, _HALF_BYTES / load.gradient_bytes)
