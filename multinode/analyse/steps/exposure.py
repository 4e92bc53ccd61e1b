"""Exposure: how long each worker waited in communication that no computation hid, in each step that counts. Pure.

Chooses the best source there is, and the steps that can be told; what the waits mean is `step_split`'s and
`stragglers`' business.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import msgspec

from multinode.analyse.run.observed import Observed
from multinode.analyse.traffic.calls import last_models
from multinode.core.run.samples import DdpSample, DeviceWaitSample, StepSample
from multinode.core.text.plausible import plausible_us

__all__ = ["DdpTimes", "Exposure", "WorkerStep", "find_exposure"]

# A checkpoint now and then is not what a step spends its time on. What comes more often than in one step of twenty is
# the training's own rhythm (a loader that refills its queue), and stays.
_LONG = 3
_RARE = 20
# Counters and step times are taken at different moments: only what exceeds the step by more than this cannot be true.
_CREDIBLE_EXCESS = 1.1
# Collectives on streams of their own are not timed. Beyond a tenth of them, the rest does not speak for all.
_LEAST_TIMED = 0.9

_TRACE_TELLS = "a trace tells (--trace)"


class DdpTimes(msgspec.Struct, frozen=True, kw_only=True):
    """What DDP's counters say of one step of one worker, its iterations and DDP modules added up.

    Attributes:
        iterations: of the reducer; one, unless micro-batches are reduced one by one or there are several modules.
        compute_us: forward pass and backward computation.
        comm_us: from the first bucket to the last; `exposed_us` what of it the backward computation did not overlap.
    """

    iterations: int
    compute_us: float
    comm_us: float
    exposed_us: float


class WorkerStep(msgspec.Struct, frozen=True, kw_only=True):
    """One step of one worker.

    Attributes:
        exposed_us: how long the worker waited in communication that nothing hid, at most the step; None is unknown.
        ddp: DDP's counters of it, where the source is `ddp`.
    """

    record: StepSample
    step_us: float
    exposed_us: float | None = None
    ddp: DdpTimes | None = None


class Exposure(msgspec.Struct, frozen=True, kw_only=True):
    """The steps that can be told.

    Attributes:
        source: `ddp` (DDP's counters), `device` (waits of the computing stream), `host` (blocked in collectives),
            `alone` (one worker: there is nothing to exchange), or None: not known.
        steps: by rank, all workers in each, ascending; those that the source does not tell are left out.
        device: what all workers train on, `cpu` or `cuda`; None is unknown, or they differ.
        accumulation: micro-batches a step by rank, where the framework says so.
        reason: why there is no source.
        rule: which steps those are, in words.
    """

    source: str | None = None
    steps: tuple[dict[int, WorkerStep], ...] = ()
    device: str | None = None
    accumulation: dict[int, int] = {}
    reason: str = ""
    rule: str = ""


_Told = TypeVar("_Told", DdpSample, DeviceWaitSample)
_Step = dict[int, WorkerStep]


class _Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """What was recorded beside the steps, by (rank, step)."""

    world_size: int
    wrapped_by_ddp: bool
    device: str | None
    ddp: dict[tuple[int, int], list[DdpSample]]
    waits: dict[tuple[int, int], list[DeviceWaitSample]]


class _Answer(msgspec.Struct, frozen=True, kw_only=True):
    source: str | None = None
    steps: tuple[_Step, ...] = ()
    reason: str = ""


def find_exposure(observed: Observed) -> Exposure:
    """Choose the best source, and the steps that count, that all workers recorded, and that it tells."""
    whole = [step for number in observed.counted if (step := _whole_step(observed, number)) is not None]
    if not whole:
        return Exposure(reason="no step that counts was recorded by all workers")
    usual = _without_rare(whole)
    models = last_models(observed)
    devices = {model.device for model in models.values()}
    evidence = _Evidence(
        world_size=observed.world_size,
        wrapped_by_ddp=any(model.wrapper == "ddp" for model in models.values()),
        device=devices.pop() if len(devices) == 1 else None,
        ddp=_by_step(observed, DdpSample),
        waits=_by_step(observed, DeviceWaitSample),
    )
    answer = next(found for tell in _SOURCES if (found := tell(usual, evidence)) is not None)
    steps = answer.steps or tuple(usual)
    return Exposure(
        source=answer.source,
        steps=steps,
        device=evidence.device,
        accumulation={rank: model.accumulation for rank, model in models.items() if model.accumulation},
        reason=answer.reason,
        rule=_rule(observed, len(whole) - len(usual), len(steps)),
    )


def _whole_step(observed: Observed, number: int) -> _Step | None:
    """The step of all workers; None where a record or its time is missing."""
    records = observed.steps[number]
    times = {rank: plausible_us(record.step_time_us) for rank, record in records.items()}
    whole = {rank: WorkerStep(record=records[rank], step_us=time_us) for rank, time_us in times.items() if time_us}
    return {rank: whole[rank] for rank in sorted(whole)} if len(whole) == observed.world_size else None


def _without_rare(steps: Sequence[_Step]) -> list[_Step]:
    times = [statistics.median(worker.step_us for worker in step.values()) for step in steps]
    limit = _LONG * statistics.median(times)
    usual = [step for step, time_us in zip(steps, times, strict=True) if time_us <= limit]
    return usual if len(steps) - len(usual) <= math.ceil(len(steps) / _RARE) else list(steps)


def _by_step(observed: Observed, kind: type[_Told]) -> dict[tuple[int, int], list[_Told]]:
    """A node is believed about its own workers alone."""
    found: dict[tuple[int, int], list[_Told]] = {}
    for node in observed.nodes:
        for told in node.of(kind):
            if told.rank in node.ranks:
                found.setdefault((told.rank, told.step), []).append(told)
    return found


def _alone(steps: Sequence[_Step], evidence: _Evidence) -> _Answer | None:
    if evidence.world_size > 1:
        return None
    return _tell("alone", steps, lambda _: 0.0)


def _ddp(steps: Sequence[_Step], evidence: _Evidence) -> _Answer | None:
    """DDP's own, and what passed in calls beside it: DDP's reducer is in C++, and no call of it is timed by us."""
    if not (evidence.ddp or evidence.wrapped_by_ddp):
        return None
    if not evidence.ddp:
        return _Answer(reason=f"DDP's counters were not recorded, and nothing else sees its reducer; {_TRACE_TELLS}")
    counted = [
        {rank: msgspec.structs.replace(worker, ddp=_counters(worker, evidence)) for rank, worker in step.items()}
        for step in steps
    ]
    answer = _tell("ddp", counted, lambda worker: _ddp_exposed(worker, evidence))
    if answer is not None:
        return answer
    if _tell("ddp", counted, lambda worker: worker.ddp.exposed_us if worker.ddp is not None else None) is not None:
        return _Answer(reason=f"too few of the collectives beside DDP's own were timed; {_TRACE_TELLS}")
    return _Answer(
        reason=f"no step that counts has DDP's counters of all workers, with figures that can be true; {_TRACE_TELLS}"
    )


def _device(steps: Sequence[_Step], evidence: _Evidence) -> _Answer | None:
    if not evidence.waits:
        return None
    answer = _tell("device", steps, lambda worker: _waited(worker, evidence))
    return answer or _Answer(
        reason="too few of its collectives were timed: they run on streams of their own, which computation waits for "
        f"unseen, or records are lost; {_TRACE_TELLS}"
    )


def _host(steps: Sequence[_Step], evidence: _Evidence) -> _Answer | None:
    if evidence.device != "cpu":
        return None
    return _tell("host", steps, _blocked)


def _unknown(_: Sequence[_Step], evidence: _Evidence) -> _Answer:
    if evidence.device == "cuda":
        return _Answer(reason=f"the host's clock does not tell how long a GPU waits; {_TRACE_TELLS}")
    if evidence.device == "cpu":
        return _Answer(reason="no worker timed how long it was blocked in collectives")
    return _Answer(reason="the workers do not say whether they train on CPUs or GPUs")


_SOURCES: tuple[Callable[[Sequence[_Step], _Evidence], _Answer | None], ...] = (_alone, _ddp, _device, _host, _unknown)


def _tell(source: str, steps: Iterable[_Step], exposed: Callable[[WorkerStep], float | None]) -> _Answer | None:
    """The steps in which every worker's exposure is told and can be true; None where there is no such step."""
    told = []
    for step in steps:
        values = {rank: exposed(worker) for rank, worker in step.items()}
        known = {rank: value for rank, value in values.items() if value is not None}
        if all(rank in known and known[rank] <= _CREDIBLE_EXCESS * worker.step_us for rank, worker in step.items()):
            told.append(
                {
                    rank: msgspec.structs.replace(worker, exposed_us=min(known[rank], worker.step_us))
                    for rank, worker in step.items()
                }
            )
    return _Answer(source=source, steps=tuple(told)) if told else None


def _counters(worker: WorkerStep, evidence: _Evidence) -> DdpTimes | None:
    """What the counters say; None where they are missing, or one of them cannot be true."""
    told = evidence.ddp.get((worker.record.rank, worker.record.step), [])
    figures = [figure for one in told for figure in (one.forward_us, one.backward_us, one.comm_us, one.overlap_us)]
    if not told or any(plausible_us(figure) is None for figure in figures):
        return None
    times = DdpTimes(
        iterations=len(told),
        compute_us=sum(one.forward_us + one.backward_us for one in told),
        comm_us=sum(one.comm_us for one in told),
        exposed_us=sum(max(0.0, one.comm_us - one.overlap_us) for one in told),
    )
    return times if max(times.compute_us, times.comm_us) <= _CREDIBLE_EXCESS * worker.step_us else None


def _ddp_exposed(worker: WorkerStep, evidence: _Evidence) -> float | None:
    if worker.ddp is None:
        return None
    # Host time blocked in a call is exposed on a CPU alone; on a GPU events tell it.
    if evidence.device == "cpu":
        return worker.ddp.exposed_us + (_blocked(worker) or 0.0)
    if (worker.record.rank, worker.record.step) not in evidence.waits:
        return worker.ddp.exposed_us
    beside = _waited(worker, evidence)
    return None if beside is None else worker.ddp.exposed_us + beside


def _waited(worker: WorkerStep, evidence: _Evidence) -> float | None:
    for wait in evidence.waits.get((worker.record.rank, worker.record.step), []):
        return plausible_us(wait.wait_us) if wait.calls >= _LEAST_TIMED * wait.of_calls else None
    return None


def _blocked(worker: WorkerStep) -> float | None:
    phases = worker.record.phases_us
    return None if phases is None else plausible_us(phases.get("comm", 0.0))


def _rule(observed: Observed, rare: int, told: int) -> str:
    counted = len(observed.counted)
    rule = f"{told} of the {counted} steps that count" if told < counted else f"the {counted} steps that count"
    if rare:
        rule += f" ({rare} took over {_LONG} times the median and {'is' if rare == 1 else 'are'} left out)"
    return rule
