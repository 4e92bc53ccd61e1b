"""compare_scans: two size scans -> ScanChanges: what changed between them, in the nodes and in the speeds.

A speed has changed where the confidence interval of the ratio of both says so; judges neither of the two by itself.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from multinode.analyse.collectives.collectives import CollectiveRow
from multinode.analyse.stats.estimate import Estimate, of_scatter, ratio
from multinode.core.cluster.facts import Interface, NodeFacts
from multinode.units import format_rate, format_size

__all__ = ["RULE", "NodeState", "RowChange", "ScanChanges", "ScanRecord", "compare_scans", "node_state"]

RULE = (
    "a speed has changed where the 95 % confidence interval of the ratio of both, by their iterations, does not "
    "contain 1, and by 5% at least; by 20% where fewer than 5 iterations were timed"
)

_LEAST_CHANGE = 0.05
_LEAST_CHANGE_OF_FEW = 0.2
_FEW_ITERS = 5
# Sizes are rounded down to what divides among the workers: with other nodes they differ by a few elements.
_SAME_SIZE = 0.001


class NodeState(msgspec.Struct, frozen=True, kw_only=True):
    """What of a node bears on its speed; None is not known.

    Attributes:
        ifname: its interface of the data plane.
        link_gbit_per_s: what that card negotiated.
        mtu: in bytes.
        duplex: `full` or `half`.
        driver: what makes the interface, where it is not a card.
        python: version of the job's interpreter; likewise `torch`, `nccl`, `cuda`.
        gpu: its GPUs, `2 x NVIDIA GeForce RTX 4090`; likewise `gpu_driver`, the version.
        cores: processors that a job may use.
    """

    name: str
    ifname: str | None = None
    link_gbit_per_s: float | None = None
    mtu: int | None = None
    duplex: str | None = None
    driver: str | None = None
    python: str | None = None
    torch: str | None = None
    nccl: str | None = None
    cuda: str | None = None
    gpu: str | None = None
    gpu_driver: str | None = None
    cores: int | None = None


class ScanRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A size scan, the nodes it ran on in node-rank order, its backend and its workers on each node."""

    run_id: str
    rows: tuple[CollectiveRow, ...]
    nodes: tuple[NodeState, ...] = ()
    backend: str | None = None
    workers_per_node: int | None = None


class RowChange(msgspec.Struct, frozen=True, kw_only=True):
    """A message that both scans have and whose speed, or correctness, changed.

    Attributes:
        size_bytes: as it is now.
        before_gb_per_s: busbw; likewise `now_gb_per_s`.
        change: of busbw, as a fraction: -0.5 is half of what it was; 0 where it is within the noise.
        noise: how far off the ratio of both speeds may be, as a fraction of it.
    """

    collective: str
    dtype: str
    redop: str
    size_bytes: int
    before_gb_per_s: float
    now_gb_per_s: float
    change: float
    noise: float
    text: str


class ScanChanges(msgspec.Struct, frozen=True, kw_only=True):
    """What changed from one scan to the next.

    Attributes:
        before: its run id; likewise `now`.
        environment: what changed in the nodes that both have, as sentences.
        came: nodes that only the later one has; likewise `gone`, only the earlier.
        rows: what changed; `unchanged` counts the messages that did not.
        only_before: messages that only the earlier one has, in words; likewise `only_now`.
        rule: what counts as a change.
    """

    before: str
    now: str
    text: str
    environment: tuple[str, ...] = ()
    came: tuple[str, ...] = ()
    gone: tuple[str, ...] = ()
    rows: tuple[RowChange, ...] = ()
    unchanged: int = 0
    only_before: tuple[str, ...] = ()
    only_now: tuple[str, ...] = ()
    rule: str = RULE


def node_state(facts: NodeFacts, ifname: str | None) -> NodeState:
    """What a probe found, of the interface that carries the collectives."""
    card = next((one for one in facts.interfaces if one.name == ifname), Interface(name=""))
    models = Counter(gpu.name for gpu in facts.gpus)
    return NodeState(
        name=facts.node,
        ifname=ifname,
        link_gbit_per_s=card.speed_gbit_per_s,
        mtu=card.mtu,
        duplex=card.duplex,
        driver=card.driver,
        python=facts.python_version,
        torch=facts.packages.get("torch"),
        nccl=facts.nccl_version,
        cuda=facts.cuda_version,
        gpu=", ".join(f"{count} x {name}" for name, count in models.items()) or None,
        gpu_driver=next((gpu.driver for gpu in facts.gpus if gpu.driver), None),
        cores=facts.cores,
    )


def compare_scans(before: ScanRecord, now: ScanRecord) -> ScanChanges:
    """What changed, of every message that both have and every node."""
    old = {node.name: node for node in before.nodes}
    new = {node.name: node for node in now.nodes}
    pairs, only_before, only_now = _match(before.rows, now.rows)
    rows = tuple(change for one, other in pairs if (change := _change(one, other)) is not None)
    return ScanChanges(
        before=before.run_id,
        now=now.run_id,
        text=_text(rows, len(pairs)),
        environment=(*_terms(before, now), *_environment(old, new)),
        came=tuple(name for name in new if name not in old),
        gone=tuple(name for name in old if name not in new),
        rows=rows,
        unchanged=len(pairs) - len(rows),
        only_before=tuple(_message(row) for row in only_before),
        only_now=tuple(_message(row) for row in only_now),
    )


