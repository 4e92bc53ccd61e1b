"""The words of what changed between two size scans: in the nodes, in how they were measured, and in the speeds.

`changes_with_words` fills in the sentences before a report is stored or shown.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from multinode.network.scan_changes import Difference, RowChange, ScanChanges, ScannedMessage
from multinode.units import format_count, format_rate, format_size

RULE = (
    "a speed has changed where the 95 % confidence interval of the ratio of both, by their iterations, does not "
    "contain 1, and by 5% at least; by 20% where fewer than 5 iterations were timed"
)

_WORDS = {
    "backend": "measured with {now} now, was {before}",
    "workers_per_node": "measured with {now} workers on each node now, was {before}",
    "order": "the order of the nodes is now {now}, was {before}",
    "link_gbit_per_s": "{nic} now negotiates {now}, was {before}",
    "mtu": "{nic} now has an MTU of {now}, was {before}",
    "duplex": "{nic} now runs in {now} duplex, was {before}",
    "driver": "{nic} is now of driver {now}, was {before}",
    "ifname": "{node} now uses {now}, was {before}",
    "python": "{node} now has Python {now}, was {before}",
    "torch": "{node} now has torch {now}, was {before}",
    "nccl": "{node} now has NCCL {now}, was {before}",
    "cuda": "{node} now has CUDA {now}, was {before}",
    "gpu": "{node} now has {now}, was {before}",
    "gpu_driver": "{node} now has GPU driver {now}, was {before}",
    "cores": "{node} now has {now} cores, was {before}",
}


def changes_with_words(changes: ScanChanges) -> ScanChanges:
    """The same with every sentence, from its codes and figures."""
    return msgspec.structs.replace(
        changes,
        text=_text(changes.rows, len(changes.rows) + changes.unchanged),
        environment=tuple(map(_difference, changes.differences)),
        rows=tuple(msgspec.structs.replace(row, text="; ".join(_change(row))) for row in changes.rows),
        only_before=tuple(map(_message, changes.messages_before)),
        only_now=tuple(map(_message, changes.messages_now)),
        rule=RULE,
    )


def _difference(one: Difference) -> str:
    before, now = (
        format_rate(float(value)) if one.what == "link_gbit_per_s" else str(value) for value in (one.before, one.now)
    )
    nic = "the NIC of every node" if one.node is None else f"{one.node}'s {one.ifname or 'NIC'}"
    return _WORDS[one.what].format(node=one.node or "every node", nic=nic, before=before, now=now)


def _change(row: RowChange) -> Iterator[str]:
    if row.change:
        way = "faster" if row.change > 0 else "slower"
        figures = f"{row.now_gb_per_s:.3g} GB/s, was {row.before_gb_per_s:.3g} GB/s ({row.change:+.0%})"
        yield f"{_message(row)} is {way}: {figures}"
    if None not in (row.wrong_before, row.wrong_now) and bool(row.wrong_before) != bool(row.wrong_now):
        yield f"{row.wrong_now} values of {_message(row)} are wrong now, {row.wrong_before} were"


def _message(one: ScannedMessage) -> str:
    redop = "" if one.redop in {"sum", "none"} else f" {one.redop}"
    dtype = "" if one.dtype == "float" else f" of {one.dtype}"
    return f"{one.collective}{redop} {format_size(one.size_bytes)}{dtype}"


def _text(rows: Sequence[RowChange], compared: int) -> str:
    if not compared:
        return "The two scans have no message in common."
    if not rows:
        return f"No speed changed beyond the noise of both ({format_count(compared, 'message')} compared)."
    said = [f"{len(rows)} of {compared} messages changed"]
    ways = {"slower": [one for one in rows if one.change < 0], "faster": [one for one in rows if one.change > 0]}
    for way, some in ways.items():
        if some:
            most = max(some, key=lambda one: abs(one.change))
            size = format_size(most.size_bytes)
            said.append(f"{len(some)} {way}, most: {most.collective} {size} ({most.change:+.0%})")
    wrong = len(rows) - sum(map(len, ways.values()))
    if wrong:
        said.append(f"{wrong} only in its values")
    return f"{'; '.join(said)}."
