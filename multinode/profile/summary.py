"""The Summary of one run from its records. Composes, and keeps no raw data."""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from multinode.cluster.cluster import Cluster
from multinode.cluster.quoting import as_steps
from multinode.figures.figure import Figure
from multinode.findings.finding import Finding
from multinode.levers.levers import Levers
from multinode.profile.bottleneck import NO_COMMUNICATION, Bottleneck, find_bottleneck
from multinode.profile.calls import SeenCall, read_calls, rooted_part
from multinode.profile.exposure import Exposure, find_exposure
from multinode.profile.figures import NOTES, BalanceOutlook, FigureNote, InTraining, Straggler, TraceView, Waiting
from multinode.profile.machine_use import NodeUse, use_of
from multinode.profile.observed import Observed, observe_run
from multinode.profile.other_runs import OtherRuns, read_other_runs
from multinode.profile.step_bytes import BytesPerStep, SeenTraffic, see_traffic
from multinode.profile.step_split import ALONE, StepSplit, split_steps, transfers_us
from multinode.profile.strategy import Recognised, model_of, recognise_strategy
from multinode.profile.throughput import (
    NO_STEP,
    ModelWork,
    Throughput,
    Utilisation,
    all_steps_samples_per_s,
    measure_throughput,
    utilisation_of,
)
from multinode.records.plan import LaunchPlan
from multinode.records.run_directory import RunDirectory
from multinode.records.samples import LossSample, ModelSample, NoteSample, StepSample, SyncSample, TrainEndSample
from multinode.stats.estimate import Estimate, Spread, estimate_median, estimate_rate, spread_of
from multinode.stats.unknown import UNMEASURED, Unknown, UnknownError, found, known, or_none
from multinode.traffic.step_calls import Strategy
from multinode.units import format_count


class Rounds(msgspec.Struct, frozen=True, kw_only=True):
    """The measured rounds of a training that averages every H steps."""

    every: int  # H, optimizer steps per round
    dtype: str | None = None  # of changes on the wire; None sends the parameters unchanged
    outer_lr: float | None = None  # of DiLoCo's outer optimizer; None is local SGD; also `momentum`
    momentum: float = 0.0
    rounds: int = 0  # measured rounds; `early` of them were closed early by a checkpoint or evaluation
    early: int = 0
    steps: float | None = None  # per round, on average; None if none was measured
    sync_ms: float | None = None  # median time of averaging, including waits for slower nodes
    size_bytes: float | None = None  # S of a round's all-reduces between nodes
    # norm of the difference between a node's parameters and the mean, of the node that drifted most; median of the
    # rounds. `last_drift` of the last round.
    drift: float | None = None
    last_drift: float | None = None


def see_rounds(observed: Observed) -> Rounds | None:
    """The measured rounds; None without averaging."""
    averaging = observed.averaging
    if averaging is None:
        return None
    unmeasured = Rounds(
        every=averaging.every, dtype=averaging.dtype, outer_lr=averaging.outer_lr, momentum=averaging.momentum
    )
    measured = set(observed.counted)
    syncs: dict[int, list[SyncSample]] = {}
    for node in observed.nodes:
        for sync in node.of(SyncSample):
            if sync.step in measured and sync.rank in node.ranks and sync.drift is not None:
                syncs.setdefault(sync.step, []).append(sync)
    if not syncs:
        return unmeasured
    rounds = [syncs[step] for step in sorted(syncs)]
    drifts = [max(sample.drift or 0.0 for sample in nodes) for nodes in rounds]
    return msgspec.structs.replace(
        unmeasured,
        rounds=len(rounds),
        early=sum(nodes[0].reason != "round" for nodes in rounds),
        steps=statistics.fmean(nodes[0].steps for nodes in rounds),
        sync_ms=statistics.median(statistics.median(sample.sync_us for sample in nodes) for nodes in rounds) / 1000,
        size_bytes=statistics.fmean(max(sample.size_bytes for sample in nodes) for nodes in rounds),
        drift=statistics.median(drifts),
        last_drift=drifts[-1],
    )


def round_times_ms(observed: Observed, times_ms: list[float]) -> list[float]:
    """Mean step of each measured round; without rounds, the times of the measured steps."""
    ends = set(observed.syncs)
    rounds: list[list[float]] = [[]]
    for number, time_ms in zip(observed.counted, times_ms, strict=True):
        rounds[-1].append(time_ms)
        if number in ends:
            rounds.append([])
    return [statistics.fmean(times) for times in rounds if times] if ends else times_ms


if TYPE_CHECKING:
    from multinode.profile.trace import TraceEvents

