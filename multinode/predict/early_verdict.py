"""Early verdict: from the first steps of a run on several nodes, whether one node would be faster.

Uses the same model as `advise`, with only the records of this run.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from multinode.errors import MultinodeError
from multinode.predict.advice import NOTICEABLE, RankedOption, pays, rank_options
from multinode.predict.evidence import gather, work_of_calls
from multinode.predict.recommendations import training_state
from multinode.predict.request import read_record
from multinode.predict.run_selection import Record
from multinode.predict.shortfall import judge_speed, shortfall_words
from multinode.predict.training_state import TrainingState, TuningOption
from multinode.predict.tuning_options import one_node
from multinode.profile.observed import Observed, observe_run
from multinode.profile.summary import Summary, summarise
from multinode.records.run import (
    CERTAIN_STEPS,
    LEAST_STEPS,
    BestChange,
    EarlyVerdict,
    Projection,
    RunSteps,
    unknown_verdict,
)
from multinode.records.run_directory import RunDirectory
from multinode.stats.estimate import Estimate, exactly, inverse, of_bounds
from multinode.stats.unknown import Unknown, or_none
from multinode.traffic.step_calls import Strategy, passing_bytes
from multinode.units import format_count, format_duration, format_figure, format_ms, times


def verdict_line(verdict: EarlyVerdict, step: int | None = None) -> str:
    """The verdict in one line.

    Args:
        verdict: the verdict.
        step: current step, for the times; None uses that of the verdict.
    """
    now, alone = verdict.now, verdict.one_node
    if now is None or alone is None:
        return verdict.sentence
    heading = f"Early verdict ({format_count(verdict.recorded, 'step')})"
    part = _part_left(verdict, step)
    ways = [
        (now, f"on {verdict.nodes} nodes"),
        (alone, f"on {verdict.node} alone"),
        *([(verdict.best, f"with {_change(verdict.best)}")] if verdict.best is not None else ()),
    ]
    # A finished run has no time left.
    left = ", ".join(words for way, name in ways if part and (words := _left_words(way, name, part)))
    rest = f". Left: {left}" if left else _best_words(verdict.best)
    words = f"{rest}{_cores(verdict)}{_memory_words(verdict)}{_shortfall_words(verdict)}"
    return f"{heading}: {_head(verdict.nodes, alone)}{words}"


def _head(nodes: int, alone: Projection) -> str:
    if alone.speedup.low > 1:
        sentence = f"1 node is {_faster(alone.speedup, f'than {nodes}')}"
    elif alone.speedup.high < 1:
        sentence = f"{nodes} nodes are {_faster(inverse(alone.speedup), 'than 1')}"
    else:
        sentence = f"inconclusive: 1 node is {alone.speedup.text('times_range')} the speed of {nodes}"
    return f"{sentence}, with the same workers per node"


def _faster(speedup: Estimate, than: str = "") -> str:
    return f"{' '.join(filter(None, (times(speedup.value), 'faster', than)))} ({speedup.text('times_range')})"


def _part_left(verdict: EarlyVerdict, step: int | None) -> float:
    if step is None or verdict.total_steps is None or verdict.total_steps <= verdict.step:
        return 1.0
    return min(1.0, max(0, verdict.total_steps - step) / (verdict.total_steps - verdict.step))


def _left_words(way: Projection, name: str, part: float) -> str:
    if way.left_s is None:
        return ""
    value, low, high = (format_duration(part_s * part) for part_s in (way.left_s.value, *way.left_s.bounds))
    return f"{value} {name} ({low} to {high})"


def _best_words(best: BestChange | None) -> str:
    if best is None:
        return ""
    return f". Best change: {_change(best)}, {_faster(best.speedup)}"


def _change(best: BestChange) -> str:
    more = f"global batch {best.samples_ratio:g}x" if best.samples_ratio != 1 else ""
    how = "; ".join(words for words in (best.options, more) if words)
    return f"{best.name} [{how}]" if how else best.name


def _cores(verdict: EarlyVerdict) -> str:
    if verdict.core_wait_ms is None:
        return ""
    return (
        f". The interval is wide: workers of {verdict.node} waited {format_ms(verdict.core_wait_ms)} "
        "of a step for a core"
    )


def _shortfall_words(verdict: EarlyVerdict) -> str:
    return f". {shortfall_words(verdict.shortfall)}" if verdict.shortfall is not None else ""


def _memory_words(verdict: EarlyVerdict) -> str:
    if verdict.memory == "fits":
        return ""
    if verdict.memory == "unknown":
        return ". It is unknown whether it fits one node's memory"
    needed = f": {format_figure(verdict.needed_gib)} GiB per worker" if verdict.needed_gib is not None else ""
    there = f", its GPU has {format_figure(verdict.gpu_gib)}" if needed and verdict.gpu_gib is not None else ""
    return f". It does not fit one node's memory{needed}{there}"


# Changes that a user can make right away: no machines, no other training, nothing that may not fit the memory.
_SETTINGS = frozenset(
    {"gradients", "accumulation", "overlap", "buckets", "strategy", "pair", "averaging", "outer", "script"}
)


def early_verdict(steps: RunSteps, today: TrainingState, summary: Summary) -> EarlyVerdict:
    """The speed of one node, and the best change.

    Args:
        steps: progress of the run.
        today: the run, calibrated only from itself.
        summary: of its records.
    """
    measured = or_none(summary.samples_per_s)
    if measured is None or not measured.value or isinstance(summary.step_time_ms, Unknown):
        return unknown_verdict(steps, "no measured step was recorded by all workers")
    rate, (low, high) = measured.value, measured.bounds
    left_s = None
    if steps.total_steps is not None:
        left_s = max(0, steps.total_steps - steps.step) * today.scenario.samples / rate
    alone = one_node(today)
    prediction = alone.after.prediction()
    as_now = Estimate(value=1.0, low=low / rate, high=high / rate)
    by_one_node = of_bounds(prediction.samples_per_s, prediction.interval) / of_bounds(rate, (low, high))
    fits = _memory(alone)
    budget = today.gpu_memory
    verdict = EarlyVerdict(
        **msgspec.structs.asdict(steps),
        now=Projection(speedup=as_now, left_s=_left(as_now, left_s)),
        one_node=Projection(speedup=by_one_node, left_s=_left(by_one_node, left_s)),
        best=_best(rank_options(today), left_s),
        memory=fits,
        shortfall=judge_speed(today.calibration, today.sent, rate),
        needed_gib=alone.expected_gib if fits == "too_small" else None,
        gpu_gib=budget.total_gib if budget is not None and fits == "too_small" else None,
        core_wait_ms=_core_wait_ms(summary, alone.after.scenario.layout.workers, prediction.step_time_ms),
    )
    return msgspec.structs.replace(verdict, sentence=verdict_line(verdict))


def _core_wait_ms(summary: Summary, workers: int, step_ms: float) -> float | None:
    waits_ms = [worker.core_wait_ms or 0.0 for worker in summary.split.workers if worker.rank < workers]
    waited_ms = sum(waits_ms) / len(waits_ms) if waits_ms else 0.0
    return waited_ms if waited_ms > NOTICEABLE * step_ms else None


def _left(speedup: Estimate, left_s: float | None) -> Estimate | None:
    return None if left_s is None else exactly(left_s) / speedup


def _memory(alone: TuningOption) -> Literal["fits", "too_small", "unknown"]:
    deepspeed = alone.before.deepspeed
    if alone.before.scenario.strategy is Strategy.DDP:
        return "fits"
    if deepspeed is not None and (deepspeed.offload_optimizer or deepspeed.offload_parameters):
        return "unknown"
    if alone.fits is None:
        return "unknown"
    return "fits" if alone.fits else "too_small"


def _best(ranked: tuple[RankedOption, ...], left_s: float | None) -> BestChange | None:
    for advice, option in ranked:
        if option.kind in _SETTINGS and pays(advice) and advice.gain.low > 1:
            return BestChange(
                name=advice.name,
                options=option.change.options if option.change is not None else "",
                samples_ratio=option.after.scenario.samples / option.before.scenario.samples,
                speedup=advice.gain,
                left_s=_left(advice.gain, left_s),
            )
    return None


_BITS_PER_BYTE, _BYTES_PER_MS = 8, 1e6


class Judged(msgspec.Struct, frozen=True, kw_only=True):
    """The judgement of a run so far."""

    # None if not possible yet, or never: on one node, or for a run without training
    verdict: EarlyVerdict | None = None
    lacking: int = 0  # steps until a verdict, or until it may end the run; 0 if it is final


def judge(directory: RunDirectory) -> Judged:
    """The verdict on a run from all its records so far."""
    record = read_record(directory)
    if record is None or record.plan.test is not None or record.layout.nodes == 1:
        return Judged()
    observed = observe_run(directory, record.plan)
    recorded = _by_all(observed)
    if len(recorded) < LEAST_STEPS:
        return Judged(lacking=LEAST_STEPS - len(recorded))
    totals = [step.total_steps for step in observed.steps[recorded[-1]].values() if step.total_steps]
    steps = RunSteps(
        run_id=directory.run_id,
        node=record.node_names[0],
        nodes=record.layout.nodes,
        workers_per_node=record.layout.on(1).workers,
        step=recorded[-1],
        total_steps=max(totals, default=None),
        recorded=len(recorded),
        measured=len(observed.counted),
    )
    verdict = _judged(directory, record, steps, _by_step(summarise(observed)))
    return Judged(verdict=verdict, lacking=max(0, CERTAIN_STEPS - verdict.measured) if verdict.one_node else 0)


def _judged(directory: RunDirectory, record: Record, steps: RunSteps, summary: Summary) -> EarlyVerdict:
    record, averaging = record.having(summary=summary), record.plan.levers.averaging
    if averaging is not None:
        return unknown_verdict(steps, f"nodes average {averaging.words}: the first steps do not show its cost")
    if isinstance(summary.split.exposed_ms, Unknown):
        return unknown_verdict(steps, f"exposed communication is unknown: {summary.split.exposed_ms.reason}")
    try:
        evidence = gather([record], link_measured=_carried_gbit_per_s(record, summary))
        today = training_state(evidence, [directory], [summary])
        return early_verdict(steps, today, summary)
    except MultinodeError as error:
        return unknown_verdict(steps, error.message)
    except ValueError as error:
        return unknown_verdict(steps, str(error))


def _by_all(observed: Observed) -> list[int]:
    return [number for number, workers in observed.steps.items() if len(workers) == observed.world_size]


def _by_step(summary: Summary) -> Summary:
    times, mean = summary.step_time_ms, or_none(summary.split.mean)
    if isinstance(times, Unknown) or not isinstance(summary.samples_per_s, Unknown):
        return summary
    per_s = inverse(times.median) * (times.median.value / (mean.step_ms if mean is not None else times.median.value))
    per_s *= summary.world_size * summary.accumulation * 1e3
    return msgspec.structs.replace(summary, samples_per_s=per_s, per_device_batch=1.0)


def _carried_gbit_per_s(record: Record, summary: Summary) -> float | None:
    """Rate carried during communication, used as the link rate if the NIC reports none.

    The comparison with one node does not depend on it; gains of changes do.
    """
    comm_ms = or_none(summary.split.comm_ms) or or_none(summary.split.exposed_ms)
    recorded = record.workload.work if record.workload is not None else None
    work = recorded or work_of_calls(summary, record.layout)
    if not comm_ms or work is None:
        return None
    calls = work.calls_of(work.strategy, record.layout)
    sent = passing_bytes(calls, summary.accumulation, record.layout)
    return sent / comm_ms / _BYTES_PER_MS * _BITS_PER_BYTE
