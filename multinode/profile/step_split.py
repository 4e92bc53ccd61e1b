"""The split of a step's time, per worker and for all. Pure; it judges nobody.

`exposure` gives exposed communication, and the steps in which it is known.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import msgspec

from multinode.figures.figure import Figure
from multinode.profile.exposure import Exposure, WorkerStep
from multinode.stats.estimate import known_mean
from multinode.stats.unknown import UNMEASURED, Unknown, found, known, or_none, reason_of

# Of the host's time for both passes the GPU's, where it follows the host kernel by kernel.
_FOLLOWS = 0.85
_SOURCES = {
    "ddp": "Communication is exposed if DDP's counters show that the backward pass did not overlap it",
    "device": "Communication counts as exposed while the GPU's compute stream waits for it, as measured with CUDA "
    "events",
    "host": "Communication counts as exposed while the worker is blocked in it",
}


class WorkerSplit(msgspec.Struct, frozen=True, kw_only=True, tag_field="is", tag="split"):
    """One worker's step in ms: means over the same steps, so the parts add up to the step."""

    rank: int  # global rank
    step_ms: float
    compute_ms: float | Unknown = UNMEASURED  # forward and backward computation
    exposed_ms: float | Unknown = UNMEASURED  # exposed communication without the wait for stragglers
    # wait for slower workers: its exposed communication minus the minimum of all workers in that step
    wait_ms: float | Unknown = UNMEASURED
    # waiting for batches; like `optimizer_ms` of a GPU, host time in which the GPU neither computed nor communicated,
    # hence an upper bound
    data_ms: float | Unknown = UNMEASURED
    optimizer_ms: float | Unknown = UNMEASURED
    host_ms: float | Unknown = UNMEASURED  # the rest
    # of `exposed_ms`, in groups of workers inside a node, of several nodes; None if exposed communication is unknown
    local_ms: float | None = None
    overlap: float | Unknown = UNMEASURED  # share of the communication hidden by computation
    # on a CPU, wait for a core during compute, optimizer and host; the share in the backward pass, which also waits for
    # communication, is taken from outside of it. None if unknown.
    core_wait_ms: float | None = None

    @property
    def exposed_share(self) -> float:
        """Exposed communication over the step.

        Raises:
            UnknownError: it is unknown.
        """
        return known(self.exposed_ms) / self.step_ms


class Passes(msgspec.Struct, frozen=True, kw_only=True):
    """Forward and backward pass of a step on the host and on the GPU, in ms: means over workers and steps."""

    host_ms: float  # to launch them, and to wait in them
    gpu_ms: float  # from their first to their last kernel, by DDP's counters

    @property
    def host_sets_pace(self) -> bool:
        """Whether the GPU is done no later than the host, so that it has waited for its kernels."""
        return self.host_ms >= _FOLLOWS * self.gpu_ms


# From this share of the measured steps on, those that are missing change no figure.
_NEARLY_ALL = 0.9


class KnownSteps(msgspec.Struct, frozen=True, kw_only=True):
    """Steps in which exposed communication is known."""

    known: int = 0
    measured: int = 0  # of so many

    def __add__(self, other: KnownSteps) -> KnownSteps:
        return KnownSteps(known=self.known + other.known, measured=self.measured + other.measured)

    @property
    def words(self) -> str:
        """`from 4 of 10 measured steps`; empty if it is nearly all of them."""
        is_part = 0 < self.known < _NEARLY_ALL * self.measured
        return f"from {self.known} of {self.measured} measured steps" if is_part else ""


class StepSplit(msgspec.Struct, frozen=True, kw_only=True):
    """The split of all workers."""

    # `ddp` (DDP's counters), `device` (waits of the compute stream), `host` (blocked in collectives), `alone` (one
    # worker), or None without one, as exposed communication is unknown
    source: str | None = None
    device: str | None = None  # of all workers, `cpu` or `cuda`; None if unknown or mixed
    mean: WorkerSplit | Unknown = UNMEASURED  # over the workers, `rank` -1
    workers: tuple[WorkerSplit, ...] = ()  # by rank
    comm_ms: float | Unknown = UNMEASURED  # span of communication per step, hidden or not, minimum of all workers
    # minimum over steps and workers of calls other than DDP's reducer; None if only the sum is known
    beside_ms: float | None = None
    # of the steps that the host began when the GPU had nothing left to do, and in which torch did not make it wait;
    # None if there are none
    passes: Passes | None = None
    rule: str = ""  # the method, in words
    steps: KnownSteps = KnownSteps()  # that these means are of

    @property
    def exposed_ms(self) -> float | Unknown:
        """Exposed communication of the mean step."""
        return found(lambda: known(known(self.mean).exposed_ms))


