"""Files of a run that hold secrets: their texts stay in the supervisor's memory, and are gone with it.

The workers open them by their place in the run directory, as often as they like.
"""

from __future__ import annotations

import os
import tempfile

from ..channel import Record
from ..rundir import RunDir

__all__ = ["hold_files"]


def hold_files(run: RunDir, files: list[Record]) -> None:
    """Hold those that are marked so for as long as this process lives.

    Raises:
        AgentError: a path leads out of the run directory.
        OSError: there is no memory, or no place for the link.
    """
    for file in files:
        if file.get("in_memory"):
            fd = _open_unnamed()
            with open(fd, "wb", closefd=False) as held:
                held.write(file["text"].encode())
            # Whoever follows it opens the file anew, and reads from its beginning.
            run.add_link(file["path"], f"/proc/{os.getpid()}/fd/{fd}")


def _open_unnamed() -> int:
    """A descriptor that no program inherits, of a file that has no name."""
    try:
        return os.memfd_create("multinode")
    except (AttributeError, OSError):
        # The kernel, or the C library that Python was built for, is without it.
        with tempfile.TemporaryFile() as file:
            return os.dup(file.fileno())
