from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from multinode.job.job import ScriptJob, TrainingJob, parse_training
from multinode.job.synthetic import with_synthetic
from multinode.model.workload import FullRun, Workload, read_settings, read_workload
from multinode.stats.unknown import Unknown, reason_of
from multinode.traffic.algorithms import Layout
from multinode.traffic.step_calls import Strategy
from tests.model.trainings import FULL, LORA, TINY, training_job

TWO = Layout(nodes=2)


def job(text: str, *overrides: str) -> TrainingJob:
    return parse_training(f"model_name_or_path: tiny\nstage: sft\n{text}", "sft.yaml", overrides)


def test_what_the_yaml_leaves_out_is_what_llama_factory_takes() -> None:
    found = read_settings(job(""))
    assert (found.method, found.lora_rank, found.strategy) == ("lora", 8, "DDP")
    assert (found.per_device_batch, found.accumulation, found.sequence_length) == (8, 1, 2048)
    assert (found.packing, found.precision, found.recompute, found.overlap) == (False, "fp32", True, True)


def test_what_the_yaml_says_is_taken_from_it() -> None:
    found = read_settings(
        job(
            "finetuning_type: full\nper_device_train_batch_size: 2\ngradient_accumulation_steps: 4\ncutoff_len: 128\n"
            "bf16: true\nneat_packing: true\ndisable_gradient_checkpointing: true\ndataset: a, b"
        )
    )
    assert (found.method, found.lora_rank, found.dataset) == ("full", None, "a,b")
    assert (found.per_device_batch, found.accumulation, found.sequence_length) == (2, 4, 128)
    assert (found.packing, found.precision, found.recompute) == (True, "bf16", False)


@pytest.mark.parametrize("key", ["bf16", "fp16", "neat_packing", "packing", "disable_gradient_checkpointing"])
def test_one_and_zero_are_truth_values(key: str) -> None:
    found = [read_settings(job(f"{key}: {value}")) for value in ("true", "1", "false", "0")]
    assert found[0] == found[1] != found[2] == found[3]


def test_pre_training_packs_and_a_quantised_base_is_told() -> None:
    assert read_settings(training_job(LORA | {"stage": "pt"})).packing is True
    assert read_settings(job("quantization_bit: 4\nlora_rank: 16")).method == "qlora"


def test_made_up_data_are_told_as_such_and_each_of_their_samples_is_a_row() -> None:
    made = with_synthetic(job("dataset: mine\npacking: true\ncutoff_len: 4096\nmax_steps: 20"))
    found = read_settings(made)
    assert (found.dataset, found.stage, found.packing, found.sequence_length) == ("synthetic", "pt", False, 4096)


@pytest.mark.parametrize("value", ["-1", "0", "many", "[2]", "1.5"])
def test_a_value_that_is_no_count_is_unknown(value: str) -> None:
    assert read_settings(job(f"per_device_train_batch_size: {value}")).per_device_batch is None


@pytest.mark.parametrize(
    ("zero", "told"),
    [
        ({"stage": 2}, ("ZeRO-2", False)),
        ({"stage": 2, "overlap_comm": True}, ("ZeRO-2", True)),
        ({"stage": 3}, ("ZeRO-3", True)),
    ],
)
def test_deepspeed_says_how_the_model_is_shared_and_whether_reducing_overlaps(
    zero: dict[str, Any], told: tuple[str, bool]
) -> None:
    found = read_settings(training_job(FULL, **zero))
    assert (found.strategy, found.overlap) == told


@pytest.mark.parametrize(
    ("value", "strategy"),
    [("full_shard auto_wrap", "FSDP"), (["shard_grad_op"], "FSDP SHARD_GRAD_OP"), ({"odd": 1}, "FSDP")],
)
def test_fsdp_is_told_however_it_is_written(value: object, strategy: str) -> None:
    assert read_settings(training_job(FULL | {"fsdp": value})).strategy == strategy


def test_the_work_is_that_of_a_step_whatever_its_accumulation() -> None:
    once, four = (
        read_workload(training_job(FULL | {"gradient_accumulation_steps": steps}), TINY, TWO).work for steps in (1, 4)
    )
    assert not isinstance(once, Unknown)
    assert once == four
    assert once.strategy is Strategy.DDP
    assert sum(call.size_bytes * call.times for call in once.calls[Strategy.DDP]) == once.load.trainable * 4
    assert not any(call.per_micro_batch for call in once.calls[Strategy.DDP])
    zero = read_workload(training_job(FULL, stage=2), TINY, TWO).work
    assert not isinstance(zero, Unknown)
    grows = {call.collective: call.per_micro_batch for call in zero.calls[Strategy.ZERO2]}
    assert grows == {"all_reduce": True, "all_gather": False}


def test_why_the_work_is_not_known_is_said() -> None:
    assert "config.json could not be read" in reason_of(read_workload(training_job(FULL), None, TWO).work)
    script = read_workload(ScriptJob(argv=("train.py", "--lr", "1")), None, TWO)
    assert (script.settings.command, script.settings.method) == ("train.py --lr 1", "script")
    assert "steps" in reason_of(script.work)


@pytest.mark.parametrize(
    ("overrides", "steps", "epochs"),
    [((), 1000, None), (("max_steps=20",), 1000, None), (("num_train_epochs=1",), 1000, None)],
)
def test_the_whole_job_is_the_file_s_where_an_override_cut_it_short(
    overrides: tuple[str, ...], steps: int | None, epochs: float | None
) -> None:
    whole = read_workload(job("max_steps: 1000", *overrides), TINY, TWO).whole
    assert (whole.steps, whole.epochs) == (steps, epochs)


def test_a_job_of_epochs_keeps_them() -> None:
    assert read_workload(job("", "max_steps=20"), TINY, TWO).whole.epochs == 3.0
    assert read_workload(job("num_train_epochs: 2"), TINY, TWO).whole.epochs == 2.0
    assert read_workload(job("num_train_epochs: .nan"), TINY, TWO).whole.epochs is None


def test_epochs_of_made_up_data_are_no_whole_job_and_steps_are() -> None:
    of_epochs = with_synthetic(job("num_train_epochs: 3", "max_steps=20"))
    assert read_workload(of_epochs, TINY, TWO).whole == FullRun()
    of_steps = with_synthetic(job("max_steps: 1000", "max_steps=20"))
    assert read_workload(of_steps, TINY, TWO).whole == FullRun(steps=1000)


def test_it_comes_back_from_the_disk_as_it_was() -> None:
    found = read_workload(training_job(LORA, stage=2), TINY, TWO, versions={"torch": "2.13"})
    assert msgspec.json.decode(msgspec.json.encode(found), type=Workload) == found
    assert json.loads(msgspec.json.encode(found))["versions"] == {"torch": "2.13"}
