"""The screen of a check: counts, findings by severity with their fixes, passed checks, the next command."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from rich.markup import escape
from rich.table import Table

from multinode.check.rule import SEVERITIES, CheckFinding
from multinode.render.table import (
    BAD,
    DOUBTFUL,
    GOOD,
    CommandLine,
    Part,
    footer,
    labelled,
    labelled_parts,
    make_table,
    paragraph,
)
from multinode.units import format_count, format_list

_MARKS = {"error": "[bold red]ERROR[/]", "warning": "[yellow]warn[/]", "note": "note", None: "[green]ok[/]"}
_STYLES = {"error": BAD, "warning": DOUBTFUL, "note": "bold"}
_NOT_KNOWN = "[dim]-[/]"
# This number of nodes fits side by side; more are listed below each other, with the checks that found something.
_MAX_COLUMNS = 8
# With more nodes, those with the same number of passed checks share a line.
_MAX_LINES = 8

Nodes = Sequence[tuple[str, bool]]
_Place = tuple[str | None, bool]


def check_parts(
    nodes: Nodes, checks: Sequence[str], findings: Sequence[CheckFinding], *, details: bool = False
) -> Iterator[Part]:
    """The screen of a check, without its next step.

    `details` adds the matrix of nodes and checks, and findings about launches without multinode.
    """
    pressing = any(finding.severity != "note" for finding in findings)
    shown = [
        finding for finding in findings if details or not (finding.by_hand or (pressing and finding.severity == "note"))
    ]
    worst = next((name for name in SEVERITIES if any(finding.severity == name for finding in shown)), None)
    yield paragraph(_counts(nodes, checks, shown), style=GOOD if worst in {None, "note"} else _STYLES[worst])
    for severity in SEVERITIES:
        alike = _alike([finding for finding in shown if finding.severity == severity])
        rows = [row for findings_alike in alike for row in _rows(findings_alike)]
        if rows:
            yield ""
            yield paragraph(f"{severity}s", style=_STYLES[severity])
            yield from labelled_parts(rows)
    yield ""
    yield paragraph("passed", style="bold")
    yield labelled(_passed(nodes, checks, findings))
    if details:
        yield ""
        yield _matrix(nodes, checks, shown)
        return
    hidden = len(findings) - len(shown)
    notes = f"{format_count(hidden, 'note')}, " if hidden else ""
    yield footer("Details", f"--details: {notes}table of nodes and checks")


def next_step(failures: Sequence[CheckFinding], given: str, launch: str) -> str:
    """The next command: check again after fixing, with the options given to `check`, or the launch."""
    if not failures:
        return footer("Next", launch)
    severities = Counter(alike[0].severity for alike in _alike(failures))
    named = format_list([format_count(severities[name], name) for name in SEVERITIES if severities[name]])
    return footer("Next", f"fix the {named} above, then: multinode check{given}")


def _counts(nodes: Nodes, checks: Sequence[str], findings: Sequence[CheckFinding]) -> str:
    counts = Counter(alike[0].severity for alike in _alike(findings))
    named = [format_count(counts[name], name) for name in SEVERITIES if counts[name]]
    where = f"{format_count(len(nodes), 'node')}, {format_count(len(checks), 'check')} each"
    silent = sum(not reached for _, reached in nodes)
    unreached = f"; {silent} not reached" if silent else ""
    if counts["error"] or counts["warning"]:
        return f"{', '.join(named)} ({where}{unreached})"
    return f"OK: no errors or warnings{f', {named[0]}' if named else ''} ({where}{unreached})"


def _alike(findings: Sequence[CheckFinding]) -> list[list[CheckFinding]]:
    same: dict[tuple[str, str, str], list[CheckFinding]] = {}
    for finding in findings:
        same.setdefault((finding.severity, finding.code, finding.message), []).append(finding)
    return list(same.values())


def _rows(alike: Sequence[CheckFinding]) -> Iterator[tuple[str, str]]:
    names = [finding.node for finding in alike if finding.node is not None]
    where = f"{format_list(names, _MAX_LINES, 'more')}: " if len(names) > 1 else ""
    label = format_count(len(names), "node") if where else alike[0].node or "all nodes"
    yield label, f"{where}{alike[0].message} [{alike[0].code}]"
    fixes: dict[str, dict[str, None]] = {}
    for words, *commands in (finding.hint.split("\n") for finding in alike if finding.hint):
        fixes.setdefault(words, {}).update(dict.fromkeys(commands))
    for words, lines in fixes.items():
        yield "", f"fix: {words}"
        yield from (("", CommandLine(line)) for line in lines)


def _passed(nodes: Nodes, checks: Sequence[str], findings: Sequence[CheckFinding]) -> Iterator[tuple[str, str]]:
    lines = {name: _passed_on(name, checks, findings) if reached else "not reached" for name, reached in nodes}
    for line in dict.fromkeys(lines.values()):
        alike = [name for name in lines if lines[name] == line]
        label = format_count(len(alike), "node") if len(alike) > 1 else alike[0]
        yield label, f"{line} ({format_list(alike, _MAX_LINES, 'more')})" if len(alike) > 1 else line


def _passed_on(node: str, checks: Sequence[str], findings: Sequence[CheckFinding]) -> str:
    failed = {finding.code for finding in findings if finding.node in {node, None} and finding.severity != "note"}
    count = sum(check not in failed for check in checks)
    return f"{count} of {len(checks)} checks" if count < len(checks) else f"all {len(checks)} checks"


def _matrix(nodes: Nodes, checks: Sequence[str], findings: Sequence[CheckFinding]) -> Table:
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
    codes = {finding.code for finding in findings}
    shown = [check for check in checks if check in codes]
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


def _title(name: str | None) -> str:
    return "all nodes" if name is None else escape(name)


def _mark(place: _Place, check: str, findings: Sequence[CheckFinding]) -> str:
    name, reached = place
    mine = {finding.severity for finding in findings if finding.node == name and finding.code == check}
    worst = next((severity for severity in SEVERITIES if severity in mine), None)
    if worst is None and name is None:
        return ""
    return _MARKS[worst] if worst or reached else _NOT_KNOWN
