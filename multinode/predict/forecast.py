"""Forecast: the question and the answer of `predict`: scenarios with intervals, break-even and back-test. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import msgspec

from multinode.errors import UsageError
from multinode.figures.figure import Figure, Row
from multinode.findings.finding import Finding
from multinode.findings.rule import RuleGroup
from multinode.job.deepspeed import parse_deepspeed
from multinode.levers.axes import LeverAxes
from multinode.levers.lever import Workers
from multinode.levers.levers import NONE, Levers
from multinode.model.memory import PeakMemory
from multinode.model.workload import ACCUMULATION
from multinode.predict.back_test import BackTest, Trial, back_test
from multinode.predict.break_even import BreakEven, break_even, gain, on_one_node
from multinode.predict.calibration import Calibration, sent_as
from multinode.predict.cost_model import Scenario, StepParts
from multinode.predict.evidence import Evidence
from multinode.predict.needed_memory import worker_peak
from multinode.predict.network_model import UncertaintySource, why_measure
from multinode.predict.prediction import Basis, Prediction
from multinode.predict.shortfall import judge_holdout, judge_speed
from multinode.predict.variants import method_of, parse_method, vary
from multinode.profile.bottleneck import Bottleneck
from multinode.profile.measured import EXPOSED, WORLD_SIZE
from multinode.records.invocation import Invocation
from multinode.stats.estimate import Estimate, exactly, inverse, of_bounds
from multinode.traffic.algorithms import Layout
from multinode.traffic.step_calls import Strategy
from multinode.units import MIB, UNKNOWN, format_count, format_figure, format_rate


class ForecastRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What to predict: all combinations of these values. An empty tuple stands for the measured value.

    Attributes:
        links: NIC rates in Gbit/s. Default: common rates and the measured rate.
        nodes: numbers of nodes.
        workers_per_node: numbers of workers per node.
        strategies: sharding strategies.
        per_device_batches: numbers of samples per micro-batch of a worker.
        accumulations: numbers of micro-batches per step.
        methods: training methods: `full` or `lora:RANK`.
        bucket_mib: maximum sizes of a gradient bucket, in MiB.
        overlaps: whether gradient reduction overlaps with the backward pass.
        levers: changes to the training itself, such as gradient compression.
        target: scaling efficiency, between 0 and 1, for which to find the break-even link rate.
        link_measured: link rate during the runs and the nccl-test. Needed only if the NICs did not report it.
        stream: measured TCP rate in Gbit/s. Default: the rate that the nccl-test measured.
    """

    links: tuple[float, ...] = ()
    nodes: tuple[int, ...] = ()
    workers_per_node: tuple[int, ...] = ()
    per_device_batches: tuple[float, ...] = ()
    accumulations: tuple[int, ...] = ()
    strategies: tuple[Strategy, ...] = ()
    methods: tuple[str, ...] = ()
    bucket_mib: tuple[float, ...] = ()
    overlaps: tuple[bool, ...] = ()
    levers: LeverAxes = LeverAxes()
    target: float = 0.9
    link_measured: float | None = None
    stream: float | None = None


class PredictedScenario(msgspec.Struct, frozen=True, kw_only=True):
    """One predicted scenario."""

    link_gbit_per_s: float | None  # of a node's NIC; None on one node, which uses none
    nodes: int
    workers_per_node: int  # on each, or on the fullest; `unequal` those of each node, where these differ
    unequal: tuple[int, ...] = ()
    per_device_batch: float  # samples of a worker's micro-batch
    accumulation: int  # micro-batches per step
    strategy: str
    method: str | None = None  # `full` or `lora:8`; None as calibrated
    levers: Levers = NONE  # that have an effect on so many nodes
    bucket_mib: float | None = None  # maximum size of a reduction; None as calibrated
    overlap: bool = True  # whether computation may hide communication
    step_time_ms: float  # of an optimizer step
    samples_per_s: Estimate  # of all workers
    basis: Basis = "assumed"  # of the interval: `back-test`, `measured` or `assumed`
    tokens_per_s: float | None = None  # padded; None if samples have no known length
    speedup: Estimate  # over one node with the same settings and its measured number of workers
    efficiency: float  # speed-up over the ratio of workers
    parts: StepParts
    bottleneck: Bottleneck  # the main limit
    doubts: tuple[UncertaintySource, ...] = ()  # reasons for the width of the interval
    case: str = ""  # another way to use the network than the likely one: `one of 8 NICs`, `TCP sockets`
    cases: tuple[PredictedScenario, ...] = ()  # this scenario in each; only on the training's own, unmeasured link
    measured: bool = False  # whether exactly this was measured, so that the prediction is close by construction

    @property
    def layout(self) -> Layout:
        """Its workers."""
        return Layout(nodes=self.nodes, workers_per_node=self.workers_per_node, unequal=self.unequal)


