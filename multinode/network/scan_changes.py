"""compare_scans: what changed from one size scan to another, in the nodes and in the speeds. Judges neither scan."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from multinode.network.size_scan import NodeState, ScanChanges, ScanReport, time_us
from multinode.records.finding import Finding
from multinode.stats.estimate import ratio
from multinode.traffic.algorithms import CollectiveRow
from multinode.units import format_count, format_rate, format_size

# A speed has changed if the 95% confidence interval of its ratio, over the iterations, excludes 1 and the change is at
# least 5% (20% with few timed iterations).
_LEAST_CHANGE = 0.05
_LEAST_CHANGE_OF_FEW = 0.2
_FEW_ITERS = 5
# Sizes are rounded to the number of workers, so they differ slightly with other nodes.
_SAME_SIZE = 0.001
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
    old, new = ([node.name for node in scan.states] for scan in (before, now))
    pairs, only_before, only_now = _match(before.rows, now.rows)
    rows = tuple(change for pair in pairs if (change := _change(*pair)) is not None)
    return ScanChanges(
        before=before.run_id,
        now=now.run_id,
        text=_summary(rows, len(pairs)),
        environment=(*_terms(before, now), *_environment(before.states, now.states)),
        came=tuple(name for name in new if name not in old),
        gone=tuple(name for name in old if name not in new),
        rows=rows,
        unchanged=len(pairs) - len(rows),
        only_before=tuple(map(_name, only_before)),
        only_now=tuple(map(_name, only_now)),
    )


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


_Rows = list[CollectiveRow]


def _match(
    before: Sequence[CollectiveRow], now: Sequence[CollectiveRow]
) -> tuple[list[tuple[CollectiveRow, CollectiveRow]], _Rows, _Rows]:
    left = list(before)
    pairs = []
    alone = []
    for row in now:
        alike = [other for other in left if _is_same(other, row)]
        if alike:
            nearest = min(alike, key=lambda other: abs(other.size_bytes - row.size_bytes))
            left.remove(nearest)
            pairs.append((nearest, row))
        else:
            alone.append(row)
    return pairs, left, alone


def _is_same(row: CollectiveRow, other: CollectiveRow) -> bool:
    apart = abs(row.size_bytes - other.size_bytes)
    kinds = ((each.collective, each.dtype, each.redop) for each in (row, other))
    return len(set(kinds)) == 1 and apart <= _SAME_SIZE * max(row.size_bytes, other.size_bytes)


def _change(before: CollectiveRow, now: CollectiveRow) -> Finding | None:
    least = _LEAST_CHANGE if min(before.iters, now.iters) >= _FEW_ITERS else _LEAST_CHANGE_OF_FEW
    figures: dict[str, float | str] = {"collective": now.collective, "size_bytes": now.size_bytes}
    code, said = "wrong_values", []
    # Busbw is comparable between different numbers of workers, time is not.
    speed, earlier = now.busbw_gb_per_s, before.busbw_gb_per_s
    if min(speed, earlier) > 0:
        factor, times = speed / earlier, ratio(time_us(before), time_us(now))
        noise = math.sqrt(times.high / times.low) - 1
        if max(factor, 1 / factor) - 1 > max(noise, least):
            code = "faster" if factor > 1 else "slower"
            figures |= {"before_gb_per_s": earlier, "now_gb_per_s": speed, "change": factor - 1, "noise": noise}
            change = f"{speed:.3g} GB/s, was {earlier:.3g} GB/s ({factor - 1:+.0%})"
            said.append(f"{_name(now)} is {code}: {change}")
    if None not in (now.num_wrong, before.num_wrong) and bool(now.num_wrong) != bool(before.num_wrong):
        figures |= {"wrong_before": before.num_wrong or 0, "wrong_now": now.num_wrong or 0}
        said.append(f"{now.num_wrong} values of {_name(now)} are wrong, {before.num_wrong} before")
    return Finding(code=code, figures=figures, message="; ".join(said)) if said else None


def _name(row: CollectiveRow) -> str:
    redop = "" if row.redop in {"sum", "none"} else f" {row.redop}"
    dtype = "" if row.dtype == "float" else f" of {row.dtype}"
    return f"{row.collective}{redop} {format_size(row.size_bytes)}{dtype}"


def _summary(rows: Sequence[Finding], compared: int) -> str:
    if not compared:
        return "The two scans have no message in common."
    if not rows:
        return f"No speed changed beyond noise ({format_count(compared, 'message')} compared)."
    said = [f"{len(rows)} of {compared} messages changed"]
    for way in ("slower", "faster"):
        figures = [row.figures for row in rows if row.code == way]
        if figures:
            most = max(figures, key=lambda each: abs(float(each["change"])))
            size = format_size(int(most["size_bytes"]))
            said.append(f"{len(figures)} {way}, most: {most['collective']} {size} ({most['change']:+.0%})")
    wrong = sum(row.code == "wrong_values" for row in rows)
    if wrong:
        said.append(f"{wrong} only in its values")
    return f"{'; '.join(said)}."
