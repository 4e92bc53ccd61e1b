"""Programs of the job: on the PATH that a job gets, and in the user's interactive shell where that one lacks them.

A non-interactive shell reads no conda set-up and leaves many .bashrc files early, so the two differ.
"""

from __future__ import annotations

import os
import pwd
import shlex
from typing import Optional

from ..programs import find_program, is_program
from ..queries import Query

__all__ = ["find_tools", "parse_tools", "query_interactive"]

_DEADLINE_S = 5.0
_MAX_PATH_CHARS = 1000


def find_tools(names: list[str], python: Optional[str], path: str) -> dict[str, str]:
    """Absolute path of each that is found beside the interpreter, or along `path`."""
    folders = os.pathsep.join(([os.path.dirname(python)] if python else []) + [path])
    found = {name: find_program(name, folders) for name in names}
    return {name: place for name, place in found.items() if place is not None}


def query_interactive(names: list[str]) -> Query:
    """Ask the user's login shell, as a terminal would start it, where these programs are."""
    shell = pwd.getpwuid(os.getuid()).pw_shell or "/bin/sh"
    # `command -v` is POSIX; one that is not found prints nothing, and does not matter.
    script = "; ".join(f"command -v {shlex.quote(name)}" for name in names)
    return Query([shell, "-lic", f"{script}; true"], deadline_s=_DEADLINE_S)


def parse_tools(text: str, names: list[str]) -> dict[str, str]:
    """Absolute paths in what the shell printed; its greetings, aliases and functions are passed over."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        name = os.path.basename(line)
        if name in names and len(line) < _MAX_PATH_CHARS and line.startswith("/") and is_program(line):
            found.setdefault(name, line)
    return found
