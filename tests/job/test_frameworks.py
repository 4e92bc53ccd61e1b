from __future__ import annotations

import ast
import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from multinode.cluster.cluster import Node
from multinode.errors import UsageError
from multinode.job.code_tree import CodeTree
from multinode.job.deepspeed import parse_deepspeed, parse_deepspeed_edits
from multinode.job.frameworks import FRAMEWORKS
from multinode.job.frameworks.framework import every_framework, find_framework
from multinode.job.job import (
    ScriptJob,
    TrainingCommand,
    TrainingJob,
    benchmark_job,
    change_arguments,
    describe_job,
    limit_steps,
    own_overrides,
    parse_training,
    render_job,
    set_options,
)
from multinode.job.job_files import job_files, load_command, load_job, load_script, outside_code
from multinode.job.launch_options import LaunchOptions
from multinode.job.planning import plan_launch
from multinode.job.settings import TrainingSettings
from multinode.job.typed_command import read_command
from multinode.levers.balance import Balance
from multinode.levers.levers import Levers
from multinode.strict_yaml import dump_yaml, parse_yaml
from tests import make
from tests.golden import Golden, error_of

LLAMAFACTORY = {"model_name_or_path": "m", "stage": "sft", "finetuning_type": "lora", "dataset": "alpaca"}
TRL = {"model_name_or_path": "m", "dataset_name": "trl-lib/Capybara", "use_peft": True, "lora_r": 32}
SWIFT = {"model": "Qwen/Qwen2-0.5B", "dataset": ["a#500"], "tuner_type": "lora", "deepspeed": "zero2"}
AXOLOTL = {
    "base_model": "m",
    "datasets": [{"path": "tatsu-lab/alpaca", "type": "alpaca"}],
    "adapter": "qlora",
    "lora_r": 32,
    "lora_target_linear": True,
    "micro_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "sequence_len": 4096,
    "bf16": "auto",
    "gradient_checkpointing": True,
    "num_epochs": 2,
    "use_wandb": True,
    "output_dir": "./out",
}
TWO = make.cluster(Node(name="a", slots=2, addr="10.0.0.1"), Node(name="b", slots=2, addr="10.0.0.2"))


def job(config: dict[str, Any], verb: str = "", framework: str | None = None) -> TrainingJob:
    return parse_training(dump_yaml(config), "x.yaml", like=TrainingCommand(framework=framework, verb=verb))


@pytest.mark.parametrize(
    ("config", "name"),
    [(LLAMAFACTORY, "llamafactory"), (TRL, "trl"), (SWIFT, "swift"), (AXOLOTL, "axolotl")],
)
def test_a_file_is_known_by_its_keys(config: dict[str, Any], name: str) -> None:
    assert job(config).framework == name


def test_a_file_that_may_be_of_two_frameworks_is_refused_with_both_commands(golden: Golden) -> None:
    files = {
        "LLaMA-Factory or TRL": LLAMAFACTORY | {"dataset_name": "x"},
        "ms-swift or axolotl": SWIFT | {"base_model": "m"},
        "LLaMA-Factory 1": {"model": "m", "train_dataset": "d.yaml", "model_class": "llm"},
        "no framework": {"model_name_or_path": "m"},
    }
    golden.check_errors("frameworks", {name: error_of(job, config) for name, config in files.items()})


