"""A file system that hangs as one whose server is gone does: a FUSE mount that nobody serves; runs a command beside it.

In namespaces of their own: `unshare --mount --map-root-user --user python hung.py PLACE COMMAND...`.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys


def main() -> int:
    """Mount, run the command, and let go of what hangs."""
    place, *command = sys.argv[1:]
    served_by_nobody = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={served_by_nobody},rootmode=40000,user_id=0,group_id=0"
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"store:/data", place.encode(), b"fuse", 0, options.encode()) != 0:
        raise OSError(ctypes.get_errno(), "no FUSE mount could be made")
    try:
        return subprocess.run(command, check=False, pass_fds=()).returncode
    finally:
        os.close(served_by_nobody)


if __name__ == "__main__":
    sys.exit(main())
