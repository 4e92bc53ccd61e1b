from __future__ import annotations

from typing import Any

import pytest

from multinode.model.engine_calls import (
    StepMessages,
    engine_calls,
    estimate_step_us,
    fill_past,
    fill_up_to,
    messages_to_test,
    step_messages,
)
from multinode.model.model_size import ModelShape, lora_parameters, parse_model
from multinode.model.tensors import Adapter, Tensor, tensors_of
from multinode.model.training import read_training
from multinode.model.workload import read_work
from multinode.records.benchmark import Message
from multinode.traffic.algorithms import Layout
from multinode.traffic.step_calls import Call, GroupScope, Strategy, nic_bytes, strategy_calls

from .trainings import FULL, LLAMA_3_8B, LORA, TINY, training_job

TWO = Layout(nodes=2)
# Bytes of the tiny model's tensors and of what DDP and DeepSpeed make of them.
LAYER, TABLE, MLP, SQUARE, NORM = 3_167_232, 2_097_152, 704_512, 262_144, 1_024
ALL = 14_767_104
ADAPTER = 624_640


def messages(config: dict[str, Any], model: dict[str, Any] = TINY, **zero: Any) -> StepMessages:
    return step_messages(training_job(config, **zero), model, TWO)


def calls(step: StepMessages, collective: str) -> list[tuple[float, float]]:
    return [(one.size_bytes, one.times) for one in step.messages if one.collective == collective]


# Recorded with torch 2.13.0, transformers 5.6.0, LLaMA-Factory 0.9.5 and DeepSpeed 0.19.8: configs/tiny_sft.yaml on two
# gloo workers of one node, the fourth step; DDP's own logging data, and the calls of torch.distributed.
@pytest.mark.parametrize(
    ("changes", "recorded"),
    [
        pytest.param({}, [(1_410_048, 1), (13_357_056, 1)], id="first bucket of 1 MiB"),
        pytest.param({"ddp_bucket_cap_mb": 3}, [(LAYER, 4), (2_098_176, 1)], id="cap"),
        pytest.param(
            {"ddp_bucket_cap_mb": 3, "disable_gradient_checkpointing": True},
            [(2_116_608, 1), (LAYER, 3), (3_148_800, 1)],
            id="never rebuilt",
        ),
        pytest.param({"finetuning_type": "lora"}, [(ADAPTER, 1)], id="LoRA"),
    ],
)
def test_ddp_fills_the_buckets_that_were_recorded(changes: dict[str, Any], recorded: list[tuple[int, int]]) -> None:
    step = messages(FULL | changes)
    assert calls(step, "all_reduce") == recorded
    assert len(step.messages) == len(recorded)


@pytest.mark.parametrize(
    ("config", "zero", "reduced", "gathered"),
    [
        pytest.param(FULL, {"stage": 2}, [(ALL, 1)], [(14_745_600, 1), (21_504, 1)], id="ZeRO-2"),
        pytest.param(
            FULL | {"gradient_accumulation_steps": 2},
            {"stage": 2, "reduce_bucket_size": 5e5, "allgather_bucket_size": 5e5},
            [(1_410_048, 2), (1_758_208, 8), (1_409_024, 6), (TABLE, 2)],
            [(14_745_600, 1), (21_504, 1)],
            id="ZeRO-2 in small buckets, twice accumulated",
        ),
        pytest.param(
            FULL | {"gradient_accumulation_steps": 2},
            {"stage": 1, "reduce_bucket_size": 5e5},
            [(TABLE, 1), (1_753_088, 3), (1_933_312, 2), (1_409_024, 2), (726_016, 1)],
            [(14_745_600, 1), (21_504, 1)],
            id="ZeRO-1 goes through the groups in order, once",
        ),
        pytest.param(LORA, {"stage": 2}, [(ADAPTER, 1)], [(ADAPTER, 1)], id="an adapter has one group"),
    ],
)
def test_zero_1_and_2_make_the_calls_that_were_recorded(
    config: dict[str, Any], zero: dict[str, Any], reduced: list[tuple[int, int]], gathered: list[tuple[int, int]]
) -> None:
    step = messages(config, **zero)
    assert sorted(calls(step, "all_reduce")) == sorted(reduced)
    assert calls(step, "all_gather") == gathered


