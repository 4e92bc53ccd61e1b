"""Streams between all pairs of nodes: disjoint pairs at once, one way and then the other; slow ones a second time.

Knows neither how a stream is made nor what it should reach.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from multinode.preflight.network.meeting import Streamed
from multinode.preflight.network.pairs import Pair, tournament

__all__ = ["repeat_slow", "stream_all"]

Stream = Callable[[Sequence[Pair]], Iterable[Streamed]]
Say = Callable[[str], None]


def stream_all(names: Sequence[str], stream: Stream, say: Say) -> list[Streamed]:
    """What every pair reached, each way.

    Args:
        names: of the nodes.
        stream: lets disjoint pairs stream at once.
        say: is told each stage in a few words.
    """
    streams: list[Streamed] = []
    rounds = tournament(names)
    for number, pairs in enumerate(rounds, 1):
        say(f"measuring a stream between every two nodes, round {number} of {len(rounds)}")
        for way in _both_ways(pairs):
            streams += stream(way)
    return streams


def repeat_slow(
    streams: Iterable[Streamed], names: Sequence[str], least: Mapping[Pair, float], stream: Stream, say: Say
) -> list[Streamed]:
    """The same, with the better of two tries for those that reached less than the least.

    A node stalls for a moment, and a cable does not. The slow ones that met the first time meet again: what two pairs
    share, such as the line between two switches, is then slow for both once more.

    Args:
        streams: of the first try.
        names: as of `stream_all`.
        least: Gbit/s, by sender and receiver; a pair that is not here has none to reach.
        stream: as of `stream_all`; a pair that it leaves out keeps its first figure.
        say: as of `stream_all`.
    """
    found = {(one.node, one.peer): one for one in streams}
    slow = {pair for pair, one in found.items() if _is_below(one.gbit_per_s, least.get(pair))}
    if slow:
        say("measuring a slow stream once more" if len(slow) == 1 else f"measuring {len(slow)} slow streams once more")
    for pairs in tournament(names):
        for way in _both_ways(pairs):
            again = [pair for pair in way if pair in slow]
            for one in stream(again) if again else ():
                found[one.node, one.peer] = _better(found[one.node, one.peer], one)
    return list(found.values())


def _both_ways(pairs: Sequence[Pair]) -> tuple[Sequence[Pair], Sequence[Pair]]:
    return pairs, [(peer, caller) for caller, peer in pairs]


def _is_below(gbit_per_s: float | None, least_gbit_per_s: float | None) -> bool:
    return gbit_per_s is not None and least_gbit_per_s is not None and gbit_per_s < least_gbit_per_s


def _better(first: Streamed, second: Streamed) -> Streamed:
    """One with the figures of both tries; a second one that failed says nothing of the line."""
    if second.gbit_per_s is None:
        return first
    worse, better = sorted((first.gbit_per_s or 0.0, second.gbit_per_s))
    return msgspec.structs.replace(first, gbit_per_s=better, worse_gbit_per_s=worse)
