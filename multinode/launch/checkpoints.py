"""Which checkpoint an attempt resumes from, by the files on every node, and what is copied before it. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from multinode.units import format_count

_STATE = "trainer_state.json"
_OPTIMIZER = "optimizer.pt"
_SCHEDULER = "scheduler.pt"
# Without it, mixed precision starts with a new loss scale. It is not always saved.
_SCALER = "scaler.pt"
_WEIGHTS = (
    "model.safetensors",
    "adapter_model.safetensors",
    "pytorch_model.bin",
    "adapter_model.bin",
)
_INDEX = ".index.json"
_LATEST = "latest"
_METADATA = ".metadata"
# The first model and the first optimizer, as accelerate names their folders.
_FSDP_FOLDERS = ("pytorch_model_fsdp_0", "optimizer_0")
_SHARDED_PARAMETERS = 3
# A file of ZeRO or of torch.distributed.checkpoint that one rank has saved.
_SHARD = re.compile(r"(zero_pp_rank_|/__)(\d+)(_mp_rank_\d+_(?:model|optim)_states|_\d+\.distcp)")
# In place of a name, where no file of weights is known.
_ANY_WEIGHTS = "weights"
# A file that one rank saves: `rng_state_1.pth`.
_OF_RANK = re.compile(r"_\d+\.pth?")


class CheckpointFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file of a checkpoint on one node."""

    size_bytes: Annotated[int, Meta(ge=0)] = 0
    problem: str | None = None  # why it cannot be loaded


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint as one node sees it."""

    name: Annotated[str, Meta(pattern=r"^checkpoint-[0-9]{1,15}$")]  # of its directory, `checkpoint-20`
    step: Annotated[int, Meta(ge=0)] | None = None  # from trainer_state.json; None if unreadable
    max_steps: Annotated[int, Meta(ge=1)] | None = None  # of the whole training; None if unreadable
    files: dict[str, CheckpointFile] = {}  # by path below its directory
    shards: tuple[str, ...] = ()  # paths listed in an index of the weights or in the metadata of FSDP
    tag: str | None = None  # DeepSpeed's folder of shards, as `latest` names it
    saved_ns: int | None = None  # modification time of trainer_state.json, on the node's clock; None if missing

    @property
    def number(self) -> int:
        """The step in its name."""
        return int(self.name.partition("-")[2])

    def has(self, path: str) -> bool:
        """Whether the node has this file, and it is whole."""
        file = self.files.get(path)
        return file is not None and file.problem is None and (path != _STATE or self.step == self.number)

    def describe(self, path: str) -> str:
        """What is wrong with a file that the node does not have whole."""
        file = self.files.get(path)
        if not self.files:
            return "it is missing"
        if file is None:
            return "its weights are missing" if path == _ANY_WEIGHTS else f"{path}{_owner(path)} is missing"
        return f"{path}: {file.problem}" if file.problem is not None else f"{path} is from step {self.step}"


def _owner(path: str) -> str:
    shard = _SHARD.search(path)
    held = "parameters" if "model" in path else "optimizer state"
    return "" if shard is None else f" (the {held} of rank {shard[2]})"


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """Which files a job's checkpoints consist of.

    Attributes:
        library: what shards the training, if anything.
        stage: of ZeRO.
        saves_scheduler: whether the Trainer saves the learning rate schedule, not DeepSpeed.
    """

    library: Literal["DeepSpeed", "FSDP"] | None = None
    stage: int = 0
    saves_scheduler: bool = True

    @property
    def reshards(self) -> bool:
        """Whether another number of workers loads the same state, as torch.distributed.checkpoint has them do."""
        return self.library == "FSDP"


WHOLE = Layout()
"""Without sharding: every node saves all weights and the whole optimizer state."""


class CheckpointCopy(msgspec.Struct, frozen=True, kw_only=True):
    """Files of a checkpoint that a node lacks, and a node that has them."""

    source: str
    target: str
    paths: tuple[str, ...]  # below the checkpoint's directory
    size_bytes: int


class CheckpointChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The checkpoint to resume from."""

    name: str | None = None  # None if none is complete, and the training starts from scratch
    step: int = 0  # 0 without a checkpoint
    max_steps: int | None = None  # of the whole training, from the checkpoint; None if unknown
    skipped: dict[str, str] = {}  # newer, incomplete ones, each with the reason
    copies: tuple[CheckpointCopy, ...] = ()  # needed before an attempt can resume from it

    def describe(self) -> list[str]:
        """Why newer checkpoints are not chosen, and what that costs; one line each."""
        lines = [f"{name} is not complete: {gap}" for name, gap in self.skipped.items()]
        if self.skipped:
            newest = max(Checkpoint(name=name).number for name in self.skipped)
            place = self.name if self.name is not None else "the beginning"
            lines.append(f"starting from {place} instead costs {format_count(newest - self.step, 'step')}")
        return lines


