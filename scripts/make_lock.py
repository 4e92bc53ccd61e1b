"""Resolves what scripts/setup installs anew, to the newest releases, and writes requirements/lock.txt.

It holds one version of everything but torch and what comes with it, for Linux and any Python from 3.11 on, and the
SHA-256 of each file that pip may take. uv resolves, in an environment of its own that is deleted afterwards.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
import tempfile
import tomllib
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parent.parent
_LOCK = _ROOT / "requirements/lock.txt"
_UV = "uv==0.13.9"
_DEADLINE_S = 600
# Their builds depend on the machine's GPU (docs/adr/0012).
_NOT_LOCKED = re.compile(r"(?:torch|torchvision|torchaudio|triton|cuda-.+|nvidia-(?!ml-py$).+)$")
# Not held to what is installed: their newest releases need a later 3.11 than some systems have.
_DOCS = ("torch", "mkdocs", "pymdown")
# Wheels for Linux and CPython 3.11 to 3.14.
_TAKEN = re.compile(
    r"-(?:(?:py2\.)?py3\d*(?:\.\w+)*-none|cp31[1-4]-(?:cp31[1-4]|none)|cp3\d+-abi3(?:\.\w+)*)"
    r"-(?:any|(?:[\w.]*\.)?(?:many)?linux\w*_(?:x86_64|aarch64)(?:\.\w+)*)\.whl$"
)


def main() -> int:
    """Write the lock file, or with --check say whether it was made for this pyproject.toml."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where another is asked for")
    parser.add_argument("--of", metavar="PYTHON", help="lock what this interpreter has, as it was tested")
    asked = parser.parse_args()
    head = f"# Written by scripts/make_lock.py for {_wanted()}.\n"
    if asked.check:
        if _LOCK.read_text().startswith(head):
            return 0
        print("requirements/lock.txt is not for what pyproject.toml and scripts/setup ask for: scripts/make_lock.py")
        return 1
    _LOCK.parent.mkdir(exist_ok=True)
    _LOCK.write_text(head + "".join(f"{line}\n" for line in _lines(_resolve(asked.of)["packages"])))
    return 0


def _wanted() -> str:
    """What the lock file answers, in a few letters."""
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]
    asked = [project["requires-python"], project["dependencies"], project["optional-dependencies"], _torch()]
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:16]


def _torch() -> str:
    pinned = re.search(r"torch==[\d.]+", (_ROOT / "scripts/setup").read_text())
    return pinned[0] if pinned else sys.exit("scripts/setup pins no torch")


def _resolve(python: str | None) -> dict[str, Any]:
    freeze = (python, "-m", "pip", "freeze", "--exclude-editable") if python is not None else ("true",)
    tested = subprocess.run(freeze, check=True, timeout=_DEADLINE_S, capture_output=True, text=True).stdout
    with tempfile.TemporaryDirectory() as folder:
        venv.create(f"{folder}/venv", with_pip=True)
        _run(f"{folder}/venv/bin/python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", _UV)
        pinned = re.findall(r"^[\w.-]+==[\w.]+$", tested, re.MULTILINE)
        same = (line for line in pinned if not line.startswith(_DOCS))
        Path(folder, "same.txt").write_text("\n".join((_torch(), *same)))
        _run(
            *(f"{folder}/venv/bin/uv", "pip", "compile", "--quiet", "--no-cache", "pyproject.toml"),
            *("--extra", "dev", "--extra", "train", "--universal", "--python-version", "3.11"),
            *("--constraint", f"{folder}/same.txt", "--output-file", f"{folder}/pylock.toml"),
        )
        return tomllib.loads(Path(folder, "pylock.toml").read_text())


def _run(*argv: str) -> None:
    subprocess.run(argv, cwd=_ROOT, check=True, timeout=_DEADLINE_S, stdout=subprocess.DEVNULL)


def _lines(packages: list[dict[str, Any]]) -> Iterator[str]:
    """A line per package."""
    for package in packages:
        if _NOT_LOCKED.match(package["name"]):
            continue
        files = [wheel for wheel in package.get("wheels", ()) if _TAKEN.search(wheel["url"])] or [package["sdist"]]
        marker = re.sub(r"^python_full_version >= '3\.11'(?: and |$)", "", package.get("marker", ""))
        hashes = sorted(f"--hash=sha256:{file['hashes']['sha256']}" for file in files)
        yield " ".join([f"{package['name']}=={package['version']}", *([f"; {marker}"] if marker else []), *hashes])


if __name__ == "__main__":
    sys.exit(main())
