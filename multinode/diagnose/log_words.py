"""LogWords: what speaks of a failure in a log, whatever marks stand before a line and whatever comes after it. Pure.

Which text means which error is in known_errors.toml.

A log may have gigabytes and any content: most lines are alike but for their figures, and are looked at once.
"""

from __future__ import annotations

import enum
import functools
import io
import re
import string
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import BinaryIO

import msgspec

from multinode.diagnose.known_errors import KnownError, anchor, find_error, known_errors, text_pattern
from multinode.records.log import clean_log, last_lines

_BLOCK_BYTES = 1 << 20
# What is kept of a line, and how many lines that speak.
_LINE_BYTES = 4096
_MOST_WORDS = 400
_MOST_SHAPES = 100_000
_MOST_ALIKE = 1000
# Lines between two that speak, from which on they are of different failures.
_APART = 5000
# Lines of a report of torchrun.
_REPORT_LINES = 16
_TAIL_BYTES = 1 << 16
_IGNORED_LINES = 60
# Lines of others between two of a traceback.
_BETWEEN_FRAMES = 60


class LogWord(msgspec.Struct, frozen=True, kw_only=True):
    """A line that speaks of a failure."""

    line: int  # its number, from 1
    text: str  # without the mark of its rank or node
    rank: int | None = None  # the global rank that the line names
    host: str | None = None  # the node that the line names, as NCCL, pdsh and srun do
    time: str | None = None  # when, as the line has it; None where it does not say
    is_exception: bool = False  # whether it is the last line of a Python traceback, by its form
    is_abort: bool = False  # whether it is what the C++ runtime or the interpreter says before it aborts a process
    error: KnownError | None = None  # what the catalogue says of it; None is nothing

    @property
    def is_of_peers(self) -> bool:
        """Whether it says that another worker is gone."""
        return self.error is not None and self.error.of_peers


class LogReading(msgspec.Struct, frozen=True, kw_only=True):
    """What a log says."""

    words: tuple[LogWord, ...] = ()  # the lines that speak of the last failure in it, in their order
    earlier: tuple[LogWord, ...] = ()  # those of the last failure before it that names its own cause
    report: str = ""  # what the launcher (torchrun, DeepSpeed, Slurm) says of its workers
    report_line: int | None = None  # where it begins; None without one
    lines: int = 0  # how many there are
    tail: str = ""  # the end of the log
    has_nccl: bool = False  # whether warnings of NCCL stand in it

    def cause(self, *, rank: int | None = None, aborted: bool = False) -> LogWord | None:
        """The line that names the cause best; None where nothing does.

        `rank` is known to have failed. If a signal `aborted` it, what Python survived does not count.
        """
        best = _best(self.words, rank, aborted=aborted)
        if best is not None and not best.is_of_peers:
            return best
        earlier = _best(self.earlier, rank, aborted=aborted)
        return earlier if earlier is not None and _is_telling(earlier) else best


def _best(words: Iterable[LogWord], rank: int | None, *, aborted: bool) -> LogWord | None:
    words = tuple(words)
    # What a worker raised after it, it survived.
    raised = sorted((word for word in words if word.is_exception and not word.is_of_peers), key=lambda word: word.line)
    last = {word.rank: word.line for word in raised}
    kept = [word for word in words if _counts(word, last.get(word.rank, 0), aborted=aborted)]
    return min(
        kept, key=lambda word: (rate(word.error, word), rank is not None and word.rank != rank, word.line), default=None
    )


def _counts(word: LogWord, last_line: int, *, aborted: bool) -> bool:
    if word.error is None or word.error.is_last:
        # What else a program prints of these is only a last word (`last_words`).
        return word.is_abort or (word.is_exception and word.line >= last_line and not aborted)
    return True


def _is_telling(word: LogWord) -> bool:
    error = word.error
    return error is not None and not (error.of_peers or error.is_general or error.is_last)


