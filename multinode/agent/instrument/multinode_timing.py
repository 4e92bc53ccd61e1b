"""Phases of a step: what the training thread spends its time in, at the doors of torch, transformers and deepspeed.

Times are the host's: on a GPU, work that was only queued is paid for by whoever waits for it.
"""

from __future__ import annotations

import functools
from typing import Any, Dict, List, Tuple

import multinode_forward
from multinode_guard import COMPILER_HOOKS, Guard
from multinode_imports import Action
from multinode_phases import PhaseClock
from multinode_steps import Steps

__all__ = ["hooks"]

# Module, class (none: the module's own function), function, phase. What some release does not have is passed over.
_DOORS = (
    ("torch.utils.data.dataloader", "DataLoader", "__iter__", "data"),
    ("torch.utils.data.dataloader", "_BaseDataLoaderIter", "__next__", "data"),
    ("transformers.trainer", "Trainer", "compute_loss", "forward"),
    ("torch.autograd", "", "backward", "backward"),
    ("accelerate.accelerator", "Accelerator", "backward", "backward"),
    ("deepspeed.runtime.engine", "DeepSpeedEngine", "backward", "backward"),
    ("deepspeed.runtime.engine", "DeepSpeedEngine", "step", "optimizer"),
)
# A forward pass inside a forward pass is a part of it; one inside a backward pass recomputes what was not kept.
_NO_FORWARD_IN = ("forward", "backward")


def hooks(steps: Steps, guard: Guard) -> List[Tuple[str, Action]]:
    """Time data, forward, backward and optimizer by `steps.phases`."""
    clock = steps.phases
    return [
        *COMPILER_HOOKS,
        *((door[0], functools.partial(_time_door, clock, door)) for door in _DOORS),
        *multinode_forward.hooks(functools.partial(clock.timed, "forward", unless=_NO_FORWARD_IN)),
        ("torch.optim.optimizer", functools.partial(_time_optimizers, clock, guard)),
    ]


def _time_door(clock: PhaseClock, door: Tuple[str, str, str, str], module: Any) -> None:
    _module, class_name, name, phase = door
    owner = getattr(module, class_name, None) if class_name else module
    function = getattr(owner, name, None)
    if function is not None:
        setattr(owner, name, clock.timed(phase, function, _NO_FORWARD_IN if phase == "forward" else ()))


def _time_optimizers(clock: PhaseClock, guard: Guard, module: Any) -> None:
    if hasattr(module, "register_optimizer_step_pre_hook"):
        phase = _OptimizerPhase(clock)
        module.register_optimizer_step_pre_hook(guard.quietly(phase.before))
        module.register_optimizer_step_post_hook(guard.quietly(phase.after))


class _OptimizerPhase:
    """The phase between torch's two hooks of an optimizer's step. Optimizers may step inside one another."""

    def __init__(self, clock: PhaseClock) -> None:
        self._clock = clock
        self._depths: Dict[int, int] = {}

    def before(self, optimizer: Any, *_: Any) -> None:
        # A step that raised has not told its end.
        self.after(optimizer)
        depth = self._clock.depth
        if self._clock.enter("optimizer"):
            self._depths[id(optimizer)] = depth

    def after(self, optimizer: Any, *_: Any) -> None:
        depth = self._depths.pop(id(optimizer), None)
        if depth is not None:
            self._clock.unwind(depth)
