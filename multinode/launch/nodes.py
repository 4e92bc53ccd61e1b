"""Nodes: the machines of a command, from a hostfile or its alternatives. Prints nothing."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from multinode.check.gpus import check_gpus_free
from multinode.check.inspection import Inspection
from multinode.check.probe import Questions, probe
from multinode.check.rule import Finding
from multinode.cluster.cluster import Cluster, local_cluster
from multinode.cluster.facts import Gpu, NodeFacts
from multinode.cluster.hostfile import parse_hostfile
from multinode.errors import UsageError
from multinode.launch.context import Prepared, RunContext
from multinode.records.hostfile import find_hosts, load_allocation, load_hostfile
from multinode.records.plan import LaunchPlan
from multinode.records.settings import load_settings


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
    from multinode.lab.state import load_lab  # noqa: PLC0415 - nothing else of a launch is about the lab

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


# A process that has just ended needs seconds to free its memory; another training does not end for us.
PATIENCE_S = 60.0
_EVERY_S = 2.0


def wait_for_gpus(
    prepared: Prepared, context: RunContext, *, patience_s: float = PATIENCE_S, every_s: float = _EVERY_S
) -> Finding | None:
    """Wait until the GPUs are free, or the user asks to stop; returns the process that still holds one.

    The facts of the launch are used first, so that free GPUs, and nodes without any, need no further probe.
    """
    cluster = prepared.what.cluster
    held = find_holder(cluster, prepared.plan, prepared.facts)
    if held is not None:
        context.say(f"waiting up to {patience_s:.0f} s: {held.node}: {held.message}")
    end = time.monotonic() + patience_s
    while held is not None and time.monotonic() < end and not context.stop.count:
        time.sleep(every_s)
        found = probe(context.agent, cluster, Questions(packages=False)).require()
        held = find_holder(cluster, prepared.plan, {one.node: one for one in found})
    return held


def find_holder(cluster: Cluster, plan: LaunchPlan, facts: dict[str, NodeFacts]) -> Finding | None:
    """The first GPU of the plan held by another process; None if all are free, or without GPUs."""
    planned = {node.node: node.gpus for node in plan.nodes}
    nodes = tuple(
        msgspec.structs.replace(node, gpus=planned.get(node.name) or (), slots=None) for node in cluster.nodes
    )
    strangers = {
        name: msgspec.structs.replace(found, gpus=tuple(map(_of_strangers, found.gpus)))
        for name, found in facts.items()
    }
    cluster = msgspec.structs.replace(cluster, nodes=nodes)
    inspection = Inspection(cluster=cluster, facts=strangers, master_port=plan.master_port)
    return next(check_gpus_free(inspection), None)


def _of_strangers(gpu: Gpu) -> Gpu:
    return msgspec.structs.replace(
        gpu, processes=tuple(msgspec.structs.replace(process, run_id=None) for process in gpu.processes)
    )