def rate(error: KnownError | None, word: LogWord | None = None) -> int:
    """How well an error explains a failure: 0 names a cause, 4 only that a connection ended."""
    if error is None:
        return 1 if word is not None and word.is_exception else 2
    if error.of_peers:
        return 4 if error.is_general else 3
    return 1 if error.is_general else 0


# Stack frames, what torchrun does to the other workers, and what torch says of one that left without a word.
_NO_WORDS = re.compile(
    r"\s*(?:frame #\d|#\d{1,3} |.*Sending process \d{1,9} closing signal|.*\bclosing signal SIGTERM"
    r"|.*\bdestroy_process_group\(\) was not called\b)"
)
# What a program that goes on with less says of memory.
_SURVIVED = re.compile(
    r"(?-i:\b(?:WARNING|INFO|DEBUG)\b).*out of memory"
    r"|out of memory.*\b(?:retry|retrying|trying again|skip|skipping|skipped|falling back|reducing)\b",
    re.IGNORECASE,
)
# Where torchrun begins to speak of a failed worker itself: some forty lines, the report among them.
_TORCHRUN_SPEAKS = re.compile(r"^.*\bfailed \(exitcode: -?\d{1,6}\) local_rank: \d{1,6} \(pid: ", re.MULTILINE)


def last_words(log: str, count: int, *, of_launcher: bool = True) -> str:
    """The last lines of the workers, without stack frames, before what torchrun says of them.

    Where they said nothing, what torchrun says counts if it may be `of_launcher`.
    """
    # The last time: torchrun may have started the workers anew before.
    starts = [match.start() for match in _TORCHRUN_SPEAKS.finditer(log)]
    words = log[: starts[-1]] if starts else ""
    lines = (words if words.strip() or (starts and not of_launcher) else log).split("\n")
    lines = [line for line in lines if not (_NO_WORDS.match(line) or _ends_nothing(line))]
    return last_lines("\n".join(lines), count)


def _ends_nothing(line: str) -> bool:
    return _SURVIVED.search(line) is not None or re.match(r"\s*raise ", line) is not None


def read_log(log: BinaryIO | bytes | str, *, progress: Callable[[int], object] | None = None) -> LogReading:
    """What a log says of failures.

    `progress` is called with the bytes that were read, a block at a time.
    """
    if isinstance(log, str):
        log = log.encode(errors="replace")
    reader = _Reader()
    file = io.BytesIO(log) if isinstance(log, bytes) else log
    rest = b""
    while block := file.read(_BLOCK_BYTES):
        if progress is not None:
            progress(len(block))
        block = rest + block
        end = max(block.rfind(b"\n"), block.rfind(b"\r")) + 1
        # A line without an end comes in pieces, which overlap.
        reader.look(block[:end] if end else block)
        rest = block[end:] if end else block[-_LINE_BYTES:]
    reader.look(rest)
    return reader.reading()


# Letters are small and figures are gone, and so a line of progress is like the next.
_SHAPE = bytes(range(256)).lower().replace(b"\r", b"\n")
_FIGURES = b"0123456789"
_NO_LETTER = bytes(byte if chr(byte) in string.ascii_lowercase else ord(" ") for byte in range(256))
# What launchers and runtimes say, beside the texts of the catalogue.
_LAUNCHERS = (
    "Root Cause (first observed failure)",
    "sigkill_handler] [",
    "num_local_procs=",
    "srun: error: ",
    "slurmstepd: error: ",
    "mpirun noticed that process rank ",
    "failed (exitcode: ",
    "died with <Signals.",
)
_ABORTS = (
    "what(): ",
    "Fatal Python error: ",
    "(core dumped)",
    "*** Process received signal ***",
    "free(): ",
    "double free or corruption",
    "malloc(): ",
    "corrupted size vs. prev_size",
)
# What a shell says, and nothing else in its line.
_KILLED = "Killed"
_TRACEBACK = "Traceback (most recent call last):"
# Before the next of several exceptions, and how many lines after the one before.
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
_CHAINED_LINES = 2
# A line of it, and the source code below that.
_FRAME = re.compile(r'  File "|    ')
_OTHERS = ("will restart worker group", "Exception ignored in", "NCCL WARN ", _KILLED, _TRACEBACK, *_CHAINED)
_ENDINGS = (b"error", b"exception", b"interrupt", b"timeout")
_RAISED = re.compile(rb"[a-z_](?:%s)(?::| *$)" % b"|".join(_ENDINGS), re.MULTILINE)


