"""Runs scripts in workers that count their collectives, and reads what they recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .gloo_pair import Told, run_pair

# Each worker installs the hooks by hand, as `hooks` does, and ends a step where the script says so.
INSTALL = """
import warnings
warnings.simplefilter("ignore")
rank = RANK
%s
if os.environ["WATCHED"] == "yes":
    traffic = worker.traffic.Traffic(steps, guard, worker.collectives.DeviceWaits(steps, stream))
    watch([*worker.compiler.HOOKS, *traffic.hooks()])
import torch
import torch.distributed as dist
torch.manual_seed(0)
"""
CUDA_STREAM = "stream = worker.collectives.CudaStream()"
MEET = """
dist.init_process_group("gloo", init_method="file://" + FOLDER + "/meeting", rank=rank, world_size=2)
"""


class Recorded:
    """What one worker said and recorded."""

    def __init__(self, told: Told) -> None:
        self.said = told.said
        self.samples = told.records

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
    """Run the script in so many workers; none may fail, and none may say a word of trouble."""
    environ = {
        "WATCHED": "yes" if watched else "no",
        "AGENT": str(archive),
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "DS_ACCELERATOR": "cpu",
    }
    told = run_pair(
        folder / ("watched" if watched else "bare"), INSTALL % stream + script, workers, warm=warm, **environ
    )
    assert not [worker.stderr for worker in told if "multinode:" in worker.stderr]
    return [Recorded(worker) for worker in told]
