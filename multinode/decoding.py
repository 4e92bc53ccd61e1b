"""convert, decode_json: a value or JSON text as one of our types. All of multinode decodes through this module.

parse_option: the text of an option, parsed.

LineDecoder: lines of a node as one of our types, with every text in them made printable.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from typing import Any, Generic, TypeVar

import msgspec

from multinode.errors import UsageError, printable, printable_line

_Kind = TypeVar("_Kind")

_building = threading.Lock()
_DELETE = b"\x7f"


def convert(value: object, kind: type[_Kind], *, strict: bool = True) -> _Kind:
    """The value as `kind`; `strict` as in msgspec.convert."""
    _decoder(kind, strict=strict)
    return msgspec.convert(value, kind, strict=strict)


def decode_json(text: bytes | str, kind: type[_Kind], *, strict: bool = True) -> _Kind:
    """What a JSON text says, as `kind`."""
    decoded: _Kind = _decoder(kind, strict=strict).decode(text)
    return decoded


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
        value: as JSON has it, or a decoded struct, whose sequences are tuples.
        with_lines: keys below which line breaks are kept: of stacks, tracebacks, files.
        longest: characters of a text, beyond which it is cut off; None is without end.
    """

    def clean(value: Any, show: Callable[[str], str]) -> Any:
        if isinstance(value, str):
            return show(value[:longest])
        if isinstance(value, (list, tuple)):
            return [clean(item, show) for item in value]
        if isinstance(value, dict):
            # Keys of a decoded struct may be numbers.
            return {
                clean(key, printable_line): clean(item, printable if key in with_lines else show)
                for key, item in value.items()
            }
        return value

    return clean(value, printable_line)


def is_printable_json(text: bytes) -> bool:
    """Whether no text of this JSON holds a control character, as in nearly all lines of a node.

    JSON escapes all control characters but DELETE; texts beyond ASCII are not looked at, and count as if they did.
    """
    return text.isascii() and b"\\" not in text and _DELETE not in text


class LineDecoder(Generic[_Kind]):
    """JSON lines of a node as `kind`; a line whose texts need no change is decoded once.

    Args:
        kind: a struct, or a union of tagged ones.
        with_lines: as in `printable_values`.
    """

    def __init__(self, kind: type[_Kind], with_lines: Collection[str] = ()) -> None:
        self._kind = kind
        self._with_lines = with_lines
        self._decoder = _decoder(kind, strict=False)

    def decode(self, line: bytes) -> _Kind:
        """The line's record.

        Raises:
            msgspec.DecodeError, UnicodeDecodeError, RecursionError: the line is not JSON.
            msgspec.ValidationError, binascii.Error: it is no such record.
        """
        # Unknown parts are skipped without taking memory.
        record: _Kind = self._decoder.decode(line)
        if is_printable_json(line):
            return record
        plain = printable_values(msgspec.to_builtins(record), with_lines=self._with_lines)
        return convert(plain, self._kind, strict=False)


_decoders: dict[tuple[Any, bool], msgspec.json.Decoder[Any]] = {}


def _decoder(kind: Any, *, strict: bool) -> msgspec.json.Decoder[Any]:
    """The decoder of a type, made while no other thread makes one.

    msgspec 0.22 resolves a struct's annotations at its first use; two threads that do so at once crash the process.
    """
    key = (kind, strict)
    if key not in _decoders:
        with _building:
            _decoders[key] = msgspec.json.Decoder(kind, strict=strict)
    return _decoders[key]
