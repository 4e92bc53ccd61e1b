"""`multinode nccl-test` on the lab: real collectives of the nodes' own torch over the shaped network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from multinode.lab.state import Lab
from multinode.units import goodput_gb_per_s
from tests.equipment.faults import LinkSlow, NodeState
from tests.lab.faulting import Make
from tests.lab.launching import Command, assert_no_agents, call_here, processes_of, wait_for
from tests.lab.supervised import REAL_TORCH

pytestmark = [pytest.mark.lab, pytest.mark.torch, pytest.mark.usefixtures("lab")]

MIB = 1 << 20


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Command:
    """With a run directory that all tests of this module share."""
    return Command(tmp_path_factory.mktemp("healthy") / "runs")


@pytest.fixture(scope="module")
def healthy(module_lab: Lab, commands: Command) -> dict[str, Any]:
    """What is said of a network without faults."""
    del module_lab
    collectives = ("all_reduce", "all_gather", "all_to_all")
    sizes = ("-b", "256K", "-e", "16M", "-f", "8", "-n", "6", *REAL_TORCH)
    code, document = commands.code_and_document("nccl-test", *collectives, "--hosts", "lab", *sizes, "--json")
    assert code == 0
    assert_no_agents()
    return document


@pytest.mark.timing
def test_a_sweep_over_two_nodes(healthy: dict[str, Any]) -> None:
    assert healthy["schema"] == "multinode.nccl-test/3"
    assert (healthy["backend"], healthy["world_size"], healthy["nodes"]) == ("gloo", 2, ["node0", "node1"])
    assert all(row["num_wrong"] == 0 for row in healthy["rows"])
    rows = [row for row in healthy["rows"] if row["collective"] == "all_reduce"]
    assert [row["size_bytes"] for row in rows] == [1 << 18, 1 << 21, 1 << 24]
    for row in rows:
        assert row["algbw_gb_per_s"] == pytest.approx(row["size_bytes"] / row["time_us"]["value"] / 1000)
        # Two ranks: the factor of all-reduce, 2(n-1)/n, is one.
        assert row["busbw_gb_per_s"] == pytest.approx(row["algbw_gb_per_s"])
    # The network is the limit: no more than TCP can carry at 1 Gbit/s, and not a fraction of it.
    assert healthy["link_gbit_per_s"] == 1.0
    assert 0.5 * goodput_gb_per_s(1.0) < rows[-1]["busbw_gb_per_s"] < 1.05 * goodput_gb_per_s(1.0)
    assert rows[-1]["share_of_ceiling"] == pytest.approx(rows[-1]["busbw_gb_per_s"] / goodput_gb_per_s(1.0))


@pytest.mark.timing
def test_a_healthy_network_is_called_so_with_all_that_was_measured_beside(healthy: dict[str, Any]) -> None:
    assert healthy["verdict"]["causes"] == []
    assert healthy["verdict"]["nodes"] == []
    assert healthy["verdict"]["code"] == "ok"
    assert healthy["verdict"]["message"].startswith("network OK for a link of ")
    tcp = healthy["tcp"]
    assert [(one["source"], one["target"]) for one in tcp["one"]] == [("node0", "node1"), ("node1", "node0")]
    # A machine that is busy with other things falls short; none gets more through than the link carries.
    assert all(0.5 < one["gbit_per_s"] < 0.96 for one in (*tcp["one"], *tcp["several"]))
    assert all(0 < one["median_us"] < 50_000 for one in tcp["latency"])
    largest = [row for row in healthy["rows"] if row["size_bytes"] == 16 * MIB]
    assert len(largest) == 3
    assert set(healthy["curves"]) == {"all_reduce", "all_gather", "all_to_all"}
    assert_path(healthy, within=0.03)


@pytest.mark.timing
def test_a_slow_link_is_told_and_compared_with_the_time_before(
    healthy: dict[str, Any], commands: Command, fault: Make
) -> None:
    fault(LinkSlow(node="node1", rate_gbit_per_s=0.1))
    document = commands.document(
        *("nccl-test", "--hosts", "lab", "--compare", "last", "-b", "2M", "-e", "2M", "-n", "6", *REAL_TORCH, "--json")
    )
    assert document["tcp_gb_per_s"] < 0.02
    # TCP is slow too: the network is to blame and not the collective. Of two nodes it may be either.
    first = document["verdict"]["causes"][0]
    assert "a stream between node0 and node1 reaches" in first["message"]
    assert first["nodes"] == ["node0", "node1"]
    changes = document["changes"]
    assert changes["before"] == healthy["run_id"]
    (row,) = changes["rows"]
    assert (row["name"], row["changed"]) == ("all_reduce 2 MiB", True)
    assert row["ratio"]["value"] < 0.2
    assert changes["environment"] == []


def assert_path(document: dict[str, Any], within: float) -> None:
    """The counters of each node's NIC match the expected traffic."""
    assert document["path"]["ok"] is True
    judged = [message for message in document["path"]["messages"] if message["size_bytes"] >= MIB]
    assert judged
    for message in judged:
        assert [load["ifname"] for load in message["loads"]] == ["ens1f0"] * len(document["nodes"])
        assert all(load["deviation"] < within for load in message["loads"])


