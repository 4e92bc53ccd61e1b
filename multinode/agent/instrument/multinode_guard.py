"""Guard: what watches a training never stops it. Whatever fails is told once, on stderr and in the samples."""

from __future__ import annotations

import functools
import sys
from typing import Any, Callable, Set

import multinode_recorder

_MOST_WORDS = 500


class Guard:
    """Wraps functions of ours so that nothing they raise gets out.

    Args:
        recorder: where a failure is noted.
    """

    def __init__(self, recorder: multinode_recorder.Recorder) -> None:
        self._recorder = recorder
        self._told: Set[str] = set()

    def quietly(self, function: Callable[..., None]) -> Callable[..., None]:
        """The function, with whatever it raises swallowed after it was told."""

        @functools.wraps(function, assigned=("__name__",), updated=())
        def wrapped(*args: Any, **kwargs: Any) -> None:
            try:
                function(*args, **kwargs)
            except Exception as error:  # noqa: BLE001 - a training never stops because it is being watched
                self.tell(getattr(function, "__name__", "a hook"), error)

        return wrapped

    def tell(self, what: str, error: Exception) -> None:
        """Say that something of ours failed; only the first failure of each is told."""
        if what in self._told:
            return
        self._told.add(what)
        message = "%s failed and is passed over: %r" % (what.strip("_"), error)
        sys.stderr.write("multinode: %s\n" % message[:_MOST_WORDS])
        self._recorder.write("note", {"message": message[:_MOST_WORDS]})
