# ruff: noqa: INP001 - the folder is on PYTHONPATH, and no package
"""On PYTHONPATH of the nodes, has workers of any training with FSDP shard on CPUs."""

import os
import sys
from pathlib import Path

if os.environ.get("MULTINODE_WORKER_PID") == str(os.getpid()):
    sys.path.append(str(Path(__file__).parents[1]))
    from shard_on_cpu import shard  # type: ignore[import-not-found]  # in the folder above

    shard()
