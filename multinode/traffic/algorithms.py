"""Algorithms: what each backend sends for a collective, between ranks and through the NICs of nodes; busbw factors.

`nic_path` compares it with the counters.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec


def bus_factor(collective: str, ranks: int) -> float:
    """Factor from algbw to busbw for this number of ranks.

    Raises:
        ValueError: the collective is unknown.
    """
    if collective == "all_reduce":
        return 2 * (ranks - 1) / ranks
    if collective in {"all_gather", "reduce_scatter", "all_to_all", "gather", "scatter", "hypercube"}:
        return (ranks - 1) / ranks
    if collective in {"broadcast", "reduce", "sendrecv"}:
        return 1.0
    raise ValueError(f"unknown collective {collective!r}")


Flows = dict[tuple[int, int], float]
"""By sender and receiver, the fraction of S sent per call."""


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """Workers on nodes; ranks are numbered node by node, as by torchrun."""

    nodes: int
    workers_per_node: int = 1  # for unequal nodes, the largest number
    unequal: tuple[int, ...] = ()  # workers of each node, if they differ

    @classmethod
    def of(cls, workers: Sequence[int]) -> Layout:
        """With these numbers of workers per node, at least one each."""
        unequal = tuple(workers) if len(set(workers)) > 1 else ()
        return cls(nodes=max(1, len(workers)), workers_per_node=max((1, *workers)), unequal=unequal)

    @property
    def workers(self) -> int:
        """n, all of them."""
        return sum(self.unequal) or self.nodes * self.workers_per_node

    @property
    def counts(self) -> tuple[int, ...]:
        """Workers of each node."""
        return self.unequal or (self.workers_per_node,) * self.nodes

    def on(self, nodes: int) -> Layout:
        """On the first so many of its nodes; any beyond them have as many workers as the fullest."""
        return Layout.of((self.counts + (self.workers_per_node,) * nodes)[:nodes])

    @property
    def ranks(self) -> tuple[range, ...]:
        """Of each node."""
        ends = list(itertools.accumulate(self.counts))
        return tuple(itertools.starmap(range, itertools.pairwise([0, *ends])))


class NodeFlow(msgspec.Struct, frozen=True, kw_only=True):
    """What a call moves at one node, as fractions of S."""

    sent: float  # to other nodes
    received: float  # from other nodes
    inside: float  # between workers of the node


class MessageSteps(NamedTuple):
    """Consecutive messages: `between` nodes, and `inside` a node, which take a fraction of the time."""

    between: float
    inside: float = 0


class Algorithm(msgspec.Struct, frozen=True, kw_only=True):
    """One algorithm of a backend for a collective."""

    name: str
    source: str  # its reference
    flows: Callable[[Layout], Flows]  # for this number of nodes and workers per node
    steps: Callable[[Layout], MessageSteps]  # consecutive messages of each of these workers
    in_turns: bool = False  # whether two workers that send each other large messages do so one after the other


def _ring(passes: float, shared: int) -> Callable[[Layout], Flows]:
    """Each rank sends only to the next: `passes` times S, minus the part that it already has."""

    def flows(layout: Layout) -> Flows:
        ranks = layout.workers
        sent = passes * (ranks - 1) / ranks if shared else passes
        return {(rank, (rank + 1) % ranks): sent for rank in range(ranks)} if ranks > 1 else {}

    return flows


def _pairs(layout: Layout) -> Flows:
    """Each rank sends every other rank its share."""
    ranks = layout.workers
    return {(rank, other): 1 / ranks for rank in range(ranks) for other in range(ranks) if rank != other}


def _binomial_tree(layout: Layout) -> Flows:
    """The number of ranks with the data doubles: in step i, each rank below 2**i sends to rank + 2**i."""
    return {(rank - (1 << (rank.bit_length() - 1)), rank): 1.0 for rank in range(1, layout.workers)}


def _chain(layout: Layout) -> Flows:
    """An open ring that starts at the root."""
    return {(rank, rank + 1): 1.0 for rank in range(layout.workers - 1)}


def _double_tree(layout: Layout) -> Flows:
    """Two trees over the nodes, each with half of S, up and down; inside a node a chain from its first worker."""
    flows: Flows = {}
    nodes, firsts = layout.nodes, [ranks.start for ranks in layout.ranks]
    for node in range(1, nodes):
        parent = _tree_parent(node, nodes)
        # The second tree mirrors the first; for an odd number of nodes it is shifted by one.
        second = (
            (nodes - 1 - node, nodes - 1 - parent) if nodes % 2 == 0 else ((node + 1) % nodes, (parent + 1) % nodes)
        )
        for child, above in ((node, parent), second):
            for edge in ((firsts[child], firsts[above]), (firsts[above], firsts[child])):
                flows[edge] = flows.get(edge, 0.0) + 0.5
    for ranks in layout.ranks:
        for rank in ranks[:-1]:
            flows[rank, rank + 1] = flows[rank + 1, rank] = 1.0
    return flows


def _to_root(layout: Layout) -> Flows:
    """Each rank sends its part to rank 0."""
    return {(rank, 0): 1 / layout.workers for rank in range(1, layout.workers)}


def _from_root(layout: Layout) -> Flows:
    """Rank 0 sends each other rank its part."""
    return {(0, rank): 1 / layout.workers for rank in range(1, layout.workers)}


def _hypercube(layout: Layout) -> Flows:
    """In step i, each rank exchanges the 2**i parts that it has with rank ^ 2**i."""
    ranks = layout.workers
    steps = [1 << step for step in range((ranks - 1).bit_length())]
    return {(rank, rank ^ step): step / ranks for rank in range(ranks) for step in steps if rank ^ step < ranks}


def _ring_steps(passes: int) -> Callable[[Layout], MessageSteps]:
    """A ring that starts in the middle of a node leaves every node (nccl/src/graph/tuning.cc: 2 x nNodes)."""

    def steps(layout: Layout) -> MessageSteps:
        most = layout.nodes if layout.workers_per_node > 1 and layout.nodes > 1 else layout.nodes - 1
        return MessageSteps(passes * most, passes * (layout.workers - 1 - most))

    return steps


def _one_step(layout: Layout) -> MessageSteps:
    return MessageSteps(1) if layout.nodes > 1 else MessageSteps(0, 1)


def _height(layout: Layout) -> MessageSteps:
    height, inside = (math.ceil(math.log2(ranks)) for ranks in (layout.workers, layout.workers_per_node))
    return MessageSteps(height - inside, inside)


def _double_tree_steps(layout: Layout) -> MessageSteps:
    """Up and down through the chain of each node and the tree of nodes (nccl/src/graph/tuning.cc)."""
    return MessageSteps(2 * math.ceil(math.log2(layout.nodes)), 2 * (layout.workers_per_node - 1))


def _tree_parent(node: int, nodes: int) -> int:
    """In a tree numbered in order, with root 0: leaves are odd, each level above has one more trailing zero bit."""
    low = node & -node
    above = (node ^ low) | (low << 1)
    return above if above < nodes else node ^ low


_GLOO_RING = "gloo/allreduce.cc (ring, the default)"
_NCCL_RING = "nccl/src/device/{}.h (ring)"

# Gloo's part was measured as well: torch 2.13, S = 16 MiB, counters of the NICs of virtual nodes at 1 Gbit/s, parts of
# S that a node sent (and received, where that differs); the greatest deviation from this table was 0.02%.
#   nodes x workers   all_reduce, reduce_scatter   all_gather   all_to_all   sendrecv   broadcast
#   2 x 1             1.000                        0.500        0.500        1.000      1/0 0/1
#   3 x 1             1.334                        0.667        0.667        1.000      2/0 0/1 0/1
#   4 x 1             1.500                        0.750        0.750        1.000      2/0 1/1 0/1 0/1
#   5 x 1             1.600                        0.800        0.800        1.000      3/0 1/1 0/1 0/1 0/1
#   6 x 1             1.667                        0.833        0.833        1.000      3/0 2/1 0/1 0/1 0/1 0/1
#   2 x 2             1.500                        0.750        1.000        1.000      2/0 0/2
#     inside, on lo   1.500                        0.750        0.500        1.000      1 0
# Gloo has one connection for each two workers. Where each of them has a large message for the other (all_to_all, and
# the rings of two workers), 2 to 32 MiB took as long as one after the other: measured 0.49 to 0.54 of the link one way
# for all_to_all and sendrecv, 0.57 to 0.67 for all_gather. All-reduce goes in small parts, and fills both ways.
_TABLE: Mapping[str, Mapping[str, tuple[Algorithm, ...]]] = {
    "gloo": {
        "all_reduce": (Algorithm(name="ring", source=_GLOO_RING, flows=_ring(2, shared=True), steps=_ring_steps(2)),),
        "all_gather": (
            Algorithm(
                name="ring",
                source="gloo/allgather.cc",
                flows=_ring(1, shared=True),
                steps=_ring_steps(1),
                in_turns=True,
            ),
        ),
        "reduce_scatter": (
            Algorithm(
                name="ring of an all-reduce",
                source="torch's ProcessGroupGloo.cpp: it does an all-reduce and keeps a part (pytorch#118911); "
                + _GLOO_RING,
                flows=_ring(2, shared=True),
                steps=_ring_steps(2),
            ),
        ),
        "broadcast": (
            Algorithm(name="binomial tree", source="gloo/broadcast.cc", flows=_binomial_tree, steps=_height),
        ),
        "all_to_all": (
            Algorithm(name="pairs", source="gloo/alltoall.cc", flows=_pairs, steps=_one_step, in_turns=True),
        ),
        "sendrecv": (
            Algorithm(
                name="ring", source="what was called", flows=_ring(1, shared=False), steps=_one_step, in_turns=True
            ),
        ),
    },
    "nccl": {
        "all_reduce": (
            Algorithm(
                name="ring",
                source=_NCCL_RING.format("all_reduce"),
                flows=_ring(2, shared=True),
                steps=_ring_steps(2),
            ),
            Algorithm(
                name="tree",
                source="nccl/src/graph/trees.cc (double binary tree)",
                flows=_double_tree,
                steps=_double_tree_steps,
            ),
        ),
        "all_gather": (
            Algorithm(
                name="ring",
                source=_NCCL_RING.format("all_gather"),
                flows=_ring(1, shared=True),
                steps=_ring_steps(1),
            ),
        ),
        "reduce_scatter": (
            Algorithm(
                name="ring",
                source=_NCCL_RING.format("reduce_scatter"),
                flows=_ring(1, shared=True),
                steps=_ring_steps(1),
            ),
        ),
        "broadcast": (
            Algorithm(name="ring", source=_NCCL_RING.format("broadcast"), flows=_chain, steps=_ring_steps(1)),
        ),
        "all_to_all": (
            Algorithm(
                name="pairs",
                source="torch's NCCLUtils.cpp: a send and a receive for each pair",
                flows=_pairs,
                steps=_one_step,
            ),
        ),
        "sendrecv": (Algorithm(name="ring", source="what was called", flows=_ring(1, shared=False), steps=_one_step),),
        # Other programs of nccl-tests.
        "reduce": (Algorithm(name="ring", source=_NCCL_RING.format("reduce"), flows=_chain, steps=_ring_steps(1)),),
        "gather": (Algorithm(name="root", source="nccl-tests/src/gather.cu", flows=_to_root, steps=_one_step),),
        "scatter": (Algorithm(name="root", source="nccl-tests/src/scatter.cu", flows=_from_root, steps=_one_step),),
        "hypercube": (
            Algorithm(name="hypercube", source="nccl-tests/src/hypercube.cu", flows=_hypercube, steps=_height),
        ),
    },
}


# Bytes on the wire for a byte of payload. LL sends a flag of 4 bytes with each 4, LL128 one of 8 with each 120
# (nccl/src/include/device.h: ncclLLFifoLine, NCCL_LL128_DATAELEMS). NCCL takes them for what is small.
_PROTOCOLS: Mapping[str, Mapping[str, float]] = {"nccl": {"Simple": 1.0, "LL128": 16 / 15, "LL": 2.0}}


# Of a small message inside a node: NCCL's over NVLink or PCIe (nccl/src/graph/tuning.cc: hwLat is 0.6 to 5.7 us by
# protocol), gloo's over loopback (measured: 8 B between two workers, 83 us for two steps, 69 at the fastest tenth).
_INSIDE_US = (6.0, 40.0)

# oneCCL and HCCL document rings like NCCL's; not measured.
_TAKEN_AS = {"xccl": "nccl", "hccl": "nccl"}


def protocols_of(backend: str) -> Mapping[str, float]:
    """Bytes on the wire per byte of payload, by protocol; one unnamed entry if there is no choice."""
    return _PROTOCOLS.get(backend, {"": 1.0})


def algorithms_of(backend: str, collective: str) -> tuple[Algorithm, ...]:
    """Algorithms that the backend may use, the usual one first; empty if unknown."""
    return _TABLE.get(_TAKEN_AS.get(backend, backend), {}).get(collective, ())


def rank_flows(backend: str, collective: str, layout: Layout, *, algorithm: str | None = None) -> Flows:
    """By sender and receiver, the fraction of S sent per call; the root of a broadcast is rank 0.

    Args:
        backend: `nccl` or `gloo`.
        collective: its name.
        layout: the workers; NCCL's tree connects nodes, its ring the ranks in order.
        algorithm: its name; default: the usual one.

    Raises:
        ValueError: the backend does not have the collective or the algorithm.
    """
    for candidate in algorithms_of(backend, collective):
        if algorithm in {None, candidate.name}:
            return candidate.flows(layout)
    raise ValueError(f"unknown: {collective} of {backend}" + (f" as {algorithm}" if algorithm else ""))


def node_flows(flows: Mapping[tuple[int, int], float], layout: Layout) -> tuple[NodeFlow, ...]:
    """Flows by node: what its NIC sends and receives, and what stays inside, as fractions of S."""
    sent, received, inside = ([0.0] * layout.nodes for _ in range(3))
    node_of = [node for node, ranks in enumerate(layout.ranks) for _ in ranks]
    for (source, target), part in flows.items():
        start, end = node_of[source], node_of[target]
        if start == end:
            inside[start] += part
        else:
            sent[start] += part
            received[end] += part
    return tuple(
        NodeFlow(sent=out, received=back, inside=kept) for out, back, kept in zip(sent, received, inside, strict=True)
    )


@functools.lru_cache(maxsize=256)
def nic_factor(backend: str, collective: str, layout: Layout, algorithm: str | None = None) -> float:
    """Fraction of S through the busiest NIC of a node, one way, per call; busbw's factor if the backend is unknown.

    Args:
        backend: `nccl` or `gloo`.
        collective: its name.
        layout: the workers.
        algorithm: its name; default, or if the backend lacks it: the usual one.
    """
    candidates = algorithms_of(backend, collective)
    if not candidates:
        return bus_factor(collective, layout.workers)
    ran = next((candidate for candidate in candidates if candidate.name == algorithm), candidates[0])
    nodes = node_flows(ran.flows(layout), layout)
    return max(max(node.sent, node.received) for node in nodes)


@functools.lru_cache(maxsize=256)
def link_share(backend: str, collective: str, layout: Layout) -> float:
    """The share of a link, one way, that the backend should at least reach."""
    candidates = algorithms_of(backend, collective)
    if not candidates or not candidates[0].in_turns:
        return 1.0
    flows = candidates[0].flows(layout)
    return 0.5 if any((target, source) in flows for source, target in flows) else 1.0


@functools.lru_cache(maxsize=256)
def message_steps(backend: str, collective: str, layout: Layout) -> MessageSteps:
    """Consecutive messages of a small call, at least one; those of a ring if the backend is unknown.

    Of several algorithms the one with the fewest messages between nodes: small calls are chosen by latency.
    """
    candidates = algorithms_of(backend, collective)
    steps = min((candidate.steps(layout) for candidate in candidates), default=_ring_steps(1)(layout))
    return steps if sum(steps) else MessageSteps(1)


def steps_us(backend: str, steps: MessageSteps, between_us: float) -> float:
    """Their total time, given the time of one between two nodes; one inside a node takes no longer."""
    return steps.between * between_us + steps.inside * min(between_us, _inside_us(backend))


def between_us(backend: str, steps: MessageSteps, all_us: float) -> float:
    """The time of one between two nodes, given the total time."""
    inside_us = min(_inside_us(backend), all_us / sum(steps))
    return (all_us - steps.inside * inside_us) / steps.between if steps.between else all_us / sum(steps)


def _inside_us(backend: str) -> float:
    return _INSIDE_US[_TAKEN_AS.get(backend, backend) == "gloo"]


def worker_factor(backend: str, collective: str, ranks: int) -> float:
    """Fraction of S that the busiest worker sends per call."""
    sent: dict[int, float] = {}
    for (source, _), part in rank_flows(backend, collective, Layout(nodes=ranks)).items():
        sent[source] = sent.get(source, 0.0) + part
    return max(sent.values(), default=0.0)
