"""Keeps torch.compile away from the instrumentation, so that it compiles the training as it would without us.

By default, the compiler traces our functions that the training calls, or compiles them after a graph break, and
recompiles them whenever a count in them changes. Four ways prevent this, each for another kind of function:

- A function that wraps one of the user's asks `is_compiling` first, and then only passes on the call. The tracer
  recognizes `is_compiling` by identity, drops the other branch, and traces the wrapped function.
- Modules that are only called from such wrappers are never traced (`_NEVER_TRACED`): the graph breaks instead.
- Modules with wrappers that are traced through are not compiled on their own between two graphs (`_ONLY_THROUGH`).
- A single function that the compiler calls directly is marked (`never_compiled`, `run_by_python`).
"""

from __future__ import annotations

import sys
import types
from typing import Any, Callable, Iterator, List, Tuple

_NEVER_TRACED = ("batches", "nics", "hooks", "phases", "recorder", "steps", "levers.sync", "levers.sync_trainer")
_ONLY_THROUGH = ("levers.balance", "collectives", "phases", "recorder", "steps", "traffic")


def _never() -> bool:
    return False


# torch.compiler.is_compiling, once torch.compiler is imported.
is_compiling: Callable[[], bool] = _never


def never_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a function of ours that the compiler must call without tracing it."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]  # noqa: SLF001 - torch has no other that imports nothing
    return function


def run_by_python(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that replaces one of torch's, so that it is not compiled, and recompiled for each count in it.

    torch.compiler.disable would import the compiler at once; this does so at the first call.
    """
    wrapped: Callable[..., Any] = sys.modules["torch"]._disable_dynamo(function)  # noqa: SLF001 - imports the compiler late
    return wrapped


def _notice_compiler(module: Any) -> None:
    global is_compiling  # noqa: PLW0603 - a global is what the tracer looks up at the time it traces
    is_compiling = getattr(module, "is_compiling", _never)


def _spare_tracer(rules: Any) -> None:
    for name in map(_full_name, _NEVER_TRACED):
        if name in sys.modules:
            rules.add(name)


def _skip_frames(eval_frame: Any) -> None:
    for module in filter(None, map(sys.modules.get, map(_full_name, _ONLY_THROUGH))):
        for value in vars(module).values():
            if getattr(value, "__module__", None) == module.__name__:
                for code in _codes(value):
                    eval_frame.skip_code(code)


def _full_name(module: str) -> str:
    return "%s.%s" % (__package__, module)


def _codes(value: Any) -> Iterator[types.CodeType]:
    """The code objects of a function or of a class's methods, and of functions that are defined inside."""
    if isinstance(value, type):
        for member in vars(value).values():
            yield from _codes(member)
    code = value if isinstance(value, types.CodeType) else getattr(value, "__code__", None)
    if code is not None:
        yield code
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                yield from _codes(constant)


HOOKS: List[Tuple[str, Callable[[Any], None]]] = [
    ("torch.compiler", _notice_compiler),
    ("torch._dynamo.trace_rules", _spare_tracer),
    ("torch._dynamo.eval_frame", _skip_frames),
]
"""Modules to wait for, and what to do with each; they must be in place before the first function is wrapped."""
