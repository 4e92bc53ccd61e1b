"""What is tried: levers and settings that may be faster than one node, the best of each kind first."""

from __future__ import annotations

import pytest

from multinode.predict.advice import RankedOption, rank_options
from multinode.stats.estimate import exactly, of_bounds
from multinode.tune.trial import Shortlist, candidate_of, make_shortlist, steps_needed
from tests.golden import Golden, error_of
from tests.levers.compressed import compressed
from tests.predict.test_advice import changed, named, state

ROUNDS = ("16 steps", "16 steps in fp16", "64 steps in fp16")


def ranked(gbit_per_s: float = 0.1) -> tuple[RankedOption, ...]:
    return rank_options(state(gbit_per_s=gbit_per_s))


def with_beside(one: RankedOption, interval: tuple[float, float]) -> RankedOption:
    return one._replace(advice=changed(one.advice, against_one_node=of_bounds(1.0, interval)))


def hopeful() -> tuple[RankedOption, ...]:
    """All of them as if they may be faster than one node."""
    return tuple(with_beside(one, (0.5, 2.0)) for one in ranked())


def names(found: Shortlist) -> list[str]:
    return [one.advice.name for one in found.chosen]


def reasons(found: Shortlist) -> dict[str, str]:
    return {one.name: one.reason for one in found.left_out}


def test_each_kind_comes_once_before_any_comes_twice() -> None:
    found = make_shortlist(hopeful(), steps=1000, most=20)
    kinds = [one.option.kind for one in found.chosen]
    assert {"averaging", "outer", "gradients", "accumulation", "pair"} <= set(kinds)
    # No purchase, no other nodes, and no other model.
    assert not {"link", "nodes", "method"} & set(kinds)
    gains = [one.advice.gain.value for one in found.chosen]
    assert gains == sorted(gains, reverse=True)
    few = make_shortlist(hopeful(), steps=1000, most=4)
    assert len({one.option.kind for one in few.chosen}) == 4
    assert set(names(found)) - set(names(few)) == {name for name, reason in reasons(few).items() if reason == "more"}


@pytest.mark.parametrize(
    ("steps", "too_long"),
    [
        # Fifteen rounds of DiLoCo, on up to 1.53 times the samples.
        (629, []),
        # Fewer are not enough for its outer momentum.
        (628, ["DiLoCo every 64 steps in fp16"]),
        (120, ["DiLoCo every 64 steps in fp16"]),
        (119, ["DiLoCo every 64 steps in fp16", "local SGD every 64 steps in fp16"]),
        (33, ["DiLoCo every 64 steps in fp16", "local SGD every 64 steps in fp16"]),
        (32, ["DiLoCo every 64 steps in fp16", *(f"local SGD every {every}" for every in ROUNDS)]),
    ],
)
def test_a_round_needs_as_many_steps_as_show_it(steps: int, too_long: list[str]) -> None:
    found = make_shortlist(hopeful(), steps=steps, most=20)
    assert sorted(one.name for one in found.left_out if one.reason == "short" and " every " in one.name) == too_long
    needed = {one.name: one.needs_steps for one in found.left_out if one.reason == "short"}
    assert needed.get("DiLoCo every 64 steps in fp16", 629) == 629


def test_accumulation_has_fewer_steps_for_as_many_samples() -> None:
    four = next(one for one in hopeful() if one.advice.name == "gradient accumulation 4")
    assert steps_needed(four) == 32


def test_power_sgd_needs_more_steps_than_it_leaves_as_they_are() -> None:
    one = next(one for one in hopeful() if one.advice.name == "gradients in fp16")
    settings = changed(one.option.after.settings, levers=compressed("powersgd:4"))
    low_rank = one._replace(option=changed(one.option, after=changed(one.option.after, settings=settings)))
    assert (steps_needed(one), steps_needed(low_rank)) == (8, 32)


def test_what_is_surely_slower_than_one_node_is_not_tried() -> None:
    found = make_shortlist([with_beside(one, (0.1, 0.9)) for one in ranked()], steps=1000, most=20)
    assert names(found) == []
    assert set(reasons(found).values()) == {"slower"}


