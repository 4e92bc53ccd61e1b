"""Finding a program by name, as a shell would."""

from __future__ import annotations

import os
from typing import Optional

__all__ = ["find_program", "is_program"]


def find_program(name: str, path: str, cwd: str = "/") -> Optional[str]:
    """Absolute path of the program `name`, looked for along `path`, or from `cwd` when it holds a slash."""
    folders = [cwd] if "/" in name else [os.path.join(cwd, folder) for folder in path.split(os.pathsep)]
    candidates = (os.path.join(folder, name) for folder in folders)
    return next(filter(is_program, candidates), None)


def is_program(path: str) -> bool:
    """Whether it is a file that may be executed."""
    return os.path.isfile(path) and os.access(path, os.X_OK)
