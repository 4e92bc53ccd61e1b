from __future__ import annotations

from typing import Any

import msgspec
import pytest

from multinode.traffic.algorithms import Layout
from multinode.traffic.step_calls import (
    Call,
    GroupScope,
    Strategy,
    TrafficInputs,
    nic_bytes,
    nic_time_s,
    passing_bytes,
    strategy_calls,
)
from tests.golden import raised
from tests.model.trainings import MEASURED_SENT
from tests.profile.seen_theory import worker_bytes

MB = 1e6
TWO = Layout(nodes=2)
# Of the tiny model of scripts/make_tiny.py, trained in full in fp32: 14.7 MB of gradients.
TINY = TrafficInputs(parameters=3_691_776, trainable=3_691_776, parameter_bytes=4, gradient_bytes=4)
S = 4 * 3_691_776


def sent(
    strategy: Strategy, layout: Layout = TWO, *, gloo: bool = False, load: TrafficInputs = TINY, k: int = 1
) -> float:
    calls = strategy_calls(strategy, load, layout)
    sent = nic_bytes(calls, layout, k, gloo=gloo)
    assert layout.workers_per_node > 1 or worker_bytes(calls, layout, k, gloo=gloo) == sent
    return sent


@pytest.mark.parametrize(("strategy", "k", "measured_mb"), MEASURED_SENT)
def test_what_the_tiny_model_sends_is_what_was_measured(strategy: Strategy, k: int, measured_mb: float) -> None:
    assert sent(strategy, k=k) / MB == pytest.approx(measured_mb, rel=0.005)


def test_its_step_on_a_slow_link_takes_what_was_measured() -> None:
    assert nic_time_s(sent(Strategy.DDP), 0.0125) == pytest.approx(1.176, rel=0.01)


@pytest.mark.parametrize(
    ("strategy", "k", "changes", "factor"),
    [
        (Strategy.DDP, 4, {}, 2),
        (Strategy.ZERO1, 4, {}, 3),
        (Strategy.ZERO2, 4, {}, 9),
        (Strategy.ZERO3, 4, {}, 12),
        (Strategy.ZERO3, 4, {"gathers": 1}, 8),
        (Strategy.FSDP, 1, {}, 3),
        (Strategy.FSDP, 4, {}, 9),
        (Strategy.FSDP, 4, {"no_sync": False}, 12),
        (Strategy.SHARD_GRAD_OP, 4, {}, 2),
        (Strategy.SHARD_GRAD_OP, 4, {"fsdp_version": 2}, 5),
        (Strategy.SHARD_GRAD_OP, 4, {"no_sync": False}, 8),
    ],
)
def test_full_fine_tuning_moves_so_many_times_its_gradients_in_a_long_ring(
    strategy: Strategy, k: int, changes: dict[str, Any], factor: int
) -> None:
    many, load = Layout(nodes=1000), msgspec.structs.replace(TINY, **changes)
    assert sent(strategy, many, load=load, k=k) / S == pytest.approx(factor, rel=0.002)


def test_lora_on_llama_3_8b_moves_84_mb_of_gradients_and_zero_3_twice_16_gb() -> None:
    lora = TrafficInputs(parameters=8_051_232_768, trainable=20_971_520, parameter_bytes=2, gradient_bytes=4)
    gathered, reduced = strategy_calls(Strategy.ZERO3, lora, TWO)
    assert gathered.times == 2
    assert gathered.size_bytes / 1e9 == pytest.approx(16.1, rel=0.01)
    assert reduced.size_bytes / MB == pytest.approx(84, rel=0.01)
    assert sent(Strategy.DDP, load=lora) / MB == pytest.approx(84, rel=0.01)
    assert sent(Strategy.ZERO3, load=lora) / sent(Strategy.DDP, load=lora) > 190


