"""Grouping: what is alike on many nodes is said once, with their names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from multinode.core.check.finding import Finding, Rule

__all__ = ["group_findings", "listed"]

_MOST_NAMES = 8


def group_findings(rule: Rule, cases: Iterable[tuple[str, dict[str, str]]]) -> Iterator[Finding]:
    """One finding for all nodes whose values are equal, in the order of their first; the rule may name `{nodes}`.

    A single node has it to itself; one of several nodes concerns the cluster.
    """
    groups: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for node, values in cases:
        groups.setdefault(tuple(values.items()), []).append(node)
    for shared, nodes in groups.items():
        yield rule.found(nodes[0] if len(nodes) == 1 else None, nodes=listed(nodes), **dict(shared))


def listed(names: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`; beyond eight the rest is counted."""
    if len(names) > _MOST_NAMES:
        names = [*names[: _MOST_NAMES - 1], f"{len(names) - _MOST_NAMES + 1} more"]
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1]))) if names else ""
