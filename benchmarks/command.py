"""The command as benchmarks run it: from this repository, beside the interpreter that runs them."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

MULTINODE = str(Path(sys.executable).parent / "multinode")
REPOSITORY = Path(__file__).parent.parent
JOB = "configs/tiny_sft.yaml"
SHAPE = ("--hosts", "lab", "--workers-per-node", "1", "--no-check", "--json")
_DEADLINE_S = 3600.0


def run(argv: Sequence[str], env: Mapping[str, str] | None = None) -> str:
    """What a program prints on stdout; `env` is added to the environment. One that fails ends the benchmark."""
    done = subprocess.run(
        argv,
        cwd=REPOSITORY,
        env=os.environ | (env or {}),
        capture_output=True,
        text=True,
        timeout=_DEADLINE_S,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{shlex.join(argv)}: {done.stdout}{done.stderr}")
    return done.stdout


def call(*arguments: str, env: Mapping[str, str] | None = None) -> str:
    """The same of a verb of multinode."""
    return run([MULTINODE, *arguments], env)


def train(*options: str) -> dict[str, Any]:
    """The summary of a training on the lab, one worker on each node."""
    call("launch", JOB, *SHAPE, *options)
    summary: dict[str, Any] = json.loads(call("show", "last", "--json"))["summary"]
    return summary
