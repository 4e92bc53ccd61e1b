"""NIC flows: the traffic of a step's calls on each node's NIC, by the backend's algorithms. Pure.

The algorithms are in `algorithms`.
"""

from __future__ import annotations

import itertools
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

import msgspec

from multinode.profile.calls import SeenCall, WorkerCalls
from multinode.profile.nics import Carried
from multinode.profile.observed import Observed
from multinode.stats.unknown import UnknownError
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
    """The calls of one op in one group."""

    op: str
    backend: str | None
    ranks: tuple[int, ...]  # in the group's order
    nodes: tuple[int, ...]  # of each of them
    workers: dict[int, list[SeenCall]]  # each worker's record


def expect_flows(calls: Mapping[int, WorkerCalls], observed: Observed, manner: Manner | None = None) -> NicFlows:
    """Expected NIC traffic.

    Every worker of a group makes the same call, which counts once: the median of its workers' records. Send and recv
    are per worker.

    Args:
        calls: of the workers that recorded any.
        observed: has the node of each worker.
        manner: NCCL's way; the usual one without.
    """
    sums: dict[tuple[str, str | None, int, int], list[tuple[dict[int, Carried], set[int]]]] = {}
    unknown: dict[str, str] = {}
    for joint in _joints(calls, observed.node_of):
        nodes = set(joint.nodes)
        try:
            flows = _flows(joint, manner or Manner())
        except UnknownError as error:
            unknown.setdefault(joint.op, str(error))
        else:
            sums.setdefault((joint.op, joint.backend, len(joint.ranks), len(nodes)), []).append((flows, nodes))
    every = range(len(observed.nodes))
    shares = tuple(
        Share(
            op=op,
            backend=backend,
            ranks=ranks,
            spans=spans,
            groups=tuple(sum(node in nodes for _, nodes in groups) for node in every),
            carried=tuple(sum((flows[node] for flows, _ in groups if node in flows), Carried()) for node in every),
        )
        for (op, backend, ranks, spans), groups in sums.items()
    )
    carried = tuple(sum((share.carried[node] for share in shares), Carried()) for node in every)
    return NicFlows(nodes=carried, shares=shares, unknown=unknown)


def _joints(calls: Mapping[int, WorkerCalls], node_of: Mapping[int, int]) -> Iterable[_Joint]:
    workers: dict[tuple[str, str | None, tuple[int, ...]], dict[int, list[SeenCall]]] = {}
    for rank, worker in calls.items():
        for group, mine in worker.by_group.items():
            for call in mine:
                workers.setdefault((call.op, call.backend, group), {}).setdefault(rank, []).append(call)
    for (op, backend, ranks), records in workers.items():
        nodes = tuple(node_of[rank] for rank in ranks)
        yield _Joint(op=op, backend=backend, ranks=ranks, nodes=nodes, workers=records)


def _flows(joint: _Joint, manner: Manner) -> dict[int, Carried]:
    """Traffic of these calls on the NIC of each node; a node without any may be absent."""
    has_algorithms = bool(algorithms_of(joint.backend or "", joint.op))
    small = all(call.is_small for calls in joint.workers.values() for call in calls)
    # Small messages need no algorithm of their own.
    if len(set(joint.nodes)) == 1 or (small and not has_algorithms):
        return {}
    if joint.op in {"send", "recv"}:
        return _passed(joint)
    if not has_algorithms:
        if joint.backend is not None:
            raise UnknownError(f"how {joint.backend} implements it is unknown")
        raise UnknownError("the backend of its group is unknown")
    sizes = [sum(call.step_bytes for call in calls) for calls in joint.workers.values()]
    size = statistics.median_low(sizes)
    if joint.op == "all_to_all" and max(sizes) - min(sizes) > _UNEVEN * size:
        raise UnknownError("its workers send parts of different sizes")
    return _collective(joint, size, manner)


def _passed(joint: _Joint) -> dict[int, Carried]:
    if len(set(joint.nodes)) < len(joint.nodes):
        raise UnknownError("the records do not show whether the receiver is on the same node")
    flows = {}
    for rank, node in zip(joint.ranks, joint.nodes, strict=True):
        size = sum(call.step_bytes for call in joint.workers.get(rank, ()))
        flows[node] = Carried(sent=size) if joint.op == "send" else Carried(received=size)
    return flows


def _collective(joint: _Joint, size_bytes: float, manner: Manner) -> dict[int, Carried]:
    nccl = joint.backend == "nccl"
    # Gloo uses the group's order. NCCL's rings pass all workers of a node before the next.
    nodes = tuple(Counter(joint.nodes).elements()) if nccl else joint.nodes
    layout = Layout.of([len(list(run)) for _, run in itertools.groupby(nodes)])
    tree = manner.all_reduce if nccl and joint.op == "all_reduce" else None
    wire_bytes = size_bytes * (manner.wire_factor if nccl else 1.0)
    sent: dict[int, float] = defaultdict(float)
    received: dict[int, float] = defaultdict(float)
    for (source, target), part in rank_flows(joint.backend or "", joint.op, layout, algorithm=tree).items():
        if nodes[source] != nodes[target]:
            sent[nodes[source]] += part * wire_bytes
            received[nodes[target]] += part * wire_bytes
    return {node: Carried(sent=sent[node], received=received[node]) for node in set(nodes)}
