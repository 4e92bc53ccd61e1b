"""What `launch` tells of a training on the lab: bytes, exposed communication, bandwidth, strategy, stragglers."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from multinode.lab.state import Lab
from multinode.model.engine_calls import step_messages
from multinode.model.workload import Workload
from multinode.profile.observed import observe_run
from multinode.records.plan import LaunchPlan
from multinode.records.run_directory import RunDirectory
from multinode.stats.unknown import Unknown
from multinode.traffic.algorithms import Layout
from tests.equipment.faults import LinkSlow, clear_faults, make_fault
from tests.lab.launching import RUN_DEADLINE_S, Command, call_here
from tests.lab.supervised import LAUNCH as QUICK
from tests.lab.supervised import REAL_TORCH
from tests.model.trainings import FULL, TINY, training_job
from tests.profile.seen_theory import theory

pytestmark = [pytest.mark.lab, pytest.mark.torch, pytest.mark.usefixtures("lab")]

TRAIN = str(Path(__file__).with_name("train_mlp.py"))
LAUNCH = ("launch", "--hosts", "lab", "--no-check", "--json", "--env", "DS_ACCELERATOR=cpu", *REAL_TORCH)
SHARD = str(Path(__file__).with_name("shard_on_cpu.py"))
TWO_NODES = ("--workers-per-node", "1")
ONE_NODE = ("--nodes", "1", "--workers-per-node", "2")
# The end of the warm-up, a window of five steps, and enough steps that it did not touch.
STEPS = 30
NAMES = {"ddp": "DDP", "zero1": "ZeRO-1", "zero2": "ZeRO-2", "zero3": "ZeRO-3", "fsdp": "FSDP", "fsdp2": "FSDP2"}
SHARDS = {"full_shard": "full shard", "shard_grad_op": "SHARD_GRAD_OP", "hybrid_shard": "hybrid shard"}
# Few samples in a batch, each of which takes its time; what is computed and sent takes none beside that.
SLOW_LOADER = {"steps": 15, "batch": 4, "width": 256, "batch_ms": 400}
# Its numbers of collectives are compared with those of a run without profiling. On a slow link, a third of the first
# and last step may wait in a socket when the NIC is read, so there are many steps in between.
COUNTED = ("--strategy", "ddp", "--steps", "48", "--width", "512", "--batch", "16", "--count-collectives")


@pytest.fixture
def rate() -> Iterator[Callable[[str], None]]:
    """Sets the rate of all nodes; they get back what they had."""

    def change(value: str) -> None:
        assert call_here("lab", "rate", "all", value).returncode == 0

    yield change
    change("1gbit")


@pytest.fixture(scope="module")
def over_slow_link(module_lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> tuple[Command, dict[str, Any]]:
    """DDP, profiled, while one node's link is slow, and its summary."""
    command = Command(tmp_path_factory.mktemp("profiled") / "runs")
    make_fault(module_lab, LinkSlow(node="node1", ifname="ens1f0", rate_gbit_per_s=0.1))
    try:
        return command, summary_of(command, *TWO_NODES, "--trace", "5", "--", TRAIN, *COUNTED)
    finally:
        clear_faults(module_lab)


