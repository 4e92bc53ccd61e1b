"""Interfaces: each node's network for data is reachable for its peers, and is what the kernel, NCCL and gloo select."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Iterator

from multinode.check.ports import select_interfaces
from multinode.check.rule import Check, CheckFinding, CheckRule, CheckRules, Inspection, listed
from multinode.cluster.dataplane import Endpoint
from multinode.cluster.facts import UNASKED, Interface, NodeFacts, Route
from multinode.stats.unknown import Unknown, or_empty, or_none, reason_of

_INTERFACE = CheckRules("interface")
_HOSTNAME = CheckRules("hostname")

NO_ROUTE = _INTERFACE.error(
    about="a node has no route to the data-plane address of a peer",
    message="it has no route to {peers} ({addr}: {reason}), so its collectives cannot reach {peers}",
    hint="give all nodes addresses in one network (addr= in the hostfile), or run on {node}{gateway!s}:\n{command!s}",
)
UNANSWERABLE_ROUTE = _INTERFACE.error(
    about="a node sends to a peer from a network in which the peer has no interface",
    message="it listens at {mine} ({ifname}) but sends to {peers} from {source} ({other}). No interface of {peers} is "
    "in the network of {source}. Replies are lost, or rp_filter drops the packets, so the first collective hangs",
    hint="run on {node}{gateway!s}:\n{command!s}",
)
OTHER_ROUTE = _INTERFACE.warning(
    about="asymmetric routes: a node listens on one interface and sends over another",
    message="it listens at {mine} ({ifname}) but sends to {peers} from {source} ({other}). NCCL_SOCKET_IFNAME selects "
    "the interface that a node listens on, but the kernel's routes select the interface that it sends over, so half of "
    "the traffic uses the other network",
    hint="run on {node}{gateway!s}:\n{command!s}",
)
SHARED_SUBNET = _INTERFACE.warning(
    about="two interfaces of a node are in one subnet",
    message="{ifname} and {others} are in the same subnet, {network}. The kernel answers for each address on every "
    "interface of the subnet, and sends over the first one, so traffic for {ifname} may use the other interface, and "
    "connections may time out",
    hint="on {node}, put {others!s} into a separate subnet, or bond the interfaces{way!s}",
)
NCCL_WOULD_TAKE = _INTERFACE.note(
    about="by default, NCCL would use docker, bridge or VPN interfaces; multinode sets another interface for its jobs",
    message="by default, NCCL {version} would use {taken} on {nodes}, but the other nodes are unreachable over "
    "{virtual}, or the connection is slow. Manual launches may hang; multinode sets the interface for its jobs",
    hint="for manual launches, run on {nodes!s}:\nexport NCCL_SOCKET_IFNAME=={ifname}",
    by_hand=True,
)
NCCL_WILL_TAKE = _INTERFACE.warning(
    about="NCCL would use docker, bridge or VPN interfaces, because no setting names the right one",
    message="no setting names the interface of {nodes}. NCCL {version} would use {taken}, but the other nodes are "
    "unreachable over {virtual}, or the connection is slow. The first collective may hang",
    hint="set each node's training interface in the hostfile: ifname=",
)
WIRELESS = _INTERFACE.warning(
    about="the data plane is wireless",
    message="its data plane, {ifname}, is wireless. Wireless links are slow, shared and sometimes interrupted, and "
    "every training step waits for the slowest node",
    hint="{way!s}",
)
TUNNEL = _INTERFACE.warning(
    about="the data plane is a VPN or a tunnel",
    message="its data plane, {ifname}, is a VPN or tunnel ({driver}). A CPU encapsulates every packet, large packets "
    "may not fit, and gradients are sent at a fraction of the NIC's speed",
    hint="{way!s}",
)
NAME_MISLEADS = _HOSTNAME.note(
    about="a node's own name resolves to loopback, or not at all; multinode's jobs do not depend on it",
    message="the name of {nodes} resolves to {target}. By default, gloo would listen there, and no other "
    "node could connect. This affects only manual launches; multinode sets the interface for its jobs",
    hint="for manual launches, map the name to the address of {ifname} in /etc/hosts, or run on {nodes!s}:\nexport "
    "GLOO_SOCKET_IFNAME={ifname}",
    by_hand=True,
)
NAME_DECIDES = _HOSTNAME.warning(
    about="a node's own name resolves to loopback, or not at all, and no setting names the interface",
    message="the name of {nodes} resolves to {target}, and no setting names the interface. gloo would listen there, "
    "no other node could connect, and gloo would fail with connectFullMesh",
    hint="set each node's training interface in the hostfile: ifname=, or map the name to its address in /etc/hosts",
)

# Software interfaces, by name without the number.
_VIRTUAL_NAMES = re.compile(
    r"docker|br-|veth|virbr|vnet|vmnet|vboxnet|lxc|lxd|podman|cni|flannel|cali|cilium|kube|tailscale|wg|zt|tun|tap"
)
_TUNNEL_NAMES = re.compile(r"tailscale|wg|zt|tun|tap")
_TUNNEL_DRIVERS = {"wireguard", "tun", "tap", "vxlan", "geneve", "gre", "gretap", "ipip", "sit"}


_Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@Check
def check_routes(inspection: Inspection) -> Iterator[CheckFinding]:
    """Each node's kernel sends to its peers from the address on which it listens."""
    peers = {node.addr: node.name for node in inspection.cluster.nodes if node.addr is not None}
    for name, facts, mine in _placed(inspection):
        groups: dict[tuple[CheckRule, str | None], list[Route]] = {}
        for route in facts.routes if mine.addr is not None else ():
            # The normal case; with many nodes there are as many routes as pairs.
            if route.source == mine.addr and route.ifname in {None, mine.ifname}:
                continue
            if peers.get(route.peer, name) != name:
                theirs = _networks(inspection.facts.get(peers[route.peer]))
                rule = _judge_route(route, facts, mine, theirs)
                if rule is UNANSWERABLE_ROUTE and _reached(inspection, name, peers[route.peer]):
                    rule = OTHER_ROUTE
                if rule is not None:
                    groups.setdefault((rule, or_none(route.source)), []).append(route)
        for (rule, _), routes in groups.items():
            first = routes[0]
            yield rule.found(
                name,
                peers=listed(peers[route.peer] for route in routes),
                addr=first.peer,
                reason=reason_of(first.source),
                mine=mine.addr,
                ifname=mine.ifname,
                source=first.source,
                other=first.ifname,
                **_new_route(first, mine, _networks(inspection.facts.get(peers[first.peer]))),
            )


