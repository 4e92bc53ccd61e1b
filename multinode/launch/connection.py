"""The nodes of a command, from a hostfile or its alternatives, and the connections to them. Prints nothing."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from multinode.cluster.cluster import Cluster, local_cluster
from multinode.cluster.hostfile import parse_hostfile
from multinode.errors import UsageError
from multinode.records.hostfile import find_hosts, load_allocation, load_hostfile
from multinode.records.progress import RunProgress
from multinode.records.run_directory import runs_root
from multinode.records.settings import find_fan_out, find_ssh_client, load_settings
from multinode.transport.base import Transport, set_fan_out

if TYPE_CHECKING:
    from multinode.launch.context import RunContext
    from multinode.transport.fabric_ssh import FabricTransport
    from multinode.transport.openssh import OpensshTransport

# An interrupt does not wait for frozen nodes.
_HASTE_S = 0.3


@contextlib.contextmanager
def connect(
    cluster: Cluster,
    *,
    runs: Path | None = None,
    say: Callable[[str], None] = lambda _: None,
    observe: Callable[[RunProgress], None] = lambda _: None,
    local: bool = False,
) -> Iterator[RunContext]:
    """Hold the connections to the nodes: steps of their Slurm job if they have one, otherwise SSH.

    Args:
        cluster: the nodes.
        runs: the directory of runs; None is $MULTINODE_RUNS, or `runs` in the working directory.
        say: is called with each stage in a few words.
        observe: is called with the progress of a run, a few times per second.
        local: use this machine as the only node, without SSH.

    Yields:
        The context that every command takes.

    Raises:
        UsageError: only some nodes are in a Slurm job, or $MULTINODE_FAN_OUT or $MULTINODE_SSH is invalid.
    """
    most = find_fan_out(os.environ, load_settings(Path.cwd()))
    if most is not None:
        set_fan_out(most)
    transport = _open_transport(cluster, local=local)
    try:
        # A login takes as long as the remaining imports: both run in parallel.
        from multinode.transport.agent import AgentTransport

        agent = AgentTransport(transport, refresh=_refresher(cluster))
        if not local:
            # A Slurm step needs to know its purpose, and each costs slurmctld work.
            agent.start_early([node for node in cluster.nodes if node.slurm_job is None])
        from multinode.launch.context import RunContext

        try:
            yield RunContext(agent, runs or runs_root(), say=say, observe=observe)
        except KeyboardInterrupt:
            agent.close(_HASTE_S)
            raise
        finally:
            agent.close()
    finally:
        transport.close()


def _refresher(cluster: Cluster) -> Callable[[], None]:
    if any(node.is_virtual for node in cluster.nodes):
        from multinode.lab.cluster import refresh

        return refresh
    return lambda: None


def _open_transport(cluster: Cluster, *, local: bool) -> Transport:
    if local:
        from multinode.transport.local import LocalTransport

        return LocalTransport()
    in_slurm = {node.slurm_job is not None for node in cluster.nodes}
    if len(in_slurm) > 1:
        raise UsageError(f"{cluster.source}: slurm_job= must be on the lines of all nodes or of none")
    if in_slurm == {True}:
        from multinode.transport.slurm import SlurmTransport

        return SlurmTransport()
    return _open_ssh()


def _open_ssh() -> OpensshTransport | FabricTransport:
    """Through the `ssh` program if installed, unless another client is asked for."""
    from multinode.transport.openssh import OpensshTransport, find_ssh

    client = find_ssh_client(os.environ, load_settings(Path.cwd()))
    if client == "openssh" or (client is None and find_ssh() is not None):
        return OpensshTransport()
    from multinode.transport.fabric_ssh import FabricTransport

    return FabricTransport()


class Nodes(NamedTuple):
    """A cluster, and the text of its hostfile."""

    cluster: Cluster
    hostfile: str


def load_nodes(
    hosts: str | None = None, count: int | None = None, note: Callable[[str], None] = lambda _: None
) -> Nodes:
    """The nodes that `hosts` names, as `--hosts` of the command does: a file, `FILE:GROUP`, `lab` or `auto`.

    Args:
        hosts: None takes $MULTINODE_HOSTS, else multinode.toml, else the running lab.
        count: only so many, the first ones; None is all.
        note: is told which hostfile was taken where `hosts` names none, and what of an inventory is ignored; what a
            scheduler gave, as a hostfile.

    Raises:
        UsageError: no hostfile, an invalid one, or fewer nodes than asked for.
    """
    path, named_by = find_hosts(hosts, dict(os.environ), load_settings(Path.cwd()), _lab_hostfile)
    cluster, text = load_allocation(os.environ, note) if path is None else load_hostfile(path, note)
    if hosts is None:
        note(f"hostfile: {cluster.source} ({named_by})")
    else:
        cluster = msgspec.structs.replace(cluster, hosts=hosts)
    if count is not None and count > len(cluster.nodes):
        raise UsageError(f"{count} nodes are requested, but {cluster.source} has {len(cluster.nodes)}")
    return Nodes(cluster if count is None else cluster.first(count), text)


def _lab_hostfile() -> Path | None:
    from multinode.lab.state import load_lab

    lab = load_lab()
    return Path(lab.hostfile) if lab is not None else None


def local_nodes(workers: int, python: str = sys.executable) -> Nodes:
    """This machine as the only node, for `connect(..., local=True)`, without SSH.

    Args:
        workers: maximum number.
        python: the interpreter of the training environment.
    """
    return Nodes(local_cluster(workers, python), "# This machine, without SSH\n")


def parse_nodes(hostfile: str) -> Nodes:
    """The nodes in the text of a hostfile, one line per node: `gpu-a addr=192.0.2.1 slots=4`.

    Raises:
        HostfileError: a line is invalid.
    """
    return Nodes(parse_hostfile(hostfile, "the text"), hostfile)
