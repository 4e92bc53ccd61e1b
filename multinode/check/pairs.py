"""Raw TCP between every two nodes' data-plane cards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from multinode.check.connection_test import ConnectivityPlan, ConnectivityTest
from multinode.check.connectivity import ALL_PAIRS_NODES, stream_pairs
from multinode.cluster.cluster import Node
from multinode.errors import MultinodeError, UsageError
from multinode.traffic.pair_speeds import PairSpeed, least_of_pairs
from multinode.transport.agent import AgentTransport

_PAIR_S = 0.5


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


def measure_pairs(
    agent: AgentTransport,
    nodes: Sequence[Node],
    addresses: Mapping[str, str],
    ceilings: Mapping[str, float],
    say: Callable[[str], None] = lambda _: None,
) -> tuple[PairSpeed, ...]:
    """Stream between all pairs, both ways.

    Args:
        agent: the way to the nodes.
        nodes: in node-rank order.
        addresses: on the data plane, by name.
        ceilings: payload in Gbit/s that the link of each node carries, of those whose link is known.
        say: is told each stage in a few words.

    Raises:
        NodeError, NodeFailed: a node could not be asked.
    """
    plan = ConnectivityPlan(master_port=None, ephemeral=1)
    with ConnectivityTest(agent, nodes, addresses, plan) as test:
        _raise_first(test.errors)
        stream = partial(test.stream, seconds=_PAIR_S)
        found = stream_pairs([node.name for node in nodes], stream, partial(least_of_pairs, ceilings=ceilings), say)
        _raise_first(test.errors)
    return found


def _raise_first(errors: Sequence[MultinodeError]) -> None:
    for error in errors:
        raise error
