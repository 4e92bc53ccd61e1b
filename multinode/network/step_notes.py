"""Where a training's step is known to differ from the messages that `nccl-test --like` measures, in a sentence each."""

from __future__ import annotations

from multinode.job.step_messages import NoteKind, StepMessages

_NOTES: dict[NoteKind, str] = {
    "reduced_to_owners": (
        "DeepSpeed reduces each bucket to the workers that own it (use_multi_rank_bucket_allreduce: false); nccl-test "
        "has no reduce, and measures a broadcast of the bucket, which is a reduce turned round"
    ),
    "cut_at_owners": (
        "a gradient of more than reduce_bucket_size ({cap} elements) is sent alone; where it belongs to two workers, "
        "DeepSpeed cuts it there, which is not counted"
    ),
    "filled": (
        "which parameters ZeRO-3 gathers together depends on its trace of the model: approximated by filling "
        "stage3_prefetch_bucket_size in the modules' order"
    ),
    "stay_whole": ("parameters that are used again soon stay whole for the backward pass (stage3_max_reuse_distance)"),
    "wraps_layers": (
        "FSDP is taken to wrap each decoder layer, and to reduce gradients in the last micro-batch alone, as the "
        "Trainer has it"
    ),
    "inside_left_out": (
        "what stays inside a node is left out; the all-reduce between the nodes joins one worker of each node, and is "
        "measured with all workers"
    ),
    "small_left_out": (
        "calls of a few bytes (gradient norms, losses) are left out: each takes about what the smallest message does"
    ),
}


def step_notes(step: StepMessages) -> tuple[str, ...]:
    """A sentence for each of its notes, without the full stop."""
    return tuple(_NOTES[note.kind].format(cap=note.cap) for note in step.notes)
