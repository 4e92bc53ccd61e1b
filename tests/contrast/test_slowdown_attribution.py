from __future__ import annotations

from typing import Any

import msgspec
import pytest

from multinode.contrast.figures import Side, SlowdownAttribution
from multinode.contrast.slowdown_attribution import CandidateLoss, attribute_slowdown
from multinode.stats.unknown import Unknown
from tests import make
from tests.contrast.made_up_sides import SETTINGS, side_of, split_of


def side(role: str, step_ms: float, nodes: int = 1, *, accumulation: int = 1, **known: Any) -> Side:
    """A side of so many ms per step; its rate follows."""
    settings = msgspec.structs.replace(known.pop("settings", SETTINGS), accumulation=accumulation)
    world_size = nodes * known.get("workers_per_node", 2)
    rate = 2 * accumulation * world_size / step_ms * 1000
    return side_of(role, rate, nodes, settings=settings, **known)


def alone(step_ms: float, name: str, **known: Any) -> Side:
    return side("each-node", step_ms, node_names=(name,), **known)


def loss_of(baseline: Side, candidate: Side, *each: Side, mode: str = "scale-out") -> SlowdownAttribution:
    return attribute_slowdown(CandidateLoss(baseline=baseline, candidate=candidate, alone=each, mode=mode))


def figures(loss: SlowdownAttribution) -> tuple[float | None, ...]:
    return loss.ideal_ms, loss.node_ms, loss.network_ms, loss.other_ms


@pytest.mark.parametrize(("mode", "workers"), [("scale-out", 2), ("same-workers", 1)])
def test_what_is_exposed_beyond_the_baselines_own_is_the_networks(mode: str, workers: int) -> None:
    baseline = side("baseline", 170.0, split=split_of(170.0, 10.0))
    candidate = side("candidate", 1342.0, 2, workers_per_node=workers, split=split_of(1342.0, 1176.0))
    loss = loss_of(baseline, candidate, mode=mode)
    assert figures(loss) == pytest.approx((170.0, 0.0, 1166.0, 6.0))
    assert loss.cause == "network"


def test_the_shares_of_the_steps_that_were_split_are_of_the_median_step() -> None:
    baseline = side("baseline", 100.0, split=split_of(100.0))
    candidate = side("candidate", 200.0, 2, split=split_of(400.0, 100.0))
    assert loss_of(baseline, candidate).network_ms == pytest.approx(50.0)


def test_a_fixed_global_batch_is_held_against_as_many_micro_batches() -> None:
    # Of 100 ms, 84 ms are 4 micro-batches: 2 of them and what a step does once take 58.
    baseline = side("baseline", 100.0, accumulation=4, split=split_of(100.0))
    candidate = side("candidate", 158.0, 2, accumulation=2, split=split_of(158.0, 100.0))
    loss = loss_of(baseline, candidate, mode="fixed-global-batch")
    assert figures(loss) == pytest.approx((58.0, 0.0, 100.0, 0.0))
    assert loss.cause == "network"


def test_a_fixed_global_batch_of_unknown_settings_follows_from_the_workers() -> None:
    baseline = side_of("baseline", 40.0, settings=None, step_ms=100.0, split=split_of(100.0))
    candidate = side_of("candidate", 80.0, 2, settings=None, step_ms=58.0, split=split_of(58.0))
    loss = loss_of(baseline, candidate, mode="fixed-global-batch")
    assert loss.ideal_ms == pytest.approx(58.0)
    assert loss.cause == "none"


def test_zero_2_exchanges_in_every_micro_batch_and_has_less_to_with_fewer() -> None:
    zero = msgspec.structs.replace(SETTINGS, strategy="ZeRO-2")
    baseline = side("baseline", 100.0, settings=zero, accumulation=4, split=split_of(100.0, 40.0))
    candidate = side("candidate", 158.0, 2, settings=zero, accumulation=2, split=split_of(158.0, 120.0))
    loss = loss_of(baseline, candidate, mode="fixed-global-batch")
    assert loss.ideal_ms == pytest.approx(16 + 84 / 2)
    assert loss.network_ms == pytest.approx(120 - 40 / 2)


