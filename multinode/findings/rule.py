"""Rule: one kind of finding, declared once with its words. RuleGroup: the rules of one subject.

A rule decides nothing: the code that judges calls `found` with the figures. All are listed in
`docs/reference/findings.md`, those of checks in `docs/reference/checks.md`.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from multinode.findings.finding import Finding
from multinode.units import format_ms

NODES = "\0"
"""Stands for the names of the nodes until all are known that share a finding: no text of a node has it."""


class _Word(str):
    """A text in a hint: quoted for a shell, unless `!s` asks for it unquoted."""

    __slots__ = ()

    def __format__(self, _spec: str) -> str:
        return shlex.quote(self)


class _Ms(float):
    """A value of a name in `_ms`, in a message: the one form of such times, with its unit."""

    __slots__ = ()

    def __format__(self, _spec: str) -> str:
        return format_ms(float(self))


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of finding; the reference of the findings is generated from these."""

    code: str  # identifies its kind, or the check it belongs to
    about: str  # what it finds, for a list
    # the finding's, with `{names}` for values known at run time; one in `_ms` is written with its unit. If it or the
    # hint contains `{nodes}`, nodes with equal values share one finding.
    message: str
    # as `message`, but `{name}` is quoted for a shell, as it may come from a node; `{name!s}` is our own text. Each
    # line after the first is a command to copy. Empty if there is nothing to do.
    hint: str = ""
    figures: tuple[str, ...] = ()  # names of the values that the finding keeps, with their units

    def found(self, on: str | None, /, **values: object) -> Finding:
        """A finding on a node, which message and hint may refer to as `{node}`; None concerns the whole cluster."""
        return Finding(**self.fields(on, values))

    def fields(self, on: str | None, values: Mapping[str, object]) -> dict[str, Any]:
        """The fields of a `Finding`, for one that has more."""
        message, hint = self.worded(on, values)
        return {
            "code": self.code,
            "node": on,
            "message": message,
            "hint": hint or None,
            "figures": self.known(values),
        }

    def worded(self, on: str | None, values: Mapping[str, object]) -> tuple[str, str]:
        """Message and hint with these values."""
        # A node's text must not begin a line that looks like one of ours.
        texts = {name: _text(name, value) for name, value in {"node": on, "nodes": NODES, **values}.items()}
        words = {name: _Word(text) if isinstance(text, str) else text for name, text in texts.items()}
        return self.message.format_map(texts), self.hint.format_map(words)

    def known(self, values: Mapping[str, object]) -> dict[str, int | float | str]:
        """The figures among these values, without those that are None."""
        kept = {name: values.get(name) for name in self.figures}
        return {name: value for name, value in kept.items() if isinstance(value, int | float | str)}


def _text(name: str, value: object) -> object:
    if isinstance(value, tuple):
        return "\n".join(str(_text(name, line)) for line in value)
    if name.endswith("_ms") and isinstance(value, int | float):
        return _Ms(value)
    return value.replace("\n", " ") if isinstance(value, str) else value


R = TypeVar("R", bound=Rule)


class RuleGroup:
    """The rules of one subject, in the order of their declaration."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.rules: list[Rule] = []

    def has(self, finding: Finding) -> bool:
        """Whether one of its rules made the finding."""
        return any(rule.code == finding.code for rule in self.rules)

    def rule(self, code: str, *, about: str, message: str, hint: str = "", figures: tuple[str, ...] = ()) -> Rule:
        """Declare a rule."""
        return self.add(Rule(code=code, about=about, message=message, hint=hint, figures=figures))

    def add(self, rule: R) -> R:
        """Declare a rule whose findings have more fields."""
        self.rules.append(rule)
        return rule