def test_auto_buckets_of_zero_2_differ_from_the_record_where_a_gradient_has_two_owners() -> None:
    step = messages(FULL, stage=2, reduce_bucket_size="auto")
    # Recorded: 11 and one cut into 360448 and 344064, half of the model being in it.
    assert (MLP, 12) in calls(step, "all_reduce")
    assert sum(size * times for size, times in calls(step, "all_reduce")) == ALL
    assert "reduce_bucket_size (65536 elements) is sent alone" in step.notes[0].message
    assert step.notes[0].figures == {"elements": 65536}


# What `auto` stands for was recorded with all three.
AUTO: dict[str, Any] = dict.fromkeys(
    ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"), "auto"
)


def test_zero_3_makes_the_calls_that_were_recorded() -> None:
    step = messages(FULL, stage=3, **AUTO)
    assert calls(step, "all_gather") == [(TABLE, 1), (SQUARE, 16), (MLP, 12), (NORM, 21)]
    reduced = dict(calls(step, "reduce_scatter"))
    assert reduced.pop(NORM) == 21  # recorded: 13 of these, and 4 of twice the size
    assert reduced == {MLP: 12, SQUARE: 16, TABLE: 1}
    defaults = messages(FULL, stage=3)
    assert calls(defaults, "all_gather") == [(10_551_296, 1), (SQUARE, 16), (NORM, 21)]
    assert calls(defaults, "reduce_scatter") == [(ALL, 1)]


# Counted with DeepSpeed 0.19.8 on two nodes with two workers each, in fp32; none stays gathered, none is small.
ALL_ALONE: dict[str, Any] = {
    "stage3_prefetch_bucket_size": 0,
    "stage3_param_persistence_threshold": 0,
    "stage3_max_reuse_distance": 1,
}
TWO_WORKERS_EACH = Layout(nodes=2, workers_per_node=2)


def test_a_second_copy_of_zero_3_leaves_the_first_gathers_of_a_step_between_the_nodes() -> None:
    found = {}
    for hpz in (1, 2):
        job = training_job(FULL, stage=3, zero_hpz_partition_size=hpz, **ALL_ALONE)
        training = read_training(job, TINY)
        assert training.strategy is (Strategy.ZERO3_HPZ if hpz > 1 else Strategy.ZERO3)
        gathers = [one for one in engine_calls(job, training, TWO_WORKERS_EACH)[0] if one.collective == "all_gather"]
        found[hpz] = {
            reach: {one.size_bytes: one.times for one in gathers if one.reach is reach} for reach in GroupScope
        }
    once = {MLP: 12, SQUARE: 16, TABLE: 1, NORM: 21}
    assert found[2][GroupScope.WORLD] == once
    others = {size: times - once[round(size)] for size, times in found[1][GroupScope.WORLD].items()}
    assert found[2][GroupScope.NODE] == others


def test_an_adapter_under_zero_3_with_a_second_copy_sends_none_of_the_frozen_model_between_nodes() -> None:
    job = training_job(LORA, stage=3, zero_hpz_partition_size=2, **ALL_ALONE)
    found = engine_calls(job, read_training(job, TINY), TWO_WORKERS_EACH)[0]
    sent = {reach: sum(call.size_bytes * call.times for call in found if call.reach is reach) for reach in GroupScope}
    assert sent[GroupScope.WORLD] == 2 * ADAPTER  # gathered once, reduced once
    assert sent[GroupScope.NODE] > 20 * sent[GroupScope.WORLD]


