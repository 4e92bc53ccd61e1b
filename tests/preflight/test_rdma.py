from __future__ import annotations

from typing import Any

import msgspec

from multinode.core.cluster.cluster import Cluster, Node
from multinode.core.cluster.facts import RdmaPort
from multinode.preflight.checks.rdma import check_locked_memory, check_rdma
from multinode.preflight.inspection import Inspection

from .inspecting import but, expect, inspection, only, silent

UP = RdmaPort(device="mlx5_0", port=1, state="ACTIVE", link_layer="InfiniBand", rate_gbit_per_s=100.0)
DOWN = RdmaPort(device="mlx5_0", port=1, state="DOWN", link_layer="InfiniBand", rate_gbit_per_s=10.0)


def having(a: tuple[RdmaPort, ...], b: tuple[RdmaPort, ...], **changes: Any) -> Inspection:
    return but(but(inspection(**changes), "a", rdma=a), "b", rdma=b)


def test_without_rdma_there_is_nothing_to_say() -> None:
    for known in (inspection(), inspection(facts={}), but(inspection("a"), "a", rdma=(UP,))):
        silent(check_rdma(known))


def test_rdma_on_some_nodes_only_is_a_warning_on_those_that_lack_it() -> None:
    expect(
        check_rdma(having((UP,), ())),
        "warning",
        "b",
        "active on a (mlx5_0:1 InfiniBand ACTIVE), and here there is none",
        hint="env.NCCL_NET=Socket",
    )
    dead = only(check_rdma(having((UP,), (DOWN,))))
    assert "here it is not (mlx5_0:1 InfiniBand DOWN)" in dead.message


def test_rdma_that_nccl_was_told_to_leave_alone_is_no_finding() -> None:
    hostfile = Cluster(
        nodes=(Node(name="a", env={"NCCL_NET": "Socket"}), Node(name="b", env={"NCCL_NET": "Socket"})), source="hosts"
    )
    silent(check_rdma(having((UP,), (), cluster=hostfile)))
    by_file = but(having((UP,), ()), "a", nccl_files={"/etc/nccl.conf": {"NCCL_IB_DISABLE": "1"}})
    by_file = but(by_file, "b", env={"NCCL_IB_DISABLE": "1"})
    silent(check_rdma(by_file))


def test_rdma_everywhere_is_noted_once_and_idle_cards_on_their_nodes() -> None:
    expect(check_rdma(having((UP,), (UP,))), "note", None)
    idle = only(check_rdma(having((DOWN,), (DOWN,))))
    assert (idle.severity, "of a and b are not active" in idle.message) == ("note", True)
    assert only(check_rdma(having((), (DOWN,)))).severity == "note"


def test_gloo_knows_no_rdma() -> None:
    known = having((UP,), ())
    bare = but(known, "ab", gpus=())
    silent(check_rdma(bare))


def test_locked_memory_matters_where_rdma_is_active() -> None:
    limits = {"locked_memory_bytes": 8 << 20}
    known = but(having((UP,), (UP,)), "b", limits=limits, user="eve")
    expect(check_locked_memory(known), "warning", "b", "lock 8 MiB", hint="memlock")
    silent(
        check_locked_memory(but(known, "b", rdma=(DOWN,))),
        check_locked_memory(but(known, "b", limits={"locked_memory_bytes": None})),
        check_locked_memory(but(known, "b", user="root")),
    )
    assert only(check_locked_memory(but(known, "b", user="root", container="docker"))).node == "b"
    alone = msgspec.structs.replace(known, facts={"a": known.facts["a"]})
    silent(check_locked_memory(alone))
