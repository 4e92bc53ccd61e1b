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
from multinode.cluster.cluster import Cluster, Node
from multinode.cluster.facts import Interface, RdmaPort
from multinode.job.job import JobEnvironment
from multinode.job.launch_options import LaunchOptions

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


def test_rdma_everywhere_is_noted_once_and_idle_nics_on_their_nodes() -> None:
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


def test_ports_that_meet_and_carry_what_they_have_negotiated_are_no_finding() -> None:
    known = halves(A, B)
    silent(check_rdma_ports(known), check_rdma_firmware(known))
    # Nobody would use them, or nothing is known of them.
    silent(check_rdma_ports(but(halves(linked(None, None), B), "ab", gpus=())))
    silent(check_rdma_ports(halves((), ())), check_rdma_firmware(having((), ())))
    alone = but(inspection("a"), "a", rdma=(roce(0, pcie_gbit_per_s=10.0),))
    silent(check_rdma_ports(alone))


def test_a_slot_that_carries_less_than_the_link_is_named() -> None:
    """Two boxes whose NICs negotiated 200 Gbit/s carried 13: NVIDIA dgx-spark-playbooks#102."""
    first, second = check_rdma_ports(halves(A, B, pcie_gbit_per_s=126.0))
    assert (first.severity, first.node) == ("warning", "a")
    said = "rocep1s0f0:1 has negotiated 200 Gbit/s, but its PCIe slot carries 126 Gbit/s of at most 252.1"
    assert first.message == said
    assert "rocep1s0f1:1" in second.message


def test_half_a_nic_without_an_address_is_named() -> None:
    found = only(check_rdma_ports(halves(linked("10.1.0.1/24", None), B)))
    assert (found.severity, found.node) == ("warning", "a")
    assert "rocep1s0f1:1 is active with 200 Gbit/s, but its interface ens1 has no IP address" in found.message
    assert "in the hostfile: hca=rocep1s0f0" in str(found.hint)


def naming(known: Inspection, hca: str) -> Inspection:
    nodes = tuple(msgspec.structs.replace(node, hca=hca) for node in known.cluster.nodes)
    return msgspec.structs.replace(known, cluster=Cluster(nodes=nodes, source="hosts"))


def test_ports_that_the_hostfile_does_not_name_are_not_looked_at() -> None:
    half = halves(linked("10.1.0.1/24", None), B)
    for names in ("rocep1s0f0", "rocep1s0f0:1"):
        silent(check_rdma_ports(naming(half, names)))
    assert "rocep1s0f1:1" in only(check_rdma_ports(naming(half, "rocep1s0f0,rocep1s0f1"))).message
    # The only port that may be used is down.
    mixed = having((UP, roce(0, state="DOWN")), (UP, roce(0)))
    assert "here it is not (rocep1s0f0:1 Ethernet DOWN)" in only(check_rdma(naming(mixed, "rocep1s0f0"))).message


def test_a_port_that_the_hostfile_names_has_to_be_active() -> None:
    known = halves(A, B)
    down = but(known, "a", rdma=(roce(0), roce(1, state="DOWN")))
    named, stray = check_rdma_ports(naming(down, "rocep1s0f0,rocep1s0f1"))
    assert (named.severity, named.node, stray.node) == ("warning", "a", "b")
    assert named.message.startswith("hca= in the hostfile names rocep1s0f1:1, which is DOWN")
    assert [one.node for one in check_rdma_ports(down)] == ["b"]
    silent(check_rdma_ports(naming(down, "rocep1s0f0")))


def test_a_port_in_a_network_of_its_own_is_named() -> None:
    stray = having((roce(0), roce(1)), (roce(0),))
    stray = but(but(stray, "a", interfaces=linked("10.1.0.1/24", "10.9.0.1/24")), "b", interfaces=linked("10.1.0.2/24"))
    found = only(check_rdma_ports(stray))
    assert (found.severity, found.node) == ("warning", "a")
    assert "rocep1s0f1:1 is in 10.9.0.0/24, but no active RoCE port of b is" in found.message
    assert "in the hostfile: hca=rocep1s0f0" in str(found.hint)


def test_frames_too_small_for_roces_largest_packets_are_noted() -> None:
    small = linked("10.1.0.1/24", "10.2.0.1/24", mtu=1500)
    first, second = check_rdma_ports(halves(small, B))
    assert (first.severity, second.severity) == ("note", "note")
    assert "whose MTU is 1500: RoCE then sends packets of 1024 instead of 4096" in first.message
    silent(check_rdma_ports(halves(linked("10.1.0.1/24", "10.2.0.1/24", mtu=4200), B)))


