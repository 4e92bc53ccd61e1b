"""What a run shows while it goes on: a live table on a terminal, plain lines elsewhere. The only owner of rich.Live."""

from __future__ import annotations

import collections
import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.markup import escape
from rich.segment import Segment

from multinode.cli.output import is_quiet
from multinode.launch.progress_lines import ProgressLines, telling_stalls
from multinode.launch.progress_table import ProgressTable
from multinode.records.progress import RunProgress
from multinode.records.run import NodeRun
from multinode.units import format_size

if TYPE_CHECKING:
    from multinode.cli.log_lines import LogLines

_LOG = logging.getLogger(__name__)
_PLAIN_EVERY_S = 5.0
# A table of many nodes takes long to lay out: the view takes no more than one part in so many of a processor's time.
_VIEW_SHARE = 20
# What may wait for a terminal that takes no output.
_MOST_FRAMES, _MOST_WAITING, _MOST_LOG_BYTES = 8, 1000, 1 << 20
_LAST_S = 2.0
# How soon a line of a signal handler is shown.
_LOOK_S = 0.1


class LiveView(NamedTuple):
    """Shows stages, progress and the job's output on stderr."""

    say: Callable[[str], None]
    show: Callable[[RunProgress], None]
    show_log: Callable[[NodeRun, bytes], None]
    say_at_once: Callable[[str], None]  # a line, from a signal handler: waits for no lock and no terminal


class _Piece(NamedTuple):
    """What the log of a node has gained."""

    node: NodeRun
    data: bytes
    dropped_bytes: int  # of any node before it, for lack of room


_Shown = str | RunProgress | _Piece


@contextlib.contextmanager
def live_view(*, quiet: bool = False, output: Literal["none", "rank0", "all"] = "none") -> Iterator[LiveView]:
    """A view for the time of a run; `quiet` shows nothing at all, and --quiet nothing but that it hangs.

    It is shown in a thread of its own: a terminal that takes no output, as after Ctrl-S, delays no run. Of the frames
    that wait, the oldest are left out, and of the job's output (`output`) the latest; at the end what still waits is
    shown, or left out after two seconds.
    """
    screen = _Screen(quiet=quiet, output=output)
    screen.start()
    try:
        yield LiveView(screen.say, screen.show, screen.show_log, screen.say_at_once)
    finally:
        screen.close()


class _Screen:
    """The view, and the thread that it is shown in."""

    def __init__(self, *, quiet: bool, output: Literal["none", "rank0", "all"]) -> None:
        self._quiet = quiet
        self._output = "none" if quiet else output
        self._waiting: collections.deque[_Shown | None] = collections.deque()
        # Appending to it is atomic: a signal handler takes no lock.
        self._urgent: collections.deque[str] = collections.deque()
        self._frames = 0
        self._log_bytes = self._dropped_bytes = 0
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

    def show_log(self, node: NodeRun, data: bytes) -> None:
        """Output of the job on a node."""
        if self._output == "none" or (self._output == "rank0" and node.node_rank != 0):
            return
        with self._changed:
            if self._log_bytes + len(data) > _MOST_LOG_BYTES or len(self._waiting) >= _MOST_WAITING:
                self._dropped_bytes += len(data)
                return
            self._log_bytes += len(data)
            dropped_bytes, self._dropped_bytes = self._dropped_bytes, 0
        self._put(_Piece(node, data, dropped_bytes))

    def say_at_once(self, text: str) -> None:
        """A line that stays, before all that waits."""
        self._urgent.append(text)

    def close(self) -> None:
        """Wait for what is to be shown yet."""
        self._put(None)
        self._thread.join(_LAST_S)

    def _put(self, waits: _Shown | None) -> None:
        with self._changed:
            if len(self._waiting) < _MOST_WAITING or waits is None:
                self._waiting.append(waits)
                self._changed.notify()

    def _take(self) -> _Shown | None:
        with self._changed:
            while not self._changed.wait_for(lambda: self._waiting, _LOOK_S):
                if self._urgent:
                    return self._urgent.popleft()
            if self._urgent:
                return self._urgent.popleft()
            waits = self._waiting.popleft()
            self._frames -= isinstance(waits, RunProgress)
            self._log_bytes -= len(waits.data) if isinstance(waits, _Piece) else 0
            return waits

    def _run(self) -> None:
        # A terminal that is closed takes nothing any more: the run goes on without a view.
        with contextlib.suppress(OSError, ValueError), _opened_view(quiet=self._quiet) as view:
            lines = _log_lines(self._output)
            while (waits := self._take()) is not None:
                if isinstance(waits, str):
                    view.say(waits)
                elif isinstance(waits, RunProgress):
                    view.show(waits)
                elif lines is not None:
                    if waits.dropped_bytes:
                        view.say(_left_out(waits.dropped_bytes))
                    view.print_lines(lines.feed(waits.node.name, waits.data))
            view.print_lines(lines.end() if lines is not None else ())
            if self._dropped_bytes:
                view.say(_left_out(self._dropped_bytes))


def _log_lines(output: Literal["none", "rank0", "all"]) -> LogLines | None:
    if output == "none":
        return None
    from multinode.cli.log_lines import LogLines

    return LogLines(rank=0 if output == "rank0" else None)


def _left_out(size_bytes: int) -> str:
    return f"{format_size(size_bytes)} of output is not shown here; see multinode logs"


class _Shows(NamedTuple):
    """How things are shown on this kind of terminal, or file."""

    say: Callable[[str], None]
    show: Callable[[RunProgress], None]
    print_lines: Callable[[Sequence[str]], None]


class _Unwrapped:
    """Lines as they are."""

    def __init__(self, lines: Sequence[str]) -> None:
        self._lines = lines

    def __rich_console__(self, _console: Console, _options: ConsoleOptions) -> RenderResult:
        for line in self._lines:
            yield Segment(line)
            yield Segment.line()


@contextlib.contextmanager
def _opened_view(*, quiet: bool) -> Iterator[_Shows]:
    console = Console(stderr=True)
    if quiet:
        yield _Shows(lambda _: None, lambda _: None, lambda _: None)
    elif is_quiet():
        yield _Shows(lambda _: None, telling_stalls(_print_line, lambda _: None), _print_lines)
    elif console.is_terminal:
        with Live(console=console, auto_refresh=False, transient=False) as live:

            def print_lines(lines: Sequence[str]) -> None:
                # The terminal wraps them; cutting them would cut the table as well.
                console.print(_Unwrapped(lines), crop=False)

            def say(text: str) -> None:
                print_lines(text.split("\n"))

            show = within_share(lambda progress: live.update(ProgressTable(progress), refresh=True))
            yield _Shows(say, telling_stalls(say, show), print_lines)
    else:
        lines = ProgressLines(_print_line, _PLAIN_EVERY_S)
        yield _Shows(_print_line, telling_stalls(_print_line, lines.show), _print_lines)


def within_share(show: Callable[[RunProgress], None]) -> Callable[[RunProgress], None]:
    """Limit `show` to a share of CPU time; the end is always shown."""
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


def _print_lines(lines: Sequence[str]) -> None:
    sys.stderr.write("".join(f"{line}\n" for line in lines))
    sys.stderr.flush()


def _print_line(text: str) -> None:
    _print_lines([text])


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
