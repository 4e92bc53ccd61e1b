"""`multinode runs`, `show` and `logs`: what ran, from the run directories on this machine."""

from __future__ import annotations

import codecs
import contextlib
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from multinode.cli.early_verdict import running_verdict
from multinode.cli.options import Json, RunId, RunIds, expand_options
from multinode.cli.output import (
    note,
    print_blocks,
    print_directory,
    print_document,
    print_table,
    screen_width,
    shown_directory,
)
from multinode.cli.panels import examples
from multinode.cli.report import show_answer
from multinode.cli.running import next_commands, open_context
from multinode.cli.table import FormOptions, ViewOptions, show_tables
from multinode.records.log import LogCleaner, LogPiece
from multinode.records.run_directory import runs_root
from multinode.render.sheet import NextCommand, Prose
from multinode.secret_values import redact_text

if TYPE_CHECKING:
    from multinode.runs.stored_run import StoredRun

# A run id, the name of a node, and the raw log of it there as it is read.
Logs = Iterable[tuple[str, str, Iterable[bytes]]]
_BLOCK_CHARS = 1 << 20


class _Printer:
    """Writes pieces of the logs of several nodes, each line behind the node's name where `prefix` says so."""

    def __init__(self, *, prefix: bool) -> None:
        self._prefix = prefix
        self._stdout = typer.get_binary_stream("stdout")
        # The node whose line has not ended yet.
        self._inside: str | None = None

    def write(self, name: str, pieces: Iterable[LogPiece]) -> None:
        """What a node's log has gained."""
        begin = f"{name} | " if self._prefix else ""
        for text, ended in pieces:
            broken = "\n" if self._inside not in {None, name} else ""
            head = begin if self._inside != name else ""
            shown = text.replace("\n", "\n" + begin) if begin else text
            self._inside = None if ended else name
            self.write_raw((broken + head + shown + "\n" * ended).encode(errors="replace"))

    def write_raw(self, data: bytes) -> None:
        """As it is."""
        self._stdout.write(data)

    def flush(self) -> None:
        """Let it be seen."""
        self._stdout.flush()


def print_logs(logs: Logs, run_id: str, rank: int | None, *, raw: bool) -> None:
    """Logs to their ends, one after the other; on a terminal every line is prefixed by its node, unless `raw`."""
    printer = _Printer(prefix=sys.stdout.isatty())
    for part_id, name, chunks in logs:
        note(f"--- {name}" if part_id == run_id else f"--- {part_id}: {name}")
        reader = LogCleaner(rank)
        for data in chunks:
            if raw:
                printer.write_raw(data)
            else:
                printer.write(name, reader.feed(data))
        printer.write(name, reader.end())
        printer.flush()


def print_followed(chunks: Iterator[tuple[str, bytes]], nodes: int, rank: int | None) -> None:
    """New lines of each node's log, prefixed by its name if there are several or on a terminal; also at Ctrl-C."""
    printer = _Printer(prefix=nodes > 1 or sys.stdout.isatty())
    readers: dict[str, LogCleaner] = {}
    try:
        for name, data in chunks:
            printer.write(name, readers.setdefault(name, LogCleaner(rank, draws=True)).feed(data))
            printer.flush()
    finally:
        for name, reader in readers.items():
            printer.write(name, reader.end())
        printer.flush()


def print_logs_document(logs: Logs, run_id: str, rank: int | None, *, raw: bool) -> None:
    """Logs as one JSON document on stdout, without secrets, written while they are read."""
    write = sys.stdout.write
    write(f'{{\n  "schema": "multinode.logs/2",\n  "run_id": {_json(run_id)},\n  "nodes": [')
    comma = ""
    for part_id, name, chunks in logs:
        write(f'{comma}\n    {{\n      "run_id": {_json(part_id)},\n      "name": {_json(name)},\n      "log": "')
        for text in _blocks(_raw_texts(chunks) if raw else _texts(chunks, rank)):
            write(_json(redact_text(text))[1:-1])
        write('"\n    }')
        comma = ","
    write(("\n  " if comma else "") + "]\n}\n")
    sys.stdout.flush()


def _json(text: str) -> str:
    return msgspec.json.encode(text).decode()


def _texts(chunks: Iterable[bytes], rank: int | None) -> Iterator[str]:
    reader = LogCleaner(rank)
    for data in chunks:
        yield from (text + "\n" * ended for text, ended in reader.feed(data))
    yield from (text + "\n" * ended for text, ended in reader.end())


def _raw_texts(chunks: Iterable[bytes]) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    yield from (decoder.decode(data) for data in chunks)
    yield decoder.decode(b"", final=True)


def _blocks(texts: Iterable[str]) -> Iterator[str]:
    begun: list[str] = []
    size = 0
    for text in texts:
        begun.append(text)
        size += len(text)
        if size >= _BLOCK_CHARS:
            whole = "".join(begun)
            end = whole.rfind("\n") + 1 or len(whole)
            yield whole[:end]
            begun, size = [whole[end:]], len(whole) - end
    yield "".join(begun)


def register(app: typer.Typer) -> None:
    """Add the verbs to the command."""
    app.command()(runs)
    app.command(epilog=examples("show", "show last --sort -samples_per_s -o sweep.html"))(expand_options(show))
    app.command()(logs)


