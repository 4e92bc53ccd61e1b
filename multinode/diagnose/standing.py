"""Standing: the order of evidence. What names the first cause of a failure best, in a log and between nodes. Pure."""

from __future__ import annotations

import enum
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from multinode.diagnose.known_errors import KnownError
    from multinode.diagnose.launcher_report import WorkerDeath
    from multinode.diagnose.log_word import LogWord


class Standing(enum.IntEnum):
    """What a piece of evidence says about the cause. The first in this table counts; of equal ones, the earliest.

    `NOT_STARTED` to `EXIT_CODE` are also what can be known about a node, so this is the order between nodes, too.
    """

    NOT_STARTED = enum.auto()  # the job of a node could not be started, and says why
    RAISED = enum.auto()  # a worker's exception on record, unless it is about a connection
    CAUSE = enum.auto()  # what ended a process and names its cause: in the catalogue, neither general nor about peers
    OWN_WORDS = enum.auto()  # what ended a process, in words that the catalogue does not have
    NCCL_WORDS = enum.auto()  # a warning or last error of NCCL that the catalogue does not have
    SIGNAL = enum.auto()  # a signal that ended a process, in whatever it said last
    GENERAL = enum.auto()  # says what failed, not why
    UNRECORDED = enum.auto()  # a job failed without an exception on record, while others have one
    SILENT_EXIT = enum.auto()  # a process ended itself without a word, and others then lost it
    PEER = enum.auto()  # a consequence: another process is gone or late
    PEER_GENERAL = enum.auto()  # a consequence, without saying of what
    EXIT_CODE = enum.auto()  # an exit code: a fact beside the cause
    NOISE = enum.auto()  # a warning, also usual at a normal end
    SURVIVED = enum.auto()  # the process went on: it printed progress, or raised an unrelated exception later


def entry_standing(error: KnownError) -> Standing:
    """The standing of a text of this entry."""
    if error.of_peers:
        return Standing.PEER_GENERAL if error.is_general else Standing.PEER
    return Standing.GENERAL if error.is_general else Standing.CAUSE


def word_standing(word: LogWord) -> Standing:
    """The standing of a line by itself, whatever came after it."""
    if word.went_on:
        return Standing.SURVIVED
    if word.is_noise:
        return Standing.NOISE
    if word.is_launchers:
        return Standing.EXIT_CODE
    if word.error is None:
        if word.is_passed_on:
            return Standing.PEER_GENERAL
        return Standing.NCCL_WORDS if word.is_nccl else Standing.OWN_WORDS
    return entry_standing(word.error)


def first_cause(words: Sequence[LogWord], death: WorkerDeath | None, *, aborted: bool = False) -> LogWord | None:
    """The line that names the cause best; None where nothing does.

    `death` is the worker known to have ended first. If a signal `aborted` it, an exception without an entry counts only
    if the line itself names that worker.
    """
    rank = death.rank if death is not None else None
    ended = [
        word
        for word in _endings(words, rank)
        if not (aborted and _is_python_own(word) and (rank is None or word.rank != rank))
    ]
    own = [word for word in ended if rank is None or word.rank == rank or (word.rank is None and _ends_a_process(word))]
    best = _best(own, rank)
    if best is None or word_standing(best) > Standing.NCCL_WORDS:
        best = _best(ended, rank)
    return best


def _best(words: Sequence[LogWord], rank: int | None) -> LogWord | None:
    late = {word.rank for word in words if word.points} or _behind(words)

    def key(word: LogWord) -> tuple[int | bool, ...]:
        standing = word_standing(word)
        return (
            standing,
            word.is_bare,
            word.rank not in late if late else rank is not None and word.rank != rank,
            standing >= Standing.PEER and not word.is_nccl,
            standing >= Standing.PEER and not word.has_figures,
            standing >= Standing.PEER and not word.points,
            # NCCL warns about what it can do without before it fails.
            -word.line if standing is Standing.NCCL_WORDS else word.line,
        )

    best = min(words, key=key, default=None)
    if best is None or best.rank is not None or best.error is None:
        return best
    # Of the lines with one meaning, the one that names its rank.
    alike = [word for word in words if word.error == best.error and best.host in {None, word.host}]
    near = [word for word in alike if word.rank is not None and 0 < word.line - best.line <= _NEAR_LINES]
    return near[0] if near and rank is None else best


def _behind(words: Sequence[LogWord]) -> set[int | None]:
    """The ranks that had reached the fewest collectives, or another one than most, as their watchdogs say."""
    last = {word.rank: collective for word in words if (collective := word.collective) and word.rank is not None}
    if len({collective.group for collective in last.values()}) > 1:
        return set()
    reached = min((collective.number for collective in last.values()), default=0)
    behind = {rank for rank, collective in last.items() if collective.number == reached}
    if len(behind) < len(last):
        return set(behind)
    often = Counter(collective.operation for collective in last.values()).most_common()
    if len(often) > 1 and often[0][1] > often[1][1]:
        return {rank for rank, collective in last.items() if collective.operation != often[0][0]}
    return set()


def other_collectives(words: Sequence[LogWord], word: LogWord) -> Iterator[str]:
    """In which other collective another rank of the group waited, where its watchdog names a different one."""
    own = word.collective
    for other in words:
        theirs = other.collective
        if own is None or theirs is None or theirs == own or theirs.group != own.group or other.rank == word.rank:
            continue
        yield (
            f"Rank {word.rank} was in {own.operation} (number {own.number}), rank {other.rank} in {theirs.operation} "
            f"(number {theirs.number}): the ranks were not in the same collective."
        )
        return


