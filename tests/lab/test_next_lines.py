"""The command that each screen proposes, run in a shell as it was printed: of a YAML and of a script, until none is."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from multinode.lab.cluster import set_rate
from multinode.lab.state import Lab
from tests.lab.launching import REPOSITORY, RUN_DEADLINE_S, Command
from tests.lab.supervised import REAL_TORCH

pytestmark = [pytest.mark.lab, pytest.mark.torch, pytest.mark.usefixtures("slow")]

YAML = ("--set", "max_steps=8", "configs/tiny_sft.yaml")
SCRIPT = ("--", "tests/lab/train_mlp.py", "--width", "256", "--steps", "12")
# One node is faster: every screen has something to propose.
SLOW_GBIT_PER_S = 0.02
_PROPOSED = re.compile(r"^ *(?:Next|Launch it) +(multinode .*)$", re.MULTILINE)


@pytest.fixture
def slow(lab: Lab) -> Iterator[None]:
    """The lab over links on which the network takes most of a step."""
    names = [node.name for node in lab.nodes]
    set_rate(names, SLOW_GBIT_PER_S)
    yield
    set_rate(names, 1.0)


def follow(command: Command, line: str) -> list[str]:
    """Run a command, then what each screen proposes next; their verbs."""
    followed: list[str] = []
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environ = os.environ | {"MULTINODE_RUNS": str(command.runs), "PATH": path}
    while line and line not in followed:
        done = subprocess.run(
            ["bash", "-c", line],
            cwd=REPOSITORY,
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=RUN_DEADLINE_S,
            check=False,
        )
        if os.environ.get("SHOW"):
            print(f"$ {line}\n{done.stdout}\n---\n{done.stderr}", flush=True)
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        followed.append(line)
        found = _PROPOSED.search(done.stdout + done.stderr)
        line = found[1] if found is not None else ""
    return [each.split()[1] for each in followed]


@pytest.mark.parametrize("job", [pytest.param(SCRIPT, id="script"), pytest.param(YAML, id="yaml")])
@pytest.mark.usefixtures("tiny")
def test_every_proposed_command_runs(command: Command, job: tuple[str, ...]) -> None:
    words = " ".join((*REAL_TORCH, *job))
    assert follow(command, f"multinode check --hosts lab {words}") == ["check", "launch", "contrast", "launch"]
    assert follow(command, "multinode predict") == ["predict", "advise", "tune", "launch"]
    assert follow(command, "multinode bench --hosts lab") == ["bench", "nccl-test", "contrast", "launch"]
