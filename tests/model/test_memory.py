from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from multinode.job.deepspeed import DeepSpeedConfig
from multinode.model.memory import (
    MicroBatch,
    PeakMemory,
    StatePlacement,
    WorkerMemory,
    decoder_widths,
    memory_need,
)
from multinode.model.model_size import lora_parameters, parse_model
from multinode.traffic.algorithms import Layout
from multinode.traffic.step_calls import Strategy, TrafficInputs
from tests.model.trainings import LLAMA_3_8B

ONE, TWO = Layout(nodes=1), Layout(nodes=2, workers_per_node=2)
GIB = 1 << 30
ADAPTER = 20_971_520


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


def worker(strategy: Strategy = Strategy.DDP, layout: Layout = ONE, **batch: Any) -> WorkerMemory:
    """Llama-3-8B with an adapter of rank 8 in bf16, 1,000 tokens at once."""
    shape, widths = parse_model(LLAMA_3_8B), decoder_widths(LLAMA_3_8B)
    assert shape is not None
    assert widths is not None
    micro_batch = {"samples": 1, "tokens": 1000, "adapted": ("all",), "varied": False, **batch}
    return WorkerMemory(
        strategy=strategy,
        load=load(shape.parameters + ADAPTER, ADAPTER),
        layout=layout,
        placement=StatePlacement(half=True),
        widths=widths,
        batch=MicroBatch(**micro_batch),
    )


def peak_of(memory: WorkerMemory) -> PeakMemory:
    found = memory.peak()
    assert found is not None
    return found


def test_the_peak_of_llama_3_8b_as_counted_by_hand() -> None:
    # Each of 32 layers keeps its input; the loss needs three times 128,256 fp32 values a token.
    peak = peak_of(worker())
    assert peak.activations_gib * GIB == pytest.approx(1000 * 32 * 2 * 4096)
    assert peak.working_gib * GIB == pytest.approx(1000 * 12 * 128_256)
    # A loop that holds the model's outputs holds its logits in half precision, too.
    assert peak_of(worker(holds_outputs=True)).working_gib * GIB == pytest.approx(1000 * 14 * 128_256)
    # With Liger one layer needs more than the loss.
    # Two normalizations in fp32; the products of attention and MLP; a copy of what each of seven adapters reads; the
    # gradients of three products of the MLP, and that of an adapter's copy of one.
    layer = 2 * 4 * 4096 + 2 * (2 * 4096 + 2 * 1024 + 3 * 14336) + 2 * (6 * 4096 + 14336)
    assert peak_of(worker(fused_loss=True)).working_gib * GIB == pytest.approx(1000 * (layer + 10 * 14336))
    whole = peak_of(worker(recompute=False))
    assert whole.activations_gib * GIB == pytest.approx(1000 * 32 * layer)
    # Eager attention keeps 32 x 1,000 scores a token and layer, in fp32 and in half.
    eager = peak_of(worker(recompute=False, eager=True))
    assert (eager.activations_gib - whole.activations_gib) * GIB == pytest.approx(1000 * 32 * 6 * 32 * 1000)


def quantised(memory: WorkerMemory, **how: Any) -> PeakMemory:
    return peak_of(replace(memory, placement=StatePlacement(half=True, frozen_bits=4, **how)))


def test_a_quantized_matrix_is_whole_while_it_is_used() -> None:
    fused = worker(fused_loss=True)
    plain, one, layer = (
        found.working_gib * GIB for found in (peak_of(fused), quantised(fused), quantised(fused, whole_layer=True))
    )
    assert one - plain == pytest.approx(2 * 4096 * 14336)
    # GPTQ's: all seven matrices of a layer.
    assert layer - plain == pytest.approx(2 * 4096 * (2 * 4096 + 2 * 1024 + 3 * 14336))


def test_matrices_of_an_old_bitsandbytes_keep_their_inputs() -> None:
    """One of queries, keys and values, one of gate and up, and that of down; attention's output is kept anyway."""
    kept = [
        quantised(worker(recompute=False, adapted=("o_proj",), keeps_inputs=keeps)).activations_gib * GIB
        for keeps in (False, True)
    ]
    assert kept[1] - kept[0] == pytest.approx(1000 * 32 * 2 * (2 * 4096 + 14336))


def test_adapters_with_dropout_keep_a_copy_and_a_mask_each() -> None:
    """Without, those of queries and values share their input."""
    bf16 = StatePlacement(half=True, trained_bytes=2)
    kept = [
        peak_of(replace(worker(recompute=False, adapted=("q_proj", "v_proj"), dropout=dropout), placement=bf16))
        for dropout in (False, True)
    ]
    assert (kept[1].activations_gib - kept[0].activations_gib) * GIB == pytest.approx(1000 * 32 * (2 * 3 - 2) * 4096)


@pytest.mark.parametrize(("upcast", "kept", "back"), [(False, 6, 14), (True, 4, 16)])
def test_eager_attention_has_its_scores_four_times_on_the_way_back(upcast: bool, kept: int, back: int) -> None:  # noqa: FBT001
    def scores(**batch: Any) -> tuple[float, float]:
        eager, flash = (
            peak_of(worker(fused_loss=True, tokens=8000, adapted=("o_proj",), upcast=upcast, eager=is_eager, **batch))
            for is_eager in (True, False)
        )
        activations, working = (eager.activations_gib - flash.activations_gib, eager.working_gib - flash.working_gib)
        return activations * GIB / (8000 * 32 * 8000), working * GIB / (8000 * 32 * 8000)

    activations, working = scores(recompute=False)
    assert activations == pytest.approx(32 * kept)
    # Where they are at their peak, the MLP has nothing left.
    assert back - 0.7 < activations / 32 + working < back
    activations, working = scores(recompute=True)
    assert activations == 0
    assert back - 1.5 < working < back


def test_blocks_of_the_loss_that_hold_no_scores_stay_reserved() -> None:
    # 32 heads x 4,008 tokens are 128,256: from there on a sample's scores are larger than its logits.
    for tokens, stranded in ((4000, 0), (4100, 12 * 4100 * 128_256)):
        peak = peak_of(worker(tokens=tokens, eager=True))
        assert peak.stranded_gib * GIB == pytest.approx(stranded)
        assert peak.shown.value - peak.needed.value == pytest.approx(peak.stranded_gib)


def test_what_suffices_is_less_than_what_samples_of_different_lengths_leave_reserved() -> None:
    same, varied = peak_of(worker()), peak_of(worker(varied=True))
    assert varied.needed == same.needed
    assert varied.shown.value > same.shown.value == pytest.approx(same.needed.value)
    assert sum(same.parts.values()) == pytest.approx(same.needed.value)


def test_sharded_parameters_are_gathered() -> None:
    two = Layout(nodes=2)
    sharded, whole = (peak_of(worker(strategy, two)) for strategy in (Strategy.ZERO3, Strategy.ZERO2))
    assert sharded.states.total_gib < whole.states.total_gib
    # A billion parameters stay whole until they are used again; buckets of gradients have half as many elements.
    assert sharded.gathered_gib * GIB == pytest.approx(2 * (1_000_000_000 + 500_000_000))
    assert whole.gathered_gib * GIB == pytest.approx(2 * 500_000_000)


@pytest.mark.parametrize(
    ("stage", "buckets"),
    # A bucket of hidden x hidden elements is the Trainer's `auto`; overlap adds a second one, but not to stage 3.
    [(1, 2), (2, 2), (3, 1)],
)
def test_buckets_of_deepspeed_are_as_many_as_its_stage_has(stage: int, buckets: int) -> None:
    settings = DeepSpeedConfig(stage=stage, reduce_bucket_elements=None, overlap_comm=True, reuse_elements=0)
    found = peak_of(replace(worker(Strategy.of_stage(stage), Layout(nodes=2)), deepspeed=settings))
    assert found.gathered_gib * GIB == pytest.approx(buckets * 2 * 4096**2)


def test_widths_of_a_mixture_of_experts_and_of_a_model_with_images() -> None:
    mixture = LLAMA_3_8B | {"num_experts_per_tok": 8, "moe_intermediate_size": 768, "num_experts": 128}
    found = decoder_widths(mixture)
    assert found is not None
    assert found.inner == 8 * 768
    assert decoder_widths({"model_type": "qwen2_vl", "text_config": LLAMA_3_8B}) == decoder_widths(LLAMA_3_8B)
    assert decoder_widths({"model_type": "llama"}) is None