def runs(
    every: Annotated[
        bool,
        typer.Option(
            "--all",
            help="Also list attempts and the parts of a bench, contrast, sweep or tune. --json always includes them.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """List the runs, most recently changed last. A bench, contrast, sweep or tune run is one row."""
    from multinode.runs.listing import RunsDocument, run_row, runs_table
    from multinode.runs.stored_run import load_runs, whole_runs

    stored = load_runs(runs_root(), lambda unread: typer.echo(f"not listed: {unread}", err=True))
    if not (every or as_json):
        stored = whole_runs(stored)
    rows = tuple(map(run_row, stored))
    if as_json:
        print_document(RunsDocument(runs=rows))
    elif rows:
        print_table(runs_table(rows))
    else:
        typer.echo(f"there are no runs in {runs_root()} yet")


def show(*, run_ids: RunIds = None, look: ViewOptions, form: FormOptions, as_json: Json = False) -> None:
    """Show how a run ended, what limits its speed, and what to do next. For a sweep or an import, show its table.

    -o FILE writes the result as a page with charts, Markdown, CSV or JSON. Several sweeps and imports are shown as one
    table. --sort, --where, --baseline, --prices and --deadline apply only to tables.
    """
    names = run_ids or ["last"]
    if look.is_given:
        show_tables(names, look, form, as_json=as_json)
    elif form.is_given or len(names) > 1:
        show_answer(names, form, as_json=as_json)
    else:
        _show_run(names[0], details=form.details, as_json=as_json)


def _show_run(run_id: str, *, details: bool, as_json: bool) -> None:
    from multinode.launch.outcome import has_ending
    from multinode.results.result_files import results_of, show_run
    from multinode.runs.stored_run import load_run

    stored = load_run(runs_root(), run_id)
    running = stored.run.status == "running" and stored.run.kind == "launch"
    verdict, remark = running_verdict(stored.run.run_id) if running else (None, "")
    if as_json:
        document = stored.document()
        print_document(document if verdict is None else msgspec.structs.replace(document, early_verdict=verdict))
        return
    blocks = (*show_run(stored, shown_directory(stored.directory), screen_width()), Prose(remark))
    print_blocks((*blocks, *_commands(stored)), details=details)
    if next((file.name for file, _ in results_of(stored)), "") == "sweep.json":
        name = stored.run_id
        note(f"write a sorted page: multinode show {name} --sort samples_per_s -o {name}.html")
    if details or not has_ending(stored.run):
        print_directory(stored.directory)


def _commands(stored: StoredRun) -> Iterator[NextCommand]:
    """What follows a run: of its result, or of how it ended."""
    from multinode.cli.contrast import next_command, resume_command, stored_command
    from multinode.cli.tune import winner_command
    from multinode.contrast.figures import Contrast
    from multinode.contrast.unfinished import UnfinishedContrast
    from multinode.launch.ending import RESUME
    from multinode.launch.outcome import has_ending
    from multinode.render.following import following
    from multinode.results.result_files import results_of
    from multinode.tune.judge import Tuning

    directory = stored.directory
    documents = [document for _, document in results_of(stored)]
    for document in documents:
        if isinstance(document, Contrast):
            next_one = next_command(document, directory.run_id, stored_command(directory))
            yield from following(
                f"multinode show {directory.run_id} --details",
                next_one or (f"multinode advise {directory.run_id}" if document.advice else ""),
            )
        elif isinstance(document, UnfinishedContrast) and not has_ending(stored.run):
            yield NextCommand(RESUME[0], resume_command(directory) or RESUME[1])
        elif isinstance(document, Tuning) and (launch := winner_command(document, stored_command(directory))):
            yield NextCommand("Launch it", launch)
    if not documents or stored.run.status != "succeeded":
        yield from next_commands(stored.run, stored.summary, directory)


def logs(
    run_id: RunId = "last",
    node: Annotated[str | None, typer.Option(help="Only print the log of this node (a name or a node rank).")] = None,
    rank: Annotated[
        int | None,
        typer.Option(min=0, help="Only print the log of the node with this rank, without lines from other ranks."),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep printing new lines until the run ends.")] = False,
    raw: Annotated[bool, typer.Option("--raw", help="Print the raw log, including progress bars.")] = False,
    as_json: Json = False,
) -> None:
    """Print the logs of a run, node by node. For a bench, sweep or contrast, print the logs of all its runs.

    Progress bars are reduced to their last state.
    """
    from multinode.launch.attach import choose_logs, node_logs
    from multinode.runs.stored_run import load_run

    stored = load_run(runs_root(), run_id)
    chosen = choose_logs(runs_root(), stored, node, rank)
    if follow and stored.run.status == "running":
        _follow(stored.run.run_id, tuple(node.node_rank for _, nodes in chosen for node in nodes), rank)
        return
    texts = ((part.run.run_id, name, chunks) for part, nodes in chosen for name, chunks in node_logs(part, nodes))
    show = print_logs_document if as_json else print_logs
    show(texts, stored.run.run_id, rank, raw=raw)


def _follow(run_id: str, node_ranks: tuple[int, ...], rank: int | None) -> None:
    from multinode.launch.attach import find_recorded, follow_logs, needs_follower, nodes_of

    known_run = find_recorded(runs_root(), run_id)
    with contextlib.ExitStack() as stack:
        context = (
            stack.enter_context(open_context(nodes_of(known_run), leaves=True, quiet=True))
            if needs_follower(known_run)
            else None
        )
        with contextlib.suppress(KeyboardInterrupt):
            print_followed(follow_logs(known_run, node_ranks, context), len(node_ranks), rank)
