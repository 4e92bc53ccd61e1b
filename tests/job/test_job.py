from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from multinode.errors import JobError
from multinode.job.job import (
    Job,
    LlamaFactoryJob,
    ScriptJob,
    argument_keys,
    benchmark_job,
    describe_job,
    is_llamafactory,
    job_paths,
    named_paths,
    parse_llamafactory,
    parse_overrides,
    render_job,
)

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
TEXT = "# mine\nmodel_name_or_path: /models/tiny   # a comment\nstage: sft\nlearning_rate: 1e-4\n"


def job(**config: object) -> LlamaFactoryJob:
    return LlamaFactoryJob(config_path="sft.yaml", text="", config={"model_name_or_path": "Qwen/Qwen2-7B", **config})


def complaint(text: str, *overrides: str) -> JobError:
    with pytest.raises(JobError) as caught:
        parse_llamafactory(text, "sft.yaml", overrides)
    return caught.value


def test_a_yaml_is_kept_verbatim_and_read() -> None:
    parsed = parse_llamafactory(TEXT, "configs/sft.yaml")
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
    assert is_llamafactory(config) is expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stage: sft\n", "sft.yaml is not a LLaMA-Factory training: it has no model_name_or_path"),
        ("model_name_or_path: m\n", "sft.yaml is not a LLaMA-Factory training: it has none of its keys (dataset, "),
        ("", "sft.yaml:1: expected lines of `key: value`, found nothing"),
        ("- stage\n", "sft.yaml:1: expected lines of `key: value`, found a list"),
        ("sft", "sft.yaml:1: expected lines of `key: value`, found a single value"),
        ("1: sft", "sft.yaml:1: expected lines of `key: value`, found a key that is not text"),
    ],
)
def test_what_is_no_training_is_told_how_a_script_is_launched(text: str, message: str) -> None:
    error = complaint(text)
    assert str(error).startswith(message)
    assert error.hint is not None
    assert "multinode launch -- train.py" in error.hint


def test_a_wrong_yaml_is_an_error_with_file_and_line() -> None:
    assert str(complaint("stage: sft\nstage: pt\n")) == "sft.yaml:2: duplicate key 'stage' (line 1)"
    tab = complaint("a:\n\tb: 1\n")
    assert str(tab).startswith("sft.yaml:2: ")
    assert tab.hint == "indent with spaces"
    assert str(complaint("a: !!int ''")).startswith("sft.yaml: a value does not fit its type")


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


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("max_steps", "--set 'max_steps' is not KEY=VALUE"),
        ("=5", "--set '=5' is not KEY=VALUE"),
        ("max steps=5", "--set 'max steps=5' is not KEY=VALUE"),
        ("max_steps=", "--set 'max_steps=' gives max_steps no value"),
        ("name=#1", "--set 'name=#1' gives name no value"),
        ("name=[1", "--set name: '[1' is not a YAML value"),
        ("name=a: b: c", "--set name: 'a: b: c' is not a YAML value"),
        ("name=!!int ''", "--set name: \"!!int ''\" is not a YAML value"),
    ],
)
def test_a_wrong_override_is_told_with_a_right_one(override: str, message: str) -> None:
    error = complaint(TEXT, override)
    assert str(error).startswith(message)
    assert error.hint is not None
    assert "--set" in error.hint


def test_an_override_can_make_a_training_complete() -> None:
    parsed = parse_llamafactory("stage: sft\n", "sft.yaml", ["model_name_or_path=m"])
    assert parsed.config["model_name_or_path"] == "m"


def test_an_untouched_job_travels_as_it_was_written() -> None:
    assert render_job(parse_llamafactory(TEXT, "sft.yaml"), {}) == TEXT


def test_a_changed_job_is_written_anew_and_says_what_changed() -> None:
    text = TEXT + "deepspeed: ds.json\n"
    changed = parse_llamafactory(text, "sft.yaml", ["learning_rate=1e-5", "max_steps=3"])
    rendered = render_job(changed, {"deepspeed": "/home/u/run/deepspeed.json"})
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
    changed = parse_llamafactory(TEXT, name, ["max_steps=3"])
    assert yaml.safe_load(render_job(changed, {})) == {**changed.config}


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
    parsed = parse_llamafactory(path.read_text(), path.name)
    assert parsed.config["do_train"] is True
    assert parsed.config["ddp_timeout"] <= 3600


def test_the_published_run_is_there_with_its_settings() -> None:
    path = next(path for path in CONFIGS if path.name == "qwen2vl_lora_sft.yaml")
    config = parse_llamafactory(path.read_text(), path.name).config
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
    job = parse_llamafactory("model_name_or_path: m\nstage: sft\n", "sft.yaml", ["cutof_len=3"])
    assert argument_keys(job) == argument_keys(job, ["HF_TOKEN"]) == ("model_name_or_path", "stage", "cutof_len")
    assert argument_keys(job, ["ALLOW_EXTRA_ARGS"]) == argument_keys(job, ["A", "USE_MCA"]) == ()
    assert argument_keys(ScriptJob(argv=("train.py",))) == argument_keys(None) == ()


def test_a_run_for_its_figures_leaves_what_the_user_trained_alone() -> None:
    job = parse_llamafactory(TEXT + "output_dir: saves/mine\neval_strategy: steps\nval_size: 0.1\n", "sft.yaml")
    measured = benchmark_job(job)
    assert not measured.keeps_output
    told = yaml.safe_load(render_job(measured, {"output_dir": "/home/u/run/output"}))
    assert told["output_dir"] == "/home/u/run/output"
    assert (told["save_strategy"], told["eval_strategy"], told["report_to"]) == ("no", "no", "none")
    assert told["overwrite_output_dir"] is True
    # What the data are split into is the training's own.
    assert told["val_size"] == 0.1
    assert "resume_from_checkpoint" not in told
