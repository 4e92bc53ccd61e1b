"""Evidence: the inputs of predictions, from the named runs and other stored ones. Pure.

CalibrationInputs are shared by all calibrations of one training; a HoldoutRun is predicted without using it.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import msgspec

from multinode.errors import JobError, UsageError
from multinode.findings.finding import Finding
from multinode.findings.rule import RuleGroup
from multinode.model.workload import read_work
from multinode.predict.calibration import (
    Calibration,
    CalibrationRun,
    calibrate,
    calibrate_without_single,
    sent_as,
)
from multinode.predict.cost_model import Scenario
from multinode.predict.network_model import Link, NetworkModel, network_of_scan, stated_network
from multinode.predict.prediction import carry_residual
from multinode.predict.run_selection import (
    CONTRAST,
    Record,
    RunSelection,
    is_alike,
    repeats_of,
    select_runs,
)
from multinode.predict.variants import Subject, vary
from multinode.profile.calls import SeenCall
from multinode.profile.summary import Summary
from multinode.records.benchmark import COLLECTIVES
from multinode.stats.estimate import Estimate, exactly, of_repeats, ratio
from multinode.stats.unknown import Unknown, or_none, reason_of
from multinode.traffic.algorithms import Layout
from multinode.traffic.step_calls import SMALL_BYTES, Call, GroupScope, Strategy, TrafficInputs, Work, with_gradients
from multinode.units import BITS_PER_BYTE, format_figure, format_rate, is_link_rate

# A file may hold anything.
_ABSURD_BYTES, _ABSURD_COUNT = 1 << 44, 1 << 24
_WIDTHS = (4, 2)
_GATHERS_UPDATED = frozenset({Strategy.ZERO1, Strategy.ZERO2})
_GATHER, _REDUCTIONS = "all_gather", frozenset({"all_reduce", "reduce_scatter"})
# With fewer than two micro-batches nothing is known.
_MORE = 1.5


def work_of_calls(summary: Summary, layout: Layout, *, compressed: bool = False) -> Work | None:
    """The communication of a step; None if no call between workers was recorded.

    Traffic of DDP and ZeRO-1 does not grow with accumulation, nor do FSDP's reductions under `no_sync`.

    Args:
        summary: of the run.
        layout: of its workers.
        compressed: whether a hook sent its gradients as two bytes per element; otherwise four are assumed.
    """
    seen = [call for call in summary.comm.calls if _counts(call)]
    if not seen:
        return None
    strategy = _strategy(summary, seen)
    accumulation = float(summary.accumulation)
    once = _once_a_step(summary, seen, strategy, accumulation)
    calls = tuple(
        _step_call(call, strategy, layout, None if _is_once(call, once, strategy, layout) else accumulation)
        for call in seen
    )
    if compressed:
        calls = with_gradients(calls, _WIDTHS[0] / _WIDTHS[1])
    reduced = sum(call.size_bytes * call.times for call in calls if call.collective in _REDUCTIONS)
    trainable = max(or_none(summary.trainable) or round(reduced / _WIDTHS[0]), 1)
    width = min(_WIDTHS, key=lambda width_: abs(width_ * trainable - reduced))
    load = TrafficInputs(
        parameters=or_none(summary.parameters),
        trainable=trainable,
        parameter_bytes=_WIDTHS[0],
        gradient_bytes=width,
        no_sync=once >= _REDUCTIONS,
        fsdp_version=summary.fsdp_version or 1,
    )
    return Work(strategy=strategy, load=load, calls={strategy: calls})


def _counts(call: SeenCall) -> bool:
    is_known = call.op in COLLECTIVES and call.ranks > 1
    return is_known and SMALL_BYTES <= call.size_bytes < _ABSURD_BYTES and 0 < call.count < _ABSURD_COUNT


def _strategy(summary: Summary, seen: Sequence[SeenCall]) -> Strategy:
    if summary.recognised is not None:
        return summary.recognised
    gathers = any(call.op == _GATHER for call in seen)
    return Strategy.FSDP if gathers and any(call.op == "reduce_scatter" for call in seen) else Strategy.DDP


def _once_a_step(summary: Summary, seen: Sequence[SeenCall], strategy: Strategy, accumulation: float) -> frozenset[str]:
    """Collectives called once per step regardless of accumulation.

    For FSDP, the number of calls shows whether all but the last micro-batch are under `no_sync`, and the bytes show
    whether SHARD_GRAD_OP keeps its parameters. With one micro-batch neither is known; most trainings do.
    """
    if strategy in {Strategy.DDP, Strategy.ZERO1}:
        return frozenset(COLLECTIVES)
    if strategy is Strategy.ZERO2:
        return frozenset({_GATHER})
    gathers, reductions = (sum(call.count for call in seen if call.op == op) for op in (_GATHER, "reduce_scatter"))
    if strategy.stage == Strategy.ZERO3.stage or not reductions:
        return frozenset()
    keeps = strategy is Strategy.SHARD_GRAD_OP
    if accumulation == 1 or gathers / reductions > _MORE * (1 if keeps else 2):
        return _REDUCTIONS
    gathered = sum(call.size_bytes * call.count for call in seen if call.op == _GATHER)
    whole = _WIDTHS[0] * (or_none(summary.parameters) or 0)
    return _REDUCTIONS | {_GATHER} if keeps and gathered < _MORE * whole else frozenset()


def _is_once(call: SeenCall, once: Collection[str], strategy: Strategy, layout: Layout) -> bool:
    fills_nodes = strategy is Strategy.ZERO3_HPZ and call.op == _GATHER and _reach(call, layout) is GroupScope.WORLD
    return call.op in once or fills_nodes


def _step_call(call: SeenCall, strategy: Strategy, layout: Layout, accumulation: float | None) -> Call:
    return Call(
        collective=call.op,
        size_bytes=call.size_bytes,
        times=call.count / (accumulation or 1.0),
        per_micro_batch=accumulation is not None,
        hideable=not (call.op == _GATHER and strategy in _GATHERS_UPDATED),
        reach=_reach(call, layout),
    )


def _reach(call: SeenCall, layout: Layout) -> GroupScope:
    if call.ranks >= layout.workers:
        return GroupScope.WORLD
    return GroupScope.NODE if call.nodes <= 1 else GroupScope.ACROSS


# Plausible limits of times in ms, of samples, and of their variation.
_LEAST, _MOST, _MOST_CV = 1e-6, 1e9, 100.0
_MEASURE_AGAIN = f"measure again: {CONTRAST}"
# The newest, as machines change.
_MOST_REPEATS = 10


class CalibrationInputs(msgspec.Struct, frozen=True, kw_only=True):
    """Shared by all calibrations of one training."""

    subject: Subject
    work: Work
    network: NetworkModel
    link_measured: float | None = None  # link rate of the runs in Gbit/s, if their NICs did not report it
    stored: tuple[Record, ...] = ()  # all runs, oldest first; repeats show the variation between runs

    def calibrated(self, single: Record | None, several: Sequence[Record]) -> Calibration:
        """From a run on one node, and the last of several on more.

        Raises:
            UsageError: they are not enough, or implausible.
        """
        many = self.measured(several[-1]) if several else None
        share = self.subject.hideable_share(self.work.strategy)
        if single is not None:
            calibration = calibrate(self.measured(single), self.work, self.network, many, share=share)
        elif many is not None:
            calibration = calibrate_without_single(many, self.work, self.network, share=share)
        else:
            raise UsageError("no training run was named", hint=f"measure one: {CONTRAST}")
        if not _is_credible(calibration):
            names = " and ".join(record.run_id for record in (single, *several[-1:]) if record is not None)
            raise UsageError(f"the summary of run {names} has implausible step times", hint=_MEASURE_AGAIN)
        calibration = msgspec.structs.replace(calibration, matrices=self.subject.matrices())
        calibration = self._with_repeats(
            calibration, [record for record in (single, *several[-1:]) if record is not None]
        )
        return (
            calibration
            if many is None
            else carry_residual(calibration, many, sent_as(calibration, self.scenario_of(several[-1])))
        )

    def _with_repeats(self, calibration: Calibration, used: Sequence[Record]) -> Calibration:
        rates = [[repeat.samples_per_s for repeat in repeats_of(run, self.stored)[-_MOST_REPEATS:]] for run in used]
        spread = max((max(each) / min(each) - 1 for each in rates if each and min(each) > 0), default=0.0)
        if spread <= calibration.scatter:
            return calibration
        return msgspec.structs.replace(calibration, scatter=spread, scatter_of="its repeats differ")

    def measured(self, record: Record) -> CalibrationRun:
        """The run with its link.

        Raises:
            UsageError: it has no summary.
        """
        if record.summary is None:
            raise UsageError(f"run {record.run_id} has no summary", hint="use a finished run")
        summary, settings = record.summary, record.settings
        if isinstance(summary.micro_steps, Unknown) and settings.accumulation is not None:
            # The passes could not be counted.
            summary = msgspec.structs.replace(summary, micro_steps=float(settings.accumulation))
        if settings.per_device_batch is not None:
            summary = msgspec.structs.replace(summary, per_device_batch=float(settings.per_device_batch))
        return CalibrationRun.of(
            summary,
            record.layout,
            link=self.link_of(record),
            levers=settings.levers,
            overlap=settings.overlap is not False,
        )

    def link_of(self, record: Record) -> Link | None:
        """The link between its nodes; None if unknown."""
        rate = record.link_gbit_per_s or self.link_measured
        return None if rate is None else msgspec.structs.replace(self.network.link, gbit_per_s=rate)

    def scenario_of(self, record: Record) -> Scenario:
        """The scenario of a run; for one on one node, on the nodes of the network."""
        settings, one_node = record.settings, record.layout.nodes == 1
        run = self.measured(record)
        return Scenario(
            link=(None if one_node else self.link_of(record)) or self.network.link,
            layout=self.network.layout if one_node else record.layout,
            per_device_batch=run.batch,
            accumulation=run.speed.accumulation,
            strategy=record.strategy or self.work.strategy,
            overlap=settings.overlap is not False,
            levers=settings.levers,
        )


def calibration_inputs(
    chosen: RunSelection, stored: Sequence[Record], link_measured: float | None, stream: float | None = None
) -> CalibrationInputs:
    """Data shared by the chosen runs.

    Args:
        chosen: the runs.
        stored: all stored runs, oldest first: a similar one may have missing data.
        link_measured: as in CalibrationInputs.
        stream: as in `gather`.
    """
    newest = chosen.newest
    runs = [newest, *([chosen.single] if chosen.single is not None else []), *chosen.several]
    model = next((run.model for run in runs if run.model is not None), None)
    alike = [record for record in reversed(stored) if record.is_training and is_alike(record, newest)]
    return CalibrationInputs(
        subject=Subject(settings=newest.settings, job=newest.job, model=model),
        work=_work([*runs, *alike], model),
        network=_with_stream(_network(chosen, link_measured), stream),
        link_measured=link_measured,
        stored=tuple(stored),
    )


def _is_credible(calibration: Calibration) -> bool:
    costs = calibration.costs
    least = (costs.compute_ms, calibration.per_device_batch)
    parts = (*least, costs.optimizer_ms, costs.host_ms, costs.data_ms, calibration.local_ms)
    return (
        all(part > _LEAST for part in least)
        and all(0 <= part < _MOST for part in parts)
        and 0 <= calibration.scatter < _MOST_CV
    )


def _network(chosen: RunSelection, link_measured: float | None) -> NetworkModel:
    sweep, newest = chosen.sweep, chosen.newest
    if sweep is not None and sweep.sweep is not None:
        rate = sweep.sweep.link_gbit_per_s or sweep.link_gbit_per_s or link_measured
        return network_of_scan(sweep.sweep, rate if rate is not None and is_link_rate(rate) else None)
    rate = newest.link_gbit_per_s or link_measured
    if rate is None:
        raise UsageError(
            "the speed of the network between the nodes is unknown",
            hint="measure it: multinode nccl-test --hosts H, or give its rate: --link-measured 1gbit",
        )
    layout = newest.layout.on(max(2, newest.layout.nodes))
    return stated_network(Link(gbit_per_s=rate), layout, _backend(newest))


def _with_stream(network: NetworkModel, stream: float | None) -> NetworkModel:
    if stream is None:
        return network
    return msgspec.structs.replace(network, stream_gb_per_s=stream / BITS_PER_BYTE)


def _backend(record: Record) -> str:
    calls = record.summary.comm.calls if record.summary is not None else ()
    backend = next((call.backend for call in calls if call.backend), None)
    return backend or ("nccl" if any(node.gpus for node in record.plan.nodes) else "gloo")


def _inferred_work(record: Record) -> Work | None:
    if record.summary is None:
        return None
    is_compressed = record.settings.levers.compression is not None
    return work_of_calls(record.summary, record.layout, compressed=is_compressed)


def _work(runs: Sequence[Record], model: dict[str, Any] | None) -> Work:
    newest = runs[0]
    alike = [run for run in runs if run.strategy is newest.strategy]
    for record in alike:
        if record.workload is not None and not isinstance(record.workload.work, Unknown):
            return record.workload.work
    job, reason = newest.job, reason_of(newest.workload.work) if newest.workload is not None else ""
    if job is not None:
        try:
            versions = newest.workload.versions if newest.workload is not None else {}
            return read_work(job, model, newest.layout, versions.get("transformers"))
        except JobError as error:
            reason = error.message
    # Runs with uncompressed gradients come first.
    alike.sort(key=lambda record: record.settings.levers.compression is not None)
    seen = (_inferred_work(record) for record in alike)
    inferred = next((work for work in seen if work is not None), None)
    if inferred is None:
        cause = f": {reason}" if reason else ""
        raise UsageError(
            f"the communication of run {newest.run_id} is unknown, and its workers' calls were not recorded{cause}",
            hint=_MEASURE_AGAIN,
        )
    return inferred


# The newest, as clusters change.
_MOST_HOLDOUTS = 100


class HoldoutRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run to test a prediction with."""

    name: str
    calibration: Calibration  # made without it
    scenario: Scenario  # of the run
    samples_per_s: Estimate  # measured; of a published one, with its rounding


