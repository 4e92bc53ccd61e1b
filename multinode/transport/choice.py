"""Which transport reaches the nodes of a cluster: the one that its lines ask for, otherwise SSH."""

from __future__ import annotations

from importlib import import_module

from multinode.cluster.cluster import Cluster
from multinode.errors import UsageError
from multinode.transport.base import Transport

# By the key of a node's line that asks for it: a module of this folder, with its `TRANSPORT`.
_MODULES = {"slurm_job": "slurm"}


def asked_transport(cluster: Cluster) -> str | None:
    """The module of the transport that the lines of the nodes ask for; None is SSH.

    Raises:
        UsageError: only some of them ask for it.
    """
    for key, module in _MODULES.items():
        asks = {getattr(node, key) is not None for node in cluster.nodes}
        if len(asks) > 1:
            raise UsageError(f"{cluster.source}: {key}= must be on the lines of all nodes or of none")
        if asks == {True}:
            return module
    return None


def choose_transport(cluster: Cluster, ssh_client: str | None) -> type[Transport]:
    """The transport of all nodes.

    Args:
        cluster: the nodes.
        ssh_client: `openssh` or `fabric`; None is the `ssh` program, if it is installed.

    Raises:
        UsageError: only some lines ask for another transport than SSH.
    """
    module = asked_transport(cluster)
    if module is not None:
        asked: type[Transport] = import_module(f"multinode.transport.{module}").TRANSPORT
        return asked
    from multinode.transport.openssh import OpensshTransport, find_ssh

    if ssh_client == "openssh" or (ssh_client is None and find_ssh() is not None):
        return OpensshTransport
    from multinode.transport.fabric_ssh import FabricTransport

    return FabricTransport
