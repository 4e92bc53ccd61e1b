"""What other verbs need of a running lab: its hostfile, and nodes that see the controller's files as they are now."""

from __future__ import annotations

from pathlib import Path

from multinode.core.cluster.cluster import Cluster, Node
from multinode.lab.access import SSH_CONFIG
from multinode.lab.cluster import load_lab, refresh

__all__ = ["is_lab_node", "lab_hostfile", "refresh_lab"]


def lab_hostfile() -> Path | None:
    """The hostfile of the running lab; None where there is none."""
    lab = load_lab()
    return Path(lab.hostfile) if lab is not None else None


def refresh_lab(cluster: Cluster) -> None:
    """Where the cluster is the lab: drop what its nodes remember of files that the controller has made since."""
    lab = load_lab()
    if lab is not None and cluster.source == lab.hostfile:
        refresh(lab)


def is_lab_node(node: Node) -> bool:
    """Whether it is one of a lab's, which share this machine's processors; also of a lab that is down."""
    return node.ssh_config == str(SSH_CONFIG)