def choose_checkpoint(
    seen: Mapping[str, tuple[Checkpoint, ...]],
    ranks: Mapping[str, tuple[int, ...]],
    layout: Layout = WHOLE,
    *,
    same_ranks: bool = True,
) -> CheckpointChoice:
    """The newest checkpoint of which every node has all files that it needs, or can get them from another node.

    `seen` is by node; nodes with a shared file system see the same. `ranks` are the workers that each will have;
    `same_ranks` whether these saved it: others cannot restore random states, and need none.
    """
    every = {checkpoint.name: checkpoint.number for checkpoints in seen.values() for checkpoint in checkpoints}
    skipped: dict[str, str] = {}
    for name in sorted(every, key=lambda name: every[name], reverse=True):
        views = views_of(name, seen, ranks)
        found = complete(views, ranks, layout, same_ranks=same_ranks)
        if not isinstance(found, str):
            max_steps = next((view.max_steps for view in views.values() if view.max_steps is not None), None)
            return CheckpointChoice(name=name, step=every[name], max_steps=max_steps, skipped=skipped, copies=found)
        skipped[name] = found
    return CheckpointChoice(skipped=skipped)


def is_of_trainer(checkpoint: Checkpoint) -> bool:
    """Whether the Trainer has saved it: others use the same names of directories, too."""
    return _STATE in checkpoint.files


def complete(
    views: Mapping[str, Checkpoint],
    ranks: Mapping[str, tuple[int, ...]],
    layout: Layout = WHOLE,
    *,
    same_ranks: bool = True,
) -> tuple[CheckpointCopy, ...] | str:
    """The copies that give every node what it needs of one checkpoint, or the first file that no node can give it.

    `views` is the checkpoint by node; nodes beyond those of `ranks` have no workers, but may have files.
    """
    wanted: dict[tuple[str, str], list[str]] = {}
    world_size = sum(map(len, ranks.values()))
    for node, own in ranks.items():
        view = views[node]
        needed = _needed(views, own, world_size, layout, same_ranks=same_ranks)
        # One that was being saved when the node was lost, or that the node lost with its disk.
        needed += () if view.has(_STATE) else _common(views)
        for path in dict.fromkeys(needed):
            if view.has(path):
                continue
            source = next((other for other, there in views.items() if there.has(path)), None)
            if source is None:
                return f"{node}: {view.describe(path)}"
            wanted.setdefault((source, node), []).append(path)
    return tuple(
        CheckpointCopy(
            source=source,
            target=target,
            paths=tuple(paths),
            size_bytes=sum(views[source].files[path].size_bytes for path in paths),
        )
        for (source, target), paths in wanted.items()
    )


def spread(
    views: Mapping[str, Checkpoint], ranks: Mapping[str, tuple[int, ...]], layout: Layout, copies: int = 1
) -> tuple[CheckpointCopy, ...]:
    """What each node sends the `copies` nodes after it, so that they could give it back all that it loads.

    Nothing while a node has not saved all of its part.
    """
    nodes, world_size = [*ranks], sum(map(len, ranks.values()))
    found = []
    for at, node in enumerate(nodes):
        view = views[node]
        own = _needed(views, ranks[node], world_size, layout, same_ranks=True)
        # What it loads and no node has is still to be saved; what only others have, they keep.
        mine = [path for path in own if view.has(path)]
        if not view.has(_STATE) or not all(any(other.has(path) for other in views.values()) for path in own):
            return ()
        for target in (nodes[(at + step) % len(nodes)] for step in range(1, min(copies, len(nodes) - 1) + 1)):
            paths = tuple(path for path in mine if not views[target].has(path))
            if paths:
                size_bytes = sum(view.files[path].size_bytes for path in paths)
                found.append(CheckpointCopy(source=node, target=target, paths=paths, size_bytes=size_bytes))
    return tuple(found)


