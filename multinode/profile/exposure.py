"""Exposure: each worker's wait in exposed communication, per measured step. Pure.

Chooses the best source, and the steps in which it is known; `step_split` and `stragglers` interpret the waits.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence

import msgspec

from multinode.profile.calls import last_models
from multinode.profile.observed import Observed, ObservedNode
from multinode.records.progress import StepRecords
from multinode.records.samples import DdpSample, DeviceWaitSample, GroupSample, StepSample, TrafficSample
from multinode.stats.unknown import Unknown, UnknownError, found

# Occasional checkpoints are not typical of a step. Events in more than one step of twenty belong to the training's
# rhythm (a loader that refills its queue), and stay.
_LONG = 3
_RARE = 20
# Counters and step times are read at different moments: only a larger excess over the step is implausible.
_CREDIBLE_EXCESS = 1.1
# In so many iterations torch reads DDP's timers whatever rate it is told (logger.cpp, set_runtime_stats_and_log).
_WAITED_FOR = 10
_TRACE_TELLS = "to measure exposed communication, record a trace (--trace)"


class DdpTimes(msgspec.Struct, frozen=True, kw_only=True):
    """DDP's counters for one step of one worker, summed over iterations and DDP modules."""

    iterations: int  # of the reducer; one, unless micro-batches are reduced separately or there are several modules
    compute_us: float  # forward pass and backward computation
    # from the first bucket to the last; `exposed_us` is the part that the backward computation did not overlap
    comm_us: float
    exposed_us: float
    # whether the GPU was done with the step before the host began the next, without torch making it wait
    host_free: bool


class WorkerStep(msgspec.Struct, frozen=True, kw_only=True):
    """One step of one worker."""

    record: StepSample
    step_us: float
    exposed_us: float | None = None  # wait in exposed communication, at most the step; None if unknown
    ddp: DdpTimes | None = None  # its DDP counters, if the source is `ddp`
    beside_us: float | None = None  # the part of `exposed_us` in calls other than DDP's reducer, with the source `ddp`
    local_us: float = 0.0  # the part of `exposed_us` in calls of groups inside a node


class Exposure(msgspec.Struct, frozen=True, kw_only=True):
    """The steps with known exposure."""

    # `ddp` (DDP's counters), `device` (waits of the compute stream), `host` (blocked in collectives) or `alone` (one
    # worker)
    source: str | Unknown
    # by rank, with all workers in each, ascending; steps unknown to the source are excluded
    steps: tuple[dict[int, WorkerStep], ...] = ()
    device: str | None = None  # of all workers, `cpu` or `cuda`; None if unknown or mixed
    accumulation: dict[int, int] = {}  # micro-batches per step by rank, if the framework reports it
    rule: str = ""  # which steps these are, in words
    measured: int = 0  # steps that were looked at


_Step = dict[int, WorkerStep]


class _Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """Records of the steps by (rank, step), and the available sources."""

    world_size: int
    wrapped_by_ddp: bool
    device: str | None
    records: dict[tuple[int, int], StepRecords]
    reduces_inside: bool  # whether DDP reduces in groups inside a node, of several nodes

    def exposed_us(self, source: str, worker: WorkerStep) -> float | None:
        records = self.records[worker.record.rank, worker.record.step]
        return records.exposed_us(source, host_waits=self.device == "cpu")

    def local_us(self, worker: WorkerStep) -> float:
        """The part of it in groups inside a node."""
        local_us = self.records[worker.record.rank, worker.record.step].local_us(host_waits=self.device == "cpu")
        return local_us + (worker.ddp.exposed_us if worker.ddp is not None and self.reduces_inside else 0.0)

    def has(self, kind: str) -> bool:
        return any(getattr(records, kind) for records in self.records.values())


def find_exposure(observed: Observed) -> Exposure:
    """Choose the best source, and the measured steps that all workers recorded and that it covers."""
    whole = _whole_steps(observed, observed.counted)
    if not whole:
        return Exposure(source=Unknown("no measured step was recorded by all workers"))
    return _expose(observed, whole, _without_rare(whole, observed.syncs), len(observed.counted))


def expose_each(observed: Observed) -> Exposure:
    """Exposure of every step that all workers recorded, measured or not."""
    whole = _whole_steps(observed, observed.steps)
    return _expose(observed, whole, whole, len(observed.steps))


def _whole_steps(observed: Observed, numbers: Iterable[int]) -> list[_Step]:
    return [step for number in numbers if (step := _whole_step(observed, number)) is not None]


