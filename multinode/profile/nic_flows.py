"""NIC flows: the traffic of a step's calls on each node's NIC, by the backend's algorithms. Pure.

The algorithms are in `algorithms`.
"""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from multinode.profile.calls import CallKind, Group, WorkerCalls
from multinode.profile.nics import Carried
from multinode.profile.observed import Observed
from multinode.stats.estimate import UnknownError
from multinode.traffic.algorithms import Layout, algorithms_of, rank_flows

_UNEVEN = 0.03
# Smaller differences between sent and received are ignored, so that the busier direction does not depend on chance.
_SAME = 1e-6


class Manner(msgspec.Struct, frozen=True, kw_only=True):
    """A non-default way of NCCL's collectives."""

    all_reduce: str | None = None  # name of the algorithm; None is the usual one
    wire_factor: float = 1.0  # bytes on the wire per byte of payload


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """NIC traffic of the calls of one op, in groups of one size."""

    op: str  # as in CallCount
    backend: str | None  # of the groups; None if unknown
    ranks: int  # workers in each group
    spans: int  # nodes of each group
    groups: tuple[int, ...]  # groups by node
    carried: tuple[Carried, ...]  # by node


class NicFlows(msgspec.Struct, frozen=True, kw_only=True):
    """NIC traffic of a step on each node."""

    nodes: tuple[Carried, ...]  # total, by node
    shares: tuple[Share, ...] = ()  # of it, by op and group size
    unknown: dict[str, str] = {}  # by op, why its traffic is unknown; `nodes` excludes it

    @property
    def most(self) -> float:
        """Traffic of the busiest NIC in its busier direction."""
        return max((node.busier for node in self.nodes), default=0.0)

    @property
    def busiest(self) -> tuple[int, bool]:
        """Index of the busiest node, and whether it sends at least as much as it receives."""
        limit = self.most * (1 - _SAME)
        sends = any(node.sent >= limit for node in self.nodes)
        return next((index for index, node in enumerate(self.nodes) if node.one_way(sends=sends) >= limit), 0), sends


class _Joint(msgspec.Struct, frozen=True, kw_only=True):
    """The calls of one op in one group; `workers` has each worker's record."""

    group: Group
    op: str
    workers: dict[int, list[CallKind]]


class _Places(NamedTuple):
    """The node of each worker."""

    node_of: dict[int, int]
    nodes: int

    def of(self, ranks: Sequence[int]) -> list[int]:
        return [self.node_of[rank] for rank in ranks]


def expect_flows(calls: Mapping[int, WorkerCalls], observed: Observed, manner: Manner | None = None) -> NicFlows:
    """Expected NIC traffic.

    Every worker of a group makes the same call, which counts once: the median of its workers' records. Send and recv
    are per worker.

    Args:
        calls: of the workers that recorded any.
        observed: has the node of each worker.
        manner: NCCL's way; the usual one without.
    """
    node_of = {rank: index for index, node in enumerate(observed.nodes) for rank in node.ranks}
    places = _Places(node_of, len(observed.nodes))
    sums: dict[tuple[str, str | None, int, int], list[tuple[Sequence[Carried], set[int]]]] = {}
    unknown: dict[str, str] = {}
    for joint in _joints(calls):
        nodes = places.of(joint.group.ranks)
        try:
            flows = _flows(joint, places, manner or Manner())
        except UnknownError as error:
            unknown.setdefault(joint.op, str(error))
        else:
            key = (joint.op, joint.group.backend, len(nodes), len(set(nodes)))
            sums.setdefault(key, []).append((flows, set(nodes)))
    shares = tuple(
        Share(
            op=op,
            backend=backend,
            ranks=ranks,
            spans=spans,
            groups=tuple(sum(node in nodes for _, nodes in groups) for node in range(places.nodes)),
            carried=_sum((flows for flows, _ in groups), places.nodes),
        )
        for (op, backend, ranks, spans), groups in sums.items()
    )
    return NicFlows(nodes=_sum((share.carried for share in shares), places.nodes), shares=shares, unknown=unknown)


