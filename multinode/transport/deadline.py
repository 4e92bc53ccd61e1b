"""closing_at: a deadline for what paramiko waits for without one. Closing the connection ends every wait on it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

import paramiko

__all__ = ["closing_at"]


@contextlib.contextmanager
def closing_at(end: float, transport: Callable[[], paramiko.Transport | None]) -> Iterator[threading.Event]:
    """Close the connection if the block still runs at `end`; the event is set then.

    Paramiko waits without end for the answer to an exec request (paramiko#2599), for a socket that takes no more bytes,
    and on a lock that another thread holds in either of these. What waits raises once its connection is closed.

    Args:
        end: on the monotonic clock.
        transport: the connection, asked for at `end`: while one is being opened it comes into being.
    """
    passed = threading.Event()

    def close() -> None:
        found = transport()
        if found is not None:
            passed.set()
            found.close()

    timer = threading.Timer(max(0.0, end - time.monotonic()), close)
    timer.daemon = True
    timer.start()
    try:
        yield passed
    finally:
        timer.cancel()
