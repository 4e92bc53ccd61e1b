"""Two workers on this machine that train together over gloo, and import the instrumentation themselves."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import multinode
from multinode.records.samples import Sample, parse_samples
from tests.warm import ColdProcess, WarmProcess

DEADLINE_S = 600.0
PRELUDE = """
import json, os, sys
RANK = int(os.environ["RANK"])
FOLDER = os.environ["FOLDER"]
# Not from PYTHONPATH: the sitecustomize there would install all there is.
sys.path.insert(0, os.environ["AGENT"])
from multinode_agent import worker
import multinode_agent.worker.hooks
from multinode_agent.worker.guard import AfterImport
recorder = worker.recorder.Recorder(FOLDER, RANK)
guard = worker.guard.Guard(recorder)
steps = worker.steps.Steps(recorder, guard)

def watch(hooks):
    sys.meta_path.insert(0, AfterImport((name, guard.quietly(action)) for name, action in hooks))

def begin():
    import torch, torch.distributed
    torch.set_num_threads(1)
    torch.manual_seed(RANK)
    size = int(os.environ["WORLD_SIZE"])
    store = torch.distributed.FileStore(FOLDER + "/store", size)
    torch.distributed.init_process_group("gloo", store=store, rank=RANK, world_size=size)
    # A worker that ends while the other still connects would fail it.
    store.set("connected-%d" % RANK, "")
    store.wait(["connected-%d" % rank for rank in range(size)])
    return torch

def tell(told):
    with open(FOLDER + "/told-%d.json" % RANK, "w") as file:
        json.dump(told, file)
"""
# Threads of gloo that still run when the interpreter ends may take the process down with them.
_END = """
if "torch.distributed" in sys.modules and sys.modules["torch.distributed"].is_initialized():
    sys.modules["torch.distributed"].destroy_process_group()
"""


class Told:
    """What one worker told."""

    def __init__(self, folder: Path, rank: int, stderr: str) -> None:
        said, recorded = folder / f"told-{rank}.json", folder / f"rank-{rank}.jsonl"
        # by the script itself, through `tell`; None where no output
        self.said: Any = json.loads(said.read_bytes()) if said.exists() else None
        lines = recorded.read_bytes().splitlines() if recorded.exists() else []
        self.records: list[dict[str, Any]] = [json.loads(line) for line in lines]  # by the instrumentation
        self.samples: list[Sample] = list(parse_samples(lines))  # the same, as the controller reads them
        # One that could not be read would be passed over.
        assert len(self.samples) == len(lines)
        self.stderr = stderr  # all that it wrote


def run_pair(folder: Path, script: str, workers: int = 2, *, warm: bool = True, **environ: str) -> list[Told]:
    """Run a script, after the prelude, in each worker; what they told, by rank.

    `warm`: where torch costs nothing (tests/warm.py); not for what keeps functions of torch.distributed in tables.
    """
    folder.mkdir(parents=True)
    (folder / "multinode_agent").symlink_to(Path(multinode.__file__).parent)
    common = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "PYTHONPATH": str(folder.parent / "modules"),
        "AGENT": str(folder),
        "FOLDER": str(folder),
        "WORLD_SIZE": "2",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        **environ,
    }
    start = WarmProcess if warm else ColdProcess
    started = [
        start(["-c", PRELUDE + script + _END], {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(workers)
    ]
    told = []
    try:
        for rank, process in enumerate(started):
            status = process.wait(DEADLINE_S)
            _, stderr = process.output()
            assert status == 0, stderr
            told.append(Told(folder, rank, stderr))
    finally:
        for process in started:
            process.kill()
            process.wait(DEADLINE_S)
    return told
