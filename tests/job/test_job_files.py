from __future__ import annotations

from typing import Any

import pytest

from multinode.job.job import LlamaFactoryJob, ScriptJob
from multinode.job.job_files import JobFiles, job_files
from multinode.records.benchmark import CollectiveTest, Message


def files(local: tuple[str, ...] = (), **config: Any) -> JobFiles:
    return job_files(LlamaFactoryJob(config_path="sft.yaml", text="", config=config, local_paths=local))


def test_a_local_model_and_its_data_are_needed_and_compared() -> None:
    found = files(
        model_name_or_path="/models/tiny", dataset="a, b", eval_dataset="c", dataset_dir="data", output_dir="saves/x"
    )
    assert found == JobFiles(
        needed=("/models/tiny", "data", "data/dataset_info.json"),
        output="saves/x",
        cache="~/.cache/huggingface/datasets",
        compared=("/models/tiny", "data"),
        datasets=("a", "b", "c"),
        model="/models/tiny",
    )
    assert found.looked_at == (*found.needed, "saves/x", "~/.cache/huggingface/datasets")


def test_a_name_of_a_hub_is_no_path() -> None:
    found = files(model_name_or_path="Qwen/Qwen2.5-0.5B", adapter_name_or_path="./adapter", dataset_dir="ONLINE")
    assert (found.needed, found.compared, found.model) == (("./adapter",), ("./adapter",), None)
    local = files(("assets/model",), model_name_or_path="assets/model", cache_dir="/cache")
    assert (local.model, local.cache) == ("assets/model", "/cache")


def test_values_of_another_kind_name_nothing() -> None:
    assert files(model_name_or_path=3, dataset={"a": 1}, output_dir=False, dataset_dir={"x": 1}).looked_at == ()


@pytest.mark.parametrize(
    ("job", "needed"),
    [
        (ScriptJob(argv=("train.py", "--data", "x")), ("train.py",)),
        (ScriptJob(argv=("-m", "mypackage.train")), ()),
        (ScriptJob(argv=()), ()),
        (CollectiveTest(messages=(Message(size_bytes=8),)), ()),
        (None, ()),
    ],
)
def test_a_script_is_needed_where_it_is_a_file(job: Any, needed: tuple[str, ...]) -> None:
    found = job_files(job)
    assert found.needed == found.compared == found.looked_at == needed
