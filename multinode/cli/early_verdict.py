"""The early verdict on a run: shown with its progress, and what `--if-slower-than-one-node` does then."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import typer

from multinode.cli.output import is_quiet
from multinode.errors import MultinodeError, UsageError
from multinode.records.run_directory import RunDirectory, runs_root
from multinode.units import format_count

if TYPE_CHECKING:
    from multinode.launch.context import RunContext
    from multinode.predict.early_verdict import Judged
    from multinode.records.progress import RunProgress
    from multinode.records.run import EarlyVerdict

Mode = Literal["report", "ask", "stop"]
IfSlower = Annotated[
    Mode,
    typer.Option(
        "--if-slower-than-one-node",
        metavar="HOW",
        rich_help_panel="Run control",
        help=(
            "What to do if one node would certainly be faster and has enough memory. `report` prints a message. After "
            "120 measured steps, `ask` asks whether to stop the run, and `stop` stops it."
        ),
    ),
]
_LEAVE_S = 30.0
_LONGEST_ANSWER = 1 << 10


def require_terminal(mode: Mode, *, detach: bool = False) -> None:
    """Reject an option that needs somebody at the terminal."""
    if detach and mode != "report":
        raise UsageError(
            f"--if-slower-than-one-node {mode} needs this command to keep running, but --detach makes it exit",
            hint="remove --detach; multinode show prints the verdict of a followed run",
        )
    if mode == "ask" and (is_quiet() or not (sys.stdin.isatty() and sys.stderr.isatty())):
        raise UsageError(
            "--if-slower-than-one-node ask needs a terminal and no --quiet",
            hint="use --if-slower-than-one-node report or stop",
        )


def running_verdict(run_id: str) -> tuple[EarlyVerdict | None, str]:
    """The verdict on a run in progress, from its records so far, in words; empty without one."""
    from multinode.launch.attach import find_recorded
    from multinode.predict.early_verdict import judge, verdict_line

    try:
        judged = judge(find_recorded(runs_root(), run_id).directory)
    except MultinodeError as error:
        return None, f"no early verdict: {error.message}"
    if judged.verdict is None and judged.lacking:
        return None, f"no early verdict yet: {format_count(judged.lacking, 'step')} to go"
    verdict = judged.verdict
    return verdict, verdict_line(verdict) if verdict is not None and not verdict.exceeds_run else ""


@contextlib.contextmanager
def watch(context: RunContext, mode: Mode) -> Iterator[None]:
    """Inside the block, runs of this context are judged after their first steps."""
    watching = _Watch(context, mode)
    context.observe = watching.observe
    try:
        yield
    finally:
        watching.close()


class _Watch:
    """Judges each run that is observed, and does what was asked for; no failure of it is one of the run.

    Once after the first steps, and once more after as many as it takes to end a run.
    """

    def __init__(self, context: RunContext, mode: Mode) -> None:
        from multinode.records.run import LEAST_STEPS

        self._context = context
        self._observe = context.observe
        self._mode = mode
        self._least = LEAST_STEPS
        self._run_id = ""
        # The step from which on there may be a verdict, or a better one; None once there will be none.
        self._due: int | None = None
        self._thread: threading.Thread | None = None
        self._judged: Judged | Exception | None = None
        self._verdict: EarlyVerdict | None = None
        self._asks = False

    def observe(self, progress: RunProgress) -> None:
        """Show the progress, with the verdict once there is one."""
        try:
            progress = self._look(progress)
        except Exception as error:  # noqa: BLE001 - whoever follows a run stops it when its own code fails
            self._give_up(error)
        self._observe(progress)

    def close(self) -> None:
        """Wait for a verdict that is under way: it is kept with the run."""
        if self._thread is not None:
            self._thread.join(_LEAVE_S)

    def _give_up(self, error: Exception) -> None:
        self._due, self._verdict, self._asks = None, None, False
        self._context.say(f"no early verdict: {error}; the run is still running")

    def _look(self, progress: RunProgress) -> RunProgress:
        if progress.run_id != self._run_id:
            self._run_id, self._verdict, self._asks = progress.run_id, None, False
            self._due = self._least if len(progress.nodes) > 1 else None
        steps = [node.step for node in progress.nodes]
        step = min((step for step in steps if step is not None), default=0) if None not in steps else 0
        if self._thread is not None and not self._thread.is_alive():
            self._thread = None
            self._take(step)
        elif self._thread is None and self._due is not None and step >= self._due:
            self._thread = threading.Thread(target=self._judge, args=(progress.run_id,), name="judge", daemon=True)
            self._thread.start()
        if self._verdict is None or self._verdict.exceeds_run:
            return progress
        if self._asks:
            self._read_answer(running=all(node.state == "running" for node in progress.nodes))
        from multinode.predict.early_verdict import verdict_line

        return msgspec.structs.replace(progress, note=verdict_line(self._verdict, step))

    def _judge(self, run_id: str) -> None:
        from multinode.predict.early_verdict import judge
        from multinode.records.run import VERDICT_FILE

        directory = RunDirectory(self._context.runs / run_id)
        try:
            judged = judge(directory)
            if judged.verdict is not None:
                directory.write(VERDICT_FILE, judged.verdict)
            self._judged = judged
        except Exception as error:  # noqa: BLE001 - told in the loop that follows the run
            self._judged = error

    def _take(self, step: int) -> None:
        from multinode.records.run import CERTAIN_STEPS

        judged, self._judged = self._judged, None
        if isinstance(judged, Exception):
            raise judged
        if judged is None:
            return
        # Of a training that resumed, the first step has a number of its own.
        self._due = step + judged.lacking if judged.lacking else None
        if judged.verdict is None or judged.verdict.run_id != self._run_id:
            return
        self._verdict = judged.verdict
        if self._mode == "report" or self._context.stop.count or not judged.verdict.favours_one_node:
            return
        if not judged.verdict.is_certain:
            self._context.say(
                f"after {format_count(judged.verdict.measured, 'measured step')}, one node is faster; checking again "
                f"after {CERTAIN_STEPS}"
            )
            return
        if self._mode == "stop":
            self._stop()
        else:
            self._asks = True
            self._context.say("One node is faster. Stop the run? Type y to stop it; any other answer continues it.")

    def _read_answer(self, *, running: bool) -> None:
        if not running:
            self._asks = False
        elif select.select([sys.stdin.fileno()], [], [], 0)[0]:
            self._asks = False
            answer = os.read(sys.stdin.fileno(), _LONGEST_ANSWER).decode(errors="replace").strip().lower()
            if answer in {"y", "yes"}:
                self._stop()

    def _stop(self) -> None:
        from multinode.records.run import SLOWER_THAN_ONE_NODE

        self._context.say("stopping on all nodes: one node is faster (--if-slower-than-one-node)")
        self._context.stop.ask(SLOWER_THAN_ONE_NODE)