@Check
def check_subnets(inspection: Inspection) -> Iterator[CheckFinding]:
    """No other interface of a node is in the subnet of its network for data."""
    for name, facts, place in _placed(inspection):
        mine = inspection.link(name)
        network = next((network for network in (mine.networks if mine else ()) if _holds(network, place.addr)), None)
        others = [
            interface
            for interface in or_empty(facts.interfaces)
            if interface is not mine and interface.up and network in interface.networks
        ]
        if mine is None or network is None or not others:
            continue
        spare = tuple(
            f"sudo ip address del {address} dev {other.name}"
            for other in others
            for address in other.addresses
            # Removing the address that SSH came over would lock the user out.
            if _holds(network, address.split("/")[0]) and address.split("/")[0] != facts.ssh_address
        )
        names = listed(other.name for other in others)
        way = (", or remove the address of one that is not needed:", *spare) if spare else ""
        yield SHARED_SUBNET.found(name, ifname=mine.name, others=names, network=network, way=way)


@Check
def check_media(inspection: Inspection) -> Iterator[CheckFinding]:
    """The network for data is wired, and not a tunnel."""
    for node, interface in inspection.links if len(inspection.cluster.nodes) > 1 else ():
        rule = _medium(interface)
        if rule is not None:
            way = _wired_way(node.name, filter(_is_wired, or_empty(inspection.facts[node.name].interfaces)))
            yield rule.found(node.name, ifname=interface.name, driver=interface.driver or "virtual", way=way)


@Check
def check_unset_interface(inspection: Inspection) -> Iterator[CheckFinding]:
    """Whether NCCL, without a setting, would select interfaces that do not reach the other nodes."""
    for name, facts, place in _placed(inspection):
        if isinstance(facts.nccl_version, Unknown):
            continue
        taken = select_interfaces(or_empty(facts.interfaces), None, facts.nccl_version)
        virtual = [interface.name for interface in taken if interface.name != place.ifname and _is_virtual(interface)]
        if virtual:
            yield (NCCL_WOULD_TAKE if place.ifname else NCCL_WILL_TAKE).found(
                name,
                version=facts.nccl_version,
                taken=listed(interface.name for interface in taken),
                virtual=listed(virtual),
                ifname=place.ifname or "",
            )


