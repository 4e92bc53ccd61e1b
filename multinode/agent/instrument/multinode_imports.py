"""Acts when the user's code has imported a module, and imports nothing itself.

Importing torch early would precede the environment that user code sets.
"""

from __future__ import annotations

from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder
from typing import Any, Callable, Dict, Iterable, List, Tuple

__all__ = ["Action", "AfterImport"]

Action = Callable[[Any], None]


class AfterImport(MetaPathFinder):
    """Calls functions with a module once it has been imported.

    Args:
        actions: module's name and function; a function must not raise. Several of one module are called in order.
    """

    def __init__(self, actions: Iterable[Tuple[str, Action]]) -> None:
        self._actions: Dict[str, List[Action]] = {}
        for name, action in actions:
            self._actions.setdefault(name, []).append(action)

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        """Find the module as ever, and have its loader call us afterwards."""
        actions = self._actions.pop(fullname, None)
        if actions is None:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            for action in actions:
                action(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]  # this one module's own loader
        return spec
