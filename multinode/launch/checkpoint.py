"""Which checkpoint a training can go on from: the last that every node has whole. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Meta

_STATE = "trainer_state.json"
# torch.save's, beside the weights. Without both, the Trainer begins with a new optimizer and says nothing
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
    """A checkpoint as one node sees it.

    Attributes:
        name: that of its directory, `checkpoint-20`.
        step: as trainer_state.json has it; None where it cannot be read.
        max_steps: steps of the whole training, likewise.
        files: by name, what is wrong with it; None where nothing is.
        shards: of the weights, as their index names them.
        saved_ns: when trainer_state.json was last written, on the node's clock; None where it is not there.
    """

    name: Annotated[str, Meta(pattern=r"^checkpoint-[0-9]{1,15}$")]
    step: Annotated[int, Meta(ge=0)] | None = None
    max_steps: Annotated[int, Meta(ge=1)] | None = None
    files: dict[str, str | None] = {}
    shards: tuple[str, ...] = ()
    saved_ns: int | None = None

    @property
    def number(self) -> int:
        """The step that its name gives."""
        return int(self.name.partition("-")[2])


class CheckpointChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The checkpoint to go on from.

    Attributes:
        name: None where none is complete, and the training begins anew; likewise `step`, which is 0 then.
        max_steps: of the whole training, as the checkpoint has it; None is unknown.
        skipped: newer ones and why each is not complete.
    """

    name: str | None = None
    step: int = 0
    max_steps: int | None = None
    skipped: dict[str, str] = {}


def choose_checkpoint(
    seen: Mapping[str, tuple[Checkpoint, ...]], ranks: Mapping[str, tuple[int, ...]], *, same_ranks: bool = True
) -> CheckpointChoice:
    """The newest that is complete on every node.

    Args:
        seen: by node, what it sees; nodes with a shared file system see the same.
        ranks: by node, the workers that it will have.
        same_ranks: whether they are those that saved it. Others cannot take up the random numbers where these were,
            and need no state of them.
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
    """The first thing that a node lacks for its workers to go on from a checkpoint; None where it is whole."""
    if checkpoint is None:
        return "it is not there"
    files = checkpoint.files
    damaged = next((f"{name}: {problem}" for name, problem in sorted(files.items()) if problem is not None), None)
    if damaged is not None:
        return damaged
    # The Trainer has the number of the process in the name only where there are several.
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