@functools.cache
def _texts() -> Mapping[bytes, Sequence[str]]:
    texts: defaultdict[bytes, list[str]] = defaultdict(list)
    catalogue = (text for error in known_errors().values() for text in error.texts)
    for text in (*catalogue, *_LAUNCHERS, *_ABORTS, *_OTHERS):
        texts[anchor(text).encode()].append("".join(char for char in text.lower() if not char.isdigit()))
    return texts


@functools.cache
def _words() -> frozenset[bytes]:
    return frozenset(_texts())


@functools.cache
def _pattern(word: bytes) -> re.Pattern[bytes]:
    return re.compile(text_pattern(_texts()[word]).encode(), re.MULTILINE)


class _Traced(enum.Enum):
    FRAME = enum.auto()
    END = enum.auto()


class _Tracebacks:
    """Python's tracebacks in a log; those of several ranks may be mixed. A line without a rank has the rank None."""

    def __init__(self) -> None:
        # the first and the last line of those that have not ended, and where Python said that it ignores an exception
        self._open: dict[int | None, tuple[int, int]] = {}
        self._ignored: defaultdict[int | None, list[int]] = defaultdict(list)
        self._last_ignored: dict[int | None, int] = {}

    def are_open(self) -> bool:
        return bool(self._open)

    def forget(self, number: int) -> None:
        """Those that began long before this line, or of which nothing came for long: they will not end any more."""
        self._open = {
            rank: (first, last)
            for rank, (first, last) in self._open.items()
            if number - first < _APART and number - last < _BETWEEN_FRAMES
        }

    def end(self, number: int, text: str) -> bool:
        """Whether a traceback ends with this line: it follows an indented one, and has the form of an exception."""
        rank = _rank(text)
        if rank not in self._open:
            return False
        first, last = self._open[rank]
        if number - first >= _APART or number - last >= _BETWEEN_FRAMES:
            del self._open[rank]
            return False
        _, own = _unmarked(text)
        if own[:1].isspace():
            self._open[rank] = first, number
            return False
        # A plain name may be that of anything that is printed meanwhile, unless it comes at once.
        is_next = last == number - 1 or rank is not None
        return first < last and bool(_NAMED_EXCEPTION.match(own) or (is_next and _PLAIN_NAME.match(own)))

    def take(self, number: int, text: str) -> _Traced | None:
        """What this line is of a traceback: a frame or source code in it, or its end; else None."""
        rank, (_, own) = _rank(text), _unmarked(text)
        after_ignored = number - self._last_ignored.get(rank, -_IGNORED_LINES) <= _CHAINED_LINES
        is_ignored = "Exception ignored in" in text or (after_ignored and own.startswith(_CHAINED))
        if is_ignored and len(self._ignored[rank]) < _MOST_WORDS:
            self._ignored[rank].append(number)
        if own.rstrip().endswith(_TRACEBACK) and len(self._open) < _MOST_WORDS:
            self._open[rank] = number, number
        elif self.end(number, text):
            if rank is not None or _NAMED_EXCEPTION.match(own):
                del self._open[rank]
            return _Traced.END
        elif rank in self._open and _FRAME.match(own):
            return _Traced.FRAME
        return None

    def ignores(self, number: int, text: str) -> bool:
        """Whether Python said before that it ignores this exception; each time it does so counts for one."""
        ignored = self._ignored[_rank(text)]
        while ignored:
            if number - ignored.pop(0) < _IGNORED_LINES:
                self._last_ignored[_rank(text)] = number
                return True
        return False


