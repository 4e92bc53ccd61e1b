from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from multinode.transport.agent import build_archive

from .localnode import LocalNode


@pytest.fixture(scope="session")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("agent") / "agent.pyz"
    path.write_bytes(build_archive())
    return path


@pytest.fixture
def node(tmp_path: Path, archive: Path) -> Iterator[LocalNode]:
    """A node of its own for each test; no process may be left on it."""
    home = tmp_path / "home"
    home.mkdir()
    local = LocalNode(home, archive)
    yield local
    local.expect_empty()
