"""Two workers on node0 and one on node1 train as three on one node do, and every figure of theirs is right."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from multinode.lab.cluster import set_rate
from multinode.lab.state import Lab
from tests.lab.launching import Command, assert_nothing_left, assert_succeeded
from tests.lab.supervised import REAL_TORCH
from tests.lab.test_nccl_test import assert_path

pytestmark = [pytest.mark.lab, pytest.mark.torch, pytest.mark.usefixtures("deepspeed_compiled", "module_lab", "tiny")]

YAML, ZERO2 = "configs/tiny_sft.yaml", "configs/tiny_sft_zero2.yaml"
SCRIPT, TRAINER = (str(Path(__file__).with_name(name)) for name in ("train_mlp.py", "train_trainer.py"))
# torchrun gives one of several workers a thread, and one that is alone on its node all cores.
LAUNCH = ("launch", "--json", "--no-check", "--env", "DS_ACCELERATOR=cpu", "--env", "OMP_NUM_THREADS=1")
SMALL = ("--steps", "8", "--width", "256")
STEPS = ("--set", "max_steps=8")
OWN_TORCHRUN = (
    "torchrun --nnodes $NNODES --node-rank $NODE_RANK --nproc-per-node $NPROC_PER_NODE --master-addr $MASTER_ADDR "
    f"--master-port $MASTER_PORT {SCRIPT} {' '.join(SMALL)}"
)
_LOSS = re.compile(r"\bloss'?:? '?(\d+\.\d+)")


class Hosts(NamedTuple):
    """Hostfiles: two workers on node0 and one on node1; all three on node0."""

    unequal: str
    alone: str


@pytest.fixture(scope="module")
def hosts(module_lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Hosts:
    directory, text = tmp_path_factory.mktemp("hosts"), Path(module_lab.hostfile).read_text()
    unequal, alone = directory / "unequal", directory / "alone"
    unequal.write_text(re.sub(r"(?m)^(node1 .*)slots=2", r"\1slots=1", text))
    alone.write_text(re.sub(r"(?m)^(node0 .*)slots=2", r"\1slots=3", text))
    return Hosts(str(unequal), str(alone))


class Both(NamedTuple):
    """The same training of LLaMA-Factory on both nodes and on one: what `launch` and `show` said of it."""

    command: Command
    unequal: dict[str, Any]
    alone: dict[str, Any]
    summary: dict[str, Any]
    summary_alone: dict[str, Any]


def launch(command: Command, hosts: str, *arguments: str) -> dict[str, Any]:
    """What it said of a training of three workers that went well."""
    nodes = ("--nodes", "1") if hosts.endswith("alone") else ()
    document = command.document(*LAUNCH, "--hosts", hosts, *nodes, *arguments)
    assert_succeeded(document)
    assert document["world_size"] == 3
    return document


def summary_of(command: Command, document: dict[str, Any]) -> dict[str, Any]:
    summary: dict[str, Any] = command.document("show", document["run_id"], "--json")["summary"]
    return summary


def losses(command: Command, document: dict[str, Any]) -> list[float]:
    """Those that the first node's log has, step by step."""
    return [float(loss) for loss in _LOSS.findall(command.run("logs", document["run_id"], "--node", "node0").stdout)]


