from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def make(folder: Path) -> str:
    command: list[str | Path] = [sys.executable, ROOT / "scripts/make_tiny.py", folder]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=True)
    return str(done.stdout.splitlines()[-1])


@pytest.mark.torch
@pytest.mark.usefixtures("tiny")
def test_the_tiny_training_is_made_once_with_the_same_bytes_and_mended_when_damaged(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    shutil.copytree(ROOT / "assets/tiny", folder)
    assert len(json.loads((folder / "data/tiny.json").read_text())) == 400
    first = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    assert make(folder) == f"{folder}: complete"

    (folder / "model/model.safetensors").write_bytes(b"torn")
    assert make(folder) == f"{folder}: 3.7 M parameters, 400 samples"
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == first
