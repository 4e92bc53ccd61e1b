"""MLflow's tracking server on loopback, in an environment of its own: it takes 850 MB, and other releases than ours."""

from __future__ import annotations

import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from multinode.records.run_directory import RunDirectory
from tests.export.test_exports import check_mlflow, export_alone
from tests.profile.observing import store_observed
from tests.warm import free_port

pytestmark = pytest.mark.thorough

START_S, STOP_S = 300.0, 30.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    program = Path(sys.prefix) / "mlflow/bin/mlflow"
    assert program.exists(), "scripts/setup --thorough installs it"
    port = free_port()
    place = [
        "--backend-store-uri",
        f"sqlite:///{tmp_path}/mlflow.db",
        "--default-artifact-root",
        f"{tmp_path}/files",
    ]
    listen = ["--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    with (tmp_path / "server.log").open("wb") as log:
        process = subprocess.Popen([program, "server", *place, *listen], cwd=tmp_path, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + START_S
        while not answers(f"http://127.0.0.1:{port}/health"):
            assert process.poll() is None, (tmp_path / "server.log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(STOP_S)


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=STOP_S):  # noqa: S310 - the server above
            return True
    except (urllib.error.URLError, OSError):
        return False


def test_a_tracking_server_has_the_figures(tmp_path: Path, server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    directory: RunDirectory = store_observed(tmp_path / "runs")
    monkeypatch.setenv("MULTINODE_RUNS", str(tmp_path / "runs"))
    export_alone("last", f"mlflow:{server}")
    check_mlflow(server, directory)
