"""Hooks that see a training's steps: the Trainer's callback, DeepSpeed's step counter, or the optimizer's step.

They wait until the user's code imports these libraries (AfterImport). A better source replaces the ones after it in
this order (`steps`).
"""

from __future__ import annotations

import functools
import math
import os
import sys
import time
import weakref
from typing import Any, Callable, Dict

from . import batches, compiler, ddp, flight, hang, model, nics, phases, restarts, trace
from .guard import AfterImport, Guard, Hooks, add_trainer_callback
from .last_calls import open_last_calls
from .levers.install import deals_samples, guarded_hooks, unguarded_hooks
from .recorder import Recorder, record_exceptions
from .steps import Steps, memory_meter
from .traffic import Traffic


def install() -> None:
    """Install the hooks, which act when their libraries are imported."""
    rank = int(os.environ.get("RANK", "0"))
    recorder = Recorder(os.environ["MULTINODE_SAMPLES"], rank)
    record_exceptions(recorder)
    flight.record_at_end(recorder, rank)
    guard = Guard(recorder)
    if "MULTINODE_RUN_DIR" in os.environ:
        guard.quietly(hang.register)(os.environ["MULTINODE_RUN_DIR"], rank)
        guard.quietly(hang.start_counting)(os.environ["MULTINODE_RUN_DIR"], rank)
    resume = restarts.hooks()
    if "MULTINODE_FAILURES_ONLY" in os.environ:
        sys.meta_path.insert(0, AfterImport((name, guard.quietly(action)) for name, action in resume))
        return
    steps = Steps(recorder, guard)
    traffic = Traffic(steps, guard, last_calls=open_last_calls(os.environ, rank))
    steps.meters.append(memory_meter())
    nic_meter = nics.meter(guard, os.environ)
    if nic_meter is not None:
        steps.meters.append(nic_meter)
    before: Hooks = [
        *resume,
        *compiler.HOOKS,
        *phases.hooks(steps.phases, guard),
    ]
    after: Hooks = [
        *batches.hooks(steps, guard),
        *traffic.hooks(),
        *guarded_hooks(steps, guard, traffic),
        *ddp.hooks(steps, guard, traffic),
        *model.hooks(steps, guard),
        *trace.hooks(steps, guard),
        ("transformers.trainer", functools.partial(_hook_trainer, steps, guard)),
        ("deepspeed.runtime.engine", functools.partial(_hook_deepspeed, steps, guard)),
        ("torch.optim.optimizer", functools.partial(_hook_optimizer, steps, guard)),
    ]
    quiet = [[(name, guard.quietly(action)) for name, action in each] for each in (before, after)]
    # Unguarded hooks run between the two: after the optimizer's phase has ended, and before the step is recorded.
    sys.meta_path.insert(0, AfterImport([*quiet[0], *unguarded_hooks(steps, nic_meter), *quiet[1]]))


def _hook_trainer(steps: Steps, guard: Guard, module: Any) -> None:
    def begin(*_: Any) -> None:
        if steps.begin("trainer"):
            steps.restart()

    def end_step(args: Any, state: Any, _logs: Any) -> None:
        samples = None if deals_samples() else args.train_batch_size * args.gradient_accumulation_steps
        steps.step("trainer", step=state.global_step, total_steps=state.max_steps, samples=samples)

    def end_evaluation(*_: Any) -> None:
        # The time of an evaluation belongs to no step.
        steps.restart()

    def log(_args: Any, state: Any, logs: Dict[str, Any]) -> None:
        """Record losses, and at the end the Trainer's own figures."""
        for kind, name in (("loss", "loss"), ("evaluation", "eval_loss")):
            if name in logs:
                # JSON has no NaN: null means that the training has diverged.
                loss = float(logs[name])
                steps.note(kind, step=state.global_step, loss=loss if math.isfinite(loss) else None)
        if "train_runtime" in logs:
            steps.note(
                "train_end",
                time_s=time.time(),
                train_runtime_s=float(logs["train_runtime"]),
                train_samples_per_s=float(logs.get("train_samples_per_second", 0)) or None,
            )

    handlers = {"on_train_begin": begin, "on_step_end": end_step, "on_evaluate": end_evaluation, "on_log": log}
    add_trainer_callback(guard, module, handlers)


def _hook_deepspeed(steps: Steps, guard: Guard, module: Any) -> None:
    step = module.DeepSpeedEngine.step

    def begin(_: Any) -> None:
        # Otherwise the step of its inner optimizer would count as that of a training without DeepSpeed.
        steps.begin("deepspeed")

    def record(engine: Any) -> None:
        samples = engine.train_micro_batch_size_per_gpu() * engine.gradient_accumulation_steps()
        steps.step("deepspeed", step=engine.global_steps, samples=samples)

    begins, ends = guard.quietly(begin), guard.quietly(record)

    @functools.wraps(step)
    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        before = getattr(self, "global_steps", None)
        begins(self)
        result = step(self, *args, **kwargs)
        if getattr(self, "global_steps", None) != before:
            ends(self)
        return result

    module.DeepSpeedEngine.step = counted


def _hook_optimizer(steps: Steps, guard: Guard, module: Any) -> None:
    choice = _OneOptimizer()

    def after_step(optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if choice.is_counted(optimizer):
            steps.step("optimizer")

    module.register_optimizer_step_post_hook(guard.quietly(after_step))


class _OneOptimizer:
    """Chooses the optimizer whose steps are counted: the first that steps, until it is gone or only others step.

    A training with two optimizers steps both, so one of them is enough.
    """

    _PATIENCE = 50

    def __init__(self) -> None:
        self._chosen: Callable[[], Any] = lambda: None
        self._others = 0

    def is_counted(self, optimizer: Any) -> bool:
        """Whether the step of this optimizer counts."""
        chosen = self._chosen()
        if chosen is optimizer:
            self._others = 0
            return True
        self._others += 1
        if chosen is not None and self._others <= self._PATIENCE:
            return False
        self._chosen = weakref.ref(optimizer)
        self._others = 0
        return True
