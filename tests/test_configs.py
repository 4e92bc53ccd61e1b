"""The files of configs/: our own readers understand them, and so do those that read them on the nodes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from multinode.errors import JobError
from multinode.job.deepspeed import parse_deepspeed, require_known
from multinode.job.engines.accelerate import parse_accelerate
from multinode.job.job import TrainingJob
from multinode.job.job_files import load_job
from multinode.job.synthetic import with_synthetic
from multinode.model.workload import read_settings

ROOT = Path(__file__).parents[1]
METHODS = ("full_zero3_offload", "lora_sft", "qlora_sft")
ACCELERATE = sorted((ROOT / "configs/accelerate").glob("*.yaml"))
ZERO = sorted((ROOT / "configs/deepspeed").glob("*.json"))


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> TrainingJob:
    monkeypatch.chdir(ROOT)
    return load_job(Path(f"configs/{name}.yaml"))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("full_zero3_offload", ("full", None, "ZeRO-3", 8)),
        ("lora_sft", ("lora", 64, "DDP", 2)),
        ("qlora_sft", ("qlora", 64, "DDP", 1)),
    ],
)
def test_the_published_methods_are_there(
    name: str, expected: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = load(name, monkeypatch)
    found = read_settings(job)
    assert (found.method, found.lora_rank, found.strategy, found.per_device_batch) == expected
    assert (found.sequence_length, found.precision, found.recompute) == (1024, "bf16", True)
    # What the published figures were, and what a reader needs, stands before the first key.
    head = job.text.split("\n\n", 1)[0]
    assert all(line.startswith("# ") for line in head.splitlines())
    assert {"Needs", "Published", "samples/s"} <= set(head.replace(":", " ").replace(",", " ").split())


def test_the_offload_puts_weights_and_optimizer_into_the_nodes_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = parse_deepspeed(load("full_zero3_offload", monkeypatch).deepspeed_text or "")
    assert settings is not None
    assert (settings.stage, settings.offload_optimizer, settings.offload_parameters) == (3, "cpu", "cpu")
    # LLaMA-Factory under ZeRO-3 stumbles over that key on a CPU, and any number of workers can do without.
    assert not settings.names_train_batch_size
    assert settings.fixed == {}


@pytest.mark.parametrize("path", ZERO, ids=lambda path: path.name)
def test_deepspeed_knows_every_key(path: Path) -> None:
    data = json.loads(path.read_text())
    for group, value in data.items():
        require_known((group,), 0)
        for key in value if isinstance(value, dict) else ():
            require_known((group, key), 1)


@pytest.mark.parametrize("name", METHODS)
def test_each_method_runs_without_a_data_set_once_it_is_told_how_long(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = load(name, monkeypatch)
    with pytest.raises(JobError, match="max_steps is not set"):
        with_synthetic(job)
    assert read_settings(with_synthetic(job, rows=100)).dataset == "synthetic"


@pytest.mark.parametrize("path", ACCELERATE, ids=lambda path: path.stem)
def test_accelerates_files_are_for_machines_of_ones_own(path: Path) -> None:
    config = parse_accelerate(path.read_text(), str(path))
    kind = {"single_gpu": "NO", "multi_gpu": "MULTI_GPU", "multi_node": "MULTI_GPU", "multi_cpu": "MULTI_CPU"}
    assert config["distributed_type"] == kind[path.stem]
    assert config.get("num_processes") == {"single_gpu": 1, "multi_gpu": 2}.get(path.stem)


# In a process of its own: importing transformers changes the environment. `use_cpu` because bf16 asks for a GPU else.
READERS = """
import json, sys
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from llamafactory.hparams import get_train_args
trainings, accelerate = json.loads(sys.argv[1])
told = {}
for path in trainings:
    config = yaml.safe_load(open(path))
    model, data, training, finetuning, _ = get_train_args(config | {"use_cpu": True})
    zero = getattr(training, "hf_deepspeed_config", None)
    told[path] = [
        finetuning.finetuning_type, finetuning.lora_rank, model.quantization_bit, str(training.optim.value),
        not model.disable_gradient_checkpointing, zero.is_offload() if zero else None,
    ]
for path in accelerate:
    told[path] = [str(load_config_from_file(path).distributed_type), load_config_from_file(path).num_processes]
print(json.dumps(told))
"""


@pytest.mark.torch
def test_llamafactory_and_accelerate_understand_them() -> None:
    trainings = [f"configs/{name}.yaml" for name in METHODS]
    accelerate = [f"configs/accelerate/{path.name}" for path in ACCELERATE if path.stem.endswith("_gpu")]
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = subprocess.run(
        [sys.executable, "-c", READERS, json.dumps([trainings, accelerate])],
        cwd=ROOT,
        env=os.environ | alone | {"DISABLE_VERSION_CHECK": "1", "DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert told == {
        "configs/full_zero3_offload.yaml": ["full", 8, None, "adamw_torch_fused", True, True],
        "configs/lora_sft.yaml": ["lora", 64, None, "adamw_torch_fused", True, None],
        "configs/qlora_sft.yaml": ["lora", 64, 4, "paged_adamw_32bit", True, None],
        "configs/accelerate/multi_gpu.yaml": ["DistributedType.MULTI_GPU", 2],
        "configs/accelerate/single_gpu.yaml": ["DistributedType.NO", 1],
    }