# A node may send any number of notes.
_MOST_NOTES = 20
_WITHOUT = {
    lacks: NOTES.rule(
        f"no-{what.lower()}-samples",
        about=f"why a node has no {what} samples",
        message=f"no {what} samples: {{reason}}",
        figures=("reason",),
    )
    for lacks, what in {"gpus": "GPU", "cgroup": "cgroup"}.items()
}
_REPORTED = NOTES.rule("reported", about="what a worker or node reports", message="{reason}", figures=("rank",))
_NO_LENGTH = "only the Trainer reports the number of samples of its dataset, unless the dataset is streamed"


class StepTimes(msgspec.Struct, frozen=True, kw_only=True, tag_field="is", tag="spread"):
    """The distribution of step times, as in `Spread`, with the interval of its median."""

    median: Estimate
    p95: float
    cv: float

    @property
    def spread(self) -> Spread:
        """The distribution alone."""
        return Spread(median=self.median.value, p95=self.p95, cv=self.cv)


STEP_TIME_FIGURES: tuple[Figure[float], ...] = (
    Figure("median", about="median step time of the measured steps"),
    Figure("p95", about="95th percentile of the step time of the measured steps"),
    Figure("cv", about="standard deviation of the step time divided by its mean"),
)


class Comm(msgspec.Struct, frozen=True, kw_only=True):
    """The communication of one step."""

    bytes_per_step: BytesPerStep = BytesPerStep()  # requested by calls, expected from the backend, counted by the NIC
    # exposed communication without waits for stragglers, of the worker that waited least
    exposed_ms: Estimate | Unknown = UNMEASURED
    exposed_share: float | None = None  # of the step; None if `exposed_ms` is unknown
    overlap: float | Unknown = UNMEASURED  # share of the communication hidden by computation
    in_training_gb_per_s: float | Unknown = UNMEASURED  # busbw of the training's all-reduces
    in_training: InTraining = InTraining()  # the strategy's with its source, and nccl-test's
    calls: tuple[SeenCall, ...] = ()  # of a worker per step
    findings: tuple[Finding, ...] = ()  # why the byte figures differ, and remarks on the counters


COMM_FIGURES: tuple[Figure[float], ...] = (
    Figure("overlap", about="share of the communication that overlapped with compute"),
    Figure("in_training_gb_per_s", about="busbw of the training's own all-reduces"),
)


class Summary(Throughput, frozen=True, kw_only=True):
    """The figures of a run. A figure that is unknown states the reason.

    Attributes:
        strategy: sharding of the model, in words.
        recognised: the strategy, if it is a known one.
        fsdp_version: 1 or 2; None without FSDP.
        steps: number of recorded optimizer steps.
        steady_steps: number of measured steps.
        rule: which steps are measured, in words.
        step_time_ms: statistics of the measured steps. The time of a step is the median of the workers. With rounds,
            the mean step of each round is used.
        parameters: parameters of the model. `trainable` counts those with gradients.
        dataset_samples: samples per epoch, of all workers.
        all_steps_samples_per_s: same as `samples_per_s`, but including the warm-up, as the Trainer counts.
        trainer_samples_per_s: the figure that the Trainer reports.
        balance: predicted effect of distributing samples by node speed; None if unknown.
        trace: the window that the profiler traced, if any.
        rounds: rounds of averaging every H steps; None if nodes average in each step.
        notes: what could not be recorded or read.
        unused_levers: names of levers that had no effect, because the training has its own mechanism.
    """

    schema: str = "multinode.summary/3"
    run_id: str
    strategy: str = "unknown"
    recognised: Strategy | None = None
    fsdp_version: int | None = None
    world_size: int = 0
    steps: int
    steady_steps: int
    rule: str
    step_time_ms: StepTimes | Unknown = UNMEASURED
    parameters: int | Unknown = UNMEASURED
    trainable: int | Unknown = UNMEASURED
    dataset_samples: int | Unknown = UNMEASURED
    all_steps_samples_per_s: float | None = None
    trainer_samples_per_s: float | None = None
    utilisation: Utilisation | Unknown = UNMEASURED
    first_loss: float | Unknown = UNMEASURED
    last_loss: float | Unknown = UNMEASURED
    comm: Comm = Comm()
    split: StepSplit = StepSplit()
    bottleneck: Bottleneck | None = None
    stragglers: tuple[Straggler, ...] = ()
    balance: BalanceOutlook | None = None
    nodes: tuple[NodeUse, ...] = ()
    trace: TraceView | None = None
    rounds: Rounds | None = None
    notes: tuple[FigureNote, ...] = ()
    unused_levers: tuple[str, ...] = ()


