"""The warnings that NCCL wrote into its own logs in the run's directory: on failure and on a hang they say most.

A launch sends these logs there (job/engine_commands.py), away from the job's log, a file a process.
"""

from __future__ import annotations

import contextlib
import glob
import os
from typing import List

_MARK = b" NCCL WARN "
_MOST_FILES = 64
_MOST_LINES = 20
_LONGEST_LINE = 1000
# Of each file the end: what ended the job is not far from it.
_MOST_BYTES = 8 << 20


def read_nccl_warnings(run_path: str) -> List[str]:
    """The last warnings of each process, as NCCL wrote them: node, process and thread, GPU, place and words."""
    found: List[str] = []
    for path in sorted(glob.glob(os.path.join(glob.escape(run_path), "nccl.*.log")))[:_MOST_FILES]:
        with contextlib.suppress(OSError):
            found += _read_file(path)
    return found


def _read_file(path: str) -> List[str]:
    with open(path, "rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - _MOST_BYTES))
        lines = file.read(_MOST_BYTES).splitlines()
    told = [line[:_LONGEST_LINE].decode(errors="replace").strip() for line in lines if _MARK in line]
    return told[-_MOST_LINES:]
