"""Unknown: the one way in which a figure that is unknown says why: raised, and kept under its name in `missing`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

_Found = TypeVar("_Found")


class UnknownError(ValueError):
    """A figure is not known; the message is the reason, as people read it."""


def attempt(missing: dict[str, str], name: str, find: Callable[[], _Found]) -> _Found | None:
    """What is found; None where it is not known, with the reason put into `missing`."""
    try:
        return find()
    except UnknownError as error:
        missing[name] = str(error)
        return None
