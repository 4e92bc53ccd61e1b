"""A worker that makes the steps of a YAML, each of which takes a moment, and saves what it has made.

Where the variable HOLD has a word that is a part of this run's id, it makes one step. All parameters take MEMORY bytes.
With `save_steps` it writes checkpoints, and goes on from the one that it is given.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch.distributed as dist
import yaml
from checkpoints import resumed_step, save  # type: ignore[import-not-found]  # beside this file, in which it runs
from steps import record_step  # type: ignore[import-not-found]  # on PYTHONPATH of the nodes

_STEP_S = 0.05


def main() -> None:
    """Train."""
    job = yaml.safe_load(Path(sys.argv[1]).read_text())
    samples = job["per_device_train_batch_size"] * job.get("gradient_accumulation_steps", 1)
    held = any(word in os.environ["MULTINODE_RUN_ID"] for word in os.environ.get("HOLD", "").split())
    dist.init_process_group()
    taken = b"1" * int(os.environ.get("MEMORY", "0")) if job["finetuning_type"] == "full" else b""
    for step in range(resumed_step(job) + 1, job["max_steps"] + 1):
        while step > 1 and held:
            time.sleep(_STEP_S)
        time.sleep(float(os.environ.get("STEP_S", _STEP_S)))
        dist.all_reduce(1)
        record_step(step, total_steps=job["max_steps"], samples=samples)
        if step % job.get("save_steps", job["max_steps"] + 1) == 0:
            save(job, step)
    if dist.get_rank() == 0:
        output = Path(job["output_dir"])
        output.mkdir(parents=True, exist_ok=True)
        output.joinpath("adapter.bin").write_text(f"{len(taken)} bytes were enough\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
