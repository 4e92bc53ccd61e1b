"""How a run ended that did not succeed: what is shown of a failure and of a stopped hang, and the facts of a run."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import NamedTuple

from multinode.cluster.quoting import quote_path
from multinode.diagnose.place import CodeLine, raised_at, stands_at
from multinode.diagnose.translation import translate
from multinode.records.run import Attempt, Failure, Run, Stall
from multinode.render.sheet import Block, Column, CommandLine, Fitting, Labels, Prose, Sheet, figure
from multinode.units import UNKNOWN, format_count, format_duration

RESUME = ("Resume", "run the same command again; finished measurements are kept")
"""Row for a run that consists of others and has not ended well."""
MOST_LINES = 12
"""Lines of the screen, with its next command."""
# Characters of a text on it: the first that fits.
_CLIPS = (400, 272, 204, 136, 68)
_WHOLE = 1 << 20
_MOST_LAST = 3
# Of a sentence, also in Chinese.
_ENDS = (". ", "; ", "\u3002", "\uff1b")
_SEMICOLONS = ";\uff1b"


def show_ending(run: Run, summed_up: str, directory: PurePath) -> Fitting:
    """How a run failed, or hung and was stopped: what happened, where, what it means, what fixes it.

    On a terminal it has MOST_LINES with the command of the details and the next one; a page has all of it.

    Args:
        run: it has a first failure or a hang.
        summed_up: the run in a few words.
        directory: of the run.
    """
    choices = (tuple(_blocks(run, summed_up, directory, clips)) for clips in _choices())
    return Fitting(tuple(choices), MOST_LINES - 2)


class _Clips(NamedTuple):
    """Characters of the rows, and how many consequences or last lines there are."""

    most: int
    where: int
    meaning: int
    run: int
    last: int


def _choices() -> Iterator[_Clips]:
    for most, last in [(_WHOLE, _MOST_LAST), *itertools.product(_CLIPS[:-1], (_MOST_LAST, 0))]:
        # What to do says more than what it means.
        yield _Clips(most, most, max(most // 2, _CLIPS[-1]), _WHOLE, last)
    # The message and the fix come last.
    yield _Clips(_CLIPS[-2], _CLIPS[-2], 0, _WHOLE, 0)
    yield _Clips(_CLIPS[-2], _CLIPS[-1], 0, _CLIPS[-1], 0)
    for last in (_MOST_LAST, 0):
        yield _Clips(_CLIPS[-1], _CLIPS[-1], _CLIPS[-1], _CLIPS[-1], last)


def _blocks(run: Run, summed_up: str, directory: PurePath, clips: _Clips) -> Iterator[Block]:
    failure = run.first_failure
    if failure is not None:
        yield Prose(_clip(f"error: {failure.node}: {failure.message}", clips.most), "lead", tone="bad")
        rows = _failure_rows(translate(failure), clips)
        run_words = summed_up if len(summed_up) <= clips.run else f"...{summed_up[3 - clips.run :]}"
        yield Labels((*rows, ("Run", run_words), *_log_rows(run, failure, directory)))
    elif run.hang is not None:
        yield Prose(hang_words(run, run.hang), "lead", tone="bad")
        rows = iter((("Hang", _clip(run.hang.message, clips.most)), ("Fix", _clip(run.hang.hint or "", clips.most))))
        stacks = CommandLine(quote_path(str(directory / "stall.json")))
        yield Labels((*(row for row in rows if row[1]), ("Run", summed_up), ("Stacks", stacks)))


def _failure_rows(failure: Failure, clips: _Clips) -> Iterator[tuple[str, str]]:
    most, last = clips.most, clips.last
    place = raised_at(failure.log_tail)
    if place is not None:
        yield "Where", _clip(_where(place, failure), clips.where)
    if failure.cause and (clips.meaning or not failure.hint):
        yield "Meaning", _clip(failure.cause, clips.meaning or most)
    if failure.hint:
        yield "Fix", _clip(failure.hint, most)
    if last:
        yield from (
            ("Then" if not number else "", _clip(text, most)) for number, text in enumerate(failure.consequences)
        )
    if place is None and not failure.cause:
        said = failure.log_tail.splitlines()[-last:] if last else ()
        yield from (("Last lines" if not number else "", _clip(text, _CLIPS[-1])) for number, text in enumerate(said))


def _where(place: CodeLine, failure: Failure) -> str:
    who = f"rank {failure.rank} on {failure.node}" if failure.rank is not None else failure.node
    return f"{place.sentence} ({who}){f': {place.code}' if place.code else ''}"


def _log_rows(run: Run, failure: Failure, directory: PurePath) -> Iterator[tuple[str, str]]:
    yield "Log", CommandLine(quote_path(str(log_path(run, directory, failure.node_rank))))
    if failure.run_id is not None:
        yield RESUME
    restart = run.attempts[-1].not_restarted if run.attempts else None
    if restart is not None:
        yield "Restart", f"none: {restart}"


def log_path(run: Run, directory: PurePath, node_rank: int) -> PurePath:
    """The log of a node: of the part that failed, or of the last attempt of a run with restarts."""
    part = run.attempts[-1].run_id if run.attempts else run.first_failure and run.first_failure.run_id
    own = directory.with_name(part) if part else directory
    return own / "logs" / f"node-{node_rank}.log"


def _clip(text: str, most: int) -> str:
    """The text, or its first sentences; else as many words as fit."""
    if len(text) <= most:
        return text
    cut = text[: most - 3]
    end = max(map(cut.rfind, _ENDS))
    return cut[: end + 1].rstrip(_SEMICOLONS) if end > most // 2 else f"{cut.rpartition(' ')[0] or cut}..."


def hang_words(run: Run, hang: Stall) -> str:
    """`stopped by you; the run had hung for 16.0 s: rank 3 on node1 at train.py:24`."""
    ended_s = run.ended_s if run.ended_s is not None else hang.time_s
    for_s = max(hang.silent_s, ended_s - (hang.time_s - hang.silent_s))
    place = stands_at(hang.stack)
    at = f" at {place.words}" if place is not None else ""
    who = f"rank {hang.rank} on {hang.node}{at}" if hang.rank is not None else hang.message
    return f"{run.outcome}; the run had hung for {format_duration(for_s)}: {who}"


def run_labels(run: Run) -> Labels:
    """How one run ended: one row per fact. Its figures are in `summary_sheets`."""
    return Labels(tuple(_facts(run)), "run", detail="full")


def _facts(run: Run) -> Iterator[tuple[str, str]]:
    yield "Run", run.run_id
    yield "Job", run.job
    yield "State", run.outcome
    took = f", took {format_duration(run.ended_s - run.started_s)}" if run.ended_s is not None else ""
    yield "Began", f"{_clock(run.started_s)}{took}"
    if run.hang is not None:
        yield "Hang", f"{hang_words(run, run.hang)}; {run.hang.message}"
        yield from _lines("Stack", run.hang.stack)
    failure = translate(run.first_failure) if run.first_failure is not None else None
    if failure is not None:
        yield "First failure", f"{failure.node}: {failure.message}"
        if failure.time_s is not None:
            after = format_duration(max(0.0, failure.time_s - run.started_s))
            yield "Failed at", f"{_clock(failure.time_s)}, {after} after the start"
        yield from (("Consequence", consequence) for consequence in failure.consequences)
        place = raised_at(failure.log_tail)
        notes = (("Where", _where(place, failure) if place else None), ("Cause", failure.cause), ("Fix", failure.hint))
        yield from ((name, text) for name, text in notes if text)
        yield from _lines("Last lines", failure.log_tail)
    for node in run.nodes:
        status = node.status
        ended = status.signal or (f"exit code {status.exit_code}" if status.exit_code is not None else node.state)
        yield f"Node {node.node_rank}", f"{node.name}: {ended}"


def _clock(time_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time_s))


def _lines(label: str, text: str) -> Iterator[tuple[str, str]]:
    yield from (("" if number else label, line) for number, line in enumerate(text.splitlines()))


def attempt_sheet(attempts: Sequence[Attempt]) -> Sheet:
    """One row per attempt: its steps, its workers, and the cost of its failure."""
    words, figures = ("run", "from", "ended"), ("workers", "global batch", "steps", "steps lost", "time lost")
    rows = [
        (
            attempt.run_id,
            attempt.checkpoint or "the beginning",
            _ending(attempt),
            figure(attempt.world_size or None, "d"),
            figure(attempt.global_batch, "d"),
            f"{attempt.first_step} to {attempt.last_step}",
            figure(attempt.lost_steps, "d"),
            format_duration(attempt.lost_s) if attempt.lost_s is not None else UNKNOWN,
        )
        for attempt in attempts
    ]
    columns = (*(Column(name, words=True) for name in words), *map(Column, figures))
    return Sheet(title="attempts", columns=columns, rows=tuple(rows), detail="page")


def _ending(attempt: Attempt) -> str:
    failure = attempt.first_failure
    return attempt.status if failure is None else f"{attempt.status}: {failure.node}: {failure.message}"


def attempt_words(attempt: Attempt) -> str:
    """How one attempt of a run with restarts went."""
    begin = f"from {attempt.checkpoint}" if attempt.checkpoint is not None else "from the beginning"
    words = [f"{attempt.run_id} {begin}: {attempt.status} at step {attempt.last_step}"]
    if attempt.left_out:
        batch = f", global batch {attempt.global_batch}" if attempt.global_batch is not None else ""
        words[0] += f" without {', '.join(attempt.left_out)} ({format_count(attempt.world_size, 'worker')}{batch})"
    if attempt.first_failure is not None:
        words.append(f"{attempt.first_failure.node}: {attempt.first_failure.message}")
    words += [f"{name} is not complete: {gap}" for name, gap in attempt.skipped.items()]
    if attempt.lost_s is not None:
        steps = f"{format_count(attempt.lost_steps, 'step')} and " if attempt.lost_steps is not None else ""
        words.append(f"lost {steps}{format_duration(attempt.lost_s)}")
    if attempt.not_restarted is not None:
        words.append(f"not restarted: {attempt.not_restarted}")
    return "; ".join(words)
