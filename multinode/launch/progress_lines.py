"""What a run shows in lines: its progress, once in a while, and what is wrong, at once. Prints nothing itself."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from multinode.launch.progress_table import progress_line, stall_line
from multinode.records.progress import RunProgress
from multinode.records.run import Stall
from multinode.render.sheet import sanitize


class ProgressLines:
    """A line when a node's state changes, and one every few seconds between.

    Args:
        say: is told each line.
        every_s: how seldom, without a change.
    """

    def __init__(self, say: Callable[[str], None], every_s: float) -> None:
        self._say = say
        self._every_s = every_s
        self._states: tuple[tuple[str, str], ...] = ()
        self._shown = 0.0
        # Of which run the note was told.
        self._noted = ""

    def show(self, progress: RunProgress) -> None:
        """Say it, if it is time."""
        states = tuple((node.state, node.message) for node in progress.nodes)
        now = time.monotonic()
        if states != self._states or now - self._shown >= self._every_s:
            self._states = states
            self._shown = now
            self._say(progress_line(progress))
        if progress.note and self._noted != progress.run_id:
            self._noted = progress.run_id
            self._say(sanitize(progress.note))


def telling_stalls(say: Callable[[str], None], show: Callable[[RunProgress], None]) -> Callable[[RunProgress], None]:
    """Wrap `show` so that `say` gets each hang and trouble once; a view that fails is reported and shows no more."""
    shown: Stall | None = None
    troubles: set[str] = set()

    def show_and_tell(progress: RunProgress) -> None:
        nonlocal shown
        for trouble in progress.troubles:
            if trouble not in troubles:
                troubles.add(trouble)
                say(f"warning: {sanitize(trouble)}")
        if progress.stall is not None and progress.stall is not shown:
            say(stall_line(progress.stall))
        elif progress.stall is None and shown is not None and not _is_over(progress):
            say("the run has resumed")
        shown = progress.stall
        show(progress)

    return _never_failing(show_and_tell, say)


def _never_failing(show: Callable[[RunProgress], None], say: Callable[[str], None]) -> Callable[[RunProgress], None]:
    """Call `show` until it fails, then report that once: no view is worth a training."""
    shows = True

    def show_or_leave(progress: RunProgress) -> None:
        nonlocal shows
        if not shows:
            return
        try:
            show(progress)
        except Exception as error:  # noqa: BLE001 - whoever follows a run stops it when its own code fails
            shows = False
            with contextlib.suppress(Exception):
                say(f"the live view failed, but the run is still running: {error!r}")

    return show_or_leave


def _is_over(progress: RunProgress) -> bool:
    return any(node.state != "running" for node in progress.nodes)