# Parts of a step by WorkerSplit's names, in display order.
_MEAN = "averaged over the workers"
PARTS: tuple[Figure[float], ...] = (
    Figure("compute_ms", "compute", "ms", "ms", f"time of the forward and backward passes per step, {_MEAN}"),
    Figure("exposed_ms", "exposed communication", "ms", "ms", f"exposed communication per step, {_MEAN}"),
    Figure(
        "wait_ms",
        "straggler wait",
        "ms",
        "ms",
        f"time per step spent waiting for stragglers, {_MEAN}",
        "waiting for slower workers",
    ),
    Figure("data_ms", "data", "ms", "ms", f"time per step spent waiting for batches, {_MEAN}", "waiting for data"),
    Figure("optimizer_ms", "optimizer", "ms", "ms", f"time of the optimizer per step, {_MEAN}"),
    Figure("host_ms", "host", "ms", "ms", f"remaining time per step, {_MEAN}", "other host time"),
)
PART_NAMES = tuple(part.name for part in PARTS)


INSIDE = "  of it inside a node"
"""Title of `local_ms`."""

# Figures that lie in others.
_BESIDE_PARTS = ("core_wait_ms", "local_ms")


def transfers_us(exposure: Exposure) -> list[float | None]:
    """Minimum wait of all workers in each step, in microseconds; None if one is unknown."""
    return [_transfer(step) for step in exposure.steps]


def split_steps(exposure: Exposure) -> StepSplit:
    """Split the steps with known exposure; per step, the minimum wait of all workers is transfer."""
    if not exposure.steps:
        lacking = Unknown(reason_of(exposure.source))
        return StepSplit(mean=lacking, comm_ms=lacking)
    transfers = transfers_us(exposure)
    workers = tuple(_split_worker(exposure, transfers, rank) for rank in exposure.steps[0])
    mean = _mean(exposure, workers)
    return StepSplit(
        source=or_none(exposure.source),
        device=exposure.device,
        mean=mean,
        workers=workers,
        comm_ms=_comm_ms(exposure),
        beside_ms=_beside_ms(exposure),
        passes=_passes(exposure),
        rule=_rule(exposure, mean),
        steps=KnownSteps(known=len(exposure.steps), measured=exposure.measured),
    )


def _split_worker(exposure: Exposure, transfers: Sequence[float | None], rank: int) -> WorkerSplit:
    steps = [step[rank] for step in exposure.steps]
    seen = {phase for worker in steps for phase in worker.record.phases_us or {}}
    parts = [_parts(worker, transfer, exposure, seen) for worker, transfer in zip(steps, transfers, strict=True)]
    return WorkerSplit(
        rank=rank,
        step_ms=statistics.fmean(worker.step_us for worker in steps) / 1000,
        overlap=_overlap(steps, exposure),
        **_part_figures(exposure, lambda name: _mean_ms(part[name] for part in parts)),
    )


def _parts(
    worker: WorkerStep, transfer: float | None, exposure: Exposure, seen: Collection[str]
) -> dict[str, float | None]:
    """One step of one worker in microseconds, by part.

    Each part is limited to the rest of the step, so they always add up; host time spent on a batch while the GPU
    computed counts as computing.
    """
    left = worker.step_us - (worker.exposed_us or 0.0)
    parts: dict[str, float | None] = {
        "exposed_ms": transfer,
        "wait_ms": None if transfer is None or worker.exposed_us is None else worker.exposed_us - transfer,
        "local_ms": None if transfer is None else min(worker.local_us, transfer),
    }
    wanted = {
        "compute_ms": _compute(worker, exposure, seen),
        "data_ms": _phase(worker, "data") if "data" in seen else None,
        "optimizer_ms": _phase(worker, "optimizer") if "optimizer" in seen else None,
    }
    for name, time_us in wanted.items():
        parts[name] = None if time_us is None else min(time_us, left)
        left -= parts[name] or 0.0
    parts["host_ms"] = None if None in (parts["exposed_ms"], parts["compute_ms"]) else left
    parts["core_wait_ms"] = _core_wait(worker, parts) if exposure.device == "cpu" else None
    return parts


def _core_wait(worker: WorkerStep, parts: dict[str, float | None]) -> float | None:
    waits, compute, host = worker.record.core_wait_us, parts["compute_ms"], parts["host_ms"]
    if waits is None or compute is None or host is None:
        return None
    optimizer = parts["optimizer_ms"] or 0.0
    outside = _phase(worker, "forward") + optimizer + host
    waited = sum(waits.get(name, 0.0) for name in ("forward", "optimizer", "host"))
    return min(1.0, waited / outside) * (compute + optimizer + host) if outside > 0 else None


def _transfer(step: dict[int, WorkerStep]) -> float | None:
    exposed = [worker.exposed_us for worker in step.values() if worker.exposed_us is not None]
    return min(exposed) if len(exposed) == len(step) else None


def _compute(worker: WorkerStep, exposure: Exposure, seen: Collection[str]) -> float | None:
    if isinstance(exposure.source, Unknown):
        return None
    if exposure.device == "cpu" and {"forward", "backward"} <= set(seen):
        phases = _phase(worker, "forward") + _phase(worker, "backward")
        # DDP waits for its last bucket inside the backward pass; waits of Python calls are not in these phases.
        return max(0.0, phases - (worker.ddp.exposed_us if worker.ddp is not None else 0.0))
    micro_steps = worker.record.micro_steps or exposure.accumulation.get(worker.record.rank)
    if worker.ddp is None or not micro_steps:
        return None
    # The counters cover reduced micro-batches, usually the last one: all of a step are about as long.
    return worker.ddp.compute_us * max(1.0, micro_steps / worker.ddp.iterations)


