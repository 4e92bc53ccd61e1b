from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from multinode.transport.agent import build_archive

from .localnode import PYTHON, LocalNode


@pytest.fixture(scope="session")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("agent") / "agent.pyz"
    path.write_bytes(build_archive())
    # Its copy with compiled modules is made by the first that ends: that is of no test in particular.
    request = b'{"schema": 1, "run_id": "none"}\n'
    command = [*PYTHON, str(path), "runs"]
    subprocess.run(
        command, input=request, stdout=subprocess.DEVNULL, check=True, timeout=600, env={"HOME": str(path.parent)}
    )
    return path


@pytest.fixture
def node(tmp_path: Path, archive: Path) -> Iterator[LocalNode]:
    """A node of its own for each test; no process may be left on it."""
    home = tmp_path / "home"
    home.mkdir()
    local = LocalNode(home, archive)
    yield local
    local.expect_empty()
