"""Tracer: records one window of torch.profiler in this worker, on request, and exports it into the run directory.

The profiler starts one step before the window and stops after it, so that none of its steps includes that cost. The
controller reads the trace.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gzip
import json
import os
import shutil
import sys
import threading
import warnings
from typing import Any, Callable, Dict, Optional

from .guard import Guard, Hooks, add_trainer_callback
from .steps import Steps

# The controller cuts a trace into steps at these marks (profile/trace_events.py).
_MARK = "multinode step %d ends"
_LARGEST_CHUNK = 1 << 20
_EXPORT_DEADLINE_S = 120.0
_LOWEST_PRIORITY = 19
_LEAST_STEPS = 2


class _NoTrace(Exception):
    """There will be no trace; the message is the reason."""


def hooks(steps: Steps, guard: Guard) -> Hooks:
    """Modules to wait for, and what to do with each; empty if this worker is not traced.

    `$MULTINODE_TRACE` has the steps of the window, the steps before it, and the ranks to trace.
    """
    setting = os.environ.get("MULTINODE_TRACE")
    if not setting:
        return []
    rank = int(os.environ.get("RANK", "0"))
    try:
        window = json.loads(setting)
        if rank not in window["ranks"]:
            return []
        tracer = Tracer(steps, guard, window, os.environ["MULTINODE_RUN_DIR"], rank)
    except (KeyError, TypeError, ValueError) as error:
        guard.tell("tracing", error)
        return []
    # Without this, Kineto, torch's profiler, would print each start and stop to the job's log. It reads it once.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    steps.meters.append(tracer.meter)
    return [("transformers.trainer", tracer.hook_trainer)]


class Tracer:
    """Starts and stops the profiler by the steps.

    Args:
        window: `steps`, the length of the window, and `after`, the steps before it; both shrink for a short training.
    """

    def __init__(self, steps: Steps, guard: Guard, window: Dict[str, Any], run_dir: str, rank: int) -> None:
        self._steps = steps
        self._guard = guard
        self._length = max(1, int(window["steps"]))
        self._after = max(1, int(window["after"]))
        self._folder = os.path.join(run_dir, "traces")
        self._rank = rank
        self._left: Optional[int] = None
        self._ended = 0
        self._number = 0
        self._first: Optional[int] = None
        self._last: Optional[int] = None
        self._profiler: Any = None
        self._restore: Callable[[], None] = lambda: None
        self._exporting: Optional[threading.Thread] = None
        self._over = False
        self._owner = (os.getpid(), 0)

    def meter(self, number: int) -> Dict[str, Any]:
        """A meter: a step has ended."""
        self._ended = self._ended + 1 if number > self._number else 1
        self._number = number
        if not self._over:
            self._or_no_trace(self._advance)
        return {}

    def hook_trainer(self, module: Any) -> None:
        """Learn from the Trainer how many steps there will be, and when the training ends."""

        def begin(_args: Any, state: Any, _logs: Any) -> None:
            # A resumed training has fewer steps left than `max_steps`.
            self._left = int(state.max_steps) - int(state.global_step)

        def end(*_: Any) -> None:
            self.finish()

        add_trainer_callback(self._guard, module, {"on_train_begin": begin, "on_train_end": end})

    def finish(self) -> None:
        """The training is over: export the complete steps that were recorded."""
        if self._profiler is not None and self._owner == (os.getpid(), threading.get_ident()):
            self._or_no_trace(self._export)

    def _advance(self) -> None:
        if self._profiler is None:
            if self._ended >= self._start_after():
                self._start()
            return
        with self._torch().profiler.record_function(_MARK % self._number):
            pass
        if self._first is None:
            self._first = self._number + 1
            return
        self._last = self._number
        if self._last - self._first + 1 >= self._length or self._ended == self._left:
            self._export()

    def _start_after(self) -> int:
        return self._after if self._left is None else max(1, min(self._after, self._left // 3))

    def _start(self) -> None:
        if self._left is not None and self._left - self._ended < _LEAST_STEPS:
            raise _NoTrace("the run is too short for a trace: it has %d steps" % self._left)
        torch = self._torch()
        if not torch.autograd.kineto_available():
            raise _NoTrace("this torch was built without its profiler (Kineto)")
        if torch.autograd._profiler_enabled():  # noqa: SLF001 - a second profiler would silently end the first
            raise _NoTrace("the training code uses its own profiler")
        activities = [torch.profiler.ProfilerActivity.CPU]
        cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
        if cuda:
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        # NCCL reports the sizes of its kernels itself; sizes of gloo are only known from shapes.
        profiler = torch.profiler.profile(activities=activities, record_shapes=not cuda)
        with warnings.catch_warnings():
            # Torch 2.11 warns at every start, but there is only one cycle here, whose events nobody reads.
            warnings.filterwarnings("ignore", message=".*Profiler clears events at the end of each cycle")
            profiler.start()
        self._profiler = profiler
        self._owner = (os.getpid(), threading.get_ident())
        self._give_way(torch.autograd.profiler.profile)
        atexit.register(self._guard.quietly(self._at_exit))
        # The first mark takes a millisecond, so it is made outside the window.
        with torch.profiler.record_function("multinode begins to trace"):
            pass

    def _torch(self) -> Any:
        torch = sys.modules.get("torch")
        if torch is None:
            raise _NoTrace("torch was not imported")
        return torch

    def _give_way(self, kind: Any) -> None:
        """If the user's own profiler starts, end ours first."""
        prepare = kind._prepare_trace  # noqa: SLF001 - the one entry point of with-statement and start()
        own = self._or_no_trace

        @functools.wraps(prepare)
        def after_us(profiler: Any, *args: Any, **kwargs: Any) -> Any:
            own(self._cede)
            return prepare(profiler, *args, **kwargs)

        def restore() -> None:
            if kind._prepare_trace is after_us:  # noqa: SLF001 - with-statement and start() both call it
                kind._prepare_trace = prepare  # noqa: SLF001 - with-statement and start() both call it

        kind._prepare_trace = after_us  # noqa: SLF001 - with-statement and start() both call it
        self._restore = restore

    def _cede(self) -> None:
        if self._profiler is not None:
            raise _NoTrace("the training code started its own profiler")

    def _export(self) -> None:
        """Stop the profiler, and write the trace while the training continues.

        Torch synchronizes a GPU here, once.
        """
        profiler, self._profiler, self._over = self._profiler, None, True
        self._restore()
        profiler.stop()
        if self._last is None:
            raise _NoTrace("the run ended before a complete step was recorded")
        self._exporting = threading.Thread(
            target=self._or_no_trace, args=(lambda: self._write(profiler),), name="multinode-trace", daemon=True
        )
        self._exporting.start()

    def _write(self, profiler: Any) -> None:
        with contextlib.suppress(OSError, AttributeError):
            # On Linux this only affects this thread: the training has priority.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
        os.makedirs(self._folder, mode=0o700, exist_ok=True)
        name = "rank-%d.json.gz" % self._rank
        plain, partial = (os.path.join(self._folder, ".rank-%d.%s" % (self._rank, end)) for end in ("json", "gz"))
        try:
            # The file is created first, so that nobody else can ever read it.
            os.close(os.open(plain, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600))
            profiler.export_chrome_trace(plain)
            _compress(plain, partial)
            os.replace(partial, os.path.join(self._folder, name))
        finally:
            for path in (plain, partial):
                with contextlib.suppress(OSError):
                    os.unlink(path)
        # Steps that ran during profiling or export are slower than usual.
        self._steps.note(
            "trace", first_step=self._first, last_step=self._last, file=name, disturbed_to=self._number + 1
        )

    def _at_exit(self) -> None:
        if self._owner[0] != os.getpid():
            return
        self.finish()
        if self._exporting is not None:
            self._exporting.join(_EXPORT_DEADLINE_S)

    def _or_no_trace(self, action: Callable[[], None]) -> None:
        """Run an action; if it fails, end the profiler and record why there is no trace. Never raises."""
        try:
            action()
        except Exception as error:  # noqa: BLE001 - a training never stops because it is being watched
            self._over = True
            reason = str(error) if isinstance(error, _NoTrace) else "%s: %s" % (type(error).__name__, error)
            self._guard.quietly(self._drop)()
            self._guard.quietly(self._steps.note)("trace", error=reason[:500])

    def _drop(self) -> None:
        profiler, self._profiler = self._profiler, None
        self._restore()
        if profiler is not None:
            profiler.stop()


def _compress(source: str, target: str) -> None:
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    # Compressing a chunk releases the GIL, so the training can continue.
    with open(source, "rb") as plain, open(descriptor, "wb") as raw, gzip.GzipFile("", "wb", 6, raw) as packed:
        shutil.copyfileobj(plain, packed, _LARGEST_CHUNK)
