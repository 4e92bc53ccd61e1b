from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from multinode.predict.break_even import (
    accumulation_for,
    beats_one,
    break_even,
    link_for,
    node_gain,
    on_one_node,
)
from multinode.predict.calibration import Calibration, Residual
from multinode.predict.cost_model import Scenario, StepCosts
from multinode.predict.network_model import Link, NetworkModel
from multinode.predict.prediction import Prediction
from multinode.traffic.algorithms import Layout
from multinode.traffic.step_calls import Strategy, TrafficInputs, Work

TWO = Layout(nodes=2)
G = 14_767_104
MB = 1_000_000


def calibration(costs: StepCosts, *, trainable: int = G // 4, cap: float = 1e6) -> Calibration:
    """Of a network whose calls are bytes over bandwidth alone."""
    return Calibration(
        costs=costs,
        layout=Layout(nodes=1),
        per_device_batch=2,
        work=Work(
            strategy=Strategy.DDP,
            load=TrafficInputs(parameters=trainable, trainable=trainable, parameter_bytes=4, gradient_bytes=4),
        ),
        network=NetworkModel(link=Link(gbit_per_s=1), layout=TWO, backend="gloo", cap_gb_per_s=(cap, cap)),
        tokens_per_sample=100,
    )


def scenario(gbit_per_s: float = 1.0, nodes: int = 2, strategy: Strategy = Strategy.DDP) -> Scenario:
    layout = Layout(nodes=nodes)
    return Scenario(link=Link(gbit_per_s=gbit_per_s), layout=layout, per_device_batch=2, strategy=strategy)


def efficiency(seen: Calibration, asked: Scenario) -> float:
    """Weak scaling: samples/s per worker over those per worker on one node."""
    found, one = Prediction(seen, asked), Prediction(seen, on_one_node(seen, asked))
    return found.samples_per_s / one.samples_per_s * one.scenario.layout.workers / asked.layout.workers


COSTS = StepCosts(compute_ms=150, optimizer_ms=10, host_ms=6, hideable_share=100 / 150, overlap=0.6)
T1_S, HIDDEN_S = 0.166, 0.060


def goodput(gbit_per_s: float | None) -> float:
    assert gbit_per_s is not None
    return Link(gbit_per_s=gbit_per_s).goodput_gb_per_s * 1e9


def test_the_links_are_those_of_the_closed_forms() -> None:
    # Two nodes: W, what a NIC sends in a step, is G.
    found = break_even(calibration(COSTS), scenario(), target=0.8)
    assert goodput(found.nothing_exposed.value) == pytest.approx(G / HIDDEN_S)
    assert goodput(found.efficient.value) == pytest.approx(G / (HIDDEN_S + T1_S * (1 / 0.8 - 1)))
    assert goodput(found.beats_one.value) == pytest.approx(G / (HIDDEN_S + (2 - 1) * T1_S))


@given(st.floats(1, 1e4), st.floats(0, 1), st.floats(0.05, 0.98), st.integers(2, 16), st.integers(MB, 1000 * MB))
def test_on_the_break_even_link_the_efficiency_is_the_target(
    compute_ms: float, overlap: float, target: float, nodes: int, trainable: int
) -> None:
    costs = StepCosts(compute_ms=compute_ms, optimizer_ms=1, overlap=overlap)
    seen, asked = calibration(costs, trainable=trainable), scenario(nodes=nodes)
    link = break_even(seen, asked, target=target).efficient
    if link.value is None or link.value <= 1e-4:
        return
    assert efficiency(seen, scenario(link.value, nodes)) == pytest.approx(target, rel=1e-6)


@given(st.floats(1, 1e4), st.floats(0, 1), st.floats(0.05, 0.98), st.floats(0.01, 100), st.integers(2, 8))
def test_the_accumulation_reaches_the_target_and_one_less_does_not(
    compute_ms: float, overlap: float, target: float, gbit_per_s: float, nodes: int
) -> None:
    seen, asked = calibration(StepCosts(compute_ms=compute_ms, overlap=overlap)), scenario(gbit_per_s, nodes)
    needed = accumulation_for(seen, asked, target=target).value

    def at(accumulation: int) -> float:
        link, layout = asked.link, asked.layout
        return efficiency(seen, Scenario(link=link, layout=layout, per_device_batch=2, accumulation=accumulation))

    if needed is None:
        assert at(1 << 16) < target
        return
    assert at(int(needed)) >= target
    assert needed == 1 or at(int(needed) - 1) < target


def test_the_accumulation_is_that_of_the_closed_form() -> None:
    costs = StepCosts(compute_ms=150, overlap=0)
    exposed_ms = G / goodput(0.1) * 1e3
    needed = accumulation_for(calibration(costs), scenario(0.1), target=0.9)
    assert needed.value == -(-exposed_ms // ((1 / 0.9 - 1) * 150))
    assert (needed.code, needed.figures["ratio"]) == ("global_batch", needed.value)
    assert needed.message == f"the global batch becomes {needed.value} times as large"
    assert needed.value is not None
    for now, reason in ((int(needed.value), ("as_now", None)), (2 * int(needed.value), ("global_batch", 0.5))):
        asked = msgspec.structs.replace(scenario(0.1), accumulation=now)
        found = accumulation_for(calibration(costs), asked, target=0.9)
        assert (found.value, (found.code, found.figures.get("ratio"))) == (needed.value, reason)


@pytest.mark.parametrize(("strategy", "left"), [(Strategy.ZERO2, 2 / 3), (Strategy.ZERO3, 1.0), (Strategy.FSDP, 2 / 3)])
def test_no_accumulation_is_enough_where_every_micro_batch_is_sent(strategy: Strategy, left: float) -> None:
    needed = accumulation_for(calibration(COSTS), scenario(0.1, strategy=strategy), target=0.5)
    assert (needed.value, needed.code, needed.figures["strategy"]) == (None, "micro_batches", str(strategy))
    assert needed.figures["ratio"] == pytest.approx(left, abs=0.005)
    assert needed.message.startswith(f"{strategy} communicates in every micro-batch. Compared with no accumulation, ")
    assert needed.message.endswith(f" the bytes per sample below {left:.0%}")


def test_where_nothing_overlaps_or_the_nodes_are_the_limit_no_link_is_enough() -> None:
    nothing = StepCosts(compute_ms=150, overlap=0)
    told = break_even(calibration(nothing), scenario()).nothing_exposed
    assert (told.value, told.code) == (None, "hid_nothing")
    assert told.message == "never: no communication is hidden, because the measured run hid none"
    capped = break_even(calibration(nothing, cap=0.01), scenario(), target=0.9).efficient
    assert (capped.value, capped.code) == (None, "overhead")
    assert capped.message.startswith("never, at any bandwidth: the limit is the overhead per message")
    assert link_for(calibration(nothing), scenario(), lambda *_: True).always


def test_a_second_node_on_a_slow_link_is_not_to_be_added() -> None:
    seen = calibration(StepCosts(compute_ms=166, overlap=0))
    slow = node_gain(seen, on_one_node(seen, scenario(0.1)))
    assert slow.samples_per_s < 0
    assert (slow.code, slow.message) == ("no_faster", "do not add it: 2 nodes are not faster than 1")
    assert slow.tokens_per_s == pytest.approx(slow.samples_per_s * 100)
    fast = node_gain(seen, on_one_node(seen, scenario(10)))
    assert fast.worth.value == pytest.approx(2 * 166 / (166 + G / goodput(10) * 1e3) - 1)
    assert fast.worth.low < fast.worth.value < fast.worth.high
    assert fast.code == "adds"


def test_an_efficiency_of_one_is_a_network_that_costs_nothing() -> None:
    seen = calibration(StepCosts(compute_ms=166, hideable_share=1, overlap=1))
    assert efficiency(seen, scenario(100)) == 1
    one = Prediction(seen, on_one_node(seen, scenario(100)))
    assert Prediction(seen, scenario(100)).samples_per_s == 2 * one.samples_per_s


def test_one_node_has_all_the_workers_that_it_was_measured_with() -> None:
    seen = msgspec.structs.replace(
        calibration(StepCosts(compute_ms=166, overlap=0)), layout=Layout(nodes=1, workers_per_node=2)
    )
    slow = scenario(0.1)
    assert on_one_node(seen, slow).layout == Layout(nodes=1, workers_per_node=2)
    # The same two workers, less what the network costs them.
    exposed_ms = G / goodput(0.1) * 1e3
    assert efficiency(seen, slow) == pytest.approx(166 / (166 + exposed_ms))
    found = break_even(seen, slow)
    assert found.one_node_workers == 2
    assert found.beats_one.value is None
    assert found.full_beats_one is not None
    # Four workers do in a step twice what two do: it may take twice as long. A ring of four sends half as much again.
    assert found.full_beats_one.value == pytest.approx(1.5 * G / (0.166 * goodput(1)), rel=0.01)


def test_where_nothing_is_ever_hidden_no_message_is_blamed() -> None:
    off = msgspec.structs.replace(scenario(), overlap=False)
    never = break_even(calibration(COSTS), off).nothing_exposed
    assert (never.code, never.message) == ("overlap_off", "never: overlap is off, so no communication is hidden")
    one_bucket = calibration(StepCosts(compute_ms=150))
    told = break_even(one_bucket, msgspec.structs.replace(scenario(), bucket_bytes=1e9)).nothing_exposed
    assert (told.value, told.code) == (None, "sent_at_once")
    # Where nobody knows the buckets, nobody knows what hides.
    assert break_even(one_bucket, scenario()).nothing_exposed.code == "uncut"
    cut = msgspec.structs.replace(scenario(), bucket_bytes=MB)
    assert break_even(one_bucket, cut).nothing_exposed.value is not None


def test_where_the_nodes_are_slower_than_the_one_no_network_is_blamed() -> None:
    slow = msgspec.structs.replace(calibration(COSTS), residual=Residual(own=1.5))
    told = break_even(slow, scenario(), target=0.9).efficient
    assert (told.value, told.code) == (None, "slow_nodes")
    assert told.message.startswith("never, at any bandwidth: the nodes' own work")
    # They still beat one: two at two thirds of its speed.
    assert break_even(slow, scenario()).beats_one.value is not None


@given(
    st.floats(1, 1e4), st.floats(0, 1), st.floats(0, 0.5), st.integers(2, 16), st.sampled_from([MB, 10 * MB, 1000 * MB])
)
def test_a_range_has_its_middle_and_is_as_wide_as_the_steps_scatter(
    compute_ms: float, overlap: float, scatter: float, nodes: int, trainable: int
) -> None:
    costs = StepCosts(compute_ms=compute_ms, optimizer_ms=1, overlap=overlap)
    seen = msgspec.structs.replace(calibration(costs, trainable=trainable), scatter=scatter)
    found = break_even(seen, scenario(nodes=nodes))
    for needed in (found.efficient, found.beats_one, found.accumulation):
        if needed.value is None:
            assert needed.high is None
            continue
        assert needed.low is not None
        assert needed.low <= needed.value
        assert needed.high is None or needed.value <= needed.high
        if 2 < needed.value < 1e4 and scatter > 0.1:
            assert needed.high is None or needed.high > 1.05 * needed.low


def test_two_measurements_of_one_question_have_ranges_that_overlap() -> None:
    """A baseline measured 15% fast and one 15% slow: far apart in the middle, and no contradiction."""
    answers = []
    for off in (1 / 1.15, 1.15):
        costs = StepCosts(compute_ms=166 * off, overlap=0)
        seen = msgspec.structs.replace(
            calibration(costs), scatter=0.15, layout=Layout(nodes=1, workers_per_node=2), residual=Residual(own=1 / off)
        )
        answers.append(beats_one(seen, scenario())[0])
    (fast, slow) = answers
    assert fast.value is not None
    assert slow.value is not None
    assert fast.value > 1.5 * slow.value
    assert fast.low is not None
    assert slow.high is not None
    assert fast.low < slow.high


def test_one_node_shared_out_over_several_is_asked_for_with_every_node_full() -> None:
    seen = msgspec.structs.replace(
        calibration(StepCosts(compute_ms=166, overlap=0)), layout=Layout(nodes=1, workers_per_node=2)
    )
    needed, asked = beats_one(seen, scenario(0.1))
    assert asked.layout == Layout(nodes=2, workers_per_node=2)
    assert needed == break_even(seen, scenario(0.1)).full_beats_one
    alone = msgspec.structs.replace(seen, layout=Layout(nodes=1))
    assert beats_one(alone, scenario(0.1))[1].layout == TWO
