from __future__ import annotations

import os
from pathlib import Path

import pytest

from multinode.node.rundir import RunDir


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setenv("HOME", str(tmp_path))
    found = RunDir("r")
    Path(found.path).mkdir(parents=True)
    return found


def test_what_is_written_is_read_and_nothing_else_remains(run: RunDir) -> None:
    run.write("status.json", {"state": "running"})
    assert run.read("status.json") == {"state": "running"}
    assert [path.name for path in Path(run.path).iterdir()] == ["status.json"]


@pytest.mark.parametrize("text", [b"", b"{", b"[1]", b"\xff"])
def test_what_cannot_be_read_right_now_is_none(run: RunDir, text: bytes) -> None:
    (Path(run.path) / "status.json").write_bytes(text)
    assert run.read("status.json") is None


def test_without_room_for_a_new_file_the_old_one_is_overwritten(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    run.write("status.json", {"state": "running", "message": "x" * 300})
    # A directory in the place of the temporary file: it cannot be made, as on a full disk.
    monkeypatch.setattr(os, "urandom", bytes)
    for name in ("status", "other"):
        (Path(run.path) / f".{name}.json.{'00' * 8}.partial").mkdir()
    run.write("status.json", {"state": "ended"})
    assert run.read("status.json") == {"state": "ended"}
    with pytest.raises(OSError, match="exists"):
        run.write("other.json", {})
