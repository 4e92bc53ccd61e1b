from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from multinode.predict.network_model import (
    Link,
    NetworkModel,
    comm_times,
    held_back_errors,
    network_doubts,
    network_of_scan,
)
from multinode.traffic.algorithms import Layout
from multinode.traffic.step_calls import Call, GroupScope, SizeCurve, fit_curve
from tests.predict.stored import sweep_record

TWO, FOUR = Layout(nodes=2), Layout(nodes=4)
GIGABIT = Link(gbit_per_s=1)
SIZE = 14_767_104
CALL = Call(collective="all_reduce", size_bytes=SIZE)
# All-reduce with gloo, two virtual nodes, 1 Gbit/s: a burst of the shaper lets 128 KiB pass at once.
SHAPED = fit_curve(
    [(8, 336.0), (65536, 519.0), (131072, 1135.0), (1 << 20, 8929.0), (4 << 20, 36003.0), (16 << 20, 143342.0)]
)
rates = st.floats(min_value=1e-3, max_value=1e3)


def test_the_errors_of_a_curve_are_those_of_points_predicted_from_the_others() -> None:
    """The last slope of the others, 27074 us for 3 MiB, goes on for 12; 4 MiB lie at a fifth between its neighbours."""
    errors = held_back_errors(SHAPED)
    assert list(errors) == [1 << 20, 4 << 20, 16 << 20]
    assert errors[4 << 20] == pytest.approx((8929 + (143342 - 8929) / 5) / 36003 - 1)
    assert errors[16 << 20] == pytest.approx((36003 + 4 * 27074) / 143342 - 1)
    assert held_back_errors(SHAPED, 1 << 30) == {}
    assert held_back_errors(fit_curve(SHAPED.points[-2:])) == {}


def line(gb_per_s: float, alpha_us: float = 100.0) -> SizeCurve:
    return fit_curve([(1 << exponent, alpha_us + (1 << exponent) / gb_per_s / 1000) for exponent in range(10, 28)])


def network(curve: SizeCurve, *, layout: Layout = TWO, backend: str = "gloo", link: Link = GIGABIT) -> NetworkModel:
    return NetworkModel(link=link, layout=layout, backend=backend, curves={"all_reduce": curve})


def took_ms(measured: NetworkModel, link: Link, layout: Layout = TWO, call: Call = CALL, end: float = 0) -> float:
    times = comm_times(measured, [call], link, layout, end)
    return times.step_ms + times.after_ms + times.micro_batch_ms


@pytest.mark.parametrize("curve", [line(0.1), SHAPED], ids=["fit", "interpolation"])
def test_where_it_was_measured_a_call_takes_what_was_measured(curve: SizeCurve) -> None:
    assert took_ms(network(curve), GIGABIT) == pytest.approx(curve.predict_us(SIZE) / 1000)


def test_a_tenth_of_the_link_takes_ten_times_as_long_but_for_what_every_message_costs() -> None:
    measured = network(line(0.1, alpha_us=5000))
    alone_ms = took_ms(measured, GIGABIT) - 5
    assert took_ms(measured, Link(gbit_per_s=0.1)) == pytest.approx(5 + 10 * alone_ms, rel=1e-6)


def test_a_ring_of_four_takes_half_as_much_again_and_three_times_the_steps() -> None:
    measured = network(line(0.1, alpha_us=5000))
    alone_ms = took_ms(measured, GIGABIT) - 5
    assert took_ms(measured, GIGABIT, FOUR) == pytest.approx(15 + 1.5 * alone_ms, rel=1e-6)


def test_a_node_gets_no_more_through_tcp_than_the_cap_and_rdma_knows_none() -> None:
    measured = network(line(1.1, alpha_us=0), link=Link(gbit_per_s=10), backend="nccl")
    fast = Link(gbit_per_s=400)
    for end, cap in ((-1, 5.0), (1, 3.0)):
        assert took_ms(measured, fast, end=end) == pytest.approx(SIZE / cap / 1e6, rel=1e-6)
    rdma = Link(gbit_per_s=400, rdma=True)
    assert took_ms(measured, rdma) < SIZE / 40e6


def test_what_was_measured_above_the_cap_is_not_called_slower_on_a_faster_link() -> None:
    measured = network(line(8.0, alpha_us=0), link=Link(gbit_per_s=100), backend="nccl")
    assert took_ms(measured, Link(gbit_per_s=200)) == pytest.approx(took_ms(measured, Link(gbit_per_s=100)))


def test_on_other_nodes_nothing_outruns_the_link() -> None:
    # Gloo gathers between two workers in turns, at 0.6 of the link here; among four it fills it, and no more.
    curve = line(2 * 0.6 * GIGABIT.goodput_gb_per_s, alpha_us=0)
    measured = NetworkModel(link=GIGABIT, layout=TWO, backend="gloo", curves={"all_gather": curve})
    gathered = Call(collective="all_gather", size_bytes=SIZE)
    assert took_ms(measured, GIGABIT, FOUR, gathered) == pytest.approx(
        0.75 * SIZE / GIGABIT.goodput_gb_per_s / 1e6, rel=1e-6
    )


def test_without_a_sweep_the_link_is_filled() -> None:
    stated = NetworkModel(link=GIGABIT, layout=TWO)
    assert took_ms(stated, GIGABIT) == pytest.approx(SIZE / GIGABIT.goodput_gb_per_s / 1e6)
    doubts = network_doubts(stated, [CALL], GIGABIT, TWO)
    (doubt,) = doubts
    assert doubt.message.startswith("no collective was measured, and only the link rate is known; overlay")


@pytest.mark.parametrize(
    ("stream", "asked", "carried"),
    [
        # Of a rate alone, as parts of what a link carries: at best, in the middle, at worst.
        (None, 1.0, (1, 1, 0.4)),
        # A stream that the link's rate explains goes with it.
        (0.95, 10.0, (9.5, 9.5, 9.5)),
        # One that it does not: a faster link may carry the same part of its rate, or no more than was measured.
        (0.25, 1.0, (0.25, 0.25, 0.25)),
        (0.25, 4.0, (1.0, 0.5, 0.25)),
        # And a slower one all of its rate, or the same part.
        (0.25, 0.1, (0.1, 0.05, 0.025)),
    ],
)
def test_a_link_carries_what_a_stream_says_and_not_its_rate(
    stream: float | None, asked: float, carried: tuple[float, float, float]
) -> None:
    unit = GIGABIT.goodput_gb_per_s
    seen = NetworkModel(link=GIGABIT, layout=TWO, stream_gb_per_s=None if stream is None else stream * unit)
    link = msgspec.structs.replace(GIGABIT, gbit_per_s=asked)
    assert [seen.carried(link, end) / unit for end in (-1, 0, 1)] == pytest.approx(carried)


def test_calls_inside_a_node_cost_its_nic_nothing_and_shares_of_all_workers_pass_it() -> None:
    stated = NetworkModel(link=GIGABIT, layout=TWO)
    layout = Layout(nodes=2, workers_per_node=4)
    inside = Call(collective="all_gather", size_bytes=SIZE, reach=GroupScope.NODE)
    across = Call(collective="all_reduce", size_bytes=SIZE / 4, reach=GroupScope.ACROSS)
    assert took_ms(stated, GIGABIT, layout, inside) == 0
    assert took_ms(stated, GIGABIT, layout, across) == pytest.approx(took_ms(stated, GIGABIT))
    assert took_ms(stated, GIGABIT, Layout(nodes=1, workers_per_node=4)) == 0


def test_a_tree_between_two_nodes_would_tell_little_of_four() -> None:
    measured = network(line(0.05), layout=Layout(nodes=2, workers_per_node=8), backend="nccl")
    layout = Layout(nodes=4, workers_per_node=8)
    usual, slow = (took_ms(measured, GIGABIT, layout, end=end) for end in (0, 1))
    assert slow / usual == pytest.approx(2 / (1.9375 / 1.875), rel=0.01)
    # Gloo has the ring alone.
    gloo = network(line(0.1))
    assert took_ms(gloo, GIGABIT, FOUR, end=1) == took_ms(gloo, GIGABIT, FOUR)


def test_doubt_grows_with_the_distance_and_names_it() -> None:
    measured = network(line(0.1))

    def factor(gbit_per_s: float, layout: Layout = TWO) -> float:
        doubts = network_doubts(measured, [CALL], Link(gbit_per_s=gbit_per_s), layout)
        return math.prod(1 + doubt.relative for doubt in doubts)

    assert factor(1) == 1
    assert 1 < factor(0.1) < factor(10) < factor(100)
    assert factor(1) < factor(1, FOUR) < factor(1, Layout(nodes=8))
    (doubt,) = network_doubts(measured, [CALL], Link(gbit_per_s=10), TWO)
    assert doubt.message == "the link is 10 times faster than the measured one"
    (doubt,) = network_doubts(measured, [Call(collective="broadcast", size_bytes=SIZE)], GIGABIT, TWO)
    assert doubt.message == "these collectives were not measured, so their times are derived from others: broadcast"
    # Of a flag it is none of the bandwidth.
    assert not network_doubts(measured, [Call(collective="broadcast", size_bytes=8)], GIGABIT, TWO)


@given(rates, rates, st.sampled_from([-1, 0, 1]), st.sampled_from([TWO, FOUR, Layout(nodes=3, workers_per_node=2)]))
def test_a_faster_link_is_never_slower(one: float, other: float, end: int, layout: Layout) -> None:
    slow, fast = sorted((one, other))
    for measured in (network(SHAPED, backend="nccl"), NetworkModel(link=GIGABIT, layout=TWO)):
        slower = took_ms(measured, Link(gbit_per_s=slow), layout, end=end)
        assert took_ms(measured, Link(gbit_per_s=fast), layout, end=end) <= slower * (1 + 1e-12)


