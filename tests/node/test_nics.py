from __future__ import annotations

from pathlib import Path

from multinode.node.facts.nics import grown, list_rdma_ports, read_nic, read_nics
from tests.golden import raised


def interface(classes: Path, name: str, **counters: int) -> None:
    """An interface as /sys/class/net shows it."""
    place = classes / "net" / name / "statistics"
    place.mkdir(parents=True, exist_ok=True)
    for field, count in {"tx_bytes": 0, "rx_bytes": 0, "tx_packets": 0, "rx_packets": 0, **counters}.items():
        (place / field).write_text(f"{count}\n")


def rdma_port(classes: Path, device: str, **files: object) -> None:
    """Port 1 of a NIC as /sys/class/infiniband shows it; the texts are those of mlx5 NICs."""
    port = classes / "infiniband" / device / "ports" / "1"
    (port / "counters").mkdir(parents=True)
    for name, text in files.items():
        (port / ("" if name in {"state", "link_layer", "rate"} else "counters") / name).write_text(f"{text}\n")


def test_every_interface_is_read_and_an_rdma_port_in_bytes(tmp_path: Path) -> None:
    interface(tmp_path, "eth0", tx_bytes=1514, tx_packets=1)
    # Words of four bytes.
    rdma_port(tmp_path, "mlx5_0", port_xmit_data=1000, port_rcv_data=250)
    nics = read_nics(str(tmp_path))
    assert nics["eth0"] == {"tx_bytes": 1514, "rx_bytes": 0, "tx_packets": 1, "rx_packets": 0}
    assert nics["mlx5_0/1"] == {"tx_bytes": 4000, "rx_bytes": 1000}


def test_what_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    interface(tmp_path, "eth0")
    (tmp_path / "net" / "bonding_masters").write_text("bond0\n")
    (tmp_path / "net" / "eth1" / "statistics").mkdir(parents=True)
    assert list(read_nics(str(tmp_path))) == ["eth0"]


def test_growth_is_of_nics_that_were_there_before_and_after(tmp_path: Path) -> None:
    interface(tmp_path, "eth0", tx_bytes=100)
    interface(tmp_path, "gone", tx_bytes=1)
    before = read_nics(str(tmp_path))
    interface(tmp_path, "eth0", tx_bytes=350, rx_packets=2)
    (tmp_path / "net" / "gone").rename(tmp_path / "net" / "new")
    after = read_nics(str(tmp_path))
    assert grown(before, after) == {"eth0": {"tx_bytes": 250, "rx_bytes": 0, "tx_packets": 0, "rx_packets": 2}}


def test_errors_and_drops_of_an_interface_are_read_too(tmp_path: Path) -> None:
    interface(tmp_path, "eth0", rx_bytes=7, rx_errors=0, tx_errors=1, rx_dropped=2, tx_dropped=3)
    counters = read_nic("eth0", str(tmp_path))
    assert (counters["rx_bytes"], counters["rx_errors"], counters["tx_dropped"]) == (7, 0, 3)
    assert "eth1" in str(raised(OSError, read_nic, "eth1", str(tmp_path)))


def test_an_rdma_port_counts_bytes_and_the_faults_that_it_knows(tmp_path: Path) -> None:
    faults = {"port_rcv_errors": 3, "link_downed": 1, "symbol_error": 12, "link_error_recovery": 2}
    rdma_port(tmp_path, "mlx5_0", port_xmit_data=1000, port_rcv_data=250, **faults)
    assert read_nic("mlx5_0/1", str(tmp_path)) == {
        "tx_bytes": 4000,
        "rx_bytes": 1000,
        "rx_errors": 3,
        "tx_dropped": None,
        "carrier_changes": 1,
        "link_recoveries": 2,
        "symbol_errors": 12,
    }
    assert "mlx5_0/2" in str(raised(OSError, read_nic, "mlx5_0/2", str(tmp_path)))


def test_this_machine_has_a_loopback() -> None:
    assert "lo" in read_nics()


