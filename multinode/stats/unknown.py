"""Unknown: a figure that is not there, with the reason; how figures that may be unknown are asked for. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec

_T = TypeVar("_T")


class Unknown(msgspec.Struct, frozen=True, tag_field="is", tag="unknown"):
    """A figure that is unknown, in its place: `{"is": "unknown", "reason": "..."}` in documents."""

    reason: str  # for people, without a full stop


class Entries(msgspec.Struct, Generic[_T], frozen=True, tag_field="is", tag="entries"):
    """A dictionary that may be unknown: in JSON it would look like an Unknown."""

    values: dict[str, _T]


UNMEASURED = Unknown("it was not measured")
"""A figure that nobody looked for."""


class UnknownError(ValueError):
    """A figure is unknown; the message is the reason, for people."""


def found(find: Callable[[], _T]) -> _T | Unknown:
    """The result, or why it is unknown."""
    try:
        return find()
    except UnknownError as error:
        return Unknown(str(error))


def known(figure: _T | Unknown) -> _T:
    """The figure itself.

    Raises:
        UnknownError: it is unknown, with its reason.
    """
    if isinstance(figure, Unknown):
        raise UnknownError(figure.reason)
    return figure


def or_none(figure: _T | Unknown) -> _T | None:
    """The figure, or None where only its value matters."""
    return None if isinstance(figure, Unknown) else figure


def or_unknown(figure: _T | None, reason: str = UNMEASURED.reason) -> _T | Unknown:
    """The figure, or why there is none."""
    return Unknown(reason) if figure is None else figure


def or_empty(items: tuple[_T, ...] | Unknown) -> tuple[_T, ...]:
    """The items; none where unknown ones count as absent."""
    return () if isinstance(items, Unknown) else items


def entries(items: Entries[_T] | Unknown) -> dict[str, _T]:
    """The dictionary; empty where unknown entries count as absent."""
    return {} if isinstance(items, Unknown) else items.values


def unknown_fields(figures: msgspec.Struct) -> dict[str, Unknown]:
    """The fields of a struct that are unknown, by name, without those that nobody looked for."""
    fields = {name: getattr(figures, name) for name in figures.__struct_fields__}
    return {name: figure for name, figure in fields.items() if isinstance(figure, Unknown) and figure != UNMEASURED}


def or_zero(figure: float | Unknown) -> float:
    """The figure, or 0 where the known ones are added up."""
    return 0.0 if isinstance(figure, Unknown) else figure


def reason_of(figure: object) -> str:
    """Why a figure is unknown; empty if it is known."""
    return figure.reason if isinstance(figure, Unknown) else ""
