"""What a check prints: a matrix of nodes and checks, the findings by severity, and `next:`, the one next command."""

from __future__ import annotations

from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table

from multinode.core.check.finding import SEVERITIES, Finding
from multinode.report.render.table import make_table

__all__ = ["check_matrix", "findings_text", "next_step"]

_MARKS = {"error": "[bold red]ERROR[/]", "warning": "[yellow]warn[/]", "note": "note", None: "[green]ok[/]"}
_NOT_KNOWN = "[dim]-[/]"
# So many nodes fit beside each other; more stand below each other, with the checks that found something.
_MAX_COLUMNS = 8

Nodes = Sequence[tuple[str, bool]]
_Place = tuple[str | None, bool]


def check_matrix(nodes: Nodes, checks: Sequence[str], findings: Sequence[Finding]) -> Table:
    """Nodes (name, whether it was reached) and checks; what concerns all nodes is a column, or row, of its own."""
    everywhere = [(None, True)] if any(finding.node is None for finding in findings) else []
    places: list[_Place] = [*nodes, *everywhere]
    table = make_table()
    if len(nodes) <= _MAX_COLUMNS:
        table.add_column("check", no_wrap=True)
        for name, _ in places:
            table.add_column(_title(name), justify="center")
        for check in checks:
            table.add_row(check, *(_mark(place, check, findings) for place in places))
        return table
    found = {finding.check for finding in findings}
    shown = [check for check in checks if check in found]
    others = len(checks) - len(shown)
    table.add_column("node", no_wrap=True)
    for check in shown:
        table.add_column(check, justify="center", no_wrap=True)
    if others:
        table.add_column(f"the other {others}" if shown else "all checks", justify="center")
    for name, reached in places:
        rest = [_MARKS[None] if reached else _NOT_KNOWN] if others else []
        table.add_row(_title(name), *(_mark((name, reached), check, findings) for check in shown), *rest)
    return table


def findings_text(findings: Sequence[Finding]) -> str:
    """Every finding with what fixes it."""
    lines = []
    for finding in findings:
        where = f"{finding.node}: " if finding.node else ""
        lines.append(f"{finding.severity}: {where}{finding.message} [{finding.check}]")
        if finding.hint:
            lines.append(f"  hint: {finding.hint}")
    return "\n".join(lines)


def next_step(failures: Sequence[Finding], given: str, for_launch: str) -> str:
    """What to do next: fix the first failure and check again, or launch; with the options that `check` was given."""
    if not failures:
        return f"next: multinode launch{for_launch}"
    first = failures[0]
    fix = first.hint or first.message
    where = f"{first.node}: " if first.node and first.node not in fix else ""
    return f"next: {where}{fix}\nthen check again: multinode check{given}"


def _title(name: str | None) -> str:
    return "all nodes" if name is None else escape(name)


def _mark(place: _Place, check: str, findings: Sequence[Finding]) -> str:
    name, reached = place
    mine = {finding.severity for finding in findings if finding.node == name and finding.check == check}
    worst = next((severity for severity in SEVERITIES if severity in mine), None)
    if worst is None and name is None:
        return ""
    return _MARKS[worst] if worst or reached else _NOT_KNOWN
