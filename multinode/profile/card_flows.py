"""Card flows: what the calls of a step put on each node's card, by the backend's own algorithms. Pure.

Which algorithms there are is `algorithms`'; what the cards counted is `card_bytes`'.
"""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from multinode.profile.calls import Group, Kind, WorkerCalls
from multinode.profile.cards import Carried
from multinode.profile.observed import Observed
from multinode.stats.estimate import UnknownError
from multinode.traffic.algorithms import Layout, algorithms_of, rank_flows

_UNEVEN = 0.03
# Sent and received that differ by less are the same; which one is called the busier is then fixed, not chance.
_SAME = 1e-6


class Manner(msgspec.Struct, frozen=True, kw_only=True):
    """How NCCL may make its collectives, other than usual.

    Attributes:
        all_reduce: name of the algorithm; None is the usual one.
        wire_factor: bytes on the wire for one of payload.
    """

    all_reduce: str | None = None
    wire_factor: float = 1.0


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """What calls of one op put on the cards, of groups of one size.

    Attributes:
        op: as CallCount has it.
        backend: of the groups; None is unknown.
        ranks: workers in each group.
        spans: nodes that each is on.
        groups: groups by node.
        carried: by node.
    """

    op: str
    backend: str | None
    ranks: int
    spans: int
    groups: tuple[int, ...]
    carried: tuple[Carried, ...]


class CardFlows(msgspec.Struct, frozen=True, kw_only=True):
    """What a step puts on the card of each node.

    Attributes:
        nodes: in all, by node.
        shares: of that, by op and size of the group.
        unknown: by op, why what it moves is not known; `nodes` is then without it.
    """

    nodes: tuple[Carried, ...]
    shares: tuple[Share, ...] = ()
    unknown: dict[str, str] = {}

    @property
    def most(self) -> float:
        """What the busiest card carries in its busier direction."""
        return max((node.busier for node in self.nodes), default=0.0)

    @property
    def busiest(self) -> tuple[int, bool]:
        """The index of the busiest node, and whether it sends more than it receives, or as much."""
        limit = self.most * (1 - _SAME)
        sends = any(node.sent >= limit for node in self.nodes)
        return next((index for index, node in enumerate(self.nodes) if node.one_way(sends=sends) >= limit), 0), sends


class _Joint(msgspec.Struct, frozen=True, kw_only=True):
    """The calls of one op in one group; `workers` has what each of them recorded."""

    group: Group
    op: str
    workers: dict[int, list[Kind]]


class _Places(NamedTuple):
    """Which node each worker is on, of so many."""

    node_of: dict[int, int]
    nodes: int

    def of(self, ranks: Sequence[int]) -> list[int]:
        return [self.node_of[rank] for rank in ranks]


def expect_flows(calls: Mapping[int, WorkerCalls], observed: Observed, manner: Manner | None = None) -> CardFlows:
    """What they put on the cards.

    Every worker of a group makes the same call, which is taken once: the median of what its workers recorded. A send
    and a recv are each worker's own.

    Args:
        calls: of the workers that recorded any.
        observed: says which node a worker is on.
        manner: how NCCL makes its collectives; as usual without.
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
    return CardFlows(nodes=_sum((share.carried for share in shares), places.nodes), shares=shares, unknown=unknown)


def _sum(flows: Iterable[Sequence[Carried]], nodes: int) -> tuple[Carried, ...]:
    """By node."""
    return tuple(sum(each, Carried()) for each in zip([Carried()] * nodes, *flows, strict=True))


def _joints(calls: Mapping[int, WorkerCalls]) -> Iterable[_Joint]:
    found: dict[tuple[Group, str], dict[int, list[Kind]]] = {}
    for rank, worker in calls.items():
        for kind in worker.kinds:
            found.setdefault((kind.group, kind.op), {}).setdefault(rank, []).append(kind)
    return (_Joint(group=group, op=op, workers=workers) for (group, op), workers in found.items())


def _flows(joint: _Joint, places: _Places, manner: Manner) -> Sequence[Carried]:
    """What these calls put on the card of each node.

    Raises:
        UnknownError: why that is not known.
    """
    nodes = places.of(joint.group.ranks)
    known = bool(algorithms_of(joint.group.backend or "", joint.op))
    small = all(kind.is_small for kinds in joint.workers.values() for kind in kinds)
    # What is small is not worth an algorithm of its own; where there is one, it is right for small messages as well.
    if len(set(nodes)) == 1 or (small and not known):
        return [Carried()] * places.nodes
    if joint.op in {"send", "recv"}:
        return _passed(joint, places)
    if not known:
        if backend := joint.group.backend:
            raise UnknownError(f"how {backend} makes it is not known")
        raise UnknownError("the backend of its group is not known")
    sizes = [sum(kind.step_bytes for kind in kinds) for kinds in joint.workers.values()]
    size = statistics.median_low(sizes)
    if joint.op == "all_to_all" and max(sizes) - min(sizes) > _UNEVEN * size:
        raise UnknownError("its workers send parts of different sizes")
    return _collective(joint, size, places, manner)


def _passed(joint: _Joint, places: _Places) -> Sequence[Carried]:
    """Send or recv: over the card, where no two workers of the group are on one node."""
    if len(set(places.of(joint.group.ranks))) < len(joint.group.ranks):
        raise UnknownError("whether it goes to a worker of the same node is not recorded")
    flows = [Carried()] * places.nodes
    for rank, kinds in joint.workers.items():
        size = sum(kind.step_bytes for kind in kinds)
        flows[places.node_of[rank]] = Carried(sent=size) if joint.op == "send" else Carried(received=size)
    return flows


def _collective(joint: _Joint, size_bytes: float, places: _Places, manner: Manner) -> Sequence[Carried]:
    """S in all of a group's collectives of one op -> what passes each card."""
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

    Gloo takes them in the group's order. NCCL's rings stay on a node until they have passed all of its workers.
    """
    ranks = group.ranks
    if group.backend == "nccl":
        nodes = places.of(ranks)
        first = {node: nodes.index(node) for node in set(nodes)}
        ranks = tuple(sorted(ranks, key=lambda rank: first[places.node_of[rank]]))
    runs = [len(list(run)) for _, run in itertools.groupby(places.of(ranks))]
    return ranks, Layout.of(runs)
