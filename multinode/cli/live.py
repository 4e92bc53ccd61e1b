"""What a run shows while it goes on: a live table on a terminal, plain lines elsewhere. The only owner of rich.Live."""

from __future__ import annotations

import collections
import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from rich.console import Console
from rich.live import Live
from rich.markup import escape

from multinode.cli.output import is_quiet
from multinode.launch.progress_table import ProgressTable, progress_line, stall_line
from multinode.records.progress import RunProgress
from multinode.records.run import Stall
from multinode.render.sheet import sanitize

_LOG = logging.getLogger(__name__)
_PLAIN_EVERY_S = 5.0
# A table of many nodes takes long to lay out: the view takes no more than one part in so many of a processor's time.
_VIEW_SHARE = 20
# What may wait for a terminal that takes no output.
_MOST_FRAMES, _MOST_WAITING = 8, 1000
_LAST_S = 2.0


class LiveView(NamedTuple):
    """Shows stages and progress on stderr."""

    say: Callable[[str], None]
    show: Callable[[RunProgress], None]


@contextlib.contextmanager
def live_view(*, quiet: bool = False) -> Iterator[LiveView]:
    """A view for the time of a run; `quiet` shows nothing at all, and --quiet nothing but that it hangs.

    It is shown in a thread of its own: a terminal that takes no output, as after Ctrl-S, delays no run. Of the frames
    that wait, the oldest are left out; at the end what still waits is shown, or left out after two seconds.
    """
    screen = _Screen(quiet=quiet)
    screen.start()
    try:
        yield LiveView(screen.say, screen.show)
    finally:
        screen.close()


class _Screen:
    """The view, and the thread that it is shown in."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._waiting: collections.deque[str | RunProgress | None] = collections.deque()
        self._frames = 0
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="view", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def say(self, text: str) -> None:
        """A line that stays."""
        self._put(text)

    def show(self, progress: RunProgress) -> None:
        """A frame."""
        with self._changed:
            if self._frames >= _MOST_FRAMES:
                oldest = next(number for number, waits in enumerate(self._waiting) if isinstance(waits, RunProgress))
                del self._waiting[oldest]
                self._frames -= 1
            self._frames += 1
        self._put(progress)

    def close(self) -> None:
        """Wait for what is to be shown yet."""
        self._put(None)
        self._thread.join(_LAST_S)

    def _put(self, waits: str | RunProgress | None) -> None:
        with self._changed:
            if len(self._waiting) < _MOST_WAITING or waits is None:
                self._waiting.append(waits)
                self._changed.notify()

    def _take(self) -> str | RunProgress | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting)
            waits = self._waiting.popleft()
            self._frames -= isinstance(waits, RunProgress)
            return waits

    def _run(self) -> None:
        # A terminal that is closed takes nothing any more: the run goes on without a view.
        with contextlib.suppress(OSError, ValueError), _opened_view(quiet=self._quiet) as view:
            while (waits := self._take()) is not None:
                if isinstance(waits, str):
                    view.say(waits)
                else:
                    view.show(waits)


@contextlib.contextmanager
def _opened_view(*, quiet: bool) -> Iterator[LiveView]:
    console = Console(stderr=True)
    if quiet:
        yield LiveView(lambda _: None, lambda _: None)
    elif is_quiet():
        yield _telling_stalls(_PlainLines().say, lambda _: None)._replace(say=lambda _: None)
    elif console.is_terminal:
        with Live(console=console, auto_refresh=False, transient=False) as live:
            yield _telling_stalls(
                lambda text: console.print(text, markup=False, highlight=False),
                within_share(lambda progress: live.update(ProgressTable(progress), refresh=True)),
            )
    else:
        plain = _PlainLines()
        yield _telling_stalls(plain.say, plain.show)


def within_share(show: Callable[[RunProgress], None]) -> Callable[[RunProgress], None]:
    """As `show`, limited to a share of CPU time, and always once at the end."""
    due = 0.0

    def show_seldom(progress: RunProgress) -> None:
        nonlocal due
        began = time.monotonic()
        over = all(node.state in {"ended", "lost"} for node in progress.nodes)
        if began >= due or over or progress.stall is not None:
            show(progress)
            ended = time.monotonic()
            due = ended + _VIEW_SHARE * (ended - began)

    return show_seldom


def _telling_stalls(say: Callable[[str], None], show: Callable[[RunProgress], None]) -> LiveView:
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

    return LiveView(say, _never_failing(show_and_tell, say))


def _never_failing(show: Callable[[RunProgress], None], say: Callable[[str], None]) -> Callable[[RunProgress], None]:
    """As `show`, until it fails; then that is told and nothing more is shown: no view is worth a training."""
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
                say(f"the view failed; the run is still running: {error!r}")

    return show_or_leave


def _is_over(progress: RunProgress) -> bool:
    return any(node.state != "running" for node in progress.nodes)


class _PlainLines:
    """A line when a node's state changes, and one every few seconds between."""

    def __init__(self) -> None:
        self._states: tuple[tuple[str, str], ...] = ()
        self._shown = 0.0
        # Of which run the note was told.
        self._noted = ""

    def say(self, text: str) -> None:
        sys.stderr.write(text + "\n")
        sys.stderr.flush()

    def show(self, progress: RunProgress) -> None:
        states = tuple((node.state, node.message) for node in progress.nodes)
        now = time.monotonic()
        if states != self._states or now - self._shown >= _PLAIN_EVERY_S:
            self._states = states
            self._shown = now
            self.say(progress_line(progress))
        if progress.note and self._noted != progress.run_id:
            self._noted = progress.run_id
            self.say(sanitize(progress.note))


@contextlib.contextmanager
def show_stage(*, plain: bool = False) -> Iterator[Callable[[str], None]]:
    """Shows what is being done: one line that changes on a terminal, and lines with --verbose.

    Args:
        plain: whether what is no terminal gets a line every few seconds.
    """
    console = Console(stderr=True)
    if is_quiet() or _LOG.isEnabledFor(logging.DEBUG):
        yield _LOG.debug
    elif not console.is_terminal:
        yield _seldom(_LOG.info) if plain else _LOG.debug
        return
    with console.status("") as status:
        yield lambda text: status.update(escape(text))


def _seldom(say: Callable[[str], None]) -> Callable[[str], None]:
    said_s = time.monotonic()

    def say_seldom(text: str) -> None:
        nonlocal said_s
        if time.monotonic() - said_s >= _PLAIN_EVERY_S:
            said_s = time.monotonic()
            say(text)

    return say_seldom
