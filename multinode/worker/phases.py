"""Phases of a step: host time by what it is spent on, at the entry points of torch, transformers and deepspeed.

On a GPU, work that was only queued is paid for by whoever waits for it. Nested phases count to the innermost alone.
Only the thread that trains is timed: what other threads do, it does not wait for.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from typing import Any, Callable, Dict, List, Optional, Tuple

from . import forward
from .guard import Guard, Hooks

# Module, class (none: the module's own function), function, phase. What some release does not have is passed over.
_ENTRY_POINTS = (
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


class CoreWait:
    """What the thread that runs the user's script could have run, had others not had its core: the kernel counts it.

    A kernel without CONFIG_SCHED_INFO has no such file, or one of zeros.

    Args:
        path: the thread's schedstat: ns on a core, ns waiting for one, and its turns.
    """

    def __init__(self, path: str = "") -> None:
        try:
            self._file = os.open(path or "/proc/self/task/%d/schedstat" % os.getpid(), os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._file = -1

    def read_ns(self) -> Optional[int]:
        """So far; None where the kernel does not tell."""
        try:
            ran_ns, waited_ns, *_ = os.pread(self._file, 64, 0).split(None, 2)
            return int(waited_ns) if ran_ns != b"0" else None
        except (OSError, ValueError):
            return None


class PhaseClock:
    """Adds up the time between `enter` and `leave`, by phase, and what of it was waited for a core."""

    def __init__(self, guard: Guard, core_wait: Optional[CoreWait] = None) -> None:
        self._guard = guard
        self._core_wait = core_wait or CoreWait()
        self._waits_ns: Optional[Dict[str, int]] = {}
        self._waited_ns = self._core_wait.read_ns()
        self._totals_ns: Dict[str, int] = {}
        self._stack: List[str] = []
        self._since_ns = 0
        # That which runs the user's script. Backward passes on a GPU run in threads of autograd's own.
        self._thread = threading.get_ident()

    @property
    def depth(self) -> int:
        """How many phases are open."""
        return len(self._stack)

    def enter(self, phase: str) -> bool:
        """A phase begins; False where this thread is not timed, and then there is nothing to leave."""
        if threading.get_ident() != self._thread:
            return False
        self._charge()
        self._stack.append(phase)
        return True

    def leave(self) -> None:
        """The innermost phase ends."""
        self.unwind(len(self._stack) - 1)

    def unwind(self, depth: int) -> None:
        """All phases but the outermost `depth` end: some of them may have missed theirs."""
        self._charge()
        del self._stack[max(depth, 0) :]

    def within(self, *phases: str) -> bool:
        """Whether this is inside one of these phases; of a thread that is not timed nobody knows: True."""
        return threading.get_ident() != self._thread or any(phase in self._stack for phase in phases)

    def timed(self, phase: str, function: Callable[..., Any], unless: Tuple[str, ...] = ()) -> Callable[..., Any]:
        """The function, timed as a phase; left as it is inside the phases `unless`."""

        def enter(*_: Any, **__: Any) -> bool:
            return not (unless and self.within(*unless)) and self.enter(phase)

        return self._guard.around(function, enter, self.leave)

    def take_us(self) -> Dict[str, float]:
        """Microseconds by phase since the last call; what is open goes on in the next."""
        self._charge()
        taken = {phase: total / 1000 for phase, total in self._totals_ns.items()}
        self._totals_ns = {}
        return taken

    def take_core_wait_us(self) -> Optional[Dict[str, float]]:
        """Microseconds waited for a core since the last call, by phase, `host` outside of all; None is not known."""
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
    """Time data, forward, backward and optimizer."""
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
