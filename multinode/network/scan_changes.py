"""compare_scans: two size scans -> what changed: speeds, wrong values, nodes, and the environment. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from multinode.figures.compared import ComparedFigure, compare_frames
from multinode.figures.figure import Row
from multinode.figures.frame import Frame
from multinode.findings.finding import Finding
from multinode.findings.rule import Rule, RuleGroup
from multinode.network.scan_evidence import BUSBW, COLLECTIVE, DTYPE, REDOP, SIZE, WRONG, CollectiveRow, collective_row
from multinode.network.size_scan import NodeState, ScanChanges, ScanReport
from multinode.stats.estimate import Estimate
from multinode.stats.unknown import or_none
from multinode.units import format_count, format_rate, format_size

_KIB = 1024
CHANGES = RuleGroup("Changes from one nccl-test to the next")
_COUNTS = ("compared", "slower", "faster", "unjudged", "became_wrong_or_right")
_NOTHING_COMMON = CHANGES.rule(
    "nothing-common", about="tests that have no message in common", message="The two tests have no message in common."
)
_CHANGED = CHANGES.rule(
    "changed",
    about="messages whose speed changed by more than its confidence interval",
    message="The speed of {changed} of {compared_words} changed{most}{notes}.",
    figures=_COUNTS,
)
_UNCHANGED = CHANGES.rule(
    "unchanged",
    about="no speed changed by more than its confidence interval",
    message="No speed changed by more than its confidence interval ({judged} compared){notes}.",
    figures=_COUNTS,
)
_UNJUDGED = CHANGES.rule(
    "unjudged",
    about="no speed can be compared, because confidence intervals are missing",
    message="{unjudged_words} could not be compared, because confidence intervals are missing{notes}.",
    figures=_COUNTS,
)
_WRONG = CHANGES.rule(
    "wrong_values",
    about="a message size whose results became wrong or right",
    message="{call} has {wrong_now} wrong values; it had {wrong_before} before",
    figures=(*(figure.name for figure in (COLLECTIVE, DTYPE, REDOP, SIZE)), "wrong_before", "wrong_now"),
)


def _change(code: str, about: str, message: str) -> Rule:
    return CHANGES.rule(code, about=about, message=f"{message} (previously {{earlier}})", figures=("before", "now"))


_BACKEND = _change("backend", "a different backend", "now measured with {value}")
_WORKERS = _change("workers", "a different number of workers", "now measured with {value}")
_ORDER = _change("order", "a different order of the nodes", "the order of the nodes is now {value}")
_OF_NIC = (
    _change("link_gbit_per_s", "a different link rate", "{where} now negotiates {value}"),
    _change("mtu", "a different MTU", "{where} now has an MTU of {value}"),
    _change("duplex", "a different duplex mode", "{where} now runs in {value} duplex"),
    _change("driver", "a different NIC driver", "{where} now uses driver {value}"),
)
_OF_NODE = (
    _change("ifname", "a different data-plane NIC", "{where} now uses {value}"),
    _change("python", "a different Python version", "{where} now has Python {value}"),
    _change("torch", "a different torch version", "{where} now has torch {value}"),
    _change("nccl", "a different NCCL version", "{where} now has NCCL {value}"),
    _change("cuda", "a different CUDA version", "{where} now has CUDA {value}"),
    _change("gpu", "different GPUs", "{where} now has {value}"),
    _change("gpu_driver", "a different GPU driver", "{where} now has GPU driver {value}"),
    _change("cores", "a different number of cores", "{where} now has {value} cores"),
)


def compare_scans(before: ScanReport, now: ScanReport) -> ScanChanges:
    """Changes of all common messages and nodes."""
    first, second = _frame(before), _frame(now)
    # Busbw is comparable between different numbers of workers, time is not.
    rows = compare_frames(first, second, BUSBW, _name)
    wrong = tuple(_wrong(first, second))
    old, new = ([node.name for node in scan.states] for scan in (before, now))
    return ScanChanges(
        before=before.run_id,
        now=now.run_id,
        verdict=_verdict(rows, wrong),
        environment=(*_terms(before, now), *_environment(before.states, now.states)),
        came=tuple(name for name in new if name not in old),
        gone=tuple(name for name in old if name not in new),
        rows=rows,
        wrong=wrong,
        only_before=_without(first, second),
        only_now=_without(second, first),
    )


def _frame(scan: ScanReport) -> Frame:
    # A message is identified by its operation and its exact size.
    figures = (COLLECTIVE, DTYPE, REDOP, SIZE.as_form("number"), BUSBW)
    return Frame(rows=tuple(map(collective_row, scan.rows)), figures=figures)


def _without(frame: Frame, other: Frame) -> tuple[str, ...]:
    """The messages that the other scan does not have."""
    return tuple(_name(row) for identity, row in frame.by_identity.items() if identity not in other.by_identity)


def _wrong(before: Frame, now: Frame) -> Iterator[Finding]:
    earlier = before.by_identity
    for identity, row in now.by_identity.items():
        if identity not in earlier:
            continue
        wrong_now, wrong_before = (or_none(each[WRONG]) for each in (row, earlier[identity]))
        if wrong_now is None or wrong_before is None or bool(wrong_now) == bool(wrong_before):
            continue
        operation = {figure.name: figure.tell(row) for figure in (COLLECTIVE, DTYPE, REDOP)}
        size: dict[str, object] = {SIZE.name: row.item.size_bytes}
        yield _WRONG.found(None, call=_name(row), wrong_before=wrong_before, wrong_now=wrong_now, **operation, **size)


def _name(row: Row) -> str:
    message: CollectiveRow = row.item
    redop = "" if message.redop in {"sum", "none"} else f" {message.redop}"
    dtype = "" if message.dtype == "float" else f" of {message.dtype}"
    # Sizes are rounded to the number of workers, and two that differ are not to read the same.
    is_rounded = message.size_bytes >= _KIB and message.size_bytes % _KIB
    size = f"{message.size_bytes:,} B" if is_rounded else format_size(message.size_bytes)
    return f"{message.collective}{redop} {size}{dtype}"


def _verdict(rows: Sequence[ComparedFigure], wrong: Sequence[Finding]) -> Finding:
    if not rows:
        return _NOTHING_COMMON.found(None)
    unjudged = sum(row.changed is None for row in rows)
    changes = {row.name: row.ratio.value - 1 for row in rows if row.changed and isinstance(row.ratio, Estimate)}
    slower = {name: change for name, change in changes.items() if change < 0}
    faster = {name: change for name, change in changes.items() if change > 0}
    without = format_count(unjudged, "message")
    notes = [f"{format_count(len(wrong), 'message')} changed between correct and wrong values"] if wrong else []
    rule = _CHANGED if changes else _UNCHANGED if len(rows) > unjudged else _UNJUDGED
    if unjudged and rule is not _UNJUDGED:
        notes = [f"{without} could not be compared, because confidence intervals are missing", *notes]
    return rule.found(
        None,
        changed=len(changes),
        compared_words=format_count(len(rows), "message"),
        judged=format_count(len(rows) - unjudged, "message"),
        unjudged_words=without,
        most="".join(map(_most, ("slower", "faster"), (slower, faster))),
        notes="".join(f"; {note}" for note in notes),
        compared=len(rows),
        slower=len(slower),
        faster=len(faster),
        unjudged=unjudged,
        became_wrong_or_right=len(wrong),
    )


def _most(way: str, changes: Mapping[str, float]) -> str:
    if not changes:
        return ""
    most = max(changes, key=lambda name: abs(changes[name]))
    return f"; {len(changes)} {way}, largest change: {most} ({changes[most]:+.0%})"


def _terms(before: ScanReport, now: ScanReport) -> Iterator[Finding]:
    for rule, then, value in (
        (_BACKEND, before.backend, now.backend),
        (_WORKERS, before.workers_in_words, now.workers_in_words),
    ):
        if then != value:
            yield _difference(rule, "", then, value)


def _environment(before: Sequence[NodeState], now: Sequence[NodeState]) -> Iterator[Finding]:
    old = {node.name: node for node in before}
    common = [(node, old[node.name]) for node in now if node.name in old]
    names = {node.name for node, _ in common}
    order, previous = (", ".join(node.name for node in nodes if node.name in names) for nodes in (now, before))
    if order != previous:
        yield _difference(_ORDER, "", previous, order)
    for rule in (*_OF_NIC, *_OF_NODE):
        changed: dict[NodeState, tuple[float | str, float | str]] = {}
        for node, earlier in common:
            then, value = getattr(earlier, rule.code), getattr(node, rule.code)
            # Values unknown in one scan count as unchanged.
            if None not in (then, value) and then != value:
                changed[node] = (then, value)
        if len(changed) == len(common) > 1 and len(set(changed.values())) == 1:
            where = "the NIC of every node" if rule in _OF_NIC else "every node"
            yield _difference(rule, where, *next(iter(changed.values())))
            continue
        for node, values in changed.items():
            where = f"{node.name}'s {node.ifname or 'NIC'}" if rule in _OF_NIC else node.name
            yield _difference(rule, where, *values, node=node.name)


def _difference(rule: Rule, where: str, before: float | str, now: float | str, *, node: str | None = None) -> Finding:
    is_rate = rule.code == "link_gbit_per_s"
    value, earlier = (format_rate(float(each)) if is_rate else each for each in (now, before))
    return rule.found(node, where=where, value=value, earlier=earlier, before=before, now=now)
