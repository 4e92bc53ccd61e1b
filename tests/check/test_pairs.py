from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Self, cast

import pytest

from multinode.check import connectivity as pairs
from multinode.cluster.cluster import Node
from multinode.traffic.pair_speeds import Pair, PairSpeed, find_odd
from multinode.transport.agent import AgentTransport

NODES = tuple(Node(name=f"n{index}") for index in range(4))
CEILINGS = dict.fromkeys((node.name for node in NODES), 0.94)


class StubTest:
    """Streams as fast as `speed(pair, nth try)` says."""

    errors: Sequence[Any] = ()

    def __init__(self, speed: Callable[[Pair, int], float]) -> None:
        self._speed = speed
        self.tries: Counter[Pair] = Counter()

    def __call__(self, *_: object) -> Self:
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def stream(self, pairs: Sequence[Pair], seconds: float) -> list[PairSpeed]:
        assert seconds > 0
        self.tries.update(pairs)
        return [PairSpeed(source=a, target=b, gbit_per_s=self._speed((a, b), self.tries[a, b])) for a, b in pairs]


def measure(
    test: StubTest, monkeypatch: pytest.MonkeyPatch, ceilings: dict[str, float] | None = None
) -> tuple[PairSpeed, ...]:
    monkeypatch.setattr(pairs, "ConnectivityTest", test)
    return pairs.measure_pairs(cast("AgentTransport", None), NODES, {}, ceilings or {})


def test_a_pair_that_stalled_once_is_not_odd_and_both_its_figures_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    test = StubTest(lambda pair, nth: 0.3 if pair == ("n1", "n3") and nth == 1 else 0.9)
    found = measure(test, monkeypatch)
    assert find_odd(found) == ()
    assert {one.gbit_per_s for one in found} == {0.9}
    assert [(one.source, one.target, one.worse_gbit_per_s) for one in found if one.worse_gbit_per_s] == [
        ("n1", "n3", 0.3)
    ]
    assert test.tries.total() == 13


def test_a_pair_that_is_slow_again_is_odd(monkeypatch: pytest.MonkeyPatch) -> None:
    test = StubTest(lambda pair, _nth: 0.3 if pair == ("n1", "n3") else 0.9)
    (odd,) = find_odd(measure(test, monkeypatch))
    assert (odd.code, odd.nodes) == ("odd_one_way", ("n1", "n3"))


def test_what_all_fall_short_of_is_tried_again_where_the_links_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    test = StubTest(lambda _pair, _nth: 0.5)
    assert measure(test, monkeypatch)[0].worse_gbit_per_s is None
    again = StubTest(lambda _pair, nth: 0.5 if nth == 1 else 0.93)
    assert find_odd(measure(again, monkeypatch, CEILINGS), CEILINGS) == ()
    assert again.tries.total() == 24
