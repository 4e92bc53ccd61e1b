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

from .inspecting import SFT, but, expect, inspection, silent

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


def test_a_torch_without_cuda_on_nodes_with_gpus_is_an_error_that_names_the_index() -> None:
    finding = expect(
        found(cuda_version=WITHOUT_CUDA, architecture="aarch64"),
        "error",
        None,
        "a and b: torch 2.11.0+cpu was built without CUDA, as `pip install torch` installs it on aarch64",
        "would train on the CPUs in place of 1 x NVIDIA GB10",
        check="versions",
        hint="torch==2.11.0 --index-url https://download.pytorch.org/whl/cu130",
    )
    assert "--env CUDA_VISIBLE_DEVICES=" in str(finding.hint)
    (finding,) = found(cuda_version=WITHOUT_CUDA, architecture="x86_64", driver="535.129.03")
    assert "aarch64" not in finding.message
    assert "whl/cu126" in str(finding.hint)


def test_who_trains_on_cpus_on_purpose_or_whose_torch_is_unknown_is_left_alone() -> None:
    gloo = CollectiveTest(messages=(Message(size_bytes=8),), backend="gloo")
    assert found(cuda_version=WITHOUT_CUDA, env={"CUDA_VISIBLE_DEVICES": ""}) == []
    assert found(cuda_version=WITHOUT_CUDA, job=gloo) == []
    assert found(cuda_version=Unknown("the interpreter did not answer within 15 s")) == []
    silent(check_torch_gpus(inspection()))


@pytest.mark.parametrize(
    ("devices", "severity", "message"),
    [
        (TorchDevices(available=False, reason=TOO_OLD), "error", "needs NVIDIA driver 580 or later, and the driver is"),
        # Forward-compatibility libraries run it.
        (listed("NVIDIA H100", (9, 0), CU130), None, ""),
        (LATE, "warning", "torch may find no GPU (python3 did not answer within 20 s)"),
    ],
)
def test_a_cuda_that_is_newer_than_the_driver_is_judged_by_what_torch_finds(
    devices: TorchDevices | Unknown, severity: str | None, message: str
) -> None:
    findings = found(gpu="NVIDIA H100", driver="570.86.15", cuda_version="13.0", torch="2.11.0", devices=devices)
    assert [finding.severity for finding in findings] == ([severity] if severity else [])
    for finding in findings:
        assert message in finding.message
    if severity == "error":
        assert "whl/cu128" in str(findings[0].hint)


def test_a_torch_that_finds_no_gpu_for_another_reason_is_told_with_it() -> None:
    reason = "Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized"
    devices = TorchDevices(available=False, reason=reason)
    expect(found(cuda_version="12.8", devices=devices), "error", None, f"torch finds no GPU ({reason})")
    assert found(cuda_version="12.8") == []


@pytest.mark.parametrize(
    ("gpu", "capability", "kernels", "index"),
    [
        ("NVIDIA GeForce RTX 5090", (12, 0), CU124, "cu130"),
        ("NVIDIA GeForce GTX 1080", (6, 1), CU130, "cu126"),
        # Code for sm_120 runs on sm_121, and PTX on any later one.
        ("NVIDIA GB10", (12, 1), CU130, None),
        ("NVIDIA GB10", (12, 1), ("sm_90", "compute_90"), None),
        ("NVIDIA GeForce RTX 4090", (8, 9), CU124, None),
        ("AMD Instinct MI300X", (9, 4), ("gfx90a", "gfx942"), None),
    ],
)
def test_a_gpu_for_which_torch_has_no_kernels(
    gpu: str, capability: tuple[int, int], kernels: tuple[str, ...], index: str | None
) -> None:
    findings = found(gpu=gpu, cuda_version="12.4", torch="2.6.0", devices=listed(gpu, capability, kernels))
    assert [finding.severity for finding in findings] == (["error"] if index else [])
    for finding in findings:
        assert f"torch 2.6.0 has no kernels for {gpu}" in finding.message
        assert f"whl/{index}" in str(finding.hint)
    # A GPU that the job does not use does not matter.
    assert found(gpu="NVIDIA A100", cuda_version="12.4", devices=listed(gpu, capability, kernels)) == []


def test_torch_is_asked_under_the_variables_of_the_job_unless_its_environment_is_unknown() -> None:
    env = JobEnvironment(env={"LD_LIBRARY_PATH": "/usr/local/cuda/compat"})
    assert torch_environment(SFT, LaunchOptions(environment=env)) == env.env
    assert torch_environment(SFT, LaunchOptions(environment=replace(env, prelude="module load cuda"))) is None
    gloo = CollectiveTest(messages=(Message(size_bytes=8),), backend="gloo")
    assert torch_environment(gloo, LaunchOptions(environment=env)) is None
