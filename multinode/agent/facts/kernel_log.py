"""KernelLog: what the kernel logged about failing hardware while a job ran. Readable for root, elsewhere often not."""

from __future__ import annotations

import errno
import os
import re
from typing import Optional

from ..channel import Record

__all__ = ["KernelLog"]

# The controller knows what these mean; here they only keep the rest of a talkative log away.
_TELLING = re.compile(
    r"NVRM: Xid|amdgpu.*(?:ring \w+ timeout|GPU reset|uncorrectable)|EDAC .*UE|Hardware Error|Machine check"
    r"|I/O error|(?:EXT4|XFS|BTRFS).*(?:error|corruption)|[Rr]emounting filesystem read-only"
)
_RECORD_BYTES = 8192
# A disk that dies repeats itself; the first lines are the ones that count.
_MOST_LINES = 100
_MOST_CHARACTERS = 300


class KernelLog:
    """Follows the kernel's log from now on.

    Args:
        path: the device that has one record a read (Documentation/ABI/testing/dev-kmsg).
    """

    def __init__(self, path: str = "/dev/kmsg") -> None:
        self._left = _MOST_LINES
        self._fd: Optional[int] = None
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            os.lseek(self._fd, 0, os.SEEK_END)
        except OSError:
            self.close()

    def read(self) -> list[Record]:
        """`kernel` records of what came since the last call."""
        found: list[Record] = []
        while self._fd is not None and self._left:
            try:
                text = os.read(self._fd, _RECORD_BYTES).decode(errors="replace")
            except OSError as error:
                if error.errno == errno.EPIPE:
                    # Overwritten before it was read: the next read goes on behind the gap.
                    continue
                if error.errno != errno.EAGAIN:
                    self.close()
                break
            message = text.partition(";")[2].partition("\n")[0]
            if not text:
                break
            if _TELLING.search(message):
                self._left -= 1
                found.append({"kind": "kernel", "message": message[:_MOST_CHARACTERS]})
        return found

    def close(self) -> None:
        """Follow no more."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
