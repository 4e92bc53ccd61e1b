"""init: ask nodes for their facts, and write the hostfile."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from multinode.check.probe import Questions, peer_addresses, probe
from multinode.cluster.cluster import Cluster, Node
from multinode.cluster.dataplane import Endpoint, choose_endpoints
from multinode.cluster.facts import NodeFacts
from multinode.cluster.hostfile import parse_hostfile, render_hostfile
from multinode.errors import NodeFailed, UsageError
from multinode.transport.agent import AgentTransport

_HEAD = """\
# One node a line, in node-rank order; the first is node rank 0. Written by `multinode init` from what the nodes said.
#   slots=   workers          gpus=  ids of their GPUs      addr=  address on the training network
#   ifname=  its interface    python=  interpreter of the training environment
# More keys: workdir= user= port= key= jump= price= env.NAME=
"""


class Described(msgspec.Struct, frozen=True, kw_only=True):
    """What was found."""

    cluster: Cluster  # the nodes with addr, ifname, slots, gpus and python filled in
    text: str  # the hostfile, with comments


def describe_nodes(agent: AgentTransport, cluster: Cluster) -> Described:
    """Probe the nodes and fill in what their lines do not specify.

    Raises:
        NodeError, NodeFailed: a node did not answer; the first of them, with the others in its detail.
    """
    questions = Questions(peers=peer_addresses(cluster.nodes), tools=("torchrun",))
    facts = {found.node: found for found in probe(agent, cluster, questions).require()}
    endpoints, trouble = _endpoints(cluster, facts)
    nodes = tuple(_fill_in(node, facts[node.name], endpoints.get(node.name)) for node in cluster.nodes)
    described = msgspec.structs.replace(cluster, nodes=nodes)
    lines = [_HEAD, *(f"# {line}\n" for line in trouble)]
    for node in nodes:
        lines += ["\n", *(f"# {_one_line(remark)}\n" for remark in _remarks(node, facts[node.name]))]
        lines.append(render_hostfile(msgspec.structs.replace(described, nodes=(node,))))
    text = "".join(lines)
    if parse_hostfile(text, cluster.source).nodes != nodes:
        raise NodeFailed("the nodes' answers do not make a valid hostfile: at least one answer is wrong")
    return Described(cluster=described, text=text)


def _endpoints(cluster: Cluster, facts: Mapping[str, NodeFacts]) -> tuple[dict[str, Endpoint], tuple[str, ...]]:
    try:
        places = choose_endpoints(cluster, facts)
    except UsageError as error:
        return {}, (_one_line(f"No address was chosen. {error}"), _one_line(f"{error.hint}"))
    return {node.name: place for node, place in zip(cluster.nodes, places, strict=True)}, ()


def _fill_in(node: Node, found: NodeFacts, place: Endpoint | None) -> Node:
    gpus = node.gpus
    if gpus is None and node.slots is None and found.visible_gpus:
        gpus = tuple(gpu.index for gpu in found.visible_gpus)
    return msgspec.structs.replace(
        node,
        gpus=gpus,
        slots=node.slots or (len(gpus) if gpus else 1),
        addr=node.addr or (place.addr if place else None),
        ifname=node.ifname or (place.ifname if place else None),
        python=node.python or _python(found),
    )


def _python(found: NodeFacts) -> str | None:
    return found.python if "torch" in found.packages else found.interactive.get("python3")


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _remarks(node: Node, found: NodeFacts) -> Iterator[str]:
    models = ", ".join(dict.fromkeys(gpu.name for gpu in found.gpus)) or "no GPU was found"
    count = f"{len(found.gpus)} x " if found.gpus else ""
    usable = found.memory_limit_gib or found.memory_total_gib
    memory = f", {usable:.0f} GiB of memory" if usable else ""
    torch = f", torch {found.packages['torch']}" if "torch" in found.packages else ""
    yield f"{node.name}: {count}{models}, {found.cores} cores{memory}{torch}"
    for interface in found.interfaces:
        if interface.name in node.ifnames and interface.speed_gbit_per_s:
            yield f"{interface.name}: {interface.speed_gbit_per_s:g} Gbit/s, MTU {interface.mtu}"
    if "torch" not in found.packages:
        yield f"{found.python or 'python3'} has no torch: python= must name the training environment's interpreter"