def scenario_row(scenario: PredictedScenario) -> Row:
    """The values of a scenario, by the names of its figures."""
    values = msgspec.structs.asdict(scenario)
    return Row(scenario, values | {EXPOSED.name: scenario.parts.exposed_ms, WORLD_SIZE.name: scenario.layout.workers})


def _link(row: Row) -> str:
    rate = row.item.link_gbit_per_s
    return row.item.case or (UNKNOWN if rate is None else format_rate(rate))


def _lever(name: str, without: str = UNKNOWN) -> Callable[[Row], str]:
    return lambda row: row.item.levers.words.get(name, without)


SCENARIO_NODES = Figure[int]("nodes", "nodes", form="number", about="number of nodes in the scenario")
SCENARIO_LINK = Figure[float](
    "link_gbit_per_s",
    "link",
    form="number",
    about="line rate of a node's NIC, or how the job uses the network",
    cell=_link,
)
SCENARIO_WORKERS = Figure[int](
    "workers_per_node",
    "workers",
    "per node",
    form="number",
    about="workers per node; if nodes differ, the number on each node",
    cell=lambda row: " + ".join(map(str, row.item.unequal or (row.item.workers_per_node,))),
)
SCENARIO_ACCUMULATION = msgspec.structs.replace(ACCUMULATION, title="accum.")
GRADIENTS = Figure[str]("gradients", "gradients", about="gradient dtype on the wire", cell=_lever("compression"))
AVERAGED = Figure[str](
    "averaged",
    "averaged",
    about=("how often nodes average their parameters"),
    cell=_lever("averaging", without="every step"),
)
BUCKET = Figure[float]("bucket_mib", "bucket", "MiB", form="number", about="maximum size of a gradient bucket")
OVERLAPPED = Figure[bool](
    "overlap",
    "overlap",
    form="number",
    about="whether communication may overlap with compute",
    cell=lambda row: "on" if row.item.overlap else "off",
)


class Forecast(msgspec.Struct, frozen=True, kw_only=True, tag_field="is", tag="forecast"):
    """The document that `predict --json` prints.

    Attributes:
        sources: the inputs, with one sentence for each run, nccl-test or file of figures.
        scenarios: the requested scenarios, sorted by number of nodes, then by link rate.
        break_even: the break-even point of the measured scenario, or of the first scenario on several nodes. If only
            another setting is requested, that of this setting. None on one node.
        break_even_of: the scenario of `break_even`, in words.
        today: the prediction for the measured scenario on several nodes; None if no such scenario was measured.
        own_link: the prediction for the training's own link, if nothing on several nodes was measured.
        shortfall: set if the measured speed of several nodes is less than their network allows.
        one_node: one node with the same settings and all its workers; None if the training runs on one node.
        command: the command line of the training; None if it was not started from a command line.
        back_test: test of the model with all suitable stored runs.
        measure: what to measure before you rely on a figure, why and how; empty if nothing.
        notes: assumptions, and scenarios that do not fit on the GPUs.
    """

    schema: str = "multinode.predict/3"
    sources: tuple[str, ...] = ()
    scenarios: tuple[PredictedScenario, ...]
    break_even: BreakEven | None = None
    break_even_of: str = ""
    today: PredictedScenario | None = None
    own_link: PredictedScenario | None = None
    shortfall: Finding | None = None
    one_node: PredictedScenario | None = None
    command: Invocation | None = None
    back_test: BackTest = BackTest()
    measure: str = ""
    notes: tuple[Finding, ...] = ()


