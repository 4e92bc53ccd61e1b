"""Guard and AfterImport: put hooks into a training so that errors of ours do not stop it.

A failure is reported once, on stderr and in the samples. Hooks wait until the user's code imports the modules that they
hook, and import nothing themselves: importing torch early would precede environment variables that user code sets.
"""

from __future__ import annotations

import functools
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder
from typing import Any, Callable, Dict, Iterable, List, Set, Tuple

from . import compiler
from .recorder import Recorder

_MOST_WORDS = 500

Hooks = List[Tuple[str, Callable[[Any], None]]]
"""Modules to wait for, and what to do with each."""


class Guard:
    """Wraps functions so that no exception of ours reaches the training."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._told: Set[str] = set()

    def quietly(self, function: Callable[..., None]) -> Callable[..., None]:
        """Wrap a function so that exceptions are reported and swallowed."""

        @functools.wraps(function, assigned=("__name__",), updated=())
        def wrapped(*args: Any, **kwargs: Any) -> None:
            try:
                function(*args, **kwargs)
            except Exception as error:  # noqa: BLE001 - a training never stops because it is being watched
                self.tell(getattr(function, "__name__", "a hook"), error)

        return compiler.never_compiled(wrapped)

    def followed(self, function: Callable[..., Any], after: Callable[..., None]) -> Callable[..., Any]:
        """Wrap a function of the user's libraries so that `after` is called after it with its arguments."""
        quietly = self.quietly(after)

        @functools.wraps(function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            quietly(*args, **kwargs)
            return result

        return watched

    def around(
        self, function: Callable[..., Any], before: Callable[..., bool], after: Callable[[], Any]
    ) -> Callable[..., Any]:
        """Wrap a function of the user's libraries with calls of ours; its arguments and result stay unchanged.

        `before` is called with its arguments. If it returns True, `after` is called at the end, even if the function
        raises.
        """

        @functools.wraps(function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if compiler.is_compiling():
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

    def tell(self, part: str, error: Exception) -> None:
        """Report that `part` of our code failed; only the first failure of each part is reported."""
        if part in self._told:
            return
        self._told.add(part)
        message = ("%s failed and is skipped: %r" % (part.strip("_"), error))[:_MOST_WORDS]
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


class AfterImport(MetaPathFinder):
    """Calls functions with a module after it has been imported.

    Args:
        actions: name of a module and a function, which must not raise. Functions of one module are called in order.
    """

    def __init__(self, actions: Iterable[Tuple[str, Callable[[Any], None]]]) -> None:
        self._actions: Dict[str, List[Callable[[Any], None]]] = {}
        for name, action in actions:
            self._actions.setdefault(name, []).append(action)

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        """Find the module as usual, and make its loader call the functions afterwards."""
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


def add_trainer_callback(guard: Guard, module: Any, handlers: Dict[str, Callable[..., None]]) -> None:
    """Add a callback to each Trainer that is created; `module` is transformers.trainer.

    The handlers are named by the callback's methods, and called with the Trainer's arguments, its state and its logs.
    """
    methods = {name: _method(guard.quietly(handler)) for name, handler in handlers.items()}
    callback = type("MultinodeCallback", (module.TrainerCallback,), methods)

    def add_callback(trainer: Any, *_: Any, **__: Any) -> None:
        trainer.add_callback(callback)

    module.Trainer.__init__ = guard.followed(module.Trainer.__init__, add_callback)


def _method(handler: Callable[..., None]) -> Callable[..., None]:
    def method(_self: Any, args: Any, state: Any, *_: Any, logs: Any = None, **__: Any) -> None:
        handler(args, state, logs or {})

    return method


def _name(function: Any) -> str:
    return str(getattr(function, "__qualname__", "a hook"))
