"""Engines, variables and preludes of `multinode launch` on the lab: real launchers, real training, real sshd."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from multinode.lab.state import Lab
from tests.lab.launching import (
    SCRIPT,
    Command,
    assert_no_agents,
    assert_succeeded,
    processes_of,
)

pytestmark = [
    pytest.mark.lab,
    pytest.mark.torch,
    pytest.mark.long,
    pytest.mark.usefixtures("deepspeed_compiled", "lab"),
]

LAUNCH = ("launch", "--hosts", "lab")
ONE = ("--workers-per-node", "1")
MULTI_CPU = ("--accelerate-config", "configs/accelerate/multi_cpu.yaml")
# Lines of shell for a program that runs on the nodes.
PLACE = 'echo "place $NODE_RANK/$NNODES x$NPROC_PER_NODE $MASTER_ADDR:$MASTER_PORT rank=${RANK-none}"'
GIVEN = 'echo "given WHOSE=$WHOSE KEPT=$KEPT MINE=$MINE YOURS=$YOURS SPOKEN=$SPOKEN" "$@"'
TRICKY = "a 'b' \"c\" $(id) `id`; exit 3 #"
# What an engine's launcher is to report needs no torch in its workers.
FAILING = """
import os, time
if os.environ["RANK"] == "3":
    raise RuntimeError("asked to fail")
