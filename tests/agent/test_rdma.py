from __future__ import annotations

from pathlib import Path

from multinode.agent.facts.rdma import list_rdma_ports


def card(root: Path, device: str, **files: str) -> None:
    """A port as /sys/class/infiniband shows it; the texts are those of mlx5 cards."""
    port = root / device / "ports" / "1"
    port.mkdir(parents=True)
    for name, text in files.items():
        (port / name).write_text(text + "\n")


def test_ports_are_told_with_state_link_layer_and_rate(tmp_path: Path) -> None:
    card(tmp_path, "mlx5_1", state="1: DOWN", link_layer="Ethernet", rate="40 Gb/sec (4X QDR)")
    card(tmp_path, "mlx5_0", state="4: ACTIVE", link_layer="InfiniBand", rate="100 Gb/sec (4X EDR)")
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
    card(tmp_path, "mlx4_0", rate="2.5 Gb/sec (1X SDR)")
    (port,) = list_rdma_ports(str(tmp_path))
    assert (port["state"], port["link_layer"], port["rate_gbit_per_s"]) == (None, None, 2.5)


def test_a_node_without_such_cards_has_none(tmp_path: Path) -> None:
    assert list_rdma_ports(str(tmp_path / "infiniband")) == []
