"""Pickles of which nothing but plain values is taken, as reading any other pickle can run any program."""

from __future__ import annotations

import io
import pickle
from typing import Any, NoReturn

_MOST_VALUES = 4_000_000


def read_plain(data: bytes) -> Any:
    """The dicts, lists, tuples, texts, numbers, booleans and None in a pickle.

    Raises:
        Exception: it holds something else or too much, or is no pickle: pickle raises anything then.
    """
    told = _PlainUnpickler(io.BytesIO(data)).load()
    _limit(told)
    return told


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"{module}.{name} is not a plain value")

    def persistent_load(self, pid: Any) -> NoReturn:
        raise pickle.UnpicklingError(f"{pid} is not a plain value")


def _limit(value: object) -> None:
    """Raise ValueError for too many values: a pickle can hold one list many times, within itself too."""
    left, count = [value], 0
    while left:
        found = left.pop()
        count += 1
        if isinstance(found, dict):
            left += [*found, *found.values()]
        elif isinstance(found, (list, tuple)):
            left += found
        if count + len(left) > _MOST_VALUES:
            raise ValueError("too many values")
