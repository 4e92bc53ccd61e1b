"""Cost model: a Scenario, what an optimizer step costs a worker in it, and the time of the step that follows. Pure.

Owns the formula. What a call takes on a network is `network_model`'s, where the costs come from `calibration`'s.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from multinode.analyse.collectives.traffic import Layout, Strategy
from multinode.analyse.job.step_calls import StepCall
from multinode.analyse.prediction.network_model import CommTimes, Link

__all__ = ["Scenario", "StepCosts", "StepParts", "bucketed_overlap", "late_ms", "step_parts"]


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked for.

    Attributes:
        per_device_batch: samples of a worker's micro-batch, above zero.
        accumulation: micro-batches a step.
        gradient_factor: what the bytes of gradients are multiplied with: 0.5 is a hook that sends fp32 as half.
        bucket_bytes: the most that a reduction carries at once; None as calibrated.
        overlap: whether computation may hide communication at all.
    """

    link: Link
    layout: Layout
    per_device_batch: float
    accumulation: int = 1
    strategy: Strategy = Strategy.DDP
    gradient_factor: float = 1.0
    bucket_bytes: float | None = None
    overlap: bool = True

    @property
    def samples(self) -> float:
        """Of one optimizer step, of all workers."""
        return self.layout.workers * self.per_device_batch * self.accumulation


# A backward pass computes two gradients where the forward pass computes one product.
_BACKWARD_SHARE = 2 / 3


class StepCosts(msgspec.Struct, frozen=True, kw_only=True):
    """What a step costs a worker without its communication, in ms.

    Attributes:
        compute_ms: t_f + t_b, forward and backward pass of one micro-batch.
        optimizer_ms: t_opt, once a step.
        host_ms: t_host, once a step.
        data_ms: waiting for the batch of one micro-batch.
        hideable_ms: t_hide, computation of a micro-batch beside which communication may run; None takes two thirds of
            `compute_ms`, the backward pass.
        overlap: rho, the part of `hideable_ms` that is used; None is not known, and follows from the buckets.
        least_overlap: where rho is not known, what of it was needed to hide what was seen hidden.
        tail_ms: communication that stays exposed however fast the network is.
        lateness: of `late_ms`, the part that was seen to be exposed; 1 where nobody looked.
    """

    compute_ms: float
    optimizer_ms: float = 0.0
    host_ms: float = 0.0
    data_ms: float = 0.0
    hideable_ms: float | None = None
    overlap: float | None = None
    least_overlap: float = 0.0
    tail_ms: float = 0.0
    lateness: float = 1.0

    @property
    def t_hide_ms(self) -> float:
        """The same as `hideable_ms`, taken where it is not given."""
        return _BACKWARD_SHARE * self.compute_ms if self.hideable_ms is None else self.hideable_ms


class StepParts(msgspec.Struct, frozen=True, kw_only=True):
    """A step's time by what it is spent on, in ms.

    Attributes:
        compute_ms: of all micro-batches; likewise `data_ms`.
        optimizer_ms: of the step; likewise `host_ms`.
        comm_ms: what the calls take alone: C and what cannot be hidden.
        beyond_ms: of C, what computation had no time to hide.
        exposed_ms: x, what of it lengthens the step, tail included.
    """

    compute_ms: float
    optimizer_ms: float
    host_ms: float
    data_ms: float
    comm_ms: float
    beyond_ms: float
    exposed_ms: float

    @property
    def step_ms(self) -> float:
        """T_step."""
        return self.compute_ms + self.optimizer_ms + self.host_ms + self.data_ms + self.exposed_ms


def step_parts(costs: StepCosts, comm: CommTimes, *, accumulation: int, overlap: float, late: float = 0.0) -> StepParts:
    """T_step = K (t_f + t_b) + t_opt + t_host + x, with x = max(0, C - rho t_hide) + tail.

    What follows the optimizer counts with the tail; calls of every micro-batch have the computation of every one to
    hide beside. No more is exposed than there is.

    Args:
        costs: of the step.
        comm: of its calls.
        accumulation: K.
        overlap: rho, from 0 to 1.
        late: x is no less than that, in ms: the buckets that are full when there is no time left to hide them.
    """
    hideable = comm.step_ms + accumulation * comm.micro_batch_ms
    passes = accumulation if comm.micro_batch_ms else 1
    beyond = max(0.0, hideable - overlap * costs.t_hide_ms * passes)
    tail = min(costs.tail_ms, hideable)
    return StepParts(
        compute_ms=accumulation * costs.compute_ms,
        optimizer_ms=costs.optimizer_ms,
        host_ms=costs.host_ms,
        data_ms=accumulation * costs.data_ms,
        comm_ms=hideable + comm.after_ms,
        beyond_ms=beyond,
        exposed_ms=min(max(beyond + tail, late), hideable) + comm.after_ms,
    )


def bucketed_overlap(calls: Sequence[StepCall]) -> float:
    """Rho where nobody has measured it: reducing begins when the first bucket is full, all before that hides nothing.

    Gradients arrive evenly over the backward pass, or nearly so: the first of equal buckets is full after its share of
    it. One bucket is full at the end, and hides behind nothing.
    """
    hideable = [call for call in calls if call.hideable]
    total = sum(call.times * call.size_bytes for call in hideable)
    return 1 - hideable[0].size_bytes / total if total else 0.0


def late_ms(calls: Sequence[StepCall], comm: CommTimes, *, hide_ms: float, accumulation: int) -> float:
    """What of a step's calls is still to be sent when a backward pass ends, where each begins when its bucket is full.

    Gradients arrive as `bucketed_overlap` has it, and one call follows the other: the last bucket hides behind nothing,
    and the larger it is, the less computation helps.

    Args:
        calls: of a step, as the engine cuts them, in their order.
        comm: what they take.
        hide_ms: the backward pass of a micro-batch.
        accumulation: K.
    """
    hideable = [call for call in calls if call.hideable]
    once, each = ([call for call in hideable if call.per_micro_batch is grows] for grows in (False, True))
    return _late_ms(once, comm.step_ms, hide_ms) + accumulation * _late_ms(each, comm.micro_batch_ms, hide_ms)


def _late_ms(calls: Sequence[StepCall], comm_ms: float, hide_ms: float) -> float:
    total = sum(call.times * call.size_bytes for call in calls)
    full_ms = end_ms = 0.0
    for call in calls if total else ():
        filling_ms, sending_ms = (call.size_bytes / total * whole_ms for whole_ms in (hide_ms, comm_ms))
        # Of equal buckets the first waits longest where sending is slower than filling, else the last.
        first_ms = max(end_ms, full_ms + filling_ms) + call.times * sending_ms
        full_ms += call.times * filling_ms
        end_ms = max(first_ms, full_ms + sending_ms)
    return max(0.0, end_ms - hide_ms)
