"""Own frames: keeps torch.compile from compiling the bookkeeping that runs between two graphs of a compiled training.

Where a graph breaks, the compiler takes up every Python function that is called then, ours too: it would compile them,
anew for every size, and believe that they are traced when they are not. What it traces through it still inlines.
"""

from __future__ import annotations

import types
from typing import Any, Callable, Iterable, Iterator

__all__ = ["run_as_they_are"]


def run_as_they_are(modules: Iterable[types.ModuleType], skip_code: Callable[[types.CodeType], None]) -> None:
    """Have all functions of these modules left as they are.

    Args:
        modules: ours.
        skip_code: torch._dynamo.eval_frame's, which takes a function's code.
    """
    for module in modules:
        for value in vars(module).values():
            if getattr(value, "__module__", None) == module.__name__:
                for code in _codes(value):
                    skip_code(code)


def _codes(value: Any) -> Iterator[types.CodeType]:
    """The code of a function, or of a class's methods, and of what is defined inside."""
    if isinstance(value, type):
        for member in vars(value).values():
            yield from _codes(member)
    code = value if isinstance(value, types.CodeType) else getattr(value, "__code__", None)
    if code is not None:
        yield code
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                yield from _codes(constant)
