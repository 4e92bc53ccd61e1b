"""Checks with vermin that what ships to nodes runs on Python 3.9, and that 3.6 can read what says that it is older."""

from __future__ import annotations

import io
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from multinode.transport.agent import build_archive

_VERMIN = Path(sys.executable).with_name("vermin")
_DEADLINE_S = 120


def main() -> int:
    """Print what needs a newer Python."""
    if not _VERMIN.exists():
        print("vermin is not installed in this environment; to install what pyproject.toml asks for: scripts/setup")
        return 1
    with tempfile.TemporaryDirectory() as folder:
        zipfile.ZipFile(io.BytesIO(build_archive())).extractall(folder)
        checked = [_vermin(folder, "3.6", "__main__.py"), _vermin(folder, "3.9", "multinode_agent")]
    return 0 if all(checked) else 1


def _vermin(folder: str, oldest: str, what: str) -> bool:
    argv = [str(_VERMIN), f"--target={oldest}-", "--violations", "--no-tips", "--no-parse-comments", what]
    done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, timeout=_DEADLINE_S, check=False)
    if done.returncode:
        print(f"{what} needs a Python newer than {oldest}:\n{done.stdout}{done.stderr}")
    return done.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
