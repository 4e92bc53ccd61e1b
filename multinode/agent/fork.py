"""Forking without exec: a child that runs one function of ours and never returns into its parent's code."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

__all__ = ["fork_child"]


def fork_child(body: Callable[[], None]) -> int:
    """Run `body` in a forked child and return the child's pid. The caller must have no threads.

    What `body` raises is printed to the child's stderr, and its exit code is 1.
    """
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            body()
            code = 0
        except BaseException:  # noqa: BLE001 - whatever it is, it must not unwind into the parent's frames
            sys.excepthook(*sys.exc_info())
            sys.stderr.flush()
        finally:
            os._exit(code)
    return pid
