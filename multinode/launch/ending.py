"""How a run ended that did not succeed: the screen of a failure and of a stopped hang, and the facts of --details."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from pathlib import PurePath

from rich.table import Table
from rich.text import Text

from multinode.cluster.quoting import quote_path
from multinode.diagnose.place import CodeLine, raised_at, stands_at
from multinode.records.run import Attempt, Failure, Run, Stall
from multinode.render.sheet import sanitize
from multinode.render.table import CommandLine, Part, footer, labelled_parts, make_table, paragraph, screen_text
from multinode.units import format_count, format_duration

RESUME = ("Resume", "run the same command again: what is measured is kept")
"""Row for a run that consists of others and has not ended well."""
MOST_LINES = 12
"""Lines of the screen, with its next command."""
# Characters of a text on it: the first that fits.
_CLIPS = (400, 272, 204, 136, 68)
_MOST_LAST = 3


def ending_parts(run: Run, summed_up: str, directory: PurePath, *, width: int, details: bool = False) -> Sequence[Part]:
    """The screen of a run that failed, or hung and was stopped: what happened, where, what it means, what fixes it.

    With the next command it has MOST_LINES; what does not fit is left to --details.

    Args:
        run: it has a first failure or a hang.
        summed_up: the run in a few words.
        directory: of the run.
        width: columns of the terminal.
        details: whether they follow.
    """
    shown: Sequence[Part] = ()
    for most, last in itertools.product(_CLIPS, (_MOST_LAST, 0)):
        shown = tuple(_parts(run, summed_up, directory, most=most, last=last))
        if screen_text(shown, width).count("\n") < MOST_LINES:
            break
    return shown[:-1] if details else shown


def _parts(run: Run, summed_up: str, directory: PurePath, *, most: int, last: int) -> Iterator[Part]:
    failure = run.first_failure
    if failure is not None:
        yield paragraph(_clip(f"error: {failure.node}: {failure.message}", most), style="bold red")
        rows = list(_failure_rows(failure, most=most, last=last))
        yield from ("", *labelled_parts([*rows, ("Run", summed_up), *_log_rows(run, failure, directory)]))
    elif run.hang is not None:
        yield paragraph(hang_words(run, run.hang), style="bold red")
        rows = [("Hang", _clip(run.hang.message, most)), ("Fix", _clip(run.hang.hint or "", most))]
        stacks = CommandLine(quote_path(str(directory / "stall.json")))
        yield from ("", *labelled_parts([*(row for row in rows if row[1]), ("Run", summed_up), ("Stacks", stacks)]))
    yield footer("Details", f"multinode show {run.run_id} --details")


def _failure_rows(failure: Failure, *, most: int, last: int) -> Iterator[tuple[str, str]]:
    place = raised_at(failure.log_tail)
    if place is not None:
        yield "Where", _clip(_where(place, failure), most)
    if failure.cause:
        # What to do says more than what it means.
        yield "Meaning", _clip(failure.cause, max(most // 2, _CLIPS[-1]))
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
    end = max(cut.rfind(". "), cut.rfind("; "))
    return cut[: end + 1].rstrip(";") if end > most // 2 else f"{cut.rpartition(' ')[0] or cut}..."


def hang_words(run: Run, hang: Stall) -> str:
    """`stopped by you; it had hung for 16.0 s: rank 3 on node1 at train.py:24`."""
    ended_s = run.ended_s if run.ended_s is not None else hang.time_s
    for_s = max(hang.silent_s, ended_s - (hang.time_s - hang.silent_s))
    place = stands_at(hang.stack)
    at = f" at {place.words}" if place is not None else ""
    who = f"rank {hang.rank} on {hang.node}{at}" if hang.rank is not None else hang.message
    return f"{run.outcome}; it had hung for {format_duration(for_s)}: {who}"


def failure_notes(failure: Failure) -> tuple[tuple[str, str], ...]:
    """Place, cause and fix of a failure."""
    place = raised_at(failure.log_tail)
    where = _where(place, failure) if place is not None else None
    notes = (("where", where), ("cause", failure.cause), ("hint", failure.hint))
    return tuple((name, text) for name, text in notes if text)


def run_table(run: Run) -> Table:
    """How one run ended: one row per fact. Its figures are in `summary_sheets`."""
    table = make_table(header=False)
    table.add_column("what", no_wrap=True)
    table.add_column("value")
    table.add_row("run", run.run_id)
    table.add_row("job", Text(sanitize(run.job)))
    table.add_row("state", run.outcome)
    if run.hang is not None:
        table.add_row("hang", Text(sanitize(f"{hang_words(run, run.hang)}; {run.hang.message}")))
        table.add_row("stack", _lines(run.hang.stack))
    failure = run.first_failure
    if failure is not None:
        table.add_row("first failure", Text(sanitize(f"{failure.node}: {failure.message}")))
        if failure.time_s is not None:
            at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(failure.time_s))
            table.add_row(
                "failed at", f"{at}, {format_duration(max(0.0, failure.time_s - run.started_s))} after the start"
            )
        for consequence in failure.consequences:
            table.add_row("consequence", Text(sanitize(consequence)))
        for name, text in failure_notes(failure):
            table.add_row(name, Text(sanitize(text)))
        if failure.log_tail:
            table.add_row("last lines", _lines(failure.log_tail))
    for number, attempt in enumerate(run.attempts, 1):
        table.add_row(f"attempt {number}", Text(sanitize(attempt_words(attempt))))
    for node in run.nodes:
        status = node.status
        ended = status.signal or (f"exit code {status.exit_code}" if status.exit_code is not None else node.state)
        table.add_row(f"node {node.node_rank}", Text(sanitize(f"{node.name}: {ended}")))
    return table


def _lines(text: str) -> Text:
    return Text("\n".join(map(sanitize, text.splitlines())))


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
