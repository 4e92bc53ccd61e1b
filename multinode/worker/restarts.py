"""Hooks of a run with restarts: what is saved, and where a script with the Trainer resumes."""

from __future__ import annotations

import functools
import os
from typing import Any, Callable

from .guard import Hooks

_ATTEMPT = "MULTINODE_ATTEMPT"
_CHECKPOINT = "MULTINODE_CHECKPOINT"
_ON_EACH_NODE = "MULTINODE_SAVE_ON_EACH_NODE"


def hooks() -> Hooks:
    """The hooks that the controller's variables ask for; none in a run without restarts."""
    if _ATTEMPT not in os.environ:
        return []
    trainer: Hooks = [("transformers.trainer", _hook_trainer)]
    deepspeed: Hooks = [("deepspeed.runtime.engine", _hook_deepspeed)]
    on_each_node = os.environ.get(_ON_EACH_NODE) == "1"
    return [
        ("torch.serialization", _hook_serialization),
        ("accelerate.utils.fsdp_utils", _hook_accelerate),
        *(trainer if on_each_node or os.environ.get(_CHECKPOINT) else []),
        *(deepspeed if on_each_node else []),
    ]


def _hook_trainer(module: Any) -> None:
    train = module.Trainer.train

    @functools.wraps(train)
    def trained(self: Any, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        if os.environ.get(_ON_EACH_NODE) == "1":
            self.args.save_on_each_node = True
        chosen = os.environ.get(_CHECKPOINT)
        # A script may train several models, each into a directory of its own.
        if chosen and os.path.realpath(os.path.dirname(chosen)) == os.path.realpath(self.args.output_dir):
            resume_from_checkpoint = chosen
        return train(self, resume_from_checkpoint, *args, **kwargs)

    module.Trainer.train = trained


def _hook_deepspeed(module: Any) -> None:
    """Have each node save what all ranks have in common, unless the JSON says which nodes do."""
    engine = module.DeepSpeedEngine
    said: Callable[[Any], bool] = engine.use_node_local_storage

    @functools.wraps(said)
    def is_local(self: Any) -> bool:
        settings = getattr(self._config, "_param_dict", None) or {}
        return said(self) if "use_node_local_storage" in (settings.get("checkpoint") or {}) else True

    engine.use_node_local_storage = is_local


def _hook_accelerate(module: Any) -> None:
    """Load the optimizer state of FSDP 2 by the names under which it was saved, as accelerate 1.13 does.

    Earlier ones load what the new optimizer has, which is no state, and the training goes on without Adam's moments and
    without an error (1.11 and 1.12: load_fsdp_optimizer). With state, they ask for parameters by number, and fail.
    """
    load = module.load_fsdp_optimizer

    @functools.wraps(load)
    def loaded(  # noqa: PLR0913, PLR0917 - accelerate's own
        fsdp_plugin: Any,
        accelerator: Any,
        optimizer: Any,
        model: Any,
        input_dir: Any,
        optimizer_index: int = 0,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        folder = os.path.join(input_dir, "optimizer_%d" % optimizer_index)
        if getattr(fsdp_plugin, "fsdp_version", 1) == 1 or not os.path.isdir(folder):
            return load(fsdp_plugin, accelerator, optimizer, model, input_dir, optimizer_index, *args, **kwargs)
        from torch.distributed import checkpoint
        from torch.distributed.checkpoint import state_dict

        accelerator.wait_for_everyone()
        # Around it, accelerate may leave out the step that makes the state.
        own = getattr(optimizer, "optimizer", optimizer)
        state = {"optimizer": state_dict.get_optimizer_state_dict(model, own)}
        checkpoint.load(state, checkpoint_id=folder)
        return state_dict.set_optimizer_state_dict(model, own, state["optimizer"])

    module.load_fsdp_optimizer = loaded


def _hook_serialization(module: Any) -> None:
    """Make torch.load accept `cpu:0` as the CPU, as the rest of torch does.

    accelerate uses this device for a worker without a GPU, and transformers loads the optimizer's state to it when a
    training of several workers resumes from a checkpoint (5.6: Trainer._load_optimizer_and_scheduler).
    """

    def take_cpu(storage: Any, location: str) -> Any:
        return storage if location.startswith("cpu:") else None

    # Priority 11 is after torch's own for the CPU, which is 10, and before any other.
    module.register_package(11, lambda _storage: None, take_cpu)
