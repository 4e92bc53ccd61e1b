"""Explanation: which of several logs has the first failure, of runs that multinode did not start.

It is found as that of a launch is (`failure.first_failure`); of nodes, ranks and times there is what the texts say.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from multinode.cluster.quoting import quote_path
from multinode.diagnose.benchmark_line import benchmark_of
from multinode.diagnose.desync import Desync
from multinode.diagnose.evidence import NodeEvidence
from multinode.diagnose.failure import first_failure, signal_error
from multinode.diagnose.flight_dumps import explain_dumps, read_dumps
from multinode.diagnose.known_errors import KnownError, find_error, known_errors
from multinode.diagnose.launcher_report import BEGINNINGS, LauncherReport
from multinode.diagnose.log_line import FRAME_PLACE, LogLine, parse_line
from multinode.diagnose.log_word import LogWord
from multinode.diagnose.log_words import LogReading, is_of_tracker, is_progress, last_words, read_log
from multinode.diagnose.meaning import (
    address_notes,
    exit_meaning,
    is_unreachable,
    notes,
    signal_of_code,
    timed_out_collective,
)
from multinode.diagnose.standing import Standing, other_collectives, word_standing
from multinode.errors import UsageError
from multinode.records.log import clean_log, last_lines
from multinode.records.run import Failure, NodeRun
from multinode.records.status import Status

STDIN = "-"
_READ = "multinode nccl-test"
# The shutdown after a training's end prints fewer.
_SHUTDOWN_LINES = 100
_LAST_WORDS, _VERY_LAST_WORDS = 20, 3
_LAST_SHOWN = 5
_MOST_PLACES = 4
_MOST_CHARS = 500
# What the screen has of a message; and a log that is looked through faster than a command is typed.
_MOST_SHOWN = 160
_AROUND, _SHORT = 20, 60
# Bars that are drawn once more after an error.
_MOST_DRAWN = 1


class LogFailure(msgspec.Struct, frozen=True, kw_only=True):
    """The failure in one log."""

    file: str
    line: int | None  # its line number, from 1; None if only the end of the log shows it
    node: str | None  # as the text names it; also `rank` and `time`. None if the text does not state it.
    rank: int | None
    time: str | None
    message: str
    kind: str | None  # as in `Failure`; also `error_id`, `cause` and `hint`
    error_id: str | None
    cause: str | None
    hint: str | None
    details: tuple[str, ...]  # the lines that belong to the message, and the full text of a long one
    is_own: bool  # whether the message is a line of the log, as the program printed it
    of_peers: bool  # whether workers print it because another worker is gone: the cause is elsewhere


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """What the logs of a run show."""

    schema: str = "multinode.explain/2"
    first_failure: LogFailure | None  # of all logs; None if no log has one
    other_failures: tuple[LogFailure, ...]  # of the other logs: consequences, or later failures
    order_known: bool  # whether the texts show which failure came first, if several have their own causes
    next: tuple[str, ...]  # what to look at next: commands and sentences
    files: dict[str, int]  # the logs that were read, with their numbers of lines
    last_lines: tuple[str, ...] = ()  # of the last log, if no failure was found
    # by file, the program that measured a network (`nccl-tests`, `iperf3`, `perftest`), if no failure was found
    benchmarks: dict[str, str] = {}
    is_unclear: bool = False  # whether a log without an identified failure contains a traceback or something similar


def explain(logs: Sequence[tuple[str, LogReading]]) -> Explanation:
    """The first failure of all logs; each is a name, and what it says."""
    files = {name: reading.lines for name, reading in logs}
    logs = [(name, _without_shutdown(reading)) for name, reading in logs]
    failed = [(name, reading) for name, reading in logs if _has_failed(reading)]
    times = [_seconds(reading) for _, reading in failed]
    has_times = all(second is not None for second in times)
    nodes = [
        NodeEvidence(
            run=NodeRun(
                name=name,
                node_rank=place,
                state="ended",
                status=Status(state="ended", cause="exited", exit_code=1, ended_s=second if has_times else None),
            ),
            log=reading.tail,
            reading=reading,
        )
        for place, ((name, reading), second) in enumerate(zip(failed, times, strict=True))
    ]
    earliest = first_failure(nodes)
    if earliest is None:
        return _nothing(logs, files)
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
        next=tuple(_next(first, [reading for _, reading in logs], files)),
        files=files,
    )


def _nothing(logs: Sequence[tuple[str, LogReading]], files: dict[str, int]) -> Explanation:
    """What is said where no failure was found."""
    readings = [reading for _, reading in logs]
    benchmarks = {name: program for name, reading in logs if (program := _benchmark(reading)) is not None}
    steps = (
        [f"{_READ} {' '.join(f'--read {quote_path(name)}' for name in benchmarks)} --link RATE"] if benchmarks else []
    )
    steps += [
        f"{name}, line {word.line}: {_why_not(word)}: {word.text[:_MOST_SHOWN]}"
        for name, reading in logs
        for word in reading.words[-1:]
    ]
    if not benchmarks and not any(reading.has_nccl for reading in readings):
        steps.append(
            "if the run failed, pass the logs of all nodes, including stderr and NCCL's messages (NCCL_DEBUG=WARN)"
        )
    return Explanation(
        first_failure=None,
        other_failures=(),
        order_known=True,
        next=tuple(steps),
        files=files,
        last_lines=tuple(last_lines(readings[-1].tail, _LAST_SHOWN).split("\n")) if readings and not benchmarks else (),
        benchmarks=benchmarks,
        is_unclear=any(
            _TRACE.search(reading.tail) is not None and not reading.words and reading.ended_line is None
            for reading in readings
        ),
    )


def _benchmark(reading: LogReading) -> str | None:
    lines = (parse_line(clean_log(line)).text for line in reading.tail.splitlines())
    return next((program for line in lines if (program := benchmark_of(line)) is not None), None)


def _why_not(word: LogWord) -> str:
    return "the run continued after it" if word.went_on else "it may come from a normal shutdown"


def _has_failed(reading: LogReading) -> bool:
    report, word = reading.report, reading.cause()
    if report is not None and not (report.is_of_one_process and (_was_over(report, reading) or _is_asked(report))):
        return True
    if word is not None:
        # After its end, a run may lose its peers, and a program may still complain.
        return not _came_after_end(word, reading)
    # What NCCL tries again is no failure where nothing says that the run ended by it.
    words = [line for line in last_words(reading.tail, _LAST_WORDS).split("\n") if "NCCL INFO " not in line]
    error = find_error("\n".join(words))
    if error is None or reading.words:
        return _ends_with_error(reading)
    # Lines after it tell that a program went on without what it missed.
    if error.is_last:
        return error.matches("\n".join(words[-_VERY_LAST_WORDS:]))
    return not any(map(is_progress, words[-_VERY_LAST_WORDS:]))


def _ends_with_error(reading: LogReading) -> bool:
    """Whether a log ends with an error: after a training's end only that of a program that came long after it."""
    last, ended = _last_error(reading), reading.ended_line
    if last is None or ended is None:
        return last is not None
    said, number = last
    return _GIVES_UP.match(said.raw) is not None and number - ended > _SHUTDOWN_LINES