def test_ports_are_told_with_state_link_layer_and_rate(tmp_path: Path) -> None:
    rdma_port(tmp_path, "mlx5_1", state="1: DOWN", link_layer="Ethernet", rate="40 Gb/sec (4X QDR)")
    rdma_port(tmp_path, "mlx5_0", state="4: ACTIVE", link_layer="InfiniBand", rate="100 Gb/sec (4X EDR)")
    first, second = list_rdma_ports(str(tmp_path))
    assert first == {
        "device": "mlx5_0",
        "port": 1,
        "state": "ACTIVE",
        "link_layer": "InfiniBand",
        "rate_gbit_per_s": 100.0,
    }
    assert (second["state"], second["link_layer"], second["rate_gbit_per_s"]) == ("DOWN", "Ethernet", 40.0)


def test_a_rate_may_have_a_fraction_and_a_port_may_say_nothing(tmp_path: Path) -> None:
    rdma_port(tmp_path, "mlx4_0", rate="2.5 Gb/sec (1X SDR)")
    (port,) = list_rdma_ports(str(tmp_path))
    assert (port["state"], port["link_layer"], port["rate_gbit_per_s"]) == (None, None, 2.5)


def put(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{text}\n")


def test_a_roce_port_is_told_with_its_interface_its_gid_its_slot_and_its_firmware(tmp_path: Path) -> None:
    """As Linux 6.8 shows a ConnectX-7; a GID is of RoCE v1 and v2, and of IPv6's link-local address before IPv4's."""
    rdma_port(tmp_path, "mlx5_0", state="4: ACTIVE", link_layer="Ethernet", rate="200 Gb/sec (4X HDR)")
    link_local, ipv4 = "fe80:0000:0000:0000:0a00:27ff:fe12:3456", "0000:0000:0000:0000:0000:ffff:c000:020b"
    port, nic = tmp_path / "infiniband/mlx5_0/ports/1", tmp_path / "infiniband/mlx5_0"
    for index, (gid, kind) in enumerate(
        [(link_local, "IB/RoCE v1"), (link_local, "RoCE v2"), (ipv4, "IB/RoCE v1"), (ipv4, "RoCE v2")]
    ):
        put(port, {f"gids/{index}": gid, f"gid_attrs/types/{index}": kind, f"gid_attrs/ndevs/{index}": "ens1f0np0"})
    put(port, {"gids/4": "0000:0000:0000:0000:0000:0000:0000:0000"})
    put(nic, {"fw_ver": "28.39.1002", "board_id": "MT_0000000838"})
    put(nic / "device", {"current_link_speed": "32.0 GT/s PCIe", "current_link_width": "4"})
    put(nic / "device", {"max_link_speed": "32.0 GT/s PCIe", "max_link_width": "16"})
    (told,) = list_rdma_ports(str(tmp_path))
    assert {name: told[name] for name in told if name not in {"device", "port", "state", "link_layer"}} == {
        "rate_gbit_per_s": 200.0,
        "ifname": "ens1f0np0",
        "gid_index": 3,
        "board": "MT_0000000838",
        "firmware": "28.39.1002",
        "pcie_gbit_per_s": 126.0,
        "pcie_max_gbit_per_s": 504.1,
    }


def test_a_roce_port_without_an_address_still_has_its_interface(tmp_path: Path) -> None:
    rdma_port(tmp_path, "rocep1s0f1", state="4: ACTIVE", link_layer="Ethernet", rate="100 Gb/sec (2X HDR)")
    put(tmp_path / "infiniband/rocep1s0f1/ports/1", {"gid_attrs/ndevs/0": "enp1s0f1np1", "gids/0": "0000:0000"})
    put(tmp_path / "infiniband/rocep1s0f1/device", {"current_link_speed": "5.0 GT/s", "current_link_width": "8"})
    (told,) = list_rdma_ports(str(tmp_path))
    assert (told["ifname"], told.get("gid_index"), told["pcie_gbit_per_s"]) == ("enp1s0f1np1", None, 32.0)


def test_a_node_without_such_nics_has_none(tmp_path: Path) -> None:
    assert list_rdma_ports(str(tmp_path)) == []