def test_access_control_between_a_port_and_a_gpu_is_named_with_the_commands_against_it() -> None:
    """Four NICs of 200 Gbit/s reached 80 each with ACS on, where ib_write_bw reached 180: nccl#700."""
    bridges = ("0000:82:04.0", "0000:82:08.0")
    apart = halves(A, B, acs=bridges, iommu="dmar3")
    found = only(check_rdma_path(apart))
    assert (found.severity, found.node) == ("warning", "a")
    assert (
        "(ACS) of 0000:82:04.0 and 0000:82:08.0 sends what rocep1s0f0:1 and rocep1s0f1:1 and the GPUs" in found.message
    )
    assert str(found.hint).splitlines()[1:] == [f"setpci -s {bridge} ECAP_ACS+0x6.w=0000" for bridge in bridges]
    off = msgspec.structs.replace(apart, options=LaunchOptions(environment=JobEnvironment(env={"NCCL_NET": "Socket"})))
    silent(check_rdma_path(off), check_rdma_path(but(apart, "ab", gpus=())), check_rdma_path(halves(A, B)))
    silent(check_rdma_path(halves(A, B, acs=bridges, state="DOWN")))


def test_an_iommu_that_translates_is_noted_and_arms_is_not() -> None:
    for iommu in ("dmar3", "ivhd0"):
        found = only(check_rdma_path(halves(A, B, iommu=iommu)))
        assert (found.severity, found.node) == ("note", "a")
        assert f"an IOMMU ({iommu}) translates the addresses of rocep1s0f0:1 and rocep1s0f1:1" in found.message
        assert "iommu=pt" in str(found.hint)
    silent(check_rdma_path(halves(A, B, iommu="smmu3.0x0000000011000000")))


def test_other_firmware_on_one_node_is_noted() -> None:
    known = having((roce(0),), (roce(0, firmware="28.40.1000"),))
    found = only(check_rdma_firmware(known))
    assert (found.severity, found.node) == ("note", "b")
    assert "firmware 28.40.1000; a has 28.39.1002" in found.message
    silent(check_rdma_firmware(having((roce(0),), (roce(0, board="MT_1", firmware="1.0"),))))


def spark(hca: str = "", **changes: Any) -> Inspection:
    """Two DGX Sparks joined by one cable: its port is two PCIe 5.0 x4 connections (docs.nvidia.com/dgx/dgx-spark)."""
    names = ("rocep1s0f1", "0000:01:00.1"), ("roceP2p1s0f1", "0002:01:00.1")
    ports = tuple(
        roce(number, device=device, pci=pci, pcie_gbit_per_s=126.0, pcie_max_gbit_per_s=126.0)
        for number, (device, pci) in enumerate(names)
    )
    cluster = Cluster(nodes=tuple(Node(name=name, hca=hca or None) for name in "ab"), source="hosts")
    pair = having((ports[0], msgspec.structs.replace(ports[1], **changes)), ports, cluster=cluster)
    return but(but(pair, "a", interfaces=A), "b", interfaces=B)


def test_the_two_connections_of_a_sparks_port_carry_it_together() -> None:
    silent(check_rdma_ports(spark()))
    # The ports of a NIC in a narrow slot share that slot.
    alike = {"device": "rocep1s0f0", "pci": "0000:01:00.0"}
    assert [finding.severity for finding in check_rdma_ports(spark(**alike))] == ["warning"] * 2
    assert [one.node for one in check_rdma_ports(spark(state="DOWN")) if "PCIe slot" in one.message] == ["a"]


def test_half_of_a_sparks_port_is_noted_where_hca_names_no_more() -> None:
    first, _ = check_rdma_ports(spark("rocep1s0f1"))
    assert (first.severity, first.node) == ("note", "a")
    assert "carries 126; the port's other connections (roceP2p1s0f1:1) are not in hca=" in first.message
    assert str(first.hint).endswith("hca=rocep1s0f1,roceP2p1s0f1")
    silent(check_rdma_ports(spark("rocep1s0f1,roceP2p1s0f1")))


def test_a_twin_without_an_address_may_work() -> None:
    pair = but(spark(), "a", interfaces=linked("10.1.0.1/24", None))
    assert "NCCL may leave the port idle or fail" in only(check_rdma_ports(pair)).message
