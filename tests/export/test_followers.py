"""Live exports beside a launch: what fails is told once, and what does not end is killed."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import msgspec
import pytest

from multinode.export.followers import Followers
from multinode.export.target import Target
from tests.profile.observing import RUN, store_observed

DEADLINE_S = 600.0


def test_an_export_that_fails_is_told_once_and_the_other_is_written(tmp_path: Path) -> None:
    directory = store_observed(tmp_path)
    (tmp_path / "file").touch()
    told: list[str] = []
    targets = [Target("tensorboard", f"{tmp_path}/file"), Target("prometheus", f"{tmp_path}/run.prom")]
    followers = Followers(targets, tmp_path, told.append)
    with directory.lock():
        for _ in range(3):
            followers.follow(RUN.run_id)
        deadline = time.monotonic() + DEADLINE_S
        while not told:
            assert time.monotonic() < deadline
            followers.follow(RUN.run_id)
            time.sleep(0.05)
    followers.close()
    (warning,) = told
    assert warning.startswith(f"warning: the export to tensorboard:{tmp_path}/file failed: error: ")
    assert f"({directory}/export-1-tensorboard.log)" in warning
    assert "multinode_summary" in (tmp_path / "run.prom").read_text()


def test_an_export_that_does_not_end_is_killed(tmp_path: Path) -> None:
    """A server that takes the connection and never answers."""
    directory = store_observed(tmp_path)
    directory.write("run.json", msgspec.structs.replace(RUN, status="running", ended_s=None))
    told: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(DEADLINE_S)
        target = Target("mlflow", f"http://127.0.0.1:{server.getsockname()[1]}")
        followers = Followers([target], tmp_path, told.append, end_s=0.0)
        with directory.lock():
            followers.follow(RUN.run_id)
            (pid,) = (one.process.pid for one in followers._followers)  # noqa: SLF001 - it is seen to be gone
            connection, _ = server.accept()
        with connection:
            followers.close()
    assert told == [f"warning: the export to {target} was killed 0 s after the end of the run"]
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