def _is_asked(report: LauncherReport) -> bool:
    """Whether somebody asked the process to end, as its parent does in the end."""
    return (report.death.signal or signal_of_code(report.death.exit_code)) == "SIGTERM"


# A bar that is full, of a training and not of what comes before it.
_FULL_BAR = re.compile(r"(?:^|\r|\btrain\w*\b[^%|\r\n]{0,60}) *100%\|", re.IGNORECASE)


def _was_over(report: LauncherReport, reading: LogReading) -> bool:
    """Whether a training had ended before a process of it ended."""
    return (reading.ended_line is not None and report.launcher == "shell") or _had_ended(report.line, reading)


def _had_ended(line: int, reading: LogReading) -> bool:
    """Whether a training had said before a line that it had ended, or had done all of its steps."""
    if reading.ended_line is not None:
        return reading.ended_line < line
    lines = reading.tail.removesuffix("\n").split("\n")
    before = lines[: max(0, len(lines) - (reading.lines - line) - 1)]
    last_step = next((text for text in map(clean_log, reversed(before)) if is_progress(text)), "")
    return _FULL_BAR.search(last_step) is not None


def _without_shutdown(reading: LogReading) -> LogReading:
    """Mark what the shutdown after a training raises as noise, unless a launcher reports a failure."""
    ended = reading.ended_line
    if ended is None or reading.report is not None:
        return reading
    words = (replace(word, is_noise=True) if word.at_exit and word.line > ended else word for word in reading.words)
    return replace(reading, words=tuple(words))


