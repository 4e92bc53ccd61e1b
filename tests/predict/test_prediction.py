from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from multinode.levers.averaging import Averaging
from multinode.levers.levers import Levers
from multinode.predict.calibration import Calibration
from multinode.predict.cost_model import Scenario, StepCosts
from multinode.predict.network_model import Link, NetworkModel, UncertaintySource
from multinode.predict.prediction import Prediction
from multinode.traffic.algorithms import Layout
from multinode.traffic.step_calls import Strategy, TrafficInputs, Work, fit_curve

TWO = Layout(nodes=2)
G = 14_767_104
LOAD = TrafficInputs(parameters=G // 4, trainable=G // 4, parameter_bytes=4, gradient_bytes=4)
# Gloo between two virtual nodes, links of 100 and 1000 Mbit/s without framing: 12.5 and 125 MB/s.
LINK = Link(gbit_per_s=1538 / 1448)
CURVE = fit_curve([(1 << 20, (1 << 20) / 125), (16 << 20, (16 << 20) / 125)])
MEASURED = NetworkModel(link=LINK, layout=TWO, backend="gloo", curves={"all_reduce": CURVE})
# Two workers on one node trained 24.1 samples/s, four a step.
CALIBRATION = Calibration(
    costs=StepCosts(compute_ms=166, overlap=0),
    layout=Layout(nodes=1, workers_per_node=2),
    per_device_batch=2,
    work=Work(strategy=Strategy.DDP, load=LOAD),
    network=MEASURED,
)
changed = msgspec.structs.replace


def scenario(gbit_per_s: float = LINK.gbit_per_s, layout: Layout = TWO) -> Scenario:
    return Scenario(link=Link(gbit_per_s=gbit_per_s), layout=layout, per_device_batch=2)


def relative_width(found: Prediction) -> float:
    low, high = found.interval
    return (high - low) / found.samples_per_s


@pytest.mark.parametrize(("tenths", "samples_per_s", "within"), [(10, 13.95, 0.015), (1, 2.98, 0.01)])
def test_a_step_that_was_measured_on_one_node_is_predicted_on_two(
    tenths: int, samples_per_s: float, within: float
) -> None:
    found = Prediction(CALIBRATION, scenario(LINK.gbit_per_s * tenths / 10))
    assert found.samples_per_s == pytest.approx(samples_per_s, rel=within)
    low, high = found.interval
    assert low < samples_per_s < high
    assert found.bottleneck.kind == "network"


def test_a_hook_that_halves_the_gradients_halves_their_time() -> None:
    slow = scenario(0.1)
    plain, halved = (Prediction(CALIBRATION, changed(slow, gradient_factor=factor)) for factor in (1.0, 0.5))
    assert halved.parts.exposed_ms == pytest.approx(plain.parts.exposed_ms / 2, rel=1e-3)
    zero = changed(slow, strategy=Strategy.ZERO2)
    # Two workers of gloo gather in turns, so that Psi takes as long as G; parameters stay as wide as they are.
    plain, halved = (Prediction(CALIBRATION, changed(zero, gradient_factor=factor)) for factor in (1.0, 0.5))
    assert halved.parts.exposed_ms == pytest.approx(plain.parts.exposed_ms * 3 / 4, rel=1e-3)


def test_accumulation_divides_what_ddp_exposes_and_not_what_zero_2_does() -> None:
    slow = scenario(0.1)
    # ZeRO-2: K times G and once Psi, which takes as long where two workers of gloo gather in turns.
    for strategy, exposed in ((Strategy.DDP, 1.0), (Strategy.ZERO2, 5 / 2)):
        once, four = (Prediction(CALIBRATION, changed(slow, strategy=strategy, accumulation=k)) for k in (1, 4))
        assert four.parts.compute_ms == 4 * once.parts.compute_ms
        assert four.parts.exposed_ms / once.parts.exposed_ms == pytest.approx(exposed, rel=0.01)


def test_a_larger_batch_computes_longer_and_sends_as_much() -> None:
    small, large = (Prediction(CALIBRATION, changed(scenario(0.1), per_device_batch=batch)) for batch in (2, 6))
    assert large.parts.compute_ms == 3 * small.parts.compute_ms
    assert large.parts.exposed_ms == small.parts.exposed_ms
    assert large.samples_per_s == pytest.approx(3 * small.samples_per_s * small.step_time_ms / large.step_time_ms)


def test_one_node_has_its_own_exchange_alone_and_several_are_no_faster_than_it() -> None:
    calibration = changed(CALIBRATION, local_ms=40.0)
    pair = Layout(nodes=1, workers_per_node=2)
    assert Prediction(calibration, scenario(layout=pair)).parts.exposed_ms == 40
    assert Prediction(calibration, scenario(layout=Layout(nodes=1))).parts.exposed_ms == 0
    fast = Prediction(calibration, scenario(100, Layout(nodes=2, workers_per_node=2)))
    assert fast.parts.exposed_ms == 40


def test_an_overlap_that_nobody_measured_is_guessed_from_the_buckets_and_doubted() -> None:
    unknown = changed(CALIBRATION, costs=StepCosts(compute_ms=166, hideable_share=100 / 166))
    found = Prediction(unknown, changed(scenario(), bucket_bytes=G / 4))
    assert found.parts.exposed_ms == pytest.approx(G / 125e3 - 75, rel=1e-3)
    assert relative_width(found) > 0.3
    assert (
        "the overlap with compute was not measured; the range covers everything from no overlap to the largest "
        "possible overlap"
    ) in whys(found)
    # What was measured is of other buckets as well.
    known = changed(CALIBRATION, costs=StepCosts(compute_ms=166, hideable_share=100 / 166, overlap=0.2))
    assert relative_width(Prediction(known, scenario())) < 0.2
    assert Prediction(known, changed(scenario(), bucket_bytes=G / 4)).parts == found.parts
    assert Prediction(known, changed(scenario(), overlap=False)).parts.exposed_ms == pytest.approx(G / 125e3, rel=1e-3)


def whys(found: Prediction) -> list[str]:
    return [doubt.message for doubt in found.doubts]


def test_the_interval_is_as_wide_as_what_was_measured_scatters() -> None:
    for scatter, error, least in ((0.0, 0.0, 0.02), (0.08, 0.0, 0.08), (0.0, 0.3, 0.3)):
        calibration = changed(CALIBRATION, scatter=scatter, network=changed(MEASURED, error=error))
        found = Prediction(calibration, scenario(1000))
        low, high = found.interval
        assert low <= found.samples_per_s / (1 + least)
        assert high >= found.samples_per_s * (1 + least)


def test_the_interval_widens_with_the_distance_and_says_why() -> None:
    here = Prediction(CALIBRATION, scenario())
    assert whys(here) == ["the range includes the variation between runs"]
    for further, why in (
        (scenario(10 * LINK.gbit_per_s), "the link is 10 times faster than the measured one"),
        (
            scenario(layout=Layout(nodes=4)),
            ("the network was measured with 2 workers on 2 nodes, but the prediction is for 4 workers on 4 nodes"),
        ),
        (changed(scenario(), per_device_batch=8), "the batch is 4 times that of the measured run"),
        (changed(scenario(), accumulation=4), "accumulation is 4 times that of the measured run"),
        (
            changed(scenario(), strategy=Strategy.ZERO2),
            ("these collectives were not measured, so their times are derived from others: all_gather"),
        ),
    ):
        found = Prediction(CALIBRATION, further)
        assert why in whys(found)
        assert relative_width(found) > relative_width(here)


def test_from_a_slow_link_a_very_fast_one_is_not_promised() -> None:
    large = TrafficInputs(parameters=None, trainable=500_000_000, parameter_bytes=2, gradient_bytes=2)
    calibration = changed(CALIBRATION, work=Work(strategy=Strategy.DDP, load=large))
    found = Prediction(calibration, scenario(100))
    # TCP at 3 to 5 GB/s, whatever 100 Gbit/s could carry.
    assert 1000 / 5 < found.parts.exposed_ms < 1000 / 3
    assert relative_width(found) > 0.4


@given(
    st.builds(
        Scenario,
        link=st.builds(Link, gbit_per_s=st.floats(1e-3, 1e3), rdma=st.booleans()),
        layout=st.builds(Layout, nodes=st.integers(1, 9), workers_per_node=st.integers(1, 8)),
        per_device_batch=st.floats(0.5, 64),
        accumulation=st.integers(1, 64),
        strategy=st.sampled_from(Strategy),
        gradient_factor=st.sampled_from([1.0, 0.5]),
        bucket_bytes=st.none() | st.floats(1e5, 1e9),
        overlap=st.booleans(),
    ),
    st.none() | st.floats(0, 1),
    st.sampled_from(["gloo", "nccl"]),
    st.floats(0, 0.5),
    st.floats(1, 1e3),
)
def test_whatever_is_asked_the_interval_has_the_prediction_and_a_faster_link_is_never_slower(
    asked: Scenario, overlap: float | None, backend: str, scatter: float, faster: float
) -> None:
    costs = StepCosts(compute_ms=166, optimizer_ms=5, overlap=overlap)
    network = changed(MEASURED, backend=backend)
    calibration = changed(CALIBRATION, costs=costs, network=network, scatter=scatter, local_ms=12.0)
    found = Prediction(calibration, asked)
    low, high = found.interval
    assert 0 < low < found.samples_per_s < high
    assert found.samples_per_s == pytest.approx(asked.samples / found.step_time_ms * 1000)
    link = changed(asked.link, gbit_per_s=asked.link.gbit_per_s * faster)
    assert Prediction(calibration, changed(asked, link=link)).step_time_ms <= found.step_time_ms * (1 + 1e-9)


@given(st.integers(1, 10**10), st.integers(1, 10**10), st.floats(0, 1), st.sampled_from(Strategy), st.integers(1, 8))
def test_more_bytes_are_never_faster(one: int, other: int, overlap: float, strategy: Strategy, k: int) -> None:
    costs = StepCosts(compute_ms=166, overlap=overlap)

    def step_ms(trainable: int) -> float:
        load = TrafficInputs(parameters=10**10 + trainable, trainable=trainable, parameter_bytes=2, gradient_bytes=2)
        calibration = changed(CALIBRATION, costs=costs, work=Work(strategy=strategy, load=load))
        return Prediction(calibration, changed(scenario(), strategy=strategy, accumulation=k)).step_time_ms

    small, large = sorted((one, other))
    assert step_ms(small) <= step_ms(large) * (1 + 1e-12)


def test_a_hybrid_shard_exposes_what_a_node_exchanges_and_what_nodes_do_one_after_the_other() -> None:
    wide = Layout(nodes=2, workers_per_node=2)
    hybrid = changed(
        CALIBRATION,
        work=Work(strategy=Strategy.HYBRID_SHARD, load=LOAD),
        local_ms=300.0,
        costs=StepCosts(compute_ms=166),
    )
    found = Prediction(hybrid, changed(scenario(layout=wide), strategy=Strategy.HYBRID_SHARD))
    # Gloo hides nothing of it; half of the gradients of each of two workers pass between the nodes, at 125 MB/s.
    across_ms = G / 125e3
    assert found.parts.exposed_ms == pytest.approx(300 + across_ms, rel=0.01)


def test_averaging_is_not_the_faster_for_an_exchange_in_the_node_that_nobody_measured() -> None:
    """Two nodes of four, gradients of 2 GB: a step between averages is one of one node, at both ends of the rate."""
    big = TrafficInputs(parameters=None, trainable=500_000_000, parameter_bytes=4, gradient_bytes=4)
    unmeasured = changed(
        CALIBRATION,
        costs=StepCosts(compute_ms=451),
        work=Work(strategy=Strategy.DDP, load=big),
        network=changed(MEASURED, backend="nccl", local_gb_per_s=(3.0, 50.0)),
        doubts=(UncertaintySource(part="compute", relative=0.05, message="no run on one node was measured"),),
    )
    alone, wide = (scenario(layout=Layout(nodes=nodes, workers_per_node=4)) for nodes in (1, 2))
    averaged = changed(wide, levers=Levers(averaging=Averaging(every=1_000_000)))
    one, many = (Prediction(unmeasured, each) for each in (alone, averaged))
    assert many.parts.exposed_ms == pytest.approx(one.parts.exposed_ms, rel=0.01)
    # 1.5 times 2 GB at 3 GB/s, and what else doubts the network does not make it less.
    slowest = [max(parts.exposed_ms for parts in found.draws) for found in (many, one)]
    assert slowest[0] >= slowest[1] > 900
    assert any("communication between workers of one node was not measured" in why for why in whys(many))
