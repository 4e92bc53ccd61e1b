from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from multinode.job.frameworks.framework import find_framework
from multinode.job.job import (
    Job,
    ScriptJob,
    TrainingJob,
    argument_keys,
    benchmark_job,
    describe_job,
    job_paths,
    named_paths,
    override_job,
    parse_overrides,
    parse_training,
    render_job,
)
from tests.golden import Golden, error_of

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
TEXT = "# mine\nmodel_name_or_path: /models/tiny   # a comment\nstage: sft\nlearning_rate: 1e-4\n"


def job(**config: object) -> TrainingJob:
    return TrainingJob(config_path="sft.yaml", text="", config={"model_name_or_path": "Qwen/Qwen2-7B", **config})


def test_a_yaml_is_kept_verbatim_and_read() -> None:
    parsed = parse_training(TEXT, "configs/sft.yaml")
    assert (parsed.config_path, parsed.text) == ("configs/sft.yaml", TEXT)
    assert parsed.config == {"model_name_or_path": "/models/tiny", "stage": "sft", "learning_rate": 1e-4}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"model_name_or_path": "m", "stage": "sft"}, True),
        ({"model_name_or_path": "m", "finetuning_type": "lora"}, True),
        ({"model_name_or_path": "m", "do_train": True}, True),
        ({"model_name_or_path": "m"}, False),
        ({"stage": "sft"}, False),
        ({"compute_environment": "LOCAL_MACHINE", "num_processes": 2}, False),
        ({}, False),
    ],
)
def test_a_training_is_recognised_by_its_keys(config: dict[str, object], *, expected: bool) -> None:
    assert find_framework("llamafactory").recognises(config) is expected


def test_what_is_no_training_is_refused_with_how_a_script_is_launched(golden: Golden) -> None:
    incomplete = ("stage: sft\n", "model_name_or_path: m\n", "", "- stage\n", "sft", "1: sft")
    wrong = ("stage: sft\nstage: pt\n",)
    golden.check_errors(
        "refused_yaml", {repr(text): error_of(parse_training, text, "sft.yaml") for text in (*incomplete, *wrong)}
    )


def test_overrides_are_read_as_yaml_and_the_last_one_counts() -> None:
    given = ("max_steps=5", "learning_rate=1e-5", "bf16=true", "run_name=a=b", "x=1", "x=null", "tags=[a, b]")
    assert parse_overrides(given) == {
        "max_steps": 5,
        "learning_rate": 1e-5,
        "bf16": True,
        "run_name": "a=b",
        "x": None,
        "tags": ["a", "b"],
    }


def test_a_wrong_override_is_refused_with_a_right_one(golden: Golden) -> None:
    wrong = ("max_steps", "=5", "max steps=5", "max_steps=", "name=#1")
    golden.check_errors(
        "refused_overrides", {text: error_of(parse_training, TEXT, "sft.yaml", [text]) for text in wrong}
    )


def test_what_is_no_yaml_is_refused_with_its_place() -> None:
    """The words are the parser's."""
    tab = error_of(parse_training, "a:\n\tb: 1\n", "sft.yaml")
    assert (tab.message.split(" ")[0], tab.hint) == ("sft.yaml:2:", "indent with spaces")
    assert error_of(parse_training, "a: !!int ''", "sft.yaml").message.startswith("sft.yaml: ")
    for value in ("[1", "a: b: c", "!!int ''"):
        error = error_of(parse_training, TEXT, "sft.yaml", [f"name={value}"])
        assert error.message.startswith(f"--set name: {value!r} is not a YAML value: ")
        assert error.hint == "quote text: --set name='\"...\"'"


def test_an_override_can_make_a_training_complete() -> None:
    parsed = parse_training("stage: sft\n", "sft.yaml", ["model_name_or_path=m"])
    assert parsed.config["model_name_or_path"] == "m"


def test_an_untouched_job_travels_as_it_was_written() -> None:
    assert render_job(parse_training(TEXT, "sft.yaml")) == TEXT


def test_a_changed_job_is_written_anew_and_says_what_changed() -> None:
    text = TEXT + "deepspeed: ds.json\n"
    changed = parse_training(text, "sft.yaml", ["learning_rate=1e-5", "max_steps=3"])
    rendered = render_job(override_job(changed, {"deepspeed": "/home/u/run/deepspeed.json"}))
    first, rest = rendered.split("\n", 1)
    assert first == "# sft.yaml with these keys changed by multinode: learning_rate, max_steps, deepspeed"
    assert yaml.safe_load(rest) == {
        "model_name_or_path": "/models/tiny",
        "stage": "sft",
        "learning_rate": 1e-5,
        "deepspeed": "/home/u/run/deepspeed.json",
        "max_steps": 3,
    }
    assert [line.split(":")[0] for line in rest.splitlines()] == [*changed.config]


@given(st.text())
def test_no_name_of_a_file_gets_out_of_the_comment(name: str) -> None:
    changed = parse_training(TEXT, name, ["max_steps=3"])
    assert yaml.safe_load(render_job(changed)) == {**changed.config}


