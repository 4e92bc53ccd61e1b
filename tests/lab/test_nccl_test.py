"""`multinode nccl-test` on the lab: real collectives of the nodes' own torch over the shaped network."""

from __future__ import annotations

from pathlib import Path

import pytest

from multinode.units import goodput_gb_per_s
from tests.lab.launching import Command, agents

pytestmark = [pytest.mark.lab, pytest.mark.torch, pytest.mark.timeout(180), pytest.mark.usefixtures("lab")]


@pytest.fixture
def command(tmp_path: Path) -> Command:
    return Command(tmp_path / "runs")


def test_a_sweep_over_two_nodes(command: Command) -> None:
    code, document = command.code_and_document(
        "nccl-test", "--hosts", "lab", "-b", "256K", "-e", "16M", "-f", "8", "-n", "6", "--json"
    )
    assert code == 0
    assert document["schema"] == "multinode.nccl-test/1"
    assert (document["backend"], document["world_size"], document["nodes"]) == ("gloo", 2, ["node0", "node1"])
    rows = document["rows"]
    assert [row["size_bytes"] for row in rows] == [1 << 18, 1 << 21, 1 << 24]
    assert all(row["num_wrong"] == 0 for row in rows)
    for row in rows:
        assert row["algbw_gb_per_s"] == pytest.approx(row["size_bytes"] / row["time_us"] / 1000)
        # Two ranks: the factor of all-reduce, 2(n-1)/n, is one.
        assert row["busbw_gb_per_s"] == pytest.approx(row["algbw_gb_per_s"])
    # The network is the limit: no more than TCP can carry at 1 Gbit/s, and not a fraction of it.
    assert document["link_gbit_per_s"] == 1.0
    assert 0.5 * goodput_gb_per_s(1.0) < rows[-1]["busbw_gb_per_s"] < 1.05 * goodput_gb_per_s(1.0)
    assert rows[-1]["share_of_ceiling"] == pytest.approx(rows[-1]["busbw_gb_per_s"] / goodput_gb_per_s(1.0))
    assert not agents()


def test_nccl_without_a_gpu_ends_in_one_message(command: Command) -> None:
    done = command.run("nccl-test", "--hosts", "lab", "-b", "1M", "-e", "1M", "--backend", "nccl")
    assert done.returncode == 1
    assert "error: node" in done.stderr
    assert "GPU" in done.stderr
    assert not agents()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("-b", "0"), "the smallest size must be above zero"),
        (("-b", "2M", "-e", "1M"), "the largest size (-e) is below the smallest (-b)"),
        (("-b", "big"), "-b: 'big' is not a size"),
        (("--backend", "mpi"), "unknown backend 'mpi'"),
    ],
)
def test_wrong_input_is_one_clear_line(command: Command, options: tuple[str, ...], said: str) -> None:
    done = command.run("nccl-test", "--hosts", "lab", *options)
    assert done.returncode == 2
    assert said in done.stderr
    assert not command.runs.exists()
