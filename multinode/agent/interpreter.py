"""The job's interpreter: which one it is, and what is installed for it. Reads metadata and imports nothing of it."""

from __future__ import annotations

import json
import os
from typing import Optional

from .programs import find_program
from .queries import Query, QueryFailed

__all__ = ["find_interpreter", "parse_packages", "query_packages"]

_DEADLINE_S = 15.0
_PACKAGES = (
    "torch",
    "llamafactory",
    "transformers",
    "accelerate",
    "deepspeed",
    "peft",
    "trl",
    "datasets",
    "bitsandbytes",
    "flash-attn",
)
_MARK = "multinode-packages:"
# Runs under any Python 3.8+. The directory it is started in is no part of an installation, hence the first line.
_SCRIPT = f"""
import sys; sys.path[:] = [p for p in sys.path if p]
import json, platform
from importlib.metadata import PackageNotFoundError, version
found = {{}}
for name in sys.argv[1:]:
    try:
        found[name] = version(name)
    except PackageNotFoundError:
        pass
print("\\n{_MARK}" + json.dumps({{"python_version": platform.python_version(), "packages": found}}))
"""


def find_interpreter(python: Optional[str], path: str) -> tuple[Optional[str], str]:
    """Absolute path of the job's interpreter, or None and the reason.

    Args:
        python: the one that was asked for, as a path or a name on PATH; None takes python3, then python.
        path: PATH of the job.
    """
    if python is None:
        found = find_program("python3", path) or find_program("python", path)
        return found, "neither python3 nor python is on PATH"
    # Links stay as they are: behind the link of a virtual environment lies the interpreter that knows nothing of it.
    found = find_program(os.path.expanduser(python), path, os.path.expanduser("~"))
    return found, f"{python} is not there, or may not be executed"


def query_packages(python: str, cwd: Optional[str]) -> Query:
    """Ask the interpreter, in the job's environment and without -I, for its version and its packages."""
    return Query([python, "-c", _SCRIPT, *_PACKAGES], deadline_s=_DEADLINE_S, cwd=cwd)


def parse_packages(text: str) -> tuple[str, dict[str, str]]:
    """Version and packages from the answer; what a sitecustomize printed around it is passed over.

    Raises:
        QueryFailed: there is no answer in it.
    """
    lines = [line[len(_MARK) :] for line in text.splitlines() if line.startswith(_MARK)]
    try:
        data = json.loads(lines[-1])
        return str(data["python_version"]), {str(name): str(version) for name, version in data["packages"].items()}
    except (IndexError, ValueError, KeyError) as error:
        raise QueryFailed("the interpreter answered with something else than its packages") from error