def summary_of(command: Command, *arguments: str, launch: Sequence[str] = LAUNCH) -> dict[str, Any]:
    """The summary of a run that went well."""
    done = command.run(*launch, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    shown = command.document("show", "last", "--json")
    summary: dict[str, Any] = shown["summary"]
    return summary | {"directory": shown["directory"]}


def train(command: Command, *options: str, **arguments: str | float) -> dict[str, Any]:
    """The summary of a run of train_mlp.py that went well."""
    words = [word for name, value in arguments.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    return summary_of(command, *options, "--", TRAIN, *words)


@pytest.mark.timing
@pytest.mark.thorough
@pytest.mark.parametrize("link", ["100mbit", "300mbit", "1gbit"])
def test_exposure_and_bandwidth_agree_whichever_way_they_are_measured(
    command: Command, rate: Callable[[str], None], link: str
) -> None:
    rate(link)
    # A machine that others use spoils a figure now and then; a fault of ours would spoil the same one each time.
    tries: list[dict[str, str]] = []
    while not tries or (set.intersection(*map(set, tries)) and len(tries) < 3):
        tries.append(disagreements(command))
    assert not set.intersection(*map(set, tries)), tries


def disagreements(command: Command) -> dict[str, str]:
    """What the ways to measure one thing tell otherwise; benchmarks/profile_agreement.py has by how much."""
    alone = command.run("nccl-test", "--hosts", "lab", "-b", "4M", "-e", "16M", "-n", "4", "-w", "1", "--no-tcp")
    assert alone.returncode == 0, alone.stderr
    one = train(command, *ONE_NODE, steps=STEPS)
    two = train(command, *TWO_NODES, "--trace", "5", steps=STEPS)
    bandwidth = two["comm"]["in_training"]
    step_ms = two["step_time_ms"]["median"]["value"]
    counted_ms, traced_ms = two["comm"]["exposed_ms"]["value"], two["trace"]["exposed_ms"]
    by_difference_ms = step_ms - (one["step_time_ms"]["median"]["value"] - one["comm"]["exposed_ms"]["value"])
    figures = {
        "exposed by the window": (traced_ms, pytest.approx(counted_ms, abs=0.1 * step_ms)),
        "exposed by the difference to one node": (by_difference_ms, pytest.approx(counted_ms, abs=0.2 * step_ms)),
        "busbw": (bandwidth["busbw_gb_per_s"], pytest.approx(bandwidth["alone"]["busbw_gb_per_s"], rel=0.2)),
    }
    return {name: f"{value}, not {wanted}" for name, (value, wanted) in figures.items() if value != wanted}


def thorough(*values: str | int) -> Any:
    """Left out where another accumulation of the strategy, or another one of its kind, is trained."""
    return pytest.param(*values, marks=pytest.mark.thorough)


# ZeRO-2 sends more with accumulation, and ZeRO-1 what DDP does; DDP without is trained over a slow link.
@pytest.mark.parametrize(
    ("strategy", "accumulation"),
    [
        ("ddp", 4),
        thorough("zero1", 1),
        thorough("zero1", 4),
        thorough("zero2", 1),
        ("zero2", 4),
        ("zero3", 1),
        thorough("zero3", 4),
    ],
)
def test_the_strategy_is_recognised_and_its_bytes_are_those_of_the_theory(
    command: Command, strategy: str, accumulation: int
) -> None:
    found = train(command, *TWO_NODES, strategy=strategy, accumulation=accumulation, steps=15, width=512, batch=16)
    assert_bytes_of_theory(found, NAMES[strategy], accumulation)


@pytest.mark.parametrize(
    ("strategy", "shard", "accumulation"),
    [
        ("fsdp2", "full_shard", 4),
        *(thorough("fsdp", shard, 4) for shard in SHARDS),
        *(thorough("fsdp2", shard, 4) for shard in ("shard_grad_op", "hybrid_shard")),
        *(thorough(strategy, "full_shard", 1) for strategy in ("fsdp", "fsdp2")),
    ],
)
def test_fsdp_is_recognised_and_its_bytes_are_those_of_the_theory(
    command: Command, strategy: str, shard: str, accumulation: int
) -> None:
    nodes = () if shard == "hybrid_shard" else TWO_NODES
    options = ("--strategy", strategy, "--shard", shard, "--accumulation", str(accumulation), "--no-sync")
    found = summary_of(command, *nodes, "--", TRAIN, *options, "--steps", "9", "--width", "512", "--batch", "16")
    assert_bytes_of_theory(found, f"{NAMES[strategy]} ({SHARDS[shard]})", accumulation)


@pytest.mark.thorough
@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("version", [1, 2])
def test_llamafactory_reduces_gradients_once_a_step_under_fsdp(command: Command, version: int) -> None:
    config = {"fsdp": "full_shard auto_wrap", "fsdp_config": {"version": version}, "gradient_accumulation_steps": 4}
    words = ["fsdp='full_shard auto_wrap'", f"fsdp_config={{version: {version}, sync_module_states: 'false'}}"]
    found = summary_of(
        command, *TWO_NODES, "--env", "ACCELERATE_USE_FSDP=true", "--env", f"FSDP_VERSION={version}", "--", SHARD,
        "configs/tiny_sft.yaml", "max_steps=8", "gradient_accumulation_steps=4", "output_dir=/var/tmp/shards", *words,
    )  # fmt: skip
    told = step_messages(training_job(FULL | config), TINY, Layout(nodes=2)).messages
    counted = [call for call in found["comm"]["calls"] if call["size_bytes"] >= 1024]
    assert {(one.collective, one.size_bytes, one.times) for one in told} == {
        (call["op"], call["size_bytes"], call["count"]) for call in counted
    }
    bytes_per_step = found["comm"]["bytes_per_step"]
    assert bytes_per_step["nic"] == pytest.approx(bytes_per_step["expected"], rel=0.03)


def write_model(folder: Path, kind: str, config: dict[str, Any]) -> Path:
    """A tiny model of another architecture with random weights, which trains on what the tiny one does."""
    shutil.copytree("assets/tiny/model", folder, ignore=shutil.ignore_patterns("*.safetensors"))
    program = (
        "import json, sys\n"
        "from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText as V\n"
        "kind, folder, config = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])\n"
        "config = AutoConfig.for_model(kind, **config)\n"
        "build = V if type(config) in V._model_mapping.keys() else AutoModelForCausalLM\n"
        "build.from_config(config).save_pretrained(folder)\n"
    )
    argv = [sys.executable, "-c", program, kind, str(folder), json.dumps(config)]
    subprocess.run(argv, check=True, capture_output=True, timeout=RUN_DEADLINE_S)
    return folder


TEXT = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 2048,
}
# Architectures that no table here describes.
OTHERS: dict[str, dict[str, Any]] = {
    "qwen3_moe": TEXT | {"moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2},
    "qwen2_vl": {
        "text_config": TEXT | {"rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]}},
        "vision_config": {"depth": 2, "embed_dim": 64, "hidden_size": 128, "num_heads": 2},
    },
}


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize(("kind", "method"), [("qwen3_moe", "lora"), thorough("qwen2_vl", "full")])
def test_a_model_that_a_node_counted_sends_what_was_expected_before_it_ran(
    command: Command, tmp_path: Path, kind: str, method: str
) -> None:
    model = write_model(tmp_path / kind, kind, OTHERS[kind])
    changes = (f"model_name_or_path={model}", f"finetuning_type={method}", "max_steps=8", f"output_dir={tmp_path}/out")
    words = [word for change in changes for word in ("--set", change)]
    launch = ("launch", "--hosts", "lab", "--no-check", "--json")
    found = summary_of(command, *TWO_NODES, *words, "configs/tiny_sft.yaml", launch=launch)
    workload = RunDirectory(Path(found["directory"])).read("workload.json", Workload)
    assert workload is not None
    assert not isinstance(workload.work, Unknown), workload.work.reason
    load = workload.work.load
    assert (load.parameters, load.trainable) == (found["parameters"], found["trainable"])
    (told,) = workload.work.calls.values()
    counted = [call for call in found["comm"]["calls"] if call["size_bytes"] >= 1024]
    assert {(one.collective, one.size_bytes, one.times) for one in told} == {
        (call["op"], call["size_bytes"], call["count"]) for call in counted
    }


def test_over_a_slow_link_ddp_sends_the_bytes_of_the_theory(over_slow_link: tuple[Command, dict[str, Any]]) -> None:
    _, found = over_slow_link
    assert_bytes_of_theory(found, NAMES["ddp"], 1)
    asked, expected = (found["comm"]["bytes_per_step"][name] for name in ("calls", "expected"))
    assert expected == pytest.approx(asked, rel=0.03)
    assert asked == pytest.approx(4 * found["trainable"], rel=0.03)


def test_over_a_slow_link_a_traced_window_and_the_counted_calls_agree(
    over_slow_link: tuple[Command, dict[str, Any]],
) -> None:
    """Nearly all of a step is the link's, so what else the machine does hardly counts."""
    _, found = over_slow_link
    comm = found["comm"]
    step_ms = found["step_time_ms"]["median"]["value"]
    assert found["trace"]["exposed_ms"] == pytest.approx(comm["exposed_ms"]["value"], abs=0.15 * step_ms)
    assert comm["in_training"]["source"] == "trace"
    # Of two workers each sends as much as the gradients hold, over 0.1 Gbit/s.
    assert 0.4 < comm["in_training"]["busbw_gb_per_s"] / (0.1 / 8) < 1.1


def assert_bytes_of_theory(found: dict[str, Any], name: str, accumulation: int) -> None:
    assert found["strategy"] == name
    assert found["micro_steps"] == accumulation
    directory = RunDirectory(Path(found["directory"]))
    plan = directory.read("plan.json", LaunchPlan)
    assert plan is not None
    bytes_per_step = found["comm"]["bytes_per_step"]
    assert bytes_per_step["calls"] == pytest.approx(theory(observe_run(directory, plan)).bytes_per_step, rel=0.03)
    assert bytes_per_step["nic"] == pytest.approx(bytes_per_step["expected"], rel=0.03)


def test_a_slow_link_is_the_network_and_no_straggler(over_slow_link: tuple[Command, dict[str, Any]]) -> None:
    _, found = over_slow_link
    assert found["stragglers"] == []
    assert found["bottleneck"]["kind"] == "network"
    assert found["bottleneck"]["share"] > 0.5


def test_a_slow_loader_on_one_node_is_named_as_such(command: Command) -> None:
    found = train(command, *TWO_NODES, **SLOW_LOADER, batch_ms_rank=1)
    (straggler,) = found["stragglers"]
    assert (straggler["node"], straggler["causes"][0]["cause"]) == ("node1", "data")


def test_profiling_issues_no_collective(over_slow_link: tuple[Command, dict[str, Any]], command: Command) -> None:
    """Process groups number their collectives: with profiling and without, the last number is the same."""
    profiled, _ = over_slow_link
    done = command.run(*LAUNCH, *TWO_NODES, "--no-profile", "--", TRAIN, *COUNTED)
    assert done.returncode == 0, done.stdout + done.stderr
    logs = [one.run("logs", "last").stdout.splitlines() for one in (profiled, command)]
    with_profile, without = ([line.partition(" issued ")[2] for line in log if " issued " in line] for log in logs)
    assert len(with_profile) == 2
    assert with_profile == without


def test_a_training_that_never_steps_ends_well_and_the_summary_says_what_is_missing(
    command: Command, shared_dir: Path
) -> None:
    script = shared_dir / "idle.py"
    script.write_text("import torch.distributed as dist\ndist.init_process_group('gloo')\ndist.barrier()\n")
    done = command.run(*QUICK, *TWO_NODES, "--", str(script))
    assert done.returncode == 0, done.stdout + done.stderr
    summary = command.document("show", "last", "--json")["summary"]
    assert summary["step_time_ms"] == {"is": "unknown", "reason": "no worker recorded a step"}
