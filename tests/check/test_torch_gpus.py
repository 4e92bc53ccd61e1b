from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from multinode.check.gpus import check_torch_gpus
from multinode.check.probe import torch_environment
from multinode.check.rule import CheckFinding
from multinode.cluster.facts import UNASKED, WITHOUT_CUDA, Gpu, TorchDevices, TorchGpu
from multinode.job.job import JobEnvironment
from multinode.job.launch_options import LaunchOptions
from multinode.records.benchmark import CollectiveTest, Message
from multinode.stats.unknown import Entries, Unknown
from tests.golden import Golden

from .inspecting import SFT, but, check_cases, inspection, silent

# `python -c "import torch; print(torch.cuda.get_arch_list())"` of wheels for CUDA 12.4 and 13.0.
CU124 = ("sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90")
CU130 = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120")
TOO_OLD = "CUDA initialization: The NVIDIA driver on your system is too old (found version 12080)."


def found(
    *,
    gpu: str = "NVIDIA GB10",
    driver: str = "580.95.05",
    devices: TorchDevices | Unknown = UNASKED,
    job: Any = SFT,
    env: dict[str, str] | None = None,
    **facts: Any,
) -> list[CheckFinding]:
    """What is found on two boxes that were set up alike."""
    gpus = (Gpu(index=0, name=gpu, driver=driver, uuid="GPU-6f"),)
    packages = Entries({"torch": facts.pop("torch", "2.11.0+cpu")})
    boxes = but(
        inspection(job=job, options=LaunchOptions(environment=JobEnvironment(env=env or {}))),
        "ab",
        gpus=gpus,
        accelerator="cuda",
        packages=packages,
        torch_devices=devices,
        **facts,
    )
    return list(check_torch_gpus(boxes))


LATE = Unknown("python3 did not answer within 20 s")


def listed(gpu: str, capability: tuple[int, int], kernels: tuple[str, ...]) -> TorchDevices:
    return TorchDevices(available=True, kernels=kernels, gpus=(TorchGpu(name=gpu, capability=capability),))


def on_h100(devices: TorchDevices | Unknown) -> list[CheckFinding]:
    """A CUDA that is newer than the driver."""
    return found(gpu="NVIDIA H100", driver="570.86.15", cuda_version="13.0", torch="2.11.0", devices=devices)


def with_kernels(gpu: str, capability: tuple[int, int], kernels: tuple[str, ...]) -> list[CheckFinding]:
    return found(gpu=gpu, cuda_version="12.4", torch="2.6.0", devices=listed(gpu, capability, kernels))


def test_a_torch_that_cannot_use_the_gpus_comes_with_the_index_of_one_that_can(golden: Golden) -> None:
    reason = "Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized"
    check_cases(
        golden,
        "torch_gpus",
        {
            "built without CUDA, as on aarch64": found(cuda_version=WITHOUT_CUDA, architecture="aarch64"),
            "built without CUDA, and an old driver": found(
                cuda_version=WITHOUT_CUDA, architecture="x86_64", driver="535.129.03"
            ),
            "a newer CUDA than the driver's": on_h100(TorchDevices(available=False, reason=TOO_OLD)),
            "a newer CUDA than the driver's, and no answer": on_h100(LATE),
            "torch finds no GPU for another reason": found(
                cuda_version="12.8", devices=TorchDevices(available=False, reason=reason)
            ),
            "no kernels for a new GPU": with_kernels("NVIDIA GeForce RTX 5090", (12, 0), CU124),
            "no kernels for an old GPU": with_kernels("NVIDIA GeForce GTX 1080", (6, 1), CU130),
        },
    )


def test_who_trains_on_cpus_on_purpose_or_whose_torch_is_unknown_is_left_alone() -> None:
    gloo = CollectiveTest(messages=(Message(size_bytes=8),), backend="gloo")
    assert found(cuda_version=WITHOUT_CUDA, env={"CUDA_VISIBLE_DEVICES": ""}) == []
    assert found(cuda_version=WITHOUT_CUDA, job=gloo) == []
    assert found(cuda_version=Unknown("the interpreter did not answer within 15 s")) == []
    silent(check_torch_gpus(inspection()))


def test_a_torch_that_can_use_the_gpus_is_well() -> None:
    # Forward-compatibility libraries run it.
    assert on_h100(listed("NVIDIA H100", (9, 0), CU130)) == []
    assert found(cuda_version="12.8") == []


@pytest.mark.parametrize(
    ("gpu", "capability", "kernels"),
    [
        # Code for sm_120 runs on sm_121, and PTX on any later one.
        ("NVIDIA GB10", (12, 1), CU130),
        ("NVIDIA GB10", (12, 1), ("sm_90", "compute_90")),
        ("NVIDIA GeForce RTX 4090", (8, 9), CU124),
        ("AMD Instinct MI300X", (9, 4), ("gfx90a", "gfx942")),
    ],
)
def test_a_gpu_for_which_torch_has_kernels_is_well(
    gpu: str, capability: tuple[int, int], kernels: tuple[str, ...]
) -> None:
    assert with_kernels(gpu, capability, kernels) == []


def test_a_gpu_that_the_job_does_not_use_needs_no_kernels() -> None:
    devices = listed("NVIDIA GeForce RTX 5090", (12, 0), CU124)
    assert found(gpu="NVIDIA A100", cuda_version="12.4", devices=devices) == []


def test_torch_is_asked_under_the_variables_of_the_job_unless_its_environment_is_unknown() -> None:
    env = JobEnvironment(env={"LD_LIBRARY_PATH": "/usr/local/cuda/compat"})
    assert torch_environment(SFT, LaunchOptions(environment=env)) == env.env
    assert torch_environment(SFT, LaunchOptions(environment=replace(env, prelude="module load cuda"))) is None
    gloo = CollectiveTest(messages=(Message(size_bytes=8),), backend="gloo")
    assert torch_environment(gloo, LaunchOptions(environment=env)) is None
