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
from llamafactory.train.tuner import run_exp
from transformers import Trainer


def main() -> None:
    """Train."""
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
    # Gathering the whole model on CPUs to save it ends FullyShardedDataParallel in a segmentation fault.
    Trainer.save_model = lambda *_, **__: None
    # By it FSDP finds the workers of a node, for hybrid sharding.
    torch.cpu.device_count = lambda: int(os.environ["LOCAL_WORLD_SIZE"])
    run_exp()


if __name__ == "__main__":
    main()