def _came_after_end(word: LogWord, reading: LogReading) -> bool:
    ended = word.is_exception or word.is_abort or word.is_nccl or word.is_stop or word.is_of_peers
    is_remark = word.error is not None and word.error.project != "Slurm" and not ended
    if (is_remark or word.is_shells) and reading.report is None:
        # A program says what it does without.
        return _had_ended(word.line, reading)
    return (
        reading.ended_line is not None
        and word.line > reading.ended_line
        and word.error is not None
        and (word.is_stop or (word_standing(word) >= Standing.PEER and word.error.kind != "timeout"))
    )


def _describe(failure: Failure, node: NodeEvidence) -> LogFailure:
    reading = node.reading or LogReading()
    report = reading.report
    error = known_errors()[failure.error_id] if failure.error_id is not None else None
    word = reading.cause(rank=failure.rank)
    if word is not None and word.is_of_peers and report is not None and _ends_by_signal(report, word):
        word = None
    if word is not None and not (word.error == error or (error is None and not word.is_of_peers)):
        word = None
    if word is not None:
        return _describe_word(failure, node.run.name, reading, word)
    if report is not None:
        return _describe_report(failure, node.run.name, reading, report, error)
    last = _last_error(reading) if error is None else None
    if last is not None:
        said, number = last
        message = _whose(said.rank, said.worker) + said.text.strip()
        return _log_failure(
            failure, node.run.name, error, line=number, message=message, node=said.host, rank=said.rank, is_own=True
        )
    message, line = _last_match(reading, error)
    of_peers = error is not None and error.of_peers
    return _log_failure(failure, node.run.name, error, line=line, message=message, of_peers=of_peers)


def _ends_by_signal(report: LauncherReport, word: LogWord) -> bool:
    """Whether a signal ended the reported worker before others lost it."""
    signal = report.death.signal or signal_of_code(report.death.exit_code)
    # Each watchdog aborts its own process, as its collective stood still.
    is_others = report.death.rank is not None and word.rank not in {None, report.death.rank} and not word.collective
    return signal not in {None, "SIGTERM"} and (is_others or signal != "SIGABRT")


def _describe_word(failure: Failure, file: str, reading: LogReading, word: LogWord) -> LogFailure:
    report = reading.report
    rank, host, worker, error = word.rank, word.host, word.worker, word.error
    ended = word.is_exception or word.is_abort or word.is_of_peers
    below = word.details
    if report is not None and report.line == word.line:
        # The line is the report itself, which goes on below it.
        host, worker, below = report.host or host, report.worker or worker, tuple(report.text.split("\n")[1:])
    if report is not None and not word.points:
        # What ended the process is of the worker that the report names; any other line without a mark may be another's.
        if rank is None and ended and host in {None, report.host}:
            rank = report.death.rank
        is_slurms = error is not None and error.project == "Slurm"
        if is_slurms and host in {None, report.host} and report.worker is not None and report.worker not in word.text:
            worker = report.worker
        if host is None and (rank is None or rank == report.death.rank):
            host = report.host
    message = timed_out_collective(word.text) or _with_reason(_SPEAKER.sub("", word.said), below)
    if word.points and word.said_by is not None:
        message = f"its collective timed out first, according to rank {word.said_by}"
    if host is None and len(reading.hosts) == 1:
        host = reading.hosts[0]
    cause = error.cause if error is not None else failure.cause
    told = [*notes(" ".join((word.text, *word.details))), *other_collectives(reading.words, word)]
    told += [
        note for _, address in reading.addresses if word.is_nccl or word.is_of_peers for note in address_notes(address)
    ]
    is_after = reading.ended_line is not None and word.line > reading.ended_line
    if is_after:
        told.append(f"Training had already ended at line {reading.ended_line}: only its shutdown failed.")
    # Slurm's own line may begin with the task.
    whose = _whose(rank, worker)
    return _log_failure(
        failure,
        file,
        error,
        line=word.line,
        message=message if message.startswith(whose) else whose + message,
        node=host,
        rank=rank,
        time=word.time or (report.time if report is not None else None),
        cause=" ".join(filter(None, (cause, *dict.fromkeys(told)))) or None,
        details=(word.text, *word.details) if len(word.text) > _MOST_SHOWN or word.details else (),
        is_own=True,
        of_peers=word.is_of_peers and not is_after,
    )