@pytest.mark.parametrize(
    ("config", "verb", "expected"),
    [
        (
            TRL,
            "sft",
            {"stage": "sft", "finetuning_type": "lora", "lora_target": "", "dataset": "trl-lib/Capybara", "bf16": True},
        ),
        (
            TRL | {"use_peft": False, "load_in_4bit": True, "gradient_checkpointing": False, "fp16": True},
            "dpo",
            {
                "stage": "dpo",
                "finetuning_type": "full",
                "quantization_bit": 4,
                "disable_gradient_checkpointing": True,
                "bf16": False,
            },
        ),
        (
            SWIFT,
            "",
            {
                "model_name_or_path": "Qwen/Qwen2-0.5B",
                "finetuning_type": "lora",
                "lora_target": "all",
                "learning_rate": 1e-4,
            },
        ),
        (SWIFT | {"train_type": "full", "rlhf_type": "kto"}, "rlhf", {"stage": "kto"}),
        (
            AXOLOTL,
            "",
            {
                "stage": "sft",
                "finetuning_type": "lora",
                "lora_target": "all",
                "quantization_bit": 4,
                "dataset": ["tatsu-lab/alpaca"],
                "bf16": True,
                "disable_gradient_checkpointing": False,
                "cutoff_len": 4096,
            },
        ),
        (
            AXOLOTL | {"adapter": None, "rl": "dpo", "gradient_checkpointing": None},
            "",
            {
                "stage": "dpo",
                "finetuning_type": "full",
                "quantization_bit": None,
                "disable_gradient_checkpointing": True,
            },
        ),
    ],
)
def test_keys_are_read_as_arguments(config: dict[str, Any], verb: str, expected: dict[str, Any]) -> None:
    arguments = job(config, verb).arguments
    assert {name: arguments[name] for name in expected} == expected


def test_what_a_file_does_not_say_is_the_frameworks_default() -> None:
    trl, swift, axolotl = (job(config).settings for config in (TRL, SWIFT, AXOLOTL))
    assert trl == TrainingSettings(
        finetuning_type="lora", lora_rank=32, lora_target="", lora_dropout=0.05, cutoff_len=1024, learning_rate=2e-5
    )
    assert (swift.per_device_train_batch_size, swift.gradient_accumulation_steps, swift.cutoff_len) == (1, None, None)
    assert (axolotl.per_device_train_batch_size, axolotl.num_train_epochs, axolotl.lora_rank) == (2, 2, 32)


@pytest.mark.parametrize(
    ("config", "changed"),
    [
        (TRL, {"max_steps": 3, "save_strategy": "no", "report_to": "none"}),
        (SWIFT, {"max_steps": 3, "save_strategy": "no", "report_to": "none"}),
        (AXOLOTL, {"max_steps": 3, "save_strategy": "no", "use_wandb": False}),
    ],
)
def test_a_measurement_changes_the_keys_that_the_framework_has(config: dict[str, Any], changed: dict[str, Any]) -> None:
    measured = benchmark_job(limit_steps(job(config), 3))
    assert measured.config == config | changed
    assert measured.uncut == config


def test_an_argument_is_set_under_the_frameworks_own_name() -> None:
    changes = {"per_device_train_batch_size": 8, "cutoff_len": 512, "overwrite_output_dir": True}
    own = [change_arguments(job(config), changes).overridden for config in (LLAMAFACTORY, TRL, SWIFT, AXOLOTL)]
    assert own == [
        tuple(changes),
        ("per_device_train_batch_size", "max_length"),
        ("per_device_train_batch_size", "max_length"),
        ("micro_batch_size", "sequence_len"),
    ]


