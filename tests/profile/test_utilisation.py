from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest

from multinode.job.synthetic import with_synthetic
from multinode.profile.observed import Observed, ObservedNode, observe
from multinode.profile.throughput import Throughput, Utilisation, measure_throughput, read_model_work, utilisation_of
from multinode.records.samples import ModelSample, Sample, TokenWork
from multinode.stats.estimate import exactly, value_of
from multinode.stats.unknown import UNMEASURED, UnknownError, known, reason_of
from tests.model.trainings import FULL, LORA, TINY, training_job
from tests.profile.made_up_steps import MadeUp, changed

SPEED = Throughput(tgs=exactly(8000.0), tokens_per_sample=512.0, attention_length=512.0)
BF16 = {"mixed_precision": "bf16", "tf32": False, "dtypes": {"float32": 1000}}


def on_gpus(*of_nodes: list[int], **said: Any) -> Observed:
    """A worker a node; each node says so often of which ranks' model that it is on an RTX 4090."""
    nodes = [
        ObservedNode(
            name=f"node{number}",
            node_rank=number,
            ranks=(number,),
            samples=tuple(gpu(rank, **said or BF16) for rank in ranks),
        )
        for number, ranks in enumerate(of_nodes)
    ]
    return observe("r", nodes)


def gpu(rank: int, **said: Any) -> ModelSample:
    return ModelSample(
        rank=rank,
        wrapper="ddp",
        parameters=1,
        trainable=1,
        device="cuda",
        device_name="NVIDIA GeForce RTX 4090",
        **said,
    )


def used(observed: Observed) -> Utilisation:
    found = utilisation_of(read_model_work(training_job(FULL), TINY), observed, SPEED)
    assert isinstance(found, Utilisation)
    return found


def test_a_worker_that_tells_its_model_again_takes_no_mfu_away() -> None:
    once = used(on_gpus([0], [1]))
    assert once.mfu is not None
    assert used(on_gpus([0, 0, 0], [1, 1])) == once


def test_a_worker_whose_gpu_is_not_known_leaves_no_mfu_and_no_other_node_speaks_for_it() -> None:
    assert used(on_gpus([0], [])).mfu is None
    assert used(on_gpus([0, 1], [])).mfu is None
    assert used(on_gpus([0], [])).denominator == "not every worker reported its GPU"
    assert used(on_gpus([], [])).denominator == "no worker uses a GPU"


@pytest.mark.parametrize(
    "changes",
    [
        {"stage": "dpo"},
        {"stage": "rm"},
        {"stage": "ppo"},
        {"stage": "kto"},
        {"use_dora": True},
        {"additional_target": "embed_tokens"},
        {"adapter_name_or_path": "earlier"},
    ],
)
def test_trainings_whose_flops_are_not_counted_have_a_reason_and_no_shape(changes: dict[str, Any]) -> None:
    work = read_model_work(training_job(LORA | changes), TINY)
    (key,) = changes
    reason = reason_of(work.shape)
    assert f"{key}: {changes[key]}" in reason
    with pytest.raises(UnknownError, match=re.escape(reason)):
        utilisation_of(work, on_gpus([0], [1]), SPEED)


@pytest.mark.parametrize("changes", [{}, {"stage": "pt"}, {"quantization_bit": 4}])
def test_an_adapter_on_a_quantised_base_computes_what_any_adapter_does(changes: dict[str, Any]) -> None:
    work = read_model_work(training_job(LORA | changes), TINY)
    assert (reason_of(work.shape), work.adapter_parameters) == ("", 156_160)


@pytest.mark.parametrize(
    ("said", "share"),
    [
        (BF16, "165.2 TFLOP/s per GPU, dense bf16"),
        (BF16 | {"mixed_precision": "fp16"}, "165.2 TFLOP/s per GPU, dense fp16"),
        (BF16 | {"mixed_precision": None}, "82.6 TFLOP/s per GPU, dense fp32"),
        (BF16 | {"mixed_precision": None, "tf32": True}, "82.6 TFLOP/s per GPU, dense tf32"),
        # DeepSpeed and pure_bf16: the weights are what they are multiplied in, whatever a norm is kept in.
        ({"mixed_precision": None, "dtypes": {"bfloat16": 900, "float32": 100}}, "165.2 TFLOP/s per GPU, dense bf16"),
        # FSDP gathers its parameters as another type than it keeps them in.
        ({"dtypes": {"float32": 9}, "settings": {"param_dtype": "bfloat16"}}, "165.2 TFLOP/s per GPU, dense bf16"),
        ({"mixed_precision": "fp8", "dtypes": {"float32": 9}}, "the peak of NVIDIA GeForce RTX 4090 in fp8 is"),
        # Older records, where accelerate may have multiplied parameters of fp32 in anything.
        ({"dtypes": {"bfloat16": 900, "float32": 100}}, "165.2 TFLOP/s per GPU, dense bf16"),
        ({"dtypes": {"float32": 9}}, "the precision of the matrix products is unknown"),
        ({"dtypes": {"uint8": 9}}, "the precision of the matrix products is unknown"),
    ],
)
def test_the_share_is_of_the_peak_in_the_precision_that_the_workers_multiplied_in(
    said: dict[str, Any], share: str
) -> None:
    found = used(on_gpus([0], [1], **said))
    assert found.denominator.startswith(share)
    assert (found.mfu is None) == share.startswith("the ")