def predict_scenario(
    calibration: Calibration,
    scenario: Scenario,
    *,
    method: str | None = None,
    measured: bool = False,
) -> PredictedScenario:
    """Predict one scenario and one node with the same settings.

    Args:
        calibration: the measurements, for another method as from `scenarios.variant`.
        scenario: the settings; the factor of its compression is applied here.
        method: its name.
        measured: whether exactly this was measured.
    """
    scenario = sent_as(calibration, scenario)
    prediction = Prediction(calibration, scenario)
    layout = scenario.layout
    alone = Prediction(calibration, on_one_node(calibration, scenario))
    length = calibration.tokens_per_sample
    measured_one = alone.samples_per_s if _is_calibrated(calibration, alone.scenario) else None
    speedup = gain(prediction, alone, measured=measured_one)
    return PredictedScenario(
        link_gbit_per_s=scenario.link.gbit_per_s if layout.nodes > 1 else None,
        nodes=layout.nodes,
        workers_per_node=layout.workers_per_node,
        unequal=layout.unequal,
        per_device_batch=scenario.per_device_batch,
        accumulation=scenario.accumulation,
        strategy=str(scenario.strategy),
        method=method,
        levers=scenario.levers.on(layout.nodes),
        bucket_mib=None if scenario.bucket_bytes is None else scenario.bucket_bytes / MIB,
        overlap=scenario.overlap,
        step_time_ms=prediction.step_time_ms,
        samples_per_s=of_bounds(prediction.samples_per_s, prediction.interval),
        basis=prediction.basis,
        tokens_per_s=None if length is None else prediction.samples_per_s * length,
        speedup=speedup if layout.nodes > 1 else exactly(speedup.value),
        efficiency=speedup.value * alone.scenario.layout.workers / layout.workers,
        parts=prediction.parts,
        bottleneck=prediction.bottleneck,
        doubts=prediction.doubts,
        measured=measured,
    )


def _is_calibrated(calibration: Calibration, scenario: Scenario) -> bool:
    return (
        not calibration.doubts
        and scenario.strategy is calibration.work.strategy
        and (scenario.layout, scenario.per_device_batch, scenario.accumulation)
        == (calibration.layout, calibration.per_device_batch, calibration.accumulation)
    )


USUAL_LINKS = (1.0, 2.5, 5.0, 10.0, 25.0, 40.0, 100.0)
"""Common NIC rates, Gbit/s."""
_MOST_SCENARIOS = 10_000
_MOST_NODES = _MOST_WORKERS = 1024
_MOST_ACCUMULATION = 1 << 16
_GBIT_PER_S, _BATCH, _MIBS = (1e-4, 1e5), (1e-3, 1e6), (1e-3, 1e6)
_ALIKE = 1e-6
_replace = msgspec.structs.replace

LIMITS = RuleGroup("Assumptions of a prediction: the requested scenarios")
_TOO_LARGE = LIMITS.rule(
    "does-not-fit",
    about="settings that need more memory than the smallest GPU has",
    message="{settings} does not fit: a worker needs about {needed} GiB ({range}), but the smallest GPU has {gpu} GiB",
    figures=("settings", "needed_gib", "gpu_gib"),
)
_MORE_WORKERS = LIMITS.rule(
    "more-workers",
    about="more workers on a node than any run had",
    message="no run had more than {most} on a node. Communication and contention between more workers were not "
    "measured, so the intervals are wider",
    figures=("workers_per_node",),
)


class _Point(NamedTuple):
    """One combination of the axes; None is as measured."""

    strategy: Strategy
    method: str | None
    levers: Levers
    bucket_mib: float | None
    overlap: bool | None
    per_device_batch: float
    accumulation: int
    workers_per_node: int | None
    nodes: int
    link_gbit_per_s: float


def make_forecast(evidence: Evidence, request: ForecastRequest) -> Forecast:
    """All requested predictions.

    Raises:
        UsageError: a value is impossible, there are too many combinations, or the traffic of one is unknown.
    """
    refuse_unusable(request)
    tested = back_tested(evidence)
    evidence = trusted(evidence, tested)
    variants = _Variants(evidence)
    try:
        points = tuple(_points(evidence, request))
        outlooks = tuple(variants.outlook(point) for point in points)
        sent = _asked(evidence, request)
        return Forecast(
            sources=evidence.sources,
            scenarios=outlooks,
            break_even=break_even(evidence.calibration, sent, target=request.target),
            break_even_of=_told(sent),
            today=_today(evidence),
            own_link=_own_link(evidence, outlooks),
            shortfall=_shortfall(evidence),
            one_node=_one_node(evidence),
            back_test=tested,
            measure=why_measure(evidence.calibration.network),
            notes=(*evidence.notes, *_more_workers(evidence.calibration, outlooks), *_too_large(variants, points)),
        )
    except ValueError as error:
        raise UsageError(str(error), hint="give model.parameters, or remove that strategy") from None


