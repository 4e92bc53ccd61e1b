"""Engines, variables and preludes of `multinode launch` on the lab: real launchers, real training, real sshd."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from multinode.lab.spec import Lab
from tests.lab.launching import (
    DEADLINE_S,
    REPOSITORY,
    SCRIPT,
    Command,
    agents,
    assert_succeeded,
    command_line,
    processes_of,
    wait_for,
)

pytestmark = [
    pytest.mark.lab,
    pytest.mark.torch,
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("deepspeed_compiled", "lab"),
]

LAUNCH = ("launch", "--hosts", "lab")
ONE = ("--workers-per-node", "1")
# Unbuffered, a worker writes a line's text and its end one after the other: those of two may stand in one line.
_SUM = re.compile(r"rank (\d+) of (\d+)\b.*?parameters sum to (-?\d+\.\d{9})")
_LOSS = re.compile(r"step \d+ of \d+: loss ([\d.]+)")


@pytest.fixture
def command(tmp_path: Path) -> Command:
    return Command(tmp_path / "runs")


@pytest.fixture(scope="module")
def tiny() -> None:
    make_tiny = [sys.executable, "scripts/make_tiny.py"]
    subprocess.run(make_tiny, cwd=REPOSITORY, check=True, capture_output=True, timeout=DEADLINE_S)


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
    assert not agents()


@pytest.mark.usefixtures("tiny")
def test_zero2_trains_a_llamafactory_yaml_on_both_nodes(
    command: Command, ssh: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    # Each node keeps what it writes there to itself.
    output = "/var/tmp/zero2-of-this-test"
    changes = ("--set", "max_steps=10", "--set", "save_strategy=steps", "--set", f"output_dir={output}")
    document = command.document(*LAUNCH, *ONE, "configs/tiny_sft_zero2.yaml", *changes, "--json")
    assert_succeeded(document)
    assert (document["engine"], document["world_size"], document["steps"]) == ("llamafactory", 2, 10)
    assert document["last_loss"] < document["first_loss"] - 0.5
    # Each rank has an optimizer's share of its own: that is ZeRO at work.
    for rank in (0, 1):
        listed = ssh(f"node{rank}", f"ls {output}/checkpoint-10/global_step10").stdout
        assert f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" in listed
        assert f"zero_pp_rank_{1 - rank}_mp" not in listed
    assert_nothing_left(document)


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("engine", ["torchrun", "deepspeed", "accelerate"])
def test_a_llamafactory_yaml_runs_under_the_other_engines_too(command: Command, engine: str) -> None:
    name = "tiny_sft_zero2" if engine == "deepspeed" else "tiny_sft"
    options = ("--engine", engine, "--set", "max_steps=6", "--json")
    document = command.document(*LAUNCH, *ONE, f"configs/{name}.yaml", *options)
    assert_succeeded(document)
    assert (document["engine"], document["world_size"], document["steps"]) == (engine, 2, 6)
    assert document["last_loss"] < document["first_loss"]
    assert_nothing_left(document)


def test_deepspeed_trains_a_script_with_zero2_over_four_workers(command: Command) -> None:
    options = ("--engine", "deepspeed", "--json", "--", "configs/deepspeed_tiny.py", "--steps", "30")
    document = command.document(*LAUNCH, *options)
    assert_trained_together(command, document, 4)
    assert "ZeRO stage 2" in logs(command, document)
    assert document["steps"] == 30


def test_options_before_a_script_are_those_of_the_engines_launcher(command: Command) -> None:
    options = ("--engine", "deepspeed", "--json", "--", "--no_local_rank", SCRIPT, "--steps", "3")
    document = command.document(*LAUNCH, *ONE, *options)
    assert_succeeded(document)
    assert "step 3 of 3" in log(command, document, 0)


@pytest.mark.parametrize("config", [(), ("--accelerate-config", "configs/accelerate/multi_cpu.yaml")])
def test_accelerate_trains_a_script_over_four_workers(command: Command, config: tuple[str, ...]) -> None:
    options = ("--engine", "accelerate", *config, "--json", "--", "configs/accelerate_tiny.py", "--steps", "30")
    document = command.document(*LAUNCH, *options)
    assert_trained_together(command, document, 4)
    assert document["steps"] == 30


@pytest.mark.parametrize("engine", ["deepspeed", "accelerate"])
def test_a_worker_that_fails_under_an_engine_is_named_and_the_others_are_stopped(command: Command, engine: str) -> None:
    front = ("--no_local_rank",) if engine == "deepspeed" else ()
    code, document = command.code_and_document(
        *LAUNCH, *ONE, "--engine", engine, "--json", "--",
        *front, SCRIPT, "--steps", "100000", "--fail-at", "5", "--fail-rank", "1",
    )  # fmt: skip
    assert code == 1
    failure = document["first_failure"]
    assert (failure["node"], failure["rank"]) == ("node1", 1)
    assert "asked to fail at step 5" in failure["message"]
    assert_nothing_left(document)


def test_a_command_runs_once_a_node_and_knows_its_place(command: Command, script: Callable[[str], str]) -> None:
    path = script('echo "place $NODE_RANK/$NNODES x$NPROC_PER_NODE $MASTER_ADDR:$MASTER_PORT rank=${RANK-none} $1"\n')
    options = ("--engine", "command", "--json", "--", "bash", path, "two words")
    document = command.document(*LAUNCH, *options)
    assert_succeeded(document)
    plan = json.loads((command.runs / document["run_id"] / "plan.json").read_text())
    for rank in (0, 1):
        assert log(command, document, rank) == f"place {rank}/2 x2 {plan['master_addr']}:29500 rank=none two words\n"
    assert_nothing_left(document)


def test_a_commands_exit_code_is_the_runs_failure(command: Command, script: Callable[[str], str]) -> None:
    path = script("[ $NODE_RANK = 1 ] && exit 7\nsleep 600\n")
    code, document = command.code_and_document(*LAUNCH, "--engine", "command", "--json", "--", "bash", path)
    assert (code, document["status"]) == (1, "failed")
    assert (document["first_failure"]["node"], document["first_failure"]["exit_code"]) == ("node1", 7)
    assert_nothing_left(document)


def test_a_prelude_sets_the_job_up_and_what_was_asked_for_wins(
    command: Command, script: Callable[[str], str], shared_dir: Path
) -> None:
    tool = shared_dir / "bin" / "only-here"
    tool.parent.mkdir()
    tool.write_text('#!/bin/sh\necho "tool MINE=$MINE YOURS=$YOURS RANK=${RANK-none} SPOKEN=$SPOKEN" "$@"\n')
    tool.chmod(0o755)
    setup = script(f"export PATH={tool.parent}:$PATH MINE=prelude YOURS=prelude RANK=5\nSPOKEN=$0\nexport SPOKEN\n")
    tricky = "a 'b' \"c\" $(id) `id`; exit 3 #"
    document = command.document(
        *LAUNCH, "--engine", "command", "--env", "MINE=asked", "--prelude", f"source {setup}  # a comment", "--json",
        "--", "only-here", tricky,
    )  # fmt: skip
    assert_succeeded(document)
    for rank in (0, 1):
        assert log(command, document, rank) == f"tool MINE=asked YOURS=prelude RANK=none SPOKEN=bash {tricky}\n"
    assert_nothing_left(document)


def test_a_training_finds_its_interpreter_through_the_prelude(lab: Lab, command: Command, tmp_path: Path) -> None:
    """As with conda: the hostfile names no interpreter, and a bare python3 has no torch."""
    hostfile = tmp_path / "hosts"
    hostfile.write_text(re.sub(r" python=\S+", "", Path(lab.hostfile).read_text()))
    directory = Path(sys.executable).parent
    plain = command.run("launch", "--hosts", str(hostfile), *ONE, "--", SCRIPT, "--steps", "3")
    assert plain.returncode == 1
    assert "torch" in plain.stderr
    document = command.document(
        "launch", "--hosts", str(hostfile), *ONE, "--prelude", f"PATH={directory}:$PATH", "--json",
        "--", SCRIPT, "--steps", "3",
    )  # fmt: skip
    assert_succeeded(document)
    assert document["steps"] == 3


@pytest.mark.parametrize(
    ("prelude", "said", "why"),
    [
        ("source /no/such/activate train", "source /no/such/activate train", "No such file or directory"),
        ("exit 0", "ended with exit code 0, and the job was not started: exit 0", ""),
        ("if", "ended with exit code", "syntax error"),
        ("PATH=/nowhere", "the program only-here was not found", ""),
    ],
)
def test_a_prelude_that_fails_ends_the_run_and_is_named(command: Command, prelude: str, said: str, why: str) -> None:
    options = ("--engine", "command", "--prelude", prelude, "--json", "--", "only-here")
    code, document = command.code_and_document(*LAUNCH, *options)
    assert (code, document["status"]) == (1, "failed")
    assert "prelude" in document["first_failure"]["message"]
    assert said in document["first_failure"]["message"]
    assert why in document["first_failure"]["log_tail"]
    assert_nothing_left(document)


def test_a_forwarded_secret_reaches_the_worker_and_nothing_that_others_read(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = "hf-s3cr3t-of-this-test"
    monkeypatch.setenv("HF_TOKEN", secret)
    monkeypatch.setenv("PLAIN_NAME", f"also-{secret}")
    options = (*ONE, "--env", "HF_TOKEN", "--env", "PLAIN_NAME", "--prelude", "true")
    assert secret not in command.run(*LAUNCH, "--dry-run", *options, "--", SCRIPT).stdout
    assert secret not in command.run(*LAUNCH, "--dry-run", "--json", *options, "--", SCRIPT).stdout
    with command.running(*LAUNCH, *options, "--", SCRIPT, "--steps", "100000") as process:
        run_id = command.run_id()
        wait_for(lambda: command.steps(1) > 3)
        workers = [pid for pid in processes_of(run_id) if SCRIPT in command_line(pid)]
        assert {node_rank for pid in workers for node_rank in _node_ranks(pid, run_id)} == {"0", "1"}
        for pid in workers:
            environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            assert f"HF_TOKEN={secret}".encode() in environ
            assert f"PLAIN_NAME=also-{secret}".encode() in environ
        assert not [path for path in Path("/proc").glob("[0-9]*/cmdline") if secret in _read(path)]
        # On the nodes as well: the root of a worker's mount namespace is that of its node.
        kept = [path for pid in workers for path in _run_files(pid)]
        assert {"request.json", "plan.json", "status.json", "log"} <= {path.name for path in kept}
        assert not [path for path in kept if secret in _read(path)]
        process.send_signal(signal.SIGINT)
        printed, _ = process.communicate(timeout=DEADLINE_S)
    assert secret not in printed
    kept = [path for path in command.runs.rglob("*") if path.is_file()]
    assert {"plan.json", "run.json", "cluster.json", "node-1.log"} <= {path.name for path in kept}
    assert not [path for path in kept if secret in _read(path)]
    assert "<forwarded>" in (command.runs / run_id / "plan.json").read_text()


def _node_ranks(pid: int, run_id: str) -> list[str]:
    variables = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return [text.rpartition(".")[2] for text in variables if text.startswith(f"MULTINODE_RUN_ID={run_id}.")]


def _run_files(pid: int) -> list[Path]:
    variables = dict(
        text.partition("=")[::2] for text in Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    )
    root = Path(f"/proc/{pid}/root{variables['MULTINODE_RUN_DIR']}")
    return [path for path in root.rglob("*") if path.is_file()]


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def test_a_variable_of_the_command_line_wins_over_the_hostfiles(
    lab: Lab, command: Command, tmp_path: Path, script: Callable[[str], str]
) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text(Path(lab.hostfile).read_text().replace(" slots=", " env.WHOSE=hostfile env.KEPT=yes slots="))
    path = script('echo "$WHOSE $KEPT"\n')
    document = command.document(
        "launch", "--hosts", str(hostfile), "--engine", "command", "--env", "WHOSE=mine", "--json", "--", "bash", path
    )
    assert [log(command, document, rank) for rank in (0, 1)] == ["mine yes\n", "mine yes\n"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--engine", "llamafactory", "--", SCRIPT), "runs a YAML"),
        (("--engine", "command", "configs/tiny_sft.yaml"), "LLaMA-Factory YAML"),
        (("--engine", "slurm", "--", SCRIPT), "one of torchrun"),
        (("--accelerate-config", "configs/accelerate/multi_cpu.yaml", "--", SCRIPT), "--engine accelerate"),
        (("--env", "NOT_SET_ANYWHERE", "--", SCRIPT), "not set here"),
    ],
)
def test_what_does_not_go_together_is_said_before_anything_is_started(
    command: Command, arguments: tuple[str, ...], words: str
) -> None:
    assert "NOT_SET_ANYWHERE" not in os.environ
    done = command.run(*LAUNCH, *arguments)
    assert done.returncode == 2
    assert words in done.stderr
    assert not command.runs.exists()


def test_contrast_measures_another_engine(command: Command) -> None:
    options = ("--hosts", "lab", "--engine", "deepspeed", "--json", "--", "configs/deepspeed_tiny.py", "--steps", "20")
    document = command.document("contrast", *options)
    assert document["schema"].startswith("multinode.contrast/")
