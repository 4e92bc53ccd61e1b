from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from multinode.job.code_tree import CodeFile, CodeTree
from multinode.job.job import ScriptJob, TrainingJob
from multinode.job.job_files import JobFiles, job_files, load_script, outside_code, require_copied
from multinode.records.benchmark import CollectiveTest, Message
from tests.golden import Golden, error_of


def files(local: tuple[str, ...] = (), **config: Any) -> JobFiles:
    return job_files(TrainingJob(config_path="sft.yaml", text="", config=config, local_paths=local))


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
        (ScriptJob(argv=("mypackage.train",), form="module"), ()),
        (ScriptJob(argv=("./run.sh", "x"), form="executable"), ("./run.sh",)),
        (ScriptJob(argv=("true",), form="executable"), ()),
        (ScriptJob(argv=("train.py", "--deepspeed", "ds.json")), ("train.py", "ds.json")),
        (ScriptJob(argv=()), ()),
        (CollectiveTest(messages=(Message(size_bytes=8),)), ()),
        (None, ()),
    ],
)
def test_a_script_is_needed_where_it_is_a_file(job: Any, needed: tuple[str, ...]) -> None:
    found = job_files(job)
    assert found.needed == found.compared == found.looked_at == needed


def code(*paths: str) -> CodeTree:
    return CodeTree(source="/src", files=tuple(CodeFile(path=path, digest="0" * 64, size_bytes=1) for path in paths))


COPIED = code(
    "train.py", "models/tiny/config.json", "data/dataset_info.json", "data/a.json", "more/README", "fsdp.json"
)


def test_what_is_copied_need_not_be_on_the_nodes() -> None:
    job = TrainingJob(
        config_path="sft.yaml",
        text="",
        config={
            "model_name_or_path": "models/tiny",
            "adapter_name_or_path": "./own",
            "dataset": "a",
            "output_dir": "o",
        },
        local_paths=("models/tiny",),
    )
    found = job_files(job, COPIED)
    assert (found.needed, found.compared, found.model, found.output) == (("./own",), ("./own",), None, "o")
    assert job_files(ScriptJob(argv=("train.py",)), COPIED).needed == ()
    other = msgspec.structs.replace(job, config={**job.config, "dataset_dir": "more"})
    assert job_files(other, COPIED).needed == ("./own", "more", "more/dataset_info.json")


@pytest.mark.parametrize(
    ("config", "placed"),
    [
        # What is written is never in the copy, and neither is what a training goes on from.
        ({"output_dir": "saves/x", "cache_dir": "c"}, {"output_dir": "/w/saves/x", "cache_dir": "/w/c"}),
        ({"output_dir": "data"}, {"output_dir": "/w/data"}),
        ({"output_dir": "/abs", "tokenized_path": "~/t"}, {}),
        ({"resume_from_checkpoint": "saves/x/checkpoint-5"}, {"resume_from_checkpoint": "/w/saves/x/checkpoint-5"}),
        ({"resume_from_checkpoint": True, "output_dir": None}, {}),
        # What is read is the copy's, or the node's own; a name of a hub is no path.
        ({"model_name_or_path": "models/tiny"}, {}),
        ({"model_name_or_path": "./models/large"}, {"model_name_or_path": "/w/./models/large"}),
        ({"model_name_or_path": "models/here"}, {"model_name_or_path": "/w/models/here"}),
        ({"model_name_or_path": "models/there"}, {"model_name_or_path": "/w/models/there"}),
        ({"model_name_or_path": "Qwen/Qwen2.5-0.5B"}, {}),
        ({"adapter_name_or_path": "./a, models/tiny"}, {"adapter_name_or_path": "/w/./a,models/tiny"}),
        ({"fsdp_config": "fsdp.json"}, {}),
        # A directory of datasets is copied with its list of them; LLaMA-Factory's own default is one, too.
        ({"dataset": "a"}, {}),
        ({"dataset": "a", "dataset_dir": "more"}, {"dataset_dir": "/w/more"}),
        ({"dataset": "a", "dataset_dir": "ONLINE"}, {}),
    ],
)
def test_relative_paths_mean_the_copy_or_the_directory_of_the_node(config: dict[str, Any], placed: Any) -> None:
    job = TrainingJob(config_path="sft.yaml", text="", config=config, local_paths=("models/here", "models/tiny"))
    assert outside_code(job, COPIED, "/w/", {"models/there"}) == placed


def test_the_default_directory_of_datasets_is_the_nodes_own_where_the_copy_has_none() -> None:
    job = TrainingJob(config_path="sft.yaml", text="", config={"dataset": "a"})
    assert outside_code(job, code("train.py"), "/w", ()) == {"dataset_dir": "/w/data"}


def test_a_script_that_would_not_be_there_is_refused_and_one_of_the_nodes_is_not(golden: Golden) -> None:
    ignored = ScriptJob(argv=("ignored.py",))
    golden.check_errors("refused_script", {"ignored.py": error_of(require_copied, ignored, COPIED)})
    for argv in (("train.py",), ("/opt/train.py",), ("run.sh",)):
        require_copied(ScriptJob(argv=argv), COPIED)
    require_copied(ScriptJob(argv=("package",), form="module"), COPIED)


def test_a_module_that_is_copied_need_not_be_on_the_nodes() -> None:
    for module, asked in (("train", None), ("more", "more"), ("pkg.train", "pkg.train")):
        assert job_files(ScriptJob(argv=(module,), form="module"), COPIED).module == asked
    package = code("pkg/__main__.py")
    assert job_files(ScriptJob(argv=("pkg",), form="module"), package).module is None


def test_arguments_that_are_paths_here_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("c.yaml", "data", "ds.json"):
        (tmp_path / name).touch()
    argv = ("train.py", "c.yaml", "--config=./c.yaml", "data", "no.yaml", "--deepspeed", "ds.json", "http://x/c.yaml")
    found = job_files(load_script(ScriptJob(argv=argv)))
    assert (found.needed, found.named) == (("train.py", "ds.json"), ("c.yaml", "./c.yaml"))
