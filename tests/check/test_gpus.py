from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from multinode.check.gpus import (
    check_counts,
    check_drivers,
    check_lost_gpus,
    check_models,
    check_presence,
    check_torch_builds,
    check_vendors,
    used_gpus,
)
from multinode.check.rule import Inspection
from multinode.cluster.cluster import Cluster, Node
from multinode.cluster.facts import UNASKED, Gpu
from multinode.job.job import LlamaFactoryJob
from multinode.job.launch_options import LaunchOptions
from multinode.records.benchmark import CollectiveTest, Message
from multinode.stats.unknown import Entries, Unknown
from tests import make

from .inspecting import SFT, but, expect, inspection, only, silent

ADA = "NVIDIA GeForce RTX 4090"
CHECKS = (check_presence, check_presence, check_counts, check_models, check_drivers, check_torch_builds, check_vendors)


def gpus(*indices: int, **changes: Any) -> tuple[Gpu, ...]:
    everything: dict[str, Any] = {
        "name": ADA,
        "memory_total_mib": 24564.0,
        "memory_used_mib": 18.0,
        "driver": "550.54.15",
    } | changes
    return tuple(Gpu(index=index, **everything) for index in indices)


def cluster(**changes: Any) -> Cluster:
    """Two nodes; of the second the hostfile says more."""
    return make.cluster("a", Node(name="b", **changes))


def well(**changes: Any) -> Inspection:
    """Two nodes with two GPUs each."""
    both = but(inspection(**changes), "ab", gpus=gpus(0, 1))
    return replace(both, job=changes.get("job", SFT))


@pytest.mark.parametrize("check", CHECKS)
def test_nodes_that_are_alike_have_no_finding(check: Any) -> None:
    bare = but(inspection(), "ab", gpus=())
    for known in (well(), bare, inspection("a"), inspection(facts={})):
        silent(check(known))


def test_accelerators_of_two_vendors_cannot_speak_with_each_other() -> None:
    finding = only(check_vendors(but(well(), "b", accelerator="npu")))
    assert (finding.node, finding.severity) == ("b", "error")
    assert "it has Ascend NPU devices, and a NVIDIA CUDA: their backends (hccl and nccl)" in finding.message
    test = CollectiveTest(messages=(Message(size_bytes=8),), backend="nccl")
    assert only(check_presence(replace(but(well(), "b", accelerator="xpu"), job=test))).node == "b"


def test_nccl_without_a_gpu_is_found_and_gloo_is_well() -> None:
    bare = but(inspection(), "b", gpus=Unknown("nvidia-smi not found"))
    test = CollectiveTest(messages=(Message(size_bytes=8),), backend="nccl")
    finding = only(check_presence(replace(bare, job=test)))
    assert (finding.node, "nvidia-smi not found" in finding.message) == ("b", True)
    gloo = replace(bare, job=CollectiveTest(messages=(Message(size_bytes=8),), backend="gloo"))
    assert [list(check(gloo)) for check in CHECKS] == [[]] * len(CHECKS)


def test_a_node_without_gpus_beside_one_that_has_them_is_an_error_with_the_reason() -> None:
    broken = but(well(), "b", gpus=Unknown("nvidia-smi ended with code 18: driver/library mismatch"))
    expect(check_presence(broken), "error", "b", "driver/library mismatch", "a has 2")
    silent(check_counts(broken))


def test_a_gpu_that_is_not_there_is_named_with_those_that_are() -> None:
    finding = expect(check_counts(well(cluster=cluster(gpus=(1, 6)))), "error", "b")
    assert finding.message.startswith("the hostfile assigns it GPU 6, but it has GPU 0, 1")
    assert "correct gpus=" in str(finding.hint)


def test_gpus_of_the_hostfile_on_nodes_that_have_none_are_told_with_the_reason() -> None:
    named = make.cluster(Node(name="a", gpus=(0,)), Node(name="b", gpus=(0,)))
    bare = but(but(inspection(cluster=named), "a", gpus=()), "b", gpus=Unknown("nvidia-smi not found"))
    findings = list(check_counts(bare))
    assert [finding.node for finding in findings] == ["a", "b"]
    assert "nvidia-smi not found" in findings[1].message


def test_more_workers_than_gpus_are_an_error() -> None:
    slots = make.cluster(Node(name="a", slots=2), Node(name="b", slots=2))
    finding = expect(check_counts(but(well(cluster=slots), "b", gpus=gpus(0))), "error", "b")
    assert finding.message.startswith("2 workers are to run here, but it has 1 GPUs")
    assert "slots=1" in str(finding.hint)


def test_unequal_slots_are_an_error_where_the_job_groups_workers_by_node() -> None:
    unequal = but(well(), "b", gpus=gpus(0))
    silent(check_counts(unequal))
    hybrid = LlamaFactoryJob(config_path="sft.yaml", text="", config={"fsdp": "hybrid_shard auto_wrap"})
    grouped = replace(unequal, job=hybrid)
    expect(check_counts(grouped), "error", None, "a has 2, b has 1", hint="--workers-per-node 1")
    silent(check_counts(replace(grouped, facts={"a": unequal.facts["a"]})))
    few = replace(
        well(cluster=make.cluster(Node(name="a", slots=1))),
        options=LaunchOptions(workers_per_node=2),
    )
    expect(check_counts(few), "error", "a", "2 workers are requested, but it has 1 slots")


