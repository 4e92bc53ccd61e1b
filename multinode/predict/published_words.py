"""WORDS: what people write in the tables that they publish, in English and in Chinese; published_words.toml has it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib.resources import files

import msgspec


class Period(msgspec.Struct, frozen=True, kw_only=True):
    """A unit of a time such as 1d 2h, longest names first."""

    seconds: int
    names: tuple[str, ...]


class Rates(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How rates are written."""

    of_device: frozenset[str]
    each_device: tuple[str, ...]
    each_second: str
    handled: tuple[str, ...]
    words: dict[str, str]


class Titles(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What stands in titles beside the names of columns."""

    speed: frozenset[str]
    speed_of_device: frozenset[str]
    time: frozenset[str]
    neutral: frozenset[str]
    leading: tuple[str, ...]
    of_all: frozenset[str]
    of_device: frozenset[str]
    corners: frozenset[str]
    passed_over: frozenset[str]


class Words(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file as it is; its comments say what each is."""

    about: tuple[str, ...]
    about_behind: tuple[str, ...]
    to: tuple[str, ...]
    no_figure: frozenset[str]
    yes: tuple[str, ...]
    no: tuple[str, ...]
    out_of_memory: tuple[str, ...]
    of_gpu: tuple[str, ...]
    of_node: tuple[str, ...]
    thousands: dict[str, float]
    periods: tuple[Period, ...]
    seconds: dict[str, float]
    bytes: dict[str, float]
    things: dict[str, tuple[str, ...]]
    counted: dict[str, tuple[str, ...]]
    rates: Rates
    titles: Titles
    names: dict[str, tuple[str, ...]]
    bare: dict[str, tuple[str, ...]]


WORDS = msgspec.toml.decode(files(__package__).joinpath("published_words.toml").read_bytes(), type=Words)
"""All of it."""


def any_of(words: Iterable[str]) -> str:
    """A pattern of any of these words, the longest first; one of letters does not end within a word of letters."""
    ordered = sorted(words, key=len, reverse=True)
    return "|".join(
        re.escape(word) + (r"(?![a-z])" if word[-1:].isascii() and word[-1:].isalpha() else "") for word in ordered
    )
