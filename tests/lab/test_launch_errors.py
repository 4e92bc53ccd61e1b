"""What is wrong before a training can start: one clear message with node and hint, and the right exit code."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from multinode.lab.state import Lab
from tests.lab.launching import REPOSITORY, SCRIPT, assert_no_agents, call_here

pytestmark = [pytest.mark.lab]

UNASSIGNED = "10.213.0.250"


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setenv("MULTINODE_RUNS", str(tmp_path / "runs"))
    return tmp_path / "runs"


def launch(hostfile: Path | str, *options: str) -> subprocess.CompletedProcess[str]:
    done = call_here("launch", "--hosts", str(hostfile), *options, "--", SCRIPT, "--steps", "2")
    assert "Traceback" not in done.stderr
    assert_no_agents()
    return done


@pytest.mark.parametrize(
    ("old", "new", "code", "said"),
    [
        ("node1 ", f"{UNASSIGNED} ", 3, (f"error: {UNASSIGNED}: no SSH connection", "hint:")),
        ("node1 ", "no-such-node.invalid ", 3, ("could not resolve 'no-such-node.invalid'",)),
        ("slots=2", "slots=2 user=nobody", 3, ("node1: sshd refused your keys for user 'nobody'", "ssh-copy-id")),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_wrong_line_in_the_hostfile(  # noqa: PLR0917 - a row of the table
    lab: Lab, tmp_path: Path, old: str, new: str, code: int, said: tuple[str, ...]
) -> None:
    first, second = (line for line in Path(lab.hostfile).read_text().splitlines() if line.startswith("node"))
    assert old in second
    hostfile = tmp_path / "hosts"
    hostfile.write_text(f"{first}\n{second.replace(old, new)}\n")
    done = launch(hostfile, "--workers-per-node", "1")
    assert done.returncode == code
    for part in said:
        assert part in done.stderr


@pytest.mark.torch
@pytest.mark.usefixtures("lab", "tiny")
@pytest.mark.parametrize("verb", [("launch",), ("sweep", "--grid", "per_device_train_batch_size=1,2")])
def test_a_misspelt_key_of_the_training(verb: tuple[str, ...]) -> None:
    done = call_here(*verb, "--hosts", "lab", "configs/tiny_sft.yaml", "--set", "cutof_len=64")
    assert done.returncode == 1
    assert "has no argument 'cutof_len' (--set) and refuses to start" in done.stderr
    assert "hint: the closest argument is --set cutoff_len=..." in done.stderr
    assert_no_agents()


def test_a_dry_run_touches_no_network(runs: Path) -> None:
    done = call_here("launch", "--hosts", "hostfiles/two4090.txt", "configs/qwen2vl_lora_sft.yaml", "--dry-run")
    assert done.returncode == 0
    first, second = done.stdout.split("# --- ")[1:]
    for node, rank, gpus in ((first, 0, "6,7"), (second, 1, "1,6")):
        assert f"CUDA_VISIBLE_DEVICES={gpus} " in node
        assert f"NODE_RANK={rank} " in node
        assert f"RANK={rank} " in node
        for same in ("NNODES=2", "NPROC_PER_NODE=2", "MASTER_ADDR=192.0.2.11", "NCCL_SOCKET_IFNAME==ens1f0"):
            assert f"{same} " in node
        assert "llamafactory-cli train" in node
    assert not runs.exists()
