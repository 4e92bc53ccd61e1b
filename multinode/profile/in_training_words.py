"""The bandwidth of a training's own all-reduces in a sentence, beside nccl-test's, and the bytes by two counts."""

from __future__ import annotations

from multinode.profile.in_training import InTraining
from multinode.profile.inspector_view import NEWER_PLUGIN

# Steps and records do not end at the same moment.
_ALIKE = 0.05
_SPOKEN = {
    "trace": "by the transfers of the profiler's window",
    "nccl inspector": "by the records of NCCL's Inspector plugin, each by the worker that waited least",
    "ddp span": "by DDP's counters: first bucket to last, waiting for buckets included, so that it is a lower bound",
}


def in_training_words(training: InTraining) -> str:
    """Its sentence; empty where no bandwidth is known."""
    if training.busbw_gb_per_s is None or training.source is None:
        return ""
    parts = [f"The training's all-reduces reach {training.busbw_gb_per_s:.3g} GB/s busbw, {_SPOKEN[training.source]}"]
    if training.recorded < 1.0:
        parts.append(f"these are samples: {training.recorded:.0%} of the operations were recorded, {NEWER_PLUGIN}")
    if training.alone is not None and training.alone.busbw_gb_per_s > 0:
        share = training.busbw_gb_per_s / training.alone.busbw_gb_per_s
        parts.append(
            f"that is {share:.0%} of the {training.alone.busbw_gb_per_s:.3g} GB/s that nccl-test "
            f"({training.alone.run_id}) measured for the same sizes"
        )
    if training.bytes_per_step is not None and training.asked_bytes:
        counted = f"{training.bytes_per_step / 1e6:.3g} MB per step by NCCL"
        alike = abs(training.bytes_per_step / training.asked_bytes - 1) <= _ALIKE
        parts.append(f"{counted}, {'as' if alike else 'and'} {training.asked_bytes / 1e6:.3g} MB by the calls")
    return f"{'; '.join(parts)}."
