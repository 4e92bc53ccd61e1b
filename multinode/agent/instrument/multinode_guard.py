"""Guard: what watches a training never stops it. Whatever fails is told once, on stderr and in the samples.

What the user calls is watched by `around`; code that torch.compile traces is left as it is.
"""

from __future__ import annotations

import functools
import sys
from typing import Any, Callable, List, Set, Tuple

import multinode_recorder
from multinode_imports import Action

__all__ = ["COMPILER_HOOKS", "Guard"]

_MOST_WORDS = 500
# Not those whose functions stand around the user's own: torch.compile looks through them, at what is behind.
_UNTRACED = (
    "multinode_batches",
    "multinode_cards",
    "multinode_counts",
    "multinode_hooks",
    "multinode_memory",
    "multinode_phases",
    "multinode_recorder",
    "multinode_steps",
    "multinode_timing",
)


def _never() -> bool:
    return False


# torch.compiler's own, once that is imported: the tracer knows it by identity and drops the branch that it guards.
_is_compiling: Callable[[], bool] = _never


def _notice_compiler(module: Any) -> None:
    """Ask this torch.compiler whether code is being traced."""
    global _is_compiling  # noqa: PLW0603 - a global is what the tracer looks up at the time it traces
    _is_compiling = getattr(module, "is_compiling", _never)


def _spare_tracer(rules: Any) -> None:
    """Have torch.compile run our code as it stands, which it would trace where an optimizer's step is compiled."""
    for name in _UNTRACED:
        if name in sys.modules:
            rules.add(name)


COMPILER_HOOKS: List[Tuple[str, Action]] = [
    ("torch.compiler", _notice_compiler),
    ("torch._dynamo.trace_rules", _spare_tracer),
]
"""To be in place before the first function is watched."""


class Guard:
    """Wraps functions so that nothing that is ours gets out of them.

    Args:
        recorder: where a failure is noted.
    """

    def __init__(self, recorder: multinode_recorder.Recorder) -> None:
        self._recorder = recorder
        self._told: Set[str] = set()

    def quietly(self, function: Callable[..., None]) -> Callable[..., None]:
        """The function, with whatever it raises swallowed after it was told."""

        @functools.wraps(function, assigned=("__name__",), updated=())
        def wrapped(*args: Any, **kwargs: Any) -> None:
            try:
                function(*args, **kwargs)
            except Exception as error:  # noqa: BLE001 - a training never stops because it is being watched
                self.tell(getattr(function, "__name__", "a hook"), error)

        wrapped._torchdynamo_disable = True  # type: ignore[attr-defined]  # noqa: SLF001 - see _spare_tracer
        return wrapped

    def around(
        self, function: Callable[..., Any], before: Callable[..., bool], after: Callable[[], Any]
    ) -> Callable[..., Any]:
        """A function of the user's libraries, with ours around it; it gets and gives what it ever did.

        Args:
            function: theirs.
            before: ours, called with the same arguments; where it says False, `after` is not called.
            after: ours, called however theirs ends.
        """

        @functools.wraps(function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if _is_compiling():
                return function(*args, **kwargs)
            begun = False
            try:
                begun = before(*args, **kwargs)
            except Exception as error:  # noqa: BLE001 - see `quietly`
                self.tell(_name(before), error)
            try:
                return function(*args, **kwargs)
            finally:
                if begun:
                    self._end(after)

        return watched

    def tell(self, what: str, error: Exception) -> None:
        """Say that something of ours failed; only the first failure of each is told."""
        if what in self._told:
            return
        self._told.add(what)
        message = ("%s failed and is passed over: %r" % (what.strip("_"), error))[:_MOST_WORDS]
        try:
            sys.stderr.write("multinode: %s\n" % message)
            self._recorder.write("note", {"message": message})
        except Exception:  # noqa: BLE001, S110 - stderr may be closed, and there is nobody left to tell
            pass

    def _end(self, after: Callable[[], Any]) -> None:
        try:
            after()
        except Exception as error:  # noqa: BLE001 - see `quietly`
            self.tell(_name(after), error)


def _name(function: Any) -> str:
    return str(getattr(function, "__qualname__", "a hook"))
