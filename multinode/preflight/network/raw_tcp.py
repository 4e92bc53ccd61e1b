"""Raw TCP between the nodes' data-plane cards: what a collective could reach at best, and what each pair reaches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from multinode.analyse.nccl_test.pair_speeds import RawTcp, least_of_pairs
from multinode.core.cluster.cluster import Node
from multinode.errors import MultinodeError, UsageError
from multinode.preflight.network.meeting import ALL_PAIRS_NODES, stream_pairs
from multinode.preflight.network.reach import Agenda, Hall
from multinode.transport.agent import AgentTransport

__all__ = ["measure_raw_tcp", "require_pairs"]

_RING_S = 1.0
_PAIR_S = 0.5
_SEVERAL = 4
_PINGS = 50


def require_pairs(names: Sequence[str]) -> None:
    """Refuse to measure all pairs where they are too many, or none.

    Raises:
        UsageError: there are.
    """
    if len(names) > ALL_PAIRS_NODES:
        raise UsageError(
            f"--pairs measures every pair of up to {ALL_PAIRS_NODES} nodes, and these are {len(names)}",
            hint=f"--nodes {ALL_PAIRS_NODES}, or a hostfile with some of them",
        )
    if len(names) < 2:  # noqa: PLR2004 - a pair is two
        raise UsageError("--pairs needs two nodes, and this is one", hint="a hostfile with two nodes or more")


def measure_raw_tcp(
    agent: AgentTransport,
    nodes: Sequence[Node],
    addresses: Mapping[str, str],
    *,
    pairs: Mapping[str, float] | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> RawTcp:
    """Stream around the ring of nodes, and between all pairs where that is asked for.

    Args:
        agent: the way to the nodes.
        nodes: in node-rank order.
        addresses: on the data plane, by name.
        pairs: payload in Gbit/s that the link of each node carries, of those whose link is known; None measures the
            ring alone.
        say: is told each stage in a few words.

    Raises:
        NodeError, NodeFailed: a node could not be asked.
    """
    names = [node.name for node in nodes]
    ring = [(name, names[(index + 1) % len(names)]) for index, name in enumerate(names)]
    agenda = Agenda(master_port=None, ephemeral=1)
    with Hall(agent, nodes, addresses, agenda) as hall:
        _raise_first(hall.errors)
        say("measuring raw TCP around the ring of nodes")
        latency = hall.ping(ring, _PINGS)
        one = hall.stream(ring, _RING_S)
        several = hall.stream(ring, _RING_S, count=_SEVERAL)
        stream = partial(hall.stream, seconds=_PAIR_S)
        least = partial(least_of_pairs, ceilings=pairs)
        matrix = stream_pairs(names, stream, least, say) if pairs is not None else ()
        _raise_first(hall.errors)
    return RawTcp(one=one, several=several, connections=_SEVERAL, latency=latency, pairs=matrix)


def _raise_first(errors: Sequence[MultinodeError]) -> None:
    for error in errors:
        raise error
