"""convert, decode_json: a value or JSON text as one of our types. All of multinode decodes through these two."""

from __future__ import annotations

import threading
from typing import Any, TypeVar

import msgspec

__all__ = ["convert", "decode_json"]

_Kind = TypeVar("_Kind")

_building = threading.Lock()
_built: set[Any] = set()


def convert(value: object, kind: type[_Kind], *, strict: bool = True, str_keys: bool = False) -> _Kind:
    """The value as `kind`; `strict` and `str_keys` as in msgspec.convert.

    Raises:
        msgspec.ValidationError: it is none.
    """
    _build(kind)
    return msgspec.convert(value, kind, strict=strict, str_keys=str_keys)


def decode_json(text: bytes | str, kind: type[_Kind], *, strict: bool = True) -> _Kind:
    """What a JSON text says, as `kind`.

    Raises:
        msgspec.ValidationError: it says something else.
        msgspec.DecodeError: it is not JSON.
    """
    _build(kind)
    return msgspec.json.decode(text, type=kind, strict=strict)


def _build(kind: Any) -> None:
    """Have msgspec resolve the type while no other thread does.

    msgspec 0.22 resolves a struct's annotations at its first use; two threads that do so at once crash the process.
    """
    if kind not in _built:
        with _building:
            msgspec.json.Decoder(kind)
            _built.add(kind)
