from __future__ import annotations

import random

import pytest

from multinode.preflight.network.meeting import choose_pairs, launch_pairs, tournament


def dice(seed: int) -> random.Random:
    return random.Random(seed)  # noqa: S311 - the same throws each time are wanted


def names(count: int) -> list[str]:
    return [f"n{index}" for index in range(count)]


@pytest.mark.parametrize("count", [1, 2, 3, 16])
def test_up_to_16_nodes_every_ordered_pair_is_tried_once(count: int) -> None:
    pairs = choose_pairs(names(count), dice(1))
    assert len(pairs) == len(set(pairs)) == count * (count - 1)
    assert all(caller != peer for caller, peer in pairs)


def test_above_16_everybody_calls_the_ring_node_0_and_some_others() -> None:
    nodes = names(64)
    pairs = choose_pairs(nodes, dice(1))
    assert len(pairs) == len(set(pairs)) < 64 * 6
    assert {(caller, "n0") for caller in nodes[1:]} <= set(pairs)
    assert {(nodes[index], nodes[(index + 1) % 64]) for index in range(64)} <= set(pairs)
    assert {(nodes[index], nodes[index - 1]) for index in range(64)} <= set(pairs)
    assert len(pairs) > len(launch_pairs(nodes)) + 64
    assert choose_pairs(nodes, dice(2)) != pairs


def test_two_nodes_call_each_other_before_a_launch() -> None:
    assert set(launch_pairs(["a", "b"])) == {("a", "b"), ("b", "a")}
    assert launch_pairs(["a"]) == ()


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8])
def test_in_a_tournament_everybody_meets_everybody_once_and_nobody_twice_in_a_round(count: int) -> None:
    rounds = tournament(names(count))
    met = [frozenset(pair) for pairs in rounds for pair in pairs]
    assert len(met) == len(set(met)) == count * (count - 1) // 2
    for pairs in rounds:
        busy = [name for pair in pairs for name in pair]
        assert len(busy) == len(set(busy))
    assert len(rounds) == (0 if count == 1 else count - 1 + count % 2)