class _Reader:
    """Takes a log a block at a time."""

    def __init__(self) -> None:
        self._silent: set[bytes] = set()
        self._often: Counter[bytes] = Counter()
        self._line = 1
        self._words: dict[Hashable, LogWord] = {}
        self._earlier: tuple[LogWord, ...] = ()
        self._last = 0
        self._tracebacks = _Tracebacks()
        self._report: list[str] = []
        self._report_line: int | None = None
        self._report_end = 0
        self._tail = b""
        self._has_nccl = False

    def look(self, block: bytes) -> None:
        """The next lines."""
        self._tail = block[-_TAIL_BYTES:] if len(block) >= _TAIL_BYTES else (self._tail + block)[-_TAIL_BYTES:]
        shapes = block.translate(_SHAPE, _FIGURES).split(b"\n")
        new = set(shapes) - self._silent
        telling = _telling(new)
        self._tracebacks.forget(self._line)
        if len(self._silent) > _MOST_SHAPES:
            self._silent.clear()
        self._silent.update(shape for shape in new - telling if len(shape) < _LINE_BYTES)
        if telling or self._tracebacks.are_open() or self._line <= self._report_end:
            self._take(shapes, telling, block)
        self._line += block.count(b"\n")

    def reading(self) -> LogReading:
        """What it all says."""
        return LogReading(
            words=tuple(self._words.values()),
            earlier=self._earlier,
            report="\n".join(self._report),
            report_line=self._report_line,
            lines=self._line - (not self._tail or self._tail.endswith(b"\n")),
            tail=self._tail.decode(errors="replace"),
            has_nccl=self._has_nccl,
        )

    def _take(self, shapes: Sequence[bytes], telling: AbstractSet[bytes], block: bytes) -> None:
        pieces = ((number, piece) for number, line in enumerate(block.split(b"\n")) for piece in line.split(b"\r"))
        for shape, (number, piece) in zip(shapes, pieces, strict=True):
            line = self._line + number
            if shape in telling and self._often[shape] < _MOST_ALIKE:
                self._often[shape] += 1
                for part in _parts(piece):
                    self._take_line(line, part)
            elif line <= self._report_end:
                self._report.append(_clean(piece))
            elif self._tracebacks.are_open() and self._tracebacks.end(line, _clean(piece)):
                self._take_line(line, piece[:_LINE_BYTES])

    def _take_line(self, number: int, piece: bytes) -> None:
        text = _clean(piece)
        if any(words in text for words in _LAUNCHERS):
            self._take_report(number, text)
        elif number <= self._report_end:
            self._report.append(text)
        if number <= self._report_end or "sigkill_handler" in text:
            # `find_worker_death` reads it.
            return
        self._has_nccl = self._has_nccl or "NCCL WARN " in text
        if "will restart worker group" in text:
            # What failed before was not the end of the job.
            self._words.clear()
            self._report = [line for line in self._report if "num_local_procs=" in line]
            self._report_line = None
        place = self._tracebacks.take(number, text)
        word = None if place is _Traced.FRAME else _read_line(number, text, ends_traceback=place is _Traced.END)
        if place is _Traced.END or (word is not None and word.is_exception):
            word = None if self._tracebacks.ignores(number, text) else word
        if word is not None:
            self._add(number, word)

    def _add(self, number: int, word: LogWord) -> None:
        if number - self._last > _APART:
            self._keep()
        self._last = number
        key = (word.error.id if word.error else word.text[:80], word.rank, word.is_exception)
        # Of what may be survived the last counts.
        replaces = word.is_exception and (word.error is None or word.error.is_last)
        if replaces if key in self._words else len(self._words) < _MOST_WORDS:
            self._words[key] = word

    def _take_report(self, number: int, text: str) -> None:
        if self._report_line is None or "Root Cause" in text:
            self._report_line = number
        if "Root Cause" in text:
            # That of the last attempt counts.
            self._report = [line for line in self._report if "num_local_procs=" in line]
            self._report_end = number + _REPORT_LINES
        if len(self._report) < _MOST_WORDS:
            self._report.append(text)

    def _keep(self) -> None:
        words = tuple(self._words.values())
        if any(map(_is_telling, words)):
            self._earlier = words
        self._words = {}