@pytest.fixture(scope="module")
def both(hosts: Hosts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    command = Command(tmp_path_factory.mktemp("both") / "runs")
    unequal, alone = (launch(command, where, YAML, "--set", "max_steps=16") for where in hosts)
    yield Both(command, unequal, alone, summary_of(command, unequal), summary_of(command, alone))
    assert_nothing_left(command)


def test_llamafactory_has_the_losses_of_three_workers_on_one_node(both: Both) -> None:
    ours, theirs = (losses(both.command, document) for document in (both.unequal, both.alone))
    assert len(ours) >= 16
    assert ours == pytest.approx(theirs, rel=2e-3)
    assert ours[15] < ours[0]


def unknown_names(summary: dict[str, Any]) -> set[str]:
    """Figures that are unknown, and what else could not be recorded."""
    unknown = {name for name, figure in summary.items() if isinstance(figure, dict) and figure.get("is") == "unknown"}
    return unknown | {note["concerns"] for note in summary["notes"]}


def test_its_profile_lacks_nothing_that_one_node_has(both: Both) -> None:
    found = both.summary
    assert unknown_names(found) <= unknown_names(both.summary_alone)
    assert [one["rank"] for one in found["split"]["workers"]] == [0, 1, 2]
    assert [sorted(node["peak_worker_memory_gib"]) for node in found["nodes"]] == [["0", "1"], ["2"]]
    assert found["strategy"] == "DDP"
    # Two samples of each of three workers.
    assert found["samples_per_s"]["value"] == pytest.approx(6e3 / found["split"]["mean"]["step_ms"], rel=0.05)


def test_the_bytes_that_are_expected_are_those_that_the_calls_and_the_nics_count(both: Both) -> None:
    sent = both.summary["comm"]["bytes_per_step"]
    # A ring of three workers leaves each node once: 4/3 of the gradients.
    assert sent["expected"] == pytest.approx(4 / 3 * 4 * both.summary["trainable"], rel=0.03)
    assert sent["calls"] == pytest.approx(sent["expected"], rel=0.05)
    assert sent["nic"] == pytest.approx(sent["expected"], rel=0.05)
    assert not [found for found in both.summary["comm"]["findings"] if found["code"].startswith("unexplained")]


def test_a_rank_is_found_on_its_node(both: Both) -> None:
    plan = json.loads((both.command.runs / both.unequal["run_id"] / "plan.json").read_text())
    assert [node["place"]["ranks"] for node in plan["nodes"]] == [[0, 1], [2]]
    logs = [both.command.run("logs", both.unequal["run_id"], "--rank", rank).stdout for rank in ("1", "2")]
    assert logs[0] == both.command.run("logs", both.unequal["run_id"], "--node", "node0").stdout
    assert logs[1] == both.command.run("logs", both.unequal["run_id"], "--node", "node1").stdout


def thorough(*arguments: str, name: str) -> Any:
    return pytest.param(arguments, marks=pytest.mark.thorough, id=name)


# Each commit sees LLaMA-Factory above, started by torchrun; the plan of every engine is a golden file.
@pytest.mark.parametrize(
    "arguments",
    [
        thorough(
            *("--engine", "deepspeed", "--", "--no_local_rank", SCRIPT, "--strategy", "zero2", *SMALL), name="ZeRO-2"
        ),
        thorough("--", SCRIPT, *SMALL, name="torchrun"),
        thorough("--", TRAINER, "8", name="Trainer"),
        thorough(ZERO2, *STEPS, name="LLaMA-Factory ZeRO-2"),
        thorough("--engine", "deepspeed", ZERO2, *STEPS, name="LLaMA-Factory by DeepSpeed"),
        thorough("--engine", "accelerate", "--", SCRIPT, *SMALL, name="accelerate"),
        thorough("--engine", "exec", "--", "sh", "-c", OWN_TORCHRUN, name="exec"),
    ],
)
def test_every_engine_has_the_losses_of_three_workers_on_one_node(
    command: Command, hosts: Hosts, arguments: tuple[str, ...]
) -> None:
    ours, theirs = (losses(command, launch(command, where, *arguments)) for where in hosts)
    assert len(ours) >= 8
    assert ours == pytest.approx(theirs, rel=2e-3)


def test_a_contrast_fills_unequal_nodes(command: Command, hosts: Hosts) -> None:
    options = ("--mode", "scale-out", "--no-check", "--json", *REAL_TORCH, "--hosts", hosts.unequal)
    document = command.document("contrast", *options, "--", SCRIPT, "--steps", "12", "--width", "512")
    sides = document["baseline"], document["candidate"]
    assert [(side["nodes"], side["world_size"]) for side in sides] == [(1, 2), (2, 3)]
    assert document["candidate"]["efficiency"] == pytest.approx(document["candidate"]["speedup"]["value"] / 1.5)
    forecast = document["forecast"]
    measured = [one for one in forecast["scenarios"] if one["measured"]]
    assert [one["unequal"] for one in measured if one["nodes"] == 2] == [[2, 1]]
    assert forecast["break_even"]["one_node_workers"] == 2
    shown = command.run("show", "last", "--details").stdout
    assert "3 on 2" in shown


def test_the_messages_of_a_training_are_tested_with_its_workers(command: Command, hosts: Hosts) -> None:
    options = ("--hosts", hosts.unequal, "--like", YAML, "-n", "3", "--no-tcp", "--json", *REAL_TORCH)
    document = command.document("nccl-test", *options)
    assert (document["world_size"], document["workers"]) == (3, [2, 1])
    assert_path(document, within=0.03)
    (row,) = {row["busbw_gb_per_s"] / row["algbw_gb_per_s"] for row in document["rows"]}
    assert row == pytest.approx(4 / 3)


@pytest.mark.thorough
@pytest.mark.timing
def test_what_is_predicted_of_another_link_is_what_a_bare_run_takes(
    command: Command, hosts: Hosts, module_lab: Lab
) -> None:
    """Of unequal nodes at 1 Gbit/s, and of one with as many workers: what 100 Mbit/s make of it."""
    training = ("--", SCRIPT, "--steps", "20", "--width", "1024", "--batch", "16", "--timed")
    for where in hosts:
        launch(command, where, *training)
    scan = ("--like", YAML, "--hosts", hosts.unequal, "-n", "8", "--json", *REAL_TORCH)
    assert command.document("nccl-test", *scan)["workers"] == [2, 1]
    runs = [path.parent.name for path in sorted(command.runs.glob("*/run.json"))]
    predicted = command.document("predict", *runs, "--link", "0.1", "--nodes", "2", "--json")
    (scenario,) = predicted["scenarios"]
    assert scenario["unequal"] == [2, 1]
    set_rate([node.name for node in module_lab.nodes], 0.1)
    try:
        bare = launch(command, hosts.unequal, "--no-profile", *training)
    finally:
        set_rate([node.name for node in module_lab.nodes], 1.0)
    told = re.findall(r"median step ([\d.]+) ms", command.run("logs", bare["run_id"], "--rank", "0").stdout)
    assert scenario["step_time_ms"] == pytest.approx(float(told[0]), rel=0.08)
