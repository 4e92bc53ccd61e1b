"""Inspection: everything that checks look at, gathered before the first of them runs. Holds no judgement."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from multinode.core.cluster.cluster import Cluster, Node
from multinode.core.cluster.dataplane import Endpoint
from multinode.core.cluster.facts import Interface, NodeFacts
from multinode.core.job.job import Job
from multinode.core.measure.benchmark import Benchmark
from multinode.preflight.network.meeting import Meeting

__all__ = ["Inspection"]


class Inspection(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of the nodes and of what shall run on them.

    Attributes:
        cluster: all nodes of the hostfile.
        facts: by node name, of those that answered.
        job: what shall run; None is any training.
        master_port: port of the rendezvous on node 0.
        endpoints: by node name, the data plane of those that answered; empty where none could be chosen.
        meeting: how connections between them went; None where none were tried.
    """

    cluster: Cluster
    facts: dict[str, NodeFacts]
    job: Job | Benchmark | None = None
    master_port: int = 29500
    endpoints: dict[str, Endpoint] = {}
    meeting: Meeting | None = None

    @property
    def known(self) -> Iterator[tuple[Node, NodeFacts]]:
        """The nodes that answered, with their facts, in node-rank order."""
        for node in self.cluster.nodes:
            found = self.facts.get(node.name)
            if found is not None:
                yield node, found

    @property
    def links(self) -> Iterator[tuple[Node, Interface]]:
        """The data-plane interface of each node that has one, in node-rank order."""
        for node, found in self.known:
            endpoint = self.endpoints.get(node.name)
            for interface in found.interfaces:
                if endpoint is not None and interface.name == endpoint.ifname:
                    yield node, interface