def _telling(shapes: AbstractSet[bytes]) -> set[bytes]:
    text = b"\n".join(shapes)
    # Few blocks have any of these, and few lines of those.
    marks = [*_words().intersection(text.translate(_NO_LETTER).split()), *(mark for mark in _ENDINGS if mark in text)]
    return {shape for shape in shapes if any(mark in shape for mark in marks) and _may_tell(shape)} if marks else set()


def _may_tell(shape: bytes) -> bool:
    words = _words().intersection(shape.translate(_NO_LETTER).split())
    return any(_pattern(word).search(shape) for word in words) or _RAISED.search(shape) is not None


def _parts(piece: bytes) -> Iterator[bytes]:
    if len(piece) <= _LINE_BYTES:
        yield piece
        return
    step = _LINE_BYTES // 2
    for start in range(0, len(piece), step):
        part = piece[start : start + _LINE_BYTES]
        if _may_tell(part.translate(_SHAPE, _FIGURES)):
            yield part


def _clean(piece: bytes) -> str:
    return clean_log(piece[:_LINE_BYTES].decode(errors="replace"))


# What stands in front of a line: who printed it (torch, torchrun, accelerate, mpirun, srun, Ray, SkyPilot, docker,
# pdsh, kubectl, journald), when, and as what. What a logger calls less than an error is left as it is.
_DATE = r"\d{4}[-/]\d\d[-/]\d\d[ T_]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?|\d\d/\d\d/\d{4} \d\d:\d\d:\d\d"
# Parts of a training, which are no nodes.
_PART = "(?:[Rr]ank|GPU|cuda|[Pp]roc(?:ess)?|[Ss]tep|[Ee]poch|[Ii]ter(?:ation)?|[Ss]tage|[Ff]old|[Tt]rial|[Tt]hread)"
_MARK = re.compile(
    rf"\s*(?:\[[Rr]ank ?\d{{1,9}}\]:?|{_PART}[ _-]?\d{{1,9}}:(?= )|\[[a-z_]{{1,32}}\d{{1,9}}\]:"
    rf"|\[\d{{1,9}}(?:,\d{{1,9}})?\](?:<std(?:out|err)>)?:|\d{{1,9}}:"
    rf"|\((?:[\w.-]{{1,64}},? )?(?:rank=\d{{1,9}}, )?pid=\d{{1,9}}(?:, ip=(?P<ip>[\d.]{{7,15}}))?[^)]{{0,80}}\)"
    rf"|\[pod/(?P<pod>[\w.-]{{1,64}})/[\w.-]{{1,64}}\]|std(?:out|err)(?: [FP](?= )|:(?= ))"
    rf"|\[?(?:{_DATE})\]?:?|[EF]\d{{4}} \d\d:\d\d:\d\d\.\d{{1,9}} \d{{1,9}} [^\]\s]{{1,200}}:\d{{1,6}}\]"
    rf"|[A-Z][a-z]{{2}} [ \d]\d \d\d:\d\d:\d\d (?P<machine>[\w.-]{{1,64}}) [\w./-]{{1,64}}\[\d{{1,9}}\]:"
    rf"|(?:\[[\w.:]{{1,64}}\])?\[(?:ERROR|CRITICAL|FATAL)\](?: *-)?|-? ?(?:ERROR|CRITICAL)(?: ?[-:])?(?= )"
    rf"|\| (?:ERROR|CRITICAL) +\|(?: [\w.:<>-]{{1,200}} [-|](?= ))?"
    # docker compose, and Python of an exception group
    rf"|(?P<host>[\w.-]{{1,64}}):(?= )|[\w.-]{{1,64}} +\||\|(?= ))\s?"
)
_MOST_MARKS = 6
_RANK = re.compile(
    r"\[rank(\d{1,9})\]|\b[Rr]ank (\d{1,9})\]|\[RANK:(\d{1,9})\]|(?<![\w-])rank=(\d{1,9}), pid=|^[Rr]ank ?(\d{1,9}): "
)
# NCCL's lines begin with the node, which a line of `srun` names, too.
_HOST = re.compile(r"(?:^|\s)([\w.-]{1,64}):\d{1,9}:\d{1,9} \[\d{1,4}\] |(?:srun|slurmstepd): error: ([\w.-]{1,64}): ")
_TIME = re.compile(r"\d{4}-\d\d-\d\d[ T_]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?|(?<=[EFWI])\d{4} \d\d:\d\d:\d\d(?:\.\d{1,9})?")
# What stands before a colon and is a node's name: with a figure or a hyphen, and no file.
_NODE = re.compile(r"(?=[\w.-]*[\d-])(?!.*\.(?:py|cc?|cpp|h|hpp|cu|sh|rs|go|so|log|json|ya?ml)$)[A-Za-z\d][\w.-]*")
_EXCEPTION = re.compile(r"(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Timeout|Exit)(?::(?: |$)|\s*$)")
# At the end of a traceback: with its module, whatever it is called (`socket.gaierror`), or with the usual ending; and a
# plain name, such as a script's own.
_NAMED_EXCEPTION = re.compile(rf"(?:[A-Za-z_]\w*\.)+[A-Za-z_]\w*(?::(?: |$)|\s*$)|{_EXCEPTION.pattern}")
_PLAIN_NAME = re.compile(r"[A-Z]\w*[a-z]\w*(?::(?: |$)|\s*$)")
# What launchers raise when a worker has failed.
_LAUNCHERS_OWN = re.compile(
    r"(?:\w+\.)*(?:ChildFailedError|CalledProcessError|SignalException|ProcessExitedException|ProcessRaisedException"
    r"|SystemExit|RayTaskError)\b"
)