def test_workers_of_one_node_use_loopback_and_the_nic_carries_the_rest(command: Command) -> None:
    document = command.document(
        *("nccl-test", "all_reduce", "all_to_all", "--hosts", "lab", "--workers-per-node", "2", "--no-tcp"),
        *("-b", "8M", "-e", "8M", "-n", "5", "--json", *REAL_TORCH),
    )
    assert (document["world_size"], document["tcp"]["connections"]) == (4, 0)
    assert_path(document, within=0.03)


def test_traffic_that_is_forced_over_the_management_network_is_caught(command: Command, tmp_path: Path) -> None:
    page = tmp_path / "busbw.html"
    done = command.run(
        *("nccl-test", "--hosts", "lab", "--no-check", "--env", "GLOO_SOCKET_IFNAME=eth0", *REAL_TORCH),
        *("-b", "4M", "-e", "8M", "-f", "2", "-n", "3", "--no-tcp", "--format", "nccl-tests", "--output", str(page)),
    )
    assert done.returncode == 0
    document = json.loads((command.runs / command.run_id() / "nccl-test.json").read_text())
    assert document["path"]["ok"] is False
    assert any("eth0" in finding["message"] for finding in document["path"]["findings"])
    verdict = document["verdict"]
    assert "eth0" in verdict["causes"][0]["message"]
    assert "ifname=" in verdict["causes"][0]["hint"]
    # Its output is as of nccl-tests, with a chart.
    rows = [line.split() for line in done.stdout.splitlines() if line and not line.startswith("#")]
    assert [(row[0], row[1], row[2], row[3], row[4], row[-1]) for row in rows] == [
        ("4194304", "1048576", "float", "sum", "-1", "0"),
        ("8388608", "2097152", "float", "sum", "-1", "0"),
    ]
    assert "#  Rank  1 on node1 device cpu" in done.stdout
    assert "all_reduce" in page.read_text()


@pytest.mark.timing
@pytest.mark.usefixtures("tiny")
def test_the_messages_of_a_training_are_tested(command: Command) -> None:
    like = ("--like", "configs/tiny_sft.yaml", *REAL_TORCH)
    document = command.document("nccl-test", "--hosts", "lab", *like, "-n", "3", "--no-tcp", "--json")
    sent = document["like"]
    total = sum(message["size_bytes"] * message["times"] for message in sent["messages"])
    # Gradients of 3.7 M parameters in fp32, once a step.
    assert total == pytest.approx(14.7e6, rel=0.01)
    # All slots train: in a ring of four workers each NIC carries 1.5 times that.
    assert document["world_size"] == 4
    assert sent["step_us"] == pytest.approx(1.5 * total / goodput_gb_per_s(1.0) / 1000, rel=0.2)
    assert {row["collective"] for row in document["rows"]} == {"all_reduce"}


