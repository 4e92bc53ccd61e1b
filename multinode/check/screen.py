"""The screen of a check: counts, findings by severity with their fixes, passed checks, the next command."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from multinode.check.check import CheckReport
from multinode.check.rule import SEVERITIES, CheckFinding
from multinode.render.sheet import Block, Column, CommandLine, Detail, Labels, NextCommand, Prose, Sheet, Tone
from multinode.units import UNKNOWN, format_count, format_list

_MARKS = {"error": "ERROR", "warning": "warn", "note": "note", None: "ok"}
_MARK_TONES: dict[str, Tone] = {"ERROR": "bad", "warn": "doubtful", "ok": "good"}
_TONES: dict[str | None, Tone] = {"error": "bad", "warning": "doubtful", "note": "", None: "good"}
# This number of nodes fits side by side; more are listed below each other, with the checks that found something.
_MAX_COLUMNS = 8
# With more nodes, those with the same number of passed checks share a line.
_MAX_LINES = 8

Nodes = Sequence[tuple[str, bool]]
_Place = tuple[str | None, bool]


def show(report: CheckReport) -> Iterator[Block]:
    """Counts, findings with their fixes, what passed.

    In detail also findings about launches without multinode, notes beside failures, and a table of nodes and checks.
    """
    nodes, findings = [(node.name, node.reached) for node in report.nodes], report.findings
    pressing = any(finding.severity != "note" for finding in findings)
    brief = [finding for finding in findings if not (finding.by_hand or (pressing and finding.severity == "note"))]
    yield from _found(nodes, report.checks, brief, "brief")
    yield from _found(nodes, report.checks, findings, "full")
    yield Prose("passed", "section")
    yield Labels(tuple(_passed(nodes, report.checks, findings)))
    yield _matrix(nodes, report.checks, findings)
    hidden = len(findings) - len(brief)
    notes = f"{format_count(hidden, 'note')}, " if hidden else ""
    yield NextCommand("Details", f"--details: {notes}table of nodes and checks", detail="brief")


def _found(nodes: Nodes, checks: Sequence[str], findings: Sequence[CheckFinding], detail: Detail) -> Iterator[Block]:
    worst = next((name for name in SEVERITIES if any(finding.severity == name for finding in findings)), None)
    yield Prose(_counts(nodes, checks, findings), "lead", tone=_TONES[worst] or "good", detail=detail)
    for severity in SEVERITIES:
        alike = _alike([finding for finding in findings if finding.severity == severity])
        if alike:
            yield Prose(f"{severity}s", "section", tone=_TONES[severity], detail=detail)
            yield Labels(tuple(row for findings_alike in alike for row in _rows(findings_alike)), detail=detail)


def next_step(failures: Sequence[CheckFinding], given: str, launch: str) -> NextCommand:
    """The next command: check again after fixing, with the options given to `check`, or the launch."""
    if not failures:
        return NextCommand("Next", launch)
    severities = Counter(alike[0].severity for alike in _alike(failures))
    named = format_list([format_count(severities[name], name) for name in SEVERITIES if severities[name]])
    return NextCommand("Next", f"fix the {named} above, then: multinode check{given}")


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


def _matrix(nodes: Nodes, checks: Sequence[str], findings: Sequence[CheckFinding]) -> Sheet:
    everywhere = [(None, True)] if any(finding.node is None for finding in findings) else []
    places: list[_Place] = [*nodes, *everywhere]
    if len(nodes) <= _MAX_COLUMNS:
        titles = ("check", *(_title(name) for name, _ in places))
        rows = [(check, *(_mark(place, check, findings) for place in places)) for check in checks]
    else:
        codes = {finding.code for finding in findings}
        shown = [check for check in checks if check in codes]
        others = len(checks) - len(shown)
        titles = ("node", *shown, *([f"the other {others}" if shown else "all checks"] if others else []))
        rows = [
            (
                _title(place[0]),
                *(_mark(place, check, findings) for check in shown),
                *([_MARKS[None] if place[1] else UNKNOWN] if others else []),
            )
            for place in places
        ]
    head, *others_heads = titles
    return Sheet(
        title="",
        columns=(Column(head, words=True), *(Column(title, marks=True) for title in others_heads)),
        rows=tuple(rows),
        tones=_MARK_TONES,
        detail="full",
    )


def _title(name: str | None) -> str:
    return "all nodes" if name is None else name


def _mark(place: _Place, check: str, findings: Sequence[CheckFinding]) -> str:
    name, reached = place
    mine = {finding.severity for finding in findings if finding.node == name and finding.code == check}
    worst = next((severity for severity in SEVERITIES if severity in mine), None)
    if worst is None and name is None:
        return ""
    return _MARKS[worst] if worst or reached else UNKNOWN
