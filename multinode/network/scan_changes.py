"""Changes between two size scans, in the nodes and in the speeds.

A speed has changed if the confidence interval of its ratio excludes 1, by at least 5% (20% with fewer than 5
iterations). Judges neither scan.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from multinode.cluster.facts import Interface, NodeFacts
from multinode.stats.estimate import Estimate, of_scatter, ratio
from multinode.traffic.algorithms import CollectiveRow
from multinode.units import format_count, format_rate, format_size

_LEAST_CHANGE = 0.05
_LEAST_CHANGE_OF_FEW = 0.2
_FEW_ITERS = 5
# Sizes are rounded to the number of workers, so they differ slightly with other nodes.
_SAME_SIZE = 0.001
RULE = (
    "a speed has changed if the 95% confidence interval of its ratio, over the iterations, excludes 1 and the "
    "change is at least 5% (20% with fewer than 5 timed iterations)"
)


class NodeState(msgspec.Struct, frozen=True, kw_only=True):
    """Properties of a node that affect its speed; None if unknown."""

    name: str
    ifname: str | None = None  # its data-plane interface
    link_gbit_per_s: float | None = None  # negotiated rate
    mtu: int | None = None  # in bytes
    duplex: str | None = None  # `full` or `half`
    driver: str | None = None  # of a virtual interface
    python: str | None = None  # version of the job's interpreter; likewise `torch`, `nccl`, `cuda`
    torch: str | None = None
    nccl: str | None = None
    cuda: str | None = None
    gpu: str | None = None  # its GPUs, `2 x NVIDIA GeForce RTX 4090`; likewise `gpu_driver`, the version
    gpu_driver: str | None = None
    cores: int | None = None  # processors available to a job


class ScanRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A size scan, the nodes it ran on in node-rank order, its backend and its workers, in words."""

    run_id: str
    rows: tuple[CollectiveRow, ...]
    nodes: tuple[NodeState, ...] = ()
    backend: str | None = None
    workers: str | None = None


class ScannedMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A collective and its size in bytes."""

    collective: str
    dtype: str
    redop: str
    size_bytes: int


class RowChange(ScannedMessage, frozen=True, kw_only=True):
    """A message of both scans whose speed or correctness changed.

    Attributes:
        size_bytes: in the later scan.
        before_gb_per_s: busbw; likewise `now_gb_per_s`.
        change: of busbw, as a fraction: -0.5 is half; 0 within noise.
        noise: relative error of the ratio of both speeds.
        wrong_before: number of wrong values; likewise `wrong_now`. None if not verified.
        text: the change in words.
    """

    before_gb_per_s: float
    now_gb_per_s: float
    change: float
    noise: float
    wrong_before: int | None = None
    wrong_now: int | None = None
    text: str = ""


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """A difference between two scans other than speeds."""

    what: str  # a field of NodeState or of ScanRecord, or `order`: the names of the nodes in node-rank order
    before: float | str  # its value; likewise `now`
    now: float | str
    node: str | None = None  # its node; None for none, or all
    ifname: str | None = None  # the node's interface, if that differs


class ScanChanges(msgspec.Struct, frozen=True, kw_only=True):
    """Changes from one scan to the next."""

    before: str  # its run id; likewise `now`
    now: str
    differences: tuple[Difference, ...] = ()  # of common nodes, and of the measurement
    came: tuple[str, ...] = ()  # nodes only in the later one; likewise `gone`, only in the earlier
    gone: tuple[str, ...] = ()
    rows: tuple[RowChange, ...] = ()  # changed messages; `unchanged` is the number of others
    unchanged: int = 0
    messages_before: tuple[ScannedMessage, ...] = ()  # only in the earlier one; likewise `messages_now`
    messages_now: tuple[ScannedMessage, ...] = ()
    # everything in a sentence; likewise `environment` of the differences, `only_before` and `only_now` of the messages,
    # and `rule`, the definition of a change
    text: str = ""
    environment: tuple[str, ...] = ()
    only_before: tuple[str, ...] = ()
    only_now: tuple[str, ...] = ()
    rule: str = ""


def node_state(facts: NodeFacts, ifname: str | None) -> NodeState:
    """The state of a node according to a probe, for the interface of the collectives."""
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
    """Changes of all common messages and nodes."""
    old = {node.name: node for node in before.nodes}
    new = {node.name: node for node in now.nodes}
    pairs, only_before, only_now = _match(before.rows, now.rows)
    rows = tuple(change for one, other in pairs if (change := _change(one, other)) is not None)
    differences = (*_terms(before, now), *_environment(old, new))
    messages_before, messages_now = tuple(map(_message, only_before)), tuple(map(_message, only_now))
    return ScanChanges(
        before=before.run_id,
        now=now.run_id,
        differences=differences,
        came=tuple(name for name in new if name not in old),
        gone=tuple(name for name in old if name not in new),
        rows=rows,
        unchanged=len(pairs) - len(rows),
        messages_before=messages_before,
        messages_now=messages_now,
        text=_summary(rows, len(pairs)),
        environment=tuple(map(_difference, differences)),
        only_before=tuple(map(_named, messages_before)),
        only_now=tuple(map(_named, messages_now)),
        rule=RULE,
    )


_TERMS = {
    "backend": "measured with {now} now",
    "workers": "measured with {now} now",
}
_CARD = {
    "link_gbit_per_s": "{nic} now negotiates {now}",
    "mtu": "{nic} now has an MTU of {now}",
    "duplex": "{nic} now runs in {now} duplex",
    "driver": "{nic} now uses driver {now}",
}
_NODE = {
    "ifname": "{node} now uses {now}",
    "python": "{node} now has Python {now}",
    "torch": "{node} now has torch {now}",
    "nccl": "{node} now has NCCL {now}",
    "cuda": "{node} now has CUDA {now}",
    "gpu": "{node} now has {now}",
    "gpu_driver": "{node} now has GPU driver {now}",
    "cores": "{node} now has {now} cores",
}
_NOW = {**_TERMS, **_CARD, **_NODE, "order": "the order of the nodes is now {now}"}


def _terms(before: ScanRecord, now: ScanRecord) -> Iterator[Difference]:
    for field in _TERMS:
        values = getattr(before, field), getattr(now, field)
        if None not in values and values[0] != values[1]:
            yield Difference(what=field, before=values[0], now=values[1])


def _environment(old: Mapping[str, NodeState], new: Mapping[str, NodeState]) -> Iterator[Difference]:
    both = [name for name in new if name in old]
    if both != (was := [name for name in old if name in new]):
        yield Difference(what="order", before=", ".join(was), now=", ".join(both))
    for field in (*_CARD, *_NODE):
        changed: dict[str, tuple[float | str, float | str]] = {}
        for name in both:
            values = getattr(old[name], field), getattr(new[name], field)
            # Values unknown in one scan count as unchanged.
            if None not in values and values[0] != values[1]:
                changed[name] = values
        if len(changed) == len(both) > 1 and len(set(changed.values())) == 1:
            ((before, now),) = set(changed.values())
            yield Difference(what=field, before=before, now=now)
            continue
        for name, (before, now) in changed.items():
            ifname = new[name].ifname if field in _CARD else None
            yield Difference(what=field, before=before, now=now, node=name, ifname=ifname)


_Rows = list[CollectiveRow]


def _match(
    before: Sequence[CollectiveRow], now: Sequence[CollectiveRow]
) -> tuple[list[tuple[CollectiveRow, CollectiveRow]], _Rows, _Rows]:
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
    least = _LEAST_CHANGE if min(before.iters, now.iters) >= _FEW_ITERS else _LEAST_CHANGE_OF_FEW
    # Busbw is comparable between different numbers of workers, time is not.
    change, noise, has_changed = 0.0, 0.0, False
    if min(before.busbw_gb_per_s, now.busbw_gb_per_s) > 0:
        change, times = now.busbw_gb_per_s / before.busbw_gb_per_s - 1, ratio(_time_us(before), _time_us(now))
        noise = math.sqrt(times.high / times.low) - 1
        has_changed = max(1 + change, 1 / (1 + change)) - 1 > max(noise, least)
    is_other = bool(now.num_wrong) != bool(before.num_wrong) and None not in (now.num_wrong, before.num_wrong)
    if not has_changed and not is_other:
        return None
    message = _message(now)
    return RowChange(
        **msgspec.structs.asdict(message),
        before_gb_per_s=before.busbw_gb_per_s,
        now_gb_per_s=now.busbw_gb_per_s,
        change=change if has_changed else 0.0,
        noise=noise,
        wrong_before=before.num_wrong,
        wrong_now=now.num_wrong,
        text="; ".join(_told(_named(message), before, now, change if has_changed else 0.0, is_wrong=is_other)),
    )


def _time_us(row: CollectiveRow) -> Estimate:
    interval = row.interval_us
    # Scans of earlier releases have none.
    low, high = interval if interval and interval[0] > 0 else of_scatter(row.time_us, row.cv, row.iters)
    return Estimate(value=row.time_us, low=low, high=high)


def _message(row: CollectiveRow) -> ScannedMessage:
    return ScannedMessage(collective=row.collective, dtype=row.dtype, redop=row.redop, size_bytes=row.size_bytes)


def _difference(one: Difference) -> str:
    before, now = (
        format_rate(float(value)) if one.what == "link_gbit_per_s" else str(value) for value in (one.before, one.now)
    )
    nic = "the NIC of every node" if one.node is None else f"{one.node}'s {one.ifname or 'NIC'}"
    sentence = _NOW[one.what].format(node=one.node or "every node", nic=nic, now=now)
    return f"{sentence}, was {before}"


def _told(message: str, before: CollectiveRow, now: CollectiveRow, change: float, *, is_wrong: bool) -> Iterator[str]:
    if change:
        way = "faster" if change > 0 else "slower"
        figures = f"{now.busbw_gb_per_s:.3g} GB/s, was {before.busbw_gb_per_s:.3g} GB/s ({change:+.0%})"
        yield f"{message} is {way}: {figures}"
    if is_wrong:
        yield f"{now.num_wrong} values of {message} are wrong, {before.num_wrong} before"


def _named(one: ScannedMessage) -> str:
    redop = "" if one.redop in {"sum", "none"} else f" {one.redop}"
    dtype = "" if one.dtype == "float" else f" of {one.dtype}"
    return f"{one.collective}{redop} {format_size(one.size_bytes)}{dtype}"


def _summary(rows: Sequence[RowChange], compared: int) -> str:
    if not compared:
        return "The two scans have no message in common."
    if not rows:
        return f"No speed changed beyond noise ({format_count(compared, 'message')} compared)."
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