def test_gloo_has_nothing_to_tune_and_nothing_is_measured(command: Command, tmp_path: Path) -> None:
    answer = tmp_path / "tune.md"
    done = command.run("nccl-test", "--hosts", "lab", "--tune", "--write", "--output", str(answer))
    assert (done.returncode, done.stdout.partition(":")[0]) == (0, "Nothing to tune")
    assert "**Nothing to tune: gloo uses one connection" in answer.read_text()
    assert not list(command.runs.glob("*"))


def test_workers_of_this_machine_need_no_node(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nothing is left in the home of whoever runs the tests.
    monkeypatch.setenv("HOME", str(tmp_path))
    sizes = ("-b", "1M", "-e", "1M", "-n", "2")
    done = command.run("nccl-test", "--local", "2", *sizes, "--json", "--min-busbw", "1000000")
    document = json.loads(done.stdout)
    assert (document["nodes"], document["world_size"]) == (["localhost"], 2)
    # The limit is one that nothing reaches, and the figure that missed it is told.
    reached = document["rows"][0]["busbw_gb_per_s"]
    assert done.returncode == 1
    assert f"all_reduce reaches {reached:.4g} GB/s busbw, below --min-busbw 1e+06" in done.stderr
    assert document["rows"][0]["num_wrong"] == 0
    assert document["link_gbit_per_s"] is None
    assert_no_agents()


def test_nccl_without_a_gpu_ends_in_one_message(command: Command) -> None:
    done = command.run("nccl-test", "--hosts", "lab", "-b", "1M", "-e", "1M", "--backend", "nccl", *REAL_TORCH)
    assert done.returncode == 1
    assert "error: node" in done.stderr
    assert "GPU" in done.stderr
    assert_no_agents()


def test_a_node_that_is_lost_in_the_middle_ends_it(command: Command, fault: Make) -> None:
    sizes = ("-b", "16M", "-e", "64M", "-n", "1000")
    with command.running("nccl-test", "--hosts", "lab", *sizes, "--json") as controller:
        run_id = command.run_id()
        wait_for(lambda: list(command.runs.glob("*/samples/node-1/*.jsonl")))
        fault(NodeState(node="node1", how="kill"))
        output, _ = controller.communicate(timeout=120)
    assert controller.returncode in {1, 3}
    assert "node1" in output
    assert "Traceback" not in output
    assert not processes_of(run_id)
    record = json.loads((command.runs / run_id / "run.json").read_text())
    assert record["status"] == "lost"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("-b", "0"), "the smallest size (-b) must be positive"),
        (("-b", "2M", "-e", "1M"), "the largest size (-e) is smaller than the smallest (-b)"),
        (("-b", "big"), "-b: 'big' is not a size"),
        (("--backend", "mpi"), "unknown backend 'mpi'"),
        (("--op", "xor"), "unknown op 'xor'"),
        (("--dtype", "fp4"), "unknown dtype 'fp4'"),
        (("allreduce",), "unknown collective 'allreduce'"),
        (("--compare", "nothing"), "there are no runs in"),
        (("--nodes", "1", "--pairs"), "--pairs needs at least two nodes"),
        (("--nodes", "1"), "a collective needs at least two workers"),
        (("--local", "2"), "--local uses no nodes"),
        (("--output", "/nowhere/at/all.html"), "/nowhere/at"),
        (("--like", "nothing.yaml"), "nothing.yaml"),
    ],
)
def test_wrong_input_is_one_clear_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: tuple[str, ...], said: str
) -> None:
    runs = tmp_path / "runs"
    monkeypatch.setenv("MULTINODE_RUNS", str(runs))
    done = call_here("nccl-test", "--hosts", "lab", *options)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert not runs.exists()