def _today(evidence: Evidence) -> PredictedScenario | None:
    if evidence.today_samples_per_s is None or evidence.today.layout.nodes == 1:
        return None
    return _as_measured(evidence, evidence.today, measured=True)


def _own_link(evidence: Evidence, outlooks: Iterable[PredictedScenario]) -> PredictedScenario | None:
    link = evidence.today.link.gbit_per_s
    rows = [row for row in outlooks if row.nodes > 1 and row.link_gbit_per_s == link]
    return rows[0] if rows and evidence.today_samples_per_s is None else None


def _shortfall(evidence: Evidence) -> Finding | None:
    if evidence.today_samples_per_s is not None:
        sent = sent_as(evidence.calibration, evidence.today)
        return judge_speed(evidence.calibration, sent, evidence.today_samples_per_s)
    levers = evidence.today.levers
    alike = (held for held in evidence.holdouts if _replace(held.scenario, levers=levers) == evidence.today)
    return next(map(judge_holdout, alike), None)


def _one_node(evidence: Evidence) -> PredictedScenario | None:
    if evidence.today.layout.nodes == 1:
        return None
    alone = on_one_node(evidence.calibration, evidence.today)
    return _as_measured(evidence, alone, measured=_single_rate(evidence) is not None)


def _as_measured(evidence: Evidence, scenario: Scenario, *, measured: bool) -> PredictedScenario:
    row = predict_scenario(
        evidence.calibration,
        scenario,
        method=method_of(evidence.subject.settings),
        measured=measured,
    )
    return _with_rate(evidence, row)


def _single_rate(evidence: Evidence) -> float | None:
    """The measured speed of one node, if it trained as each of the several does."""
    alone = on_one_node(evidence.calibration, evidence.today)
    return evidence.single_samples_per_s if _is_calibrated(evidence.calibration, alone) else None


def _with_rate(evidence: Evidence, row: PredictedScenario) -> PredictedScenario:
    """With the measured speed, the mean of its repeats, in place of what the model makes of one of them."""
    one = _single_rate(evidence)
    rate = one if row.nodes == 1 else evidence.today_samples_per_s
    if not row.measured or rate is None:
        return row
    predicted = row.samples_per_s
    off = rate / predicted.value
    against = off if row.nodes == 1 or one is None else rate / one / row.speedup.value
    speedup = row.speedup * against
    if one is not None and evidence.single_gain is not None:
        speedup = of_bounds(speedup.value, inverse(evidence.single_gain).bounds)
    several = {"speedup": speedup, "efficiency": row.efficiency * against}
    return msgspec.structs.replace(
        row,
        samples_per_s=Estimate(value=rate, low=min(predicted.low, rate), high=max(predicted.high, rate)),
        step_time_ms=row.step_time_ms / off,
        tokens_per_s=None if row.tokens_per_s is None else row.tokens_per_s * off,
        **(several if row.nodes > 1 else {}),
    )


def back_tested(evidence: Evidence) -> BackTest:
    """The model tested with all suitable stored runs."""
    tested = []
    for held in evidence.holdouts:
        row = predict_scenario(held.calibration, held.scenario)
        tested.append(
            Trial(
                name=held.name,
                predicted=row.samples_per_s,
                link_gbit_per_s=row.link_gbit_per_s,
                nodes=row.nodes,
                measured=held.samples_per_s,
                shortfall=judge_holdout(held),
            )
        )
    return back_test(tested)


def trusted(evidence: Evidence, tested: BackTest) -> Evidence:
    """Set the intervals of the evidence to what its back-test justifies."""
    calibration = msgspec.structs.replace(evidence.calibration, quantile=tested.quantile)
    return msgspec.structs.replace(evidence, calibration=calibration)


