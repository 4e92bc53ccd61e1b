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
from multinode.cli.running import print_next_step, print_run
from multinode.errors import UsageError
from multinode.records.run_directory import runs_root
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
        typer.Argument(
            metavar="LOG...",
            help="Log files, directories with them, or a run of multinode: its id, `last` or its directory. Default: "
            "standard input.",
        ),
    ] = None,
    *,
    as_json: Json = False,
) -> None:
    """Find the first failure in logs of torchrun, DeepSpeed, accelerate, LLaMA-Factory, Slurm or NCCL, with a fix."""
    from multinode.diagnose.explanation import explain_logs

    if not logs and sys.stdin.isatty():
        raise UsageError("no log was given", hint="use multinode explain node0.log node1.log, or pipe a log into it")
    names = _print_recorded(logs or ["-"], as_json=as_json)
    if names is None:
        return
    explanation = explain_logs(names, _Progress().tell)
    if as_json:
        print_document(explanation)
    else:
        print_screen(_parts(explanation))


def _print_recorded(names: list[str], *, as_json: bool) -> list[str] | None:
    """Print what the record of one run says; otherwise returns the logs to read."""
    from multinode.launch.explain_run import explain_run, find_run, log_paths

    found = [find_run(name, runs_root()) for name in names]
    for stored in found if len(found) == 1 else ():
        explanation = explain_run(stored) if stored is not None else None
        if stored is None or explanation is None:
            continue
        if as_json:
            print_document(explanation)
        else:
            print_run(stored.run, stored.summary, stored.directory)
            print_next_step(stored.run, stored.summary, stored.directory)
        return None
    places = [str(stored.directory) if stored is not None else name for name, stored in zip(names, found, strict=True)]
    return [path for place in places for path in log_paths(place)]


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
