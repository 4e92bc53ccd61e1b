"""What connects to the nodes: the `ssh` program where there is one, unless something else is asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from multinode.cluster.cluster import Node
from multinode.launch.context import _open_transport
from multinode.transport.fabric_ssh import FabricTransport
from multinode.transport.openssh import OpensshTransport
from multinode.transport.slurm import SlurmTransport
from tests import make

CLUSTER = make.cluster("no-such-node.invalid")


@pytest.mark.parametrize(
    ("asked", "has_ssh", "kind"),
    [
        ("", True, OpensshTransport),
        ("", False, FabricTransport),
        ("fabric", True, FabricTransport),
        ("openssh", True, OpensshTransport),
    ],
)
def test_ssh_connects_where_it_is_and_fabric_where_it_is_not_or_is_asked_for(
    asked: str, *, has_ssh: bool, kind: type[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MULTINODE_SSH", asked)
    if not has_ssh:
        monkeypatch.setenv("PATH", str(tmp_path))
    transport = _open_transport(CLUSTER, local=False)
    assert type(transport) is kind
    transport.close()


def test_lines_that_name_a_slurm_job_are_reached_by_its_steps_which_no_run_outlives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    allocated = make.cluster(Node(name="a", slurm_job=7), Node(name="b", slurm_job=7))
    transport = _open_transport(allocated, local=False)
    assert isinstance(transport, SlurmTransport)
    assert not transport.starts_early
    assert "--detach does not work in an allocation: Slurm kills all processes" in str(transport.why_no_detach())
    assert _open_transport(CLUSTER, local=False).why_no_detach() is None
