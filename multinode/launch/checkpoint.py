"""The checkpoint to resume from: the last one that is complete on every node. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Meta

_STATE = "trainer_state.json"
# Written by torch.save beside the weights. Without both, the Trainer silently starts with a new optimizer
# (Trainer._load_optimizer_and_scheduler).
_NEEDED = ("optimizer.pt", "scheduler.pt")
_WEIGHTS = (
    "model.safetensors",
    "adapter_model.safetensors",
    "pytorch_model.bin",
    "adapter_model.bin",
)
_INDEX = ".index.json"


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint as one node sees it."""

    name: Annotated[str, Meta(pattern=r"^checkpoint-[0-9]{1,15}$")]  # of its directory, `checkpoint-20`
    step: Annotated[int, Meta(ge=0)] | None = None  # from trainer_state.json; None if unreadable
    max_steps: Annotated[int, Meta(ge=1)] | None = None  # of the whole training, likewise
    files: dict[str, str | None] = {}  # by name, what is wrong with the file, or None
    shards: tuple[str, ...] = ()  # of the weights, as listed in their index
    saved_ns: int | None = None  # modification time of trainer_state.json, on the node's clock; None if missing

    @property
    def number(self) -> int:
        """The step in its name."""
        return int(self.name.partition("-")[2])


class CheckpointChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The checkpoint to resume from."""

    name: str | None = None  # None if none is complete, and the training starts from scratch
    step: int = 0  # 0 without a checkpoint
    max_steps: int | None = None  # of the whole training, from the checkpoint; None if unknown
    skipped: dict[str, str] = {}  # newer, incomplete ones, each with the reason


def choose_checkpoint(
    seen: Mapping[str, tuple[Checkpoint, ...]], ranks: Mapping[str, tuple[int, ...]], *, same_ranks: bool = True
) -> CheckpointChoice:
    """The newest that is complete on every node.

    Args:
        seen: by node; nodes with a shared file system see the same.
        ranks: by node, the workers that it will have.
        same_ranks: whether these ranks saved it. Others cannot restore random states, and need none.
    """
    by_name = {node: {one.name: one for one in found} for node, found in seen.items()}
    every = {one.name: one.number for found in seen.values() for one in found}
    skipped: dict[str, str] = {}
    world_size = sum(map(len, ranks.values()))
    for name in sorted(every, key=lambda one: every[one], reverse=True):
        found = {node: by_name.get(node, {}).get(name) for node in ranks}
        gaps = ((node, find_gap(found[node], ranks[node], world_size, same_ranks=same_ranks)) for node in ranks)
        gap = next((f"{node}: {gap}" for node, gap in gaps if gap is not None), None)
        if gap is None:
            max_steps = next((one.max_steps for one in found.values() if one is not None), None)
            return CheckpointChoice(name=name, step=every[name], max_steps=max_steps, skipped=skipped)
        skipped[name] = gap
    return CheckpointChoice(skipped=skipped)


def find_gap(
    checkpoint: Checkpoint | None, ranks: tuple[int, ...], world_size: int, *, same_ranks: bool = True
) -> str | None:
    """The first file that a node lacks to resume from a checkpoint; None if it is complete."""
    if checkpoint is None:
        return "it is missing"
    files = checkpoint.files
    damaged = next((f"{name}: {problem}" for name, problem in sorted(files.items()) if problem is not None), None)
    if damaged is not None:
        return damaged
    # The Trainer adds the process number to the name only with several processes.
    states = [f"rng_state_{rank}.pth" for rank in ranks] if world_size > 1 else ["rng_state.pth"]
    states = states if same_ranks else []
    missing = [name for name in (_STATE, *_NEEDED, *checkpoint.shards, *states) if name not in files]
    if missing:
        return f"{missing[0]} is missing"
    if checkpoint.step != checkpoint.number:
        return f"{_STATE} is of step {checkpoint.step}"
    whole = any(name in files for name in _WEIGHTS)
    sharded = checkpoint.shards and any(f"{name}{_INDEX}" in files for name in _WEIGHTS)
    return None if whole or sharded else "its weights are missing"
