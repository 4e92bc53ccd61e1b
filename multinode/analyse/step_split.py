"""Step split: where the time of a step goes, for each worker and for all of them. Pure; who is to blame is not said.

Sources, best first: DDP's counters, waits of the device, host time blocked in collectives.
"""

from __future__ import annotations

import msgspec

__all__ = ["StepSplit", "WorkerSplit"]


class WorkerSplit(msgspec.Struct, frozen=True, kw_only=True):
    """One worker's step, in ms, medians over the steps that count; the parts add up to the step in each step.

    Attributes:
        rank: global rank.
        step_ms: the whole step.
        compute_ms: forward and backward computation.
        exposed_ms: communication that no computation hid, less the wait for stragglers.
        wait_ms: of its exposed communication what it waited for slower workers: its own less the least of all workers
            in that step.
        data_ms: waiting for batches.
        optimizer_ms: in the optimizer.
        host_ms: the rest.
        overlap: part of the communication that computation hid; None where that cannot be told.
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


class StepSplit(msgspec.Struct, frozen=True, kw_only=True):
    """The split of all workers.

    Attributes:
        source: `ddp` (DDP's counters), `device` (waits of the computing stream), `host` (blocked in collectives), or
            None: what was exposed is not known.
        mean: the mean over the workers, `rank` -1.
        workers: by rank.
        comm_ms: span of communication a step, hidden or not, the least of all workers; None where it cannot be told.
        missing: reason by name of every part that is None.
        rule: how it was told, in words, to stand beside the figures.
    """

    source: str | None = None
    mean: WorkerSplit | None = None
    workers: tuple[WorkerSplit, ...] = ()
    comm_ms: float | None = None
    missing: dict[str, str] = {}
    rule: str = ""
