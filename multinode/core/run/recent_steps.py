"""RecentSteps: the last few steps of one worker, as they come. What the live table is reckoned from; not a summary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import msgspec

from multinode.core.run.samples import DdpSample, DeviceWaitSample, StepSample
from multinode.core.text.plausible import plausible_us

__all__ = ["RECENT_STEPS", "RecentSteps"]

# Recent enough to follow, steady enough to read.
RECENT_STEPS = 10
# Counters of a step may come some steps after it.
_KEPT_STEPS = 3 * RECENT_STEPS

_Value = TypeVar("_Value")


class RecentSteps(msgspec.Struct, frozen=True, kw_only=True):
    """By the number of the step, ascending; a step that something does not tell of is not in it.

    Attributes:
        last_step: the last one that it finished; None is none yet.
        tokens: padded tokens of this worker.
        ddp_us: exposed communication by DDP's counters, its iterations and DDP modules added up.
        device_us: likewise by the waits of a GPU's computing stream; None where not all of its calls were timed.
        blocked_us: likewise by the time in which the host was blocked in collectives.
    """

    last_step: int | None = None
    times_us: dict[int, float] = {}
    tokens: dict[int, int] = {}
    ddp_us: dict[int, float] = {}
    device_us: dict[int, float | None] = {}
    blocked_us: dict[int, float] = {}

    def with_step(self, sample: StepSample) -> RecentSteps:
        """After one more step; a number that does not grow is of a worker that was started again, and all is new."""
        before = self if self.last_step is None or sample.step > self.last_step else RecentSteps()
        blocked_us = plausible_us((sample.phases_us or {}).get("comm"))
        return msgspec.structs.replace(
            before,
            last_step=sample.step,
            times_us=_with(before.times_us, sample.step, plausible_us(sample.step_time_us)),
            tokens=_with(before.tokens, sample.step, sample.tokens),
            blocked_us=_with(before.blocked_us, sample.step, blocked_us),
        )

    def with_ddp(self, sample: DdpSample) -> RecentSteps:
        """With DDP's counters of an iteration, of which a step may have several."""
        comm_us, overlap_us = plausible_us(sample.comm_us), plausible_us(sample.overlap_us)
        if comm_us is None or overlap_us is None:
            return self
        exposed_us = self.ddp_us.get(sample.step, 0.0) + max(0.0, comm_us - overlap_us)
        return msgspec.structs.replace(self, ddp_us=_with(self.ddp_us, sample.step, exposed_us))

    def with_device_wait(self, sample: DeviceWaitSample) -> RecentSteps:
        """With the waits of a step, which tell something if they are all of them."""
        wait_us = plausible_us(sample.wait_us) if sample.calls == sample.of_calls else None
        return msgspec.structs.replace(self, device_us=_newest({**self.device_us, sample.step: wait_us}))

    def exposed_share(self, *, host_waits: bool) -> float | None:
        """Exposed communication over step time, waiting for stragglers included; None where nothing tells.

        Args:
            host_waits: whether the host waits in a collective for its end, as it does without a GPU.
        """
        waits_us = {step: wait_us for step, wait_us in self.device_us.items() if wait_us is not None}
        for exposed_us in (
            self._ddp_and_beside(host_waits=host_waits),
            waits_us,
            self.blocked_us if host_waits else {},
        ):
            both = [step for step in exposed_us if step in self.times_us][-RECENT_STEPS:]
            took_us = sum(self.times_us[step] for step in both)
            if took_us > 0:
                return min(1.0, sum(exposed_us[step] for step in both) / took_us)
        return None

    def _ddp_and_beside(self, *, host_waits: bool) -> dict[int, float]:
        """By DDP's counters, and what passed in calls beside it, which they do not count."""
        beside_us: Mapping[int, float | None] = self.blocked_us if host_waits else self.device_us
        return {
            step: exposed_us + also_us
            for step, exposed_us in self.ddp_us.items()
            if (also_us := beside_us.get(step, 0.0)) is not None
        }

    @property
    def tokens_and_time(self) -> tuple[int, float]:
        """Tokens of the recent steps that tell them, and the microseconds that these took."""
        both = [step for step in self.tokens if step in self.times_us][-RECENT_STEPS:]
        return sum(self.tokens[step] for step in both), sum(self.times_us[step] for step in both)


def _with(known: Mapping[int, _Value], step: int, value: _Value | None) -> dict[int, _Value]:
    return dict(known) if value is None else _newest({**known, step: value})


def _newest(known: Mapping[int, _Value]) -> dict[int, _Value]:
    return {number: known[number] for number in sorted(known)[-_KEPT_STEPS:]}