def _describe_report(
    failure: Failure, file: str, reading: LogReading, report: LauncherReport, error: KnownError | None
) -> LogFailure:
    death = report.death
    who = f"rank {death.rank}" if death.rank is not None else _named(report) or "a worker"
    if report.ends_launcher:
        how = f"exited with code {death.exit_code}; its own output is not in this log"
    elif death.signal is not None:
        how = f"was killed by {death.signal}"
    elif death.exit_code is not None:
        signal = signal_of_code(death.exit_code)
        how = f"exited with code {death.exit_code}{f' ({signal})' if signal else ''}"
    else:
        who, how = " ".join(report.text.split()), ""
    message = f"{who} {how}".strip()
    alike = [one for one in reading.reports if one.launcher == report.launcher and _end_of(one) == _end_of(report)]
    meaning = exit_meaning(death.exit_code, death.signal)
    if error is None:
        error = signal_error(signal_of_code(death.exit_code))
    if death.rank is None and len(alike) > 1 and all(one.host and one.worker for one in alike):
        message += f" ({', '.join(f'{one.worker} on {one.host}' for one in alike[:_MOST_PLACES])})"
    said = _last_said(reading, report) if failure.cause is None or failure.error_id is not None or meaning else ""
    if said and not report.ends_launcher:
        message += f"; the last line of the log before that: {said}"
    frame = _FAULT.search(reading.tail)
    if frame is not None and death.signal is not None:
        message += f"; in {frame[3]} ({frame[1]}:{frame[2]})"
    hint = failure.hint
    if report.ends_launcher:
        hint = f"pass the output of {report.worker or 'that launcher'} itself, which shows the cause"
    return _log_failure(
        failure,
        file,
        error,
        line=report.line,
        message=message,
        node=report.host,
        rank=death.rank,
        time=report.time,
        cause=error.cause if error is not None else failure.cause or (meaning.cause if meaning is not None else None),
        hint=hint or (meaning.hint if meaning is not None else None),
    )


def _with_reason(message: str, below: Sequence[str]) -> str:
    """A message with what stands below it and says why, or goes on after its colon."""
    goes_on = below[:1] if message.endswith(":") else ()
    reason = next((line for line in below if _REASON.match(line)), next(iter(goes_on), ""))
    return message if not reason or reason in message else f"{message} {reason}"


def _log_failure(failure: Failure, file: str, error: KnownError | None, **fields: Any) -> LogFailure:
    """A failure of a log; without an entry, the kind and hint are those that `failure` has."""
    known = {
        "file": file,
        "node": None,
        "rank": None,
        "time": None,
        "kind": failure.kind,
        "error_id": None,
        "cause": None,
        "hint": failure.hint,
        "details": (),
        "is_own": False,
        "of_peers": False,
        **{name: value for name, value in fields.items() if value is not None},
    }
    if error is not None:
        known["kind"], known["error_id"] = error.kind, error.id
        known["cause"] = known["cause"] or error.cause
        known["hint"] = _for_logs(error, known["node"])
    return LogFailure(**{**known, "line": fields["line"], "message": fields["message"][:_MOST_CHARS]})