@Check
def check_hostnames(inspection: Inspection) -> Iterator[CheckFinding]:
    """Whether each node's hostname resolves to an address that other nodes reach, as gloo would use it."""
    for name, facts, place in _placed(inspection):
        target = _misleading_target(facts, place.ifname)
        if target is not None:
            rule = NAME_MISLEADS if place.ifname else NAME_DECIDES
            yield rule.found(name, target=target, ifname=place.ifname or "")


def _placed(inspection: Inspection) -> Iterator[tuple[str, NodeFacts, Endpoint]]:
    for node, facts in inspection.known if len(inspection.cluster.nodes) > 1 else ():
        place = inspection.place(node.name)
        # A single node that answered may use loopback, which says nothing about several.
        if place.ifname != "lo":
            yield node.name, facts, place


def _judge_route(route: Route, facts: NodeFacts, mine: Endpoint, theirs: list[_Network]) -> CheckRule | None:
    if _address(route.peer) is None or route.source == route.peer:
        return None
    if route.source == mine.addr:
        # The right address, sent over another NIC.
        return None if route.ifname in {None, mine.ifname} else OTHER_ROUTE
    if isinstance(route.source, Unknown):
        return NO_ROUTE
    source = route.source
    if any(_holds(network, source) and _holds(network, mine.addr) for network in _networks(facts)):
        # Two NICs in one subnet are reported separately.
        return None
    # A peer that reports no interfaces is not said to lack one.
    answered = not theirs or any(_holds(network, source) for network in theirs)
    return OTHER_ROUTE if answered else UNANSWERABLE_ROUTE


def _reached(inspection: Inspection, name: str, peer: str) -> bool:
    return any(
        {attempt.node, attempt.peer} == {name, peer} and attempt.error is None
        for attempt in inspection.connectivity.attempts
    )


def _new_route(route: Route, mine: Endpoint, theirs: list[_Network]) -> dict[str, str]:
    network = next((network for network in theirs if _holds(network, route.peer)), None)
    way = "" if network is not None and _holds(network, mine.addr) else " via ROUTER"
    command = f"sudo ip route replace {network or route.peer}{way} dev {mine.ifname} src {mine.addr}"
    gateway = f" (ROUTER is the gateway in the network of {mine.ifname})" if way else ""
    return {"command": command, "gateway": gateway}


def _is_virtual(interface: Interface) -> bool:
    # Bridges named br0 or vmbr0 often hold a machine's NIC.
    return interface.kind == "virtual" or _VIRTUAL_NAMES.match(interface.name) is not None


def _medium(interface: Interface) -> CheckRule | None:
    if interface.kind == "wireless":
        return WIRELESS
    named = interface.kind == "virtual" and _TUNNEL_NAMES.match(interface.name)
    return TUNNEL if named or interface.driver in _TUNNEL_DRIVERS else None


def _is_wired(interface: Interface) -> bool:
    usable = interface.up and bool(interface.addresses) and interface.kind in {"ethernet", "infiniband"}
    return usable and not _is_virtual(interface) and _medium(interface) is None


def _wired_way(node: str, wired: Iterable[Interface]) -> str:
    names = listed(f"{interface.name} ({interface.addresses[0].split('/')[0]})" for interface in wired)
    if names:
        return f"name a wired interface for every node in the hostfile (ifname=); {node} has: {names}"
    return "connect the nodes by cable, and name that interface in the hostfile: ifname="


def _misleading_target(facts: NodeFacts, ifname: str | None) -> str | None:
    target = facts.hostname_address
    if isinstance(target, Unknown):
        return None if target == UNASKED else f"no address ({target.reason})"
    address = _address(target)
    if address is None:
        return f"{target}, which is not an IP address"
    if address.is_loopback:
        return f"{target}, which is loopback"
    interfaces = or_empty(facts.interfaces)
    owner = next(
        (interface for interface in interfaces if target in {each.split("/")[0] for each in interface.addresses}),
        None,
    )
    if owner is None:
        return f"{target}, which is no address of the node" if interfaces else None
    return f"{target}, which is on {owner.name}" if owner.name != ifname and _is_virtual(owner) else None


def _networks(facts: NodeFacts | None) -> list[_Network]:
    return [network for interface in (or_empty(facts.interfaces) if facts else ()) for network in interface.networks]


def _holds(network: _Network, text: str | None) -> bool:
    address = _address(text)
    return address is not None and address in network


def _address(text: str | None) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text or "")
    except ValueError:
        return None
