from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import permutations
from typing import Any, Self, cast

import pytest

from multinode.check import connectivity as asked
from multinode.check.connectivity import (
    Attempted,
    ConnectivityPlan,
    ConnectivityResult,
    Listening,
    choose_pairs,
    launch_pairs,
    round_robin,
    run_connectivity_test,
    stream_pairs,
)
from multinode.cluster.cluster import Node
from multinode.errors import AuthError, MultinodeError, NodeFailed
from multinode.traffic.pair_speeds import Pair, PairSpeed, find_odd
from multinode.transport.agent import AgentArchive, AgentTransport
from multinode.transport.fake import FakeTransport

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
    assert network.said[-1] == "measuring a slow stream again"


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


NODES = tuple(Node(name=name) for name in "ab")
ADDRESSES = {"a": "10.0.0.1", "b": "10.0.0.2"}
BOTH_WAYS = ConnectivityPlan(pairs=(("a", "b"), ("b", "a")), master_port=29500, ephemeral=1)
ENDED = {"kind": "ended"}


def listening(*ports: int, **failed: str) -> dict[str, Any]:
    return {"kind": "listening", "ports": list(ports), "failed": failed}


def attempts(addr: str, *errors: str | None) -> dict[str, Any]:
    results = [{"addr": addr, "port": 29500 + i, "error": error, "ms": 0.5} for i, error in enumerate(errors)]
    return {"kind": "attempts", "results": results}


def meet(
    plan: ConnectivityPlan, **answers: Any
) -> tuple[ConnectivityResult, tuple[MultinodeError, ...], FakeTransport]:
    """Nodes that answer with these records, or raise these errors."""

    def handle(node: Node, _command: str, _stdin: bytes) -> list[bytes]:
        answer = answers[node.name]
        if isinstance(answer, Exception):
            raise answer
        return [json.dumps(record).encode() + b"\n" for record in answer]

    fake = FakeTransport(handle)
    agent = AgentTransport(fake, AgentArchive(b""))
    result = run_connectivity_test(agent, NODES, ADDRESSES, plan)
    agent.close()
    assert all(stream.is_closed for stream in fake.streams)
    return *result, fake


def test_what_every_node_found_at_every_other_is_kept_in_order() -> None:
    connectivity, errors, fake = meet(
        BOTH_WAYS,
        a=[listening(29500, 40000), attempts("10.0.0.2", None), ENDED],
        b=[listening(29501), attempts("10.0.0.1", None, "timed out"), ENDED],
    )
    assert errors == ()
    assert connectivity.listening == (Listening(node="a", ports=(29500, 40000)), Listening(node="b", ports=(29501,)))
    assert connectivity.attempts == (
        Attempted(node="a", peer="b", addr="10.0.0.2", port=29500, error=None, ms=0.5),
        Attempted(node="b", peer="a", addr="10.0.0.1", port=29500, error=None, ms=0.5),
        Attempted(node="b", peer="a", addr="10.0.0.1", port=29501, error="timed out", ms=0.5),
    )
    tokens = {json.loads(stdin)["token"] for _, _, stdin in fake.ran}
    assert len(tokens) == 1
    assert len(tokens.pop()) == 32


def test_two_meetings_never_share_a_secret() -> None:
    tokens = set()
    for _ in range(2):
        *_, fake = meet(BOTH_WAYS, a=[listening(), ENDED], b=[listening(), ENDED])
        tokens.add(json.loads(fake.ran[0][2])["token"])
    assert len(tokens) == 2


def test_streams_go_both_ways_and_add_up_over_their_connections() -> None:
    def arrived(size_bytes: int | None, error: str | None = None) -> dict[str, Any]:
        return {"kind": "streams", "results": [{"size_bytes": size_bytes, "time_s": 0.5, "error": error}]}

    plan = ConnectivityPlan(pairs=(), master_port=29500, stream_s=0.3)
    connectivity, errors, _ = meet(
        plan,
        a=[listening(40000), arrived(62_500_000), ENDED],
        b=[listening(40000), arrived(None, "wrong answer"), ENDED],
    )
    assert errors == ()
    assert connectivity.streams == (
        PairSpeed(source="a", target="b", gbit_per_s=1.0),
        PairSpeed(source="b", target="a", error="wrong answer"),
    )


