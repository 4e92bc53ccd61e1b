"""with_time_limit: a training that is stopped once it has trained for so long, as the user would stop it."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from multinode.core.run.progress import RunProgress, TrainingTime
from multinode.launch.stop_request import StopRequest
from multinode.workflows.run.context import RunContext

__all__ = ["STEPS_WITHOUT_END", "TimedStop", "with_time_limit"]

STEPS_WITHOUT_END = 1_000_000
"""What a training is told to make that is to end by its time alone."""


class TimedStop:
    """Watches the progress of one run.

    The time begins with the first step that any node reports: loading and the first compilation are no training.

    Args:
        user: how the user asks to stop; that is passed on.
        limit_s: of training.
        clock: seconds that only go forward.
    """

    def __init__(self, user: StopRequest, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.stop = StopRequest()
        self._user = user
        self._limit_s = limit_s
        self._clock = clock
        self._passed_on = 0
        self._began: float | None = None
        self._is_over = False

    @property
    def is_over(self) -> bool:
        """Whether the run was stopped for its time; a user who stops it while it ends takes nothing from that."""
        return self._is_over

    def look(self, progress: RunProgress) -> None:
        """Take note of how far the run is, and stop it when it is time."""
        while self._passed_on < self._user.count:
            self._passed_on += 1
            self.stop.ask(self._user.reason)
        if self._began is None and any(node.step for node in progress.nodes):
            self._began = self._clock()
        if self._trained_s >= self._limit_s and self._began is not None and not self.stop.count:
            self._is_over = True
            self.stop.ask("its time is over")

    def show(self, progress: RunProgress) -> RunProgress:
        """The progress by the time: how long it has trained, and no number of steps that nobody means to make."""
        nodes = tuple(
            msgspec.structs.replace(node, total_steps=None) if node.total_steps == STEPS_WITHOUT_END else node
            for node in progress.nodes
        )
        training = TrainingTime(limit_s=self._limit_s, trained_s=self._trained_s)
        return msgspec.structs.replace(progress, nodes=nodes, training=training)

    @property
    def _trained_s(self) -> float:
        return 0.0 if self._began is None else self._clock() - self._began


def with_time_limit(context: RunContext, limit_s: float) -> tuple[RunContext, TimedStop]:
    """The outside of a run that trains for so long, and what stops it then."""
    timed = TimedStop(context.stop, limit_s)
    limited = context.with_stop(timed.stop)

    def observe(progress: RunProgress) -> None:
        timed.look(progress)
        context.observe(timed.show(progress))

    limited.observe = observe
    return limited, timed