def _named(report: LauncherReport) -> str | None:
    return report.worker if report.launcher != "Slurm" else None


def _end_of(report: LauncherReport) -> tuple[int | None, str | None]:
    return report.death.exit_code, report.death.signal


def _whose(rank: int | None, worker: str | None) -> str:
    return f"rank {rank}: " if rank is not None else f"{worker}: " if worker is not None else ""


# Slurm's programs, in front of what they say.
_SPEAKER = re.compile(r"^(?:(?:slurmstepd|srun): )?error: (?:pyxis: +|[\w.-]{1,64}: (?=tasks? \d))?")
# Why an actor of Ray died, and why an NPU failed, below the exception that says that it did.
_REASON = re.compile(
    r"The actor (?:is dead|died|was killed) because |Worker exit (?:type|detail): |E[A-Z]\d{4}: |(?:\[\w+\] )?Reason: "
)
# Rules, and the heads of lists that the launcher's own lines have.
_RULER = re.compile(r"[\s=*#_-]{4,}$|=+ ?backtrace|\d{1,3}:? +0x[\da-f]{4,}")
_BOXED, _BOX, _BOX_LINES = {"Open MPI", "first process", "MPI_Abort"}, re.compile(r"-{20,}\s*$"), 12
_FAULT = re.compile(
    r"\(most recent call first\):\s*\n.{0,100}?File \"([^\"\n]{1,300})\", line (\d{1,9}),? in (\S{1,100})"
)
_TRACE = re.compile(r"Traceback \(most recent call last\)|\bCaught signal \d|\bexited on signal \d")


def _last_said(reading: LogReading, report: LauncherReport) -> str:
    """The last line before a report that is no launcher's, ruler, source code or other rank's; empty without one.

    Before a signal a line of progress explains nothing, nor does one that stands there again and again.
    """
    lines = reading.tail.removesuffix("\n").split("\n")
    before = lines[: max(0, len(lines) - (reading.lines - report.line) - 1)]
    if report.launcher in _BOXED:
        # Its report is one of several boxes.
        near = [place for place, line in enumerate(before) if len(before) - place <= _BOX_LINES and _BOX.match(line)]
        before = before[: near[0]] if near else before
    shapes = Counter(_FIGURE.sub("", line) for line in before)
    for raw in reversed(last_words("\n".join(before), _LAST_WORDS, of_launcher=False).split("\n")):
        line = parse_line(raw)
        text = line.text.strip()
        is_others = report.death.rank is not None and line.rank not in {None, report.death.rank}
        is_code = line.text[:1].isspace() and '  File "' in reading.tail
        is_launchers = _OF_LAUNCHER.search(text) or any(begins in raw for begins in BEGINNINGS if "srun" not in begins)
        if not text or is_others or is_code or is_launchers or _RULER.match(text):
            continue
        if report.death.signal is not None and (
            _INFO.search(raw) or is_progress(raw) or shapes[_FIGURE.sub("", raw)] > 1
        ):
            return ""
        return text[:_MOST_CHARS]
    return ""


# The level that a logger gives its line, and what a program of the system says before it gives up.
_LEVEL = re.compile(r"(?<![\w'\"-])(?:(ERROR|FATAL|CRITICAL)|WARN(?:ING)?|INFO|DEBUG|TRACE)(?![\w'\"-])")
_GIVES_UP = re.compile(
    r"\s*(?:(?:[\w./-]{1,100}: )?(?:fatal )?error: "
    r"|[\w./-]{1,100}: (?:unrecognized|invalid|unknown|ambiguous) option\b"
    # A shell's words of a signal that asked the program to end.
    r"|(?:Terminated|Hangup|User defined signal \d)$)",
    re.IGNORECASE,
)
_BESIDE = re.compile(
    # The last is what a shell prints of its own script under `set -x`.
    r"Try .{1,100} --help|srun: (?!error: )|slurmstepd: (?!error: )|Sending process \d{1,9} closing signal|\+{1,9} "
)


def _last_error(reading: LogReading) -> tuple[LogLine, int] | None:
    """What a log ends with: the first of the errors, in their loggers' words, or the last frame of a cut traceback.

    None where it ends with anything else.
    """
    return _last_frame(reading) or _logged_error(reading)