def _rank(line: str) -> int | None:
    found = _RANK.search(line)
    return int(found[found.lastindex or 0]) if found is not None else None


def _unmarked(line: str) -> tuple[str | None, str]:
    """The node that the marks in front of a line name, and the rest of the line."""
    host, text = None, line
    for _ in range(_MOST_MARKS):
        mark = None if _EXCEPTION.match(text.strip()) else _MARK.match(text)
        if mark is None or (mark["host"] and not _NODE.fullmatch(mark["host"])):
            break
        host = host or mark["host"] or mark["ip"] or mark["pod"] or mark["machine"]
        text = text[mark.end() :]
    return host, text


def _read_line(number: int, line: str, *, ends_traceback: bool = False) -> LogWord | None:
    named = _HOST.search(line)
    marked, text = _unmarked(line.strip())
    host = (named[1] or named[2] if named is not None else None) or marked
    text = text.strip()
    text = text.removeprefix("what():").strip()
    # Nor does what NCCL tries again, and what it finds out.
    is_passed_over = "NCCL INFO " in line or _ends_nothing(line) or _ends_nothing(text)
    error = None if is_passed_over else find_error(line)
    if text == _KILLED:
        error = known_errors()["killed"]
    is_exception = (ends_traceback or _EXCEPTION.match(text) is not None) and _LAUNCHERS_OWN.match(text) is None
    is_abort = any(words in line for words in _ABORTS)
    # A date in the words of an exception is not when it was raised.
    time = _TIME.search(line.removesuffix(text) if is_exception else line)
    if error is None and not (is_exception or is_abort):
        return None
    return LogWord(
        line=number,
        text=text,
        rank=_rank(line),
        host=host,
        time=time[0] if time is not None else None,
        is_exception=is_exception,
        is_abort=is_abort,
        error=error,
    )
