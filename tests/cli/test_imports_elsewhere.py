"""The command where there is no Linux: it is imported, plans, and says of the lab alone that it needs Linux."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PLAN = "launch --dry-run --hosts hostfiles/two4090.txt -- train.py"


def test_the_command_is_imported_without_linux_and_the_lab_says_that_it_needs_it() -> None:
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("elsewhere.py"), "--version", PLAN, "lab up", "lab status"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    ended = [line for line in done.stdout.splitlines() if " exited " in line]
    assert ended == ["--version exited 0", f"{PLAN} exited 0", "lab up exited 2", "lab status exited 1"]
    assert int(done.stdout.split()[0]) > 200
    assert "192.0.2.12" in done.stdout
    assert "error: the lab needs Linux; this is darwin" in done.stderr