def holdout_runs(inputs: CalibrationInputs, chosen: RunSelection, stored: Sequence[Record]) -> Iterator[HoldoutRun]:
    """All stored runs on several nodes that can test the model.

    Args:
        inputs: of the training.
        chosen: the runs that predictions start from.
        stored: all runs, oldest first.
    """
    first = chosen.single or chosen.newest
    for record in stored[-_MOST_HOLDOUTS:]:
        if _is_comparable(record, first) and inputs.link_of(record) is not None:
            # The overlap may come from another run of this layout, but not from a repeat of this one.
            rest = [
                other for other in chosen.several if other.layout == record.layout and not _is_repeat(other, record)
            ]
            # It applies to the strategy that it was measured with.
            rest = [other for other in rest if other.strategy in {None, inputs.work.strategy}]
            holdout = _hold(inputs, chosen.single, record, rest)
            if holdout is not None:
                yield holdout


def _is_comparable(record: Record, first: Record) -> bool:
    return (
        record.is_training
        and record.layout.nodes > 1
        and set(first.node_names) <= set(record.node_names)
        and is_alike(record, first)
    )


def _is_repeat(record: Record, other: Record) -> bool:
    return record.link_gbit_per_s == other.link_gbit_per_s and record.settings == other.settings


def _hold(
    inputs: CalibrationInputs, single: Record | None, record: Record, rest: Sequence[Record]
) -> HoldoutRun | None:
    try:
        scenario = inputs.scenario_of(record)
        calibration = vary(inputs.calibrated(single, rest), inputs.subject, strategy=scenario.strategy)
        # A strategy that gathers all parameters needs their number.
        calibration.work.calls_of(scenario.strategy, record.layout)
    except (UsageError, ValueError):
        return None
    return HoldoutRun(
        name=f"{record.run_id}, {record.layout.nodes} nodes at {format_rate(scenario.link.gbit_per_s)}",
        calibration=calibration,
        scenario=scenario,
        samples_per_s=exactly(record.samples_per_s),
    )


