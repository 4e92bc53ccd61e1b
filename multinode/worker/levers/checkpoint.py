"""State of a lever in the Trainer's checkpoints: each rank saves a file beside those of the Trainer, and loads it.

The file is written before `trainer_state.json`, which completes a checkpoint. It must exist on all ranks that write
one, or on none: a training can resume from a checkpoint without these files, but not from one with some of them.
"""

from __future__ import annotations

import functools
import os
import sys
from typing import Any, Callable, Dict, List, Optional

_FOLDER = "checkpoint-"
# The last checkpoint, and the previous one, which is the newest complete one while the last is being written.
_LEAST_KEPT = 2

_Act = Callable[[Any, str], None]


def around_checkpoints(module: Any, save: _Act, load: _Act, begin: Callable[[], None] = lambda: None) -> None:
    """Call functions when the Trainer saves and loads its optimizer; an exception in them ends the training.

    Args:
        module: transformers.trainer.
        save: called with the Trainer and the checkpoint's directory, which may not exist yet.
        load: called with the Trainer and the checkpoint's directory, after the Trainer has loaded its own state.
        begin: called before the Trainer saves anything, even if it only saves a model.
    """
    trainer = module.Trainer
    saving, loading = trainer._save_checkpoint, trainer._load_optimizer_and_scheduler  # noqa: SLF001 - no other

    @functools.wraps(saving)
    def saved(self: Any, model: Any, trial: Any, *args: Any, **kwargs: Any) -> Any:
        begin()
        if not self.args.save_only_model:
            save(self, os.path.join(self._get_output_dir(trial=trial), _FOLDER + str(self.state.global_step)))
        return saving(self, model, trial, *args, **kwargs)

    @functools.wraps(loading)
    def loaded(self: Any, checkpoint: Optional[str], *args: Any, **kwargs: Any) -> Any:
        result = loading(self, checkpoint, *args, **kwargs)
        if checkpoint is not None:
            load(self, checkpoint)
        return result

    trainer._save_checkpoint, trainer._load_optimizer_and_scheduler = saved, loaded  # noqa: SLF001 - no other


def write_state(trainer: Any, folder: str, name: str, state: Dict[str, Any]) -> None:
    """Write a file of this rank, and remove this rank's files from checkpoints that the Trainer no longer keeps.

    The Trainer's rank 0 only removes directories on its own node.
    """
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, name)
    sys.modules["torch"].save(state, path + ".partial")
    os.replace(path + ".partial", path)
    if trainer.args.save_total_limit:
        best = os.path.basename(trainer.state.best_model_checkpoint or "")
        for older in _numbered(os.path.dirname(folder))[: -max(_LEAST_KEPT, trainer.args.save_total_limit)]:
            mine = os.path.join(older, name)
            if os.path.basename(older) != best and os.path.exists(mine):
                os.remove(mine)


def read_state(folder: str, name: str, device: Any) -> Optional[Dict[str, Any]]:
    """Read the state of `write_state`; None if no rank has its file. Every rank must call this.

    Raises:
        RuntimeError: on all ranks, if only some ranks have their files.
    """
    torch = sys.modules["torch"]
    path = os.path.join(folder, name)
    there = torch.tensor([float(os.path.exists(path))], device=device)
    torch.distributed.all_reduce(there)
    newest = int(there.item())
    if 0 < newest < torch.distributed.get_world_size():
        kind = name.rpartition("_")[0]
        raise RuntimeError(
            "multinode: %s has %s_*.pt of only some ranks; copy each node's "
            "files there, or resume from another checkpoint" % (os.path.basename(folder), kind)
        )
    state: Optional[Dict[str, Any]] = torch.load(path, map_location="cpu", weights_only=True) if newest else None
    return state


def _numbered(root: str) -> List[str]:
    """Paths of the checkpoints below a directory, oldest first."""
    numbers = [name[len(_FOLDER) :] for name in os.listdir(root) if name.startswith(_FOLDER)]
    return [os.path.join(root, _FOLDER + number) for number in sorted(filter(str.isdecimal, numbers), key=int)]
