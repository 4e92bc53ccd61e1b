"""The Summary of one run from its records. Composes, and keeps no raw data."""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from multinode.cluster.cluster import Cluster
from multinode.cluster.quoting import as_steps
from multinode.profile.bottleneck import Bottleneck, find_bottleneck
from multinode.profile.calls import SeenCall, read_calls, rooted_part
from multinode.profile.exposure import Exposure, find_exposure
from multinode.profile.figures import BalanceOutlook, InTraining, Straggler, TraceView, Waiting
from multinode.profile.machine_use import NodeUse, use_of
from multinode.profile.observed import Observed, observe_run
from multinode.profile.other_runs import OtherRuns, read_other_runs
from multinode.profile.step_bytes import BytesPerStep, SeenTraffic, see_traffic
from multinode.profile.step_split import StepSplit, split_steps, transfers_us
from multinode.profile.strategy import model_of, recognise_strategy
from multinode.profile.throughput import (
    ModelWork,
    Throughput,
    Utilisation,
    all_steps_samples_per_s,
    measure_throughput,
    utilisation_of,
)
from multinode.records.plan import LaunchPlan
from multinode.records.run_directory import RunDirectory
from multinode.records.samples import LossSample, NoteSample, StepSample, SyncSample, TrainEndSample
from multinode.stats.estimate import Bounds, Estimate, Spread, attempt, estimate_median, estimate_rate, spread_of
from multinode.units import format_count


class Rounds(msgspec.Struct, frozen=True, kw_only=True):
    """The measured rounds of a training that averages every H steps."""

    every: int  # H, optimizer steps per round
    dtype: str | None = None  # of changes on the wire; None sends the parameters unchanged
    outer_lr: float | None = None  # of DiLoCo's outer optimizer; None is local SGD. `momentum` likewise.
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
_NO_LENGTH = "only the Trainer reports the number of samples of its dataset, except for a streamed one"
# Reasons of the split that concern communication.
_IN_COMM = {"exposed_ms": "exposed_ms", "overlap": "overlap"}


class Comm(msgspec.Struct, frozen=True, kw_only=True):
    """The communication of one step."""

    bytes_per_step: BytesPerStep = BytesPerStep()  # requested by calls, expected from the backend, counted by the NIC
    # exposed communication without waits for stragglers, of the worker that waited least
    exposed_ms: float | None = None
    exposed_share: float | None = None  # of the step
    overlap: float | None = None  # share of the communication hidden by computation
    in_training_gb_per_s: float | None = None  # busbw of the training's all-reduces
    in_training: InTraining = InTraining()  # the same with its source, and nccl-test's
    calls: tuple[SeenCall, ...] = ()  # of a worker per step
    explained: tuple[str, ...] = ()  # why the byte figures differ, one sentence each
    missing: dict[str, str] = {}  # reason by name of every None


class Summary(Throughput, frozen=True, kw_only=True):
    """One run in figures; every None has a reason in `missing`.

    Attributes:
        strategy: sharding of the model, as in `traffic.strategy`.
        steps: recorded optimizer steps.
        steady_steps: measured ones.
        rule: which these are.
        step_time_ms: median over the workers of each step, over the measured steps; with rounds, the mean step of each.
        parameters: of the model; `trainable` those with gradients.
        dataset_samples: per epoch, of all workers.
        all_steps_samples_per_s: as `samples_per_s`, including warm-up, as the Trainer counts.
        trainer_samples_per_s: the Trainer's own figure.
        balance: what dealing samples out by speed would give; None if unknown.
        trace: the profiler's window, if there is one.
        rounds: of averaging every H steps; None if nodes average at each step.
        missing: reason by name of every None, and of anything that could not be recorded.
    """

    schema: str = "multinode.summary/1"
    run_id: str
    strategy: str = "unknown"
    world_size: int = 0
    steps: int
    steady_steps: int
    rule: str
    step_time_ms: Spread | None = None
    parameters: int | None = None
    trainable: int | None = None
    dataset_samples: int | None = None
    all_steps_samples_per_s: float | None = None
    trainer_samples_per_s: float | None = None
    first_loss: float | None = None
    last_loss: float | None = None
    comm: Comm = Comm()
    split: StepSplit = StepSplit()
    bottleneck: Bottleneck | None = None
    stragglers: tuple[Straggler, ...] = ()
    balance: BalanceOutlook | None = None
    nodes: tuple[NodeUse, ...] = ()
    utilisation: Utilisation | None = None
    trace: TraceView | None = None
    rounds: Rounds | None = None