def _last_frame(reading: LogReading) -> tuple[LogLine, int] | None:
    for back, raw in enumerate(reversed(reading.tail.rstrip("\n").split("\n"))):
        line = parse_line(raw)
        if line.text.startswith("Traceback (most recent call last)"):
            # Another process prints its own meanwhile.
            continue
        if line.text and not line.text[:1].isspace():
            return None
        frame = FRAME_PLACE.match(line.text)
        if frame is not None:
            text = f"the log ends inside a traceback: {frame[3]} ({frame[1]}:{frame[2]})"
            return replace(line, text=text), reading.lines - back
    return None


def _is_error(raw: str) -> bool:
    line, level = parse_line(raw), _LEVEL.search(raw)
    return not line.is_warning and (
        line.level == "E" or (level is not None and level[1] is not None) or _GIVES_UP.match(raw) is not None
    )


def _logged_error(reading: LogReading) -> tuple[LogLine, int] | None:
    lines = reading.tail.rstrip("\n").split("\n")
    found, steps = None, 0
    survived = {
        _FIGURE.sub("", raw)
        for raw, below in pairwise(filter(str.strip, lines))
        if not _is_error(below) and not _GIVES_UP.match(raw) and not _BESIDE.match(parse_line(below).text)
    }
    for back, raw in enumerate(reversed(lines)):
        line = parse_line(raw)
        steps += is_progress(raw)
        is_error = _is_error(raw)
        if is_error and (is_of_tracker(raw) or _FIGURE.sub("", raw) in survived):
            continue
        if steps > _MOST_DRAWN:
            break
        if not line.text.strip() or (not is_error and _BESIDE.match(line.text)):
            continue
        if not is_error or is_progress(raw):
            break
        found = line, reading.lines - back
    return found


def _last_match(reading: LogReading, error: KnownError | None) -> tuple[str, int | None]:
    lines = reading.tail.rstrip("\n").split("\n")
    for back, text in enumerate(reversed(lines)):
        if error is not None and error.matches(clean_log(text)):
            return clean_log(text).strip()[:_MOST_CHARS], reading.lines - back
    return last_words(reading.tail, 1)[:_MOST_CHARS], None


def _for_logs(error: KnownError, host: str | None) -> str:
    fix = error.fix_on(host or "NODE")
    for before, after in (
        (": multinode show last", ": multinode explain LOG..."),
        (f": multinode logs last --node {host or 'NODE'}", ": multinode explain LOG"),
        (": multinode logs", ""),
        (", which a launch prints and saves in nccl.*.log of the run on", " in the log, or in NCCL_DEBUG_FILE on"),
    ):
        fix = fix.replace(before, after)
    return fix


_INFO = re.compile(r"^.{0,60}\b(?:INFO|DEBUG)\b")
_FIGURE = re.compile(r"\d")
_OF_LAUNCHER = re.compile(
    r"\b(?:srun|slurmstepd(?:-[\w.-]{1,64})?): (?!error: (?:pyxis|execve))|launch/slurm|closing signal SIG"
    r"|\bsigkill_handler\]|exits? with (?:return|status) code|Waiting up to \d+ seconds for all training"
    r"|noticed that process rank|warnings\.warn\(|Warning: |\bcleanup messages\b|: line \d+: +\d+ "
    r"|Primary job\s+terminated normally|Per user-direction, the job has been aborted"
    r"|^\s*(?:Traceback|File |raise |sys\.exit|\^+|Failures:|\[\d+\]:|<NO_OTHER_FAILURES>|\S+ FAILED$)"
    r"|^\s*(?:time|host|rank|exitcode|error_file|traceback) *: |ChildFailedError|Extension modules: "
    r"|container failed with non-zero",
    re.IGNORECASE,
)
_CLOCK = re.compile(r"(?:\d{4}-)?(\d\d)-?(\d\d)[ T_](\d\d):(\d\d):(\d\d(?:[.,]\d{1,9})?)")


