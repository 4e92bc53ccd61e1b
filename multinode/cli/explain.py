"""`multinode explain`: the first failure in the logs of any run, what it means, and what fixes it."""

from __future__ import annotations

import sys
import time
from typing import Annotated

import typer

from multinode.cli.options import Details, Json
from multinode.cli.output import note, print_blocks, print_document
from multinode.cli.panels import examples
from multinode.cli.running import print_run
from multinode.errors import UsageError
from multinode.records.run_directory import runs_root
from multinode.units import format_size

_TELL_EVERY_S = 5.0


def register(app: typer.Typer) -> None:
    """Add the verb to the command."""
    app.command(epilog=examples("explain node0.log node1.log"))(explain)


def explain(
    logs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="LOG...",
            help=(
                "Log files, directories of log files, or a multinode run (its id, its directory, or `last`). "
                "Default: standard input."
            ),
        ),
    ] = None,
    *,
    details: Details = False,
    as_json: Json = False,
) -> None:
    """Find the first failure in logs of torchrun, DeepSpeed, accelerate, LLaMA-Factory, Slurm or NCCL, and its fix."""
    from multinode.diagnose.explanation import explain_logs
    from multinode.diagnose.screen import show

    if not logs and sys.stdin.isatty():
        raise UsageError("no log was given", hint="use multinode explain node0.log node1.log, or pipe a log into it")
    names = _print_recorded(logs or ["-"], details=details, as_json=as_json)
    if names is None:
        return
    explanation = explain_logs(names, _ReadingProgress().tell)
    if as_json:
        print_document(explanation)
    else:
        print_blocks(show(explanation), details=details)
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
            typer.echo(f"run {stored.run.run_id} succeeded, so there is no failure to explain")
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
