"""What a run shows while it goes on: a live table on a terminal, plain lines elsewhere. The only owner of rich.Live."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from rich.console import Console
from rich.live import Live
from rich.markup import escape

from multinode.cli.output import is_quiet
from multinode.core.run.progress import RunProgress
from multinode.core.run.run import Stall
from multinode.report.render.escaping import sanitize
from multinode.report.run.progress_table import progress_line, progress_table, stall_line

__all__ = ["LiveView", "live_view", "show_stage", "within_share"]

_LOG = logging.getLogger(__name__)
_PLAIN_EVERY_S = 5.0
# A table of many nodes takes long to lay out: the view takes no more than one part in so many of a processor's time.
_VIEW_SHARE = 20


class LiveView(NamedTuple):
    """Shows stages and progress on stderr."""

    say: Callable[[str], None]
    show: Callable[[RunProgress], None]


@contextlib.contextmanager
def live_view(*, quiet: bool = False) -> Iterator[LiveView]:
    """A view for the time of a run; `quiet` shows nothing at all, and --quiet nothing but that it hangs."""
    console = Console(stderr=True)
    if quiet:
        yield LiveView(lambda _: None, lambda _: None)
    elif is_quiet():
        yield _telling_stalls(_PlainLines().say, lambda _: None)._replace(say=lambda _: None)
    elif console.is_terminal:
        with Live(console=console, auto_refresh=False, transient=False) as live:
            yield _telling_stalls(
                lambda text: console.print(text, markup=False, highlight=False),
                within_share(lambda progress: live.update(progress_table(progress), refresh=True)),
            )
    else:
        plain = _PlainLines()
        yield _telling_stalls(plain.say, plain.show)


def within_share(show: Callable[[RunProgress], None]) -> Callable[[RunProgress], None]:
    """As `show`, as often as its share of a processor's time allows, and at the end in any case."""
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
    """A view that tells each standstill, and its end, in lines that stay."""
    told: Stall | None = None

    def show_and_tell(progress: RunProgress) -> None:
        nonlocal told
        if progress.stall is not None and progress.stall is not told:
            say(stall_line(progress.stall))
        elif progress.stall is None and told is not None and not _is_over(progress):
            say("the run has resumed")
        told = progress.stall
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
def show_stage() -> Iterator[Callable[[str], None]]:
    """Shows what is being done: one line that changes on a terminal, and lines with --verbose."""
    console = Console(stderr=True)
    if not console.is_terminal or is_quiet() or _LOG.isEnabledFor(logging.DEBUG):
        yield _LOG.debug
        return
    with console.status("") as status:
        yield lambda text: status.update(escape(text))