@pytest.mark.parametrize(
    ("config", "paths"),
    [
        ({}, []),
        ({"model_name_or_path": "/models/m"}, ["/models/m"]),
        ({"model_name_or_path": "./m"}, ["./m"]),
        ({"model_name_or_path": "~/m"}, ["~/m"]),
        ({"model_name_or_path": "../m"}, ["../m"]),
        ({"adapter_name_or_path": "/a/one, /a/two"}, ["/a/one", "/a/two"]),
        ({"resume_from_checkpoint": "/saves/checkpoint-5"}, ["/saves/checkpoint-5"]),
        ({"resume_from_checkpoint": True}, []),
        ({"media_dir": "/media"}, ["/media"]),
        ({"dataset_dir": "datasets/"}, ["datasets/", "datasets/dataset_info.json"]),
        ({"dataset": "alpaca"}, ["data", "data/dataset_info.json"]),
        ({"dataset": "alpaca", "dataset_dir": "ONLINE"}, []),
        ({"dataset": "alpaca", "dataset_dir": "REMOTE:owner/name"}, []),
        ({"deepspeed": "/etc/ds.json"}, ["/etc/ds.json"]),
        ({"deepspeed": {"zero_optimization": {"stage": 2}}}, []),
        ({"output_dir": "/saves/m", "template": "qwen"}, []),
        ({"model_name_or_path": "/m", "ref_model": "/m"}, ["/m"]),
    ],
)
def test_every_node_needs_what_is_read_and_does_not_travel(config: dict[str, object], paths: list[str]) -> None:
    assert list(job_paths(job(**config))) == paths


def test_a_relative_path_is_told_from_a_name_of_the_hub_by_being_there() -> None:
    named = job(model_name_or_path="assets/tiny")
    assert named_paths(named) == ("assets/tiny",)
    assert job_paths(named) == ()
    assert job_paths(msgspec.structs.replace(named, local_paths=("assets/tiny",))) == ("assets/tiny",)


def test_a_deepspeed_configuration_that_travels_is_not_looked_for() -> None:
    assert job_paths(msgspec.structs.replace(job(deepspeed="ds.json"), deepspeed_text="{}")) == ()


@pytest.mark.parametrize(
    ("described", "words"),
    [
        (job(stage="sft", finetuning_type="full"), "sft.yaml (LLaMA-Factory sft full)"),
        (job(), "sft.yaml (LLaMA-Factory)"),
        (ScriptJob(argv=("train.py", "--epochs", "3")), "train.py"),
    ],
)
def test_a_job_is_described_in_a_few_words(described: Job, words: str) -> None:
    assert describe_job(described) == words


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_sample_is_a_training_that_notices_a_dead_peer(path: Path) -> None:
    parsed = parse_training(path.read_text(), path.name)
    assert parsed.config["do_train"] is True
    assert parsed.config["ddp_timeout"] <= 3600


def test_the_published_run_is_there_with_its_settings() -> None:
    path = next(path for path in CONFIGS if path.name == "qwen2vl_lora_sft.yaml")
    config = parse_training(path.read_text(), path.name).config
    targets = {"k_proj", "up_proj", "o_proj", "v_proj", "q_proj", "gate_proj", "down_proj", "embed_tokens"}
    assert set(config["lora_target"].split(",")) == targets
    expected = {
        "lora_rank": 8,
        "lora_alpha": 16,
        "bf16": True,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 1,
        "num_train_epochs": 3.0,
        "deepspeed": "configs/deepspeed/ds_z2_config.json",
    }
    assert {key: config[key] for key in expected} == expected


def test_the_keys_that_must_be_arguments_are_those_of_the_yaml_and_of_set() -> None:
    job = parse_training("model_name_or_path: m\nstage: sft\n", "sft.yaml", ["cutof_len=3"])
    assert argument_keys(job) == argument_keys(job, ["HF_TOKEN"]) == ("model_name_or_path", "stage", "cutof_len")
    assert argument_keys(job, ["ALLOW_EXTRA_ARGS"]) == argument_keys(job, ["A", "USE_MCA"]) == ()
    assert argument_keys(ScriptJob(argv=("train.py",))) == argument_keys(None) == ()


def test_a_run_for_its_figures_leaves_what_the_user_trained_alone() -> None:
    job = parse_training(TEXT + "output_dir: saves/mine\neval_strategy: steps\nval_size: 0.1\n", "sft.yaml")
    measured = benchmark_job(job)
    assert not measured.keeps_output
    told = yaml.safe_load(render_job(override_job(measured, {"output_dir": "/home/u/run/output"})))
    assert told["output_dir"] == "/home/u/run/output"
    assert (told["save_strategy"], told["eval_strategy"], told["report_to"]) == ("no", "no", "none")
    assert told["overwrite_output_dir"] is True
    # What the data are split into is the training's own.
    assert told["val_size"] == 0.1
    assert "resume_from_checkpoint" not in told
