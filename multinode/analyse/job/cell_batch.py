"""Batch words: the names that the frameworks have for the samples of a step, and how they fit together. Pure."""

from __future__ import annotations

from multinode.analyse.job.workload import Settings
from multinode.core.text.plausible import plausible_count

__all__ = ["BATCH_NAMES", "BATCH_WORDS", "global_batch"]

BATCH_WORDS = (
    "Batch is what Hugging Face calls per_device_train_batch_size and DeepSpeed train_micro_batch_size_per_gpu; "
    "accumulation is gradient_accumulation_steps of both; the global batch, their product over all workers, is Hugging "
    "Face's total train batch size and DeepSpeed's train_batch_size."
)

# Our name by theirs. The Trainer's own args.train_batch_size, which is of one process, is none of them.
BATCH_NAMES = {
    "per_device_train_batch_size": "per_device_batch",
    "train_micro_batch_size_per_gpu": "per_device_batch",
    "gradient_accumulation_steps": "accumulation",
    "train_batch_size": "global_batch",
    "total_train_batch_size": "global_batch",
}


def global_batch(settings: Settings, world_size: int | None) -> int | None:
    """Samples of an optimizer step of all workers; None where a part of it is not known."""
    parts = [plausible_count(one) for one in (settings.per_device_batch, settings.accumulation, world_size)]
    product = 1
    for part in parts:
        if not part:
            return None
        product *= part
    return product