time.sleep(600)
"""
_TRL = """
model_name_or_path: assets/tiny/model
dataset_name: {data}
output_dir: saves/trl
use_cpu: true
bf16: false
dtype: float32
max_length: 128
max_steps: 60
logging_steps: 1
report_to: none
save_strategy: "no"
per_device_train_batch_size: 2
gradient_checkpointing: false
"""
_ABSENT = ("--dataset_name", "/no/such/data")
# Unbuffered, a worker writes a line's text and its end one after the other: those of two may stand in one line.
_SUM = re.compile(r"rank (\d+) of (\d+)\b.*?parameters sum to (-?\d+\.\d{9})")
_LOSS = re.compile(r"step \d+ of \d+: loss ([\d.]+)")


@pytest.fixture
def script(shared_dir: Path) -> Callable[[str], str]:
    """Makes a shell script that both nodes see, and returns its path."""

    def make(text: str) -> str:
        path = shared_dir / "program.sh"
        path.write_text(text)
        return str(path)

    return make


def log(command: Command, document: dict[str, Any], node_rank: int) -> str:
    return (command.runs / str(document["run_id"]) / "logs" / f"node-{node_rank}.log").read_text()


def logs(command: Command, document: dict[str, Any]) -> str:
    return log(command, document, 0) + log(command, document, 1)


def thorough(*values: object) -> Any:
    """A case that rarely finds what the others do not."""
    return pytest.param(*values, marks=pytest.mark.thorough)


def assert_trained_together(command: Command, document: dict[str, Any], world_size: int) -> None:
    """Every rank has come to the same parameters, though each had data of its own, and the loss has fallen."""
    assert_succeeded(document)
    assert document["world_size"] == world_size
    text = logs(command, document)
    sums = _SUM.findall(text)
    assert sorted(int(rank) for rank, _, _ in sums) == list(range(world_size))
    assert {int(of) for _, of, _ in sums} == {world_size}
    assert len({value for _, _, value in sums}) == 1, sums
    losses = [float(value) for value in _LOSS.findall(text)]
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5]), losses
    assert_nothing_left(document)


def assert_nothing_left(document: dict[str, Any]) -> None:
    assert not processes_of(document["run_id"])
    assert_no_agents()


# Each commit sees ZeRO-2 of LLaMA-Factory in test_restart_shards.py, and its own engine in test_balance.py.
@pytest.mark.thorough
@pytest.mark.usefixtures("tiny")
def test_zero2_trains_a_llamafactory_yaml_on_both_nodes(
    command: Command, ssh: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    # Each node keeps what it writes there to itself.
    output = "/var/tmp/zero2-of-this-test"
    changes = ("--set", "max_steps=16", "--set", "save_strategy=steps", "--set", f"output_dir={output}")
    document = command.document(*LAUNCH, *ONE, "configs/tiny_sft_zero2.yaml", *changes, "--json")
    assert_succeeded(document)
    assert document["schema"] == "multinode.launch/2"
    assert (document["engine"], document["world_size"], document["summary"]["steps"]) == ("llamafactory", 2, 16)
    assert document["first_failure"] is None
    nodes = [(node["name"], node["node_rank"], node["status"]["exit_code"]) for node in document["nodes"]]
    assert nodes == [("node0", 0, 0), ("node1", 1, 0)]
    assert document["summary"]["last_loss"] < document["summary"]["first_loss"] - 1
    assert 0 < document["summary"]["step_time_ms"]["median"]["value"] <= document["summary"]["step_time_ms"]["p95"]
    # Each rank has an optimizer's share of its own: that is ZeRO at work. tests/lab/test_restart_shards.py joins them.
    for rank in (0, 1):
        listed = ssh(f"node{rank}", f"ls {output}/checkpoint-16/global_step16").stdout
        assert f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" in listed
        assert f"zero_pp_rank_{1 - rank}_mp" not in listed
    assert_nothing_left(document)


@pytest.mark.thorough
@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("engine", ["torchrun", "deepspeed", "accelerate"])
def test_a_llamafactory_yaml_runs_under_the_other_engines_too(command: Command, engine: str) -> None:
    name = "tiny_sft_zero2" if engine == "deepspeed" else "tiny_sft"
    options = ("--engine", engine, "--set", "max_steps=6", "--json")
    document = command.document(*LAUNCH, *ONE, f"configs/{name}.yaml", *options)
    assert_succeeded(document)
    assert (document["engine"], document["world_size"], document["summary"]["steps"]) == (engine, 2, 6)
    assert document["summary"]["last_loss"] < document["summary"]["first_loss"]
    assert_nothing_left(document)


def test_trl_trains_by_its_own_command_and_a_setting_is_changed(command: Command, shared_dir: Path) -> None:
    rows = json.loads(Path("assets/tiny/data/tiny.json").read_text())
    data = shared_dir / "trl-data"
    data.mkdir()
    lines = (json.dumps({"prompt": row["instruction"], "completion": row["output"]}) for row in rows)
    (data / "train.jsonl").write_text("\n".join(lines))
    path = shared_dir / "trl.yaml"
    path.write_text(_TRL.format(data=data))
    lacking = command.document("check", "--hosts", "lab", "--json", "--", "trl", "sft", "--config", str(path), *_ABSENT)
    found = [(one["node"], one["check"]) for one in lacking["findings"] if one["severity"] == "error"]
    assert found == [(None, "paths")]
    typed = f"trl sft --config {path} --num_processes 2 --learning_rate 1e-3"
    document = command.document(*LAUNCH, *ONE, "--set", "max_steps=6", "--json", "--", *typed.split())
    assert_succeeded(document)
    assert (document["engine"], document["world_size"], document["summary"]["steps"]) == ("accelerate", 2, 6)
    assert document["summary"]["last_loss"] < document["summary"]["first_loss"]
    assert_nothing_left(document)


def test_deepspeed_trains_a_script_with_zero2(command: Command) -> None:
    # Several workers a node it starts below, where they need no torch.
    options = (*ONE, "--engine", "deepspeed", "--json", "--", "configs/deepspeed_tiny.py", "--steps", "30")
    document = command.document(*LAUNCH, *options)
    assert_trained_together(command, document, 2)
    assert "ZeRO stage 2" in logs(command, document)
    assert document["summary"]["steps"] == 30


@pytest.mark.thorough
def test_options_before_a_script_are_those_of_the_engines_launcher(command: Command) -> None:
    options = ("--engine", "deepspeed", "--json", "--", "--no_local_rank", SCRIPT, "--steps", "3")
    document = command.document(*LAUNCH, *ONE, *options)
    assert_succeeded(document)
    assert "step 3 of 3" in log(command, document, 0)


@pytest.mark.parametrize("config", [(), thorough(MULTI_CPU)])
def test_accelerate_trains_a_script_over_four_workers(command: Command, config: tuple[str, ...]) -> None:
    options = ("--engine", "accelerate", *config, "--json", "--", "configs/accelerate_tiny.py", "--steps", "30")
    document = command.document(*LAUNCH, *options)
    assert_trained_together(command, document, 4)
    assert document["summary"]["steps"] == 30


def test_a_command_that_was_pasted_trains_on_both_nodes(command: Command) -> None:
    # What each launcher's command becomes is golden in tests/cli/test_pasted_commands.py.
    pasted = "torchrun --nnodes=2 --node_rank=0 --nproc_per_node=2 --master_addr=192.0.2.1 --master_port=1234"
    document = command.document(*LAUNCH, "--json", "--", *pasted.split(), SCRIPT, "--steps", "6")
    assert_succeeded(document)
    assert (document["engine"], document["world_size"], document["summary"]["steps"]) == ("torchrun", 4, 6)
    assert_nothing_left(document)


def test_torchs_old_launcher_gives_a_script_its_local_rank(command: Command, shared_dir: Path) -> None:
    path = shared_dir / "argv.py"
    path.write_text("import sys; print('got', *sys.argv[1:], flush=True)")
    typed = f"python -m torch.distributed.launch --nproc_per_node 2 --nnodes 1 {path} --lr 1"
    document = command.document(*LAUNCH, "--json", "--", *typed.split())
    assert_succeeded(document)
    for rank in (0, 1):
        told = re.findall(r"got --.*", log(command, document, rank))
        assert sorted(told) == [f"got --local-rank={local} --lr 1" for local in (0, 1)]


@pytest.mark.parametrize(
    ("engine", "front"),
    [("deepspeed", ("--no_local_rank",)), thorough("accelerate", ())],
    ids=["deepspeed", "accelerate"],
)
def test_a_worker_that_fails_under_an_engine_is_named_and_the_others_are_stopped(
    command: Command, shared_dir: Path, engine: str, front: tuple[str, ...]
) -> None:
    path = shared_dir / "failing.py"
    path.write_text(FAILING)
    code, document = command.code_and_document(*LAUNCH, "--engine", engine, "--json", "--", *front, str(path))
    assert code == 1
    failure = document["first_failure"]
    assert (failure["node"], failure["rank"]) == ("node1", 3)
    assert "asked to fail" in failure["message"]
    assert_nothing_left(document)


@pytest.fixture(scope="module")
def prepared(module_lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Command, dict[str, Any]]]:
    """A program that says where it stands and what it was given: by the hostfile, by --env, by a prelude."""
    directory = tmp_path_factory.mktemp("prepared")
    hostfile = directory / "hosts"
    hostfile.write_text(
        Path(module_lab.hostfile).read_text().replace(" slots=", " env.WHOSE=hostfile env.KEPT=yes slots=")
    )
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="multinode-test-") as shared:
        tool = Path(shared, "bin", "only-here")
        tool.parent.mkdir()
        tool.write_text(f"#!/bin/sh\n{PLACE}\n{GIVEN}\n")
        tool.chmod(0o755)
        setup = Path(shared, "setup")
        setup.write_text(f"export PATH={tool.parent}:$PATH MINE=prelude YOURS=prelude RANK=5\nexport SPOKEN=$0\n")
        command = Command(directory / "runs")
        document = command.document(
            "launch", "--hosts", str(hostfile), "--engine", "exec", "--env", "WHOSE=mine", "--env", "MINE=asked",
            "--setup", f"source {setup}  # a comment", "--json", "--", "only-here", TRICKY,
        )  # fmt: skip
        assert_succeeded(document)
        assert_nothing_left(document)
        yield command, document


def test_a_command_runs_once_a_node_and_knows_its_place(prepared: tuple[Command, dict[str, Any]]) -> None:
    command, document = prepared
    plan = json.loads((command.runs / document["run_id"] / "plan.json").read_text())
    meeting = plan["rendezvous"]
    for rank in (0, 1):
        place = f"place {rank}/2 x2 {meeting['addr']}:{meeting['port']} rank=none"
        assert log(command, document, rank).splitlines()[:-1] == [place]


def test_a_prelude_sets_the_job_up_and_what_was_asked_for_wins(prepared: tuple[Command, dict[str, Any]]) -> None:
    for rank in (0, 1):
        given = log(*prepared, rank).splitlines()[-1]
        assert "MINE=asked YOURS=prelude SPOKEN=bash" in given
        assert given.endswith(f" {TRICKY}")


def test_a_variable_of_the_command_line_wins_over_the_hostfiles(prepared: tuple[Command, dict[str, Any]]) -> None:
    for rank in (0, 1):
        assert log(*prepared, rank).splitlines()[-1].startswith("given WHOSE=mine KEPT=yes ")


def test_a_commands_exit_code_is_the_runs_failure(command: Command, script: Callable[[str], str]) -> None:
    path = script(f'{PLACE} "$@"\n[ $NODE_RANK = 1 ] && exit 7\nsleep 600\n')
    options = ("--no-check", "--engine", "exec", "--json", "--", "bash", path, "two words")
    code, document = command.code_and_document(*LAUNCH, *options)
    assert (code, document["status"]) == (1, "failed")
    assert (document["first_failure"]["node"], document["first_failure"]["exit_code"]) == ("node1", 7)
    plan = json.loads((command.runs / document["run_id"] / "plan.json").read_text())
    assert log(command, document, 1).endswith(f":{plan['rendezvous']['port']} rank=none two words\n")
    assert_nothing_left(document)


def test_a_training_finds_its_interpreter_through_the_prelude(lab: Lab, command: Command, tmp_path: Path) -> None:
    """As with conda: the hostfile names no interpreter, and a bare python3 has no torch. torchrun's own real run."""
    hostfile = tmp_path / "hosts"
    # Elsewhere than in this directory, whose .venv would be found.
    hostfile.write_text(re.sub(r" python=\S+", " workdir=/var/tmp", Path(lab.hostfile).read_text()))
    directory, script = Path(sys.executable).parent, str(Path(SCRIPT).absolute())
    plain = command.run("launch", "--hosts", str(hostfile), *ONE, "--", script, "--steps", "3")
    assert plain.returncode == 1
    assert "torch" in plain.stderr
    document = command.document(
        "launch", "--hosts", str(hostfile), *ONE, "--setup", f"PATH={directory}:$PATH", "--json",
        "--", script, "--steps", "3",
    )  # fmt: skip
    assert_succeeded(document)
    assert (document["engine"], document["summary"]["steps"]) == ("torchrun", 3)


@pytest.mark.parametrize(
    ("prelude", "said", "why"),
    [
        ("source /no/such/activate train", "exited with code 1, so the job was not", "No such file or directory"),
        thorough("exit 0", "exited with code 0, so the job was not started", ""),
        thorough("if", "exited with code", "syntax error"),
        ("PATH=/nowhere", "the program only-here was not found", ""),
    ],
)
def test_a_prelude_that_fails_ends_the_run_and_is_named(command: Command, prelude: str, said: str, why: str) -> None:
    options = ("--no-check", "--engine", "exec", "--setup", prelude, "--json", "--", "only-here")
    code, document = command.code_and_document(*LAUNCH, *options)
    assert (code, document["status"]) == (1, "failed")
    assert "the setup" in document["first_failure"]["message"]
    assert said in document["first_failure"]["message"]
    assert why in document["first_failure"]["log_tail"]
    assert_nothing_left(document)


@pytest.mark.thorough
def test_contrast_measures_another_engine(command: Command) -> None:
    options = ("--hosts", "lab", "--engine", "deepspeed", "--json", "--", "configs/deepspeed_tiny.py", "--steps", "20")
    document = command.document("contrast", *options)
    assert document["schema"].startswith("multinode.contrast/")
