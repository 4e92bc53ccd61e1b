"""Rule: what a finding says. Check: what looks for it; what nodes have in common is said once, with their names."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import msgspec

from multinode.check.inspection import Inspection
from multinode.errors import MultinodeError
from multinode.units import format_list

SEVERITIES = ("error", "warning", "note")


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that a check found.

    Attributes:
        severity: `error` (the training would fail or hang), `warning` (it may), `note` (good to know).
        node: the node's name; None concerns the cluster as a whole.
        check: the check's name, as in the matrix.
        message: what is wrong and why it breaks the training.
        hint: what fixes it, such as a key of the hostfile; each line after the first is a command.
        by_hand: whether it concerns only launches that multinode does not make.
    """

    severity: str
    node: str | None
    check: str
    message: str
    hint: str | None = None
    by_hand: bool = False


def finding_of_error(check: str, error: MultinodeError) -> Finding:
    """What could not be asked."""
    hint = "\n".join(error.hint_lines) or None
    return Finding(severity="error", node=error.node, check=check, message=error.message, hint=hint)


_MOST_NAMES = 8


class _Word(str):
    """A text that a hint names: quoted for a shell, unless `!s` asks for it as it is."""

    __slots__ = ()

    def __format__(self, _spec: str) -> str:
        return shlex.quote(self)


class Rule(msgspec.Struct, frozen=True):
    """One kind of finding; the reference of all checks is made from these.

    Attributes:
        check: the check that it belongs to: its column in the matrix.
        severity: as in `Finding`.
        catches: the trouble, in the words of a list.
        message: the finding's, with `{names}` for what is known only when it is found. Where it, or the hint, names
            `{nodes}`, the nodes whose values are equal share one finding.
        hint: likewise, with a `{name}` quoted for a shell, as it may be a node's own word; `{name!s}` is text of ours.
            Each line after the first is a command, to be copied whole.
        by_hand: as in `Finding`.
    """

    check: str
    severity: str
    catches: str
    message: str
    hint: str
    by_hand: bool = False

    def found(self, on: str | None, /, **values: object) -> Case:
        """The trouble on a node, which message and hint may name `{node}`; None concerns the cluster as a whole."""
        return Case(self, on, values)

    @property
    def names_nodes(self) -> bool:
        """Whether nodes share a finding."""
        return "{nodes" in self.message + self.hint


def _text(value: object) -> object:
    """A tuple is words and then commands, a line each; of any other value no part begins a line."""
    if isinstance(value, tuple):
        return "\n".join(str(_text(line)) for line in value)
    return value.replace("\n", " ") if isinstance(value, str) else value


class Case(NamedTuple):
    """A rule that a node breaks, and the values that the rule names."""

    rule: Rule
    node: str | None
    values: Mapping[str, object]

    def finding(self) -> Finding:
        """What a user reads.

        Raises:
            KeyError: a value that message or hint names was not given.
        """
        # A node's own words do not begin a line that would look like one of ours.
        known = {name: _text(one) for name, one in {"node": self.node, **self.values}.items()}
        words = {name: _Word(value) if isinstance(value, str) else value for name, value in known.items()}
        return Finding(
            severity=self.rule.severity,
            node=self.node,
            check=self.rule.check,
            message=self.rule.message.format_map(known),
            hint=self.rule.hint.format_map(words),
            by_hand=self.rule.by_hand,
        )


class Check(msgspec.Struct, frozen=True):
    """A check: called with an inspection, what it finds.

    Attributes:
        before_launch: whether a launch makes it as well: what it finds would leave the run hanging or dead.
        judges_meeting: whether such a one judges how the nodes reached each other, too.
    """

    judge: Callable[[Inspection], Iterable[Case]]
    before_launch: bool = False
    judges_meeting: bool = False

    def __call__(self, inspection: Inspection) -> Iterator[Finding]:
        """What it finds; of what nodes have in common, one finding in the place of all."""
        shared: dict[tuple[Rule, tuple[Any, ...]], list[Case]] = {}
        for case in self.judge(inspection):
            if case.rule.names_nodes:
                shared.setdefault((case.rule, tuple(case.values.items())), []).append(case)
            else:
                yield case.finding()
        for cases in shared.values():
            nodes = listed([str(case.node) for case in cases])
            first = cases[0]
            node = first.node if len(cases) == 1 else None
            yield first._replace(node=node, values={**first.values, "nodes": nodes}).finding()


launch_check = partial(Check, before_launch=True)
meeting_check = partial(Check, before_launch=True, judges_meeting=True)


class _Disagreement(NamedTuple):
    """A node, its value, and which other node has the one that was expected."""

    node: str
    value: Any
    peer: str
    expected: Any


def disagreements(values: Mapping[str, Any], *, majority: bool = False) -> Iterator[_Disagreement]:
    """The nodes that differ from the first, or from most.

    Args:
        values: by node.
        majority: whether the commonest value is expected, of equally common ones the first.
    """
    if not values:
        return
    told = list(values.values())
    expected = Counter(told).most_common(1)[0][0] if majority else told[0]
    peer = next(node for node, value in values.items() if value == expected)
    for node, value in values.items():
        if value != expected:
            yield _Disagreement(node, value, peer, expected)


def listed(names: Iterable[str], most: int = _MOST_NAMES) -> str:
    """`a`, `a and b`, `a, b and c`, each once; beyond `most` the rest is counted."""
    return format_list(list(dict.fromkeys(names)), most, "more")
