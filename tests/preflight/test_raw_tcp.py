from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self, cast

import pytest

from multinode.analyse.nccl_test.pair_speeds import Pair, PairSpeed, RawTcp, RoundTrip, find_odd
from multinode.core.cluster.cluster import Node
from multinode.preflight.network import raw_tcp
from multinode.transport.agent import AgentTransport

NODES = tuple(Node(name=f"n{index}") for index in range(4))
CEILINGS = dict.fromkeys((node.name for node in NODES), 0.94)


class StubHall:
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

    def ping(self, pairs: Sequence[Pair], count: int) -> Iterator[RoundTrip]:
        return (RoundTrip(source=a, target=b, median_us=50.0, p95_us=float(count)) for a, b in pairs)

    def stream(self, pairs: Sequence[Pair], seconds: float, count: int = 1) -> list[PairSpeed]:
        del count
        if seconds < 1.0:
            self.tries.update(pairs)
        return [PairSpeed(source=a, target=b, gbit_per_s=self._speed((a, b), self.tries[a, b])) for a, b in pairs]


def measure(hall: StubHall, monkeypatch: pytest.MonkeyPatch, ceilings: dict[str, float] | None = None) -> RawTcp:
    monkeypatch.setattr(raw_tcp, "Hall", hall)
    return raw_tcp.measure_raw_tcp(cast("AgentTransport", None), NODES, {}, pairs=ceilings or {})


def test_a_pair_that_stalled_once_is_not_odd_and_both_its_figures_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    hall = StubHall(lambda pair, nth: 0.3 if pair == ("n1", "n3") and nth == 1 else 0.9)
    pairs = measure(hall, monkeypatch).pairs
    assert find_odd(pairs) == ()
    assert {one.gbit_per_s for one in pairs} == {0.9}
    assert [(one.source, one.target, one.worse_gbit_per_s) for one in pairs if one.worse_gbit_per_s] == [
        ("n1", "n3", 0.3)
    ]
    assert hall.tries.total() == 13


def test_a_pair_that_is_slow_again_is_odd(monkeypatch: pytest.MonkeyPatch) -> None:
    hall = StubHall(lambda pair, _nth: 0.3 if pair == ("n1", "n3") else 0.9)
    (odd,) = find_odd(measure(hall, monkeypatch).pairs)
    assert (odd.kind, odd.nodes) == ("one-way", ("n1", "n3"))


def test_what_all_fall_short_of_is_tried_again_where_the_links_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    hall = StubHall(lambda _pair, _nth: 0.5)
    assert measure(hall, monkeypatch).pairs[0].worse_gbit_per_s is None
    again = StubHall(lambda _pair, nth: 0.5 if nth == 1 else 0.93)
    assert find_odd(measure(again, monkeypatch, CEILINGS).pairs, CEILINGS) == ()
    assert again.tries.total() == 24
