"""LogWords: what speaks of a failure in a log, whatever marks stand before a line and whatever comes after it. Pure.

A log becomes lines (log_line), lines become words and reports of launchers, and of these the order of evidence
(standing) chooses. Which text means which error is in known_errors.toml.

A log may have gigabytes and any content: most lines are alike but for their figures, and are looked at once.
"""

from __future__ import annotations

import enum
import functools
import io
import re
import string
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import BinaryIO

import msgspec
from msgspec.structs import replace

from multinode.diagnose.known_errors import anchor, find_error, known_errors
from multinode.diagnose.launcher_report import (
    ANY_ADDRESS,
    BEGINNINGS,
    DEEPSPEED_PLACE,
    SHELL_WORDS,
    SHELLS_SIGNAL,
    LauncherReport,
    ReportReader,
    WorkerDeath,
    first_report,
)
from multinode.diagnose.log_line import (
    FRAME_PLACE,
    LogLine,
    clean_line,
    is_bare_exception,
    is_exception,
    parse_line,
    source_line,
    unwrap,
)
from multinode.diagnose.log_word import INTERRUPT, LogWord
from multinode.diagnose.meaning import collective_of
from multinode.diagnose.place import LIBRARY
from multinode.diagnose.standing import Standing, depends_on, entry_standing, first_cause, word_standing
from multinode.records.log import last_lines
from multinode.text_pattern import text_pattern

_BLOCK_BYTES = 1 << 20
# A log that somebody pasted is no longer than this.
_PASTE_BYTES = 1 << 18
# What is kept of a line, and how many lines that speak.
_LINE_BYTES = 4096
_MOST_WORDS = 400
_MOST_SHAPES = 100_000
_MOST_ALIKE = 1000
# Lines between two that speak, from which on they are of different failures.
_APART = 5000
_TAIL_BYTES = 1 << 16
_IGNORED_LINES = 60
# Lines in which nothing speaks of a failure, from which on a program went on after it.
_QUIET_LINES = 300
# Lines that end a log, from which on it did not end with a message that stands before them.
_END_LINES = 12
# Steps after the end of one of several processes, from which on the others did not need it.
_MANY_STEPS = 20
# Lines of others between two of a traceback.
_BETWEEN_FRAMES = 60
# Lines that belong to an exception, below its first.
_MOST_DETAILS = 8
_LEAST_NUMBERS = 2


class LogReading(msgspec.Struct, frozen=True, kw_only=True):
    """What a log says."""

    words: tuple[LogWord, ...] = ()  # the lines that speak of the last failure in it, in their order
    earlier: tuple[LogWord, ...] = ()  # the lines of the last failure before it that names its own cause
    reports: tuple[LauncherReport, ...] = ()  # what launchers say of their workers, in the last attempt
    lines: int = 0  # how many there are
    tail: str = ""  # the end of the log
    has_nccl: bool = False  # whether warnings of NCCL stand in it
    ended_line: int | None = None  # where a training said that it had ended; None where none did
    hosts: tuple[str, ...] = ()  # the nodes that NCCL names
    addresses: tuple[tuple[str, str], ...] = ()  # which interface and address NCCL announces: `ib0`, `fe80::1%ib0`

    @property
    def report(self) -> LauncherReport | None:
        """The report of the worker that ended first; None without one."""
        return first_report(self.reports)

    @property
    def death(self) -> WorkerDeath | None:
        """The worker that ended first, as a launcher reports it."""
        return self.report.death if self.report is not None else None

    def cause(self, *, rank: int | None = None, aborted: bool | None = None) -> LogWord | None:
        """The line that names the cause best; None where nothing does.

        `rank` is known to have failed, and a signal `aborted` it, or not; None is what the launcher's report says.
        """
        death = self.death
        if rank is not None:
            death = WorkerDeath(rank=rank)
        if aborted is None:
            aborted = self.death is not None and self.death.signal is not None
        # What a launcher raised says no more than its report.
        words = [word for word in self.words if not (word.is_launchers and self.report is not None)]
        best = first_cause(words, death, aborted=aborted)
        if best is not None and not best.is_of_peers:
            return best
        earlier = first_cause(self.earlier, death, aborted=aborted)
        return earlier if earlier is not None and word_standing(earlier) is Standing.CAUSE else best


