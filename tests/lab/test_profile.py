"""What `launch` tells of a training on the lab: bytes, exposed communication, bandwidth, strategy, stragglers."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from multinode.analyse.seen_theory import theory
from multinode.core.plan import LaunchPlan
from multinode.lab.faults import Fault
from multinode.lab.faults.kinds import Cpu, LinkSlow
from multinode.store.run_directory import RunDirectory
from multinode.workflows.observe import observe_run
from tests.lab.launching import REPOSITORY, Command

pytestmark = [
    pytest.mark.lab,
    pytest.mark.torch,
    pytest.mark.timeout(400),
    pytest.mark.usefixtures("deepspeed_compiled", "lab"),
]

TRAIN = str(Path(__file__).with_name("train_mlp.py"))
LAUNCH = ("launch", "--hosts", "lab", "--no-check", "--json", "--env", "DS_ACCELERATOR=cpu")
TWO_NODES = ("--workers-per-node", "1")
ONE_NODE = ("--nodes", "1", "--workers-per-node", "2")
# The end of the warm-up, a window of five steps, and enough steps that it did not touch.
STEPS = 30


@pytest.fixture
def command(tmp_path: Path) -> Command:
    return Command(tmp_path / "runs")


@pytest.fixture
def rate() -> Iterator[Callable[[str], None]]:
    """Sets the rate of all nodes; they get back what they had."""

    def change(value: str) -> None:
        multinode = [sys.executable, "-m", "multinode", "lab", "rate", "all", value]
        subprocess.run(multinode, cwd=REPOSITORY, check=True, capture_output=True, timeout=60)

    yield change
    change("1gbit")


def train(command: Command, *options: str, **arguments: str | float) -> dict[str, Any]:
    """The summary of a run of train_mlp.py that went well."""
    words = [word for name, value in arguments.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    done = command.run(*LAUNCH, *options, "--", TRAIN, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    shown = command.document("show", "last", "--json")
    summary: dict[str, Any] = shown["summary"]
    return summary | {"directory": shown["directory"]}


@pytest.mark.parametrize("link", ["100mbit", "300mbit", "1gbit"])
def test_bytes_exposure_and_bandwidth_agree_whichever_way_they_are_measured(
    command: Command, rate: Callable[[str], None], link: str
) -> None:
    rate(link)
    # A machine that others use spoils a run now and then; a fault of ours would spoil the next one, too.
    apart = disagreements(command)
    assert not apart or not (again := disagreements(command)), (apart, again)


def disagreements(command: Command) -> list[str]:
    """What the ways to measure one thing tell otherwise; benchmarks/profile_agreement.py has by how much."""
    alone = command.run("nccl-test", "--hosts", "lab", "-b", "4M", "-e", "16M", "-n", "4", "-w", "1", "--no-tcp")
    assert alone.returncode == 0, alone.stderr
    one = train(command, *ONE_NODE, steps=STEPS)
    two = train(command, *TWO_NODES, "--trace", "5", steps=STEPS)

    asked, expected, card = (two["comm"]["bytes_per_step"][name] for name in ("calls", "expected", "card"))
    assert (expected, card) == (pytest.approx(asked, rel=0.03), pytest.approx(asked, rel=0.03))
    assert asked == pytest.approx(4 * two["trainable"], rel=0.03)
    bandwidth = two["comm"]["in_training"]
    assert bandwidth["source"] == "trace"

    step_ms = two["step_time_ms"]["median"]
    counted_ms, traced_ms = two["comm"]["exposed_ms"], two["trace"]["exposed_ms"]
    by_difference_ms = step_ms - (one["step_time_ms"]["median"] - one["comm"]["exposed_ms"])
    figures = {
        "exposed by the window": (traced_ms, pytest.approx(counted_ms, abs=0.1 * step_ms)),
        "exposed by the difference to one node": (by_difference_ms, pytest.approx(counted_ms, abs=0.2 * step_ms)),
        "busbw": (bandwidth["busbw_gb_per_s"], pytest.approx(bandwidth["alone"]["busbw_gb_per_s"], rel=0.2)),
    }
    return [f"{name}: {value}, not {wanted}" for name, (value, wanted) in figures.items() if value != wanted]


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize(
    ("strategy", "name"),
    [("ddp", "DDP"), ("zero1", "ZeRO-1"), ("zero2", "ZeRO-2"), ("zero3", "ZeRO-3"), ("fsdp2", "FSDP2 (full shard)")],
)
def test_the_strategy_is_recognised_and_its_bytes_are_those_of_the_theory(
    command: Command, strategy: str, name: str, accumulation: int
) -> None:
    found = train(command, *TWO_NODES, strategy=strategy, accumulation=accumulation, steps=15, width=512, batch=16)
    assert found["strategy"] == name
    assert found["micro_steps"] == accumulation
    directory = RunDirectory(Path(found["directory"]))
    plan = directory.read("plan.json", LaunchPlan)
    assert plan is not None
    bytes_per_step = found["comm"]["bytes_per_step"]
    assert bytes_per_step["calls"] == pytest.approx(theory(observe_run(directory, plan)).bytes_per_step, rel=0.03)
    assert bytes_per_step["card"] == pytest.approx(bytes_per_step["expected"], rel=0.05)


def test_a_node_with_little_cpu_is_a_straggler_and_no_slow_network(
    command: Command, fault: Callable[[Fault], None]
) -> None:
    fault(Cpu(node="node1", share=0.3))
    found = train(command, *TWO_NODES, steps=20, batch=512)
    (straggler,) = found["stragglers"]
    assert (straggler["node"], straggler["cause"]) == ("node1", "cpu")
    assert "0.3" in " ".join(straggler["evidence"])
    assert found["bottleneck"]["kind"] == "straggler"
    assert found["comm"]["exposed_ms"] < straggler["late_ms"]


def test_a_slow_link_is_the_network_and_no_straggler(command: Command, fault: Callable[[Fault], None]) -> None:
    fault(LinkSlow(node="node1", ifname="ens1f0", rate_gbit_per_s=0.1))
    found = train(command, *TWO_NODES, steps=15)
    assert found["stragglers"] == []
    assert found["bottleneck"]["kind"] == "network"
    assert found["bottleneck"]["share"] > 0.5


def test_a_slow_loader_on_all_nodes_is_neither(command: Command) -> None:
    found = train(command, *TWO_NODES, steps=15, batch_ms=600)
    assert found["stragglers"] == []
    assert found["bottleneck"]["kind"] == "data"
    assert found["split"]["mean"]["data_ms"] == pytest.approx(600, rel=0.2)


def test_a_slow_loader_on_one_node_is_named_as_such(command: Command) -> None:
    found = train(command, *TWO_NODES, steps=15, batch_ms=600, batch_ms_rank=1)
    (straggler,) = found["stragglers"]
    assert (straggler["node"], straggler["cause"]) == ("node1", "data")


def test_profiling_issues_no_collective(command: Command) -> None:
    """Process groups number their collectives: with profiling and without, the last number is the same."""
    numbers = []
    for profile in ("--profile", "--no-profile"):
        done = command.run(*LAUNCH, *TWO_NODES, profile, "--", TRAIN, "--steps", "12", "--count-collectives")
        assert done.returncode == 0, done.stdout + done.stderr
        log = command.run("logs", "last").stdout
        numbers.append([line.partition(" issued ")[2] for line in log.splitlines() if " issued " in line])
    assert len(numbers[0]) == 2
    assert numbers[0] == numbers[1]


def test_a_training_that_never_steps_ends_well_and_the_summary_says_what_is_missing(
    command: Command, shared_dir: Path
) -> None:
    script = shared_dir / "idle.py"
    script.write_text("import torch.distributed as dist\ndist.init_process_group('gloo')\ndist.barrier()\n")
    done = command.run(*LAUNCH, *TWO_NODES, "--", str(script))
    assert done.returncode == 0, done.stdout + done.stderr
    summary = command.document("show", "last", "--json")["summary"]
    assert summary["step_time_ms"] is None
    assert summary["missing"]["step_time_ms"] == "no worker recorded a step"
