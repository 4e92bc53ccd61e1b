"""Inspection: the input of all checks, gathered before the first one runs. Makes no judgement."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from multinode.check.connectivity import ConnectivityResult
from multinode.cluster.cluster import Cluster, Node
from multinode.cluster.dataplane import Endpoint
from multinode.cluster.facts import Interface, NodeFacts
from multinode.errors import UsageError
from multinode.job.code_tree import CodeTree
from multinode.job.job import Job, JobEnvironment, LlamaFactoryJob
from multinode.job.planning import workers_of_nodes
from multinode.records.benchmark import Benchmark

_NOWHERE = Endpoint(addr=None, ifname=None)


class Inspection(msgspec.Struct, frozen=True, kw_only=True):
    """What is known about the nodes and the job."""

    cluster: Cluster  # all nodes of the hostfile
    facts: dict[str, NodeFacts]  # by node name, of those that answered
    master_port: int  # port of the rendezvous on node 0
    job: Job | Benchmark | None = None  # what shall run; None is any training
    workers: int | None = None  # on each node, where that is asked for; None is as hostfile and GPUs have it
    environment: JobEnvironment = JobEnvironment()  # what the command line adds to the job on every node
    # by node name, the data plane of those that answered; empty where none could be chosen
    endpoints: dict[str, Endpoint] = {}
    # how connections between them went; empty where none were tried
    connectivity: ConnectivityResult = ConnectivityResult()
    controller_cwd: str | None = None  # the directory of the launch; None is not known
    # the files that are copied to the nodes, in which the job runs there; None is the node's own directory
    code: CodeTree | None = None
    # paths of the job that are not on this machine, each with the one whose name is nearest, if any
    absent_here: dict[str, str | None] = {}

    @property
    def known(self) -> Iterator[tuple[Node, NodeFacts]]:
        """The nodes that answered, with their facts, in node-rank order."""
        for node in self.cluster.nodes:
            found = self.facts.get(node.name)
            if found is not None:
                yield node, found

    @property
    def links(self) -> Iterator[tuple[Node, Interface]]:
        """The interface for data of each node that has one, in node-rank order."""
        for node, _ in self.known:
            interface = self.link(node.name)
            if interface is not None:
                yield node, interface

    @property
    def cards(self) -> dict[str, Interface]:
        """The same by node name, without loopback."""
        return {node.name: link for node, link in self.links if link.kind != "loopback"}

    @property
    def training(self) -> LlamaFactoryJob | None:
        """The job, if it is a LLaMA-Factory training."""
        return self.job if isinstance(self.job, LlamaFactoryJob) else None

    def link(self, node: str) -> Interface | None:
        """A node's interface for data; None if unknown."""
        interfaces = self.facts[node].interfaces if node in self.facts else ()
        return next((one for one in interfaces if one.name == self.place(node).ifname), None)

    def env(self, node: Node) -> dict[str, str]:
        """The job's variables on a node that answered: its own, the hostfile's, the command line's."""
        return self.facts[node.name].env | node.env | self.environment.env

    def place(self, node: str) -> Endpoint:
        """A node's endpoint; empty if unknown."""
        return self.endpoints.get(node, _NOWHERE)

    def require_workers(self) -> dict[str, int]:
        """Workers of each node that answered (of all if none did): as asked for, or from hostfile and GPUs."""
        nodes = tuple(node for node, _ in self.known) or self.cluster.nodes
        workers = workers_of_nodes(msgspec.structs.replace(self.cluster, nodes=nodes), self.facts, self.workers)
        return dict(zip((node.name for node in nodes), workers, strict=True))

    def workers_of_nodes(self) -> tuple[int, ...] | None:
        """Workers of each node, in order; None if one has too few, or did not answer and the others differ.

        A node that did not answer is assumed to be like the others.
        """
        try:
            workers = self.require_workers()
        except UsageError:
            return None
        if len(workers) < len(self.cluster.nodes) and len(set(workers.values())) > 1:
            return None
        usual = max(workers.values())
        return tuple(workers.get(node.name, usual) for node in self.cluster.nodes)
