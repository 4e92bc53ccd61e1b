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
from multinode.job.job import TrainingJob
from multinode.job.launch_options import LaunchOptions
from multinode.records.benchmark import CollectiveTest, Message
from multinode.stats.unknown import Entries, Unknown
from tests import make
from tests.golden import Golden

from .inspecting import SFT, but, check_cases, inspection, silent

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


def collective(backend: str) -> CollectiveTest:
    return CollectiveTest(messages=(Message(size_bytes=8),), backend=backend)


BARE = but(inspection(), "b", gpus=Unknown("nvidia-smi not found"))
BROKEN = but(well(), "b", gpus=Unknown("nvidia-smi exited with code 18: driver/library mismatch"))
UNEQUAL = but(well(), "b", gpus=gpus(0))
GROUPED = replace(
    UNEQUAL,
    job=TrainingJob(config_path="sft.yaml", text="", config={"fsdp": "hybrid_shard auto_wrap"}),
)
DIVIDED = but(well(), "b", gpus=gpus(0, 1, mig=True))
OLD = gpus(0, 1, driver="535.129.03")
# accelerate 1.11 state.py asks whether both variables are set, and counts all GPUs of the node.
HALF = but(
    but(well(cluster=cluster(env={"NCCL_P2P_DISABLE": "1"}, slots=1)), "b", gpus=OLD),
    "a",
    gpus=gpus(0, driver="535.129.03"),
)
OTHER_NCCL = but(
    but(well(), "a", nccl_version="2.27.5", cuda_version="12.6"), "b", nccl_version="2.26.2", cuda_version="12.6"
)
OTHER_CUDA = but(but(well(), "a", cuda_version="12.6"), "b", cuda_version="12.8")


def lost(name: str) -> Inspection:
    return but(well(), "b", gpus=gpus(0) + gpus(1, name=name))


def test_what_is_wrong_with_gpus_is_found_on_its_node(golden: Golden) -> None:
    check_cases(
        golden,
        "gpus",
        {
            "accelerators of two vendors": check_vendors(but(well(), "b", accelerator="npu")),
            "nccl, and XPUs on b": check_presence(replace(but(well(), "b", accelerator="xpu"), job=collective("nccl"))),
            "nccl without a GPU": check_presence(replace(BARE, job=collective("nccl"))),
            "no GPU on b, two on a": check_presence(BROKEN),
            "gpus= names one that is not there": check_counts(well(cluster=cluster(gpus=(1, 6)))),
            "gpus= on nodes without GPUs": check_counts(
                but(replace(BARE, cluster=make.cluster(*(Node(name=name, gpus=(0,)) for name in "ab"))), "a", gpus=())
            ),
            "more slots than GPUs": check_counts(
                replace(UNEQUAL, cluster=make.cluster(Node(name="a", slots=2), Node(name="b", slots=2)))
            ),
            "unequal GPUs, and FSDP groups workers by node": check_counts(GROUPED),
            "more workers per node than slots": check_counts(
                replace(well(cluster=make.cluster(Node(name="a", slots=1))), options=LaunchOptions(workers_per_node=2))
            ),
            "another model on b": check_models(but(well(), "b", gpus=gpus(0, 1, name="NVIDIA GeForce RTX 3090"))),
            "two models on a": check_models(but(well(), "a", gpus=gpus(0) + gpus(1, name="NVIDIA TITAN V"))),
            "a lost GPU": check_lost_gpus(lost("[GPU is lost]")),
            "a GPU that nvidia-smi cannot read": check_lost_gpus(lost("ERR!")),
            "MIG on b alone": check_models(DIVIDED),
            "more memory on b": check_models(but(well(), "b", gpus=gpus(0, 1, memory_total_mib=49140.0))),
            "another driver on b": check_drivers(but(well(), "b", gpus=gpus(0, 1, driver="570.86.10"))),
            "old drivers, NCCL_P2P_DISABLE=1 on b": check_drivers(
                but(well(cluster=cluster(env={"NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "0"})), "ab", gpus=OLD)
            ),
            "old drivers, one worker on b and half of what accelerate asks for": check_drivers(HALF),
            "another NCCL on b": check_torch_builds(OTHER_NCCL),
            "different versions of NCCL and torch on b": check_torch_builds(
                but(OTHER_NCCL, "b", packages=Entries({"torch": "2.7.1"}))
            ),
            "another CUDA on b": check_torch_builds(OTHER_CUDA),
            "nvidia-smi took long": check_drivers(but(well(), "a", gpu_query_s=11.0)),
        },
    )


def test_gpus_that_this_job_can_do_without_are_no_finding() -> None:
    gloo = replace(BARE, job=collective("gloo"))
    silent(*(check(gloo) for check in CHECKS))
    silent(check_counts(BROKEN), check_counts(UNEQUAL))
    silent(check_counts(replace(GROUPED, facts={"a": UNEQUAL.facts["a"]})))


def test_a_lost_gpu_is_no_model() -> None:
    silent(check_models(lost("ERR!")), check_lost_gpus(well()))


def test_gpus_that_are_divided_everywhere_or_differ_by_a_little_memory_are_alike() -> None:
    silent(check_models(but(DIVIDED, "a", gpus=gpus(0, 1, mig=True))))
    # Two boards of one model.
    silent(check_models(but(well(), "b", gpus=gpus(0, 1, memory_total_mib=24217.0))))


def test_a_gpu_that_the_job_does_not_use_does_not_matter() -> None:
    odd = gpus(0, 1) + gpus(2, name="NVIDIA T400")
    two = make.cluster(Node(name="a", slots=2), Node(name="b", gpus=(0, 1)))
    known = but(well(cluster=two), "ab", gpus=odd)
    silent(check_models(known))
    assert [gpu.index for gpu in used_gpus(known, two.nodes[1], known.facts["b"])] == [0, 1]


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
    assert [finding.node for finding in check_drivers(known)] == (["b"] if told else [])


def test_another_cuda_on_nodes_without_gpus_is_no_finding() -> None:
    silent(check_torch_builds(but(OTHER_CUDA, "ab", gpus=())))


@pytest.mark.parametrize("waited_s", [UNASKED, 4.0])
def test_an_nvidia_smi_that_answers_soon_or_was_not_asked_is_no_finding(waited_s: float | Unknown) -> None:
    silent(check_drivers(but(well(), "a", gpu_query_s=waited_s)))
