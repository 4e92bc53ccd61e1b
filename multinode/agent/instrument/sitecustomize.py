"""Python imports this at start-up because it stands first on PYTHONPATH. It acts in training workers only.

Whatever fails here is swallowed: a training never stops because it is being watched.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import os
import sys

_HERE = os.path.dirname(__file__)


def _chain() -> None:
    """Run the sitecustomize that ours stands in front of, if there is one."""
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


def _is_worker() -> bool:
    # torchrun's own agent loads this file too, and so does whatever a worker starts: neither trains.
    if "LOCAL_RANK" not in os.environ or "MULTINODE_SAMPLES" not in os.environ:
        return False
    return os.environ.setdefault("MULTINODE_WORKER_PID", str(os.getpid())) == str(os.getpid())


try:
    if _is_worker():
        importlib.import_module("multinode_hooks").install()
except Exception as error:  # noqa: BLE001 - see above
    sys.stderr.write("multinode: not recording this worker: %r\n" % (error,))
# Every import of the training would look into the archive first, which costs a start-up of torch a third of a second.
sys.path[:] = [entry for entry in sys.path if entry != _HERE]
_chain()
