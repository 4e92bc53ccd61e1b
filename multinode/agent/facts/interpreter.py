"""The job's interpreter: which one it is, and what is installed for it. Reads metadata and imports nothing of it."""

from __future__ import annotations

import json
import os
import re
from typing import Any, NamedTuple, Optional

from ..programs import find_program
from ..queries import Query, QueryFailed

__all__ = ["Installed", "find_interpreter", "parse_packages", "query_packages"]

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
# The wheels of NCCL, by the major version of the CUDA that torch was built with.
_NCCL_WHEELS = {"11": "nvidia-nccl-cu11", "12": "nvidia-nccl-cu12", "13": "nvidia-nccl-cu13"}
_CUDA_VERSION = re.compile(r"""^cuda\b[^=\n]*=\s*['"](\d+)(\.[\d.]+)?['"]""", re.MULTILINE)
_MARK = "multinode-packages:"
# Runs under any Python 3.8+. The directory it is started in is no part of an installation, hence the first line.
_SCRIPT = f"""
import sys; sys.path[:] = [p for p in sys.path if p]
import json, os, platform
from importlib.util import find_spec
from importlib.metadata import PackageNotFoundError, version
found = {{}}
for name in sys.argv[1:]:
    try:
        found[name] = version(name)
    except PackageNotFoundError:
        pass
torch = None
try:
    # Finding is not importing: torch takes seconds, and its version file holds text enough.
    spec = find_spec("torch")
    with open(os.path.join(os.path.dirname(spec.origin), "version.py"), encoding="utf-8", errors="replace") as file:
        torch = file.read(16384)
except (AttributeError, ImportError, OSError, TypeError, ValueError):
    pass
answer = {{"python_version": platform.python_version(), "packages": found, "torch": torch}}
print("\\n{_MARK}" + json.dumps(answer))
"""


class Installed(NamedTuple):
    """What the job's interpreter has.

    Attributes:
        python_version: its own version.
        packages: versions by name.
        cuda_version: CUDA that its torch was built with.
        nccl_version: NCCL of its torch.
        missing: why there is no cuda_version or nccl_version.
    """

    python_version: str
    packages: dict[str, str]
    cuda_version: Optional[str]
    nccl_version: Optional[str]
    missing: dict[str, str]


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
    return Query([python, "-c", _SCRIPT, *_PACKAGES, *_NCCL_WHEELS.values()], deadline_s=_DEADLINE_S, cwd=cwd)


def parse_packages(text: str) -> Installed:
    """The answer's content; what a sitecustomize printed around it is passed over.

    Raises:
        QueryFailed: there is no answer in it.
    """
    lines = [line[len(_MARK) :] for line in text.splitlines() if line.startswith(_MARK)]
    try:
        data = json.loads(lines[-1])
        return _read_answer(data)
    except (LookupError, ValueError, TypeError, AttributeError) as error:
        raise QueryFailed("the interpreter answered with something else than its packages") from error


def _read_answer(data: dict[str, Any]) -> Installed:
    packages = {str(name): str(version) for name, version in data["packages"].items()}
    wheels = {major: packages.pop(name) for major, name in _NCCL_WHEELS.items() if name in packages}
    cuda, nccl, missing = None, None, {}
    built = _CUDA_VERSION.search(data["torch"] or "")
    if built is not None:
        cuda = "".join(filter(None, built.groups()))
        nccl = wheels.get(built.group(1))
    else:
        missing["cuda_version"] = _no_cuda(data["torch"])
    if nccl is None:
        missing["nccl_version"] = missing.get("cuda_version", "torch was not installed with a wheel of NCCL")
    return Installed(str(data["python_version"]), packages, cuda, nccl, missing)


def _no_cuda(torch: Optional[str]) -> str:
    return "torch is not installed" if torch is None else "torch was built without CUDA"
