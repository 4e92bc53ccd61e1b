"""LogWord: a line of a log that speaks of a failure."""

from __future__ import annotations

import re

import msgspec

from multinode.diagnose.known_errors import KnownError
from multinode.diagnose.log_line import is_bare_exception
from multinode.diagnose.meaning import Collective

INTERRUPT = "KeyboardInterrupt"
"""Python's own exception for Ctrl-C."""

_MISSES = re.compile(
    r"\bFileNotFoundError\b|\bno such file\b|\bno checkpoints?\b|\bnot found\b|\b(?:does not|doesn't) exist\b"
    r"|\b(?:cannot|can't|could not|couldn't|failed to|unable to) (?:find|locate|open)\b"
    r"|\bdoes not appear to have a file\b"
    r"|\bis not a local folder\b|\bRepo id must be\b",
    re.IGNORECASE,
)
_MISSES_CODE = re.compile(r"(?:\w+\.)*(?:ModuleNotFoundError|ImportError|AttributeError)\b")


class LogWord(msgspec.Struct, frozen=True, kw_only=True):
    """A line that speaks of a failure."""

    line: int  # its number, from 1
    text: str  # without the marks of its rank or node
    rank: int | None = None  # the global rank that the line names
    host: str | None = None  # the node that the line names, as NCCL, pdsh and srun do
    worker: str | None = None  # the actor or worker that the line names, as Ray and vLLM do
    process: str | None = None  # as in `LogLine`
    time: str | None = None  # when, as the line has it; None where it does not say
    is_exception: bool = False  # whether it is the last line of a Python traceback, by its form
    is_abort: bool = False  # whether it is what the C++ runtime or the interpreter says before it aborts a process
    is_passed_on: bool = False  # whether NCCL's proxy thread only says that what it did for a rank failed
    is_nccl: bool = False  # whether NCCL said it: a warning, or the last error that torch quotes
    is_launchers: bool = False  # whether a launcher raised it, as a worker had failed
    nccl: str | None = None  # as in `LogLine`
    is_noise: bool = False  # whether it is a warning, or of a thread whose end ends no process
    is_shells: bool = False  # whether a shell says it of a command in its script, and goes on with the next one
    child: str | None = None  # the process that it ended, as its parent names it; others go on without that process
    program: str | None = None  # the script whose process it ended, without folder and ending: `train`
    points: bool = False  # whether `rank` is one that another rank names as late, or as the one to blame
    said_by: int | None = None  # that other rank, if it says that the collective of `rank` timed out first
    went_on: bool = False  # whether its process printed progress after it
    at_exit: bool = False  # whether a destructor or the shutdown of the interpreter raised it
    raised_from: int | None = None  # the line of the exception that this one was raised from or while handling
    details: tuple[str, ...] = ()  # the lines below an exception that belong to it
    collective: Collective | None = None  # which one its watchdog gave up; None where the line does not say
    source_line: str | None = None  # the last source line of the traceback of an exception without a message, and where
    error: KnownError | None = None  # what the catalogue says of it; None is nothing

    @property
    def is_of_peers(self) -> bool:
        """Whether it says that another worker is gone."""
        return self.error is not None and self.error.of_peers

    @property
    def is_stop(self) -> bool:
        """Whether it says that its process got a signal to stop."""
        return self.error is not None and self.error.is_stop

    @property
    def misses(self) -> bool:
        """Whether it says that something is not there which another program may have had to write."""
        return _MISSES.search(self.text) is not None and _MISSES_CODE.match(self.text) is None

    @property
    def is_interrupt(self) -> bool:
        """Whether it is Python's own exception for Ctrl-C."""
        return self.is_exception and self.text.startswith(INTERRUPT)

    @property
    def is_bare(self) -> bool:
        """Whether it is an exception of which neither the name, a message nor the source says anything."""
        return self.is_exception and self.error is None and self.source_line is None and is_bare_exception(self.text)

    @property
    def said(self) -> str:
        """The text; of an exception without a message also the source code that raised it."""
        return f"{self.text.rstrip(': ')}: {self.source_line}" if self.source_line is not None else self.text

    @property
    def has_figures(self) -> bool:
        """Whether it is the line of a watchdog that has the operation, its number and the limit."""
        return "Watchdog caught" in self.text
