from __future__ import annotations

from typing import Any

import pytest

from multinode.analyse.job.gradients import Gradient, arriving, fill_past, fill_up_to, registered
from multinode.analyse.job.model_size import ModelShape, lora_parameters, parse_model
from multinode.analyse.job.training import Adapter

from .trainings import LLAMA_3_8B, TINY

QWEN_3 = LLAMA_3_8B | {"model_type": "qwen3", "head_dim": 128}


def shape_of(config: dict[str, Any]) -> ModelShape:
    shape = parse_model(config)
    assert shape is not None
    return shape


@pytest.mark.parametrize("config", [TINY, LLAMA_3_8B, QWEN_3])
def test_every_parameter_has_one_gradient_in_either_order(config: dict[str, Any]) -> None:
    shape = shape_of(config)
    assert sum(one.elements for one in registered(shape, None)) == shape.parameters
    assert sorted(one.elements for one in arriving(shape, None)) == sorted(
        one.elements for one in registered(shape, None)
    )


@pytest.mark.parametrize("targets", [("all",), ("q_proj", "v_proj"), ("gate_proj", "lm_head", "embed_tokens")])
def test_every_parameter_of_an_adapter_has_one(targets: tuple[str, ...]) -> None:
    shape = shape_of(LLAMA_3_8B)
    adapter = Adapter(rank=8, targets=targets)
    for order in (registered, arriving):
        assert sum(one.elements for one in order(shape, adapter)) == lora_parameters(shape, 8, targets)


def test_gradients_arrive_from_the_output_to_a_tied_embedding() -> None:
    # The order of the parameters that DDP rebuilt its buckets by, in its own logging data: 49 46 45 44 48 43 42 41.
    order = arriving(shape_of(TINY), None)
    mlp, square = Gradient(256 * 688), Gradient(256 * 256)
    vector = Gradient(256, matrix=False)
    assert order[:8] == (vector, mlp, mlp, mlp, vector, square, vector, square)
    assert order[-1] == Gradient(2048 * 256)


def test_an_output_layer_of_its_own_comes_first() -> None:
    assert arriving(shape_of(LLAMA_3_8B), None)[0] == Gradient(128_256 * 4096)


def test_ddps_bucket_takes_the_tensor_that_carries_it_past_its_cap() -> None:
    assert fill_past([3, 3, 3, 3, 3, 1], [4, 9]) == (6, 9, 1)
    assert fill_past([20, 1], [4, 9]) == (20, 1)
    assert fill_past([], [4]) == ()


def test_deepspeeds_bucket_is_sent_before_the_tensor_that_does_not_fit() -> None:
    assert fill_up_to([3, 3, 3, 10, 1], 6) == (6, 3, 10, 1)
    assert fill_up_to([], 6) == ()
