"""Hides, writes and restores one file, run as a program in a node; reads one JSON object on stdin.

What was there is kept on the same disk, below its root, under the fault's number. Each step leaves a state from which
`restore` finds back. Standard library only, and nothing of ours: it runs as `python -I -S -c`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import stat
import sys
from pathlib import Path
from typing import Any

_STORE = ".multinode-faults"


def main() -> None:
    """Do what is asked, or say in one line why not."""
    order: dict[str, Any] = json.load(sys.stdin)
    path, kept = Path(order["path"]), _kept(Path(order["path"]), order["number"])
    try:
        if order["verb"] == "hide":
            hide(path, kept)
        elif order["verb"] == "write":
            write(path, kept, order["text"].encode())
        elif order["verb"] == "set_version":
            old = path.read_bytes()
            version = b"Version: " + order["text"].encode()
            write(path, kept, re.sub(rb"^Version: .*$", lambda _: version, old, count=1, flags=re.MULTILINE))
        else:
            restore(path, kept)
    except OSError as error:
        sys.exit(f"{path}: {error.strerror}")


def hide(path: Path, kept: Path) -> None:
    """Move it out of sight."""
    kept.parent.mkdir(exist_ok=True)
    path.rename(kept)


def write(path: Path, kept: Path, content: bytes) -> None:
    """Keep what is there and put a file of the same mode in its place."""
    kept.parent.mkdir(exist_ok=True)
    mode = 0o644
    if os.path.lexists(path):
        # Through a link, as whoever reads the path would.
        mode = stat.S_IMODE(path.stat().st_mode) if path.is_file() else mode
        if path.is_dir():
            raise IsADirectoryError(0, "it is a directory")
        path.rename(kept)
    else:
        _absent(kept).touch()
    path.write_bytes(content)
    path.chmod(mode)


def restore(path: Path, kept: Path) -> None:
    """Put back what was kept; where nothing was, leave nothing; where nothing was done, do nothing."""
    if os.path.lexists(kept):
        _remove(path)
        kept.rename(path)
    elif _absent(kept).exists():
        _remove(path)
        _absent(kept).unlink()
    # Others may keep theirs there.
    with contextlib.suppress(OSError):
        kept.parent.rmdir()


def _kept(path: Path, number: int) -> Path:
    disk = Path(os.path.realpath(path.parent))
    while not os.path.ismount(disk):
        disk = disk.parent
    return disk / _STORE / str(number)


def _absent(kept: Path) -> Path:
    return kept.with_suffix(".absent")


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
