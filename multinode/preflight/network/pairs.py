"""Which nodes try to reach which: all pairs where they are few, else enough of them. Pure, but for the dice."""

from __future__ import annotations

import random
from collections.abc import Sequence

__all__ = ["ALL_PAIRS_NODES", "Pair", "choose_pairs", "launch_pairs", "tournament"]

ALL_PAIRS_NODES = 16
_RANDOM_PEERS = 2

Pair = tuple[str, str]


def choose_pairs(names: Sequence[str], dice: random.Random) -> tuple[Pair, ...]:
    """Ordered pairs of caller and peer for a check: all of them up to 16 nodes.

    Above that everybody calls the next node (a ring, the way of an all-reduce), node 0 (the rendezvous) and two others.
    """
    if len(names) <= ALL_PAIRS_NODES:
        return tuple((caller, peer) for caller in names for peer in names if peer != caller)
    pairs = list(launch_pairs(names))
    for caller in names:
        pairs += [(caller, peer) for peer in dice.sample([name for name in names if name != caller], _RANDOM_PEERS)]
    return tuple(dict.fromkeys(pairs))


def launch_pairs(names: Sequence[str]) -> tuple[Pair, ...]:
    """Those that a launch tries: everybody calls node 0, and its neighbours in the ring."""
    count = len(names)
    pairs = [(caller, names[0]) for caller in names[1:]]
    for index, caller in enumerate(names):
        pairs += [(caller, names[(index + step) % count]) for step in (1, -1)]
    return tuple(dict.fromkeys(pair for pair in pairs if pair[0] != pair[1]))


def tournament(names: Sequence[str]) -> tuple[tuple[Pair, ...], ...]:
    """Rounds of disjoint pairs in which everybody meets everybody once (the circle method), each pair one way."""
    players: list[str | None] = [*names]
    if len(players) % 2:
        players.append(None)
    rounds = []
    for _ in range(len(players) - 1):
        half = len(players) // 2
        facing = zip(players[:half], reversed(players[half:]), strict=True)
        rounds.append(tuple((a, b) for a, b in facing if a is not None and b is not None))
        players = [players[0], players[-1], *players[1:-1]]
    return tuple(one for one in rounds if one)
