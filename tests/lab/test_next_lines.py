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


class Followed:
    """Commands that were run as they were printed, each verb's once."""

    def __init__(self, command: Command) -> None:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self._environ = os.environ | {"MULTINODE_RUNS": str(command.runs), "PATH": path}

    def run(self, line: str) -> str:
        """Run one; the next."""
        done = subprocess.run(
            ["bash", "-c", line],
            cwd=REPOSITORY,
            env=self._environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=RUN_DEADLINE_S,
            check=False,
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        if os.environ.get("SHOW"):
            print(f"$ {line}\n{done.stdout}\n---\n{done.stderr}", flush=True)
        found = _PROPOSED.search(done.stdout + done.stderr)
        return found[1] if found is not None else ""

    def verbs(self, line: str, most: int) -> list[str]:
        """The verbs of a command and of those that follow from it."""
        followed = []
        while line and len(followed) < most:
            followed.append(line.split()[1])
            line = self.run(line)
        return followed


@pytest.mark.parametrize("job", [pytest.param(SCRIPT, id="script"), pytest.param(YAML, id="yaml")])
@pytest.mark.usefixtures("tiny")
def test_every_proposed_command_runs(command: Command, job: tuple[str, ...]) -> None:
    followed = Followed(command)
    words = " ".join((*REAL_TORCH, *job))
    # What one node is measured at ends the first; the second ends with a launch of what tune has found.
    assert followed.verbs(f"multinode check --hosts lab {words}", 4) == ["check", "launch", "contrast", "launch"]
    assert followed.verbs("multinode predict", 3)[:2] == ["predict", "advise"]
    # Of nothing that would disturb the measurement; a size is enough.
    following = followed.run("multinode nccl-test --hosts lab -b 64K -e 64K")
    assert following == f"multinode contrast --hosts lab {words}"
