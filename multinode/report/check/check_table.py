"""The view of a check: a matrix of nodes and checks, the findings by severity, then the one next command."""

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


def check_matrix(nodes: Nodes, checks: Sequence[str], findings: Sequence[Finding]) -> Table:
    """Nodes (name, whether it was reached) and checks; what concerns all nodes is a column, or row, of its own."""
    everywhere = [(None, True)] if any(finding.node is None for finding in findings) else []
    places: list[tuple[str | None, bool]] = [*nodes, *everywhere]
    if len(nodes) <= _MAX_COLUMNS:
        return _checks_below_each_other(places, checks, findings)
    return _nodes_below_each_other(places, checks, findings)


def findings_text(findings: Sequence[Finding]) -> str:
    """Every finding with what mends it."""
    lines = []
    for finding in findings:
        where = f"{finding.node}: " if finding.node else ""
        lines.append(f"{finding.severity}: {where}{finding.message} [{finding.check}]")
        if finding.hint:
            lines.append(f"  hint: {finding.hint}")
    return "\n".join(lines)


def next_step(findings: Sequence[Finding], check: str, launch: str) -> str:
    """What to do next: mend the first error and check again, or launch; the two commands as a person types them."""
    errors = [finding for finding in findings if finding.severity == "error"]
    if not errors:
        return f"next: {launch}"
    mend = errors[0].hint or errors[0].message
    where = f"{errors[0].node}: " if errors[0].node and errors[0].node not in mend else ""
    return f"next: {where}{mend}\nthen check again: {check}"


def _checks_below_each_other(
    places: Sequence[tuple[str | None, bool]], checks: Sequence[str], findings: Sequence[Finding]
) -> Table:
    table = make_table()
    table.add_column("check", no_wrap=True)
    for name, _ in places:
        table.add_column(_title(name), justify="center")
    for check in checks:
        table.add_row(check, *(_mark(name, check, findings, reached=reached) for name, reached in places))
    return table


def _nodes_below_each_other(
    places: Sequence[tuple[str | None, bool]], checks: Sequence[str], findings: Sequence[Finding]
) -> Table:
    found = {finding.check for finding in findings}
    shown = [check for check in checks if check in found]
    table = make_table()
    table.add_column("node", no_wrap=True)
    for check in shown:
        table.add_column(check, justify="center", no_wrap=True)
    if len(shown) < len(checks):
        table.add_column(f"the other {len(checks) - len(shown)}" if shown else "all checks", justify="center")
    for name, reached in places:
        marks = [_mark(name, check, findings, reached=reached) for check in shown]
        rest = [_MARKS[None] if reached else _NOT_KNOWN] if len(shown) < len(checks) else []
        table.add_row(_title(name), *marks, *rest)
    return table


def _title(name: str | None) -> str:
    return "all nodes" if name is None else escape(name)


def _mark(name: str | None, check: str, findings: Sequence[Finding], *, reached: bool) -> str:
    mine = [finding.severity for finding in findings if finding.node == name and finding.check == check]
    for severity in SEVERITIES:
        if severity in mine:
            return _MARKS[severity]
    if name is None:
        return ""
    return _MARKS[None] if reached else _NOT_KNOWN
