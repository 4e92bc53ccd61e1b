"""Nodes: which machines a verb is about, as a hostfile or its stand-ins name them. Prints nothing."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from multinode.cluster.cluster import Cluster, local_cluster
from multinode.cluster.hostfile import parse_hostfile
from multinode.errors import UsageError
from multinode.lab.cluster import lab_hostfile
from multinode.records.hostfile import find_hosts, load_hostfile
from multinode.records.settings import load_settings
from multinode.transport.slurm import read_allocation


class Nodes(NamedTuple):
    """A cluster, and the text of the hostfile that describes it."""

    cluster: Cluster
    hostfile: str


def load_nodes(
    hosts: str | None = None, count: int | None = None, note: Callable[[str], None] = lambda _: None
) -> Nodes:
    """The nodes that `hosts` names, as `--hosts` of the command does: a file, `FILE:GROUP`, `lab` or `slurm`.

    Args:
        hosts: None takes $MULTINODE_HOSTS, else multinode.toml, else the running lab.
        count: only so many, the first ones; None is all.
        note: is told which hostfile was taken where `hosts` names none, and what of an inventory is ignored.

    Raises:
        UsageError: no hostfile, a wrong one, or fewer nodes than asked for.
    """
    path, named_by = find_hosts(hosts, dict(os.environ), load_settings(Path.cwd()), lab_hostfile())
    cluster, text = read_allocation(os.environ) if path is None else load_hostfile(path, note)
    if hosts is None:
        note(f"hostfile: {cluster.source} ({named_by})")
    else:
        cluster = msgspec.structs.replace(cluster, hosts=hosts)
    if count is not None and count > len(cluster.nodes):
        raise UsageError(f"{count} nodes were asked for, and {cluster.source} has {len(cluster.nodes)}")
    return Nodes(cluster if count is None else cluster.first(count), text)


def local_nodes(workers: int, python: str = sys.executable) -> Nodes:
    """This machine as the one node, for `connect(..., local=True)`: nothing of it goes over SSH.

    Args:
        workers: how many it may have.
        python: the interpreter of the training environment.
    """
    return Nodes(local_cluster(workers, python), "# This machine, without SSH\n")


def parse_nodes(hostfile: str) -> Nodes:
    """The nodes that the text of a hostfile describes, one line per node: `gpu-a addr=192.0.2.1 slots=4`.

    Raises:
        HostfileError: a line is wrong.
    """
    return Nodes(parse_hostfile(hostfile, "the text"), hostfile)
