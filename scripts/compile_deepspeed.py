"""Compiles DeepSpeed's CPU operation, which it otherwise does where it is first used: on each node of each lab.

Done by scripts/setup --tests, below the file systems of all lab nodes; what is compiled already takes seconds.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

_LEFT_BEHIND_S = 600.0


def main() -> None:
    """Compile it."""
    for lock in Path("~/.cache/torch_extensions").expanduser().glob("*/deepspeed_shm_comm/lock"):
        # Whoever was killed while compiling has left it, and torch would wait for it without end.
        if time.time() - lock.stat().st_mtime > _LEFT_BEHIND_S:
            lock.unlink()
    os.environ |= {
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        # With the ninja that the nodes' jobs find: another release does not read the log of this one.
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

    ShareMemCommBuilder().load(verbose=False)


if __name__ == "__main__":
    main()
