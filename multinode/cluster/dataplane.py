"""The interface that each node trains over: from the hostfile, or on the fastest network that all nodes share.

`job/plan_notes.py` compares it with the routes of the kernel; `check/connectivity.py` tests connections.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping

import msgspec

from multinode.cluster.cluster import Cluster, Node
from multinode.cluster.facts import Interface, NodeFacts
from multinode.errors import UsageError
from multinode.stats.unknown import or_empty, or_none

# Interfaces that never join two training machines unless the hostfile names them.
_NEVER_CHOSEN = {"loopback", "bridge", "virtual"}
_IPV4 = 4

_Network = ipaddress.IPv4Network | ipaddress.IPv6Network
_Address = ipaddress.IPv4Interface | ipaddress.IPv6Interface


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A node's address for data."""

    addr: str | None  # None if unknown
    ifname: str | None  # the interface of that address; None if unknown
    link_gbit_per_s: float | None = None  # negotiated link speed
    ifnames: tuple[str, ...] = ()  # the interfaces in the hostfile, if several
    assumed: tuple[str, ...] = ()  # what the hostfile says and no probe has confirmed


def choose_endpoints(cluster: Cluster, facts: Mapping[str, NodeFacts]) -> tuple[Endpoint, ...]:
    """Each node's endpoint, in node-rank order."""
    shared = _shared_network(cluster, facts)
    alone = len(cluster.nodes) == 1
    places = ((node, _endpoint(node, facts.get(node.name), shared, alone=alone)) for node in cluster.nodes)
    return tuple(
        msgspec.structs.replace(place, ifnames=node.ifnames) if len(node.ifnames) > 1 else place
        for node, place in places
    )


def is_link_local(addr: str | None) -> bool:
    """Whether it is an address of 169.254.0.0/16 or fe80::/10 (RFC 3927, RFC 4291)."""
    return addr is not None and ipaddress.ip_address(addr).is_link_local


def _endpoint(node: Node, facts: NodeFacts | None, shared: _Network | None, *, alone: bool) -> Endpoint:
    if facts is None or not or_empty(facts.interfaces):
        return _unprobed(node, alone=alone)
    there = list(_addresses(facts))
    at = _at_address(node, there, node.addr) if node.addr is not None else None
    _require_named(node, facts)
    if at is not None:
        return at
    if node.ifname is not None:
        return next(_place(*place) for place in there if place[0].name == node.ifnames[0])
    if alone:
        return Endpoint(addr="127.0.0.1", ifname="lo")
    for interface, address in there:
        if shared is not None and address in shared:
            return _place(interface, address)
    names = ", ".join(
        f"{i.name} {' '.join(i.addresses)}" for i in or_empty(facts.interfaces) if i.kind not in _NEVER_CHOSEN
    )
    raise UsageError(
        f"the nodes share no network; this node has: {names or 'none'}",
        node=node.name,
        hint="set each node's address in the hostfile: addr=<address that the other nodes can reach>",
    )


def _place(interface: Interface, address: _Address) -> Endpoint:
    return Endpoint(addr=str(address.ip), ifname=interface.name, link_gbit_per_s=interface.speed_gbit_per_s)


def _unprobed(node: Node, *, alone: bool) -> Endpoint:
    if node.addr is None and alone:
        return Endpoint(addr="127.0.0.1", ifname="lo")
    assumed = []
    if node.addr is None:
        assumed.append("addr: the node's name, unless the hostfile has addr=")
    if node.ifname is None:
        assumed.append("ifname: unknown without a probe, unless the hostfile has ifname=")
    ifname = next(iter(node.ifnames), None)
    return Endpoint(addr=node.addr or node.name, ifname=ifname, assumed=tuple(assumed))


def _at_address(node: Node, there: list[tuple[Interface, _Address]], addr: str) -> Endpoint:
    for interface, address in there:
        if str(address.ip) == addr:
            if node.ifnames and interface.name not in node.ifnames:
                raise UsageError(
                    f"addr={addr} is on {interface.name}, but the hostfile has ifname={node.ifname}",
                    node=node.name,
                    hint=f"set ifname={interface.name}, or remove ifname=",
                )
            return _place(interface, address)
    has = ", ".join(f"{address.ip} ({interface.name})" for interface, address in there)
    raise UsageError(
        f"it has no address {addr}",
        node=node.name,
        hint=f"correct addr= in the hostfile; the node has: {has or 'none'}",
    )


def _require_named(node: Node, facts: NodeFacts) -> None:
    ports = tuple(f"{port.device}:{port.port}" for port in facts.rdma)
    interfaces = tuple(interface.name for interface in or_empty(facts.interfaces))
    addressed = {interface.name for interface in or_empty(facts.interfaces) if interface.addresses}
    for key, noun, named, usable, there in (
        ("ifname", "interface {} with an address", node.ifnames, addressed, interfaces),
        ("hca", "RDMA device {}", node.hcas, {*ports, *(port.device for port in facts.rdma)}, ports),
    ):
        for name in named:
            if name not in usable:
                raise UsageError(
                    f"it has no {noun.format(name)}",
                    node=node.name,
                    hint=f"correct {key}= in the hostfile; the node has: {', '.join(there) or 'none'}",
                )


def _addresses(facts: NodeFacts) -> Iterator[tuple[Interface, _Address]]:
    for interface in or_empty(facts.interfaces):
        for text in interface.addresses:
            yield interface, ipaddress.ip_interface(text)


def _shared_network(cluster: Cluster, facts: Mapping[str, NodeFacts]) -> _Network | None:
    if any(node.name not in facts for node in cluster.nodes):
        return None
    shared: set[_Network] | None = None
    for node in cluster.nodes:
        mine = {address.network for _, address in _candidates(node, facts[node.name])}
        shared = mine if shared is None else shared & mine
    return max(shared or (), key=lambda network: _preference(network, cluster, facts), default=None)


def _candidates(node: Node, facts: NodeFacts) -> Iterator[tuple[Interface, _Address]]:
    settled = node.addr is not None or node.ifname is not None
    for interface, address in _addresses(facts):
        named = str(address.ip) == node.addr or interface.name in node.ifnames[:1]
        if named or (not settled and interface.up and interface.kind not in _NEVER_CHOSEN):
            yield interface, address


def _preference(network: _Network, cluster: Cluster, facts: Mapping[str, NodeFacts]) -> tuple[float, bool, bool, int]:
    slowest = float("inf")
    over_ssh = True
    for node in cluster.nodes:
        node_facts = facts[node.name]
        speeds = [i.speed_gbit_per_s or 0.0 for i, address in _addresses(node_facts) if address.network == network]
        slowest = min(slowest, max(speeds, default=0.0))
        over_ssh = over_ssh and _is_in(or_none(node_facts.ssh_address), network)
    # With both, NCCL and gloo take IPv4 by default.
    return slowest, network.version == _IPV4, over_ssh, -int(network.network_address)


def _is_in(address: str | None, network: _Network) -> bool:
    return address is not None and ipaddress.ip_address(address) in network