@given(st.floats(1, 1e10), st.floats(1, 1e10), rates, st.sampled_from(["nccl", "gloo", "mpi"]))
def test_more_bytes_are_never_faster(one: float, other: float, gbit_per_s: float, backend: str) -> None:
    small, large = sorted((one, other))
    measured = network(SHAPED, backend=backend)
    for layout in (TWO, FOUR):
        sizes = (Call(collective="all_reduce", size_bytes=size) for size in (small, large))
        less, more = (took_ms(measured, Link(gbit_per_s=gbit_per_s), layout, call) for call in sizes)
        assert less <= more * (1 + 1e-12)


def test_a_scan_that_foretells_its_own_sizes_badly_is_doubted_as_much() -> None:
    report = sweep_record("scan").sweep
    assert report is not None
    assert network_of_scan(report, 1.0).error == pytest.approx(0, abs=0.01)
    points = [(size, time_us * (2 if size == 1 << 20 else 1)) for size, time_us in report.curves["all_reduce"].points]
    uneven = msgspec.structs.replace(report, curves=report.curves | {"all_reduce": fit_curve(points)})
    measured = network_of_scan(uneven, 1.0)
    assert measured.error > 0.1
    (doubt,) = network_doubts(measured, [CALL], GIGABIT, TWO)
    assert (doubt.relative, doubt.message) == (
        measured.error,
        ("times for message sizes that nccl-test did not measure are estimated from the measured sizes"),
    )


def test_times_that_do_not_grow_with_the_size_carry_nothing() -> None:
    report = sweep_record("scan").sweep
    assert report is not None
    flat = fit_curve([(size, 4500.0) for size, _ in report.curves["all_reduce"].points])
    measured = network_of_scan(msgspec.structs.replace(report, curves={"all_reduce": flat}), 1.0)
    assert measured.curves == {}
    # A gigabyte takes what raw TCP takes for it, and not the 4.5 ms of a small one.
    whole = Call(collective="all_reduce", size_bytes=10**9)
    assert took_ms(measured, GIGABIT, TWO, whole) > 8_000


@pytest.mark.parametrize(
    ("backend", "inside_us", "between", "inside"), [("nccl", 6.0, 2, 14), ("gloo", 40.0, 4, 26)], ids=["nccl", "gloo"]
)
def test_a_message_inside_a_node_costs_less_than_one_between_nodes(
    backend: str, inside_us: float, between: int, inside: int
) -> None:
    """8 KiB between two nodes of eight: NCCL's tree, 2 log2(N) and 2 (w - 1) messages (tuning.cc); gloo's ring."""
    small = Call(collective="all_reduce", size_bytes=8192)
    measured = network(line(0.1177, alpha_us=100.0), backend=backend)
    wide = Layout(nodes=2, workers_per_node=8)
    one, many = (comm_times(measured, [small], GIGABIT, layout).step_ms * 1000 for layout in (TWO, wide))
    # Two messages between two nodes took 100 us; of the bytes 15/8 pass a NIC instead of one.
    bytes_us = (one - 100) * (1 + 7 / 8)
    assert many == pytest.approx(between * 50 + inside * inside_us + bytes_us, rel=0.02)
    # And back: what was measured between sixteen tells what two take.
    from_many = network(line(0.1177, alpha_us=between * 50 + inside * inside_us), layout=wide, backend=backend)
    assert comm_times(from_many, [small], GIGABIT, wide).step_ms == pytest.approx(
        (between * 50 + inside * inside_us + 8192 / 117.7) / 1000, rel=0.02
    )
    empty = Call(collective="all_reduce", size_bytes=8, hideable=False)
    assert comm_times(from_many, [empty], GIGABIT, TWO).after_ms == pytest.approx(0.1, rel=0.02)


def test_where_messages_take_less_than_one_inside_a_node_is_thought_to_all_take_the_same() -> None:
    wide = Layout(nodes=2, workers_per_node=2)
    fast = network(line(1.0, alpha_us=12.0), layout=wide)
    empty = Call(collective="all_reduce", size_bytes=8, hideable=False)
    # Six messages of 2 us; two between two nodes.
    assert comm_times(fast, [empty], GIGABIT, TWO).after_ms == pytest.approx(0.004, rel=0.02)


def test_what_workers_of_a_node_exchange_takes_as_long_on_several_nodes_where_nobody_measured_it() -> None:
    """At the same end of the same assumed rate: each four of two nodes exchange what they would alone."""
    known = msgspec.structs.replace(network(line(0.1)), local_gb_per_s=(3.0, 50.0))
    alone, several = (Layout(nodes=nodes, workers_per_node=4) for nodes in (1, 2))
    calls = [msgspec.structs.replace(CALL, reach=GroupScope.NODE)]
    for end in (-1, 0, 1):
        times = [comm_times(known, calls, GIGABIT, layout, end).step_ms for layout in (alone, several)]
        assert times[0] == times[1] > 0
    # One worker exchanges nothing; and where a run on one node was measured, that tells it.
    assert comm_times(known, calls, GIGABIT, TWO).step_ms == 0
    assert comm_times(network(line(0.1)), calls, GIGABIT, several).step_ms == 0
