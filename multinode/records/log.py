"""Log text as shown to people, and the stage it reports before the first step. The log itself stays raw."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from typing import NamedTuple

# A line without an end is read in pieces.
_PIECE_CHARS = 1 << 16
# An escape sequence at the end of a piece belongs to the next one.
_ESCAPE_CHARS = 256

_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|.)")
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f]")
_RANK = re.compile(r"\[rank(\d{1,9})\]")


def clean_log(text: str) -> str:
    """The text as a terminal would leave it: overwritten text and escape sequences are removed."""
    return "\n".join(_clean_line(line) for line in text.split("\n"))


def last_lines(text: str, count: int) -> str:
    """The last `count` nonempty lines."""
    lines = [line for line in clean_log(text).split("\n") if line.strip()]
    return "\n".join(lines[-count:])


def _clean_line(line: str) -> str:
    drawn = [part for part in line.split("\r") if part.strip()]
    return _clean_part(drawn[-1]) if drawn else ""


def _clean_part(part: str) -> str:
    kept = _ESCAPE.sub("", part) if "\x1b" in part else part
    kept = _CONTROL.sub(" ", kept)
    if kept.replace("\t", "").isprintable():
        return kept
    return "".join(char if char.isprintable() or char == "\t" else " " for char in kept)


class LogPiece(NamedTuple):
    """Lines; the last one has ended or continues in the next piece."""

    text: str
    ended: bool


class LogCleaner:
    """Cleans a raw log that arrives in pieces, as `clean_log` does, in linear time and little memory.

    Args:
        rank: skip lines marked with another rank, as torch does: `[rank3]: ...`.
        draws: treat a carriage return as the end of a line, and keep the last such line of each piece: a progress
            bar is shown while it is drawn.
    """

    def __init__(self, rank: int | None = None, *, draws: bool = False) -> None:
        self._rank = rank
        self._draws = draws
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        # Text since the last carriage return or line break, and the last state drawn before it.
        self._part: list[str] = []
        self._size = 0
        self._drawn = ""
        # Whether a part of the line was returned already.
        self._shown = self._begun = False
        self._hidden: bool | None = None

    def feed(self, data: bytes) -> Iterator[LogPiece]:
        """The lines that it ends, and the beginning of an overlong one."""
        text = self._decoder.decode(data)
        if "\n" in text and not (self._begun or self._drawn or self._shown) and self._rank is None:
            text = "".join((*self._part, text))
            self._new_part()
            whole, _, rest = text.rpartition("\n")
            # Most logs are this simple, and long.
            if whole.replace("\n", "").replace("\t", "").isprintable():
                yield LogPiece(whole, ended=True)
                text = rest
        *lines, rest = text.split("\n")
        for line in lines:
            yield from self._read(line)
            yield from self._end_line()
        yield from self._read(rest)
        if self._draws and self._drawn and not self._begun:
            yield from self._give(self._drawn, ended=True)
            self._drawn, self._shown = "", True

    def end(self) -> Iterator[LogPiece]:
        """The last line, if it has no end."""
        if self._part or self._drawn or self._begun:
            yield from self._end_line()

    def _read(self, text: str) -> Iterator[LogPiece]:
        first, *others = text.split("\r")
        yield from self._add(first)
        for other in others:
            part = "".join(self._part)
            if self._begun:
                yield from self._give(part, ended=True)
                self._shown, self._drawn = True, ""
            elif part.strip():
                self._drawn = part
            self._new_part()
            yield from self._add(other)

    def _add(self, text: str) -> Iterator[LogPiece]:
        if text:
            self._part.append(text)
            self._size += len(text)
        if self._size < _PIECE_CHARS:
            return
        part = "".join(self._part)
        begin = 0
        while len(part) - begin >= _PIECE_CHARS:
            end = begin + _PIECE_CHARS
            escape = part.rfind("\x1b", end - _ESCAPE_CHARS, end)
            end = escape if escape > begin else end
            if part[begin:end].strip() or self._begun:
                yield from self._give(part[begin:end], ended=False)
                self._begun = True
            begin = end
        self._new_part(part[begin:], begun=self._begun)

    def _end_line(self) -> Iterator[LogPiece]:
        part = "".join(self._part)
        last = part if part.strip() or self._begun else self._drawn
        if last or not self._shown:
            yield from self._give(last, ended=True)
        self._new_part()
        self._drawn, self._shown, self._hidden = "", False, None

    def _new_part(self, text: str = "", *, begun: bool = False) -> None:
        self._part, self._size, self._begun = [text] if text else [], len(text), begun

    def _give(self, text: str, *, ended: bool) -> Iterator[LogPiece]:
        shown = _clean_part(text)
        if not self._begun:
            mark = _RANK.match(shown) if self._rank is not None else None
            self._hidden = mark is not None and int(mark[1]) != self._rank
        if not self._hidden:
            yield LogPiece(shown, ended)


FIRST_STEP = "first step"
# Messages of LLaMA-Factory, Hugging Face and DeepSpeed.
_STAGES = (
    (
        "tokenizing the data",
        re.compile(r"Running tokenizer|Tokenizing|Converting format of dataset|Generating \w+ split"),
    ),
    (
        "loading the model",
        re.compile(r"Loading (?:checkpoint shards|weights)|loading weights file|Instantiating \w+ model"),
    ),
    ("compiling", re.compile(r"Loading extension module|Building extension module|ninja: ")),
    (FIRST_STEP, re.compile(r"\*{3,} Running training \*{3,}|Total optimization steps")),
)
_PERCENT = re.compile(r"\d{1,3}%")
_READ_CHARS = 4096


def next_stage(stage: str, log: str) -> str:
    """The stage after this piece of log: the last one named in it, otherwise the previous one."""
    for line in reversed(last_lines(log[-_READ_CHARS:], _READ_CHARS).split("\n")):
        name = next((name for name, words in _STAGES if words.search(line)), None)
        if name is not None:
            percent = _PERCENT.search(line)
            return f"{name} {percent[0]}" if percent is not None else name
    return stage