def _expose(observed: Observed, whole: Sequence[_Step], usual: Sequence[_Step], measured: int) -> Exposure:
    models = last_models(observed)
    devices = {model.device for model in models.values()}
    evidence = _Evidence(
        world_size=observed.world_size,
        wrapped_by_ddp=any(model.wrapper == "ddp" for model in models.values()),
        device=devices.pop() if len(devices) == 1 else None,
        records=_records(observed),
        reduces_inside=_reduces_inside(observed),
    )
    told = found(lambda: _tell_best(usual, evidence))
    source, means = (told, usual) if isinstance(told, Unknown) else told
    return Exposure(
        source=source,
        steps=tuple(means),
        device=evidence.device,
        accumulation={rank: model.accumulation for rank, model in models.items() if model.accumulation},
        rule=_rule(observed, len(whole) - len(usual), len(means)) + _about_counters(evidence, source, means),
        measured=measured,
    )


def _reduces_inside(observed: Observed) -> bool:
    """Whether every group of DDP's reducer is inside one of several nodes, as where nodes average."""
    if len(observed.nodes) == 1:
        return False
    groups = [(node, _reducing_groups(node)) for node in observed.nodes]
    return all(mine and all(set(ranks) <= set(node.ranks) for ranks in mine) for node, mine in groups)


def _reducing_groups(node: ObservedNode) -> list[tuple[int, ...]]:
    calls = {
        (sample.rank, call.group) for sample in node.of(TrafficSample) for call in sample.calls if call.source == "ddp"
    }
    return [group.ranks for group in node.of(GroupSample) if (group.rank, group.group) in calls]


def _whole_step(observed: Observed, number: int) -> _Step | None:
    whole = {
        rank: WorkerStep(record=record, step_us=record.step_time_us)
        for rank, record in sorted(observed.steps[number].items())
        if record.step_time_us is not None
    }
    return whole if len(whole) == observed.world_size else None


def _without_rare(steps: Sequence[_Step], syncs: Collection[int]) -> list[_Step]:
    """Without rare, long steps; steps in which nodes average belong to the rhythm of the training."""
    times = [statistics.median(worker.step_us for worker in step.values()) for step in steps]
    limit = _LONG * statistics.median(times)
    usual = [
        step
        for step, time_us in zip(steps, times, strict=True)
        if time_us <= limit or next(iter(step.values())).record.step in syncs
    ]
    return usual if len(steps) - len(usual) <= math.ceil(len(steps) / _RARE) else list(steps)


def _records(observed: Observed) -> dict[tuple[int, int], StepRecords]:
    records: defaultdict[tuple[int, int], StepRecords] = defaultdict(StepRecords)
    for node in observed.nodes:
        for sample in node.samples:
            if isinstance(sample, StepSample | DdpSample | DeviceWaitSample) and sample.rank in node.ranks:
                records[sample.rank, sample.step].take(sample)
    return records


def _tell_best(steps: Sequence[_Step], evidence: _Evidence) -> tuple[str, Sequence[_Step]]:
    if evidence.world_size <= 1:
        return "alone", _tell(_timed_alone(steps, evidence), lambda _: 0.0)
    if evidence.has("ddp") or evidence.wrapped_by_ddp:
        return "ddp", _tell_ddp(steps, evidence)
    if evidence.has("wait"):
        exposed = _tell(steps, lambda worker: evidence.exposed_us("device", worker), evidence.local_us)
        if not exposed:
            raise UnknownError(f"{_why_untimed(evidence)}; {_TRACE_TELLS}")
        return "device", exposed
    if evidence.device == "cpu":
        exposed = _tell(steps, lambda worker: evidence.exposed_us("host", worker), evidence.local_us)
        if not exposed:
            raise UnknownError("no worker measured its time blocked in collectives")
        return "host", exposed
    if evidence.device == "cuda":
        raise UnknownError(f"the host's clock does not show how long a GPU waits; {_TRACE_TELLS}")
    raise UnknownError("it is unknown whether the workers train on CPUs or GPUs")


def _why_untimed(evidence: _Evidence) -> str:
    waits = [records.wait for records in evidence.records.values() if records.wait is not None]
    if dropped := [wait for wait in waits if wait.dropped]:
        most = max(dropped, key=lambda wait: wait.dropped)
        return (
            f"step {most.step} of rank {most.rank} had more waits than multinode can time: {most.calls} of its "
            f"{most.of_calls} collectives were timed"
        )
    untimed = [wait for wait in waits if wait.calls < wait.of_calls]
    if not untimed:
        return "some records of its steps are lost"
    most = max(untimed, key=lambda wait: wait.of_calls - wait.calls)
    return (
        f"only {most.calls} of rank {most.rank}'s {most.of_calls} collectives in step {most.step} were timed; the job "
        f"waits for the others outside Python, or in another step"
    )