def summarise(
    observed: Observed,
    *,
    work: ModelWork | None = None,
    traces: Mapping[int, TraceEvents] | None = None,
    others: OtherRuns | None = None,
    unread: Mapping[str, str] | None = None,
) -> Summary:
    """The summary of all nodes' records.

    Args:
        observed: the sorted records.
        work: computation according to the job's files.
        traces: windows of the profiler, by rank; None without them.
        others: what other runs measured, for comparison.
        unread: reason by name of unreadable data.
    """
    others = others or OtherRuns()
    speed, calls, exposure = measure_throughput(observed), read_calls(observed), find_exposure(observed)
    seen = see_traffic(observed, calls)
    split = split_steps(exposure)
    uses = tuple(use_of(node, observed) for node in observed.nodes)
    trace = None
    if traces:
        from multinode.profile.trace import view_traces

        trace = view_traces(traces, observed.world_size, split.mean, seen.calls, others.scan)
    stragglers: tuple[Straggler, ...] = ()
    waiting, balance, bandwidth = Waiting(), None, InTraining(reason="one worker does not communicate")
    if observed.world_size > 1:
        # What workers have of one another.
        from multinode.profile.balance import find_balance
        from multinode.profile.in_training import in_training
        from multinode.profile.stragglers import find_stragglers, find_waiting

        stragglers = find_stragglers(observed, exposure, split, uses, rooted_part(calls.values()))
        waiting, balance = find_waiting(observed, exposure), find_balance(observed, exposure, split)
        reductions = [call for call in seen.calls if call.op == "all_reduce" and call.ranks == observed.world_size]
        bandwidth = in_training(observed, trace, sum(call.count * call.size_bytes for call in reductions), others.scan)
    missing: dict[str, str] = {}
    used = attempt(missing, "utilisation", lambda: utilisation_of(work or ModelWork(), observed, speed, others.benched))
    model = model_of(observed)
    times_ms = round_times_ms(observed, [_time_us(workers) / 1000 for workers in observed.counted_steps])
    strategy = recognise_strategy(observed, calls, seen.bytes_per_step.nic).name
    losses = sorted(observed.of(LossSample), key=lambda sample: sample.step)
    unknown = _missing(observed, speed, missing) | _missing_losses(losses) | _notes(observed) | dict(unread or {})
    return Summary(
        **msgspec.structs.asdict(speed)
        | {"intervals": speed.intervals | _intervals(times_ms, exposure), "missing": unknown},
        run_id=observed.run_id,
        strategy=strategy,
        world_size=observed.world_size,
        steps=observed.recorded,
        steady_steps=len(observed.counted),
        rule=observed.rule,
        step_time_ms=spread_of(times_ms) if times_ms else None,
        parameters=model.parameters if model else None,
        trainable=model.trainable if model else None,
        dataset_samples=model.dataset_samples if model else None,
        all_steps_samples_per_s=all_steps_samples_per_s(observed),
        trainer_samples_per_s=_trainers_own(observed),
        first_loss=losses[0].loss if losses else None,
        last_loss=losses[-1].loss if losses else None,
        comm=_comm(seen, split, bandwidth),
        split=split,
        bottleneck=_bottleneck(strategy, split, stragglers, waiting, len(observed.nodes)),
        stragglers=stragglers,
        balance=balance,
        nodes=uses,
        utilisation=used,
        trace=trace,
        rounds=see_rounds(observed),
    )


def unused_gpus(summary: Summary) -> str | None:
    """A sentence, if workers trained on the CPUs of nodes with GPUs."""
    gpus = sum(len(node.gpus) for node in summary.nodes)
    if summary.split.device != "cpu" or not gpus:
        return None
    return (
        f"the workers trained on the CPUs, although the nodes have {format_count(gpus, 'GPU')}: see what torch finds "
        "with multinode check"
    )


def _bottleneck(
    strategy: str, split: StepSplit, stragglers: Sequence[Straggler], waiting: Waiting, nodes: int
) -> Bottleneck:
    if strategy.startswith("no communication"):
        sentence = strategy.replace("no communication", "no gradient synchronization detected", 1)
        return Bottleneck(kind="no_communication", sentence=sentence)
    return find_bottleneck(split, stragglers, waiting, nodes=nodes)


def _time_us(workers: Mapping[int, StepSample]) -> float:
    return statistics.median(record.step_time_us for record in workers.values() if record.step_time_us is not None)


