"""Log text as a person wants to read it: progress bars collapsed, control characters gone. The log itself stays raw."""

from __future__ import annotations

import re

__all__ = ["clean_log", "last_lines", "only_rank"]

_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|.)")
_RANK = re.compile(r"\[rank(\d{1,9})\]")


def clean_log(text: str) -> str:
    """The text as a terminal would have left it: what a carriage return overwrote is gone, escapes are removed."""
    return "\n".join(_clean_line(line) for line in text.split("\n"))


def last_lines(text: str, count: int) -> str:
    """The last `count` lines that say something."""
    lines = [line for line in clean_log(text).split("\n") if line.strip()]
    return "\n".join(lines[-count:])


def only_rank(text: str, rank: int) -> str:
    """Without the lines that begin with the mark of another rank, as torch sets it: `[rank3]: ...`."""
    marked = ((line, _RANK.match(line)) for line in text.split("\n"))
    return "\n".join(line for line, mark in marked if mark is None or int(mark[1]) == rank)


def _clean_line(line: str) -> str:
    drawn = [part for part in line.split("\r") if part.strip()]
    kept = _ESCAPE.sub("", drawn[-1]) if drawn else ""
    return "".join(char if char.isprintable() or char == "\t" else " " for char in kept)
