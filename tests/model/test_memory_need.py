from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multinode.model.model_size import lora_parameters, parse_model
from multinode.model.training import StatePlacement, memory_need
from multinode.traffic.algorithms import Layout
from multinode.traffic.step_calls import Strategy, TrafficInputs
from tests.model.trainings import LLAMA_3_8B

TWO = Layout(nodes=2, workers_per_node=2)
GIB = 1 << 30


def load(parameters: int | None, trainable: int, width: int = 2) -> TrafficInputs:
    return TrafficInputs(parameters=parameters, trainable=trainable, parameter_bytes=width, gradient_bytes=width)


def total_bytes(strategy: Strategy, what: TrafficInputs, placement: StatePlacement, layout: Layout = TWO) -> float:
    found = memory_need(strategy, what, layout, placement)
    assert found is not None
    return found.total_gib * GIB


def test_llama_3_8b_with_lora_as_counted_by_hand() -> None:
    shape = parse_model(LLAMA_3_8B)
    assert shape is not None
    adapter = lora_parameters(shape, 8, ("all",))
    assert adapter is not None
    assert (shape.parameters, adapter) == (8_030_261_248, 20_971_520)
    what = load(shape.parameters + adapter, adapter)
    half = StatePlacement(half=True)
    # The frozen base in bf16; of the adapter, parameters, gradients, two moments and a bucket, all fp32.
    ddp = 2 * 8_030_261_248 + 20 * 20_971_520
    assert total_bytes(Strategy.DDP, what, half) == pytest.approx(ddp)
    assert ddp / GIB == pytest.approx(15.35, abs=0.01)
    # DeepSpeed: the adapter in bf16, four workers share gradients and the fp32 states.
    assert total_bytes(Strategy.ZERO2, what, half) == pytest.approx(
        2 * 8_030_261_248 + 20_971_520 * (2 + 2 / 4 + 12 / 4)
    )
    assert total_bytes(Strategy.ZERO3, what, half) == pytest.approx((2 * 8_030_261_248 + 16 * 20_971_520) / 4)
    # A base of four bits a parameter.
    assert total_bytes(Strategy.DDP, what, StatePlacement(half=True, frozen_bits=4)) == pytest.approx(
        8_030_261_248 / 2 + 20 * 20_971_520
    )


def test_a_small_model_in_fp32_as_counted_by_hand() -> None:
    what = load(3_691_776, 3_691_776, width=4)
    fp32 = StatePlacement()
    assert total_bytes(Strategy.DDP, what, fp32) == pytest.approx(20 * 3_691_776)
    assert total_bytes(Strategy.DDP, what, fp32, Layout(nodes=1)) == pytest.approx(16 * 3_691_776)
    assert total_bytes(Strategy.ZERO1, what, fp32) == pytest.approx((4 + 4 + 12 / 4) * 3_691_776)
    assert total_bytes(Strategy.FSDP, what, fp32) == pytest.approx(16 * 3_691_776 / 4)
    assert total_bytes(Strategy.HYBRID_SHARD, what, fp32) == pytest.approx(16 * 3_691_776 / 2)
    assert total_bytes(Strategy.ZERO3_HPZ, what, fp32) == pytest.approx((20 / 4 + 4 / 2) * 3_691_776)
    assert total_bytes(Strategy.SHARD_GRAD_OP, what, fp32) == pytest.approx((4 + 12 / 4) * 3_691_776)


def test_what_is_kept_elsewhere_takes_no_memory_of_the_worker() -> None:
    found = memory_need(Strategy.ZERO3, load(1000, 1000), TWO, StatePlacement(optimizer_elsewhere=True))
    assert found is not None
    assert found.optimizer_gib == 0 < found.parameters_gib
    found = memory_need(Strategy.ZERO3, load(1000, 1000), TWO, StatePlacement(parameters_elsewhere=True))
    assert found is not None
    assert found.parameters_gib == 0 < found.optimizer_gib


def test_a_model_of_unknown_size_has_no_figure() -> None:
    assert memory_need(Strategy.DDP, load(None, 10), TWO, StatePlacement()) is None


@given(trainable=st.integers(1, 10**11), frozen=st.integers(0, 10**11), half=st.booleans())
def test_each_stage_of_zero_takes_no_more_than_the_one_before(trainable: int, frozen: int, *, half: bool) -> None:
    what = load(trainable + frozen, trainable)
    stages = [
        total_bytes(strategy, what, StatePlacement(half=half))
        for strategy in (Strategy.ZERO1, Strategy.ZERO2, Strategy.ZERO3)
    ]
    assert stages == sorted(stages, reverse=True)