def _passes(exposure: Exposure) -> Passes | None:
    if exposure.device == "cpu":
        return None
    both = [
        (_phase(worker, "forward") + _phase(worker, "backward"), gpu_us)
        for step in exposure.steps
        for worker in step.values()
        if worker.ddp is not None
        and worker.ddp.host_free
        and {"forward", "backward"} <= set(worker.record.phases_us or {})
        if (gpu_us := _compute(worker, exposure, ()))
    ]
    if not both:
        return None
    host_us, gpu_us = (statistics.fmean(each) for each in zip(*both, strict=True))
    return Passes(host_ms=host_us / 1000, gpu_ms=gpu_us / 1000)


def _phase(worker: WorkerStep, phase: str) -> float:
    return (worker.record.phases_us or {}).get(phase, 0.0)


def _overlap(steps: Iterable[WorkerStep], exposure: Exposure) -> float | Unknown:
    counters = [worker.ddp for worker in steps if worker.ddp is not None]
    comm_us = math.fsum(ddp.comm_us for ddp in counters)
    if exposure.source != "ddp" or not comm_us:
        return Unknown(ALONE if exposure.source == "alone" else _ONLY_DDP)
    return 1 - math.fsum(ddp.exposed_us for ddp in counters) / comm_us


def _mean_ms(times_us: Iterable[float | None]) -> float | None:
    mean_us = known_mean(times_us)
    return None if mean_us is None else mean_us / 1000


def _mean(exposure: Exposure, workers: Sequence[WorkerSplit]) -> WorkerSplit:
    everything = [worker for step in exposure.steps for worker in step.values()]
    return WorkerSplit(
        rank=-1,
        step_ms=statistics.fmean(worker.step_ms for worker in workers),
        overlap=_overlap(everything, exposure),
        **_part_figures(exposure, lambda name: known_mean(or_none(getattr(worker, name)) for worker in workers)),
    )


def _comm_ms(exposure: Exposure) -> float | Unknown:
    if exposure.source == "alone":
        return 0.0
    if exposure.source != "ddp":
        return exposure.source if isinstance(exposure.source, Unknown) else Unknown(_ONLY_DDP)
    spans = [min(_hidden(worker) + (worker.exposed_us or 0.0) for worker in step.values()) for step in exposure.steps]
    return statistics.fmean(spans) / 1000


def _beside_ms(exposure: Exposure) -> float | None:
    if exposure.source != "ddp":
        return None
    return min(worker.beside_us or 0.0 for step in exposure.steps for worker in step.values()) / 1000


def _hidden(worker: WorkerStep) -> float:
    return worker.ddp.comm_us - worker.ddp.exposed_us if worker.ddp is not None else 0.0


def _part_figures(exposure: Exposure, mean_ms: Callable[[str], float | None]) -> dict[str, Any]:
    """The mean of each part, by name; of one that is unknown the reason."""
    reason = reason_of(exposure.source)
    no_compute = reason or _why_no_compute(exposure)
    reasons = {
        "exposed_ms": reason,
        "wait_ms": reason,
        "compute_ms": no_compute,
        "data_ms": "no wait for a batch was recorded (not torch's data loader); such waits count as host time",
        "optimizer_ms": "no optimizer step was recorded; its time counts as host time",
        "host_ms": f"host time cannot be separated from compute, which is unknown: {no_compute}",
    }
    means_ms = {name: mean_ms(name) for name in (*PART_NAMES, *_BESIDE_PARTS)}
    return {
        name: Unknown(reasons[name]) if part_ms is None and name in reasons else part_ms
        for name, part_ms in means_ms.items()
    }


ALONE = "one worker does not communicate"
_ONLY_DDP = "without a trace (--trace), overlapped communication is measured only for DDP"


def _why_no_compute(exposure: Exposure) -> str:
    if exposure.device == "cpu":
        return "no forward or backward pass of this training was recorded"
    return "on a GPU, only DDP's counters measure compute in every step; a trace (--trace) does so in the traced steps"


def _rule(exposure: Exposure, mean: WorkerSplit) -> str:
    rule = f"Means over {exposure.rule}."
    if (by := _SOURCES.get(or_none(exposure.source) or "")) is not None:
        rule += (
            f" {by}. In each step, the minimum over all workers counts as transfer, and the rest as waiting for "
            "slower workers."
        )
    if exposure.device != "cpu":
        rule += " Data and optimizer times are measured on the host"
        has_compute = not isinstance(mean.compute_ms, Unknown)
        rule += (
            " and capped at the time outside compute and communication."
            if has_compute
            else "; the GPU may compute at the same time."
        )
    return rule
