"""What NCCL wrote down about its connections: the lines of a worker's log that tell transport, rings and channels."""

from __future__ import annotations

import glob
import os
import re

__all__ = ["read_nccl_log"]

# Printed once for a communicator or a connection under NCCL_DEBUG=INFO (NCCL's init.cc, net_socket.cc, net_ib.cc).
_TELLING = re.compile(r"NCCL version|Bootstrap ?:|NET/|Using network| via |Channel \d+/\d+ :|Trees \[|coll channels")
_MOST_LINES = 400
_MOST_BYTES = 4 << 20


def read_nccl_log(directory: str, pid: int) -> list[str]:
    """The telling lines of the log that process `pid` writes there (NCCL_DEBUG_FILE ends in `.PID.log`), in order."""
    lines: list[str] = []
    for path in sorted(glob.glob(os.path.join(glob.escape(directory), f"nccl.*.{pid}.log"))):
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                text = file.read(_MOST_BYTES)
        except OSError:
            continue
        lines += [line[:400] for line in text.splitlines() if _TELLING.search(line)]
    return lines[:_MOST_LINES]