# Lines that one process prints in a row.
_NEAR_LINES = 10
# Before an exception of its process, so many lines at the most: what the libraries and the kernel said about it.
_BEFORE_LINES = 200
# Exceptions of Python that a program causes itself, and no library below it.
_PROGRAMS_OWN = re.compile(
    r"(?:\w+\.)*\w*(?:KeyError|TypeError|ValueError|IndexError|AttributeError|NameError|UnboundLocalError"
    r"|ZeroDivisionError|AssertionError|NotImplemented\w+|SyntaxError|IndentationError|UnicodeDecodeError"
    r"|RecursionError|StopIteration|JSONDecodeError|ModuleNotFoundError|ImportError|FileNotFoundError)\b"
)


def _endings(words: Sequence[LogWord], rank: int | None) -> Iterator[LogWord]:
    """What may have ended a process: nothing survived; of signals to stop the first, if no exception led to it."""
    left = list(_not_survived(words, rank))
    left = [word for word in left if not any(_depends_on(word, one) for one in left)]
    stop = next((word for word in left if word.is_stop), None)
    is_led_to = stop is not None and any(
        word.line < stop.line and (word.is_exception or word.is_abort) and word_standing(word) < Standing.PEER
        for word in left
    )
    return (word for word in left if not word.is_stop or (word is stop and not is_led_to))


def _not_survived(words: Sequence[LogWord], rank: int | None) -> Iterator[LogWord]:
    """What is left of the words when those are gone that a later exception shows to be survived."""
    # A signal to stop comes to the launcher, unless its line names a rank.
    raised = [
        word
        for word in words
        if (word.is_exception or word.is_abort)
        and word_standing(word) <= Standing.OWN_WORDS
        and not (word.is_stop and word.rank is None)
    ]
    by_line = {word.line: word for word in words}
    for word in words:
        if word_standing(word) >= Standing.NOISE or (word.is_shells and _is_outlived(word, words)):
            continue
        later = [
            one
            for one in raised
            if one.line > word.line and _same_process(word, one, rank) and not _depends_on(one, word)
        ]
        if not later:
            yield word
            continue
        last = later[-1]
        in_chain = any(word in _chain(one, by_line) for one in later) or _is_behind_bare(word, last)
        if in_chain or (not word.is_exception and _explains(word, last)):
            # Of a chain the last exception stands for all, unless an earlier one says more.
            if not in_chain or (word_standing(word), word.is_bare) < (word_standing(last), last.is_bare):
                yield word
        elif word.is_exception and last.is_abort and word_standing(word) <= word_standing(last):
            # A runtime that ends on an exception aborts.
            yield word


def _is_outlived(word: LogWord, words: Sequence[LogWord]) -> bool:
    """Whether what a shell complained of did not end its script, as a program failed later by itself."""
    return any(
        one.line > word.line
        and not one.is_shells
        and word_standing(one) <= Standing.NCCL_WORDS
        and word.host in {None, one.host}
        for one in words
    )


def _depends_on(word: LogWord, earlier: LogWord) -> bool:
    """Whether a program misses what another one, which ended badly before, did not write."""
    return (
        earlier.line < word.line
        and word.is_exception
        and word.misses
        and word.raised_from != earlier.line
        and None not in {word.program, earlier.program}
        and word.program != earlier.program
    )


def depends_on(words: Sequence[LogWord], earlier: Sequence[LogWord]) -> bool:
    """Whether what ended a run is that it misses what an earlier run of another program did not write."""
    last, first = first_cause(words, None), first_cause(earlier, None)
    return last is not None and first is not None and _depends_on(last, first)


def _same_process(word: LogWord, other: LogWord, rank: int | None) -> bool:
    if word.child not in {None, other.child} and not word.is_stop:
        return False
    if word.process is not None:
        return word.process == other.process
    # A line without a mark may be of any: of the one that is known to have ended, or else of the one that raises next.
    return other.process is None or rank is None or other.rank == rank


def _is_behind_bare(word: LogWord, exception: LogWord) -> bool:
    """Whether an exception that says nothing itself ends what this one began."""
    return word.is_exception and exception.is_bare and exception.line - word.line <= _BEFORE_LINES


def _chain(word: LogWord, by_line: dict[int, LogWord]) -> Iterator[LogWord]:
    for _ in range(len(by_line)):
        earlier = by_line.get(word.raised_from) if word.raised_from is not None else None
        if earlier is None:
            return
        yield earlier
        word = earlier


def _explains(word: LogWord, exception: LogWord) -> bool:
    """Whether a line says what NCCL, CUDA or the kernel did just before an exception that these can cause."""
    if exception.line - word.line > _BEFORE_LINES:
        return False
    said = word.error is not None and not word.error.of_peers
    machine = word.is_nccl or (
        word.error is not None
        and (
            word.error.project in {"NCCL", "gloo", "CUDA", "Slurm"}
            or word.error.kind in {"out_of_memory", "out_of_gpu_memory", "hardware", "disk_full"}
        )
    )
    return (
        (said or word.is_nccl or word.is_abort)
        and (machine or word.is_abort)
        and not (_PROGRAMS_OWN.match(exception.text))
    )


def _ends_a_process(word: LogWord) -> bool:
    return word.is_exception or word.is_abort or word.is_nccl or word.error is not None


def _is_python_own(word: LogWord) -> bool:
    return word.is_exception and not word.is_abort and (word.error is None or word.error.is_last or word.is_interrupt)
