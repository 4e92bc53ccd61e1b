from __future__ import annotations

from collections.abc import Iterator

import pytest

from multinode.transport.ssh import SshTransport

from .sshd import Sshd, running_sshd


@pytest.fixture(scope="session")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    with running_sshd(tmp_path_factory.mktemp("sshd")) as server:
        yield server


@pytest.fixture
def ssh() -> Iterator[SshTransport]:
    transport = SshTransport(connect_timeout_s=5.0)
    yield transport
    transport.close()
