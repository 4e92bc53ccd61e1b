"""CUDA_VISIBLE_DEVICES as plans set it, read by the functions of DeepSpeed and torch that read it in a training."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from multinode.api import load_job
from multinode.check.rule import Inspection
from multinode.check.training import check_deepspeed_devices
from multinode.cluster.cluster import Node
from multinode.cluster.facts import Gpu, NodeFacts
from multinode.job.engines import ENGINES
from multinode.job.engines.engine import Engine
from multinode.job.job import Job, ScriptJob
from multinode.job.launch_options import LaunchOptions
from multinode.job.planning import plan_launch
from multinode.stats.unknown import Entries
from tests import make
from tests.warm import run_warm

ROOT = Path(__file__).resolve().parents[2]
NAME = "CUDA_VISIBLE_DEVICES"
GPUS = tuple(Gpu(index=index, name="NVIDIA GeForce RTX 4090", uuid=f"GPU-{index}f2e") for index in range(8))
# A node with the variables of the node's sessions, and what nvidia-smi numbers the workers' devices.
Case = tuple[Node, dict[str, str], tuple[Gpu, ...], Any]
PLAIN: Case = (Node(name="a", slots=2), {}, GPUS, [0, 1])
GAPS: Case = (Node(name="a", gpus=(6, 7)), {}, GPUS, [6, 7])
# A GPU in MIG mode is one of nvidia-smi's, and its number that of its first MIG device.
MIG: Case = (Node(name="a"), {}, GPUS[:1], [0])
OWN: Case = (Node(name="a"), {NAME: "5,3"}, GPUS, [5, 3])
OWN_BY_UUID: Case = (Node(name="a", slots=2), {NAME: "GPU-7f2e,GPU-0f"}, GPUS, [7, 0])
# As a step shows what the job was given: all that nvidia-smi lists there, numbered anew; or, where devices are not
# constrained, some of them.
SLURM: Case = (Node(name="a", slurm_job=17), {NAME: "0,1", "SLURM_JOB_ID": "17"}, GPUS[:2], [0, 1])
SLURM_OPEN: Case = (Node(name="a", slurm_job=17), {NAME: "2,3", "SLURM_JOB_ID": "17"}, GPUS, [2, 3])
CASES = [PLAIN, GAPS, MIG, OWN, OWN_BY_UUID, SLURM, SLURM_OPEN]
# Reads what stands in the environment as they do, without a device: stage_1_and_2.py's way to its number of free bytes,
# with an NVML that knows nothing but numbers; torch's list of devices; its autotuner's in subprocesses.
READ = """
import json, os, types
import torch
from torch._inductor import autotune_process
from deepspeed.accelerator import cuda_accelerator
cuda_accelerator.pynvml = types.SimpleNamespace(
    nvmlDeviceGetHandleByIndex=lambda index: index,
    nvmlDeviceGetMemoryInfo=lambda handle: types.SimpleNamespace(free=handle),
)
accelerator = object.__new__(cuda_accelerator.CUDA_Accelerator)
autotune_process.get_gpu_type = lambda: "cuda"
def count(_type):
    return types.SimpleNamespace(device_count=lambda: len(torch.cuda._parse_visible_devices()))
autotune_process.get_interface_for_device = count
torch._inductor.config.autotune_multi_device = True
readings = {}
for value in json.loads(os.environ["VALUES"]):
    os.environ["CUDA_VISIBLE_DEVICES"] = value
    found = torch.cuda._parse_visible_devices()
    try:
        told = [accelerator.available_memory(place) for place in range(len(found))]
    except ValueError as error:
        told = str(error)
    try:
        tuned = autotune_process.TuningProcessPool.get_device_list()
    except ValueError as error:
        tuned = str(error)
    readings[value] = [found, told, tuned]
print("READ " + json.dumps(readings))
"""


def plan_devices(case: Case, job: Job, engine: str) -> str | None:
    """What the workers of the case's node have, as its launcher hands it on."""
    node, session, gpus, _ = case
    found = NodeFacts(node="a", home="/root", python="/env/bin/python", gpus=gpus, env=session)
    cluster = make.cluster(msgspec.structs.replace(node, addr="10.0.0.1"))
    options = LaunchOptions(engine=Engine(name=engine))
    command = plan_launch(cluster, job, {"a": found}, "r", options).nodes[0].command
    if engine == "deepspeed":
        # deepspeed/launcher/launch.py: the workers' devices are those of their node in --world_info.
        (info,) = (word.partition("=")[2] for word in command.argv if word.startswith("--world_info="))
        return ",".join(map(str, json.loads(base64.urlsafe_b64decode(info))["node-0"]))
    return command.env.get(NAME, session.get(NAME))


def read(*values: str) -> dict[str, list[Any]]:
    environ = {"VALUES": json.dumps(values), "DS_ACCELERATOR": "cpu", "HOME": "/root", "PATH": "/usr/bin:/bin"}
    done = run_warm(["-c", READ], environ, timeout=600)
    line = next((line for line in done.stdout.splitlines() if line.startswith("READ ")), None)
    assert line is not None, done.stderr
    readings: dict[str, list[Any]] = json.loads(line[5:])
    return readings


@pytest.mark.torch
def test_deepspeed_and_torch_read_the_devices_that_every_engine_plans() -> None:
    seed = load_job(ROOT / "configs" / "qwen2vl_lora_sft.yaml")
    script = ScriptJob(argv=("train.py",))
    planned = []
    for engine in ENGINES:
        # A program of the user's own gets all GPUs of the node.
        workers = Engine(name=engine).kind.starts_workers
        cases = CASES if workers else [case for case in CASES if case is not PLAIN and case is not GAPS]
        job = seed if workers else script
        planned += [(plan_devices(case, job, engine), case[3]) for case in cases]
    readings = read(*{str(value) for value, _ in planned})
    assert [readings[str(value)] for value, _ in planned] == [[numbers] * 3 for _, numbers in planned]


@pytest.mark.torch
def test_what_has_no_number_is_left_to_cuda_and_told_before_the_launch() -> None:
    # A MIG device that a session names: nvidia-smi has no number for it, and torch takes it by its name alone.
    seed = load_job(ROOT / "configs" / "qwen2vl_lora_sft.yaml")
    case: Case = (Node(name="a"), {NAME: "MIG-1c2"}, GPUS[:1], None)
    value = plan_devices(case, seed, "llamafactory")
    assert value == "MIG-1c2"
    found, told, _ = read(value)[value]
    assert (found, "invalid literal for int()" in told) == (["MIG-1c2"], True)
    facts = NodeFacts(node="a", gpus=case[2], env=case[1], packages=Entries({"deepspeed": "0.19.8"}))
    cluster = make.cluster(case[0])
    inspection = Inspection(cluster=cluster, facts={"a": facts}, master_port=1, job=seed)
    (finding,) = check_deepspeed_devices(inspection)
    assert "Each worker would fail with 'invalid literal for int()'" in finding.message
