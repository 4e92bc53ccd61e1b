"""Places in code: file and line, of a Python traceback or of the stack of a hanging rank. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

# py-spy shortens paths by what stands on sys.path.
LIBRARY = re.compile(
    r"/(?:site|dist)-packages/|/lib/python\d|^<frozen|multinode_agent/|^(?:torch|transformers|accelerate|deepspeed)/"
)
"""Paths of code that is not the user's own."""
_RAISED = re.compile(r'(?:\[rank\d{1,9}\]:)?\s*File "(?P<path>[^"]{1,500})", line (?P<line>\d{1,9})(?:, in .+)?$')
_TRACEBACK = re.compile(r"(?:\[rank\d{1,9}\]:)?\s*Traceback \(most recent call last\):$")
# One call of `Stall.stack`.
_STANDS = re.compile(r"(?P<path>.{1,500}):(?P<line>\d{1,9}) in .+$")
_RANK = re.compile(r"\[rank\d{1,9}\]:\s*")
# argparse, and what is built like it: the program's usage, then its name and what it does not take.
_USAGE = re.compile(r"(?:\[rank\d{1,9}\]:)?\s*(?P<program>[^\s:/]{1,200}\.py): error: (?P<message>.{1,300})$")


class CodeLine(NamedTuple):
    """A line of a file."""

    path: str
    line: int | None  # None of arguments that a script does not take
    is_own: bool  # whether it is in the user's code, not in a library
    code: str = ""  # the text of the line; may be empty

    @property
    def words(self) -> str:
        """`train.py:24`; of a library `torch/nn/functional.py:24`."""
        name = self.path.rpartition("/")[2] if self.is_own else LIBRARY.split(self.path)[-1]
        return name if self.line is None else f"{name}:{self.line}"

    @property
    def sentence(self) -> str:
        """`your script, train.py:24`."""
        return f"your script, {self.words}" if self.is_own else self.words


def raised_at(traceback: str) -> CodeLine | None:
    """The innermost line of the user's own code in the last traceback, else of any; None without one.

    Also the script that does not take its arguments.
    """
    lines = traceback.splitlines()
    begins = [number for number, line in enumerate(lines) if _TRACEBACK.match(line)]
    last = lines[begins[-1] if begins else 0 :]
    found = [
        _place(match, _code(last[number + 1 : number + 2]))
        for number, line in enumerate(last)
        if (match := _RAISED.match(line)) is not None
    ]
    refused = next((match for line in lines if (match := _USAGE.match(line)) is not None), None)
    if not found and refused is not None:
        return CodeLine(refused["program"], None, is_own=True, code=refused["message"])
    return _innermost(found[::-1])


def stands_at(stack: str) -> CodeLine | None:
    """The innermost line of the user's own code in the stack of a `Stall`, else of any; None without one."""
    return _innermost([_place(match) for line in stack.splitlines() if (match := _STANDS.match(line)) is not None])


def _innermost(places: Sequence[CodeLine]) -> CodeLine | None:
    return next((place for place in places if place.is_own), places[0] if places else None)


def _place(match: re.Match[str], code: str = "") -> CodeLine:
    return CodeLine(match["path"], int(match["line"]), is_own=not LIBRARY.search(match["path"]), code=code)


def _code(following: Sequence[str]) -> str:
    text = _RANK.sub("", following[0]).strip() if following else ""
    return "" if _RAISED.match(text) else text