def test_different_models_are_named() -> None:
    expect(
        check_models(but(well(), "b", gpus=gpus(0, 1, name="NVIDIA GeForce RTX 3090"))),
        "warning",
        "b",
        "NVIDIA GeForce RTX 3090, and a on NVIDIA GeForce RTX 4090",
    )
    mixed = gpus(0) + gpus(1, name="NVIDIA TITAN V")
    first = only(check_models(but(well(), "a", gpus=mixed)))
    assert (first.node, "and its first worker on" in first.message) == ("a", True)


@pytest.mark.parametrize(("name", "said"), [("[GPU is lost]", "GPU is lost"), ("ERR!", "ERR!")])
def test_a_lost_gpu_is_an_error_and_no_model(name: str, said: str) -> None:
    lost = gpus(0) + gpus(1, name=name)
    known = but(well(), "b", gpus=lost)
    expect(check_lost_gpus(known), "error", "b", f"GPU 1 does not answer ({said})", hint="reboot b")
    silent(check_models(known), check_lost_gpus(well()))


def test_a_divided_gpu_beside_a_whole_one_is_a_warning() -> None:
    divided = gpus(0, 1, mig=True)
    expect(
        check_models(but(well(), "b", gpus=divided)), "warning", "b", "MIG divides GPU 0 and 1 here", "a has a whole"
    )
    silent(check_models(but(well(), "ab", gpus=divided)))


def test_a_gpu_that_the_job_does_not_use_does_not_matter() -> None:
    odd = gpus(0, 1) + gpus(2, name="NVIDIA T400")
    two = make.cluster(Node(name="a", slots=2), Node(name="b", gpus=(0, 1)))
    known = but(well(cluster=two), "ab", gpus=odd)
    silent(check_models(known))
    assert [gpu.index for gpu in used_gpus(known, two.nodes[1], known.facts["b"])] == [0, 1]


def test_less_memory_on_the_same_model_is_told() -> None:
    expect(
        check_models(but(well(), "b", gpus=gpus(0, 1, memory_total_mib=49140.0))),
        "warning",
        "b",
        "48 GiB of memory here and 24 GiB",
    )
    # Two boards of one model differ by a little.
    silent(check_models(but(well(), "b", gpus=gpus(0, 1, memory_total_mib=24217.0))))


def test_different_drivers_are_told() -> None:
    expect(
        check_drivers(but(well(), "b", gpus=gpus(0, 1, driver="570.86.10"))),
        "warning",
        "b",
        "570.86.10 here and 550.54.15",
    )


@pytest.mark.parametrize(
    ("name", "driver", "told"),
    [
        (ADA, "535.129.03", True),
        ("NVIDIA GeForce RTX 4070 Laptop GPU", "550.40", True),
        (ADA, "550.40.07", False),
        ("NVIDIA RTX 4000 Ada Generation", "535.129.03", False),
        ("NVIDIA GeForce RTX 3090", "535.129.03", False),
    ],
)
def test_old_drivers_offer_peer_to_peer_that_geforce_ada_has_not(name: str, driver: str, told: bool) -> None:  # noqa: FBT001 - a table
    known = but(
        but(well(), "a", gpus=gpus(0, name=name, driver=driver)), "b", gpus=gpus(0, 1, name=name, driver=driver)
    )
    findings = list(check_drivers(known))
    assert [finding.node for finding in findings] == (["b"] if told else [])
    assert all("env.NCCL_P2P_DISABLE=1" in str(finding.hint) for finding in findings)


def test_peer_to_peer_that_is_switched_off_is_no_finding() -> None:
    old = gpus(0, 1, driver="535.129.03")
    known = but(well(cluster=cluster(env={"NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "0"})), "ab", gpus=old)
    assert only(check_drivers(known)).node == "a"


def test_half_of_what_accelerate_asks_for_is_not_enough() -> None:
    # accelerate 1.11 state.py asks whether both variables are set, and counts all GPUs of the node.
    old = gpus(0, 1, driver="535.129.03")
    known = but(well(cluster=cluster(env={"NCCL_P2P_DISABLE": "1"}, slots=1)), "b", gpus=old)
    finding = only(check_drivers(but(known, "a", gpus=gpus(0, driver="535.129.03"))))
    assert finding.node == "b"
    assert "env.NCCL_P2P_DISABLE=1 and env.NCCL_IB_DISABLE=1" in str(finding.hint)


def test_different_nccl_is_an_error_with_the_way_to_the_same() -> None:
    known = but(
        but(well(), "a", nccl_version="2.27.5", cuda_version="12.6"), "b", nccl_version="2.26.2", cuda_version="12.6"
    )
    expect(
        check_torch_builds(known),
        "error",
        "b",
        "2.26.2 here and 2.27.5 on a",
        check="versions",
        hint="/env/bin/python -m pip install nvidia-nccl-cu12==2.27.5",
    )
    other_torch = but(known, "b", packages=Entries({"torch": "2.7.1"}))
    assert "pip install torch==2.8.0" in str(only(check_torch_builds(other_torch)).hint)


def test_different_cuda_is_a_warning_and_on_nodes_without_gpus_nothing() -> None:
    known = but(but(well(), "a", cuda_version="12.6"), "b", cuda_version="12.8")
    expect(check_torch_builds(known), "warning", "b")
    silent(check_torch_builds(but(known, "ab", gpus=())))


@pytest.mark.parametrize(("waited_s", "found"), [(UNASKED, False), (4.0, False), (11.0, True)])
def test_an_nvidia_smi_that_loads_the_driver_each_time(waited_s: float | Unknown, *, found: bool) -> None:
    findings = list(check_drivers(but(well(), "a", gpu_query_s=waited_s)))
    assert [finding.severity for finding in findings] == ["note"] * found
    assert all("nvidia-smi took 11.0 s" in finding.message for finding in findings)
