from __future__ import annotations

from typing import Any

import msgspec

from multinode.check.rdma import (
    check_locked_memory,
    check_rdma,
    check_rdma_firmware,
    check_rdma_path,
    check_rdma_ports,
)
from multinode.check.rule import Inspection
from multinode.cluster.cluster import Node
from multinode.cluster.facts import Interface, RdmaPort
from multinode.job.job import JobEnvironment
from multinode.job.launch_options import LaunchOptions
from tests import make
from tests.golden import Golden

from .inspecting import but, check_cases, inspection, silent

UP = RdmaPort(device="mlx5_0", port=1, state="ACTIVE", link_layer="InfiniBand", rate_gbit_per_s=100.0)
DOWN = RdmaPort(device="mlx5_0", port=1, state="DOWN", link_layer="InfiniBand", rate_gbit_per_s=10.0)


def having(a: tuple[RdmaPort, ...], b: tuple[RdmaPort, ...], **changes: Any) -> Inspection:
    return but(but(inspection(**changes), "a", rdma=a), "b", rdma=b)


def test_without_rdma_there_is_nothing_to_say() -> None:
    for known in (inspection(), inspection(facts={}), but(inspection("a"), "a", rdma=(UP,))):
        silent(check_rdma(known))


def test_rdma_that_nccl_was_told_to_leave_alone_is_no_finding() -> None:
    hostfile = make.cluster(Node(name="a", env={"NCCL_NET": "Socket"}), Node(name="b", env={"NCCL_NET": "Socket"}))
    silent(check_rdma(having((UP,), (), cluster=hostfile)))
    by_file = but(having((UP,), ()), "a", nccl_files={"/etc/nccl.conf": {"NCCL_IB_DISABLE": "1"}})
    by_file = but(by_file, "b", env={"NCCL_IB_DISABLE": "1"})
    silent(check_rdma(by_file))


def test_gloo_knows_no_rdma() -> None:
    known = having((UP,), ())
    bare = but(known, "ab", gpus=())
    silent(check_rdma(bare))


LIMITED = but(having((UP,), (UP,)), "b", limits={"locked_memory_bytes": 8 << 20}, user="eve")


def test_locked_memory_matters_where_rdma_is_active() -> None:
    silent(
        check_locked_memory(but(LIMITED, "b", rdma=(DOWN,))),
        check_locked_memory(but(LIMITED, "b", limits={"locked_memory_bytes": None})),
        check_locked_memory(but(LIMITED, "b", user="root")),
    )
    alone = msgspec.structs.replace(LIMITED, facts={"a": LIMITED.facts["a"]})
    silent(check_locked_memory(alone))


def roce(number: int, **changes: Any) -> RdmaPort:
    """A half of a NIC with two, each on an interface of its own."""
    port = RdmaPort(
        device=f"rocep1s0f{number}",
        port=1,
        state="ACTIVE",
        link_layer="Ethernet",
        rate_gbit_per_s=200.0,
        ifname=f"ens{number}",
        board="MT_0000000838",
        firmware="28.39.1002",
        pcie_gbit_per_s=252.1,
        pcie_max_gbit_per_s=252.1,
    )
    return msgspec.structs.replace(port, **changes)


def linked(*addresses: str | None, mtu: int = 9000) -> tuple[Interface, ...]:
    return tuple(
        Interface(name=f"ens{number}", addresses=(address,) if address else (), up=True, mtu=mtu)
        for number, address in enumerate(addresses)
    )


def halves(a: tuple[Interface, ...], b: tuple[Interface, ...], **changes: Any) -> Inspection:
    both = having((roce(0, **changes), roce(1, **changes)), (roce(0), roce(1)))
    return but(but(both, "a", interfaces=a), "b", interfaces=b)


A, B = linked("10.1.0.1/24", "10.2.0.1/24"), linked("10.1.0.2/24", "10.2.0.2/24")


def naming(known: Inspection, hca: str) -> Inspection:
    nodes = tuple(msgspec.structs.replace(node, hca=hca) for node in known.cluster.nodes)
    return msgspec.structs.replace(known, cluster=make.cluster(*nodes))


def spark(hca: str = "", **changes: Any) -> Inspection:
    """Two DGX Sparks joined by one cable: its port is two PCIe 5.0 x4 connections (docs.nvidia.com/dgx/dgx-spark)."""
    names = ("rocep1s0f1", "0000:01:00.1"), ("roceP2p1s0f1", "0002:01:00.1")
    ports = tuple(
        roce(number, device=device, pci=pci, pcie_gbit_per_s=126.0, pcie_max_gbit_per_s=126.0)
        for number, (device, pci) in enumerate(names)
    )
    cluster = make.cluster(*(Node(name=name, hca=hca or None) for name in "ab"))
    pair = having((ports[0], msgspec.structs.replace(ports[1], **changes)), ports, cluster=cluster)
    return but(but(pair, "a", interfaces=A), "b", interfaces=B)


def in_another_network() -> Inspection:
    known = but(having((roce(0), roce(1)), (roce(0),)), "a", interfaces=linked("10.1.0.1/24", "10.9.0.1/24"))
    return but(known, "b", interfaces=linked("10.1.0.2/24"))


