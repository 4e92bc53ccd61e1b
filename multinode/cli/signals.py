"""Signals to a run: the first asks every node to stop, the second cuts the grace period short."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from types import FrameType

from multinode.launch.stop_request import StopRequest

__all__ = ["stop_on_signals"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def stop_on_signals(stop: StopRequest, *, leaves: bool = False) -> Iterator[None]:
    """While inside, Ctrl-C, SIGTERM and a closed terminal ask the run to stop rather than end us on the spot.

    `leaves` says that what is asked for is to follow no more.
    """

    def ask(number: int, _frame: FrameType | None) -> None:
        stop.ask(signal.Signals(number).name)
        said = "stopping on all nodes; once more to kill at once" if stop.count == 1 else "killing at once"
        said = "leaving; the run goes on" if leaves else said
        # A closed terminal takes stderr with it; the nodes must be stopped all the same.
        with contextlib.suppress(OSError):
            sys.stderr.write(f"\n{said}\n")

    before = {number: signal.signal(number, ask) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