STEP_COUNTS: tuple[Figure[int], ...] = (
    Figure("steps", about="recorded optimizer steps"),
    Figure("steady_steps", about="measured steps, excluding warm-up"),
)
OTHER_RATES: tuple[Figure[float], ...] = (
    Figure("all_steps_samples_per_s", about="samples per second of all workers, including warm-up"),
    Figure("trainer_samples_per_s", about="samples per second that the Trainer reports"),
)
MODEL_FIGURES: tuple[Figure[float], ...] = (
    Figure("parameters", about="parameters of the model"),
    Figure("trainable", about="trainable parameters"),
    Figure("first_loss", about="first logged loss"),
    Figure("last_loss", about="last logged loss"),
)


def summarise(
    observed: Observed,
    *,
    work: ModelWork | None = None,
    traces: Mapping[int, TraceEvents] | None = None,
    others: OtherRuns | None = None,
    unread: Sequence[FigureNote] = (),
) -> Summary:
    """The summary of all nodes' records.

    Args:
        observed: the sorted records.
        work: computation according to the job's files.
        traces: windows of the profiler, by rank; None without them.
        others: what other runs measured, for comparison.
        unread: notes on unreadable data.
    """
    others = others or OtherRuns()
    speed, calls, exposure = measure_throughput(observed), read_calls(observed), find_exposure(observed)
    seen = see_traffic(observed, calls)
    split = split_steps(exposure)
    uses = tuple(use_of(node, observed) for node in observed.nodes)
    trace = None
    if traces:
        from multinode.profile.trace import view_traces

        trace = view_traces(traces, observed.world_size, or_none(split.mean), seen.calls, others.scan)
    stragglers: tuple[Straggler, ...] = ()
    waiting, balance, bandwidth = Waiting(), None, InTraining(busbw_gb_per_s=Unknown(ALONE))
    if observed.world_size > 1:
        # What workers have of one another.
        from multinode.profile.balance import find_balance
        from multinode.profile.in_training import in_training
        from multinode.profile.stragglers import find_stragglers, find_waiting

        stragglers = find_stragglers(observed, exposure, split, uses, rooted_part(calls.values()))
        waiting, balance = find_waiting(observed, exposure), find_balance(observed, exposure, split)
        reductions = [call for call in seen.calls if call.op == "all_reduce" and call.ranks == observed.world_size]
        bandwidth = in_training(observed, trace, sum(call.count * call.size_bytes for call in reductions), others.scan)
    used: Utilisation | Unknown = Unknown(NO_STEP)
    if observed.steps:
        used = found(lambda: utilisation_of(work or ModelWork(), observed, speed, others.benched))
    model = found(lambda: _told_model(observed))
    times_ms = round_times_ms(observed, [_time_us(workers) / 1000 for workers in observed.counted_steps])
    strategy = recognise_strategy(observed, calls, or_none(seen.bytes_per_step.nic))
    losses = sorted(observed.of(LossSample), key=lambda sample: sample.step)
    return Summary(
        **msgspec.structs.asdict(speed),
        run_id=observed.run_id,
        strategy=strategy.name,
        recognised=strategy.strategy,
        fsdp_version=strategy.fsdp_version,
        world_size=observed.world_size,
        steps=observed.recorded,
        steady_steps=len(observed.counted),
        rule=observed.rule,
        step_time_ms=_step_times(times_ms) if times_ms else Unknown(NO_STEP),
        parameters=found(lambda: known(model).parameters),
        trainable=found(lambda: known(model).trainable),
        dataset_samples=found(lambda: _dataset_samples(known(model))),
        all_steps_samples_per_s=all_steps_samples_per_s(observed),
        trainer_samples_per_s=_trainers_own(observed),
        utilisation=used,
        first_loss=found(lambda: _loss(losses[:1])),
        last_loss=found(lambda: _loss(losses[-1:])),
        comm=_comm(seen, split, exposure, bandwidth),
        split=split,
        bottleneck=_bottleneck(strategy, split, stragglers, waiting, len(observed.nodes)),
        stragglers=stragglers,
        balance=balance,
        nodes=uses,
        trace=trace,
        rounds=see_rounds(observed),
        notes=(*_notes(observed), *unread),
        unused_levers=_unused_levers(observed),
    )


def unused_gpus(summary: Summary) -> str | None:
    """A sentence, if workers trained on the CPUs of nodes with GPUs."""
    gpus = sum(len(node.gpus) for node in summary.nodes)
    if summary.split.device != "cpu" or not gpus:
        return None
    return (
        f"the workers trained on the CPUs, although the nodes have {format_count(gpus, 'GPU')}: multinode check "
        "shows what torch finds"
    )