def test_stored_runs_of_unknown_settings_are_held_against_the_samples_that_they_made() -> None:
    baseline = side_of("baseline", 80.0, settings=None, step_ms=100.0)  # 8 samples on 2 workers
    candidate = side_of("candidate", 80.0, 2, settings=None, step_ms=100.0)  # 8 samples on 4
    assert loss_of(baseline, candidate, mode="compare").ideal_ms == pytest.approx(50.0)


def test_a_slow_node_is_not_a_slow_network() -> None:
    baseline = side("baseline", 100.0, split=split_of(100.0))
    candidate = side("candidate", 210.0, 2, split=split_of(210.0, 10.0, wait_ms=50.0))
    loss = loss_of(baseline, candidate, baseline, alone(200.0, "n2"))
    assert figures(loss) == pytest.approx((100.0, 100.0, 10.0, 0.0))
    assert (loss.cause, loss.node) == ("node", "n2")
    assert loss.relative == pytest.approx(0.5)


def test_the_fastest_node_is_the_measure_even_where_the_baseline_is_the_slow_one() -> None:
    baseline = side("baseline", 200.0, split=split_of(200.0))
    candidate = side("candidate", 205.0, 2, split=split_of(205.0, 5.0))
    loss = loss_of(baseline, candidate, baseline, alone(100.0, "n2", split=split_of(100.0)))
    assert figures(loss) == pytest.approx((100.0, 100.0, 5.0, 0.0))
    assert (loss.cause, loss.node) == ("node", "n1")


def test_nodes_that_may_be_as_fast_as_each_other_are_alike() -> None:
    baseline = side("baseline", 100.0, split=split_of(100.0), spread=0.05)
    candidate = side("candidate", 250.0, 2, split=split_of(250.0, 150.0))
    loss = loss_of(baseline, candidate, baseline, alone(106.0, "n2", spread=0.05))
    assert (loss.node_ms, loss.node, loss.cause) == (0.0, None, "network")


def test_of_a_node_with_fewer_workers_than_alone_the_wait_counts() -> None:
    baseline = side("baseline", 100.0, split=split_of(100.0))
    known: dict[str, Any] = {"workers_per_node": 1, "stragglers": ("n2",), "late_ms": 40.0}
    candidate = side("candidate", 145.0, 2, split=split_of(145.0, 5.0, wait_ms=20.0), **known)
    loss = loss_of(baseline, candidate, baseline, alone(200.0, "n2"), mode="same-workers")
    assert figures(loss) == pytest.approx((100.0, 40.0, 5.0, 0.0))
    assert (loss.cause, loss.node) == ("node", "n2")
    assert loss.relative == pytest.approx(0.5)


def test_without_each_node_those_that_the_others_wait_for_are_the_slow_ones() -> None:
    baseline = side("baseline", 100.0, split=split_of(100.0))
    known: dict[str, Any] = {"stragglers": ("n2",), "late_ms": 60.0}
    loss = loss_of(baseline, side("candidate", 170.0, 2, split=split_of(170.0, 10.0, wait_ms=30.0), **known))
    assert figures(loss) == pytest.approx((100.0, 60.0, 10.0, 0.0))
    assert (loss.cause, loss.node) == ("node", "n2")
    assert loss.relative == pytest.approx(1 - 60 / 160)


def test_a_late_node_that_the_baseline_ran_on_was_as_slow_there() -> None:
    baseline = side("baseline", 160.0, split=split_of(160.0))
    known: dict[str, Any] = {"stragglers": ("n1",), "late_ms": 60.0}
    loss = loss_of(baseline, side("candidate", 170.0, 2, split=split_of(170.0, 10.0, wait_ms=30.0), **known))
    assert figures(loss) == pytest.approx((100.0, 60.0, 10.0, 0.0))
    assert (loss.cause, loss.node) == ("node", "n1")