class _Variants:
    """Calibrations by strategy and method, each made once."""

    def __init__(self, evidence: Evidence) -> None:
        self.evidence = evidence
        self.made: dict[tuple[Strategy, str | None], Calibration] = {}

    def outlook(self, point: _Point) -> PredictedScenario:
        scenario, calibration = self.scenario(point), self._calibration(point)
        row = predict_scenario(
            calibration,
            scenario,
            method=point.method or method_of(self.evidence.subject.settings),
            measured=self._is_measured(scenario, point),
        )
        if scenario.layout.nodes == 1 or scenario.link != self.evidence.today.link or row.measured:
            return _with_rate(self.evidence, row)
        cases = [
            msgspec.structs.replace(
                predict_scenario(calibration.in_case(case), scenario, method=row.method),
                case=case.name,
            )
            for case in calibration.network.on(scenario.link).cases()
        ]
        return msgspec.structs.replace(row, cases=tuple(cases))

    def _calibration(self, point: _Point) -> Calibration:
        key = (point.strategy, point.method)
        if key not in self.made:
            evidence = self.evidence
            self.made[key] = vary(evidence.calibration, evidence.subject, strategy=point.strategy, method=point.method)
        return self.made[key]

    def peak(self, point: _Point) -> PeakMemory | None:
        """The memory of a worker; None if it is unknown, or was measured: that has fitted."""
        scenario, subject = self.scenario(point), self.evidence.subject
        if self._is_measured(scenario, point):
            return None
        settings, deepspeed = subject.settings, None
        if point.method is not None and point.method != method_of(settings):
            rank = parse_method(point.method)
            settings = msgspec.structs.replace(settings, method="full" if rank is None else "lora", lora_rank=rank)
        if point.strategy is self.evidence.today.strategy and subject.job is not None:
            deepspeed = parse_deepspeed(subject.job.deepspeed_text)
        return worker_peak(subject, settings, scenario, self._calibration(point).work.load, deepspeed)

    def scenario(self, point: _Point) -> Scenario:
        """The training that a point stands for."""
        today = self.evidence.today
        overlap = point.overlap
        if overlap is None:
            # Other strategies as in LLaMA-Factory's examples: DeepSpeed's stages with overlap_comm: false.
            overlap = today.overlap if point.strategy is today.strategy else point.strategy.engine != "DeepSpeed"
        return Scenario(
            link=msgspec.structs.replace(today.link, gbit_per_s=point.link_gbit_per_s),
            layout=_layout(today, point.nodes, point.workers_per_node),
            per_device_batch=point.per_device_batch,
            accumulation=point.accumulation,
            strategy=point.strategy,
            bucket_bytes=None if point.bucket_mib is None else point.bucket_mib * MIB,
            overlap=overlap,
            levers=point.levers,
        )

    def _is_measured(self, scenario: Scenario, point: _Point) -> bool:
        evidence = self.evidence
        return (
            evidence.today_samples_per_s is not None
            and point.method in {None, method_of(evidence.subject.settings)}
            and scenario == evidence.today
        )


def _points(evidence: Evidence, request: ForecastRequest) -> Iterator[_Point]:
    today = evidence.today
    axes = (
        request.strategies or (today.strategy,),
        request.methods or (None,),
        request.levers.combined(today.levers),
        request.bucket_mib or (None,),
        request.overlaps or (None,),
        request.per_device_batches or (today.per_device_batch,),
        request.accumulations or (today.accumulation,),
        request.workers_per_node or (None,),
        request.nodes or (today.layout.nodes,),
        request.links or _with_measured(today.link.gbit_per_s),
    )
    count = math.prod(len(axis) for axis in axes)
    if count > _MOST_SCENARIOS:
        raise UsageError(f"{count} scenarios exceed the limit of {_MOST_SCENARIOS}", hint="give fewer values")
    seen = set()
    for values in itertools.product(*axes):
        point = _Point._make(values)
        if point.nodes == 1:
            point = point._replace(link_gbit_per_s=today.link.gbit_per_s, levers=point.levers.on(1))
        point = point._replace(levers=_usable(point, request.levers))
        key = (point._replace(levers=NONE), point.levers.options)
        if key not in seen:
            seen.add(key)
            _refuse_contradiction(point)
            yield point


def _with_measured(gbit_per_s: float) -> tuple[float, ...]:
    others = [link for link in USUAL_LINKS if abs(link - gbit_per_s) > _ALIKE * link]
    return tuple(sorted([*others, gbit_per_s]))