def test_a_ring_leaves_a_node_once_however_many_workers_it_has() -> None:
    assert sent(Strategy.DDP, Layout(nodes=2, workers_per_node=2)) == pytest.approx(1.5 * S)
    assert sent(Strategy.DDP, Layout(nodes=2, workers_per_node=8)) == pytest.approx(2 * 15 / 16 * S)


def test_hybrid_sharding_sends_one_all_reduce_between_the_nodes_and_the_rest_within() -> None:
    layout = Layout(nodes=4, workers_per_node=8)
    assert sent(Strategy.HYBRID_SHARD, layout, k=3) == pytest.approx(2 * 3 / 4 * S)
    every = msgspec.structs.replace(TINY, no_sync=False)
    assert sent(Strategy.HYBRID_SHARD, layout, load=every, k=3) == pytest.approx(3 * 2 * 3 / 4 * S)
    inside = worker_bytes(strategy_calls(Strategy.HYBRID_SHARD, TINY, layout), layout)
    assert inside == pytest.approx(3 * 7 / 8 * S + 2 * 3 / 4 * S / 8)


@pytest.mark.parametrize(("trainable", "factor"), [(TINY.trainable, 1 + 1), (TINY.trainable // 100, 0.02)])
def test_a_second_copy_inside_each_node_leaves_one_gather_of_what_is_trained(trainable: int, factor: float) -> None:
    layout, load = Layout(nodes=1000, workers_per_node=8), msgspec.structs.replace(TINY, trainable=trainable)
    assert sent(Strategy.ZERO3_HPZ, layout, load=load) / S == pytest.approx(factor, rel=0.01)
    assert sent(Strategy.ZERO3, layout, load=load) / S == pytest.approx(2 + trainable / TINY.trainable, rel=0.01)
    # What a micro-batch more sends between the nodes are its gradients alone.
    more = sent(Strategy.ZERO3_HPZ, layout, load=load, k=2) - sent(Strategy.ZERO3_HPZ, layout, load=load)
    assert more / S == pytest.approx(trainable / TINY.trainable, rel=0.01)


def test_gloo_reduces_to_all_where_a_part_was_asked_for() -> None:
    # FSDP on gloo, two workers: 2 S for 1.5 S.
    assert sent(Strategy.FSDP) == pytest.approx(1.5 * S)
    assert sent(Strategy.FSDP, gloo=True) == pytest.approx(2 * S)
    assert sent(Strategy.DDP, gloo=True) == sent(Strategy.DDP)


def test_one_node_sends_nothing_through_its_nic() -> None:
    alone = Layout(nodes=1, workers_per_node=4)
    calls = strategy_calls(Strategy.ZERO3, TINY, alone)
    assert nic_bytes(calls, alone) == 0
    assert worker_bytes(calls, alone) == pytest.approx(3 * 3 / 4 * S)


def test_what_gathers_all_parameters_needs_their_number_and_ddp_does_not() -> None:
    unknown = TrafficInputs(parameters=None, trainable=1000, parameter_bytes=2, gradient_bytes=4)
    assert sent(Strategy.DDP, load=unknown) == 4000
    refused = raised(ValueError, strategy_calls, Strategy.ZERO3, unknown, TWO)
    assert str(refused) == "ZeRO-3 gathers all parameters, whose number is unknown"


def test_what_joins_the_first_worker_of_each_node_is_a_ring_of_nodes() -> None:
    """However many workers a node has: an average that the first of each sends passes its NIC once."""
    layout = Layout(nodes=3, workers_per_node=8)
    averaged = Call(collective="all_reduce", size_bytes=S, reach=GroupScope.LEADERS)
    across = Call(collective="all_reduce", size_bytes=S / 8, reach=GroupScope.ACROSS)
    assert nic_bytes([averaged], layout) == nic_bytes([across], layout) == pytest.approx(2 * 2 / 3 * S)
    assert passing_bytes([averaged], 1, layout) == pytest.approx(2 * 2 / 3 * S)