def test_averaging_that_reaches_a_loss_after_one_node_is_not_tried_unless_it_is_picked() -> None:
    no_slower = [with_beside(one, (1.05, 1.2)) for one in ranked()]
    found = make_shortlist(no_slower, steps=1000, most=20)
    late = {name for name, reason in reasons(found).items() if reason == "late"}
    # By samples/s all of them are faster than one node; those that exchange in every step are judged by that.
    assert late == {f"local SGD every {every}" for every in ROUNDS}
    assert {"local SGD every 4 steps", "gradients in fp16"} <= set(names(found))
    picked = make_shortlist(no_slower, steps=1000, most=1, picks=("local SGD every 64",))
    assert names(picked) == ["local SGD every 64 steps in fp16"]


def test_by_loss_the_best_averaging_is_the_one_that_reaches_it_first() -> None:
    """At a fast link, rounds of 64 steps are faster still, but take more samples than their speed is worth."""
    every = {name: next(one for one in hopeful() if one.advice.name == f"local SGD every {name}") for name in ROUNDS}
    fast = [
        one._replace(advice=changed(one.advice, gain=exactly(gain)))
        for one, gain in zip(every.values(), (1.4, 1.45, 1.5), strict=True)
    ]
    assert names(make_shortlist(fast, steps=1000, most=1)) == ["local SGD every 16 steps in fp16"]
    assert names(make_shortlist(fast, steps=1000, most=1, judge="speed")) == ["local SGD every 64 steps in fp16"]


def test_what_gains_little_or_does_not_fit_is_not_tried() -> None:
    one = next(one for one in hopeful() if one.advice.name == "gradients in fp16")
    little = one._replace(advice=changed(one.advice, gain=exactly(1.04)))
    large = one._replace(advice=changed(one.advice, name="large", fits=False))
    by_hand = one._replace(advice=changed(one.advice, name="by hand", change=None))
    found = make_shortlist([little, large, by_hand], steps=1000, most=20)
    assert names(found) == []
    assert reasons(found) == {"gradients in fp16": "little", "large": "memory"}


def test_a_candidate_has_what_was_predicted_of_it() -> None:
    one = next(one for one in ranked() if one.advice.name == "gradients in fp16")
    found = candidate_of(one, "fp16")
    advice = named(tuple(each.advice for each in ranked()), "gradients in fp16")
    assert (found.label, found.name, found.kind, found.effects) == ("fp16", advice.name, "gradients", advice.effects)
    assert (found.nodes, found.workers_per_node) == (2, 1)
    assert found.change.options == "--grad-compress fp16"
    assert found.predicted_samples_per_s == advice.outlook.samples_per_s
    assert found.against_one_node == advice.against_one_node
    assert found.samples_ratio == 1
    rounds = next(one for one in ranked() if one.advice.name == "local SGD every 16 steps")
    assert candidate_of(rounds, "rounds").samples_ratio == pytest.approx(1 / 0.675)


def test_what_is_picked_is_tried_whatever_is_predicted_of_it_but_not_where_it_does_not_fit(golden: Golden) -> None:
    one = next(one for one in hopeful() if one.advice.name == "gradients in fp16")
    slow = with_beside(one._replace(advice=changed(one.advice, gain=exactly(0.9))), (0.1, 0.9))
    large = one._replace(advice=changed(one.advice, name="large", fits=False))
    assert names(make_shortlist([slow, large], steps=64, most=4, picks=("fp16",))) == ["gradients in fp16"]
    refused = error_of(make_shortlist, [slow, large], steps=64, most=4, picks=("large",))
    golden.check_errors("refused_picks", {"--only large": refused})


def test_by_speed_no_run_is_too_short() -> None:
    by_speed = make_shortlist(hopeful(), steps=20, most=20, judge="speed")
    assert "short" not in reasons(by_speed).values()
    assert "DiLoCo every 64 steps in fp16" in names(by_speed)
    assert "one node" not in names(by_speed)
