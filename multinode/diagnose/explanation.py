"""Explanation: which of several logs has the first failure, of runs that multinode did not start.

It is found as that of a launch is (`failure.first_failure`); of nodes, ranks and times there is what the texts say.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from multinode.cluster.quoting import quote_path
from multinode.diagnose.evidence import NodeEvidence
from multinode.diagnose.failure import find_worker_death, first_failure
from multinode.diagnose.known_errors import KnownError, find_error, known_errors
from multinode.diagnose.log_words import LogReading, last_words, read_log
from multinode.errors import UsageError
from multinode.records.log import clean_log
from multinode.records.run import Failure, NodeRun

STDIN = "-"
_LAST_WORDS, _VERY_LAST_WORDS = 20, 3
_MOST_CHARS = 500
_AROUND = 20


class LogFailure(msgspec.Struct, frozen=True, kw_only=True):
    """The failure that one log tells of."""

    file: str
    line: int | None  # where it stands, from 1; None where only the end of the log speaks of it
    node: str | None  # as the text names it; likewise `rank` and `time`. None is not said.
    rank: int | None
    time: str | None
    message: str
    kind: str | None  # as in `Failure`; likewise `error_id`, `cause` and `hint`
    error_id: str | None
    cause: str | None
    hint: str | None
    of_peers: bool  # whether it is what workers say when another is gone: the cause is somewhere else


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """What logs say of a run."""

    schema: str = "multinode.explain/1"
    first_failure: LogFailure | None  # of all logs; None where none tells of one
    other_failures: tuple[LogFailure, ...]  # of the other logs: consequences, or what came later
    order_known: bool  # whether the texts say which failure came first, where several have a cause of their own
    next: tuple[str, ...]  # what to look at next: commands and sentences
    files: dict[str, int]  # those that were read, with their lines


def explain(logs: Sequence[tuple[str, LogReading]]) -> Explanation:
    """The first failure of all logs; each is a name, and what it says."""
    files = {name: reading.lines for name, reading in logs}
    failed = [(name, reading) for name, reading in logs if _has_failed(reading)]
    times = [_seconds(reading) for _, reading in failed]
    has_times = all(second is not None for second in times)
    nodes = [
        NodeEvidence(
            run=NodeRun(
                name=name,
                node_rank=place,
                state="ended",
                cause="exited",
                exit_code=1,
                ended_s=second if has_times else None,
            ),
            log=reading.tail,
            reading=reading,
        )
        for place, ((name, reading), second) in enumerate(zip(failed, times, strict=True))
    ]
    earliest = first_failure(nodes)
    if earliest is None:
        return Explanation(first_failure=None, other_failures=(), order_known=True, next=(), files=files)
    first = _describe(earliest, nodes[earliest.node_rank])
    others = [
        _describe(failure, node)
        for node in nodes
        if node.run.node_rank != earliest.node_rank and (failure := first_failure([node])) is not None
    ]
    rivals = [other for other in others if not other.of_peers and not first.of_peers]
    return Explanation(
        first_failure=first,
        other_failures=tuple(others),
        order_known=has_times or not rivals,
        next=tuple(_next(first, [reading for _, reading in logs])),
        files=files,
    )


def _has_failed(reading: LogReading) -> bool:
    if reading.cause() is not None or find_worker_death(reading.report) is not None:
        return True
    # What NCCL tries again is no failure where nothing says that the run ended by it.
    words = [line for line in last_words(reading.tail, _LAST_WORDS).split("\n") if "NCCL INFO " not in line]
    error = find_error("\n".join(words))
    # Lines after it tell that a program went on without what it missed.
    return error is not None and (not error.is_last or error.matches("\n".join(words[-_VERY_LAST_WORDS:])))


def _describe(failure: Failure, node: NodeEvidence) -> LogFailure:
    reading = node.reading or LogReading()
    death = find_worker_death(reading.report)
    aborted = death is not None and death.signal is not None
    error = known_errors()[failure.error_id] if failure.error_id is not None else None
    word = reading.cause(rank=failure.rank, aborted=aborted)
    word = word if word is not None and (word.error == error or (error is None and not word.is_of_peers)) else None
    place = _REPORT_HOST.search(reading.report) or (_SLURM_HOST.search(reading.report) if word is None else None)
    host = word.host if word is not None and word.host is not None else place[1] if place is not None else None
    rank = word.rank if word is not None and word.rank is not None else failure.rank
    if word is not None and word.rank is None and word.host is not None and (place is None or place[1] != word.host):
        # The report may be that of another node.
        rank = None
    who = f"rank {rank}: " if rank is not None else ""
    line: int | None = None
    if word is not None:
        message, line = f"{who}{word.text[:_MOST_CHARS]}", word.line
    elif death is not None:
        message, line = failure.message, reading.report_line
        said = _last_said(reading)
        if death.exit_code and failure.cause is None and said:
            message += f"; the last line of the log before that: {said}"
    else:
        message, line = _last_match(reading, error)
    when = _REPORT_TIME.search(reading.report)
    return LogFailure(
        file=node.run.name,
        line=line,
        node=host,
        rank=rank,
        time=word.time if word is not None and word.time is not None else when[1] if when is not None else None,
        message=message,
        kind=failure.kind,
        error_id=failure.error_id,
        cause=error.cause if error is not None else failure.cause,
        hint=_for_logs(error, host) if error is not None else failure.hint,
        of_peers=error is not None and error.of_peers,
    )


def _last_said(reading: LogReading) -> str:
    """The last line that is no launcher's; empty where there is none."""
    lines = (line.strip() for line in reversed(last_words(reading.tail, _LAST_WORDS, of_launcher=False).split("\n")))
    return next(
        (line[:_MOST_CHARS] for line in lines if line and line not in reading.report and not _OF_SLURM.match(line)), ""
    )


