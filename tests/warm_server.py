"""An interpreter that has imported torch, and forks a process for each script: such a process pays for no import.

To the script torch looks as if it had not been imported: the first `import torch` walks through torch's modules again,
in the order in which they were imported, without executing them. Finders in sys.meta_path, PathFinder and loaders meet
each of them as ever. A function that is replaced when its module has been imported is so in those that copied it, too.

Only the standard library is used, and tests/warm.py alone talks to it, over the socket in `sys.argv`.
"""

from __future__ import annotations

import copy
import functools
import gc
import importlib
import json
import os
import runpy
import signal
import site
import socket
import sys
import types
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import FileFinder, ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

PACKAGE = "torch"
# These are imported behind it, for who needs them.
FURTHER = ("torch.distributed.fsdp", "torch._dynamo")
MOST_BYTES = 1 << 20


class Order(MetaPathFinder):
    """Notes which modules of the package each of them imports first."""

    def __init__(self) -> None:
        self.imported_by: dict[str, list[str]] = {}
        self.specs: dict[str, ModuleSpec] = {}
        self._running = [""]

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname.partition(".")[0] != PACKAGE:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return spec
        loader = spec.loader
        execute = loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            del loader.exec_module
            self.specs[fullname] = spec
            self.imported_by.setdefault(self._running[-1], []).append(fullname)
            self._running.append(fullname)
            execute(module)
            self._running.pop()

        loader.exec_module = exec_module  # type: ignore[method-assign]  # this one module's own loader
        return spec


class Again:
    """The loader of a module that exists already."""

    def __init__(self, imported: Imported, spec: ModuleSpec) -> None:
        self._imported = imported
        self._spec = spec
        self._execute: Callable[[types.ModuleType], None] = self._import_others

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return self._imported.modules[spec.name]

    @property
    def exec_module(self) -> Callable[[types.ModuleType], None]:
        return self._execute

    @exec_module.setter
    def exec_module(self, execute: Callable[[types.ModuleType], None]) -> None:
        self._execute = functools.partial(self._observe, execute)

    def _import_others(self, module: types.ModuleType) -> None:
        if "__spec__" in vars(module):
            vars(module)["__spec__"] = self._spec
        for name in self._imported.order.imported_by.get(self._spec.name, ()):
            if name in self._imported.modules:
                importlib.import_module(name)
        self._imported.unshadow()

    def _observe(self, execute: Callable[[types.ModuleType], None], module: types.ModuleType) -> None:
        before = {name: value for name, value in vars(module).items() if callable(value)}
        execute(module)
        now = vars(module)
        changed = {id(value): now[name] for name, value in before.items() if now.get(name, value) is not value}
        if changed:
            self._imported.replace(changed)


class Imported:
    """The package's modules, taken out of sys.modules; they come back when they are imported."""

    def __init__(self, order: Order) -> None:
        self.order = order
        names = [name for names in order.imported_by.values() for name in names]
        self.modules = {name: sys.modules.pop(name) for name in names if name in sys.modules}
        # Some releases of torch import these where they are first asked for as attributes.
        for name in FURTHER:
            package, _, attribute = name.rpartition(".")
            vars(self.modules[package]).pop(attribute, None)
        # An attribute of a package that has the name of one of its modules, and is another thing.
        self._shadows: dict[tuple[str, str], Any] = {}
        for name, module in self.modules.items():
            package, _, attribute = name.rpartition(".")
            value = vars(self.modules[package]).get(attribute, module) if package else module
            if value is not module:
                self._shadows[package, attribute] = value
        for finder in sys.path_importer_cache.values():
            if isinstance(finder, FileFinder):
                finder.find_spec = functools.partial(self._find_spec, finder.find_spec)  # type: ignore[method-assign]

    def _find_spec(self, find: Any, fullname: str, target: Any = None) -> ModuleSpec | None:
        if fullname not in self.modules:
            return find(fullname, target)  # type: ignore[no-any-return]
        spec = copy.copy(self.order.specs[fullname])
        spec.loader = Again(self, self.order.specs[fullname])  # type: ignore[assignment]  # it has what is asked for
        return spec

    def replace(self, changed: dict[int, Any]) -> None:
        """Put what was changed in one module into those that had copied it."""
        for module in self.modules.values():
            copied = {name: changed[id(value)] for name, value in vars(module).items() if id(value) in changed}
            vars(module).update(copied)
        self._shadows = {place: changed.get(id(value), value) for place, value in self._shadows.items()}

    def unshadow(self) -> None:
        """Undo that an import has set a package's attribute to the module."""
        for (package, attribute), value in self._shadows.items():
            if vars(self.modules[package]).get(attribute) is self.modules[f"{package}.{attribute}"]:
                vars(self.modules[package])[attribute] = value


def serve(requests: socket.socket) -> tuple[dict[str, Any], int, int]:
    """Fork a process for each request; returns in such processes alone, with the request, its stdout and its stderr."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        data, descriptors, _flags, _address = socket.recv_fds(requests, MOST_BYTES, 3)
        if not data:
            os._exit(0)
        stdout, stderr, status = descriptors
        if os.fork() == 0:
            break
        for each in (stdout, stderr, status):
            os.close(each)
    requests.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid:
        os.write(status, b"%d\n" % pid)
        os.write(status, b"%d\n" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        os._exit(0)
    os.close(status)
    return json.loads(data), stdout, stderr


def run(request: dict[str, Any], path: list[str]) -> None:
    """Run the script as `python` would, with the arguments and the environment of the request."""
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.path[:] = [*filter(None, os.environ.get("PYTHONPATH", "").split(":")), *path]
    importlib.invalidate_caches()
    site.execsitecustomize()
    what, *arguments = request["argv"]
    if what == "-c":
        source, *arguments = arguments
        sys.argv[:] = ["-c", *arguments]
        sys.path.insert(0, "")
        script = "<string>"
    else:
        sys.argv[:] = [what, *arguments]
        script = what
        if what.endswith(".pyz"):
            runpy.run_path(what, run_name="__main__")
            return
        sys.path.insert(0, str(Path(what).parent))
        source = Path(what).read_text()
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    if what != "-c":
        main.__file__ = what
    exec(compile(source, script, "exec"), vars(main))  # noqa: S102 - this is what a Python does


def start() -> None:
    """Import the package, serve, and become the script."""
    # The folder of this file: its `profile` is not the standard library's.
    del sys.path[0]
    path = sys.path[:]
    order = Order()
    sys.meta_path.insert(0, order)
    for name in (PACKAGE, *FURTHER):
        importlib.import_module(name)
    sys.meta_path.remove(order)
    Imported(order)
    gc.freeze()
    request, stdout, stderr = serve(socket.socket(fileno=int(sys.argv[1])))
    for number, descriptor in ((1, stdout), (2, stderr)):
        os.dup2(descriptor, number)
        os.close(descriptor)
    run(request, path)


if __name__ == "__main__":
    start()
