"""expand_ranges: `node[01-16]` or `gpu[1,3,5-7].lan` -> the names that it stands for, in order."""

from __future__ import annotations

import re

__all__ = ["expand_ranges"]

_BRACKETS = re.compile(r"\[([^\]]*)\]")
# More digits than any node's number has would only cost time and memory.
_PART = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?", re.ASCII)


def expand_ranges(pattern: str, limit: int) -> list[str]:
    """The names that a pattern stands for; a number keeps the leading zeros of its range's first.

    Raises:
        ValueError: a range is wrong, or there would be more than `limit` names; the message names the pattern.
    """
    pieces = _BRACKETS.split(pattern)
    if any("[" in piece or "]" in piece for piece in pieces[::2]):
        raise ValueError(f"{pattern!r}: a bracket has no partner")
    names = [""]
    for index, piece in enumerate(pieces):
        # re.split alternates between what stands outside the brackets and what stands inside.
        choices = [piece] if index % 2 == 0 else _numbers(pattern, piece, limit)
        if len(names) * len(choices) > limit:
            raise ValueError(_too_many(pattern, limit))
        names = [name + choice for name in names for choice in choices]
    return names


def _numbers(pattern: str, text: str, limit: int) -> list[str]:
    numbers: list[str] = []
    for part in text.split(","):
        match = _PART.fullmatch(part)
        if match is None:
            raise ValueError(
                f"{pattern!r}: {part!r} is not a number or a range of numbers, as in node[01-16] or node[1,3,5-7]"
            )
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first):
            raise ValueError(f"{pattern!r}: the range {part!r} ends before it begins")
        if len(numbers) + int(last) - int(first) >= limit:
            raise ValueError(_too_many(pattern, limit))
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers


def _too_many(pattern: str, limit: int) -> str:
    return f"{pattern!r} stands for more than {limit} names"