def _sum(flows: Iterable[Sequence[Carried]], nodes: int) -> tuple[Carried, ...]:
    return tuple(sum(each, Carried()) for each in zip([Carried()] * nodes, *flows, strict=True))


def _joints(calls: Mapping[int, WorkerCalls]) -> Iterable[_Joint]:
    found: dict[tuple[Group, str], dict[int, list[CallKind]]] = {}
    for rank, worker in calls.items():
        for kind in worker.kinds:
            found.setdefault((kind.group, kind.op), {}).setdefault(rank, []).append(kind)
    return (_Joint(group=group, op=op, workers=workers) for (group, op), workers in found.items())


def _flows(joint: _Joint, places: _Places, manner: Manner) -> Sequence[Carried]:
    """Traffic of these calls on the NIC of each node."""
    nodes = places.of(joint.group.ranks)
    known = bool(algorithms_of(joint.group.backend or "", joint.op))
    small = all(kind.is_small for kinds in joint.workers.values() for kind in kinds)
    # Small messages need no algorithm of their own.
    if len(set(nodes)) == 1 or (small and not known):
        return [Carried()] * places.nodes
    if joint.op in {"send", "recv"}:
        return _passed(joint, places)
    if not known:
        if backend := joint.group.backend:
            raise UnknownError(f"how {backend} implements it is unknown")
        raise UnknownError("the backend of its group is unknown")
    sizes = [sum(kind.step_bytes for kind in kinds) for kinds in joint.workers.values()]
    size = statistics.median_low(sizes)
    if joint.op == "all_to_all" and max(sizes) - min(sizes) > _UNEVEN * size:
        raise UnknownError("its workers send parts of different sizes")
    return _collective(joint, size, places, manner)


def _passed(joint: _Joint, places: _Places) -> Sequence[Carried]:
    if len(set(places.of(joint.group.ranks))) < len(joint.group.ranks):
        raise UnknownError("it is not recorded whether it goes to a worker of the same node")
    flows = [Carried()] * places.nodes
    for rank, kinds in joint.workers.items():
        size = sum(kind.step_bytes for kind in kinds)
        flows[places.node_of[rank]] = Carried(sent=size) if joint.op == "send" else Carried(received=size)
    return flows


def _collective(joint: _Joint, size_bytes: float, places: _Places, manner: Manner) -> Sequence[Carried]:
    backend = joint.group.backend or ""
    ranks, layout = _arranged(joint.group, places)
    tree = manner.all_reduce if backend == "nccl" and joint.op == "all_reduce" else None
    wire_bytes = size_bytes * (manner.wire_factor if backend == "nccl" else 1.0)
    nodes = places.of(ranks)
    sent: dict[int, float] = defaultdict(float)
    received: dict[int, float] = defaultdict(float)
    for (source, target), part in rank_flows(backend, joint.op, layout, algorithm=tree).items():
        if nodes[source] != nodes[target]:
            sent[nodes[source]] += part * wire_bytes
            received[nodes[target]] += part * wire_bytes
    return [Carried(sent=sent[node], received=received[node]) for node in range(places.nodes)]


def _arranged(group: Group, places: _Places) -> tuple[tuple[int, ...], Layout]:
    """The ranks as the backend arranges them, and their layout.

    Gloo uses the group's order. NCCL's rings pass all workers of a node before the next.
    """
    ranks = group.ranks
    if group.backend == "nccl":
        nodes = places.of(ranks)
        first = {node: nodes.index(node) for node in set(nodes)}
        ranks = tuple(sorted(ranks, key=lambda rank: first[places.node_of[rank]]))
    runs = [len(list(run)) for _, run in itertools.groupby(places.of(ranks))]
    return ranks, Layout.of(runs)
