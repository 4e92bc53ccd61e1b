"""Finding: a judgement on the facts, with the node, the reason and what mends it. Rule: what such a finding says."""

from __future__ import annotations

import shlex

import msgspec

__all__ = ["SEVERITIES", "Finding", "Rule"]

SEVERITIES = ("error", "warning", "note")


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that a check found.

    Attributes:
        severity: `error` (the training would fail or hang), `warning` (it may), `note` (good to know).
        node: the node's name; None concerns the cluster as a whole.
        check: the check's name, as in the matrix.
        message: what is wrong and why it breaks the training.
        hint: the exact command or hostfile key that mends it.
    """

    severity: str
    node: str | None
    check: str
    message: str
    hint: str | None = None


class _Word:
    """A text that a hint names: quoted for a shell, unless `!s` asks for it as it is."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __format__(self, _spec: str) -> str:
        return shlex.quote(self._text)


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of finding; the reference of all checks is made from these.

    Attributes:
        check: the check that it belongs to: its column in the matrix.
        severity: as in `Finding`.
        catches: the trouble, in the words of a list.
        message: the finding's, with `{names}` for what is known only when it is found.
        hint: likewise, with a `{name}` quoted for a shell, as it may be a node's own word; `{name!s}` is text of ours.
    """

    check: str
    severity: str
    catches: str
    message: str
    hint: str

    def found(self, on: str | None, /, **values: object) -> Finding:
        """The finding on a node, which message and hint may name `{node}`; None concerns the cluster as a whole.

        Raises:
            KeyError: a value that message or hint names was not given.
        """
        # A node's own words do not begin a line that would look like one of ours.
        known: dict[str, object] = {"node": on}
        known |= {name: one.replace("\n", " ") if isinstance(one, str) else one for name, one in values.items()}
        words = {name: _Word(value) if isinstance(value, str) else value for name, value in known.items()}
        return Finding(
            severity=self.severity,
            node=on,
            check=self.check,
            message=self.message.format_map(known),
            hint=self.hint.format_map(words),
        )
