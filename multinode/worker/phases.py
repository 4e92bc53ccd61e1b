"""Phases of a step: host time by phase, measured at entry points of torch, transformers and deepspeed.

On a GPU, the phase that waits for queued work gets its time. Time in nested phases counts only for the innermost one.
Only the training thread is timed, since it does not wait for other threads.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from typing import Any, Callable, Dict, List, Optional, Tuple

from . import forward
from .guard import Guard, Hooks

# Module, class (empty for the module's own function), function, phase. Names that a release lacks are skipped.
_ENTRY_POINTS = (
    ("torch.utils.data.dataloader", "DataLoader", "__iter__", "data"),
    ("torch.utils.data.dataloader", "_BaseDataLoaderIter", "__next__", "data"),
    ("transformers.trainer", "Trainer", "compute_loss", "forward"),
    ("torch.autograd", "", "backward", "backward"),
    ("accelerate.accelerator", "Accelerator", "backward", "backward"),
    ("deepspeed.runtime.engine", "DeepSpeedEngine", "backward", "backward"),
    ("deepspeed.runtime.engine", "DeepSpeedEngine", "step", "optimizer"),
)
# A forward pass inside another is part of it; one inside a backward pass recomputes activations.
_NO_FORWARD_IN = ("forward", "backward")


class CoreWait:
    """The time that the script's thread was runnable but waited for a core, which the kernel counts.

    Without CONFIG_SCHED_INFO, the kernel has no such file, or one of zeros.

    Args:
        path: the thread's schedstat: nanoseconds on a core, nanoseconds waiting for one, and number of time slices.
    """

    def __init__(self, path: str = "") -> None:
        try:
            self._file = os.open(path or "/proc/self/task/%d/schedstat" % os.getpid(), os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._file = -1

    def read_ns(self) -> Optional[int]:
        """Nanoseconds waited so far; None if unknown."""
        try:
            ran_ns, waited_ns, *_ = os.pread(self._file, 64, 0).split(None, 2)
            return int(waited_ns) if ran_ns != b"0" else None
        except (OSError, ValueError):
            return None


class PhaseClock:
    """Adds up the time between `enter` and `leave` by phase, and the part of it spent waiting for a core."""

    def __init__(self, guard: Guard, core_wait: Optional[CoreWait] = None) -> None:
        self._guard = guard
        self._core_wait = core_wait or CoreWait()
        self._waits_ns: Optional[Dict[str, int]] = {}
        self._waited_ns = self._core_wait.read_ns()
        self._totals_ns: Dict[str, int] = {}
        self._stack: List[str] = []
        self._since_ns = 0
        # The thread that runs the user's script; backward passes on a GPU run in autograd's threads.
        self._thread = threading.get_ident()

    @property
    def depth(self) -> int:
        """How many phases are open."""
        return len(self._stack)

    def enter(self, phase: str) -> bool:
        """A phase begins; False if this thread is not timed, and then `leave` must not be called."""
        if threading.get_ident() != self._thread:
            return False
        self._charge()
        self._stack.append(phase)
        return True

    def leave(self) -> None:
        """The innermost phase ends."""
        self.unwind(len(self._stack) - 1)

    def unwind(self, depth: int) -> None:
        """End all phases but the outermost `depth`; some may have missed their own ends."""
        self._charge()
        del self._stack[max(depth, 0) :]

    def within(self, *phases: str) -> bool:
        """Whether the thread is inside one of these phases; True for a thread that is not timed."""
        return threading.get_ident() != self._thread or any(phase in self._stack for phase in phases)

    def timed(self, phase: str, function: Callable[..., Any], unless: Tuple[str, ...] = ()) -> Callable[..., Any]:
        """Wrap a function to be timed as a phase, except inside the phases `unless`."""

        def enter(*_: Any, **__: Any) -> bool:
            return not (unless and self.within(*unless)) and self.enter(phase)

        return self._guard.around(function, enter, self.leave)

    def take_us(self) -> Dict[str, float]:
        """Microseconds by phase since the last call; open phases continue in the next one."""
        self._charge()
        taken = {phase: total / 1000 for phase, total in self._totals_ns.items()}
        self._totals_ns = {}
        return taken

    def take_core_wait_us(self) -> Optional[Dict[str, float]]:
        """Microseconds waited for a core since the last call, by phase; `host` is outside of all. None is unknown."""
        taken, self._waits_ns = self._waits_ns, {}
        return None if taken is None else {phase: total / 1000 for phase, total in taken.items() if total}

    def _charge_wait(self) -> None:
        waited_ns, before_ns = self._core_wait.read_ns(), self._waited_ns
        self._waited_ns = waited_ns
        if waited_ns is None or before_ns is None:
            self._waits_ns = None
        elif self._waits_ns is not None:
            phase = self._stack[-1] if self._stack else "host"
            self._waits_ns[phase] = self._waits_ns.get(phase, 0) + waited_ns - before_ns

    def _charge(self) -> None:
        self._charge_wait()
        now = time.monotonic_ns()
        if self._stack:
            phase = self._stack[-1]
            self._totals_ns[phase] = self._totals_ns.get(phase, 0) + now - self._since_ns
        self._since_ns = now


def hooks(clock: PhaseClock, guard: Guard) -> Hooks:
    """Hooks that time the phases data, forward, backward and optimizer."""
    return [
        *((entry[0], functools.partial(_time_entry_point, clock, entry)) for entry in _ENTRY_POINTS),
        *forward.hooks(functools.partial(clock.timed, "forward", unless=_NO_FORWARD_IN)),
        ("torch.optim.optimizer", functools.partial(_time_optimizers, clock, guard)),
    ]


def _time_entry_point(clock: PhaseClock, entry: Tuple[str, str, str, str], module: Any) -> None:
    _module, class_name, name, phase = entry
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
    """The phase between torch's two hooks of an optimizer's step. Optimizers may be nested."""

    def __init__(self, clock: PhaseClock) -> None:
        self._clock = clock
        self._depths: Dict[int, int] = {}

    def before(self, optimizer: Any, *_: Any) -> None:
        # A previous step that raised has not ended its phase.
        self.after(optimizer)
        depth = self._clock.depth
        if self._clock.enter("optimizer"):
            self._depths[id(optimizer)] = depth

    def after(self, optimizer: Any, *_: Any) -> None:
        depth = self._depths.pop(id(optimizer), None)
        if depth is not None:
            self._clock.unwind(depth)
