"""ConnectivityResult: which nodes connect to which, in which rounds they stream, and the results.

Pure, except for a random choice of peers; independent of how connections are tested.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from multinode.traffic.pair_speeds import Pair, PairSpeed

ALL_PAIRS_NODES = 16
_RANDOM_PEERS = 2


class Listening(msgspec.Struct, frozen=True, kw_only=True):
    """Ports that a node's listeners could bind."""

    node: str
    ports: tuple[int, ...] = ()  # bound: those asked for, then ephemeral ones
    failed: dict[int, str] = {}  # the reason, for ports asked for that could not be bound


class Attempted(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt of `node` to connect to `peer`."""

    node: str
    peer: str
    addr: str  # the peer's address
    port: int
    # None is success; `refused`, `timed out`, `no route`, `wrong answer`, `large packets lost`, or the system's message
    error: str | None = None
    ms: float | None = None  # time to the connection or to the failure
    path_mtu: int | None = None  # the kernel's path MTU, in bytes


class ConnectivityResult(msgspec.Struct, frozen=True, kw_only=True):
    """All results."""

    listening: tuple[Listening, ...] = ()  # by node, in node-rank order
    attempts: tuple[Attempted, ...] = ()  # in the planned order
    streams: tuple[PairSpeed, ...] = ()  # likewise; empty without streams


def choose_pairs(names: Sequence[str], rng: random.Random) -> tuple[Pair, ...]:
    """Ordered pairs of caller and peer for a check: all of them up to 16 nodes.

    With more nodes, each connects to the next one (as in a ring all-reduce), to node 0 (the rendezvous) and to two
    others.
    """
    if len(names) <= ALL_PAIRS_NODES:
        return tuple((caller, peer) for caller in names for peer in names if peer != caller)
    pairs = list(launch_pairs(names))
    for caller in names:
        pairs += [(caller, peer) for peer in rng.sample([name for name in names if name != caller], _RANDOM_PEERS)]
    return tuple(dict.fromkeys(pairs))


def launch_pairs(names: Sequence[str]) -> tuple[Pair, ...]:
    """Pairs before a launch: every node connects to node 0, and to its neighbors in the ring."""
    count = len(names)
    pairs = [(caller, names[0]) for caller in names[1:]]
    for index, caller in enumerate(names):
        pairs += [(caller, names[(index + step) % count]) for step in (1, -1)]
    return tuple(dict.fromkeys(pair for pair in pairs if pair[0] != pair[1]))


def round_robin(names: Sequence[str]) -> tuple[tuple[Pair, ...], ...]:
    """Rounds of disjoint pairs that cover all pairs once (the circle method), each one way."""
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


def stream_pairs(
    names: Sequence[str],
    stream: Callable[[Sequence[Pair]], Iterable[PairSpeed]],
    least_of: Callable[[Sequence[PairSpeed]], Mapping[Pair, float]],
    say: Callable[[str], None],
) -> tuple[PairSpeed, ...]:
    """The speed of every pair, each way; the better of two tries for pairs below the minimum.

    A node may stall for a moment; a bad cable is always slow. The slow pairs of the first try run together again: a
    link that they share, as between two switches, is then slow for both again.

    Args:
        names: of the nodes.
        stream: runs disjoint pairs at once; a pair that it leaves out of the second try keeps its first figure.
        least_of: minimum in Gbit/s by sender and receiver, from the first try; missing pairs have none.
        say: is called with each stage in a few words.
    """
    found: dict[Pair, PairSpeed] = {}
    rounds = round_robin(names)
    for number, pairs in enumerate(rounds, 1):
        say(f"measuring a stream between every two nodes, round {number} of {len(rounds)}")
        for way in _both_ways(pairs):
            found |= {(one.source, one.target): one for one in stream(way)}
    least = least_of(tuple(found.values()))
    slow = {pair for pair, one in found.items() if one.gbit_per_s is not None and one.gbit_per_s < least.get(pair, 0.0)}
    if slow:
        say("measuring a slow stream once more" if len(slow) == 1 else f"measuring {len(slow)} slow streams once more")
    for way in (way for pairs in rounds for way in _both_ways(pairs)):
        again = [pair for pair in way if pair in slow]
        for one in stream(again) if again else ():
            found[one.source, one.target] = _better(found[one.source, one.target], one)
    return tuple(found.values())


def _both_ways(pairs: Sequence[Pair]) -> tuple[Sequence[Pair], Sequence[Pair]]:
    return pairs, [(peer, caller) for caller, peer in pairs]


def _better(first: PairSpeed, second: PairSpeed) -> PairSpeed:
    if second.gbit_per_s is None:
        return first
    worse, better = sorted((first.gbit_per_s or 0.0, second.gbit_per_s))
    return msgspec.structs.replace(first, gbit_per_s=better, worse_gbit_per_s=worse)
