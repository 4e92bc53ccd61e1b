from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import permutations

import pytest

from multinode.check.connectivity import choose_pairs, launch_pairs, round_robin, stream_pairs
from multinode.traffic.pair_speeds import Pair, PairSpeed

NAMES = "abcde"
LEAST = dict.fromkeys(permutations(NAMES, 2), 0.66)


def rng(seed: int) -> random.Random:
    return random.Random(seed)  # noqa: S311 - the same throws each time are wanted


def names(count: int) -> list[str]:
    return [f"n{index}" for index in range(count)]


@pytest.mark.parametrize("count", [1, 2, 3, 16])
def test_up_to_16_nodes_every_ordered_pair_is_tried_once(count: int) -> None:
    pairs = choose_pairs(names(count), rng(1))
    assert len(pairs) == len(set(pairs)) == count * (count - 1)
    assert all(caller != peer for caller, peer in pairs)


def test_above_16_everybody_calls_the_ring_node_0_and_some_others() -> None:
    nodes = names(64)
    pairs = choose_pairs(nodes, rng(1))
    assert len(pairs) == len(set(pairs)) < 64 * 6
    assert {(caller, "n0") for caller in nodes[1:]} <= set(pairs)
    assert {(nodes[index], nodes[(index + 1) % 64]) for index in range(64)} <= set(pairs)
    assert {(nodes[index], nodes[index - 1]) for index in range(64)} <= set(pairs)
    assert len(pairs) > len(launch_pairs(nodes)) + 64
    assert choose_pairs(nodes, rng(2)) != pairs


def test_two_nodes_call_each_other_before_a_launch() -> None:
    assert set(launch_pairs(["a", "b"])) == {("a", "b"), ("b", "a")}
    assert launch_pairs(["a"]) == ()


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8])
def test_in_a_tournament_everybody_meets_everybody_once_and_nobody_twice_in_a_round(count: int) -> None:
    rounds = round_robin(names(count))
    met = [frozenset(pair) for pairs in rounds for pair in pairs]
    assert len(met) == len(set(met)) == count * (count - 1) // 2
    for pairs in rounds:
        busy = [name for pair in pairs for name in pair]
        assert len(busy) == len(set(busy))
    assert len(rounds) == (0 if count == 1 else count - 1 + count % 2)


class Network:
    """Streams as fast as `speed(pair, nth try)` says, and a record of who streamed at once."""

    def __init__(self, speed: Callable[[Pair, int], float | None]) -> None:
        self._speed = speed
        self.ways: list[tuple[Pair, ...]] = []
        self.said: list[str] = []

    def stream(self, pairs: Sequence[Pair]) -> tuple[PairSpeed, ...]:
        self.ways.append(tuple(pairs))
        return tuple(self._streamed(pair) for pair in pairs)

    def measure(self, least: dict[Pair, float] | None = None) -> dict[Pair, tuple[float | None, float | None]]:
        """The better and the worse figure, by pair."""
        streams = stream_pairs(NAMES, self.stream, lambda _: LEAST if least is None else least, self.said.append)
        return {(one.source, one.target): (one.gbit_per_s, one.worse_gbit_per_s) for one in streams}

    def _streamed(self, pair: Pair) -> PairSpeed:
        speed = self._speed(pair, sum(pair in way for way in self.ways))
        return PairSpeed(source=pair[0], target=pair[1], gbit_per_s=speed, error=None if speed else "timed out")


def test_every_pair_streams_once_each_way_and_no_node_has_two_at_once() -> None:
    network = Network(lambda _pair, _nth: 0.94)
    assert network.measure() == dict.fromkeys(permutations(NAMES, 2), (0.94, None))
    assert sorted(pair for way in network.ways for pair in way) == list(permutations(NAMES, 2))
    for way in network.ways:
        nodes = [name for pair in way for name in pair]
        assert len(nodes) == len(set(nodes))


@pytest.mark.parametrize(("second", "found"), [(0.93, (0.93, 0.29)), (0.30, (0.30, 0.29)), (0.20, (0.29, 0.20))])
def test_a_slow_stream_is_tried_once_more_and_the_better_try_counts(second: float, found: tuple[float, float]) -> None:
    network = Network(lambda pair, nth: 0.94 if pair != ("b", "d") else 0.29 if nth == 1 else second)
    assert network.measure() == dict.fromkeys(permutations(NAMES, 2), (0.94, None)) | {("b", "d"): found}
    assert network.ways[-1] == (("b", "d"),)
    assert sum(len(way) for way in network.ways) == 21
    assert network.said[-1] == "measuring a slow stream once more"


def test_slow_streams_that_met_meet_again() -> None:
    network = Network(lambda _pair, _nth: 0.3)
    network.measure()
    half = len(network.ways) // 2
    assert network.ways[half:] == network.ways[:half]


def test_a_second_try_that_fails_leaves_the_first_one() -> None:
    network = Network(lambda pair, nth: 0.94 if pair != ("a", "b") else 0.29 if nth == 1 else None)
    assert network.measure()["a", "b"] == (0.29, None)


def test_what_failed_and_what_has_no_due_is_not_tried_again() -> None:
    network = Network(lambda pair, _nth: None if pair == ("a", "b") else 0.01)
    found = network.measure({("a", "b"): 0.66})
    assert (found["a", "b"], found["b", "a"]) == ((None, None), (0.01, None))
    assert sum(len(way) for way in network.ways) == 20
