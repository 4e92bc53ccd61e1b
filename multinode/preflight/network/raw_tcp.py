"""Raw TCP between the nodes' data-plane cards: what a collective could reach at best, and what each pair reaches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import msgspec

from multinode.analyse.nccl_test.pair_speeds import PairSpeed, least_of_pairs
from multinode.analyse.nccl_test.raw_tcp import RawTcp, RoundTrip
from multinode.core.cluster.cluster import Node
from multinode.errors import MultinodeError, UsageError
from multinode.preflight.network.meeting import Streamed
from multinode.preflight.network.pairs import ALL_PAIRS_NODES
from multinode.preflight.network.reach import Agenda, Hall
from multinode.preflight.network.stream_rounds import repeat_slow, stream_all
from multinode.transport.agent import AgentTransport

__all__ = ["AllPairs", "measure_raw_tcp", "require_pairs"]

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


class AllPairs(msgspec.Struct, frozen=True, kw_only=True):
    """That every pair of nodes is measured.

    Attributes:
        ceilings: payload in Gbit/s that the link of each node carries, by node; None where no link is known.
    """

    ceilings: Mapping[str, float] | None = None


def measure_raw_tcp(
    agent: AgentTransport,
    nodes: Sequence[Node],
    addresses: Mapping[str, str],
    *,
    pairs: AllPairs | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> RawTcp:
    """Stream around the ring of nodes, and between all pairs where that is asked for.

    Args:
        agent: the way to the nodes.
        nodes: in node-rank order.
        addresses: on the data plane, by name.
        pairs: None measures the ring alone.
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
        matrix = _stream_pairs(hall, names, pairs.ceilings, say) if pairs is not None else []
        _raise_first(hall.errors)
    return RawTcp(
        one=_speeds(one),
        several=_speeds(several),
        connections=_SEVERAL,
        latency=tuple(
            RoundTrip(source=one.node, target=one.peer, median_us=one.median_us, p95_us=one.p95_us, error=one.error)
            for one in latency
        ),
        pairs=_speeds(matrix),
    )


def _stream_pairs(
    hall: Hall, names: Sequence[str], ceilings: Mapping[str, float] | None, say: Callable[[str], None]
) -> list[Streamed]:
    """What every pair reached, those that seem odd in two tries."""
    stream = partial(hall.stream, seconds=_PAIR_S)
    streams = stream_all(names, stream, say)
    return repeat_slow(streams, names, least_of_pairs(_speeds(streams), ceilings), stream, say)


def _speeds(streams: Iterable[Streamed]) -> tuple[PairSpeed, ...]:
    return tuple(
        PairSpeed(
            source=one.node,
            target=one.peer,
            gbit_per_s=one.gbit_per_s,
            worse_gbit_per_s=one.worse_gbit_per_s,
            error=one.error,
        )
        for one in streams
    )


def _raise_first(errors: Sequence[MultinodeError]) -> None:
    for error in errors:
        raise error
