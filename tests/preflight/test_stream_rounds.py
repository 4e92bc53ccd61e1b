from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import permutations

import pytest

from multinode.analyse.nccl_test.pair_speeds import Pair, PairSpeed
from multinode.preflight.network.meeting import repeat_slow, stream_all

NAMES = "abcde"
LEAST = dict.fromkeys(permutations(NAMES, 2), 0.66)


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
        first = stream_all(NAMES, self.stream, self.said.append)
        streams = repeat_slow(first, NAMES, LEAST if least is None else least, self.stream, self.said.append)
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