def shards_elsewhere(names: Collection[str], ranks: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[str, ...]]:
    """Files of ZeRO or FSDP that belong to these, by the node whose ranks have saved them.

    `names` are paths of files that are here already, `ranks` the workers of each node.
    """
    found = {}
    for node, own in ranks.items():
        others = (_SHARD.sub(rf"\g<1>{rank}\g<3>", name) for name in names if _SHARD.search(name) for rank in own)
        found[node] = tuple(name for name in dict.fromkeys(others) if name not in names)
    return {node: lacking for node, lacking in found.items() if lacking}


def views_of(name: str, seen: Mapping[str, tuple[Checkpoint, ...]], nodes: Collection[str]) -> dict[str, Checkpoint]:
    """One checkpoint as each node sees it; without files where a node does not have it."""
    return {
        node: next((one for one in seen.get(node, ()) if one.name == name), Checkpoint(name=name))
        for node in dict.fromkeys((*nodes, *seen))
    }


def _needed(
    views: Mapping[str, Checkpoint], own: Sequence[int], world_size: int, layout: Layout, *, same_ranks: bool
) -> tuple[str, ...]:
    """What a node with these ranks loads."""
    names = {path for view in views.values() for path in view.files}
    # The Trainer adds the process number to the name only with several processes.
    states = [f"rng_state_{rank}.pth" for rank in own] if world_size > 1 else ["rng_state.pth"]
    return (
        _STATE,
        *_MODEL_AND_OPTIMIZER[layout.library](views, names, own, layout),
        *((_SCHEDULER,) if layout.saves_scheduler else ()),
        *((_SCALER,) if _SCALER in names else ()),
        *(states if same_ranks else ()),
    )


def _of_whole(views: Mapping[str, Checkpoint], names: set[str], _: Sequence[int], __: Layout) -> tuple[str, ...]:
    # Without the optimizer state, the Trainer silently starts with a new optimizer (_load_optimizer_and_scheduler).
    for name in _WEIGHTS:
        if name in names:
            return (name, _OPTIMIZER)
        if name + _INDEX in names:
            shards = {path for view in views.values() for path in view.shards if "/" not in path}
            return (name + _INDEX, *sorted(shards), _OPTIMIZER)
    return (_ANY_WEIGHTS, _OPTIMIZER)


def _of_deepspeed(
    views: Mapping[str, Checkpoint], names: set[str], own: Sequence[int], layout: Layout
) -> tuple[str, ...]:
    """Each rank loads its own files (`DeepSpeedEngine.load_checkpoint`, release 0.19.8)."""
    tag = next((view.tag for view in views.values() if view.tag is not None), None)
    if tag is None:
        return (_LATEST,)
    bf16 = "bf16_" if any(path.startswith(f"{tag}/bf16_zero_pp_rank_") for path in names) else ""
    parameters = [f"{tag}/zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in own]
    return (
        _LATEST,
        *(parameters if layout.stage == _SHARDED_PARAMETERS else (f"{tag}/mp_rank_00_model_states.pt",)),
        *(f"{tag}/{bf16}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in own),
    )


def _of_fsdp(views: Mapping[str, Checkpoint], _: set[str], __: Sequence[int], ___: Layout) -> tuple[str, ...]:
    """Each rank reads the metadata, and tensors that several ranks have from the file of any of them."""
    shards = {path for view in views.values() for path in view.shards if "/" in path}
    return (*(f"{folder}/{_METADATA}" for folder in _FSDP_FOLDERS), *sorted(shards))


_MODEL_AND_OPTIMIZER = {None: _of_whole, "DeepSpeed": _of_deepspeed, "FSDP": _of_fsdp}


def _common(views: Mapping[str, Checkpoint]) -> tuple[str, ...]:
    """Files that are the same on all nodes, such as the configuration of the model."""
    whole = {path for view in views.values() for path in view.files if "/" not in path and view.has(path)}
    return tuple(sorted(path for path in whole if _OF_RANK.search(path) is None))