_CARD_WORDS = {
    "link_gbit_per_s": "{card} now negotiates {now}, was {before}",
    "mtu": "{card} now has an MTU of {now}, was {before}",
    "duplex": "{card} now runs in {now} duplex, was {before}",
    "driver": "{card} is now of driver {now}, was {before}",
}
_NODE_WORDS = {
    "ifname": "{node} now uses {now}, was {before}",
    "python": "{node} now has Python {now}, was {before}",
    "torch": "{node} now has torch {now}, was {before}",
    "nccl": "{node} now has NCCL {now}, was {before}",
    "cuda": "{node} now has CUDA {now}, was {before}",
    "gpu": "{node} now has {now}, was {before}",
    "gpu_driver": "{node} now has GPU driver {now}, was {before}",
    "cores": "{node} now has {now} cores, was {before}",
}


_TERM_WORDS = {
    "backend": "measured with {now} now, was {before}",
    "workers_per_node": "measured with {now} workers on each node now, was {before}",
}


def _terms(before: ScanRecord, now: ScanRecord) -> Iterator[str]:
    """What was measured with; where it differs, the speeds are not of the same thing."""
    for field, words in _TERM_WORDS.items():
        values = getattr(before, field), getattr(now, field)
        if None not in values and values[0] != values[1]:
            yield words.format(before=values[0], now=values[1])


def _environment(old: Mapping[str, NodeState], new: Mapping[str, NodeState]) -> Iterator[str]:
    """Changes of nodes that both have; what is the same for all of them is said once."""
    both = [name for name in new if name in old]
    if both != (was := [name for name in old if name in new]):
        yield f"the order of the nodes is now {', '.join(both)}, was {', '.join(was)}"
    for field, words in (_CARD_WORDS | _NODE_WORDS).items():
        changed: dict[str, tuple[str, str]] = {}
        for name in both:
            values = getattr(old[name], field), getattr(new[name], field)
            # What one of the two did not tell has not changed.
            if None not in values and values[0] != values[1]:
                changed[name] = (_value(field, values[0]), _value(field, values[1]))
        if len(changed) == len(both) > 1 and len(set(changed.values())) == 1:
            (one,) = set(changed.values())
            yield words.format(node="every node", card="the NIC of every node", before=one[0], now=one[1])
            continue
        for name, (value, value_now) in changed.items():
            card = f"{name}'s {new[name].ifname or 'NIC'}"
            yield words.format(node=name, card=card, before=value, now=value_now)


def _value(field: str, value: float | str) -> str:
    return format_rate(float(value)) if field == "link_gbit_per_s" else str(value)


_Rows = list[CollectiveRow]


def _match(
    before: Sequence[CollectiveRow], now: Sequence[CollectiveRow]
) -> tuple[list[tuple[CollectiveRow, CollectiveRow]], _Rows, _Rows]:
    """Rows of the same message, then those that only one of the two has."""
    left = list(before)
    pairs = []
    alone = []
    for row in now:
        alike = [one for one in left if _kind(one) == _kind(row) and _same_size(one, row)]
        if alike:
            nearest = min(alike, key=lambda one: abs(one.size_bytes - row.size_bytes))
            left.remove(nearest)
            pairs.append((nearest, row))
        else:
            alone.append(row)
    return pairs, left, alone


def _kind(row: CollectiveRow) -> tuple[str, str, str]:
    return row.collective, row.dtype, row.redop


def _same_size(one: CollectiveRow, other: CollectiveRow) -> bool:
    return abs(one.size_bytes - other.size_bytes) <= _SAME_SIZE * max(one.size_bytes, other.size_bytes)


def _change(before: CollectiveRow, now: CollectiveRow) -> RowChange | None:
    """The change as RULE has it, or None."""
    least = _LEAST_CHANGE if min(before.iters, now.iters) >= _FEW_ITERS else _LEAST_CHANGE_OF_FEW
    # By busbw and not by time: it can be compared between unlike numbers of workers.
    change, noise, has_changed = 0.0, 0.0, False
    if min(before.busbw_gb_per_s, now.busbw_gb_per_s) > 0:
        change, times = now.busbw_gb_per_s / before.busbw_gb_per_s - 1, ratio(_time_us(before), _time_us(now))
        noise = math.sqrt(times.high / times.low) - 1
        has_changed = max(1 + change, 1 / (1 + change)) - 1 > max(noise, least)
    words = []
    if has_changed:
        way = "faster" if change > 0 else "slower"
        figures = f"{now.busbw_gb_per_s:.3g} GB/s, was {before.busbw_gb_per_s:.3g} GB/s ({change:+.0%})"
        words.append(f"{_message(now)} is {way}: {figures}")
    if bool(now.num_wrong) != bool(before.num_wrong) and None not in (now.num_wrong, before.num_wrong):
        words.append(f"{now.num_wrong} values of {_message(now)} are wrong now, {before.num_wrong} were")
    if not words:
        return None
    return RowChange(
        collective=now.collective,
        dtype=now.dtype,
        redop=now.redop,
        size_bytes=now.size_bytes,
        before_gb_per_s=before.busbw_gb_per_s,
        now_gb_per_s=now.busbw_gb_per_s,
        change=change if has_changed else 0.0,
        noise=noise,
        text="; ".join(words),
    )


def _time_us(row: CollectiveRow) -> Estimate:
    interval = row.interval_us
    # Scans of earlier releases have none.
    low, high = interval if interval and interval[0] > 0 else of_scatter(row.time_us, row.cv, row.iters)
    return Estimate(value=row.time_us, low=low, high=high)


def _message(row: CollectiveRow) -> str:
    redop = "" if row.redop in {"sum", "none"} else f" {row.redop}"
    dtype = "" if row.dtype == "float" else f" of {row.dtype}"
    return f"{row.collective}{redop} {format_size(row.size_bytes)}{dtype}"


def _text(rows: Sequence[RowChange], compared: int) -> str:
    if not compared:
        return "The two scans have no message in common."
    if not rows:
        return f"No speed changed beyond the noise of both ({compared} messages compared)."
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