def _seconds(reading: LogReading) -> float | None:
    word, report = reading.cause(), reading.report
    text = word.time if word is not None and word.time is not None else report.time if report is not None else None
    clock = _CLOCK.match(text or "")
    if clock is None:
        return None
    month, day, hour, minute, second = (float(part.replace(",", ".")) for part in clock.groups())
    return (((month * 31 + day) * 24 + hour) * 60 + minute) * 60 + second


# How NCCL, gloo and c10d write an address.
_PEER = re.compile(r"(?:remote peer|peer|from|to) (?:\[?([\w.:%-]{1,64}?)\]?(?:<\d{1,5}>|:\d{1,5}\b))")


def _next(first: LogFailure, readings: Sequence[LogReading], files: dict[str, int]) -> Iterator[str]:
    lines = files.get(first.file, 0)
    if first.line is not None and first.file != STDIN and lines > _SHORT and first.line < lines - _VERY_LAST_WORDS:
        yield f"sed -n '{max(1, first.line - _AROUND)},{first.line + _AROUND}p' {quote_path(first.file)}"
    peer = _PEER.search(first.message)
    if first.of_peers and not (peer is not None and is_unreachable(peer[1])):
        whose = f"of the worker at {peer[1]}" if peer is not None else "of the other nodes"
        yield f"this error was caused by a worker that is gone or late: also pass the log {whose}"
    error = known_errors()[first.error_id] if first.error_id is not None else None
    if (
        error is not None
        and error.project == "NCCL"
        and error.is_general
        and not any(reading.has_nccl for reading in readings)
    ):
        yield "no log has NCCL messages: run the job again with NCCL_DEBUG=WARN, and pass that log"


Progress = Callable[[str, int, int], None]


def explain_logs(paths: Sequence[str], progress: Progress) -> Explanation:
    """The first failure of logs.

    `-` is standard input; of directories all files are read. `progress` gets a name, bytes read, and the size or 0.
    Dumps of torch's flight recorder among the files say which rank is to blame for a hang.
    """
    names = tuple(dict.fromkeys(name for path in paths for name in _files(path)))
    dumps = read_dumps(names)
    explanation = explain([(name, _read(name, progress)) for name in names if name not in dumps])
    files = {**explanation.files, **{name: len(found.dump.entries) for name, found in dumps.items()}}
    told = explain_dumps(dumps)
    if told is None:
        return replace(explanation, files=files)
    # A watchdog's message follows from the hang.
    later = () if explanation.first_failure is None else (explanation.first_failure, *explanation.other_failures)
    hang = _hang_of(*told)
    return Explanation(first_failure=hang, other_failures=later, order_known=True, next=(), files=files)


def _hang_of(name: str, desync: Desync) -> LogFailure:
    return LogFailure(
        file=name,
        line=None,
        node=None,
        rank=desync.blamed,
        time=None,
        message=desync.message,
        kind="hang",
        error_id=None,
        cause=desync.message,
        hint=desync.hint,
        details=(),
        is_own=False,
        of_peers=False,
    )


def _files(path: str) -> Iterator[str]:
    if path == STDIN or not Path(path).is_dir():
        yield path
        return
    paths = sorted(str(file) for file in Path(path).rglob("*") if file.is_file() and not file.is_symlink())
    if not paths:
        raise UsageError(f"{path} has no files", hint="name the directory with the launcher's logs")
    yield from paths


# Where torchrun writes the log of one worker.
_OF_WORKER = re.compile(r"attempt_\d{1,4}/(\d{1,6})/(?:stderr|stdout)\.log$")


def _of_rank(name: str, reading: LogReading) -> LogReading:
    """Set the rank from the name of the file, where no line tells another."""
    found = _OF_WORKER.search(name)
    if found is None:
        return reading
    rank = int(found[1])
    words = tuple(replace(word, rank=rank) if word.rank is None else word for word in reading.words)
    return replace(reading, words=words)


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
            return _of_rank(name, read_log(file, progress=tell))
    except OSError as error:
        raise UsageError(f"{name} cannot be read: {error.strerror}") from error