MISSING = RuleGroup("Assumptions of a prediction: the runs that it starts from")
_RATE_ALONE = MISSING.rule(
    "nominal-rate",
    about="no nccl-test, and no measured stream",
    message="no nccl-test of these nodes is stored, so multinode uses the nominal link rate, and the intervals are "
    "wide",
)
_STREAM_ALONE = MISSING.rule(
    "measured-stream",
    about="no nccl-test, but a measured stream",
    message="no nccl-test of these nodes is stored, so multinode uses the measured stream, and the intervals are wide",
    figures=("stream_gbit_per_s",),
)
_OTHER_WORKERS = MISSING.rule(
    "other-workers",
    about="one node measured with a different number of workers",
    message="one node was measured with {workers} workers, at {speed} samples/s. Speed-up, efficiency and break-even "
    "are relative to one node with {one_node_workers} workers",
    figures=("workers", "samples_per_s", "one_node_workers"),
)


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """The inputs of predictions."""

    calibration: Calibration  # from the named runs
    today: Scenario  # the measured scenario, on several nodes if possible
    today_samples_per_s: float | None = None  # of it; None if not measured
    single_samples_per_s: float | None = None  # of the run on one node, if there is one
    single_gain: Estimate | None = None  # of one node over several, where both were repeated
    subject: Subject
    # stored runs of the same training, each with a calibration that does not use it
    holdouts: tuple[HoldoutRun, ...] = ()
    sources: tuple[str, ...] = ()  # of all data, one sentence each
    notes: tuple[Finding, ...] = ()  # assumptions
    gpu_gib: float | None = None  # memory of the smallest GPU of the named runs; None is unknown, or no GPUs