def _timed_alone(steps: Sequence[_Step], evidence: _Evidence) -> Sequence[_Step]:
    """Steps with DDP's counters, which alone show how long a GPU computes; all steps if none has them."""
    if evidence.device == "cpu":
        return steps
    counted = [_counted_step(step, evidence) for step in steps]
    return [step for step in counted if all(worker.ddp is not None for worker in step.values())] or steps


def _tell_ddp(steps: Sequence[_Step], evidence: _Evidence) -> Sequence[_Step]:
    if not evidence.has("ddp"):
        raise UnknownError(f"DDP's counters were not recorded, and nothing else times its reducer; {_TRACE_TELLS}")
    counted = [_counted_step(step, evidence) for step in steps]
    exposed = _tell(
        counted, lambda worker: evidence.exposed_us("ddp", worker) if worker.ddp else None, evidence.local_us
    )
    if exposed:
        return exposed
    if _tell(counted, lambda worker: worker.ddp.exposed_us if worker.ddp is not None else None):
        raise UnknownError(f"too few collectives other than DDP's were timed; {_TRACE_TELLS}")
    raise UnknownError(f"no measured step has plausible DDP counters of all workers; {_TRACE_TELLS}")


def _tell(
    steps: Iterable[_Step],
    exposed: Callable[[WorkerStep], float | None],
    local: Callable[[WorkerStep], float] = lambda _: 0.0,
) -> list[_Step]:
    rows = []
    for step in steps:
        values = {rank: exposed(worker) for rank, worker in step.items()}
        measured = {rank: value for rank, value in values.items() if value is not None}
        if all(
            rank in measured and measured[rank] <= _CREDIBLE_EXCESS * worker.step_us for rank, worker in step.items()
        ):
            rows.append(
                {
                    rank: msgspec.structs.replace(
                        worker, exposed_us=min(measured[rank], worker.step_us), local_us=local(worker)
                    )
                    for rank, worker in step.items()
                }
            )
    return rows


def _counted_step(step: _Step, evidence: _Evidence) -> _Step:
    return {rank: _counted(worker, evidence) for rank, worker in step.items()}


def _counted(worker: WorkerStep, evidence: _Evidence) -> WorkerStep:
    records = evidence.records[worker.record.rank, worker.record.step]
    beside_us = records.beside_us(host_waits=evidence.device == "cpu")
    return msgspec.structs.replace(worker, ddp=_counters(worker, evidence), beside_us=beside_us)


def _counters(worker: WorkerStep, evidence: _Evidence) -> DdpTimes | None:
    backwards = evidence.records[worker.record.rank, worker.record.step].ddp
    if not backwards:
        return None
    times = DdpTimes(
        iterations=len(backwards),
        compute_us=sum(backward.forward_us + backward.backward_us for backward in backwards),
        comm_us=sum(backward.comm_us for backward in backwards),
        exposed_us=sum(max(0.0, backward.comm_us - backward.overlap_us) for backward in backwards),
        host_free=all(backward.iteration > _WAITED_FOR and not backward.awaited for backward in backwards),
    )
    return times if max(times.compute_us, times.comm_us) <= _CREDIBLE_EXCESS * worker.step_us else None


def _about_counters(evidence: _Evidence, source: str | Unknown, steps: Sequence[_Step]) -> str:
    """That DDP's counters are only of iterations in which reading them made the host wait for the GPU."""
    if evidence.device == "cpu" or source not in {"ddp", "alone"}:
        return ""
    read = [
        backward.iteration
        for step in steps
        for worker in step.values()
        if worker.ddp is not None
        for backward in evidence.records[worker.record.rank, worker.record.step].ddp
    ]
    if not read or max(read) > _WAITED_FOR:
        return ""
    return f"; all of them among DDP's first {_WAITED_FOR} iterations, in which torch makes the host wait for the GPU"


def _rule(observed: Observed, rare: int, measured: int) -> str:
    counted = len(observed.counted)
    rule = f"{measured} of the {counted} measured steps" if measured < counted else f"the {counted} measured steps"
    if rare:
        rule += f" ({rare} took over {_LONG} times the median and {'is' if rare == 1 else 'are'} excluded)"
    return rule
