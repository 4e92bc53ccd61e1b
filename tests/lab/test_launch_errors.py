"""What is wrong before a training can start: one clear message with node and hint, and the right exit code."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from multinode.lab.spec import Lab
from tests.lab.launching import SCRIPT, Command, agents, listener

pytestmark = [pytest.mark.lab, pytest.mark.timeout(120)]


@pytest.fixture
def command(tmp_path: Path) -> Command:
    return Command(tmp_path / "runs")


def launch(command: Command, hostfile: str, *options: str) -> tuple[int, str]:
    done = command.run("launch", "--hosts", hostfile, "--workers-per-node", "1", *options, "--", SCRIPT, "--steps", "2")
    assert "Traceback" not in done.stderr
    assert not agents()
    return done.returncode, done.stderr


def changed(lab: Lab, tmp_path: Path, line: int, old: str, new: str) -> str:
    """The lab's hostfile with one node's line changed."""
    lines = [text for text in Path(lab.hostfile).read_text().splitlines() if text.startswith("node")]
    assert old in lines[line]
    lines[line] = lines[line].replace(old, new)
    path = tmp_path / "hosts"
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def test_a_dead_node(lab: Lab, command: Command, tmp_path: Path) -> None:
    unassigned = lab.nodes[0].management_addr.rsplit(".", 1)[0] + ".250"
    code, said = launch(command, changed(lab, tmp_path, 1, "node1", unassigned))
    assert code == 3
    assert f"error: {unassigned}: no SSH connection" in said
    assert "hint:" in said


def test_a_name_that_does_not_resolve(lab: Lab, command: Command, tmp_path: Path) -> None:
    code, said = launch(command, changed(lab, tmp_path, 1, "node1", "no-such-node.invalid"))
    assert code == 3
    assert "does not resolve" in said


def test_a_refused_key(lab: Lab, command: Command, tmp_path: Path) -> None:
    code, said = launch(command, changed(lab, tmp_path, 1, "slots=2", "slots=2 user=nobody"))
    assert code == 3
    assert "error: node1: it refused our keys for user 'nobody'" in said
    assert "ssh-copy-id" in said


def test_a_missing_interpreter(lab: Lab, command: Command, tmp_path: Path) -> None:
    code, said = launch(command, changed(lab, tmp_path, 1, f"python={lab.spec.python}", "python=/opt/none/bin/python"))
    assert code == 1
    assert "error: node1: no interpreter for the job" in said
    assert "python=" in said


def test_a_missing_torch(lab: Lab, command: Command, tmp_path: Path) -> None:
    bare = f"{sys.base_prefix}/bin/python3"
    code, said = launch(command, changed(lab, tmp_path, 1, f"python={lab.spec.python}", f"python={bare}"))
    assert code == 1
    assert f"error: node1: torch not installed for {bare}" in said
    assert "pip install torch" in said


def test_a_port_in_use(lab: Lab, command: Command) -> None:
    with listener(lab.nodes[0], 29500):
        code, said = launch(command, lab.hostfile)
    assert code == 1
    assert "error: node0: port 29500, the rendezvous, is in use" in said
    assert "python" in said
    assert "--master-port" in said


@pytest.mark.torch
@pytest.mark.usefixtures("lab")
@pytest.mark.parametrize("verb", [("launch",), ("sweep", "--set", "per_device_train_batch_size=1,2")])
def test_a_misspelt_key_of_the_training(command: Command, verb: tuple[str, ...]) -> None:
    done = command.run(*verb, "--hosts", "lab", "configs/tiny_sft.yaml", "--set", "cutof_len=64")
    assert done.returncode == 1
    assert "has no argument 'cutof_len' (--set): it refuses to start" in done.stderr
    assert "hint: the nearest that it has: --set cutoff_len=..." in done.stderr
    assert not agents()


def test_unequal_slots(lab: Lab, command: Command, tmp_path: Path) -> None:
    done = command.run("launch", "--hosts", changed(lab, tmp_path, 1, "slots=2", "slots=1"), "--", SCRIPT)
    assert done.returncode == 2
    assert "unequal slots" in done.stderr
    assert "--workers-per-node 1" in done.stderr


def test_a_wrong_line_in_the_hostfile(lab: Lab, command: Command, tmp_path: Path) -> None:
    done = command.run("launch", "--hosts", changed(lab, tmp_path, 1, "slots=2", "slot=2"), "--", SCRIPT)
    assert done.returncode == 2
    assert "hosts:2: unknown key 'slot'" in done.stderr


def test_a_dry_run_touches_no_network(command: Command) -> None:
    done = command.run("launch", "--hosts", "hostfiles/two4090.txt", "configs/qwen2vl_lora_sft.yaml", "--dry-run")
    assert done.returncode == 0
    first, second = done.stdout.split("# --- ")[1:]
    for node, rank, gpus in ((first, 0, "6,7"), (second, 1, "1,6")):
        assert f"CUDA_VISIBLE_DEVICES={gpus} " in node
        assert f"NODE_RANK={rank} " in node
        assert f"RANK={rank} " in node
        for same in ("NNODES=2", "NPROC_PER_NODE=2", "MASTER_ADDR=192.0.2.11", "NCCL_SOCKET_IFNAME==ens1f0"):
            assert f"{same} " in node
        assert "llamafactory-cli train" in node
    assert not command.runs.exists()
