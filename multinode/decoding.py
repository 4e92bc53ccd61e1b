"""convert, decode_json: a value or JSON text as one of our types. All of multinode decodes through these two.

parse_option: the text of an option, parsed.

printable_values: plain data from a node before it becomes one of our types, with every text in it made harmless.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from typing import Any, TypeVar

import msgspec

from multinode.errors import UsageError, printable, printable_line

_Kind = TypeVar("_Kind")

_building = threading.Lock()
_built: set[Any] = set()


def convert(value: object, kind: type[_Kind], *, strict: bool = True) -> _Kind:
    """The value as `kind`; `strict` as in msgspec.convert."""
    _build(kind)
    return msgspec.convert(value, kind, strict=strict)


def decode_json(text: bytes | str, kind: type[_Kind], *, strict: bool = True) -> _Kind:
    """What a JSON text says, as `kind`."""
    _build(kind)
    return msgspec.json.decode(text, type=kind, strict=strict)


def parse_option(name: str, text: str, parse: Callable[[str], _Kind]) -> _Kind:
    """An option's value, parsed.

    Raises:
        UsageError: it cannot be.
    """
    try:
        return parse(text)
    except ValueError as error:
        raise UsageError(f"{name}: {error}") from error


def printable_values(value: Any, *, with_lines: Collection[str] = (), longest: int | None = None) -> Any:
    """Remove control characters and line breaks from the texts of plain data: once, for all who show it later.

    Args:
        value: as JSON has it.
        with_lines: keys below which line breaks are kept: of stacks, tracebacks, files.
        longest: characters of a text, beyond which it is cut off; None is without end.
    """

    def clean(value: Any, show: Callable[[str], str]) -> Any:
        if isinstance(value, str):
            return show(value[:longest])
        if isinstance(value, list):
            return [clean(item, show) for item in value]
        if isinstance(value, dict):
            return {
                printable_line(key[:longest]): clean(item, printable if key in with_lines else show)
                for key, item in value.items()
            }
        return value

    return clean(value, printable_line)


def _build(kind: Any) -> None:
    """Have msgspec resolve the type while no other thread does.

    msgspec 0.22 resolves a struct's annotations at its first use; two threads that do so at once crash the process.
    """
    if kind not in _built:
        with _building:
            msgspec.json.Decoder(kind)
            _built.add(kind)