@pytest.mark.parametrize("accumulation", [1, 4])
def test_quantised_weights_and_gradients_send_a_byte_and_half_a_byte(accumulation: int) -> None:
    config = FULL | {"bf16": True, "gradient_accumulation_steps": accumulation}
    words = {"zero_quantized_weights": True, "zero_quantized_gradients": True}
    job = training_job(config, stage=3, **ALL_ALONE, **words)
    found = engine_calls(job, read_training(job, TINY), TWO_WORKERS_EACH)[0]
    gathered = sum(call.size_bytes * call.times for call in found if call.collective == "all_gather")
    plain = training_job(config, stage=3, **ALL_ALONE)
    before = engine_calls(plain, read_training(plain, TINY), TWO_WORKERS_EACH)[0]
    assert gathered * 2 == sum(call.size_bytes * call.times for call in before if call.collective == "all_gather")
    exchanged = {
        reach: sum(
            call.size_bytes * call.times for call in found if call.collective == "all_to_all" and call.reach is reach
        )
        for reach in GroupScope
    }
    matrices = ALL / 4 - 21 * NORM / 4
    assert exchanged[GroupScope.NODE] == matrices / 2
    # A node's two workers have halves of the sum.
    assert exchanged[GroupScope.ACROSS] == matrices / 4


def test_zero_3_gathers_an_adapter_with_the_frozen_model() -> None:
    # The sums that were recorded; what is gathered together differs by the adapter's few kilobytes.
    step = messages(LORA, stage=3, **AUTO)
    assert sum(size * times for size, times in calls(step, "all_gather")) == 15_391_744
    assert sum(size * times for size, times in calls(step, "reduce_scatter")) == ADAPTER


FULL_SHARD, GRAD_OP = {"fsdp": "full_shard auto_wrap"}, {"fsdp": "shard_grad_op auto_wrap"}
VERSION_2 = {"fsdp_config": {"version": 2}}
FOUR = {"gradient_accumulation_steps": 4}
OUTER = 2_098_176


# Recorded with LLaMA-Factory on two nodes: see sharded_runs.json.
@pytest.mark.parametrize(
    ("config", "outer", "layers", "reduced"),
    [
        (FULL_SHARD, 1, 8, 1),
        (FULL_SHARD | FOUR, 4, 32, 1),
        (FULL_SHARD | FOUR | VERSION_2, 8, 32, 1),
        (GRAD_OP, 1, 4, 1),
        (GRAD_OP | FOUR, 1, 4, 1),
        (GRAD_OP | FOUR | VERSION_2, 4, 16, 1),
    ],
)
def test_fsdp_makes_the_calls_that_were_recorded(config: dict[str, Any], outer: int, layers: int, reduced: int) -> None:
    step = messages(FULL | config)
    assert calls(step, "all_gather") == [(OUTER, outer), (LAYER, layers)]
    assert calls(step, "reduce_scatter") == [(LAYER, 4 * reduced), (OUTER, reduced)]


@pytest.mark.parametrize("model", [TINY, LLAMA_3_8B])
@pytest.mark.parametrize("config", [FULL, LORA | {"bf16": True, "gradient_accumulation_steps": 3}])
@pytest.mark.parametrize(
    "spread",
    [
        {},
        {"stage": 1},
        {"stage": 2},
        {"stage": 2, "reduce_bucket_size": "auto"},
        FULL_SHARD,
        FULL_SHARD | VERSION_2,
        GRAD_OP,
        GRAD_OP | VERSION_2,
    ],
)
def test_the_calls_add_up_to_what_the_strategy_moves(
    model: dict[str, Any], config: dict[str, Any], spread: dict[str, Any]
) -> None:
    job = training_job(config | spread) if "fsdp" in spread else training_job(config, **spread)
    training = read_training(job, model)
    for one in strategy_calls(training.strategy, training.load, TWO):
        sent = sum(size * times for size, times in calls(step_messages(job, model, TWO), one.collective))
        assert sent == pytest.approx(one.size_bytes * one.times_in(training.accumulation), rel=1e-6)


@pytest.mark.parametrize(
    ("spread", "often"),
    [
        ({"stage": 1}, set()),
        ({"stage": 2}, {"all_reduce"}),
        ({"stage": 3}, {"all_gather", "reduce_scatter"}),
        (FULL_SHARD, {"all_gather"}),
        (GRAD_OP, set()),
        (GRAD_OP | VERSION_2, {"all_gather"}),
    ],
)
def test_an_engine_makes_some_calls_in_every_micro_batch(spread: dict[str, Any], often: set[str]) -> None:
    job = training_job(FULL | spread) if "fsdp" in spread else training_job(FULL, **spread)
    work = read_work(job, TINY, TWO)
    assert {call.collective for call in work.calls_of(work.strategy, TWO) if call.per_micro_batch} == often


