"""A training worker under the instrumentation, which stands first on PYTHONPATH in a built archive, as on a node."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.warm import run_warm

DEADLINE_S = 600.0
VARIABLES = {"LOCAL_RANK": "1", "RANK": "3", "WORLD_SIZE": "4"}


class Worker:
    """Runs scripts as a worker of a run does.

    Args:
        folder: for all that scripts read and write.
        archive: holds the instrumentation.
        warm: scripts import torch, and run where that costs nothing (tests/warm.py).
    """

    def __init__(self, folder: Path, archive: Path, *, warm: bool = False) -> None:
        self._warm = warm
        self.samples = folder / "samples"  # where the records go
        self.samples.mkdir()
        self.modules = folder / "modules"  # where scripts can import from
        self.modules.mkdir()
        self.archive = archive  # holds the instrumentation
        self.start = archive / "multinode_agent/worker/start"  # the folder in it that PYTHONPATH names

    def module(self, name: str, text: str) -> None:
        """Put a module where scripts can import it; the packages above it are made."""
        path = self.modules.joinpath(*name.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        for package in path.relative_to(self.modules).parents[:-1]:
            (self.modules / package / "__init__.py").touch()
        path.write_text(text)

    def run(self, script: str, **changes: str | None) -> subprocess.CompletedProcess[str]:
        """Run a script under the instrumentation; `changes` are made to its environment, None removes."""
        path = self.modules.parent / "script.py"
        path.write_text(script)
        environ = self.environ(**changes)
        if self._warm:
            return run_warm([path], environ, timeout=DEADLINE_S)
        return subprocess.run(
            [sys.executable, str(path)],
            env=environ,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )

    def environ(self, **changes: str | None) -> dict[str, str]:
        """What a worker of a run has in its environment."""
        environ: dict[str, str | None] = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": f"{self.start}:{self.modules}",
            "MULTINODE_SAMPLES": str(self.samples),
            "OMP_NUM_THREADS": "1",
            **VARIABLES,
            **changes,
        }
        return {name: value for name, value in environ.items() if value is not None}

    def records(self, kind: str | None = None) -> list[dict[str, Any]]:
        """The records of rank 3, which must be the only file."""
        assert [path.name for path in self.samples.iterdir()] == ["rank-3.jsonl"]
        lines = (self.samples / "rank-3.jsonl").read_bytes().splitlines()
        return [record for record in map(json.loads, lines) if kind in {None, record["kind"]}]

    def run_wired(self, script: str, *, watched: bool = True) -> list[dict[str, Any]]:
        """Run a script with the meters of batches and the phases alone, put in place by hand; what it said with `say`.

        The script finds `torch`, `steps`, `guard`, `batches`, a process group of one (after `meet()`) and `step()`,
        which ends a step and says its record. Not `watched` is the same training without any of it.
        """
        wiring = _WIRING + (_WATCHING if watched else "import torch\ndef step(): pass\n")
        done = self.run(wiring + script, LOCAL_RANK=None, RANK="0", AGENT=str(self.archive))
        assert done.returncode == 0, done.stderr
        assert "multinode: " not in done.stderr
        # What torch.compile says where it has to trace something of ours.
        assert "does not know how to trace" not in done.stderr
        return [json.loads(line) for line in (self.samples / "said").read_bytes().splitlines()]


_WIRING = """
import json, os, sys
sys.path.insert(0, os.environ["AGENT"])
from multinode_agent import worker
import multinode_agent.worker.hooks

os.environ["LOCAL_RANK"] = "0"
said = open(os.environ["MULTINODE_SAMPLES"] + "/said", "w")

class Recorder(worker.recorder.Recorder):
    def write(self, kind, fields):
        if kind != "worker":
            say(fields)

guard = worker.guard.Guard(Recorder(os.environ["MULTINODE_SAMPLES"], 0))
steps = worker.steps.Steps(guard._recorder, guard)
hooks = [*worker.phases.hooks(steps.phases, guard), *worker.batches.hooks(steps, guard)]
batches = steps.meters[-1]
def say(fields):
    said.write(json.dumps(fields) + "\\n")
    said.flush()

def meet():
    store = torch.distributed.FileStore(os.environ["MULTINODE_SAMPLES"] + "/store", 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
"""
_WATCHING = """
hooks = [*worker.compiler.HOOKS, *hooks]
sys.meta_path.insert(0, worker.guard.AfterImport((name, guard.quietly(action)) for name, action in hooks))
import torch

def step():
    steps.step("trainer")
"""
