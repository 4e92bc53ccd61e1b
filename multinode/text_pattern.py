"""Texts as programs print them, written and matched one way: errors of a training, refusals of a way to a node.

A text is matched in any case and in whole words, in one line. `...` stands for up to 200 characters; `{name}` for a
value: what stands before the next words of the text, or the rest of the line. The bare name of an exception matches
only where its message or the end of the line follows. Any other brace is text.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from typing import Protocol, TypeVar

_MOST_BETWEEN = 200
_HOLE = re.compile(r"\.\.\.|\{[a-z_]+\}")
_EXCEPTION_NAME = re.compile(r"[A-Za-z]\w*(?:Error|Exception)")


class Printed(Protocol):
    """An entry of a catalogue, by what is printed."""

    @property
    def texts(self) -> tuple[str, ...]:
        """Each is enough; a name of a value stands in one of them."""


P = TypeVar("P", bound=Printed)


def find_first(entries: Iterable[P], text: str) -> tuple[P, dict[str, str]] | None:
    """The first entry that stands in a text, with its values; None where none does."""
    for entry in entries:
        values = find_values(entry.texts, text)
        if values is not None:
            return entry, values
    return None


def find_values(texts: tuple[str, ...], text: str) -> dict[str, str] | None:
    """The values of the text that stands there first, without those that are empty; None where none does."""
    match = _pattern(texts).search(text) if texts else None
    return {name: value for name, value in match.groupdict().items() if value} if match is not None else None


@functools.cache
def _pattern(texts: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile(text_pattern(texts), re.IGNORECASE | re.MULTILINE)


def text_pattern(texts: Iterable[str]) -> str:
    """The regular expression of texts, for MULTILINE."""
    return "|".join(map(_words, texts))


def literals(text: str) -> list[str]:
    """The parts of a text that are printed as they stand."""
    return _HOLE.split(text)


def _words(text: str) -> str:
    if _EXCEPTION_NAME.fullmatch(text):
        return rf"(?<![A-Za-z0-9])(?<!except ){text}(?=:|[ \r]*$)"
    # The name of a variable is one in its own letters alone.
    parts = [re.sub(r"'[A-Z_]+'", r"(?-i:\g<0>)", re.escape(part)) for part in literals(text)]
    words = parts[0]
    for hole, part in zip(_HOLE.findall(text), parts[1:], strict=True):
        words += _between(hole, is_last=not part) + part
    before = r"(?<![A-Za-z0-9])" if text[0].isalnum() else ""
    return before + words + (r"(?![A-Za-z0-9])" if text[-1].isalnum() else "")


def _between(hole: str, *, is_last: bool) -> str:
    if hole == "...":
        return f".{{0,{_MOST_BETWEEN}}}?"
    return rf"(?P<{hole[1:-1]}>[^\r\n]*{'' if is_last else '?'})"
