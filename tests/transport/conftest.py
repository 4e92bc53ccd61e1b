from __future__ import annotations

from collections.abc import Iterator

import pytest

from multinode.transport.base import Transport
from multinode.transport.fabric_ssh import FabricTransport
from multinode.transport.openssh import OpensshTransport

from .sshd import Sshd, running_sshd


@pytest.fixture(scope="session")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    with running_sshd(tmp_path_factory.mktemp("sshd")) as server:
        yield server


@pytest.fixture(params=["openssh", "fabric"])
def ssh(request: pytest.FixtureRequest) -> Iterator[Transport]:
    transport = make_transport(request.param)
    yield transport
    transport.close()


def make_transport(name: str) -> OpensshTransport | FabricTransport:
    """The transport of this name, with less patience than by default."""
    return (OpensshTransport if name == "openssh" else FabricTransport)(connect_timeout_s=5.0)
