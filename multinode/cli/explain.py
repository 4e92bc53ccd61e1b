"""`multinode explain`: the first failure in the logs of any run, what it means, and what fixes it."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from multinode.cli.options import Json
from multinode.cli.output import note, print_document, print_screen
from multinode.cli.panels import examples
from multinode.errors import UsageError
from multinode.units import format_count, format_size

if TYPE_CHECKING:
    from multinode.diagnose.explanation import Explanation, LogFailure
    from multinode.render.table import Part

_TELL_EVERY_S = 5.0


def register(app: typer.Typer) -> None:
    """Add the verb to the command."""
    app.command(epilog=examples("explain node0.log node1.log"))(explain)


def explain(
    logs: Annotated[
        list[str] | None,
        typer.Argument(metavar="LOG...", help="Log files or directories of a run. Default: standard input."),
    ] = None,
    *,
    as_json: Json = False,
) -> None:
    """Find the first failure in logs of torchrun, DeepSpeed, accelerate, LLaMA-Factory, Slurm or NCCL, with a fix."""
    from multinode.diagnose.explanation import explain_logs

    if not logs and sys.stdin.isatty():
        raise UsageError("no log was given", hint="use multinode explain node0.log node1.log, or pipe a log into it")
    explanation = explain_logs(logs or ["-"], _Progress().tell)
    if as_json:
        print_document(explanation)
    else:
        print_screen(_parts(explanation))


class _Progress:
    """A line on stderr now and then, while a long log is read."""

    def __init__(self) -> None:
        self._told = time.monotonic()

    def tell(self, name: str, done: int, size: int) -> None:
        now = time.monotonic()
        if now - self._told >= _TELL_EVERY_S:
            self._told = now
            note(f"{name}: {format_size(done)}{f' of {format_size(size)}' if size else ''} read")


def _parts(explanation: Explanation) -> Iterator[Part]:
    from multinode.render.table import labelled, paragraph

    first = explanation.first_failure
    if first is None:
        lines = format_count(sum(explanation.files.values()), "line")
        yield paragraph(f"no failure found in {format_count(len(explanation.files), 'log')} ({lines})", style="bold")
        return
    yield paragraph(_sentence(first), style="bold")
    rows = [(name, text) for name, text in (("Cause", first.cause), ("Fix", first.hint)) if text]
    if first.cause is None:
        rows.append(("Cause", "not in the catalogue; this is the program's own message"))
    for number, text in enumerate(explanation.next):
        rows.append(("" if number else "Next", text))
    if explanation.other_failures:
        title = "Then" if explanation.order_known else "Also"
        rows += [
            (title if not number else "", _sentence(failure))
            for number, failure in enumerate(explanation.other_failures)
        ]
    if not explanation.order_known:
        rows.append(("Order", "the logs do not show which of these came first"))
    yield ""
    yield labelled(rows)


def _sentence(failure: LogFailure) -> str:
    where = failure.file if failure.line is None else f"{failure.file}, line {failure.line}"
    place = ", ".join(filter(None, (failure.node, failure.time)))
    return f"{where}{f' ({place})' if place else ''}: {failure.message}"