def _bottleneck(
    strategy: Recognised, split: StepSplit, stragglers: Sequence[Straggler], waiting: Waiting, nodes: int
) -> Bottleneck:
    if strategy.silence:
        return NO_COMMUNICATION.found(None, reason=strategy.silence)
    return find_bottleneck(split, stragglers, waiting, nodes=nodes)


def _time_us(workers: Mapping[int, StepSample]) -> float:
    return statistics.median(record.step_time_us for record in workers.values() if record.step_time_us is not None)


def _step_times(times_ms: Sequence[float]) -> StepTimes:
    spread = spread_of(times_ms)
    return StepTimes(median=estimate_median(times_ms), p95=spread.p95, cv=spread.cv)


def _exposed_ms(split: StepSplit, exposure: Exposure) -> Estimate:
    known(split.exposed_ms)
    exposed_ms = [time_us / 1000 for time_us in transfers_us(exposure) if time_us is not None]
    return estimate_rate(exposed_ms, [1.0] * len(exposed_ms))


def _trainers_own(observed: Observed) -> float | None:
    ends = observed.of(TrainEndSample)
    return next((end.train_samples_per_s for end in ends if end.train_samples_per_s), None)


def _comm(seen: SeenTraffic, split: StepSplit, exposure: Exposure, bandwidth: InTraining) -> Comm:
    mean, exposed_ms = or_none(split.mean), or_none(split.exposed_ms)
    return Comm(
        bytes_per_step=seen.bytes_per_step,
        exposed_ms=found(lambda: _exposed_ms(split, exposure)),
        exposed_share=exposed_ms / mean.step_ms
        if mean is not None and exposed_ms is not None and mean.step_ms
        else None,
        overlap=found(lambda: known(known(split.mean).overlap)),
        in_training_gb_per_s=bandwidth.busbw_gb_per_s,
        in_training=bandwidth,
        calls=seen.calls,
        findings=seen.findings,
    )


def _told_model(observed: Observed) -> ModelSample:
    model = model_of(observed)
    if model is None:
        raise UnknownError("no worker reported its model and data")
    return model


def _dataset_samples(model: ModelSample) -> int:
    if model.dataset_samples is None:
        raise UnknownError(_NO_LENGTH)
    return model.dataset_samples


def _loss(ends: Sequence[LossSample]) -> float:
    if not ends:
        raise UnknownError("no loss was logged")
    (end,) = ends
    if end.loss is None:
        raise UnknownError(f"it was not finite at step {end.step}")
    return end.loss


def _unused_levers(observed: Observed) -> tuple[str, ...]:
    lacking = {note.lacks for note in observed.of(NoteSample)}
    return tuple(name for name in Levers.__struct_fields__ if name in lacking)


def _notes(observed: Observed) -> Iterator[FigureNote]:
    for node in observed.nodes:
        for note in node.of(NoteSample)[:_MOST_NOTES]:
            who = f"{node.name}, rank {note.rank}" if note.rank is not None else node.name
            fields = _WITHOUT.get(note.lacks, _REPORTED).fields(node.name, {"reason": note.message, "rank": note.rank})
            yield FigureNote(**fields, concerns=who)


_MODEL = "model.json"


def import_analyses(plan: LaunchPlan) -> None:
    """Import what the summary of this run needs: when it ends, days later, the package may have been replaced."""
    needed = {
        ("profile.balance", "profile.in_training", "profile.stragglers", "model.flops"): plan.world_size > 1,
        ("profile.byte_gaps",): len(plan.nodes) > 1,
        ("profile.trace",): plan.observation.trace is not None,
    }
    for name in (name for names, is_needed in needed.items() if is_needed for name in names):
        importlib.import_module(f"multinode.{name}")


def summarise_run(directory: RunDirectory, plan: LaunchPlan, say: Callable[[str], None] = lambda _: None) -> Summary:
    """Summarize a run's stored samples, and store the summary; `say` as for `observe_run`."""
    cluster = directory.read("cluster.json", Cluster)
    as_reached = partial(as_steps, nodes=cluster.nodes if cluster is not None else ())
    observed = msgspec.structs.replace(observe_run(directory, plan, say), write_hint=as_reached)
    traces: dict[int, TraceEvents] = {}
    unread: Sequence[FigureNote] = ()
    trace = plan.observation.trace
    if trace is not None:
        from multinode.profile.trace import read_traces

        traces, unread = read_traces(directory, trace.ranks)
    summary = summarise(
        observed,
        work=directory.read(_MODEL, ModelWork) or ModelWork(),
        traces=traces,
        others=read_other_runs(directory, plan),
        unread=unread,
    )
    directory.write("summary.json", summary)
    return summary