def test_a_group_of_parameters_is_padded_to_two_elements_a_worker() -> None:
    step = step_messages(training_job(FULL, stage=2), TINY, Layout(nodes=17))
    # 3686400 elements of weights and 5376 of biases and normalisations, up to the next multiples of 34.
    assert calls(step, "all_gather") == [(4 * 3_686_416, 1), (4 * 5_406, 1)]


def test_a_large_model_is_gathered_twice_a_micro_batch() -> None:
    job = training_job(FULL | {"bf16": True, "gradient_accumulation_steps": 2}, stage=3)
    step = step_messages(job, LLAMA_3_8B, TWO)
    sent = sum(size * times for size, times in calls(step, "all_gather"))
    # What is used last in the forward pass, the output layer, is the first to be used again.
    assert sent == pytest.approx(2 * 2 * (2 * 8_030_261_248 - 128_256 * 4096), rel=0.001)


def test_a_model_that_may_not_stay_whole_is_gathered_anew_for_the_backward_pass() -> None:
    step = messages(FULL, stage=3, stage3_max_reuse_distance=1, **AUTO)
    assert sum(size * times for size, times in calls(step, "all_gather")) > 2 * 14e6


def test_hybrid_shards_cross_the_nodes_in_all_reduces_of_each_workers_share() -> None:
    layout = Layout(nodes=2, workers_per_node=4)
    step = step_messages(training_job(FULL | {"fsdp": "hybrid_shard auto_wrap"}), TINY, layout)
    assert calls(step, "all_reduce") == [(LAYER // 4, 4), (2_098_176 // 4, 1)]
    assert {one.collective for one in step.messages} == {"all_reduce"}
    assert [note.code for note in step.notes] == ["wrapped-layers", "traffic-inside-nodes", "small-calls"]


def test_a_hybrid_job_sends_through_a_nic_what_its_strategy_does() -> None:
    layout, job = Layout(nodes=2, workers_per_node=4), training_job(FULL | {"fsdp": "hybrid_shard auto_wrap"})
    work, training = read_work(job, TINY, layout), read_training(job, TINY)
    formula = strategy_calls(training.strategy, training.load, layout)
    assert nic_bytes(work.calls[training.strategy], layout) == pytest.approx(nic_bytes(formula, layout), rel=0.01)
    assert {call.reach for call in work.calls[training.strategy]} == {GroupScope.NODE, GroupScope.ACROSS}


def test_what_has_no_twin_is_told() -> None:
    step = messages(FULL, stage=2, use_multi_rank_bucket_allreduce=False)
    assert calls(step, "broadcast") == [(ALL, 1)]
    assert "nccl-test has no reduce" in step.notes[0].message


QWEN_3 = LLAMA_3_8B | {"model_type": "qwen3", "head_dim": 128}


def shape_of(config: dict[str, Any]) -> ModelShape:
    shape = parse_model(config)
    assert shape is not None
    return shape


@pytest.mark.parametrize("config", [TINY, LLAMA_3_8B, QWEN_3])
def test_every_parameter_has_one_gradient_in_either_order(config: dict[str, Any]) -> None:
    shape = shape_of(config)
    tensors = tensors_of(shape, None)
    assert tensors.parameters == tensors.trainable == shape.parameters
    assert sorted(one.elements for one in tensors.arriving) == sorted(one.elements for one in tensors.trained)
    assert tensors.outside.base + sum(layer.base for layer in tensors.layers) == shape.parameters


@pytest.mark.parametrize("targets", [("all",), ("q_proj", "v_proj"), ("gate_proj", "lm_head", "embed_tokens")])
def test_every_parameter_of_an_adapter_has_one(targets: tuple[str, ...]) -> None:
    shape = shape_of(LLAMA_3_8B)
    adapter = Adapter(rank=8, targets=targets)
    tensors = tensors_of(shape, adapter)
    for order in (tensors.trained, tensors.arriving):
        assert sum(one.elements for one in order) == tensors.adapters == lora_parameters(shape, 8, targets)


def test_gradients_arrive_from_the_output_to_a_tied_embedding() -> None:
    # The order of the parameters that DDP rebuilt its buckets by, in its own logging data: 49 46 45 44 48 43 42 41.
    order = tensors_of(shape_of(TINY), None).arriving
    mlp, square = Tensor(256 * 688), Tensor(256 * 256)
    vector = Tensor(256, matrix=False)
    assert order[:8] == (vector, mlp, mlp, mlp, vector, square, vector, square)
    assert order[-1] == Tensor(2048 * 256)


def test_an_output_layer_of_its_own_comes_first() -> None:
    assert tensors_of(shape_of(LLAMA_3_8B), None).arriving[0] == Tensor(128_256 * 4096)


def test_ddps_bucket_takes_the_tensor_that_carries_it_past_its_cap() -> None:
    assert fill_past([3, 3, 3, 3, 3, 1], [4, 9]) == (6, 9, 1)
    assert fill_past([20, 1], [4, 9]) == (20, 1)
    assert fill_past([], [4]) == ()


def test_deepspeeds_bucket_is_sent_before_the_tensor_that_does_not_fit() -> None:
    assert fill_up_to([3, 3, 3, 10, 1], 6) == (6, 3, 10, 1)
    assert fill_up_to([], 6) == ()


def step(*calls: tuple[str, int, int]) -> StepMessages:
    found = (Call(collective=name, size_bytes=size, times=times, what="gradients") for name, size, times in calls)
    return StepMessages(training="DDP with LoRA", messages=tuple(found))


def chosen(sent: StepMessages, *, most: int = 10, **named: int) -> list[tuple[str, int]]:
    return [(one.collective, one.size_bytes) for one in messages_to_test(sent, most=most, **named)]


def test_alike_sizes_of_a_collective_are_measured_once_at_the_commonest() -> None:
    sent = step(("all_reduce", 1000, 2), ("all_reduce", 1040, 9), ("all_reduce", 2000, 1), ("all_gather", 1000, 1))
    assert chosen(sent) == [("all_reduce", 1040), ("all_reduce", 2000), ("all_gather", 1000)]


def test_too_many_leave_those_that_carry_most_in_all() -> None:
    sent = step(("all_reduce", 100, 1000), ("all_reduce", 50_000, 1), ("all_gather", 99_000, 1))
    assert chosen(sent, most=2) == [("all_reduce", 100), ("all_gather", 99_000)]
    assert messages_to_test(sent, most=2)[0] == Message(collective="all_reduce", size_bytes=100)


def test_no_collective_is_left_without_a_message_while_another_has_two() -> None:
    sent = step(("all_gather", 9000, 9), ("all_gather", 5000, 9), ("reduce_scatter", 100, 1), ("reduce_scatter", 50, 1))
    assert chosen(sent, most=2) == [("all_gather", 9000), ("reduce_scatter", 100)]
    assert chosen(sent, most=3) == [("all_gather", 5000), ("all_gather", 9000), ("reduce_scatter", 100)]


def test_a_gather_of_a_whole_model_is_measured_at_a_size_that_a_node_holds() -> None:
    sent = step(("all_gather", 32_000_000_000, 1), ("all_gather", 16_000_000_000, 1))
    assert chosen(sent) == [("all_gather", 1 << 30)]
    assert chosen(sent, largest_bytes=1 << 20) == [("all_gather", 1 << 20)]


def test_sizes_are_rounded_up_to_what_divides_among_the_workers() -> None:
    assert chosen(step(("all_gather", 1001, 1)), multiple=12) == [("all_gather", 1008)]


def test_the_estimate_counts_every_call_at_its_own_size() -> None:
    sent = step(("all_reduce", 1000, 3), ("all_gather", 500, 2))
    assert estimate_step_us(sent, lambda name, size: size / 10 + (5 if name == "all_gather" else 0)) == pytest.approx(
        3 * 100 + 2 * 55
    )


def test_one_time_that_nobody_knows_leaves_no_estimate() -> None:
    sent = step(("all_reduce", 1000, 3), ("all_gather", 500, 2))
    assert estimate_step_us(sent, lambda name, _: 1.0 if name == "all_reduce" else None) is None