def streams(*speeds: float) -> list[dict[str, Any]]:
    return [{"kind": "streams", "results": [{"size_bytes": speed * 125e6, "time_s": 1.0}]} for speed in speeds]


def test_a_stream_that_was_slow_for_a_moment_is_tried_again() -> None:
    plan = ConnectivityPlan(
        pairs=(), master_port=29500, stream_s=0.3, least_gbit_per_s={("a", "b"): 0.66, ("b", "a"): 0.66}
    )
    connectivity, errors, _ = meet(
        plan,
        a=[listening(40000), *streams(0.292, 0.94), ENDED],
        b=[listening(40000), *streams(0.94), ENDED],
    )
    assert errors == ()
    assert connectivity.streams == (
        PairSpeed(source="a", target="b", gbit_per_s=0.94, worse_gbit_per_s=0.292),
        PairSpeed(source="b", target="a", gbit_per_s=0.94),
    )


def test_streams_that_would_outlast_the_meeting_are_left_out() -> None:
    plan = ConnectivityPlan(pairs=(("a", "b"),), master_port=29500, ephemeral=1, stream_s=0.3, deadline_s=10.0)
    connectivity, errors, fake = meet(
        plan, a=[listening(40000), attempts("10.0.0.2", None), ENDED], b=[listening(40000), ENDED]
    )
    assert (connectivity.streams, errors) == ((), ())
    assert len(connectivity.attempts) == 1
    assert [json.loads(stdin.splitlines()[0])["deadline_s"] for _, _, stdin in fake.ran] == [10.0, 10.0]


@pytest.mark.parametrize(
    "answers",
    [
        AuthError("refused"),
        [{"kind": "listening", "ports": "all"}],
        [{"kind": "listening", "failed": {"http": "x"}}],
        [listening(29500), {"kind": "attempts"}],
        [listening(29500), {"kind": "attempts", "results": []}],
        [listening(29500), {"kind": "attempts", "results": {"b": 1}}],
        [listening(29500), {"kind": "attempts", "results": ["yes"]}],
        [listening(29500), {"kind": "attempts", "results": [{"addr": "x", "port": "y"}]}],
        [listening(29500), {"kind": "streams", "results": [{}]}],
        [listening(29500)],
    ],
)
def test_a_node_that_cannot_be_asked_or_lies_hides_no_other(answers: Any) -> None:
    plan = ConnectivityPlan(pairs=(("a", "b"), ("b", "a")), master_port=29500)
    connectivity, errors, _ = meet(plan, a=[listening(29500), attempts("10.0.0.2", None), ENDED], b=answers)
    assert [error.node for error in errors] == ["b"]
    assert isinstance(errors[0], MultinodeError)
    if not isinstance(answers, Exception) and answers[0] == listening(29500):
        assert connectivity.attempts == (Attempted(node="a", peer="b", addr="10.0.0.2", port=29500, ms=0.5),)


def test_a_lie_is_the_nodes_failure_and_not_a_lost_contact() -> None:
    _, errors, _ = meet(BOTH_WAYS, a=[{"kind": "listening", "ports": "all"}], b=[listening(), ENDED])
    assert isinstance(errors[0], NodeFailed)
    assert "cannot read its answer" in errors[0].message


FOUR = tuple(Node(name=f"n{index}") for index in range(4))
CEILINGS = dict.fromkeys((node.name for node in FOUR), 0.94)


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
    monkeypatch.setattr(asked, "ConnectivityTest", test)
    return asked.measure_pairs(cast("AgentTransport", None), FOUR, {}, ceilings or {})


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