def gather(
    named: Sequence[Record],
    others: Sequence[Record] = (),
    link_measured: float | None = None,
    stream: float | None = None,
) -> Evidence:
    """Sort the records and calibrate.

    Args:
        named: the runs that the user named, oldest first.
        others: all other stored runs, oldest first: for an nccl-test of the same nodes, and to test the model.
        link_measured: link rate in Gbit/s, if the NICs did not report it.
        stream: measured TCP rate in Gbit/s; None uses the nccl-test.
    """
    chosen, stored = select_runs(named, others), [*others, *named]
    inputs = calibration_inputs(chosen, stored, link_measured, stream)
    calibration = inputs.calibrated(chosen.single, chosen.several)
    return Evidence(
        calibration=calibration,
        today=inputs.scenario_of(chosen.newest),
        today_samples_per_s=_mean_rate(chosen.newest, named) if chosen.several else None,
        single_samples_per_s=_mean_rate(chosen.single, named) if chosen.single is not None else None,
        single_gain=_single_gain(chosen, named),
        subject=inputs.subject,
        holdouts=tuple(holdout_runs(inputs, chosen, stored)),
        sources=chosen.sources,
        notes=(*calibration.notes, *_other_workers(chosen), *_unswept(chosen, stream)),
        gpu_gib=_smallest_gpu_gib(named),
    )


