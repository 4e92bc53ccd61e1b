"""compare_scans: two size scans -> what changed: speeds, wrong values, nodes, and the environment. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from multinode.figures.compared import ComparedFigure, compare_frames
from multinode.figures.figure import Row
from multinode.figures.frame import Frame
from multinode.findings.finding import Finding
from multinode.network.scan_evidence import BUSBW, COLLECTIVE, DTYPE, REDOP, SIZE, WRONG, CollectiveRow, collective_row
from multinode.network.size_scan import NodeState, ScanChanges, ScanReport
from multinode.stats.estimate import Estimate
from multinode.stats.unknown import or_none
from multinode.units import format_count, format_rate, format_size

_KIB = 1024
_OF_NIC = {
    "link_gbit_per_s": "negotiates {now}",
    "mtu": "has an MTU of {now}",
    "duplex": "runs in {now} duplex",
    "driver": "uses driver {now}",
}
_OF_NODE = {
    "ifname": "uses {now}",
    "python": "has Python {now}",
    "torch": "has torch {now}",
    "nccl": "has NCCL {now}",
    "cuda": "has CUDA {now}",
    "gpu": "has {now}",
    "gpu_driver": "has GPU driver {now}",
    "cores": "has {now} cores",
}


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
        text=_summary(rows, wrong),
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
        yield Finding(
            code="wrong_values",
            figures={
                **{figure.name: figure.tell(row) for figure in (COLLECTIVE, DTYPE, REDOP)},
                SIZE.name: row.item.size_bytes,
                "wrong_before": wrong_before,
                "wrong_now": wrong_now,
            },
            message=f"{wrong_now} values of {_name(row)} are wrong, {wrong_before} before",
        )


def _name(row: Row) -> str:
    message: CollectiveRow = row.item
    redop = "" if message.redop in {"sum", "none"} else f" {message.redop}"
    dtype = "" if message.dtype == "float" else f" of {message.dtype}"
    # Sizes are rounded to the number of workers, and two that differ are not to read the same.
    is_rounded = message.size_bytes >= _KIB and message.size_bytes % _KIB
    size = f"{message.size_bytes:,} B" if is_rounded else format_size(message.size_bytes)
    return f"{message.collective}{redop} {size}{dtype}"


def _summary(rows: Sequence[ComparedFigure], wrong: Sequence[Finding]) -> str:
    if not rows:
        return "The two scans have no message in common."
    unjudged = sum(row.changed is None for row in rows)
    notes = [f"{format_count(unjudged, 'message')} without an interval, not judged"] if unjudged else []
    if wrong:
        notes.append(f"values of {format_count(len(wrong), 'message')} became wrong or right")
    changes = {row.name: row.ratio.value - 1 for row in rows if row.changed and isinstance(row.ratio, Estimate)}
    if not changes:
        judged = format_count(len(rows) - unjudged, "message")
        same = [f"No speed changed beyond its interval ({judged} compared)"] if len(rows) > unjudged else []
        return f"{'; '.join((*same, *notes))}."
    told = [f"{len(changes)} of {format_count(len(rows), 'message')} changed"]
    for way, mine in (
        ("slower", {name: change for name, change in changes.items() if change < 0}),
        ("faster", {name: change for name, change in changes.items() if change > 0}),
    ):
        if mine:
            most = max(mine, key=lambda name: abs(mine[name]))
            told.append(f"{len(mine)} {way}, most: {most} ({mine[most]:+.0%})")
    return f"{'; '.join((*told, *notes))}."


def _terms(before: ScanReport, now: ScanReport) -> Iterator[Finding]:
    for code, then, value in (
        ("backend", before.backend, now.backend),
        ("workers", before.workers_in_words, now.workers_in_words),
    ):
        if then != value:
            yield _difference(code, "measured with {now} now", then, value)


def _environment(before: Sequence[NodeState], now: Sequence[NodeState]) -> Iterator[Finding]:
    old = {node.name: node for node in before}
    common = [(node, old[node.name]) for node in now if node.name in old]
    names = {node.name for node, _ in common}
    order, previous = (", ".join(node.name for node in nodes if node.name in names) for nodes in (now, before))
    if order != previous:
        yield _difference("order", "the order of the nodes is now {now}", previous, order)
    for field, words in (_OF_NIC | _OF_NODE).items():
        changed: dict[NodeState, tuple[float | str, float | str]] = {}
        for node, earlier in common:
            then, value = getattr(earlier, field), getattr(node, field)
            # Values unknown in one scan count as unchanged.
            if None not in (then, value) and then != value:
                changed[node] = (then, value)
        if len(changed) == len(common) > 1 and len(set(changed.values())) == 1:
            where = "the NIC of every node" if field in _OF_NIC else "every node"
            yield _difference(field, f"{where} now {words}", *next(iter(changed.values())))
            continue
        for node, values in changed.items():
            where = f"{node.name}'s {node.ifname or 'NIC'}" if field in _OF_NIC else node.name
            yield _difference(field, f"{where} now {words}", *values, node=node.name)


def _difference(code: str, sentence: str, before: float | str, now: float | str, *, node: str | None = None) -> Finding:
    shown, then = (format_rate(float(value)) if code == "link_gbit_per_s" else value for value in (now, before))
    message = f"{sentence.replace('{now}', str(shown))}, was {then}"
    return Finding(code=code, node=node, figures={"before": before, "now": now}, message=message)
