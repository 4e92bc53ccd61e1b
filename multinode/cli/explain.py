"""`multinode explain`: the first failure in the logs of any run, what it means, and what fixes it."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from multinode.cli.options import Details, Json
from multinode.cli.output import note, print_document, print_screen
from multinode.cli.panels import examples
from multinode.cli.running import print_run
from multinode.errors import UsageError
from multinode.records.run_directory import runs_root
from multinode.units import format_count, format_list, format_size

if TYPE_CHECKING:
    from multinode.diagnose.explanation import Explanation, LogFailure
    from multinode.render.table import Part

_TELL_EVERY_S = 5.0
# Of a message on the screen; --details has all of it.
_MOST_CHARS = 160


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
    details: Details = False,
    as_json: Json = False,
) -> None:
    """Find the first failure in logs of torchrun, DeepSpeed, accelerate, LLaMA-Factory, Slurm or NCCL, with a fix."""
    from multinode.diagnose.explanation import explain_logs

    if not logs and sys.stdin.isatty():
        raise UsageError("no log was given", hint="use multinode explain node0.log node1.log, or pipe a log into it")
    names = _print_recorded(logs or ["-"], details=details, as_json=as_json)
    if names is None:
        return
    explanation = explain_logs(names, _ReadingProgress().tell)
    if as_json:
        print_document(explanation)
    else:
        print_screen(_parts(explanation, details=details))
    raise typer.Exit(1 if explanation.is_unclear else 0)


def _print_recorded(names: list[str], *, details: bool, as_json: bool) -> list[str] | None:
    """Print what the record of one run says; otherwise returns the logs to read."""
    from multinode.launch.explain_run import explain_run, find_run, log_paths

    found = [find_run(name, runs_root()) for name in names]
    for stored in found if len(found) == 1 else ():
        explanation = explain_run(stored) if stored is not None else None
        if stored is None or explanation is None:
            continue
        if as_json:
            print_document(explanation)
        elif stored.run.status == "succeeded":
            print_screen([f"run {stored.run.run_id} succeeded: it has no failure"])
        else:
            print_run(stored.run, stored.summary, stored.directory, details=details)
        return None
    places = [str(stored.directory) if stored is not None else name for name, stored in zip(names, found, strict=True)]
    return [path for place in places for path in log_paths(place)]


class _ReadingProgress:
    """A line on stderr now and then, while a long log is read."""

    def __init__(self) -> None:
        self._told = time.monotonic()

    def tell(self, name: str, done: int, size: int) -> None:
        now = time.monotonic()
        if now - self._told >= _TELL_EVERY_S:
            self._told = now
            note(f"{name}: {format_size(done)}{f' of {format_size(size)}' if size else ''} read")


def _parts(explanation: Explanation, *, details: bool) -> Iterator[Part]:
    from multinode.render.table import labelled, paragraph

    first = explanation.first_failure
    if first is None:
        yield from _nothing(explanation)
        return
    yield paragraph(_sentence(first), style="bold")
    rows = [("Cause", first.cause or _unknown(first)), ("Fix", first.hint or "")]
    rows += _rows("Next", explanation.next)
    rows += _rows("Then" if explanation.order_known else "Also", map(_sentence, explanation.other_failures))
    if not explanation.order_known:
        rows.append(("Order", "the logs do not show which of these came first"))
    if details:
        rows += _rows("Log", first.details)
    yield ""
    yield labelled([(name, text) for name, text in rows if text])


def _nothing(explanation: Explanation) -> Iterator[Part]:
    from multinode.render.table import labelled, paragraph

    lines = format_count(sum(explanation.files.values()), "line")
    logs = format_count(len(explanation.files), "log")
    found = f"no failure found in {logs} ({lines})"
    if explanation.benchmarks:
        programs = format_list(tuple(dict.fromkeys(explanation.benchmarks.values())))
        found = (
            f"no error message found in {logs} ({lines}), but figures of {programs}: multinode nccl-test judges them"
        )
    yield paragraph(found, style="bold")
    yield ""
    yield labelled([*_rows("Last", explanation.last_lines), *_rows("Next", explanation.next)])


def _rows(name: str, texts: Iterable[str]) -> list[tuple[str, str]]:
    return [("" if number else name, text) for number, text in enumerate(texts)]


def _unknown(failure: LogFailure) -> str:
    return "not in the catalogue; this is the program's own message" if failure.is_own else ""


def _sentence(failure: LogFailure) -> str:
    where = failure.file if failure.line is None else f"{failure.file}, line {failure.line}"
    place = ", ".join(filter(None, (failure.node, failure.time)))
    return f"{where}{f' ({place})' if place else ''}: {_first_sentence(failure.message)}"


def _first_sentence(message: str) -> str:
    if len(message) <= _MOST_CHARS:
        return message
    cut = message[:_MOST_CHARS]
    end = cut.rfind(". ")
    return cut[: end + 1] if end > 0 else f"{cut.rpartition(' ')[0] or cut} ..."
