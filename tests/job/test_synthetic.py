from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from multinode.cluster.cluster import Node
from multinode.cluster.facts import NodeFacts
from multinode.job.engines.place import JOB_FILE
from multinode.job.job import (
    JobEnvironment,
    ScriptJob,
    Synthetic,
    TrainingJob,
    describe_job,
    job_paths,
    named_paths,
    override_job,
)
from multinode.job.job import parse_training as parse
from multinode.job.job_files import job_files
from multinode.job.launch_options import LaunchOptions
from multinode.job.planning import plan_launch
from multinode.job.synthetic import DATASET, synthetic_files, with_synthetic
from multinode.records.plan import NodePlan
from tests import make
from tests.golden import Golden, error_of

ROOT = Path(__file__).parents[2]
TEXT = "model_name_or_path: Qwen/Qwen2.5-7B\nstage: sft\ndo_train: true\nfinetuning_type: lora\nmax_steps: 30\n"
# What a user may have written that would make other samples, or none.
SPOILING: dict[str, Any] = {
    "dataset": "mine,yours",
    "dataset_dir": "/data/mine",
    "eval_dataset": "held_out",
    "media_dir": "/data/pictures",
    "max_samples": 7,
    "packing": True,
    "neat_packing": True,
    "streaming": True,
    "val_size": 0.1,
    "tokenized_path": "/data/tokenized",
    "mix_strategy": "interleave_under",
    "interleave_probs": "0.5,0.5",
    "preprocessing_num_workers": 16,
    "preprocessing_batch_size": 1000,
    "data_shared_file_system": True,
    "train_on_prompt": True,
    "mask_history": True,
}
# What would evaluate on data that are no longer there, keep what was trained, or go on from an earlier training.
KEEPING: dict[str, Any] = {
    "do_eval": True,
    "eval_strategy": "steps",
    "predict_with_generate": True,
    "load_best_model_at_end": True,
    "early_stopping_steps": 3,
    "save_strategy": "steps",
    "resume_from_checkpoint": "saves/mine/checkpoint-500",
}


def job(**config: Any) -> TrainingJob:
    return parse(yaml.safe_dump(yaml.safe_load(TEXT) | config), "sft.yaml")


def plan_nodes(made: TrainingJob, count: int, facts: dict[str, NodeFacts], **options: Any) -> tuple[NodePlan, ...]:
    nodes = tuple(Node(name=f"node{rank}", slots=2, addr=f"10.0.0.{rank}") for rank in range(count))
    return plan_launch(make.cluster(*nodes), made, facts, "r", LaunchOptions(**options)).nodes


def plan_node(made: TrainingJob, nodes: int = 1, **options: Any) -> NodePlan:
    return plan_nodes(made, nodes, {}, **options)[0]


def written(node: NodePlan) -> dict[str, Any]:
    """The job's YAML as it lies on the node."""
    return dict(yaml.safe_load(node.files[0].text))


def entry(made: TrainingJob, workers: int = 1) -> dict[str, Any]:
    info = next(
        file
        for file in synthetic_files(made, made.synthetic or Synthetic(), workers)
        if file.path.endswith("dataset_info.json")
    )
    return dict(json.loads(info.text)[DATASET])


def lines(made: TrainingJob) -> list[list[str]]:
    text = next(
        file.text for file in synthetic_files(made, made.synthetic or Synthetic(), 1) if file.path.endswith(".txt")
    )
    return [line.split(" ") for line in text.removesuffix("\n").split("\n")]


