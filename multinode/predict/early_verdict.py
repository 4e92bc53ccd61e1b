"""Early verdict: from the first steps of a run on several nodes, whether one node would be faster.

Uses the same model as `advise`, with only the records of this run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec

from multinode.errors import MultinodeError
from multinode.findings.finding import Finding
from multinode.findings.rule import RuleGroup
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
)
from multinode.records.run_directory import RunDirectory
from multinode.stats.estimate import Estimate, exactly, inverse, of_bounds
from multinode.stats.unknown import Unknown, or_none
from multinode.traffic.step_calls import Strategy, passing_bytes
from multinode.units import format_count, format_duration, format_figure, format_ms, times

EARLY_VERDICTS = RuleGroup("Early verdict: is one node faster?")
_SPEEDUP = ("speedup", "low", "high")
_ONE_NODE = EARLY_VERDICTS.rule(
    "one-node-faster",
    about="one node is faster",
    message="1 node is {faster}, with the same number of workers per node",
    figures=_SPEEDUP,
)
_ALL_NODES = EARLY_VERDICTS.rule(
    "all-nodes-faster",
    about="training on all nodes is faster than on one",
    message="{nodes} nodes are {faster}, with the same number of workers per node",
    figures=_SPEEDUP,
)
_INCONCLUSIVE = EARLY_VERDICTS.rule(
    "inconclusive",
    about="the interval includes both outcomes",
    message="inconclusive: 1 node has {range} the speed of {nodes} nodes, with the same number of workers per node",
    figures=_SPEEDUP,
)
_UNKNOWN = EARLY_VERDICTS.rule(
    "unknown",
    about="nothing can be predicted",
    message="it is unknown whether 1 node would be faster than {nodes}: {reason}",
    figures=("reason",),
)
_LEFT = EARLY_VERDICTS.rule(
    "time-left",
    about="time for the remaining steps: without a change, on one node, and with the best change",
    message="Time left: {ways}",
    figures=("left_s", "one_node_left_s"),
)
_BEST_CHANGE = EARLY_VERDICTS.rule(
    "best-change",
    about="the setting that would help most",
    message="Best change: {change}, {faster}",
    figures=_SPEEDUP,
)
_CORE_WAIT = EARLY_VERDICTS.rule(
    "core-wait",
    about="workers that waited for a CPU core",
    message="The interval is wide because workers on {node} waited {waited} per step for a CPU core",
    figures=("core_wait_ms",),
)
_MEMORY_UNKNOWN = EARLY_VERDICTS.rule(
    "memory-unknown",
    about="it is unknown whether the training fits on one node",
    message="It is unknown whether the training fits into one node's memory",
)
_TOO_SMALL = EARLY_VERDICTS.rule(
    "memory-too-small",
    about="the training does not fit on one node",
    message="The training does not fit into one node's memory{needed}{there}",
    figures=("needed_gib", "gpu_gib"),
)


def verdict_line(verdict: EarlyVerdict, step: int | None = None) -> str:
    """The verdict in one line.

    Args:
        verdict: the verdict.
        step: current step, for the times; None uses that of the verdict.
    """
    found = verdict.findings if step is None else _judge_verdict(verdict, step)
    words = [finding.message for finding in found]
    words += [shortfall_words(verdict.shortfall)] if verdict.shortfall is not None else []
    return f"Early verdict ({format_count(verdict.recorded, 'step')}): {'. '.join(words)}"


def _unknown_verdict(steps: RunSteps, reason: str) -> EarlyVerdict:
    found = _UNKNOWN.found(None, nodes=steps.nodes, reason=reason)
    return EarlyVerdict(**msgspec.structs.asdict(steps), findings=(found,))


def _judge_verdict(verdict: EarlyVerdict, step: int) -> tuple[Finding, ...]:
    """What is said of a verdict when the run is at this step."""
    now, alone = verdict.now, verdict.one_node
    if now is None or alone is None:
        return verdict.findings
    part = _part_left(verdict, step)
    ways = [
        (now, f"on {verdict.nodes} nodes"),
        (alone, f"on {verdict.node} alone"),
        *([(verdict.best, f"with {_change(verdict.best)}")] if verdict.best is not None else ()),
    ]
    # A finished run has no time left.
    left = ", ".join(words for way, name in ways if part and (words := _left_words(way, name, part)))
    found = [_judge_speed(verdict.nodes, alone.speedup)]
    if left:
        times_s = {"left_s": now.left_s, "one_node_left_s": alone.left_s}
        figures = {name: time_s.value * part for name, time_s in times_s.items() if time_s is not None}
        found.append(_LEFT.found(None, ways=left, **figures))
    elif verdict.best is not None:
        change, speedup = _change(verdict.best), verdict.best.speedup
        found.append(_BEST_CHANGE.found(None, change=change, faster=_faster(speedup), **_bounds(speedup)))
    return (*found, *_judge_limits(verdict))


def _judge_speed(nodes: int, speedup: Estimate) -> Finding:
    if speedup.low > 1:
        return _ONE_NODE.found(None, faster=_faster(speedup, f"than {nodes}"), **_bounds(speedup))
    if speedup.high < 1:
        return _ALL_NODES.found(None, nodes=nodes, faster=_faster(inverse(speedup), "than 1"), **_bounds(speedup))
    return _INCONCLUSIVE.found(None, nodes=nodes, range=speedup.text("times_range"), **_bounds(speedup))


def _judge_limits(verdict: EarlyVerdict) -> Iterator[Finding]:
    if verdict.core_wait_ms is not None:
        waited = format_ms(verdict.core_wait_ms)
        yield _CORE_WAIT.found(verdict.node, waited=waited, core_wait_ms=verdict.core_wait_ms)
    if verdict.memory == "unknown":
        yield _MEMORY_UNKNOWN.found(verdict.node)
    elif verdict.memory == "too_small":
        needed, there = verdict.needed_gib, verdict.gpu_gib
        yield _TOO_SMALL.found(
            verdict.node,
            needed="" if needed is None else f": it needs {format_figure(needed)} GiB per worker",
            needed_gib=needed,
            there="" if needed is None or there is None else f", but a GPU there has {format_figure(there)} GiB",
            gpu_gib=there,
        )


def _bounds(speedup: Estimate) -> dict[str, float]:
    return {"speedup": speedup.value, "low": speedup.low, "high": speedup.high}


def _faster(speedup: Estimate, than: str = "") -> str:
    return f"{' '.join(filter(None, (times(speedup.value), 'faster', than)))} ({speedup.text('times_range')})"


def _part_left(verdict: EarlyVerdict, step: int) -> float:
    if verdict.total_steps is None or verdict.total_steps <= verdict.step:
        return 1.0
    return min(1.0, max(0, verdict.total_steps - step) / (verdict.total_steps - verdict.step))


def _left_words(way: Projection, name: str, part: float) -> str:
    if way.left_s is None:
        return ""
    value, low, high = (format_duration(part_s * part) for part_s in (way.left_s.value, *way.left_s.bounds))
    return f"{value} {name} ({low} to {high})"


def _change(best: BestChange) -> str:
    more = f"global batch {best.samples_ratio:g}x" if best.samples_ratio != 1 else ""
    how = "; ".join(words for words in (best.options, more) if words)
    return f"{best.name} [{how}]" if how else best.name


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
        return _unknown_verdict(steps, "no measured step was recorded by all workers")
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
    return msgspec.structs.replace(verdict, findings=_judge_verdict(verdict, verdict.step))


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
        return _unknown_verdict(
            steps, f"nodes average {averaging.words}: the first steps do not show the cost of averaging"
        )
    if isinstance(summary.split.exposed_ms, Unknown):
        return _unknown_verdict(steps, f"exposed communication is unknown: {summary.split.exposed_ms.reason}")
    try:
        evidence = gather([record], link_measured=_carried_gbit_per_s(record, summary))
        today = training_state(evidence, [directory], [summary])
        return early_verdict(steps, today, summary)
    except MultinodeError as error:
        return _unknown_verdict(steps, error.message)
    except ValueError as error:
        return _unknown_verdict(steps, str(error))


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
    recorded = or_none(record.workload.work) if record.workload is not None else None
    work = recorded or work_of_calls(summary, record.layout)
    if not comm_ms or work is None:
        return None
    calls = work.calls_of(work.strategy, record.layout)
    sent = passing_bytes(calls, summary.accumulation, record.layout)
    return sent / comm_ms / _BYTES_PER_MS * _BITS_PER_BYTE