def fields_of(*modules: str) -> dict[str, object]:
    """The fields of TRL's dataclasses with their defaults, as its source has them."""
    package = find_spec("trl")
    assert package is not None
    (place,) = package.submodule_search_locations or [""]
    found: dict[str, object] = {}
    for module in modules:
        tree = ast.parse((Path(place) / module).read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                words = node.value.keywords if isinstance(node.value, ast.Call) else []
                given = [word.value for word in words if word.arg == "default"]
                found[node.target.id] = given[0].value if given and isinstance(given[0], ast.Constant) else None
    return found


def test_names_and_defaults_are_those_of_the_installed_trl() -> None:
    kind = find_framework("trl")
    own = fields_of("trainer/sft_config.py", "trainer/model_config.py", "scripts/utils.py")
    assert set(kind.names.values()) <= own.keys()
    assert (own["max_length"], own["lora_r"], own["learning_rate"]) == (
        kind.defaults.cutoff_len,
        kind.defaults.lora_rank,
        kind.defaults.learning_rate,
    )
    assert own["gradient_checkpointing"] is True
    assert not kind.lacks & own.keys()


def test_ms_swifts_deepspeed_names_are_configurations(tmp_path: Path) -> None:
    kind = find_framework("swift")
    text = kind.deepspeed_text("zero3_offload")
    config = parse_deepspeed(text)
    assert config is not None
    assert (config.stage, config.offload_optimizer, config.offload_parameters) == (3, "cpu", "cpu")
    assert kind.deepspeed_text("configs/ds_z3.json") is None
    path = tmp_path / "x.yaml"
    path.write_text(dump_yaml(SWIFT))
    edited = load_job(path, (), parse_deepspeed_edits(["zero_optimization.stage=1"]))
    assert json.loads(edited.deepspeed_text or "")["zero_optimization"]["stage"] == 1
    assert edited.deepspeed_diff


def test_options_win_over_the_file_and_settings_over_both(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(dump_yaml(TRL | {"learning_rate": 1e-3, "max_length": 64}))
    command = read_command(("trl", "sft", "--config", str(path), "--learning_rate", "1e-4", "--packing"))
    assert command.training is not None
    made = load_command(command.training, ("max_length=32",))
    assert made.config == TRL | {"learning_rate": 1e-4, "max_length": 32, "packing": True}
    assert describe_job(made) == "x.yaml (TRL sft lora)"


def test_local_paths_of_a_file_must_be_on_the_nodes(tmp_path: Path) -> None:
    model, data = tmp_path / "model", tmp_path / "data.jsonl"
    model.mkdir()
    data.write_text("")
    path = tmp_path / "x.yaml"
    path.write_text(dump_yaml(AXOLOTL | {"base_model": str(model), "datasets": [{"path": str(data)}]}))
    files = job_files(load_job(path))
    assert (set(files.needed), files.output, files.model) == ({str(model), str(data)}, "./out", str(model))


COMMANDS = {
    "trl": TrainingCommand(framework="trl", verb="sft", options=("--mixed_precision", "bf16")),
    "swift": TrainingCommand(framework="swift", verb="sft"),
    "axolotl": TrainingCommand(framework="axolotl", verb="train"),
}


@pytest.mark.parametrize(("name", "config"), [("trl", TRL), ("swift", SWIFT), ("axolotl", AXOLOTL)])
def test_the_plan_of_a_framework_is_the_golden_one(
    name: str, config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: Golden
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x.yaml").write_text(dump_yaml(config))
    made = load_job(Path("x.yaml"), ("max_steps=3",), like=COMMANDS[name])
    plan = plan_launch(TWO, made, {}, "20260102-030405-abcd", LaunchOptions())
    golden.check(f"{name}.json", msgspec.json.format(msgspec.json.encode(plan), indent=2).decode() + "\n")


def test_ms_swifts_variables_are_not_options() -> None:
    made = job(SWIFT | {"ENV": {"SIZE": 3}, "columns": {"a": "b"}})
    plan = plan_launch(TWO, made, {}, "20260102-030405-abcd", LaunchOptions())
    command = plan.nodes[0].command
    assert command.env["SIZE"] == "3"
    assert command.argv[-4:] == ("--deepspeed", "zero2", "--columns", '{"a": "b"}')


SCRIPT = "from transformers import HfArgumentParser, TrainingArguments\n"


def test_a_script_of_the_trainer_is_a_training_and_its_options_are_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run_clm.py").write_text(SCRIPT)
    typed = ScriptJob(argv=("run_clm.py", "--learning_rate=1e-3", "--per_device_train_batch_size", "4", "--bf16"))
    made = load_script(typed)
    assert isinstance(made, TrainingJob)
    assert made.words("job.yaml") == typed.words
    assert made.settings.per_device_train_batch_size == 4
    changed = limit_steps(change_arguments(made, {"learning_rate": 1e-5}), 3)
    assert changed.words("job.yaml") == (
        *("run_clm.py", "--per_device_train_batch_size", "4", "--bf16"),
        *("--learning_rate", "1e-05", "--max_steps", "3"),
    )
    assert load_script(typed, ("bf16=null",)).words("job.yaml")[-2:] == ("--per_device_train_batch_size", "4")  # type: ignore[operator]
    assert job_files(made).needed == ("run_clm.py",)


@pytest.mark.parametrize("text", ["import torch\n", "TrainingArguments(output_dir='x')\n"])
def test_another_script_stays_one(text: str, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(text)
    script = ScriptJob(argv=(str(path), "--lr", "1"))
    assert load_script(script) == script
    with pytest.raises(UsageError, match="--set changes a YAML job; this is a script"):
        load_script(script, ("lr=2",))


def test_axolotls_own_saves_evaluations_and_reports_are_off_in_a_measurement() -> None:
    config = AXOLOTL | {
        "saves_per_epoch": 1,
        "evals_per_epoch": 4,
        "val_set_size": 0.1,
        "wandb_project": "p",
        "hub_model_id": "me/x",
    }
    off = dict.fromkeys(("saves_per_epoch", "evals_per_epoch", "wandb_project", "hub_model_id"))
    assert benchmark_job(job(config)).config == config | off | {
        "save_strategy": "no",
        "eval_strategy": "no",
        "use_wandb": False,
    }


def test_advice_is_in_the_keys_of_each_framework() -> None:
    advised = ("disable_gradient_checkpointing=false", "quantization_bit=4", "finetuning_type=lora")
    own = [own_overrides(job(config), advised) for config in (LLAMAFACTORY, TRL, SWIFT, AXOLOTL)]
    assert own == [
        advised,
        ("gradient_checkpointing=true", "use_peft=true", "load_in_4bit=true"),
        ("quant_bits=4", "gradient_checkpointing=true", "tuner_type=lora", "quant_method=bnb"),
        (
            "gradient_checkpointing=true",
            "load_in_4bit=true",
            "adapter=lora",
            "lora_target_linear=true",
        ),
    ]


def test_a_file_says_what_it_trains_or_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rl.yaml").write_text(dump_yaml(SWIFT | {"rlhf_type": "dpo"}))
    assert load_job(Path("rl.yaml")).words("job.yaml")[:2] == ("--module", "swift.cli.rlhf")
    Path("trl.yaml").write_text(dump_yaml(TRL))
    refusal = error_of(load_job, Path("trl.yaml"))
    assert refusal.hint == "for example multinode launch -- trl sft --config trl.yaml; or dpo, kto, grpo, rloo, reward"


@pytest.mark.parametrize(
    ("typed", "config"),
    [
        ("trl sft --config=x.yaml --run_name 007", TRL | {"run_name": "007"}),
        ("axolotl train --learning-rate 1e-5 x.yaml --no-load-in-8bit", {"learning_rate": 1e-5, "load_in_8bit": False}),
    ],
)
def test_a_command_is_read_as_its_framework_reads_it(
    typed: str, config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    own = TRL if typed.startswith("trl") else AXOLOTL
    Path("x.yaml").write_text(dump_yaml(own))
    command = read_command(tuple(typed.split()))
    assert command.training is not None
    assert load_command(command.training).config == own | config


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        (
            "trl sft --config x.yaml --run_name 7 --bf16 1 --learning_rate 1e-4 --report_to wandb tensorboard",
            "--config job.yaml --run_name 7 --bf16 1 --report_to wandb tensorboard",
        ),
        (
            "axolotl train x.yaml --wandb-name 7 --no-load-in-8bit --sample-packing --learning-rate=1e-4 --seed -1",
            "job.yaml --wandb-name=7 --load-in-8bit=False --sample-packing=True --seed=-1",
        ),
        (
            "swift sft x.yaml --model m --run_name 7 --learning_rate 1e-4 --bf16 1",
            "--model m --run_name 7 --bf16 1 --dataset a#500 --tuner_type lora --deepspeed zero2 --learning_rate 1e-05",
        ),
    ],
)
def test_the_frameworks_own_parser_reads_options_beside_a_file(
    typed: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x.yaml").write_text(dump_yaml(OWN_FILES[typed.split(maxsplit=1)[0]]))
    command = read_command(tuple(typed.split()))
    assert command.training is not None
    made = load_command(command.training, ("learning_rate=1e-5",))
    assert made.words("job.yaml")[2:] == tuple(words.split())
    # What travels tells all keys, as multinode reads them.
    again = parse_training(render_job(made), "x.yaml", like=TrainingCommand(framework=made.framework))
    assert again.config == made.config


def test_a_secret_that_is_typed_stands_in_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    command = read_command(("trl", "sft", "--model_name_or_path", "m", "--hub_token", "s3cret", "--seed", "1"))
    assert command.training is not None
    made = load_command(command.training)
    assert made.words("job.yaml")[2:] == ("--config", "job.yaml", "--model_name_or_path", "m", "--seed", "1")
    assert render_job(made) == "model_name_or_path: m\nhub_token: s3cret\nseed: 1\n"


def test_what_a_framework_cannot_read_is_refused(golden: Golden) -> None:
    def load(typed: str) -> TrainingJob:
        command = read_command(tuple(typed.split()))
        assert command.training is not None
        return load_command(command.training)

    typed = ("axolotl train", "swift sft --model m --hub_token s3cret", "swift sft --model m --trl.beta 0.1")
    golden.check_errors("framework_commands", {line: error_of(load, line) for line in typed})


def test_odd_values_are_no_crash() -> None:
    for odd in ([1], {"a": 1}, None, 3.5, "x"):
        for config in (LLAMAFACTORY, TRL, SWIFT, AXOLOTL):
            kind = job(config).kind
            for key in (*config, "bf16", "adapter", "rlhf_type", "rl", "val_set_size", "target_modules"):
                made = msgspec.structs.replace(job(config), config=config | {key: odd})
                assert isinstance(made.settings, TrainingSettings)
                assert kind.changed(made.config, {"max_steps": 1, "save_strategy": "no"})["max_steps"] == 1


def test_data_of_a_framework_that_are_not_copied_lie_in_the_nodes_own_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("data.jsonl").write_text("")
    code = CodeTree(source=str(tmp_path), cwd="", files=())
    for config, own in (
        (SWIFT | {"dataset": ["data.jsonl#9"]}, {"dataset": ["/w/data.jsonl#9"]}),
        (AXOLOTL | {"datasets": [{"path": "data.jsonl"}]}, {"datasets": [{"path": "/w/data.jsonl"}]}),
    ):
        Path("x.yaml").write_text(dump_yaml(config | {"output_dir": "/out"}))
        made = load_job(Path("x.yaml"))
        assert made.own_keys(outside_code(made, code, "/w", ())) == own


def test_every_framework_says_what_is_typed() -> None:
    assert tuple(kind.name for kind in every_framework()) == tuple(FRAMEWORKS)
    for kind in every_framework():
        if not kind.programs:
            continue
        verb = kind.verbs[-1]
        command = read_command(tuple(kind.command(verb, "x.yaml").split()))
        assert command.training is not None
        assert (command.training.framework, command.training.verb, command.training.config) == (
            kind.name,
            verb,
            "x.yaml",
        )
        assert kind.verb_of(kind.module(verb)) is not None


OWN_FILES: dict[str, dict[str, Any]] = {"llamafactory": LLAMAFACTORY, "trl": TRL, "swift": SWIFT, "axolotl": AXOLOTL}
# Words of options, and what is read.
WORDS = {
    "1e5": 1e5,
    "1e-5": 1e-5,
    "1.5E5": 1.5e5,
    ".5": 0.5,
    "5.": 5.0,
    "-3": -3,
    "+3": "+3",
    "007": "007",
    "1_000": "1_000",
    "12:30": "12:30",
    "12:30.5": "12:30.5",
    "0x10": "0x10",
    "T": True,
    "no": False,
    "on": "on",
    "null": "null",
    "2024-05-01": "2024-05-01",
    "You are terse: be brief #1": "You are terse: be brief #1",
    "- a": "- a",
    "'a'": "'a'",
    "*a": "*a",
    "": "",
    '{"version": 2}': {"version": 2},
    "[1, 2]": [1, 2],
    "[MASK": "[MASK",
    "{a} of {b": "{a} of {b",
}
READERS: dict[str, Callable[[str], Any]] = {
    "llamafactory": parse_yaml,  # through OmegaConf
    "trl": yaml.safe_load,
    "axolotl": yaml.safe_load,
}


@pytest.mark.parametrize("name", FRAMEWORKS)
@pytest.mark.parametrize("word", WORDS)
def test_a_typed_word_means_on_the_nodes_what_it_means_to_the_framework(
    name: str, word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    flags = ("--x", word, "--y", "1e-4")
    if name == "trainer":
        Path("train.py").write_text(SCRIPT)
        made = load_script(ScriptJob(argv=("train.py", *flags)), ("y=3",))
        assert isinstance(made, TrainingJob)
    else:
        own = OWN_FILES[name]
        Path("x.yaml").write_text(dump_yaml(own))
        made = load_command(TrainingCommand(framework=name, config="x.yaml", flags=flags, name=name), ("y=3",))
    assert made.config["x"] == WORDS[word]
    assert type(made.config["x"]) is type(WORDS[word])
    if made.kind.has_file:
        assert READERS[name](render_job(made))["x"] == WORDS[word]
        typed = {"llamafactory": (), "trl": ("--x", word), "axolotl": (f"--x={word}",)}
        assert made.words("job.yaml")[len(made.words("job.yaml")) - len(typed[name]) :] == typed[name]
    else:
        words = made.words("job.yaml")
        at = words.index("--x")
        assert words[at : at + 2] == ("--x", word)
        assert words[words.index("--y") :][:2] == ("--y", "3")
        assert words.count("--y") == 1


@pytest.mark.parametrize("name", OWN_FILES)
@pytest.mark.parametrize("number", ["1e5", "1e-5", "1.5e5", "1.0e-5", "2.50", "1"])
def test_a_number_of_a_file_that_is_written_anew_is_to_the_framework_what_it_was(name: str, number: str) -> None:
    text = dump_yaml(OWN_FILES[name]) + f"learning_rate: {number}\nrun_name: {number}\n"
    made = parse_training(text, "x.yaml", ("max_steps=3",), like=TrainingCommand(framework=name))
    assert made.config["learning_rate"] == float(number)
    if made.kind.has_file:
        assert READERS[name](render_job(made)) == READERS[name](text) | {"max_steps": 3}
        return
    # ms-swift makes options of its file in this way.
    words = made.words("job.yaml")
    for key in ("learning_rate", "run_name"):
        assert words[words.index(f"--{key}") + 1] == str(yaml.safe_load(text)[key])


def test_a_changed_number_is_written_as_the_framework_reads_it() -> None:
    for name, own in OWN_FILES.items():
        text = dump_yaml(own) + "learning_rate: 1e-4\n"
        given = parse_training(text, "x.yaml", like=TrainingCommand(framework=name))
        made = change_arguments(given, {"learning_rate": 1e-5})
        if made.kind.has_file:
            assert READERS[name](render_job(made))["learning_rate"] == 1e-5
        else:
            words = made.words("job.yaml")
            assert float(words[words.index("--learning_rate") + 1]) == 1e-5


def test_a_hint_names_the_frameworks_own_keys(golden: Golden) -> None:
    changes: dict[str, dict[str, Any]] = {
        "streaming": {"streaming": False},
        "adapter": {"finetuning_type": "lora"},
        "batch": {"per_device_train_batch_size": 1},
        "model": {"model_name_or_path": "DIRECTORY"},
        "preparation": {"data_shared_file_system": True},
        "precision": {"fp16": False, "bf16": True},
    }
    lines = [
        f"# {name}\n{set_options(job(own), **change)}" for name, change in changes.items() for own in OWN_FILES.values()
    ]
    golden.check("own_options.txt", "\n".join(lines) + "\n")
    assert set_options(ScriptJob(argv=("train.py",)), streaming=False) == ""
    options = LaunchOptions(levers=Levers(balance=Balance(speeds={"a": 5.0, "b": 3.0})))
    streamed = job(TRL | {"dataset_streaming": True})
    refusal = error_of(plan_launch, TWO, streamed, {}, "r", options)
    assert refusal.hint == "use --set dataset_streaming=false"