def rows(made: TrainingJob, workers: int = 1) -> int:
    """Samples of the data set: each batch of lines makes one."""
    repeated, batch = entry(made, workers)["num_samples"], made.config["preprocessing_batch_size"]
    assert repeated % batch == 0
    return int(repeated // batch)


def test_a_fine_tuning_becomes_a_pre_training_on_made_up_data_with_all_else_as_it_was() -> None:
    made = with_synthetic(job(lora_rank=64, cutoff_len=4096))
    assert {"stage": "pt", "dataset": "synthetic", "lora_rank": 64, "cutoff_len": 4096}.items() <= made.config.items()
    assert describe_job(made) == "sft.yaml (LLaMA-Factory pt lora, synthetic data)"


@pytest.mark.parametrize("stage", ["sft", "pt"])
def test_nothing_that_a_user_wrote_of_the_data_is_left(stage: str) -> None:
    made = with_synthetic(job(**SPOILING, stage=stage))
    found = written(plan_node(made))
    assert found["dataset"] == "synthetic"
    assert found["dataset_dir"].endswith("/runs/r.0/synthetic")
    mine = {"dataset", "dataset_dir", "preprocessing_batch_size"}
    assert not (found.keys() - mine) & SPOILING.keys()


def test_nothing_is_evaluated_kept_or_gone_on_with() -> None:
    found = written(plan_node(with_synthetic(job(output_dir="saves/mine", **KEEPING))))
    assert found["output_dir"].endswith("/runs/r.0/output")
    assert (found["save_strategy"], found["eval_strategy"], found["report_to"]) == ("no", "no", "none")
    assert not any(found[key] for key in KEEPING if not key.endswith("_strategy"))


def test_no_node_has_to_have_a_data_set() -> None:
    made = with_synthetic(job(**SPOILING, dataset_cache="x"))
    made = msgspec.structs.replace(made, local_paths=("data", "data/dataset_info.json"))
    assert job_paths(made) == ()
    files = job_files(made)
    assert (files.needed, files.compared, files.datasets, files.cache) == ((), (), (), None)


def test_a_model_on_disk_is_still_asked_for() -> None:
    made = with_synthetic(override_job(job(dataset="mine"), {"model_name_or_path": "/models/tiny"}))
    assert job_paths(made) == ("/models/tiny",)
    assert "/models/tiny" in named_paths(made)


def test_every_node_gets_the_same_files_in_its_own_run_directory() -> None:
    first, second = plan_nodes(with_synthetic(job()), 2, {})
    assert first.files[1:] == second.files[1:]
    assert [file.path for file in first.files] == ["job.yaml", "synthetic/dataset_info.json", "synthetic/text.txt"]
    assert written(second)["dataset_dir"] == f"{second.place.run_dir}/synthetic"
    assert sum(len(file.text) for file in first.files) < 64 << 10


def test_what_is_prepared_of_the_data_lies_in_the_runs_directory_unless_the_user_says_where() -> None:
    made = with_synthetic(job())
    assert plan_node(made).command.env["HF_DATASETS_CACHE"].endswith("/runs/r.0/synthetic/cache")
    around = JobEnvironment(env={"HF_DATASETS_CACHE": "/scratch"})
    assert plan_node(made, environment=around).command.env["HF_DATASETS_CACHE"] == "/scratch"
    assert "HF_DATASETS_CACHE" not in plan_node(job()).command.env


@given(length=st.integers(1, 1 << 20))
def test_a_batch_of_lines_has_words_for_one_sample_and_few_to_spare(length: int) -> None:
    # Each word is a token at the least, whatever the tokenizer; with a quarter more, words may be merged now and then.
    made = with_synthetic(job(cutoff_len=length))
    words = {len(line) for line in lines(made)}
    assert len(words) == 1
    available = words.pop() * made.config["preprocessing_batch_size"]
    assert 1.25 * length <= available <= 1.25 * length + made.config["preprocessing_batch_size"]


def test_the_lines_are_not_all_alike() -> None:
    made = lines(with_synthetic(job()))
    assert len({tuple(line) for line in made}) == len(made) >= 8
    assert len({word for line in made for word in line}) > 100
    assert all(word.isascii() and word.isalpha() for line in made for word in line)


@pytest.mark.parametrize(
    ("config", "workers", "expected"),
    [
        ({}, 1, 30 * 8),
        ({"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "cutoff_len": 512}, 16, 30 * 2 * 4 * 16),
        # What takes long to be prepared is gone through several times, in whole steps.
        ({"cutoff_len": 16, "per_device_train_batch_size": 100}, 3, 27 * 300),
        ({"cutoff_len": 1 << 20, "per_device_train_batch_size": 3}, 2, 6),
        ({"cutoff_len": 1 << 16, "per_device_train_batch_size": 3}, 1, 63),
    ],
)
def test_there_are_samples_for_all_steps_or_for_whole_ones(config: dict[str, Any], workers: int, expected: int) -> None:
    assert rows(with_synthetic(job(**config)), workers) == expected


def test_the_plan_counts_samples_by_its_own_workers_and_the_batch_as_it_is_in_the_end() -> None:
    made = override_job(with_synthetic(job(per_device_train_batch_size=2)), {"per_device_train_batch_size": 4})
    info = next(file for file in plan_node(made, nodes=3).files if file.path.endswith(".json"))
    lines_a_row = made.config["preprocessing_batch_size"]
    assert json.loads(info.text)["synthetic"]["num_samples"] == 30 * 4 * 6 * lines_a_row


@given(asked=st.integers(1, 10_000), batch=st.integers(1, 64), workers=st.integers(1, 64))
def test_asked_for_samples_are_there_and_fill_the_last_step(asked: int, batch: int, workers: int) -> None:
    made = with_synthetic(job(per_device_train_batch_size=batch), rows=asked)
    found = rows(made, workers)
    assert asked <= found < asked + batch * workers
    assert found % (batch * workers) == 0


def test_what_has_no_synthetic_data_is_refused(golden: Golden) -> None:
    settings: list[dict[str, Any]] = [
        {"max_steps": None},
        *({"stage": stage} for stage in ("dpo", "ppo", 3, ["sft"])),
        *({key: True} for key in ("use_asft_loss", "use_dft_loss", "use_eaft_loss", "use_hyper_parallel")),
        *({"cutoff_len": length} for length in (0, -1, "long", 1.5, True, None)),
    ]
    named = ("dataset=mine", "dataset=[a, b]", "packing=true", "max_samples=7", "interleave_probs=[0.5, 0.5]")
    golden.check_errors(
        "refused_synthetic",
        {str(setting)[1:-1]: error_of(with_synthetic, override_job(job(), setting)) for setting in settings}
        | {f"--set {text}": error_of(with_synthetic, parse(TEXT, "sft.yaml", (text,))) for text in named}
        | {"a script": error_of(with_synthetic, ScriptJob(argv=("train.py",)))},
    )


def test_what_is_set_to_nothing_is_no_choice() -> None:
    with_synthetic(job(use_asft_loss=False))
    with_synthetic(parse(TEXT, "sft.yaml", ("dataset=null",)))
    with_synthetic(override_job(job(), {"max_steps": None}), rows=100)


def test_twice_is_as_good_as_once() -> None:
    once = with_synthetic(job(**SPOILING))
    twice = with_synthetic(once)
    assert (twice.config, twice.synthetic) == (once.config, once.synthetic)


def test_a_job_with_data_of_its_own_has_no_files_of_ours() -> None:
    assert [file.path for file in plan_node(job(dataset="mine")).files] == [JOB_FILE]


def test_the_yaml_says_which_keys_are_ours() -> None:
    text = plan_node(with_synthetic(parse(TEXT + "dataset: mine\npacking: true\n", "sft.yaml"))).files[0].text
    first = text.split("\n", 1)[0]
    assert first.startswith("# sft.yaml with these keys changed by multinode: ")
    assert {"stage", "dataset", "packing", "dataset_dir"} <= set(first.split(": ", 1)[1].split(", "))


@pytest.mark.torch
@pytest.mark.usefixtures("tiny")
def test_llamafactory_trains_on_samples_of_exactly_that_length_whatever_else_the_yaml_says(tmp_path: Path) -> None:
    tiny = parse((ROOT / "configs/tiny_sft.yaml").read_text(), "tiny.yaml").config | SPOILING | KEEPING
    # Two lines per sample, and a last line that is only half needed.
    tiny |= {"model_name_or_path": str(ROOT / "assets/tiny/model"), "cutoff_len": 613, "max_steps": 2}
    made = with_synthetic(job(**tiny, include_num_input_tokens_seen="all"))
    (node,) = plan_nodes(made, 1, {"node0": NodeFacts(node="node0", home=str(tmp_path))}, workers_per_node=1)
    run_dir = Path(node.place.run_dir)
    for file in node.files:
        (run_dir / file.path).parent.mkdir(parents=True, exist_ok=True)
        (run_dir / file.path).write_text(file.text)
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    about = {"HF_HOME": str(tmp_path / "hf"), "DISABLE_VERSION_CHECK": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "llamafactory.launcher", str(run_dir / "job.yaml")],
        cwd=tmp_path,
        env=os.environ | node.command.env | alone | about,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    state = json.loads((run_dir / "output/trainer_state.json").read_text())
    assert state["log_history"][0]["num_input_tokens_seen"] == 2 * 613
    assert state["num_input_tokens_seen"] == 2 * 2 * 613
    assert not list((tmp_path / "hf").rglob("*.arrow"))
    assert list((run_dir / "synthetic/cache").rglob("*.arrow"))
