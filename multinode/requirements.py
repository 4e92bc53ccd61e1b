"""Python packages that some commands need and an installation may lack."""

from __future__ import annotations

import importlib.util
import shlex
import sys


def install_hint(requirement: str) -> str:
    """The command that adds a package to the environment of this multinode, whichever tool made that."""
    python = shlex.quote(sys.executable)
    # An environment of uv has no pip.
    has_pip = importlib.util.find_spec("pip") is not None
    command = f"{python} -m pip install" if has_pip else f"uv pip install --python {python}"
    return f"{command} {shlex.quote(requirement)}"