def _intervals(times_ms: Sequence[float], exposure: Exposure) -> dict[str, Bounds]:
    intervals: dict[str, Estimate] = {}
    if times_ms:
        intervals["step_time_ms"] = estimate_median(times_ms)
    exposed_ms = [time_us / 1000 for time_us in transfers_us(exposure) if time_us is not None]
    if exposed_ms and len(exposed_ms) == len(exposure.steps):
        intervals["exposed_ms"] = estimate_rate(exposed_ms, [1.0] * len(exposed_ms))
    return {name: (interval.low, interval.high) for name, interval in intervals.items()}


def _trainers_own(observed: Observed) -> float | None:
    ends = observed.of(TrainEndSample)
    return next((end.train_samples_per_s for end in ends if end.train_samples_per_s), None)


def _comm(seen: SeenTraffic, split: StepSplit, bandwidth: InTraining) -> Comm:
    mean = split.mean
    exposed_ms = mean.exposed_ms if mean is not None else None
    return Comm(
        bytes_per_step=seen.bytes_per_step,
        exposed_ms=exposed_ms,
        exposed_share=exposed_ms / mean.step_ms
        if mean is not None and exposed_ms is not None and mean.step_ms
        else None,
        overlap=mean.overlap if mean is not None else None,
        in_training_gb_per_s=bandwidth.busbw_gb_per_s,
        in_training=bandwidth,
        calls=seen.calls,
        explained=seen.explained,
        missing={f"bytes_per_step.{name}": reason for name, reason in seen.missing.items()}
        | {_IN_COMM[name]: reason for name, reason in split.missing.items() if name in _IN_COMM}
        | ({"in_training_gb_per_s": bandwidth.reason} if bandwidth.busbw_gb_per_s is None else {}),
    )


def _missing(observed: Observed, speed: Throughput, unused: dict[str, str]) -> dict[str, str]:
    if not observed.steps:
        reason = "no worker recorded a step"
        return dict.fromkeys(("step_time_ms", *speed.missing), reason) | _missing_of_model(observed)
    return speed.missing | _missing_of_model(observed) | unused


def _missing_of_model(observed: Observed) -> dict[str, str]:
    model = model_of(observed)
    if model is None:
        return dict.fromkeys(("parameters", "trainable", "dataset_samples"), "no worker reported its training")
    return {} if model.dataset_samples is not None else {"dataset_samples": _NO_LENGTH}


def _missing_losses(losses: Sequence[LossSample]) -> dict[str, str]:
    if not losses:
        return dict.fromkeys(("first_loss", "last_loss"), "no loss was logged")
    ends = {"first_loss": losses[0], "last_loss": losses[-1]}
    return {name: f"it was not finite at step {end.step}" for name, end in ends.items() if end.loss is None}


def _notes(observed: Observed) -> dict[str, str]:
    notes: dict[str, str] = {}
    for node in observed.nodes:
        for note in node.of(NoteSample)[:_MOST_NOTES]:
            who = f"{node.name}, rank {note.rank}" if note.rank is not None else node.name
            notes[who] = f"{notes[who]}; {note.message}" if who in notes else note.message
    return notes


_MODEL = "model.json"


def import_analyses(plan: LaunchPlan) -> None:
    """Import what the summary of this run needs: when it ends, days later, the package may have been replaced."""
    several = ("profile.balance", "profile.in_training", "profile.stragglers", "model.flops")
    traced = ("profile.trace",)
    for name in (*(several if plan.world_size > 1 else ()), *(traced if plan.trace is not None else ())):
        importlib.import_module(f"multinode.{name}")


def summarise_run(directory: RunDirectory, plan: LaunchPlan, say: Callable[[str], None] = lambda _: None) -> Summary:
    """Summarize a run's stored samples, and store the summary; `say` as for `observe_run`."""
    cluster = directory.read("cluster.json", Cluster)
    as_reached = partial(as_steps, nodes=cluster.nodes if cluster is not None else ())
    observed = msgspec.structs.replace(observe_run(directory, plan, say), write_hint=as_reached)
    traces: dict[int, TraceEvents] = {}
    unread: dict[str, str] = {}
    if plan.trace is not None:
        from multinode.profile.trace import read_traces

        traces, unread = read_traces(directory, plan.trace.ranks)
    summary = summarise(
        observed,
        work=directory.read(_MODEL, ModelWork) or ModelWork(),
        traces=traces,
        others=read_other_runs(directory, plan),
        unread=unread,
    )
    directory.write("summary.json", summary)
    return summary
