"""The view of a check: a matrix of nodes and checks, the findings by severity, then the one next command."""

from __future__ import annotations

from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table

from multinode.core.finding import Finding
from multinode.report.table import make_table

__all__ = ["check_matrix", "findings_text", "next_step"]

_MARKS = {"error": "[bold red]ERROR[/]", "warning": "[yellow]warn[/]", "note": "note", None: "[green]ok[/]"}
_NOT_KNOWN = "[dim]-[/]"


def check_matrix(nodes: Sequence[tuple[str, bool]], checks: Sequence[str], findings: Sequence[Finding]) -> Table:
    """A row a node (its name, whether it was reached), a column a check."""
    table = make_table()
    table.add_column("node", no_wrap=True)
    for check in checks:
        table.add_column(check, justify="center", no_wrap=True)
    for name, reached in nodes:
        table.add_row(escape(name), *(_mark(name, check, findings, reached=reached) for check in checks))
    return table


def findings_text(findings: Sequence[Finding]) -> str:
    """Every finding with what mends it."""
    lines = []
    for finding in findings:
        where = f"{finding.node}: " if finding.node else ""
        lines.append(f"{finding.severity}: {where}{finding.message} [{finding.check}]")
        if finding.hint:
            lines.append(f"  hint: {finding.hint}")
    return "\n".join(lines)


def next_step(findings: Sequence[Finding], launch: str) -> str:
    """What to do next: mend the first error, or launch."""
    errors = [finding for finding in findings if finding.severity == "error"]
    if not errors:
        return f"next: {launch}"
    return f"next: {errors[0].hint or errors[0].message}"


def _mark(name: str, check: str, findings: Sequence[Finding], *, reached: bool) -> str:
    mine = [finding.severity for finding in findings if finding.node == name and finding.check == check]
    for severity in ("error", "warning", "note"):
        if severity in mine:
            return _MARKS[severity]
    return _MARKS[None] if reached else _NOT_KNOWN
