"""Averaging between nodes with the Trainer: closes rounds where the Trainer evaluates, saves, loads and ends.

Every rank closes its round there, so that all workers have equal parameters. The Trainer saves the state of rank 0; a
checkpoint also needs the state that differs between nodes: each node's inner optimizer and outer state.
"""

from __future__ import annotations

import functools
from typing import Any, Callable, Dict

from ..guard import Hooks
from .checkpoint import around_checkpoints, read_state, write_state
from .sync import ParameterAveraging

# File of a node's state in a checkpoint's directory, by the global rank of the node's first worker.
_STATE_FILE = "multinode_sync_%d.pt"
_SEAMS = {"evaluate": "evaluation", "predict": "evaluation", "_load_best_model": "best model"}
_NO_STEP = "the Trainer took a step without a torch.optim.Optimizer step: %s updates parameters in the backward pass"


def hooks(averaging: ParameterAveraging) -> Hooks:
    """Hooks for the Trainer; the guard must not swallow their exceptions."""
    return [
        ("transformers.trainer_callback", functools.partial(_hook_callbacks, averaging)),
        ("transformers.trainer", functools.partial(_hook_trainer, averaging)),
    ]


def _hook_callbacks(averaging: ParameterAveraging, module: Any) -> None:
    handler = module.CallbackHandler
    step_end, train_end = handler.on_step_end, handler.on_train_end

    @functools.wraps(step_end)
    def stepped(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not averaging.stepped:
            raise averaging.refusal(_NO_STEP % type(_inner(self.optimizer)).__name__, "choose another optimizer")
        averaging.stepped = False
        return step_end(self, *args, **kwargs)

    @functools.wraps(train_end)
    def ended(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Close the round before any callback, since one of them may save. If a best model was loaded, none is open.
        averaging.close("end")
        averaging.flush()
        return train_end(self, *args, **kwargs)

    handler.on_step_end, handler.on_train_end = stepped, ended


def _hook_trainer(averaging: ParameterAveraging, module: Any) -> None:
    for name, reason in _SEAMS.items():
        setattr(module.Trainer, name, _closing(averaging, getattr(module.Trainer, name), reason))
    around_checkpoints(
        module,
        functools.partial(_save, averaging),
        functools.partial(_load, averaging),
        functools.partial(averaging.close, "checkpoint"),
    )


def _closing(averaging: ParameterAveraging, function: Callable[..., Any], reason: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def closed(*args: Any, **kwargs: Any) -> Any:
        averaging.close(reason)
        return function(*args, **kwargs)

    return closed


def _save(averaging: ParameterAveraging, trainer: Any, folder: str) -> None:
    """Write this node's state; its workers have equal states, so only the first one writes."""
    if not averaging.leads:
        return
    round_ = averaging.round_of(_inner(trainer.optimizer))
    state: Dict[str, Any] = {"every": averaging.settings.every, "position": round_.position}
    state["outer"] = round_.outer_state()
    # The Trainer itself saves rank 0's optimizer.
    if averaging.rank:
        state["optimizer"] = trainer.optimizer.state_dict()
        state["scheduler"] = trainer.lr_scheduler.state_dict()
    write_state(trainer, folder, _STATE_FILE % averaging.rank, state)


def _load(averaging: ParameterAveraging, trainer: Any, folder: str) -> None:
    """Load this node's state. If no node has one, the checkpoint is that of plain DDP."""
    round_ = averaging.round_of(_inner(trainer.optimizer))
    state = read_state(folder, _STATE_FILE % averaging.leader, round_.buckets[0].parameters[0].device)
    if state is None:
        if averaging.rank == 0:
            averaging.tell("the checkpoint was saved without averaging between nodes; the outer state starts over")
        return
    if averaging.leads:
        round_.load_outer_state(state["outer"])
    if averaging.leader:
        trainer.optimizer.load_state_dict(state["optimizer"])
        trainer.lr_scheduler.load_state_dict(state["scheduler"])


def _inner(optimizer: Any) -> Any:
    """The optimizer inside accelerate's wrappers."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer
