"""Checkpoints as transformers' Trainer writes them, and their files as safetensors and torch.save frame them."""

from __future__ import annotations

import json
import os
import struct
import zipfile
from pathlib import Path
from typing import Any


def save(job: dict[str, Any], step: int) -> None:
    """Write this worker's part of a checkpoint: the first worker's, or each node's, is all but the random numbers."""
    folder = Path(job["output_dir"], f"checkpoint-{step}")
    folder.mkdir(parents=True, exist_ok=True)
    first = os.environ["LOCAL_RANK" if job.get("save_on_each_node") else "RANK"] == "0"
    if first:
        _write(folder / "model.safetensors", struct.pack("<Q", 2) + b"{}")
        _write_archive(folder / "optimizer.pt", step)
        _write_archive(folder / "scheduler.pt", step)
    several = int(os.environ["WORLD_SIZE"]) > 1
    _write_archive(folder / (f"rng_state_{os.environ['RANK']}.pth" if several else "rng_state.pth"), step)
    if first:
        state = {"global_step": step, "max_steps": job["max_steps"]}
        _write(folder / "trainer_state.json", json.dumps(state).encode())


def resumed_step(job: dict[str, Any]) -> int:
    """Steps that are done already: those of the checkpoint that the training goes on from."""
    folder = job.get("resume_from_checkpoint")
    if folder is None:
        return 0
    step: int = json.loads(Path(folder, "trainer_state.json").read_text())["global_step"]
    return step


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        # A full disk is told here, and not to nobody later.
        file.flush()
        os.fsync(file.fileno())


def _write_archive(path: Path, step: int) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", f"{step}\n" * 1000)