def _last_match(reading: LogReading, error: KnownError | None) -> tuple[str, int | None]:
    lines = reading.tail.rstrip("\n").split("\n")
    for back, text in enumerate(reversed(lines)):
        if error is not None and error.matches(clean_log(text)):
            return clean_log(text).strip()[:_MOST_CHARS], reading.lines - back
    return last_words(reading.tail, 1)[:_MOST_CHARS], None


def _for_logs(error: KnownError, host: str | None) -> str:
    fix = error.fix.replace("{node}", host or "NODE")
    for verb in ("multinode show last", f"multinode logs last --node {host or 'NODE'}", "multinode logs"):
        fix = fix.replace(f": {verb}", ": give their logs to multinode explain")
    return fix.replace(
        ("(a launch shows them; they are also in nccl.*.log of the run on"), "(of NCCL_DEBUG_FILE, or the log; on"
    )


# Of torchrun's report, whatever a platform puts in front of each line, and of the first task that failed.
_REPORT_HOST = re.compile(r"^(?:.{0,200} )? host {6}: ([\w.-]{1,64})\s*$", re.MULTILINE)
_REPORT_TIME = re.compile(r"^(?:.{0,200} )? time {6}: (\S{1,40})\s*$", re.MULTILINE)
_OF_SLURM = re.compile(r"(?:srun|slurmstepd): ")
_SLURM_HOST = re.compile(r"srun: error: ([\w.-]{1,64}): tasks? ")
_CLOCK = re.compile(r"(?:\d{4}-)?(\d\d)-?(\d\d)[ T_](\d\d):(\d\d):(\d\d(?:[.,]\d{1,9})?)")


def _seconds(reading: LogReading) -> float | None:
    word, when = reading.cause(), _REPORT_TIME.search(reading.report)
    text = word.time if word is not None and word.time is not None else when[1] if when is not None else ""
    clock = _CLOCK.fullmatch(text)
    if clock is None:
        return None
    month, day, hour, minute, second = (float(part.replace(",", ".")) for part in clock.groups())
    return (((month * 31 + day) * 24 + hour) * 60 + minute) * 60 + second


# How NCCL, gloo and c10d write an address.
_PEER = re.compile(r"(?:remote peer|peer|from|to) (?:\[?([\w.:%-]{1,64}?)\]?(?:<\d{1,5}>|:\d{1,5}\b))")


def _next(first: LogFailure, readings: Sequence[LogReading]) -> Iterator[str]:
    if first.line is not None and first.file != STDIN:
        yield f"sed -n '{max(1, first.line - _AROUND)},{first.line + _AROUND}p' {quote_path(first.file)}"
    if first.of_peers:
        peer = _PEER.search(first.message)
        whose = f"of the worker at {peer[1]}" if peer is not None else "of the other nodes"
        yield f"this error follows from a worker that is gone or late: pass the log {whose} too, which has the cause"
    error = known_errors()[first.error_id] if first.error_id is not None else None
    if (
        error is not None
        and error.project == "NCCL"
        and error.is_general
        and not any(reading.has_nccl for reading in readings)
    ):
        yield "no log has messages of NCCL: run it again with NCCL_DEBUG=WARN, and pass that log"


Progress = Callable[[str, int, int], None]


def explain_logs(paths: Sequence[str], progress: Progress) -> Explanation:
    """The first failure of logs.

    `-` is standard input; of directories all files are read. `progress` gets a name, bytes read, and the size or 0.
    """
    names = [name for path in paths for name in _files(path)]
    return explain([(name, _read(name, progress)) for name in dict.fromkeys(names)])


def _files(path: str) -> Iterator[str]:
    if path == STDIN or not Path(path).is_dir():
        yield path
        return
    paths = sorted(str(file) for file in Path(path).rglob("*") if file.is_file() and not file.is_symlink())
    if not paths:
        raise UsageError(f"{path} has no files", hint="name the directory with the launcher's logs")
    yield from paths


def _read(name: str, progress: Progress) -> LogReading:
    done = 0

    def tell(count: int) -> None:
        nonlocal done
        done += count
        progress(name, done, size)

    try:
        if name == STDIN:
            size = 0
            return read_log(sys.stdin.buffer, progress=tell)
        size = Path(name).stat().st_size
        with Path(name).open("rb") as file:
            return read_log(file, progress=tell)
    except OSError as error:
        raise UsageError(f"{name} cannot be read: {error.strerror}") from error