# Stack frames, what torchrun does to the other workers, and what torch says of one that left without a word.
_NO_WORDS = re.compile(
    r"\s*(?:frame \\?#\d|#\d{1,3} |.*Sending process \d{1,9} closing signal|.*\bclosing signal SIGTERM"
    r"|.*\bdestroy_process_group\(\) was not called\b|.*\*\*\* (?:End of error message|Process received signal) \*\*\*"
    # A signal in Open MPI's words.
    r"|.*\[[\w.-]{1,64}:\d{1,9}\] (?:(?:Signal(?: code)?|Failing at address): |\[ ?\d{1,3}\] ))"
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
    return last_lines("\n".join(_without_cut_traceback(lines)), count)


def _without_cut_traceback(lines: list[str]) -> list[str]:
    """The lines before a traceback without an end, at the end of all; all of them where nothing else stands there."""
    starts = [number for number, line in enumerate(lines) if line.rstrip().endswith(_TRACEBACK)]
    if not starts or not any(line.strip() for line in lines[: starts[-1]]):
        return lines
    below = (parse_line(line).text for line in lines[starts[-1] + 1 :])
    return lines[: starts[-1]] if all(text[:1].isspace() or not text for text in below) else lines


def _ends_nothing(line: str) -> bool:
    return _SURVIVED.search(line) is not None or re.match(r"\s*raise ", line) is not None


def spoken_words(tail: str, count: int, *, of_launcher: bool) -> str:
    """The last lines that may say why a run ended: no warning, and of launchers only if `of_launcher`."""

    def speaks(line: str) -> bool:
        is_warning = _PYTHON_WARNING.match(line) is not None or (not of_launcher and parse_line(line).is_warning)
        return not is_warning and (of_launcher or not any(begins in line for begins in BEGINNINGS))

    return "\n".join(filter(speaks, last_words(tail, count).split("\n")))


def is_progress(text: str) -> bool:
    """Whether a line tells how far a program has come: a step, an epoch, a loss, a bar, a request that it answered."""
    piece = text.encode(errors="replace")
    shape = piece.translate(_SHAPE, _FIGURES)
    is_step = len(shape) < len(piece) and _is_progress(shape) and not _FRAME.match(text)
    return is_step or _is_row(piece)


def is_of_tracker(text: str) -> bool:
    """Whether an experiment tracker prints a line: no training ends by what it cannot upload."""
    return _TRACKER.search(text.encode(errors="replace")) is not None


def read_log(
    log: BinaryIO | bytes | str, *, has_failed: bool = False, progress: Callable[[int], object] | None = None
) -> LogReading:
    """What a log says of failures.

    `has_failed` is of a job that is known to have failed: plain lines at its end do not say that it ended well.
    `progress` is called with the bytes that were read, a block at a time.
    """
    if isinstance(log, str):
        log = log.encode(errors="replace")
    reader = _LogReader(has_failed=has_failed)
    file = io.BytesIO(log) if isinstance(log, bytes) else log
    rest = b""
    is_first = True
    while block := file.read(_BLOCK_BYTES):
        if progress is not None:
            progress(len(block))
        if is_first and len(block) < _PASTE_BYTES:
            block = unwrap(block.decode(errors="replace")).encode()
        is_first = False
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
_ABORTS = (
    "what(): ",
    "HW Exception by GPU",
    "Memory access fault by GPU",
    "Fatal Python error: ",
    "(core dumped)",
    "free(): ",
    "double free or corruption",
    "malloc(): ",
    "realloc(): ",
    "munmap_chunk(): ",
    "corrupted size vs. prev_size",
    "stack smashing detected",
    "Assertion `",
    "aborting the MPI job",
    "*** An error occurred in MPI",
    "*** MPI_ERR_",
)
# What a shell says, and nothing else in its line.
_KILLED = "Killed"
# The second is that of early releases; figures do not matter.
_WARNS = ("NCCL WARN ", ".cu:1 WARN ")
_LAST_ERROR = "Last error:"
_ANNOUNCED = "Bootstrap : Using "
_TRACEBACK = "Traceback (most recent call last):"
# Before the next of several exceptions, and how many lines after the one before.
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
_CHAINED_LINES = 3
# From where Python names a thread to its traceback; the lines of others may stand between.
_NAMED_LINES = 10
# Where a frame of it is, and the most lines of source code below that.
_AT, _MOST_SOURCE = '  File "', 8
# A line of it, and the source code below that.
_FRAME = re.compile(r'  File "|    ')
# Calls that find nothing where another process was first.
_TAKES_AWAY = re.compile(
    r"\b(?:os\.(?:rename|replace|remove|unlink|rmdir|scandir)|shutil\.(?:rmtree|move))\("
    r"|, (?:line \d+, )?in (?:_?rmtree\w*|rename|unlink|_?rotate_checkpoints)\b"
    r"|, (?:line \d+, )?in _?save_(?:checkpoint|model|state|pretrained)\b"
)
# TensorFlow warns of an operation that failed, and raises it later.
_FAILED_OPERATION = "OP_REQUIRES failed"
_NOT_EMPTY = "[Errno 39] Directory not empty"
_RESTART = "will restart worker group"
# What launchers say when they begin.
_BEGIN = ("Setting OMP_NUM_THREADS environment variable for each process", DEEPSPEED_PLACE)
_THREAD = "Exception in thread "
# Before what ended another process than the one that goes on: of Python's multiprocessing, and of Ray.
_PROCESS = b"Process "
_CHILD = re.compile(r"^Process [\w-]{1,100}(?::\d{1,9})*(?=:\s*$)|\(raylet(?=[,)])")
# Before a traceback that Python prints and drops: of a destructor, a callback at exit, a handler of logging.
_IGNORES = ("Exception ignored ", "Error in atexit._run_exitfuncs:", "--- Logging error ---")
_AT_EXIT = re.compile(
    r", in (?:__del__|_run_exitfuncs|_python_exit|_exit_function|_exitfunc)\b"
    r"|\bthreading\.py\", line \d+, in _shutdown\b"
)
_SHUTDOWN = re.compile(r"\b(?:at|after) interpreter shutdown\b|\bPython is (?:likely )?shutting down\b")
_RAY_CALL = "ray::"
_PYXIS_QUOTES = "pyxis:     "
_OTHERS = (
    _PYXIS_QUOTES,
    *_BEGIN,
    _RESTART,
    *_IGNORES,
    _THREAD,
    _RAY_CALL,
    *_WARNS,
    _LAST_ERROR,
    _ANNOUNCED,
    _KILLED,
    *SHELL_WORDS,
    _TRACEBACK,
    *_CHAINED,
)
_ENDINGS = (b"error", b"exception", b"interrupt", b"timeout")
_RAISED = re.compile(
    rb"(?:[a-z_](?:%s)|\bexception)(?: \(see above for traceback\))?(?::| *$)" % b"|".join(_ENDINGS), re.MULTILINE
)
# The form of a line of progress, in small letters and without figures; and what none has.
_PROGRESS = re.compile(
    rb"%\|| it/s|\bs/it\b|http/\.?\" +ok|http/\.\" *$"
    rb"|(?<![a-z_-])(?:global_?|train_?|training )?(?:step|epoch|iter(?:ation)?|episode|timestep|batch(?:e(?=s))?)s?"
    rb"\b['\"]?"
    rb"(?: ?[:=#/\[,|]| +(?:of|/|loss|\[|-|:|$))"
    rb"|\b(?:train_?|eval_?|val_?)?(?:loss|accuracy|runtime|reward|samples_per_second)\b"
    rb"['\"]?(?: ?[:=]| *\| *[-.|]| +\.)"
    rb"|\b(?:ep_rew_mean|ep_len_mean|total_timesteps)\b *\||\btrial +finished with value"
    rb"|:::mllog |nccl info (?!.*-> *(?:\[[\w ]+\])? *$)|\b(?:tokens|samples)(?:/s| per second)|avg bus bandwidth"
)
# The form of a row of figures, such as a benchmark's: few words between many numbers, one of them a decimal.
_ROW_SHAPE = re.compile(rb"[\s|\[\]]*(?:[a-z]{1,12}[\]:]?[\s|.-]+){0,4}[\s|.,+e-]*(?:n/a[\s|]*)?")
_ROW_NUMBER = re.compile(rb"-?\d+(?:\.\d+)?(?:e[+-]\d+)?")
_NO_PROGRESS = re.compile(
    rb"nan\b|error|fail|abort|exception|invalid|cannot|killed|closed|terminat|traceback|usage:|frame "
)
_END_TEXTS = (
    "training complete",
    "training completed",
    "training is completed",
    "training finished",
    "training has finished",
    "training is finished",
    "training done",
    "finished training",
    "done training",
    "run finished",
    "job finished",
    "End time of running",
    "'train_runtime'",
    "Application shutdown complete",
    "Final validation metrics",
    "Final evaluation metrics",
    "Final test metrics",
    "Final metrics",
    '"key": "run_stop"',
)


_ENDED = re.compile("|".join(map(re.escape, _END_TEXTS)), re.IGNORECASE)
# That a training, and not the script around it, has ended: the last such line counts, whatever the language.
_TRAINED = re.compile(
    r"\btraining (?:(?:is|has|was|been|successfully) ){0,3}(?:completed?|finished|done|ended)\b"
    r"|\b(?:finished|done|completed)(?: with)? training\b"
    # "Training", "already" or "all", and "ended", "completed" or "over", in Chinese.
    r"|\u8bad\u7ec3(?:\u5df2|\u5168\u90e8)?(?:\u7ed3\u675f|\u5b8c\u6210|\u5b8c\u6bd5)",
    re.IGNORECASE,
)
# What an experiment tracker prints of a run, also of one that failed: neither progress nor an end.
_TRACKER = re.compile(rb"\b(?:wandb|swanlab|comet (?:info|warning)): |\[neptune\] ", re.IGNORECASE)


@functools.cache
def _texts() -> Mapping[bytes, Sequence[str]]:
    texts: defaultdict[bytes, list[str]] = defaultdict(list)
    catalogue = (text for error in known_errors().values() for text in error.texts)
    for text in (*catalogue, *BEGINNINGS, *_ABORTS, *_OTHERS, *_END_TEXTS):
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


class _Traceback(msgspec.Struct):
    first: int
    last: int
    takes_away: bool = False  # whether it goes through a call that finds nothing where another process was first
    in_thread: bool = False
    others: int = 0  # how many more are mixed with it, without marks that tell them apart
    at_exit: bool = False  # whether it goes through a destructor or what runs at the exit
    of: LogLine | None = None  # its first line: who raised it, where the others have no marks
    child: str | None = None  # the process that it is of, in the words of its parent
    program: str | None = None  # the script that it begins in
    frames: list[str] = []  # the last frame's lines: where, and the source code


class _Tracebacks:
    """Python's tracebacks in a log; those of several processes may be mixed. A line without a mark has None."""

    def __init__(self) -> None:
        # the tracebacks that have not ended, and where Python said that it ignores an exception
        self._open: dict[str | None, _Traceback] = {}
        self._ignored: defaultdict[str | None, list[int]] = defaultdict(list)
        self._last_ignored: dict[str | None, int] = {}
        self._threads: defaultdict[str | None, list[int]] = defaultdict(list)
        # Where the process is named whose exception comes next; and where the last exception stands.
        self._children: dict[str | None, tuple[int, str]] = {}
        self._last_ended: dict[str | None, tuple[int, _Traceback]] = {}
        self.ended: _Traceback | None = None  # the one that the last line ended

    def are_open(self) -> bool:
        return bool(self._open)

    def forget(self, number: int) -> None:
        """Forget tracebacks that began long before this line, or have had no line for long: they will not end."""
        self._open = {key: one for key, one in self._open.items() if not self._is_over(one, number)}

    @staticmethod
    def _is_over(traceback: _Traceback, number: int) -> bool:
        return number - traceback.first >= _APART or number - traceback.last >= _BETWEEN_FRAMES

    def take(self, number: int, line: LogLine) -> _Traced | None:
        """What this line is of a traceback: a frame or source code in it, or its end; else None."""
        key, own = line.process, line.text
        self.ended = None
        after_ignored = number - self._last_ignored.get(key, -_IGNORED_LINES) <= _CHAINED_LINES
        is_ignored = any(words in line.raw for words in _IGNORES) or (after_ignored and own.startswith(_CHAINED))
        if is_ignored and len(self._ignored[key]) < _MOST_WORDS:
            self._ignored[key].append(number)
        if _THREAD in own and len(self._threads[key]) < _MOST_WORDS:
            self._threads[key].append(number)
        child = self.name_child(number, key, line.raw)
        if own.startswith(_CHAINED):
            self._chain(number, key)
        if own.rstrip().endswith(_TRACEBACK):
            if len(self._open) < _MOST_WORDS:
                in_thread = self._is_threads(number, key)
                one = _Traceback(
                    first=number, last=number, in_thread=in_thread, of=line, child=self._child(number, key)
                )
                before = self._open.get(key)
                if before is not None and in_thread and before.in_thread:
                    one.others = before.others + 1
                self._open[key] = one
                if own.strip() != _TRACEBACK or child:
                    # A logger may put its marks before the first line of a message alone.
                    self._open[None] = replace(one)
            return None
        return self._go_on(number, key, own) if key in self._open else None

    def _is_threads(self, number: int, key: str | None) -> bool:
        """Whether a traceback is that of a thread, which Python named before; each name counts for one."""
        named = self._threads[key]
        while named:
            if number - named.pop(0) <= _NAMED_LINES:
                return True
        return False

    def _chain(self, number: int, key: str | None) -> None:
        """The next traceback is of the thread and process of the last one."""
        last, one = self._last_ended.get(key, (-_IGNORED_LINES, None))
        if one is None or number - last > _CHAINED_LINES:
            return
        if one.in_thread:
            self._threads[key].append(number)
        if one.child is not None:
            self._children[key] = number, one.child

    def name_child(self, number: int, process: str | None, text: str) -> bool:
        """Whether a line names the process whose exception comes next."""
        child = _CHILD.search(text)
        if child is not None:
            self._children[process] = number, child[0]
        return child is not None

    def _child(self, number: int, key: str | None) -> str | None:
        """The process whose exception comes next, where its parent named it."""
        last, name = self._children.get(key, (-_IGNORED_LINES, None))
        return name if number - last <= _CHAINED_LINES else None

    def _go_on(self, number: int, key: str | None, own: str) -> _Traced | None:
        one = self._open[key]
        if self._is_over(one, number):
            del self._open[key]
            return None
        if own[:1].isspace():
            one.takes_away = one.takes_away or _TAKES_AWAY.search(own) is not None
            one.at_exit = one.at_exit or _AT_EXIT.search(own) is not None
            one.last = number
            if own.startswith(_AT):
                one.program = _program(own) if one.program is None else one.program
                one.frames = [own]
            elif len(one.frames) < _MOST_SOURCE:
                one.frames.append(own)
            return _Traced.FRAME if _FRAME.match(own) else None
        # A plain name may be that of anything that is printed meanwhile, unless it comes at once.
        is_next = one.last == number - 1 or key is not None
        is_named = _NAMED_EXCEPTION.match(own) is not None
        if one.first < one.last and (is_named or (is_next and _PLAIN_NAME.match(own))):
            self.ended = one
            self._last_ended[key] = number, one
            if own.rstrip().endswith(":"):
                # The traceback that it quotes comes next.
                self._chain(number, key)
            if one.others:
                one.others, one.last = one.others - 1, number
            elif key is not None or is_named:
                del self._open[key]
            return _Traced.END
        return None

    def ignores(self, number: int, line: LogLine) -> bool:
        """Whether Python said before that it ignores this exception; each time it does so counts for one."""
        ignored = self._ignored[line.process]
        while ignored:
            if number - ignored.pop(0) < _IGNORED_LINES:
                self._last_ignored[line.process] = number
                return True
        return False


class _Progress:
    """How far each process came, as the lines with its steps tell; these are noted fast, and read when it matters."""

    def __init__(self) -> None:
        self._noted: dict[bytes, tuple[int, bytes]] = {}
        self._of_nccl: dict[bytes, int] = {}
        self._last: dict[str | None, int] = {}
        self._before = self.line = 0  # the last line but one, and the last
        self._steps: deque[int] = deque(maxlen=_MANY_STEPS)

    def note(self, number: int, piece: bytes) -> None:
        """This line is one of progress."""
        if len(self._noted) >= _MOST_WORDS:
            self._read()
        if b"NCCL INFO " in piece:
            # It tells of NCCL alone.
            self._of_nccl[piece] = number
            if len(self._of_nccl) >= _MOST_WORDS:
                self._read()
            return
        self._steps.append(number)
        self._noted[piece[:32].split(b" ", 1)[0]] = number, piece
        if number > self.line:
            self._before, self.line = self.line, number

    def went_on(self, word: LogWord) -> bool:
        """Whether the process of this word went on after it: by the marks, or where there are none, by the file.

        Another worker may still end its own step after an exception without a mark.
        """
        self._read()
        if word.error is None and word.nccl is not None and self._last.get(f"nccl {word.nccl}", 0) > word.line:
            return True
        if word.process is not None:
            return self._last.get(word.process, 0) > word.line
        if word.rank is not None:
            return False
        return (self._before if word.is_exception or word.is_abort else self.line) > word.line

    def since(self, number: int) -> bool:
        """Whether at least two lines of progress came after this one."""
        return self._before > number

    def many_since(self, number: int) -> bool:
        """Whether so many steps came after this line that no process waited for one that ended there."""
        return len(self._steps) == _MANY_STEPS and self._steps[0] > number

    def _read(self) -> None:
        for number, piece in self._noted.values():
            line = parse_line(clean_line(piece.rsplit(b"\r", 1)[-1], _LINE_BYTES))
            node = f"node {line.host}"
            for key in (line.process, node if line.host is not None else None):
                self._last[key] = max(self._last.get(key, 0), number)
        self._noted.clear()
        for piece, number in self._of_nccl.items():
            key = f"nccl {parse_line(clean_line(piece, _LINE_BYTES)).nccl}"
            self._last[key] = max(self._last.get(key, 0), number)
        self._of_nccl.clear()


# The end of a block in which processes that go on print some of their progress.
_NOTED_BYTES = 1 << 13


def _key(word: LogWord) -> Hashable:
    """Equal for lines of which one is kept for all."""
    return word.error.id if word.error else word.text[:80], word.process, word.is_exception, word.has_figures


class _Attempt(msgspec.Struct, frozen=True):
    """What an earlier run in the same log was ended by."""

    words: dict[Hashable, LogWord] = {}
    reports: tuple[LauncherReport, ...] = ()


class _LogReader:
    """Takes a log a block at a time."""

    def __init__(self, *, has_failed: bool) -> None:
        self._has_failed = has_failed
        self._silent: set[bytes] = set()
        # None is the form of a row of figures, of which each one counts by itself.
        self._steps: dict[bytes, bool | None] = {}
        self._often: Counter[bytes] = Counter()
        self._line = 1
        self._words: dict[Hashable, LogWord] = {}
        self._earlier: tuple[LogWord, ...] = ()
        self._attempts: list[_Attempt] = []
        self._last = 0
        self._tracebacks = _Tracebacks()
        self._progress = _Progress()
        self._reports = ReportReader()
        self._report_line = 0
        self._first_step: int | None = None
        # The last line that spoke of a failure, and the one before the last lines that did not.
        self._spoke = self._quiet = 0
        # The line up to which others may belong to what stands above them.
        self._open_until = 0
        # By process: the key of the exception whose lines go on; the line of the one that the next is raised from.
        self._below: dict[str | None, tuple[Hashable, int]] = {}
        self._raised: dict[str | None, int] = {}
        self._chained: dict[str | None, int] = {}
        # By process: the exception below which the traceback stands that it quotes, and the line where that goes on.
        self._quoting: dict[str | None, tuple[Hashable, int]] = {}
        self._ran_on: dict[str | None, tuple[int, str]] = {}
        self._tail = b""
        self._has_nccl = False
        self._ended_line: int | None = None
        self._addresses: dict[tuple[str, str], None] = {}
        self._hosts: dict[str, None] = {}

    def look(self, block: bytes) -> None:
        """The next lines."""
        self._tail = block[-_TAIL_BYTES:] if len(block) >= _TAIL_BYTES else (self._tail + block)[-_TAIL_BYTES:]
        shapes = block.translate(_SHAPE, _FIGURES).split(b"\n")
        new = set(shapes) - self._silent
        telling = _telling(new)
        self._tracebacks.forget(self._line)
        self._below = {
            key: (of, last) for key, (of, last) in self._below.items() if self._line - last < _BETWEEN_FRAMES
        }
        if len(self._silent) > _MOST_SHAPES:
            self._silent.clear()
        self._silent.update(shape for shape in new - telling if len(shape) < _LINE_BYTES)
        count = block.count(b"\n")
        if telling or self._line <= self._open_until:
            self._take(shapes, telling, block)
        elif self._notes_steps:
            self._note_last(self._line + count, block)
        self._line += count

    def reading(self) -> LogReading:
        """What it all says."""
        words, reports = self._words, self._reports.reports()
        former = self._attempts[-1] if self._attempts else _Attempt()
        has_own = any(word_standing(self._told(word)) < Standing.NOISE for word in words.values())
        if former.reports and not has_own and all(report.is_of_job for report in reports):
            words, reports = {**former.words, **words}, (*former.reports, *reports)
        words, reports = self._with_stages(words, reports)
        reports = tuple(report for report in reports if not self._is_outlived(report))
        # What runs after a report is another attempt, unless one process ended, without which others go on.
        ended = max((report.line for report in reports if not report.is_of_one_process), default=0)
        told = tuple(
            sorted(
                (word if word.line < ended else self._told(word) for word in words.values()), key=lambda word: word.line
            )
        )
        if not (reports or self._has_failed):
            told = tuple(self._without_messages(told))
        return LogReading(
            words=told,
            earlier=self._earlier,
            reports=reports,
            lines=self._line - (not self._tail or self._tail.endswith(b"\n")),
            tail=self._tail.decode(errors="replace"),
            has_nccl=self._has_nccl,
            ended_line=self._ended_line,
            addresses=tuple(self._addresses),
            hosts=tuple(self._hosts),
        )

    def _with_stages(
        self, words: dict[Hashable, LogWord], reports: tuple[LauncherReport, ...]
    ) -> tuple[dict[Hashable, LogWord], tuple[LauncherReport, ...]]:
        """The words and reports of the last attempt, and of the programs before that did not write what it misses."""
        last = words
        for former in reversed(self._attempts):
            if not depends_on(tuple(last.values()), tuple(former.words.values())):
                break
            last = former.words
            words, reports = {**former.words, **words}, (*former.reports, *reports)
        return words, reports

    def _is_outlived(self, report: LauncherReport) -> bool:
        """Whether a step or command that failed before the training began was a helper of it."""
        if report.is_of_one_process and self._progress.many_since(report.line):
            return True
        began_before = self._first_step is not None and self._first_step < report.line
        went_on = self._progress.since(report.line) or report.line <= self._quiet_after
        return report.is_of_job and not began_before and went_on

    def _told(self, word: LogWord) -> LogWord:
        is_past = word.is_shells and not len(self._reports) and self._line - word.line > _BETWEEN_FRAMES
        is_past = is_past or (
            word.process is None and word.line <= self._quiet_after < (self._report_line or self._line)
        )
        return replace(word, went_on=True) if is_past or self._progress.went_on(word) else word

    def _without_messages(self, words: Sequence[LogWord]) -> Iterator[LogWord]:
        """The words; of a log that ends well, a message after the last exception ended nothing."""
        raised = (word.line for word in words if word.is_exception or word.is_abort or word.is_launchers)
        last = max(raised, default=0)
        below = self._line - self._spoke - 1
        lines = self._tail.decode(errors="replace").rstrip("\n").split("\n")[-below:] if below > 0 else []
        plain = [line for line in lines if line.strip() and not _NO_WORDS.match(line)]
        has_trained = any(_TRAINED.search(line) for line in plain)
        for word in words:
            # NCCL may warn of what a training hangs by.
            is_outlived = has_trained or (len(plain) >= _END_LINES and not word.is_nccl)
            # A scheduler tells how the job ended.
            is_message = word.line > last and not (word.error is not None and word.error.project == "Slurm")
            yield replace(word, went_on=True) if is_outlived and is_message else word

    @property
    def _quiet_after(self) -> int:
        """The last line that spoke of a failure before many that did not."""
        if self._has_failed:
            return self._quiet
        return self._spoke if self._line - self._spoke > _QUIET_LINES else self._quiet

    def _speak(self, number: int) -> None:
        if number - self._spoke > _QUIET_LINES:
            self._quiet = self._spoke
        self._spoke = number

    def _is_step(self, shape: bytes, piece: bytes) -> bool:
        if len(shape) >= _LINE_BYTES:
            return False
        if shape not in self._steps:
            if len(self._steps) > _MOST_SHAPES:
                self._steps.clear()
            may_be_row = b"." in shape and _ROW_SHAPE.fullmatch(shape) is not None
            self._steps[shape] = _is_progress(shape) or (None if may_be_row else False)
        known = self._steps[shape]
        return _is_row(piece) if known is None else known

    def _note_last(self, last: int, block: bytes) -> None:
        """The last lines of progress in a block that tells of nothing else, up to the line `last`."""
        end = block[-_NOTED_BYTES:]
        # A line that was drawn several times counts as one at the end of the block.
        number = last - end.count(b"\n") if b"\r" not in end else None
        shapes, pieces = end.translate(_SHAPE, _FIGURES).split(b"\n"), end.replace(b"\r", b"\n").split(b"\n")
        for place, (shape, piece) in enumerate(zip(shapes, pieces, strict=True)):
            if self._is_step(shape, piece):
                self._note(last if number is None else number + place, piece)

    @property
    def _notes_steps(self) -> bool:
        """Whether it matters how far a training came: the first step, and those after what speaks of a failure."""
        return self._first_step is None or bool(self._words) or self._report_line > 0

    def _note(self, number: int, piece: bytes) -> None:
        self._first_step = self._first_step or number
        self._progress.note(number, piece)

    def _take(self, shapes: Sequence[bytes], telling: AbstractSet[bytes], block: bytes) -> None:
        pieces = ((number, piece) for number, line in enumerate(block.split(b"\n")) for piece in line.split(b"\r"))
        for shape, (number, piece) in zip(shapes, pieces, strict=True):
            line = self._line + number
            if piece.startswith(_PROCESS):
                self._tracebacks.name_child(line, None, clean_line(piece, _LINE_BYTES))
            if shape in telling and self._often[shape] < _MOST_ALIKE:
                self._often[shape] += 1
                for part in _parts(piece):
                    self._take_line(line, part)
            elif line <= self._open_until:
                self._take_silent(line, shape, piece[:_LINE_BYTES])
            elif self._notes_steps and self._is_step(shape, piece):
                self._note(line, piece)

    def _take_silent(self, number: int, shape: bytes, piece: bytes) -> None:
        """A line that may go on with what stands above it."""
        line = parse_line(clean_line(piece, _LINE_BYTES))
        if self._reports.is_open and self._reports.take(number, line):
            self._keep_below(number, line)
            return
        place = self._tracebacks.take(number, line)
        if place is not None:
            self._open_until = number + _BETWEEN_FRAMES
            self._speak(number)
        if place is _Traced.END:
            self._read(number, line, place)
        elif place is None and self._is_step(shape, piece) and not _FRAME.match(line.text):
            self._note(number, piece)
        elif place is None:
            self._keep_below(number, line)

    def _take_line(self, number: int, piece: bytes) -> None:
        line = parse_line(clean_line(piece, _LINE_BYTES))
        self._see_restart(line)
        is_report = any(words in line.raw for words in BEGINNINGS) or SHELLS_SIGNAL.match(line.text) is not None
        if is_report:
            self._begin_attempt_after_progress()
            self._speak(number)
        known = len(self._reports)
        is_inside = self._reports.take(number, line)
        if self._reports.is_open or _TRACEBACK in line.raw or self._tracebacks.are_open():
            self._open_until = number + _BETWEEN_FRAMES
        if is_inside:
            self._keep_below(number, line)
            return
        if is_report:
            self._report(number)
        self._has_nccl = self._has_nccl or line.is_nccl_warning
        if _ANNOUNCED in line.raw:
            self._announce(line.raw)
        ran_on = _RAY_TASK.search(line.raw) if _RAY_CALL in line.raw else None
        if ran_on is not None and ran_on[1] != ANY_ADDRESS:
            self._ran_on[line.process] = number, ran_on[1]
        if _ENDED.search(line.text) and not _TRACKER.search(piece):
            self._ended_line = number
        if line.text.startswith(_CHAINED) and line.process in self._raised:
            self._chained[line.process] = self._raised[line.process]
        self._read(number, line, self._tracebacks.take(number, line), is_report=len(self._reports) > known)

    def _see_restart(self, line: LogLine) -> None:
        if _RESTART in line.raw:
            # What failed before was not the end of the job.
            self._words.clear()
            self._reports.forget()
            self._report_line = 0
            self._attempts.clear()
        elif any(words in line.raw for words in _BEGIN) and self._report_line:
            self._begin_attempt()

    def _report(self, number: int) -> None:
        self._report_line = number
        # What its process went on after has been survived, whatever runs later.
        self._words = {key: self._told(word) for key, word in self._words.items()}

    def _begin_attempt_after_progress(self) -> None:
        if self._report_line and self._progress.since(self._report_line):
            self._begin_attempt()

    def _begin_attempt(self) -> None:
        """A launcher starts workers anew, or a program goes on, after a report: only what comes now counts."""
        if len(self._attempts) < _MOST_WORDS:
            self._attempts.append(_Attempt(words=self._words, reports=self._reports.reports()))
        self._words, self._report_line = {}, 0
        self._reports.forget()

    def _announce(self, text: str) -> None:
        found = _ADDRESS.search(text)
        if found is not None and len(self._addresses) < _MOST_WORDS:
            self._addresses[found[1], found[2]] = None
        host = parse_line(text).host
        if host is not None and len(self._hosts) < _MOST_WORDS:
            self._hosts[host] = None

    def _read(self, number: int, line: LogLine, place: _Traced | None, *, is_report: bool = False) -> None:
        if place is _Traced.FRAME:
            self._speak(number)
            return
        word = _read_line(number, line, traceback=self._tracebacks.ended if place is _Traced.END else None)
        if (place is _Traced.END or (word is not None and word.is_exception)) and self._tracebacks.ignores(
            number, line
        ):
            word = replace(word, is_noise=True) if word is not None else None
        if is_report:
            # No exception goes on in what a launcher says, and of the line itself the report says by whom it is.
            self._below.pop(line.process, None)
            word = word if word is None or word.error is not None else None
        elif word is None or not (word.is_exception or word.is_abort or word.is_nccl):
            self._keep_below(number, line)
        if word is None:
            return
        if line.is_nccl_warning and line.host is not None:
            self._hosts[line.host] = None
        if word.is_exception:
            near, node = self._ran_on.get(line.process, (-_IGNORED_LINES, None))
            if word.host is None and number - near < _IGNORED_LINES:
                word = replace(word, host=node)
            word = replace(word, raised_from=self._chained.pop(line.process, None))
        key = self._add(number, word)
        self._link(number, line.process, word)
        # Below an exception, or what NCCL reports, comes more of it.
        if key is not None and (word.is_exception or "NCCL error" in word.text or "async exception" in word.text):
            self._below[line.process] = key, number
            # A logger puts its marks before the first line of a message alone.
            self._below[None] = key, number
            self._open_until = number + _BETWEEN_FRAMES

    def _link(self, number: int, process: str | None, word: LogWord) -> None:
        """Remember an exception for the one that is raised from it, or that quotes its traceback."""
        if not word.is_exception:
            return
        kept = self._words.get(_key(word), word)
        self._raised[process] = kept.line
        outer, last = self._quoting.get(process, (None, -_IGNORED_LINES))
        traceback = self._tracebacks.ended
        goes_on = traceback is not None and 0 < traceback.first - last <= _CHAINED_LINES
        if outer is not None and outer in self._words and goes_on and outer != _key(word):
            self._words[outer] = replace(self._words[outer], raised_from=kept.line)
            self._quoting[process] = outer, number
        elif word.text.endswith(":"):
            self._quoting[process] = _key(word), number
        else:
            self._quoting.pop(process, None)

    def _keep_below(self, number: int, line: LogLine) -> bool:
        """Whether a line belongs to an exception above it, which then has it."""
        if line.process not in self._below:
            return False
        key, last = self._below[line.process]
        word = self._words.get(key)
        text = line.text.strip()
        is_own = line.process is not None or line.text[:1].isspace() or _GOES_ON.match(text) is not None
        is_next = number == last + 1 and line.text == line.raw
        is_quoted = word is not None and bool(word.details) and word.details[-1].startswith(_LAST_ERROR)
        if word is not None and word.is_exception and _HEADING.fullmatch(text) and number == last + 1:
            # Some libraries put what they say below headings, with empty lines between.
            self._below[line.process] = key, number
            return False
        if (
            word is None
            or word.is_launchers
            or not text
            or number - last > (_BETWEEN_FRAMES if line.process is not None else 1)
            or len(word.details) >= _MOST_DETAILS
            or not (is_own or is_quoted or is_next)
            or text.endswith(_TRACEBACK)
            or line.text.startswith(_CHAINED)
            or _NO_WORDS.match(line.text)
        ):
            del self._below[line.process]
            return False
        self._below[line.process] = key, number
        details = (*word.details, text[:_LINE_BYTES])
        if is_quoted and not text.startswith("ncclUniqueId"):
            said = replace(_plain(number, line), is_nccl=True, error=find_error(text))
            self._add(number, replace(said, rank=said.rank if said.rank is not None else word.rank))
        elif is_own and not _is_only_python(word):
            more = find_error(text)
            if more is not None and (word.error is None or entry_standing(more) < entry_standing(word.error)):
                word = replace(word, error=more)
        node = _NODE_IP.search(text) if word.host is None else None
        rank = _OWN_RANK.search(text) if word.rank is None else None
        self._words[key] = replace(
            word,
            details=details,
            host=node[1] if node is not None else word.host,
            rank=int(rank[1]) if rank is not None else word.rank,
        )
        return True

    def _add(self, number: int, word: LogWord) -> Hashable | None:
        self._begin_attempt_after_progress()
        if word_standing(word) < Standing.NOISE:
            self._speak(number)
        if number - self._last > _APART:
            self._keep()
        self._last = number
        key = _key(word)
        former = self._words.get(key)
        if former is None:
            if len(self._words) >= _MOST_WORDS:
                return None
        else:
            # Of what may be survived the last counts.
            is_last = word.is_exception and (word.error is None or word.error.is_last)
            is_better = former.is_noise and not word.is_noise
            is_worse = word.is_noise and not former.is_noise
            if is_worse or not (is_last or is_better or word.error is None or self._progress.went_on(former)):
                return None
        self._words[key] = word
        return key

    def _keep(self) -> None:
        words = tuple(map(self._told, self._words.values()))
        if any(word_standing(word) is Standing.CAUSE for word in words):
            self._earlier = words
        self._words = {}
        self._below.clear()


def _telling(shapes: AbstractSet[bytes]) -> set[bytes]:
    text = b"\n".join(shapes)
    # Few blocks have a marked word, and few lines of such a block.
    marks = [*_words().intersection(text.translate(_NO_LETTER).split()), *(mark for mark in _ENDINGS if mark in text)]
    return {shape for shape in shapes if any(mark in shape for mark in marks) and _may_tell(shape)} if marks else set()


def _may_tell(shape: bytes) -> bool:
    words = _words().intersection(shape.translate(_NO_LETTER).split())
    if any(_pattern(word).search(shape) for word in words):
        return True
    # Most lines have none of these, which is found faster than by an expression.
    return any(ending in shape for ending in _ENDINGS) and _RAISED.search(shape) is not None


def _is_progress(shape: bytes) -> bool:
    return _PROGRESS.search(shape) is not None and _NO_PROGRESS.search(shape) is None and _TRACKER.search(shape) is None


def _is_row(piece: bytes) -> bool:
    """Whether a line is a row of a benchmark's table: mostly numbers, with a decimal among them."""
    cells = piece.replace(b"|", b" ").split()
    numbers = [cell for cell in cells if _ROW_NUMBER.fullmatch(cell)]
    return len(numbers) >= _LEAST_NUMBERS and len(numbers) * 2 > len(cells) and any(b"." in cell for cell in numbers)


def _parts(piece: bytes) -> Iterator[bytes]:
    if len(piece) <= _LINE_BYTES:
        yield piece
        return
    step = _LINE_BYTES // 2
    for start in range(0, len(piece), step):
        part = piece[start : start + _LINE_BYTES]
        if _may_tell(part.translate(_SHAPE, _FIGURES)):
            yield part


# At the end of a traceback: with its module, whatever it is called (`socket.gaierror`), or with the usual ending; and a
# plain name, such as a script's own.
_NAMED_EXCEPTION = re.compile(
    r"(?:[A-Za-z_]\w*\.)+[A-Za-z_]\w*(?:\(\w{1,100}\))?(?::(?: |$)|\s*$)"
    r"|(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Timeout|Exit)(?::(?: |$)|\s*$)"
)
_PLAIN_NAME = re.compile(r"[A-Z]\w*[a-z]\w*(?::(?: |$)|\s*$)")
# What launchers raise when a worker has failed.
_LAUNCHERS_OWN = re.compile(
    r"(?:\w+\.)*(?:ChildFailedError|CalledProcessError|SignalException|ProcessExitedException|ProcessRaisedException"
    r"|SystemExit|RayTaskError|TuneError|TrainingFailedError)\b|.*The first process to do so was"
)
# Without a mark, what goes on with an exception: NCCL's lines, codes of libraries, a reason.
_GOES_ON = re.compile(
    r"nccl\w+: |Last error:|E[A-Z]\d{4}:|(?:Reason|Solution|Process name|Exit code|Worker exit)\b"
    r"|The (?:actor|worker|task|node)\b",
    re.IGNORECASE,
)
# Nothing, a rule, or the head of a list between an exception and what goes on with it.
_HEADING = re.compile(r"|[-=*#_]{4,}|- [^:]{1,80}:(?: \([^)]{1,80}\))?")
_ADDRESS = re.compile(r"Bootstrap : Using \[?\d*\]?([\w.-]{1,32}):\[?([\da-fA-F.:]{2,64}(?:%[\w.-]{1,32})?)\]?<\d")
# A warning, by Python or a logger.
_PYTHON_WARNING = re.compile(r".{0,100}\S{1,300}:\d{1,6}: \w{0,40}Warning: ")
_WARNING = re.compile(
    rf"{_PYTHON_WARNING.pattern}"
    r"|\W{0,4}(?:WARNING|WARN|INFO|DEBUG)\b|.{0,120}?[ \[|-](?:WARN|WARNING|INFO|DEBUG)[ \]|:-]"
)
# A message that says what the program does instead.
_GOES_WITHOUT = re.compile(r"\b(?:ignoring|skipping|retrying|falling back|continuing)\b", re.IGNORECASE)
# NCCL's proxy thread works for the ranks: what it failed at says the line of the call itself.
_PASSED_ON = re.compile(r"\bproxy\.cc:\d{1,5}\]? NCCL WARN ")
# What a program in the log of enroot says; a shell names the line of its script, and goes on.
_ENROOT_SAYS = re.compile(rf"{_PYXIS_QUOTES}[a-z][\w.-]{{0,64}}: ")
# Where a call of NCCL returned an error to another one.
_RETURNED = re.compile(r"\S+:\d+ -> \d+(?: \[[\w ]+\])?$")
# What a shell or conda says of a command in a script, and a command of the system of a file.
_SHELL_SAYS = re.compile(
    r"(?!.*\berror: )(?:(?:\S{1,300}: )?line \d{1,6}: |-?[a-z]{0,3}sh: "
    r"|(?:CommandNotFoundError|EnvironmentNameNotFound): |[a-z][\w.+-]{0,40}: .{0,300}: "
    r"(?=(?:No such file or directory|Permission denied|Not a directory|Is a directory|File exists)$))"
    r"(?!\s*\d{1,9} (?:Killed|Aborted|[A-Z][a-z]+ (?:fault|error|instruction)))"
)
# What it says when a signal ended one.
_SHELLS_JOB = re.compile(r".{0,300}: line \d{1,6}: +\d{1,9} Killed\b(?:.{0,1000}?([\w-]{1,100})\.py\b)?")
# What ends a program with exit code 2.
_ARGPARSE = re.compile(r"[\w ./-]{1,200}: error: (?:unrecognized|the following|ambiguous|argument)")
# Where the task ran whose exception Ray raises again, and prints below.
_RAY_TASK = re.compile(r"\bray::[^ ]{1,200} \(pid=\d{1,9}, ip=([\d.]{7,15})")
# A node in the words of Ray.
_NODE_IP = re.compile(r"(?:\(IP: |^ip: )([\d.]{7,15})(?:,|$)")
# The rank that an exception is about, in its words.
_OWN_RANK = re.compile(r"\b(?:for|on|at) rank[ =:]{0,2}(\d{1,9})\b(?!,? (?:and|to|from)\b)", re.IGNORECASE)
# Whoever is told by another rank to have been late first: by a watchdog's signal, a barrier, the report under
# TORCH_NCCL_DESYNC_DEBUG, or torch's analyzer of flight records.
_SIGNALLED = re.compile(r"dump signal due to a .{0,60}? from +rank (\d{1,9})\b")
_POINTS = re.compile(
    rf"{_SIGNALLED.pattern}"
    r"|[Rr]anks? (\d{1,9})(?:, \d{1,9}){0,9} failed to pass monitoredBarrier"
    r"|\[(\d{1,9})(?:, \d{1,9})*\] (?:joined but didn't finish|finished) collective #"
    r"|\branks \[(\d{1,9})(?:, \d{1,9})*\] are the lagging ranks"
    r"|\bmissing ranks: \{(\d{1,9})\b"
    r"|\bCulprit rank (\d{1,9}); Error type: "
)


def _program(frame: str) -> str | None:
    """The script in whose top level a traceback begins; empty where it begins in anything else."""
    place = FRAME_PLACE.match(frame)
    if place is None or LIBRARY.search(place[1]) is not None:
        return None
    name = place[1].rpartition("/")[2]
    return name.removesuffix(".py") if place[3] == "<module>" and name.endswith(".py") else ""


def _plain(number: int, line: LogLine) -> LogWord:
    return LogWord(
        line=number,
        text=line.text.strip(),
        rank=line.rank if line.rank is not None else line.task,
        host=line.host,
        worker=line.worker,
        process=line.process,
        nccl=line.nccl,
        time=line.time,
    )


def _is_only_python(word: LogWord) -> bool:
    return word.error is None and re.match(r"(?:Key|Type|Index|Attribute|Name|Assertion)Error\b", word.text) is not None


def _read_line(number: int, line: LogLine, *, traceback: _Traceback | None = None) -> LogWord | None:
    raw = line.raw
    text = line.text.strip().removeprefix("what():").strip()
    # Nor does what NCCL tries again, and what it finds out.
    is_passed_over = "NCCL INFO " in raw or _ends_nothing(raw) or _ends_nothing(text)
    error = None if is_passed_over else find_error(raw)
    job = _SHELLS_JOB.match(raw)
    if text == _KILLED or job is not None:
        error = known_errors()["killed"]
    elif error is None and _ENROOT_SAYS.search(raw) is not None:
        error = known_errors()["container-start"]
    elif error is None and text.startswith(INTERRUPT) and is_exception(text):
        error = known_errors()["sigint"]
    raised = traceback is not None or is_exception(text) or _LAUNCHERS_OWN.match(text) is not None
    is_launchers = _LAUNCHERS_OWN.match(text) is not None
    is_abort = any(words in raw for words in _ABORTS) or (error is not None and _ARGPARSE.match(text) is not None)
    is_nccl = line.is_nccl_warning
    if error is None and is_nccl and (_RETURNED.search(text) is not None or _is_harmless(raw)):
        return None
    was_taken = _NOT_EMPTY in text or (error is not None and error.id == "missing-file")
    if was_taken and traceback is not None and traceback.takes_away:
        error = known_errors()["file-taken"]
    if error is None and not (raised or is_abort or is_nccl):
        return None
    points = _POINTS.search(text)
    plain = _plain(number, line)
    of = traceback.of if traceback is not None else None
    if of is not None:
        plain = replace(
            plain,
            rank=plain.rank if plain.rank is not None else of.rank,
            host=plain.host or of.host,
            worker=plain.worker or of.worker,
            time=plain.time or of.time,
        )
    return replace(
        plain,
        text=text,
        rank=int(points[points.lastindex or 0]) if points is not None else plain.rank,
        is_exception=raised,
        is_abort=is_abort,
        is_nccl=is_nccl,
        is_passed_on=is_nccl and error is None and _PASSED_ON.search(raw) is not None,
        is_launchers=is_launchers and error is None,
        is_noise=(line.is_warning and (error is None or error.kind != "killed") and _FAILED_OPERATION not in raw)
        or (traceback is not None and traceback.in_thread)
        or (not is_nccl and not is_abort and error is None and _GOES_WITHOUT.search(text) is not None)
        or (not is_nccl and not (error is not None and error.is_stop) and _WARNING.match(raw) is not None),
        at_exit=(traceback is not None and traceback.at_exit) or (raised and _SHUTDOWN.search(text) is not None),
        is_shells=_SHELL_SAYS.match(text) is not None,
        child=traceback.child if traceback is not None else None,
        program=(traceback.program or None) if traceback is not None else job[1] if job is not None else None,
        points=points is not None,
        said_by=plain.rank if _SIGNALLED.search(text) is not None else None,
        error=error,
        collective=collective_of(raw),
        source_line=source_line(traceback.frames) if traceback is not None and is_bare_exception(text) else None,
    )


def _is_harmless(text: str) -> bool:
    return any(error.is_harmless and error.matches(text) for error in known_errors().values())
