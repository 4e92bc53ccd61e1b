"""The commands that screens propose, run in a shell as they were printed: for a YAML and for a script."""

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

# Each command has a deadline of its own; a story of eight trainings on a crowded machine needs more than one test may.
pytestmark = [
    pytest.mark.lab,
    pytest.mark.torch,
    pytest.mark.long,
    pytest.mark.timeout(3000),
    pytest.mark.usefixtures("tiny", "slow"),
]

YAML = ("--engine", "torchrun", "--set", "max_steps=8", "configs/tiny_sft.yaml")
SCRIPT = ("--", "tests/lab/train_mlp.py", "--width", "512", "--steps", "12")
# One node is faster, so that every screen has something to propose.
SLOW_GBIT_PER_S = 0.1
_PROPOSED = re.compile(r"^ *(?:Next|Launch it) +(multinode .*)$", re.MULTILINE)


@pytest.fixture
def slow(lab: Lab) -> Iterator[None]:
    """The lab over links on which the network takes most of a step."""
    names = [node.name for node in lab.nodes]
    set_rate(names, SLOW_GBIT_PER_S)
    yield
    set_rate(names, 1.0)


def run(command: Command, line: str, *verbs: str) -> str:
    """Run a line of one of these verbs in a shell as it was printed; what its screen proposes next."""
    assert line.split()[1] in verbs, line
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", line],
        cwd=REPOSITORY,
        env=os.environ | {"MULTINODE_RUNS": str(command.runs), "PATH": path},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=RUN_DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    found = _PROPOSED.search(done.stdout + done.stderr)
    return found[1] if found is not None else ""


@pytest.mark.parametrize(
    "job", [pytest.param(SCRIPT, id="script"), pytest.param(YAML, id="yaml", marks=pytest.mark.thorough)]
)
def test_every_proposed_command_runs(command: Command, job: tuple[str, ...]) -> None:
    words = " ".join((*REAL_TORCH, *job))
    launch = run(command, f"multinode check --hosts lab {words}", "check")
    contrast = run(command, launch, "launch")
    winner = run(command, contrast, "contrast")
    advise = run(command, "multinode predict", "predict")
    # The launch on one node if a YAML is surely faster there.
    then = run(command, advise, "advise")
    run(command, then, "tune", "launch")
    # bench measures for minutes, and what it proposes takes over `--hosts` alone.
    scanned = run(command, "multinode nccl-test --hosts lab -b 64K -e 64K", "nccl-test")
    if scanned.startswith("multinode check"):
        # It found something slow, as on a busy machine.
        run(command, scanned, "check")
    else:
        newest = then if then.startswith("multinode launch") else f"multinode launch --hosts lab {words}"
        wanted = newest.replace(" launch ", " contrast ").replace(" --nodes 1 ", " ")
        assert sorted(scanned.split()) == sorted(wanted.split())
    run(command, winner, "launch", "tune")