def _smallest_gpu_gib(named: Sequence[Record]) -> float | None:
    summaries = [record.summary for record in named if record.summary is not None]
    gpus = [gpu for summary in summaries for node in summary.nodes for gpu in node.gpus]
    return min((gpu.memory_total_gib for gpu in gpus if gpu.memory_total_gib is not None), default=None)


def _mean_rate(record: Record, named: Sequence[Record]) -> float:
    """Samples/s of a run, mean of its repeats among the named ones: the figure that a contrast has."""
    return statistics.fmean(_rates(record, named) or [record.samples_per_s])


def _rates(record: Record, named: Sequence[Record]) -> list[float]:
    return [
        other.samples_per_s
        for other in named
        if other.is_training
        and (other.layout, other.node_names) == (record.layout, record.node_names)
        and _is_repeat(other, record)
    ]


def _single_gain(chosen: RunSelection, named: Sequence[Record]) -> Estimate | None:
    if chosen.single is None or not chosen.several:
        return None
    one, several = _rates(chosen.single, named), _rates(chosen.newest, named)
    return ratio(of_repeats(one), of_repeats(several)) if min(len(one), len(several)) > 1 else None


def _unswept(chosen: RunSelection, stream: float | None) -> Iterator[Finding]:
    if chosen.sweep is None:
        yield _RATE_ALONE.found(None) if stream is None else _STREAM_ALONE.found(None, stream_gbit_per_s=stream)


def _other_workers(chosen: RunSelection) -> Iterator[Finding]:
    single, many = chosen.single, chosen.newest.layout
    if single is None or many.nodes == 1 or single.layout.workers == many.on(1).workers:
        return
    yield _OTHER_WORKERS.found(
        None,
        workers=single.layout.workers,
        speed=format_figure(single.samples_per_s, digits=4),
        samples_per_s=single.samples_per_s,
        one_node_workers=max(many.on(1).workers, single.layout.workers),
    )
