"""Hooks that see a training's steps: the Trainer's callback, DeepSpeed's step counter, else the optimizer's step.

They wait for the user's own import of these libraries and import nothing themselves: importing torch early would
precede the environment that user code sets. The first of the three that knows better silences the ones after it.
"""

from __future__ import annotations

import functools
import math
import os
import sys
import time
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder
from typing import Any, Callable, Dict, Optional

import multinode_recorder
import multinode_stacks

# Best first: the Trainer counts optimizer steps itself; under ZeRO the optimizer hook fires once per parameter group.
_SOURCES = ("trainer", "deepspeed", "optimizer")


class Steps:
    """Counts the steps of this worker and records them; listens to the best source that has spoken."""

    def __init__(self, recorder: multinode_recorder.Recorder) -> None:
        self._recorder = recorder
        self._source: Optional[str] = None
        self._last_ns: Optional[int] = None
        self._count = 0

    def begin(self, source: str) -> bool:
        """A source starts to count; False where a better one does already."""
        if self._source is not None and _SOURCES.index(source) > _SOURCES.index(self._source):
            return False
        if source != self._source:
            self._source = source
            self._count = 0
            self._last_ns = None
            self._recorder.write("worker", _worker_fields(source))
        return True

    def step(self, source: str, **fields: Any) -> None:
        """One optimizer step has ended."""
        if not self.begin(source):
            return
        now = time.monotonic_ns()
        self._count += 1
        fields.setdefault("step", self._count)
        elapsed_us = (now - self._last_ns) / 1000 if self._last_ns is not None else None
        fields.update(time_s=time.time(), mono_ns=now, step_time_us=elapsed_us)
        self._last_ns = now
        self._recorder.write("step", fields)

    def note(self, kind: str, **fields: Any) -> None:
        """Record something beside the steps."""
        self._recorder.write(kind, fields)

    def restart(self) -> None:
        """The next step is measured from now."""
        self._last_ns = time.monotonic_ns()


def install() -> None:
    """Put the hooks in place, to act when their libraries are imported."""
    recorder = multinode_recorder.Recorder(os.environ["MULTINODE_SAMPLES"], int(os.environ.get("RANK", "0")))
    multinode_recorder.record_exceptions(recorder)
    if "MULTINODE_RUN_DIR" in os.environ:
        _quietly(multinode_stacks.register)(os.environ["MULTINODE_RUN_DIR"], int(os.environ.get("RANK", "0")))
    steps = Steps(recorder)
    sys.meta_path.insert(
        0,
        _AfterImport(
            {
                "transformers.trainer": functools.partial(_hook_trainer, steps),
                "deepspeed.runtime.engine": functools.partial(_hook_deepspeed, steps),
                "torch.optim.optimizer": functools.partial(_hook_optimizer, steps),
            }
        ),
    )


class _AfterImport(MetaPathFinder):
    """Calls a function with a module once it has been imported; any failure leaves the import as it was."""

    def __init__(self, actions: Dict[str, Callable[[Any], None]]) -> None:
        self._actions = actions

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        """Find the module as ever, and have its loader call us afterwards."""
        action = self._actions.pop(fullname, None)
        if action is None:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            _quietly(action)(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]  # this one module's own loader
        return spec


def _quietly(function: Callable[..., None]) -> Callable[..., None]:
    """The function, with whatever it raises swallowed after one line on stderr."""

    def wrapped(*args: Any, **kwargs: Any) -> None:
        try:
            function(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - a training never stops because it is being watched
            sys.stderr.write("multinode: a hook failed and is passed over: %r\n" % (error,))

    return wrapped


def _hook_trainer(steps: Steps, module: Any) -> None:
    callback = _make_callback(steps, module.TrainerCallback)
    initialise = module.Trainer.__init__

    @functools.wraps(initialise)
    def with_callback(self: Any, *args: Any, **kwargs: Any) -> None:
        initialise(self, *args, **kwargs)
        _quietly(self.add_callback)(callback)

    module.Trainer.__init__ = with_callback


def _make_callback(steps: Steps, base: Any) -> Any:
    class StepCallback(base):  # type: ignore[misc]  # the base is known at run time only
        """Tells the recorder what the Trainer tells its callbacks."""

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            """Start the clock."""

            def begin() -> None:
                if steps.begin("trainer"):
                    steps.restart()

            _quietly(begin)()

        def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            """One optimizer step."""

            def record() -> None:
                samples = args.train_batch_size * args.gradient_accumulation_steps
                steps.step("trainer", step=state.global_step, total_steps=state.max_steps, samples=samples)

            _quietly(record)()

        def on_log(self, _args: Any, state: Any, *_: Any, **fields: Any) -> None:
            """The loss, and at the end the Trainer's own figures."""

            def record() -> None:
                logs = fields.get("logs") or {}
                if "loss" in logs:
                    # JSON has no NaN: null says that the training has diverged.
                    loss = float(logs["loss"])
                    steps.note("loss", step=state.global_step, loss=loss if math.isfinite(loss) else None)
                if "train_runtime" in logs:
                    steps.note(
                        "train_end",
                        time_s=time.time(),
                        train_runtime_s=float(logs["train_runtime"]),
                        train_samples_per_s=float(logs.get("train_samples_per_second", 0)) or None,
                    )

            _quietly(record)()

    return StepCallback


def _hook_deepspeed(steps: Steps, module: Any) -> None:
    step = module.DeepSpeedEngine.step

    def record(engine: Any) -> None:
        samples = engine.train_micro_batch_size_per_gpu() * engine.gradient_accumulation_steps()
        steps.step("deepspeed", step=engine.global_steps, samples=samples)

    @functools.wraps(step)
    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        before = self.global_steps
        result = step(self, *args, **kwargs)
        if self.global_steps != before:
            _quietly(record)(self)
        return result

    module.DeepSpeedEngine.step = counted


def _hook_optimizer(steps: Steps, module: Any) -> None:
    first: Dict[str, int] = {}

    def after_step(optimizer: Any, _args: Any, _kwargs: Any) -> None:
        # A training with two optimizers steps both; one of them is enough to count by.
        if first.setdefault("id", id(optimizer)) == id(optimizer):
            steps.step("optimizer")

    module.register_optimizer_step_post_hook(_quietly(after_step))


def _worker_fields(source: str) -> Dict[str, Any]:
    versions = {}
    for name in ("torch", "transformers", "deepspeed", "accelerate"):
        module = sys.modules.get(name)
        if module is not None:
            versions[name] = str(getattr(module, "__version__", ""))
    return {
        "local_rank": int(os.environ["LOCAL_RANK"]),
        "world_size": int(os.environ.get("WORLD_SIZE", "1")),
        "time_s": time.time(),
        "source": source,
        "versions": versions,
    }