def test_what_a_job_multiplies_in_fp8_has_no_share_of_a_peak() -> None:
    work = read_model_work(training_job(FULL | {"bf16": True, "fp8": True}), TINY)
    found = utilisation_of(work, on_gpus([0], [1]), SPEED)
    assert (found.mfu, found.denominator) == (None, "the peak of NVIDIA GeForce RTX 4090 in fp8 is unknown")
    assert found.model_tflops > 0


def test_attention_is_by_the_squares_of_the_lengths_and_older_runs_say_that_it_is_a_bound() -> None:
    packed = FULL | {"packing": True, "max_steps": 20}
    older = msgspec.structs.replace(SPEED, attention_length=UNMEASURED)
    cases: list[tuple[dict[str, Any], Throughput, str, str | None]] = [
        (FULL, msgspec.structs.replace(SPEED, attention_length=640.0), "attention over 640 tokens", None),
        (FULL, older, "attention over 512 tokens", "lower bound"),
        (packed, older, "attention over 512 tokens", "upper bound"),
    ]
    for config, speed, over, bound in cases:
        rule = utilisation_of(read_model_work(training_job(config), TINY), on_gpus([0], [1]), speed).rule
        assert f"{over}, counted in full, as in PaLM's MFU" in rule
        assert ("bound" in rule) is (bound is not None)
        assert bound is None or bound in rule


def test_made_up_rows_attend_over_all_their_tokens() -> None:
    packed = with_synthetic(training_job(FULL | {"packing": True, "max_steps": 20}))
    assert "attention over 512 tokens, counted in full" in (
        utilisation_of(read_model_work(packed, TINY), on_gpus([0], [1]), SPEED).rule
    )


@pytest.mark.parametrize(("uuids", "gpus"), [(("u1", "u1"), 1), (("u1", "u2"), 2), ((None, None), 2)])
def test_a_gpu_that_two_workers_share_counts_once(uuids: tuple[str | None, str | None], gpus: int) -> None:
    def on_its_gpu(sample: Sample) -> Sample:
        if isinstance(sample, ModelSample):
            return msgspec.structs.replace(sample, device_uuid=uuids[sample.rank])
        return sample

    made_up = MadeUp(device="cuda")
    alone, shared = measure_throughput(made_up.observed()), changed(made_up.observed(), on_its_gpu)
    assert value_of(measure_throughput(shared).tgs) == pytest.approx(known(alone.tgs).value * 2 / gpus)
    each = [[gpu(rank, device_uuid=uuid)] for rank, uuid in enumerate(uuids)]
    nodes = [
        msgspec.structs.replace(node, samples=tuple(samples))
        for node, samples in zip(on_gpus([0], [1]).nodes, each, strict=True)
    ]
    rule = used(observe("r", nodes)).rule
    assert ("2 workers share 1 GPU, which counts once" in rule) == (gpus == 1)


def test_of_experts_those_that_a_token_passes_count_also_where_only_a_node_counted_them() -> None:
    dense: dict[str, Any] = {"hidden": 64, "tied": False, "table": 64_000, "parts": []}
    works = {"2 of 8": 150_000, "8 of 8": 600_000}
    found = {}
    for experts, trained in works.items():
        counted = dense | {"work": {"is": "work", "trained": trained, "experts": experts}}
        work = read_model_work(training_job(FULL), {"model_type": "qwen3_moe", "counted": counted})
        found[experts] = utilisation_of(work, on_gpus([0], [1]), SPEED)
        assert f"; for experts, {experts}" in found[experts].rule
    few, all_of_them = (each.model_tflops for each in found.values())
    assert all_of_them == pytest.approx(4 * few)
    # Checkpointing repeats the layers, 2 FLOP per weight of 6, and not the output layer, whose 64,000 are the table's.
    again = found["8 of 8"].hardware_tflops / all_of_them
    assert again == pytest.approx(1 + (600_000 - 64_000) / 600_000 / 3)
    # What the workers tell wins.
    told = on_gpus([0], [1], **BF16, token_work=TokenWork(trained=300_000))
    assert utilisation_of(work, told, SPEED).model_tflops == pytest.approx(2 * few)
