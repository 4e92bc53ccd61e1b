"""What a command prints at both widths, and what a page says, without what differs between machines."""

from __future__ import annotations

import io
import json
import logging
import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from multinode.cli.main import run

__all__ = ["WIDTHS", "document_of", "page_text", "reported_text", "screens_text"]

WIDTHS = (80, 160)
_BLOCKS = {"h1", "h2", "p", "pre", "li", "tr", "div", "title"}
_HIDDEN = {"script", "style"}


def screens_text(folder: Path, commands: Sequence[str], widths: Sequence[int] = WIDTHS) -> str:
    """Each command with what it prints, at each width; `folder` has `runs` in it, and is the working directory."""
    shown = []
    for command in commands:
        texts = {width: _call(folder, command.split(), width) for width in widths}
        if len(set(texts.values())) == 1:
            shown.append(f"$ multinode {command}\n{texts[widths[0]]}")
        else:
            shown += [f"$ multinode {command}  # {width} columns\n{text}" for width, text in texts.items()]
    return "\n".join(shown)


def document_of(folder: Path, command: str) -> Any:
    """What a command prints with --json."""
    return json.loads(_call(folder, [*command.split(), "--json"], WIDTHS[0], told=False))


def _call(folder: Path, words: Sequence[str], width: int, *, told: bool = True) -> str:
    """What it prints, then what it tells beside that, then its exit code unless that is 0."""
    stdout, stderr = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    # A terminal without colour; with both sizes rich asks nobody for them.
    terminal = {"FORCE_COLOR": "1", "TERM": "dumb", "COLUMNS": str(width), "LINES": "50", "TZ": "UTC"}
    with pytest.MonkeyPatch.context() as patch, _logging(), redirect_stdout(stdout), redirect_stderr(stderr):
        for name, value in terminal.items():
            patch.setenv(name, value)
        patch.setenv("MULTINODE_RUNS", str(folder / "runs"))
        patch.chdir(folder)
        patch.setattr(sys, "argv", ["multinode", *words])
        time.tzset()
        with pytest.raises(SystemExit) as ended:
            run()
    time.tzset()
    texts = [stream.buffer.getvalue().decode() for stream in (stdout, stderr)]
    assert not any("\x1b" in text for text in texts)
    printed, notes = (re.sub(r" +$", "", text.replace(str(folder), "/home/user"), flags=re.MULTILINE) for text in texts)
    if not told:
        return printed
    code = f"[exit code {ended.value.code}]\n" if ended.value.code else ""
    return printed + ("".join(f"2> {line}\n" for line in notes.splitlines())) + code


@contextmanager
def _logging() -> Iterator[None]:
    """The verbosity and handlers of a command are its own."""
    log = logging.getLogger("multinode")
    level, handlers = log.level, list(log.handlers)
    try:
        yield
    finally:
        log.setLevel(level)
        log.handlers[:] = handlers


def reported_text(folder: Path, *run_ids: str) -> str:
    """The words of the page that `report` writes of these runs."""
    path = folder / "page.html"
    told = _call(folder, ["report", *run_ids, "-o", str(path)], WIDTHS[0])
    assert "exit code" not in told, told
    text = page_text(path.read_text())
    path.unlink()
    return text


def page_text(page: str) -> str:
    """The words of a page, one line per block and one per row of a table, without script and style."""
    reader = _Reader()
    reader.feed(page)
    return "\n".join(line for line in map(str.rstrip, "".join(reader.words).splitlines()) if line) + "\n"


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.words: list[str] = []
        self._hidden = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._hidden += tag in _HIDDEN
        if tag in _BLOCKS:
            self.words.append("\n")
        if tag in {"h1", "h2"}:
            self.words.append("# " if tag == "h1" else "## ")
        if tag in {"span", "small"}:
            self.words.append(" ")
        if dict(attrs).get("class") == "plotly-graph-div":
            self.words.append(f"[chart {dict(attrs).get('id')}]")

    def handle_endtag(self, tag: str) -> None:
        self._hidden -= tag in _HIDDEN
        if tag in {"td", "th"}:
            self.words.append(" | ")
        if tag in _BLOCKS:
            self.words.append("\n")

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self.words.append(data)
