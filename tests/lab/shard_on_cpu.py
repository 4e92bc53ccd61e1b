"""LLaMA-Factory's training with FSDP on CPUs: `shard_on_cpu.py job.yaml key=value ...`, run under torchrun.

accelerate shards on accelerators alone, and on CPUs trains under DDP without a word (release 1.11). Here it takes the
CPUs of a node for its GPUs; everything else is that of LLaMA-Factory, the Trainer, accelerate and torch.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from transformers import Trainer


def shard() -> None:
    """From here on."""
    begin = AcceleratorState.__init__

    def begin_with_fsdp(state: Any, *args: Any, **options: Any) -> None:
        begin(state, *args, **options)
        plugin = options.get("fsdp_plugin")
        if plugin is not None and state.distributed_type is DistributedType.MULTI_CPU:
            state.fsdp_plugin = plugin
            # By another name of its CPU, FSDP does not know it.
            for one in (state, PartialState()):
                one.distributed_type, one.device = DistributedType.FSDP, torch.device("cpu")

    AcceleratorState.__init__ = begin_with_fsdp
    # Gathering the whole model on CPUs to save it ends FullyShardedDataParallel, FSDP 1, in a segmentation fault.
    save = Trainer.save_model

    def save_model(trainer: Any, *args: Any, **options: Any) -> None:
        if not trainer.is_fsdp_enabled or trainer.accelerator.is_fsdp2:
            save(trainer, *args, **options)

    Trainer.save_model = save_model
    # By it FSDP finds the workers of a node, for hybrid sharding.
    torch.cpu.device_count = lambda: int(os.environ["LOCAL_WORLD_SIZE"])


def main() -> None:
    """Train."""
    from llamafactory.train.tuner import run_exp

    shard()
    run_exp()


if __name__ == "__main__":
    main()
