from __future__ import annotations

from pathlib import Path

import pytest

from multinode.agent.sample.card_counters import grown, read_cards, read_interface, read_rdma_port


def interface(net: Path, name: str, **counters: int) -> None:
    """An interface as /sys/class/net shows it."""
    place = net / name / "statistics"
    place.mkdir(parents=True, exist_ok=True)
    for field in ("tx_bytes", "rx_bytes", "tx_packets", "rx_packets"):
        (place / field).write_text(f"{counters.get(field, 0)}\n")


def test_every_interface_is_read_and_an_rdma_port_in_bytes(tmp_path: Path) -> None:
    interface(tmp_path / "net", "eth0", tx_bytes=1514, tx_packets=1)
    port = tmp_path / "infiniband" / "mlx5_0" / "ports" / "1" / "counters"
    port.mkdir(parents=True)
    # Words of four bytes.
    (port / "port_xmit_data").write_text("1000\n")
    (port / "port_rcv_data").write_text("250\n")
    cards = read_cards(str(tmp_path / "net"), str(tmp_path / "infiniband"))
    assert cards["eth0"] == {"tx_bytes": 1514, "rx_bytes": 0, "tx_packets": 1, "rx_packets": 0}
    assert cards["mlx5_0/1"] == {"tx_bytes": 4000, "rx_bytes": 1000}


def test_what_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    interface(tmp_path, "eth0")
    (tmp_path / "bonding_masters").write_text("bond0\n")
    (tmp_path / "eth1" / "statistics").mkdir(parents=True)
    assert list(read_cards(str(tmp_path), str(tmp_path / "none"))) == ["eth0"]


def test_growth_is_of_cards_that_were_there_before_and_after(tmp_path: Path) -> None:
    interface(tmp_path, "eth0", tx_bytes=100)
    interface(tmp_path, "gone", tx_bytes=1)
    before = read_cards(str(tmp_path), str(tmp_path / "none"))
    interface(tmp_path, "eth0", tx_bytes=350, rx_packets=2)
    (tmp_path / "gone").rename(tmp_path / "new")
    after = read_cards(str(tmp_path), str(tmp_path / "none"))
    assert grown(before, after) == {"eth0": {"tx_bytes": 250, "rx_bytes": 0, "tx_packets": 0, "rx_packets": 2}}


def test_errors_and_drops_of_an_interface_are_read_too(tmp_path: Path) -> None:
    interface(tmp_path, "eth0", rx_bytes=7)
    for number, field in enumerate(("rx_errors", "tx_errors", "rx_dropped", "tx_dropped")):
        (tmp_path / "eth0" / "statistics" / field).write_text(f"{number}\n")
    counters = read_interface("eth0", str(tmp_path))
    assert (counters["rx_bytes"], counters["rx_errors"], counters["tx_dropped"]) == (7, 0, 3)
    with pytest.raises(OSError, match="eth1"):
        read_interface("eth1", str(tmp_path))


def test_an_rdma_port_counts_bytes_and_the_faults_that_it_knows(tmp_path: Path) -> None:
    port = tmp_path / "mlx5_0" / "ports" / "1" / "counters"
    port.mkdir(parents=True)
    for name, count in (("port_xmit_data", 1000), ("port_rcv_data", 250), ("port_rcv_errors", 3)):
        (port / name).write_text(f"{count}\n")
    counters = read_rdma_port("mlx5_0/1", str(tmp_path))
    assert counters == {"tx_bytes": 4000, "rx_bytes": 1000, "rx_errors": 3, "tx_dropped": None}
    with pytest.raises(OSError, match="mlx5_0/2"):
        read_rdma_port("mlx5_0/2", str(tmp_path))


def test_this_machine_has_a_loopback() -> None:
    assert "lo" in read_cards()
