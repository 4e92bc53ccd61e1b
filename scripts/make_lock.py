"""Locks what scripts/setup installs: writes requirements/lock.txt with uv.

It has one version of everything but torch and what only its CUDA builds need (docs/adr/0012), and the SHA-256 of each
file that pip may take. Locked versions that fit pyproject.toml stay; with --upgrade, all become the newest.
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
from pathlib import Path

_ROOT = Path(__file__).parent.parent
_LOCK = _ROOT / "requirements/lock.txt"
_UV = "uv==0.13.9"
_DEADLINE_S = 600


def main() -> int:
    """Write the lock file, or with --check say whether it was made for this pyproject.toml."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if pyproject.toml needs another")
    parser.add_argument("--upgrade", action="store_true", help="lock the newest versions")
    asked = parser.parse_args()
    head = f"# Written by scripts/make_lock.py for {_wanted()}.\n"
    if not asked.check:
        _LOCK.write_text(head + _resolve(*["--upgrade"] * asked.upgrade))
    elif not _LOCK.read_text().startswith(head):
        print("requirements/lock.txt is not for what pyproject.toml and scripts/setup ask for: scripts/make_lock.py")
        return 1
    return 0


def _wanted() -> str:
    """A hash of what the lock file was made for."""
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]
    asked = [project["requires-python"], project["dependencies"], project["optional-dependencies"], _torch()]
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:16]


def _torch() -> str:
    pinned = re.search(r"torch==[\d.]+", (_ROOT / "scripts/setup").read_text())
    return pinned[0] if pinned else sys.exit("scripts/setup pins no torch")


def _resolve(*options: str) -> str:
    """A line per package."""
    with tempfile.TemporaryDirectory() as folder:
        locked, constraint = Path(folder, "lock.txt"), Path(folder, "constraint.txt")
        locked.write_text(_LOCK.read_text())
        constraint.write_text(_torch())
        venv.create(f"{folder}/venv", with_pip=True)
        _run(f"{folder}/venv/bin/python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", _UV)
        _run(
            *(f"{folder}/venv/bin/uv", "pip", "compile", "--quiet", "--no-cache", "pyproject.toml", *options),
            *("--extra", "dev", "--extra", "train", "--universal", "--python-version", "3.11"),
            *("--generate-hashes", "--no-header", "--no-annotate"),
            *("--constraint", str(constraint), "--output-file", str(locked)),
        )
        return re.sub(r" \\\n +", " ", locked.read_text())


def _run(*argv: str) -> None:
    subprocess.run(argv, cwd=_ROOT, check=True, timeout=_DEADLINE_S, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    sys.exit(main())