@pytest.mark.parametrize(("exposed_ms", "cause"), [(150.0, "network"), (40.0, "node")])
def test_of_both_the_larger_is_the_cause(exposed_ms: float, cause: str) -> None:
    baseline = side("baseline", 100.0, split=split_of(100.0))
    step_ms = 180.0 + exposed_ms
    candidate = side("candidate", step_ms, 2, split=split_of(step_ms, exposed_ms))
    loss = loss_of(baseline, candidate, baseline, alone(180.0, "n2"))
    assert loss.cause == cause


def test_without_splits_equal_nodes_leave_the_network_and_that_is_said() -> None:
    baseline, candidate = side("baseline", 100.0), side("candidate", 300.0, 2)
    loss = loss_of(baseline, candidate, baseline, alone(101.0, "n2"))
    assert figures(loss) == pytest.approx((100.0, 0.0, 200.0, 0.0))
    assert loss.cause == "network"


def test_without_splits_a_slow_node_explains_what_it_can() -> None:
    baseline, candidate = side("baseline", 100.0), side("candidate", 220.0, 2)
    loss = loss_of(baseline, candidate, baseline, alone(200.0, "n2"))
    assert figures(loss) == pytest.approx((100.0, 100.0, 20.0, 0.0))
    assert loss.cause == "node"


def test_without_splits_and_each_node_nobody_is_blamed() -> None:
    candidate = side("candidate", 300.0, 2, exposed_ms=Unknown("no counters were there"))
    loss = loss_of(side("baseline", 100.0), candidate)
    assert (loss.cause, loss.node_ms, loss.network_ms, loss.other_ms) == ("unknown", None, None, None)


def test_one_worker_needs_no_split_to_have_nothing_exposed() -> None:
    candidate = side("candidate", 300.0, 2, workers_per_node=1, split=split_of(300.0, 195.0))
    loss = loss_of(side("baseline", 100.0, workers_per_node=1), candidate)
    assert loss.network_ms == pytest.approx(195.0)
    assert loss.cause == "network"


def test_steps_as_long_as_they_should_be_lose_nothing() -> None:
    baseline = side("baseline", 100.0, split=split_of(100.0))
    loss = loss_of(baseline, side("candidate", 103.0, 2, split=split_of(103.0, 3.0)))
    assert loss.cause == "none"
    faster = loss_of(baseline, side("candidate", 50.0, 2, split=split_of(50.0)))
    assert faster.cause == "none"


def test_what_neither_explains_is_named_by_the_part_that_grew() -> None:
    baseline = side("baseline", 100.0, split=split_of(100.0))
    # Its steps were split where they took but half as long.
    loss = loss_of(baseline, side("candidate", 180.0, 2, split=split_of(90.0, 1.0, data_ms=39.0)))
    assert loss.other_ms == pytest.approx(78.0)
    assert loss.cause == "unknown"


def test_a_network_that_costs_is_named_though_spreading_out_made_computing_faster() -> None:
    baseline = side("baseline", 100.0, workers_per_node=4, split=split_of(100.0))
    candidate = side("candidate", 101.0, 2, split=split_of(101.0, 20.0))
    loss = loss_of(baseline, candidate, mode="same-workers")
    assert loss.other_ms == pytest.approx(-19.0)
    assert loss.cause == "network"


def test_a_gpu_that_does_not_tell_its_computing_is_still_compared() -> None:
    told = make.split(200.0, exposed_ms=100.0, wait_ms=0.0)
    baseline = side("baseline", 100.0, split=make.split(100.0, exposed_ms=0.0, wait_ms=0.0))
    loss = loss_of(baseline, side("candidate", 200.0, 2, split=told))
    assert figures(loss) == pytest.approx((100.0, 0.0, 100.0, 0.0))
