"""Printing logs while they are read: behind the names of nodes, as they are, or as one JSON document."""

from __future__ import annotations

import codecs
import sys
from collections.abc import Iterable, Iterator

import msgspec
import typer

from multinode.cli.output import note
from multinode.records.log import LogPiece, LogReader
from multinode.secret_values import redact_text

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
        reader = LogReader(rank)
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
    readers: dict[str, LogReader] = {}
    try:
        for name, data in chunks:
            printer.write(name, readers.setdefault(name, LogReader(rank, draws=True)).feed(data))
            printer.flush()
    finally:
        for name, reader in readers.items():
            printer.write(name, reader.end())
        printer.flush()


def print_logs_document(logs: Logs, run_id: str, rank: int | None, *, raw: bool) -> None:
    """Logs as one JSON document on stdout, without secrets, written while they are read."""
    write = sys.stdout.write
    write(f'{{\n  "schema": "multinode.logs/1",\n  "run_id": {_json(run_id)},\n  "nodes": [')
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
    reader = LogReader(rank)
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
