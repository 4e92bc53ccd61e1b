"""RecentSteps: the last few steps of one worker, as they come. What the live table is reckoned from; not a summary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import msgspec

from multinode.core.profile_samples import DdpSample, DeviceWaitSample
from multinode.core.samples import StepSample

__all__ = ["RECENT_STEPS", "RecentSteps"]

# Recent enough to follow, steady enough to read.
RECENT_STEPS = 10
# Counters of a step may come some steps after it.
_KEPT_STEPS = 3 * RECENT_STEPS

_Number = TypeVar("_Number", int, float)


class RecentSteps(msgspec.Struct, frozen=True, kw_only=True):
    """By the number of the step, ascending; a step that something does not tell of is not in it.

    Attributes:
        times_us: how long it took.
        tokens: padded tokens of this worker.
        ddp_us: exposed communication by DDP's counters.
        device_us: likewise by the waits of a GPU's computing stream; of steps all of whose calls were timed.
        blocked_us: likewise by the time in which the host was blocked in collectives.
    """

    times_us: dict[int, float] = {}
    tokens: dict[int, int] = {}
    ddp_us: dict[int, float] = {}
    device_us: dict[int, float] = {}
    blocked_us: dict[int, float] = {}

    def with_step(self, sample: StepSample) -> RecentSteps:
        """After one more step."""
        blocked_us = (sample.phases_us or {}).get("comm")
        return msgspec.structs.replace(
            self,
            times_us=_with(self.times_us, sample.step, sample.step_time_us),
            tokens=_with(self.tokens, sample.step, sample.tokens),
            blocked_us=_with(self.blocked_us, sample.step, blocked_us),
        )

    def with_ddp(self, sample: DdpSample) -> RecentSteps:
        """With DDP's counters of a step."""
        exposed_us = max(0.0, sample.comm_us - sample.overlap_us)
        return msgspec.structs.replace(self, ddp_us=_with(self.ddp_us, sample.step, exposed_us))

    def with_device_wait(self, sample: DeviceWaitSample) -> RecentSteps:
        """With the waits of a step, if they are all of them."""
        wait_us = sample.wait_us if sample.calls == sample.of_calls else None
        return msgspec.structs.replace(self, device_us=_with(self.device_us, sample.step, wait_us))

    def exposed_share(self, *, host_waits: bool) -> float | None:
        """Exposed communication over step time, waiting for stragglers included; None where nothing tells.

        Args:
            host_waits: whether the host waits in a collective for its end, as it does without a GPU.
        """
        sources = [self.ddp_us, self.device_us, *([self.blocked_us] if host_waits else [])]
        for exposed_us in sources:
            both = [step for step in exposed_us if step in self.times_us][-RECENT_STEPS:]
            took_us = sum(self.times_us[step] for step in both)
            if took_us > 0:
                return min(1.0, sum(exposed_us[step] for step in both) / took_us)
        return None

    @property
    def tokens_and_time(self) -> tuple[int, float]:
        """Tokens of the recent steps that tell them, and the microseconds that these took."""
        both = [step for step in self.tokens if step in self.times_us][-RECENT_STEPS:]
        return sum(self.tokens[step] for step in both), sum(self.times_us[step] for step in both)


def _with(known: Mapping[int, _Number], step: int, value: _Number | None) -> dict[int, _Number]:
    if value is None:
        return dict(known)
    kept = {**known, step: value}
    return {number: kept[number] for number in sorted(kept)[-_KEPT_STEPS:]}
