"""Runs scripts in workers that count their collectives, and reads what they recorded."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from tests.warm import ColdProcess, WarmProcess

DEADLINE_S = 100.0
# Each worker installs the hooks by hand, as multinode_hooks does, and ends a step where the script says so.
PRELUDE = """
import os, sys, warnings
warnings.simplefilter("ignore")
hooks, samples, meeting, rank, watched = sys.argv[1:]
rank, watched = int(rank), watched == "watched"
sys.path.insert(0, hooks)
os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1")
import multinode_guard, multinode_recorder, multinode_steps
import multinode_collectives, multinode_compiler, multinode_traffic
recorder = multinode_recorder.Recorder(samples, rank)
guard = multinode_guard.Guard(recorder)
steps = multinode_steps.Steps(recorder, guard)
"""
INSTALL = """
if watched:
    device = multinode_collectives.DeviceWaits(steps, stream)
    traffic = multinode_traffic.Traffic(steps, guard, device)
    actions = [(name, guard.quietly(action)) for name, action in [*multinode_compiler.HOOKS, *traffic.hooks()]]
    sys.meta_path.insert(0, multinode_guard.AfterImport(actions))
import torch
import torch.distributed as dist
torch.manual_seed(0)
"""
CUDA_STREAM = """
stream = multinode_collectives.CudaStream()
"""
MEET = """
dist.init_process_group("gloo", init_method="file://" + meeting, rank=rank, world_size=2)
"""
LEAVE = """
dist.destroy_process_group()
"""


class Recorded(NamedTuple):
    """What one worker printed and recorded."""

    stdout: str
    samples: list[dict[str, Any]]

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [sample for sample in self.samples if sample["kind"] == kind]

    def calls(self, *fields: str) -> list[list[tuple[Any, ...]]]:
        """Of each step, those fields of what it called."""
        records = {record["traffic"]: record["calls"] for record in self.of("traffic")}
        assert sorted(records) == list(range(len(records)))
        return [
            [tuple(call[field] for field in fields) for call in records[step["traffic"]]] for step in self.of("step")
        ]


def train(
    folder: Path,
    archive: Path,
    script: str,
    *,
    watched: bool = True,
    workers: int = 2,
    stream: str = CUDA_STREAM,
    warm: bool = False,
) -> list[Recorded]:
    """Run the script in so many workers; none may fail, and none may say a word of trouble.

    `warm`: where torch costs nothing (tests/warm.py); not for what keeps functions of torch.distributed in tables.
    """
    samples = folder / ("watched" if watched else "bare")
    samples.mkdir()
    hooks = archive / "multinode_agent" / "instrument"
    arguments = ["-c", PRELUDE + stream + INSTALL + script + LEAVE, str(hooks), str(samples), str(samples / "meeting")]
    start = WarmProcess if warm else ColdProcess
    environ = {"PATH": os.environ["PATH"], "HOME": str(folder), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    running = [start([*arguments, str(rank), "watched" if watched else "bare"], environ) for rank in range(workers)]
    recorded = []
    try:
        for rank, process in enumerate(running):
            status = process.wait(DEADLINE_S)
            stdout, stderr = process.output()
            assert status == 0, stderr
            assert "multinode:" not in stderr
            recorded.append(Recorded(stdout, _read(samples / f"rank-{rank}.jsonl")))
    finally:
        for process in running:
            process.kill()
            process.wait(DEADLINE_S)
    return recorded


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]