HALF_LINKED = linked("10.1.0.1/24", None)
HALF = halves(HALF_LINKED, B)
ONE_DOWN = but(halves(A, B), "a", rdma=(roce(0), roce(1, state="DOWN")))
BRIDGES = ("0000:82:04.0", "0000:82:08.0")
# The ports of a NIC in a narrow slot share that slot.
ONE_SLOT = {"device": "rocep1s0f0", "pci": "0000:01:00.0"}
CASES = {
    "RDMA on a alone": check_rdma(having((UP,), ())),
    "active on a alone": check_rdma(having((UP,), (DOWN,))),
    "active on both": check_rdma(having((UP,), (UP,))),
    "active on neither": check_rdma(having((DOWN,), (DOWN,))),
    "on b alone, idle": check_rdma(having((), (DOWN,))),
    "the only port in hca= is down": check_rdma(
        naming(having((UP, roce(0, state="DOWN")), (UP, roce(0))), "rocep1s0f0")
    ),
    "little locked memory": check_locked_memory(LIMITED),
    "little locked memory, in a container": check_locked_memory(but(LIMITED, "b", user="root", container="docker")),
    # Two boxes whose NICs negotiated 200 Gbit/s carried 13: NVIDIA dgx-spark-playbooks#102.
    "a narrow slot": check_rdma_ports(halves(A, B, pcie_gbit_per_s=126.0)),
    "no address": check_rdma_ports(HALF),
    "no address, in hca=": check_rdma_ports(naming(HALF, "rocep1s0f0,rocep1s0f1")),
    "a port is down": check_rdma_ports(ONE_DOWN),
    "a port in hca= is down": check_rdma_ports(naming(ONE_DOWN, "rocep1s0f0,rocep1s0f1")),
    "in another network": check_rdma_ports(in_another_network()),
    "a small MTU": check_rdma_ports(halves(linked("10.1.0.1/24", "10.2.0.1/24", mtu=1500), B)),
    # Four NICs of 200 Gbit/s reached 80 each with ACS on, where ib_write_bw reached 180: nccl#700.
    "access control": check_rdma_path(halves(A, B, acs=BRIDGES, iommu="dmar3")),
    "an IOMMU of Intel": check_rdma_path(halves(A, B, iommu="dmar3")),
    "an IOMMU of AMD": check_rdma_path(halves(A, B, iommu="ivhd0")),
    "other firmware": check_rdma_firmware(having((roce(0),), (roce(0, firmware="28.40.1000"),))),
    "two ports in one slot": check_rdma_ports(spark(**ONE_SLOT)),
    "one connection of two is down": check_rdma_ports(spark(state="DOWN")),
    "one connection of two in hca=": check_rdma_ports(spark("rocep1s0f1")),
    "one connection of two without an address": check_rdma_ports(but(spark(), "a", interfaces=HALF_LINKED)),
}


def test_what_keeps_rdma_from_its_rate_is_found_on_its_node(golden: Golden) -> None:
    check_cases(golden, "rdma", CASES)


def test_ports_that_meet_and_carry_what_they_have_negotiated_are_no_finding() -> None:
    known = halves(A, B)
    silent(check_rdma_ports(known), check_rdma_firmware(known))
    # Nobody would use them, or nothing is known of them.
    silent(check_rdma_ports(but(halves(linked(None, None), B), "ab", gpus=())))
    silent(check_rdma_ports(halves((), ())), check_rdma_firmware(having((), ())))
    alone = but(inspection("a"), "a", rdma=(roce(0, pcie_gbit_per_s=10.0),))
    silent(check_rdma_ports(alone))


def test_ports_that_the_hostfile_does_not_name_are_not_looked_at() -> None:
    silent(*(check_rdma_ports(naming(HALF, names)) for names in ("rocep1s0f0", "rocep1s0f0:1")))
    silent(check_rdma_ports(naming(ONE_DOWN, "rocep1s0f0")))


def test_frames_that_hold_roces_largest_packets_are_no_finding() -> None:
    silent(check_rdma_ports(halves(linked("10.1.0.1/24", "10.2.0.1/24", mtu=4200), B)))


def test_access_control_matters_where_nccl_uses_rdma_beside_a_gpu() -> None:
    apart = halves(A, B, acs=BRIDGES, iommu="dmar3")
    off = msgspec.structs.replace(apart, options=LaunchOptions(environment=JobEnvironment(env={"NCCL_NET": "Socket"})))
    silent(check_rdma_path(off), check_rdma_path(but(apart, "ab", gpus=())), check_rdma_path(halves(A, B)))
    silent(check_rdma_path(halves(A, B, acs=BRIDGES, state="DOWN")))


def test_an_iommu_of_arm_is_no_finding() -> None:
    silent(check_rdma_path(halves(A, B, iommu="smmu3.0x0000000011000000")))


def test_firmware_of_another_board_is_not_compared() -> None:
    silent(check_rdma_firmware(having((roce(0),), (roce(0, board="MT_1", firmware="1.0"),))))


def test_the_two_connections_of_a_sparks_port_carry_it_together() -> None:
    silent(check_rdma_ports(spark()), check_rdma_ports(spark("rocep1s0f1,roceP2p1s0f1")))
