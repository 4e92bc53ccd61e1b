"""Python imports this at start-up, since its folder, which contains nothing else, is first on PYTHONPATH.

It only acts in training workers. Errors are reported and swallowed: a training never stops because it is being watched.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))


def _chain() -> None:
    """Run the sitecustomize that ours hides, if there is one."""
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


def _install() -> None:
    """Import our package by its location, which is not on sys.path, so that it hides no package of the training."""
    root, name = os.path.split(os.path.dirname(os.path.dirname(_HERE)))
    spec = importlib.machinery.PathFinder.find_spec(name, [root])
    if spec is None or spec.loader is None:
        raise ImportError("there is no %s in %s" % (name, root))
    package = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)
    importlib.import_module(name + ".worker.hooks").install()


def _is_worker() -> bool:
    # torchrun's agent and child processes of workers load this file, too, but do not train.
    if "LOCAL_RANK" not in os.environ or "MULTINODE_SAMPLES" not in os.environ:
        return False
    return os.environ.setdefault("MULTINODE_WORKER_PID", str(os.getpid())) == str(os.getpid())


try:
    if _is_worker():
        _install()
except Exception as error:  # noqa: BLE001 - the worker trains without us
    sys.stderr.write("multinode: not recording this worker: %r\n" % (error,))
# Otherwise every import would search the archive first, which adds a third of a second to importing torch.
sys.path[:] = [entry for entry in sys.path if entry != _HERE]
_chain()
