"""Step split: where the time of a step goes, for each worker and for all of them. Pure; it judges nobody.

What was exposed, and in which steps that is known, is `exposure`'s.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Sequence

import msgspec

from multinode.profile.exposure import Exposure, WorkerStep
from multinode.stats.estimate import known_mean

_SOURCES = {
    "ddp": "communication is exposed where DDP's counters say that the backward pass did not overlap it",
    "device": "communication is exposed while the GPU's compute stream waited for it, by CUDA events",
    "host": "communication is exposed while the worker was blocked in it",
}


class WorkerSplit(msgspec.Struct, frozen=True, kw_only=True):
    """One worker's step, in ms: means over the same steps, so that the parts add up to the step, as in each step.

    Attributes:
        rank: global rank.
        compute_ms: forward and backward computation.
        exposed_ms: exposed communication, less the wait for stragglers.
        wait_ms: of its exposed communication what it waited for slower workers: its own less the least of all workers
            in that step.
        data_ms: waiting for batches; of a GPU's step likewise `optimizer_ms`: by the host's clock, as far as the GPU
            was not computing or communicating all the same, hence no more than that.
        host_ms: the rest.
        overlap: part of the communication that computation hid; None if unknown.
        core_wait_ms: of compute, optimizer and host on a CPU, what it waited for a core that others had; in the
            backward pass, which waits for communication as well, as large a part as outside of it. None if unknown.
    """

    rank: int
    step_ms: float
    compute_ms: float | None = None
    exposed_ms: float | None = None
    wait_ms: float | None = None
    data_ms: float | None = None
    optimizer_ms: float | None = None
    host_ms: float | None = None
    overlap: float | None = None
    core_wait_ms: float | None = None


class StepSplit(msgspec.Struct, frozen=True, kw_only=True):
    """The split of all workers.

    Attributes:
        source: `ddp` (DDP's counters), `device` (waits of the computing stream), `host` (blocked in collectives),
            `alone` (one worker: there is nothing to exchange), or None: what was exposed is not known.
        device: what all workers train on, `cpu` or `cuda`; None is unknown, or they differ.
        mean: the mean over the workers, `rank` -1.
        workers: by rank.
        comm_ms: span of communication per step, hidden or not, the least of all workers; None where it is not known.
        beside_ms: what calls beside DDP's reducer took of the step and the worker in which they took least;
            None where only their sum with the rest is known.
        missing: reason by name of every part that is None.
        rule: how it was told, in words, to stand beside the figures.
    """

    source: str | None = None
    device: str | None = None
    mean: WorkerSplit | None = None
    workers: tuple[WorkerSplit, ...] = ()
    comm_ms: float | None = None
    beside_ms: float | None = None
    missing: dict[str, str] = {}
    rule: str = ""


_PARTS = ("compute_ms", "exposed_ms", "wait_ms", "data_ms", "optimizer_ms", "host_ms")


def transfers_us(exposure: Exposure) -> list[float | None]:
    """Of each step what the worker waited that waited least, in microseconds; None where one does not know."""
    return [_transfer(step) for step in exposure.steps]


def split_steps(exposure: Exposure) -> StepSplit:
    """Split the steps whose exposure is known; in each, what the worker waited that waited least is transfer."""
    if not exposure.steps:
        return StepSplit(missing=dict.fromkeys((*_PARTS, "overlap", "comm_ms"), exposure.reason))
    transfers = transfers_us(exposure)
    workers = tuple(_split_worker(exposure, transfers, rank) for rank in exposure.steps[0])
    mean = _mean(exposure, workers)
    comm_ms = _comm_ms(exposure)
    return StepSplit(
        source=exposure.source,
        device=exposure.device,
        mean=mean,
        workers=workers,
        comm_ms=comm_ms,
        beside_ms=_beside_ms(exposure),
        missing=_missing(exposure, mean, comm_ms),
        rule=_rule(exposure, mean),
    )


def _split_worker(exposure: Exposure, transfers: Sequence[float | None], rank: int) -> WorkerSplit:
    steps = [step[rank] for step in exposure.steps]
    seen = {phase for worker in steps for phase in worker.record.phases_us or {}}
    parts = [_parts(worker, transfer, exposure, seen) for worker, transfer in zip(steps, transfers, strict=True)]
    return WorkerSplit(
        rank=rank,
        step_ms=statistics.fmean(worker.step_us for worker in steps) / 1000,
        overlap=_overlap(steps) if exposure.source == "ddp" else None,
        **{name: _mean_ms(part[name] for part in parts) for name in (*_PARTS, "core_wait_ms")},
    )


def _parts(
    worker: WorkerStep, transfer: float | None, exposure: Exposure, seen: Collection[str]
) -> dict[str, float | None]:
    """One step of one worker in microseconds, by the part's name.

    Each part gets at most what those before it leave of the step. So they add up whatever a node says; and what a
    GPU's host spent on a batch while the GPU computed is computing.
    """
    left = worker.step_us - (worker.exposed_us or 0.0)
    found: dict[str, float | None] = {
        "exposed_ms": transfer,
        "wait_ms": None if transfer is None or worker.exposed_us is None else worker.exposed_us - transfer,
    }
    wanted = {
        "compute_ms": _compute(worker, exposure, seen),
        "data_ms": _phase(worker, "data") if "data" in seen else None,
        "optimizer_ms": _phase(worker, "optimizer") if "optimizer" in seen else None,
    }
    for name, time_us in wanted.items():
        found[name] = None if time_us is None else min(time_us, left)
        left -= found[name] or 0.0
    found["host_ms"] = None if None in (found["exposed_ms"], found["compute_ms"]) else left
    found["core_wait_ms"] = _core_wait(worker, found) if exposure.device == "cpu" else None
    return found


def _core_wait(worker: WorkerStep, found: dict[str, float | None]) -> float | None:
    """By the part that it was of the forward pass, the optimizer and the host."""
    waits, compute, host = worker.record.core_wait_us, found["compute_ms"], found["host_ms"]
    if waits is None or compute is None or host is None:
        return None
    optimizer = found["optimizer_ms"] or 0.0
    outside = _phase(worker, "forward") + optimizer + host
    waited = sum(waits.get(name, 0.0) for name in ("forward", "optimizer", "host"))
    return min(1.0, waited / outside) * (compute + optimizer + host) if outside > 0 else None


def _transfer(step: dict[int, WorkerStep]) -> float | None:
    exposed = [worker.exposed_us for worker in step.values() if worker.exposed_us is not None]
    return min(exposed) if len(exposed) == len(step) else None


def _compute(worker: WorkerStep, exposure: Exposure, seen: Collection[str]) -> float | None:
    """Forward and backward computation; None is unknown."""
    if exposure.source is None:
        return None
    if exposure.device == "cpu" and {"forward", "backward"} <= set(seen):
        phases = _phase(worker, "forward") + _phase(worker, "backward")
        # DDP waits for its last bucket inside of the backward pass; what calls of Python waited is not in these phases.
        return max(0.0, phases - (worker.ddp.exposed_us if worker.ddp is not None else 0.0))
    micro_steps = worker.record.micro_steps or exposure.accumulation.get(worker.record.rank)
    if worker.ddp is None or not micro_steps:
        return None
    # The counters are of the micro-batches that were reduced, as a rule the last: all of a step are about as long.
    return worker.ddp.compute_us * max(1.0, micro_steps / worker.ddp.iterations)


def _phase(worker: WorkerStep, phase: str) -> float:
    return (worker.record.phases_us or {}).get(phase, 0.0)


def _overlap(steps: Iterable[WorkerStep]) -> float | None:
    """What of DDP's communication was hidden, of all steps together."""
    counters = [worker.ddp for worker in steps if worker.ddp is not None]
    comm_us = math.fsum(ddp.comm_us for ddp in counters)
    return 1 - math.fsum(ddp.exposed_us for ddp in counters) / comm_us if comm_us else None


def _mean_ms(times_us: Iterable[float | None]) -> float | None:
    mean_us = known_mean(times_us)
    return None if mean_us is None else mean_us / 1000


def _mean(exposure: Exposure, workers: Sequence[WorkerSplit]) -> WorkerSplit:
    everything = [worker for step in exposure.steps for worker in step.values()]
    return WorkerSplit(
        rank=-1,
        step_ms=statistics.fmean(worker.step_ms for worker in workers),
        overlap=_overlap(everything) if exposure.source == "ddp" else None,
        **{name: known_mean(getattr(worker, name) for worker in workers) for name in (*_PARTS, "core_wait_ms")},
    )


def _comm_ms(exposure: Exposure) -> float | None:
    if exposure.source == "alone":
        return 0.0
    if exposure.source != "ddp":
        return None
    spans = [min(_hidden(worker) + (worker.exposed_us or 0.0) for worker in step.values()) for step in exposure.steps]
    return statistics.fmean(spans) / 1000


def _beside_ms(exposure: Exposure) -> float | None:
    if exposure.source != "ddp":
        return None
    return min(worker.beside_us or 0.0 for step in exposure.steps for worker in step.values()) / 1000


def _hidden(worker: WorkerStep) -> float:
    return worker.ddp.comm_us - worker.ddp.exposed_us if worker.ddp is not None else 0.0


def _missing(exposure: Exposure, mean: WorkerSplit, comm_ms: float | None) -> dict[str, str]:
    reasons = {
        "exposed_ms": exposure.reason,
        "wait_ms": exposure.reason,
        "compute_ms": exposure.reason or _why_no_compute(exposure),
        "data_ms": "no wait for a batch was seen: another loader than torch's; it is part of the rest",
        "optimizer_ms": "no step of an optimizer was seen; it is part of the rest",
        "host_ms": f"it is the rest, and compute is unknown: {exposure.reason or _why_no_compute(exposure)}",
        "overlap": "one worker has no communication" if exposure.source == "alone" else _ONLY_DDP,
    }
    found = {name: reason for name, reason in reasons.items() if getattr(mean, name) is None}
    return found if comm_ms is not None else found | {"comm_ms": exposure.reason or _ONLY_DDP}


_ONLY_DDP = "only DDP counts overlapped communication; a trace shows it (--trace)"


def _why_no_compute(exposure: Exposure) -> str:
    if exposure.device == "cpu":
        return "no forward pass, or no backward pass, of this training was seen"
    return "without a trace, only DDP's counters and the number of micro-batches show how long a GPU computes"


def _rule(exposure: Exposure, mean: WorkerSplit) -> str:
    rule = f"means over {exposure.rule}"
    if exposure.source in _SOURCES:
        rule += (
            f"; {_SOURCES[exposure.source]}; in each step the least of all workers is transfer, the rest of each is "
            "waiting for slower workers"
        )
    if exposure.device != "cpu":
        rule += "; data and optimizer are by the host's clock, "
        known = mean.compute_ms is not None
        rule += "at most what compute and communication leave" if known else "and the GPU may compute meanwhile"
    return rule