def refuse_unusable(request: ForecastRequest) -> None:
    """Refuse numbers that no training has.

    Raises:
        UsageError: with the name of the option.
    """
    for option, values, (least, most) in (
        ("--link", request.links, _GBIT_PER_S),
        ("--link-measured", () if request.link_measured is None else (request.link_measured,), _GBIT_PER_S),
        ("--stream", () if request.stream is None else (request.stream,), _GBIT_PER_S),
        ("--nodes", request.nodes, (1, _MOST_NODES)),
        ("--workers-per-node", request.workers_per_node, (1, _MOST_WORKERS)),
        ("--batch", request.per_device_batches, _BATCH),
        ("--accumulation", request.accumulations, (1, _MOST_ACCUMULATION)),
        ("--bucket-mib", request.bucket_mib, _MIBS),
    ):
        for value in values:
            if not least <= value <= most:
                raise UsageError(
                    f"{option} {value:g} is out of range", hint=f"use a value from {least:,g} to {most:,g}"
                )
    if not 0 < request.target < 1:
        raise UsageError(
            f"--target {request.target:g} is not an efficiency", hint="give a value between 0 and 1: --target 0.9"
        )


def _usable(point: _Point, axes: LeverAxes) -> Levers:
    """Its levers, without those that its strategy or another lever excludes.

    Levers are part of DDP: another strategy is an error only if nothing but a lever was requested.
    """
    dispensable = set(axes.dispensable(point.levers))
    if point.strategy is not Strategy.DDP:
        return point.levers.without(*dispensable)
    excluded = {name for lever in point.levers for name in lever.excludes}
    return point.levers.without(*(dispensable & excluded))


def _refuse_contradiction(point: _Point) -> None:
    for lever in point.levers if point.strategy is not Strategy.DDP else ():
        raise UsageError(f"{lever.option} works with DDP, not with {point.strategy}", hint="use --strategy ddp")
    point.levers.refuse_pairs()
    point.levers.check(Workers())


def _too_large(variants: _Variants, points: Iterable[_Point]) -> Iterator[Finding]:
    """Settings that were asked for, which need more memory than the smallest GPU has."""
    total_gib, told = variants.evidence.gpu_gib, set[str]()
    for point in points if total_gib is not None else ():
        peak = variants.peak(point)
        if total_gib is None or peak is None or peak.needed.value <= total_gib:
            continue
        scenario = variants.scenario(point)
        method = point.method or method_of(variants.evidence.subject.settings)
        workers = format_count(scenario.layout.workers, "worker")
        named = f"{scenario.strategy}, {method}, batch {scenario.per_device_batch:g} on {workers}"
        if named not in told:
            told.add(named)
            yield _TOO_LARGE.found(
                None,
                settings=named,
                needed=format_figure(peak.needed.value),
                range=peak.needed.text("range"),
                gpu=format_figure(total_gib),
                needed_gib=peak.needed.value,
                gpu_gib=total_gib,
            )


def _more_workers(calibration: Calibration, outlooks: Iterable[PredictedScenario]) -> Iterator[Finding]:
    """The contention of more workers per node than any run had is unmeasured."""
    more = [outlook for outlook in outlooks if outlook.workers_per_node > calibration.known_workers(outlook.nodes)]
    if more:
        most = min(calibration.known_workers(row.nodes) for row in more)
        yield _MORE_WORKERS.found(None, most=format_count(most, "worker"), workers_per_node=most)


def _asked(evidence: Evidence, request: ForecastRequest) -> Scenario:
    """The measured scenario, with its gradients as sent; with another setting if only that is requested.

    If nothing was measured on several nodes, on the fewest requested.
    """
    scenario = evidence.today
    if evidence.today_samples_per_s is None:
        nodes = min((node for node in request.nodes if node > 1), default=scenario.layout.nodes)
        layout = _layout(scenario, nodes, min(request.workers_per_node, default=None))
        scenario = msgspec.structs.replace(scenario, layout=layout)
    levers = request.levers.alone(scenario.levers)
    return sent_as(evidence.calibration, msgspec.structs.replace(scenario, levers=levers))


def _layout(today: Scenario, nodes: int, workers_per_node: int | None) -> Layout:
    """So many nodes with so many workers each; None leaves these as they are."""
    if workers_per_node is None:
        return today.layout.on(nodes)
    return Layout(nodes=nodes, workers_per_node=workers_per_node)


def _told(scenario: Scenario) -> str:
    layout = scenario.layout
    each = f"{format_count(layout.workers_per_node, 'worker')} each"
    return (
        f"{scenario.strategy} on {layout.nodes} nodes with {f'{layout.workers} workers' if layout.unequal else each}, "
        f"{format_rate(scenario.link.gbit_per_s)}, batch {scenario.per_device_batch:g}, "
        f"accumulation {scenario.accumulation}"
        + (f", averaging {scenario.averaging.words}" if scenario.averaging is not None else "")
    )
