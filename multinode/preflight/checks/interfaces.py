"""Interfaces: each node's data plane is a network that its peers reach, and is what the kernel, NCCL and gloo take."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Iterator

from multinode.core.check.finding import Finding, Rule
from multinode.core.cluster.dataplane import Endpoint
from multinode.core.cluster.facts import Interface, NodeFacts, Route
from multinode.preflight.grouping import group_findings, listed
from multinode.preflight.inspection import Inspection
from multinode.preflight.nccl_sockets import select_interfaces

__all__ = ["check_hostnames", "check_media", "check_routes", "check_subnets", "check_unset_interface"]

NO_ROUTE = Rule(
    check="interface",
    severity="error",
    catches="a node has no route to a peer's data-plane address",
    message="it has no route to {peers} ({addr}: {reason}): no collective gets there from here",
    hint="on {node}: {command!s}; or name addresses of one network for all nodes: addr= in the hostfile",
)
UNANSWERABLE_ROUTE = Rule(
    check="interface",
    severity="error",
    catches="a node sends to a peer from an address of another network, which the peer has no card in",
    message="it listens at {mine} ({ifname}) and sends to {peers} from {source} ({other}), a network in which {peers} "
    "has no card: the answers get lost, or a filter drops the packets (rp_filter), and the first collective hangs",
    hint="on {node}: {command!s}",
)
OTHER_ROUTE = Rule(
    check="interface",
    severity="warning",
    catches="asymmetric routes: a node listens on one interface and sends to its peers over another",
    message="it listens at {mine} ({ifname}) and sends to {peers} from {source} ({other}): NCCL_SOCKET_IFNAME settles "
    "where a node listens, the kernel's route over which card it sends, so that half of the traffic takes the "
    "other network at its speed",
    hint="on {node}: {command!s}",
)
SHARED_SUBNET = Rule(
    check="interface",
    severity="warning",
    catches="two interfaces of a node are in one subnet",
    message="{ifname} and {others} are both in {network}: the kernel answers for either address on either card and "
    "sends over whichever comes first, so that traffic meant for {ifname} takes the other and connections time out",
    hint="on {node}, put {others!s} into a subnet of its own or bond the cards{command!s}",
)
NCCL_WOULD_TAKE = Rule(
    check="interface",
    severity="note",
    catches="NCCL, left to itself, would take docker, bridge or VPN interfaces; multinode's launches name another",
    message="left to itself, NCCL {version} would take {taken} on {nodes}, and {virtual} leads to no other node, or "
    "slowly: launches by hand may hang; those of multinode name the interface",
    hint="for launches by hand, on {nodes!s}: export NCCL_SOCKET_IFNAME=={ifname}",
)
NCCL_WILL_TAKE = Rule(
    check="interface",
    severity="warning",
    catches="NCCL would take docker, bridge or VPN interfaces, and nothing names the right one",
    message="nothing settles the interface of {nodes}: NCCL {version} would take {taken}, and {virtual} leads to no "
    "other node, or slowly: the first collective may hang",
    hint="name the interface of the training network for each node in the hostfile: ifname=",
)
WIRELESS = Rule(
    check="interface",
    severity="warning",
    catches="the data plane goes over wireless",
    message="its data plane, {ifname}, is wireless: slow, shared with others, and now and then interrupted, while "
    "every step of the training waits for the slowest node",
    hint="{way!s}",
)
TUNNEL = Rule(
    check="interface",
    severity="warning",
    catches="the data plane goes through a VPN or a tunnel",
    message="its data plane, {ifname}, is a VPN or tunnel ({driver}): every packet is wrapped by the processor, large "
    "ones may not fit, and gradients travel at a fraction of the card's speed",
    hint="{way!s}",
)
NAME_MISLEADS = Rule(
    check="hostname",
    severity="note",
    catches="a node's own name resolves to loopback, or not at all; multinode's launches do not depend on it",
    message="the name of {nodes} resolves to {target}: gloo, left to itself, would listen there, where no other node "
    "gets to. Launches by hand are hit; those of multinode name the interface",
    hint="for launches by hand, on {nodes!s}: export GLOO_SOCKET_IFNAME={ifname}; or put the address of {ifname} "
    "before the name in /etc/hosts",
)
NAME_DECIDES = Rule(
    check="hostname",
    severity="warning",
    catches="a node's own name resolves to loopback, or not at all, and nothing names the interface",
    message="the name of {nodes} resolves to {target}, and nothing settles the interface: gloo would listen there, "
    "where no other node gets to, and fail with connectFullMesh",
    hint="name the interface of the training network for each node in the hostfile: ifname=; or put its address before "
    "the name in /etc/hosts",
)

# Interfaces that software makes for its own, by the names that it gives them; their number follows.
_VIRTUAL_NAMES = re.compile(
    r"docker|br-|veth|virbr|vnet|vmnet|vboxnet|lxc|lxd|podman|cni|flannel|cali|cilium|kube|tailscale|wg|zt|tun|tap"
)
_TUNNEL_NAMES = re.compile(r"tailscale|wg|zt|tun|tap")
_TUNNEL_DRIVERS = {"wireguard", "tun", "tap", "vxlan", "geneve", "gre", "gretap", "ipip", "sit"}


def check_routes(inspection: Inspection) -> Iterator[Finding]:
    """The kernel of each node sends to its peers from the address at which it listens."""
    peers = {node.addr: node.name for node in inspection.cluster.nodes if node.addr is not None}
    for name, found, endpoint in _placed(inspection):
        if endpoint is None or endpoint.addr is None:
            continue
        groups: dict[tuple[Rule, str | None], list[Route]] = {}
        for route in found.routes:
            if route.peer in peers and peers[route.peer] != name:
                rule = _judge_route(route, found, endpoint, inspection.facts.get(peers[route.peer]))
                if rule is UNANSWERABLE_ROUTE and _reached(inspection, name, peers[route.peer]):
                    rule = OTHER_ROUTE
                if rule is not None:
                    groups.setdefault((rule, route.source), []).append(route)
        for (rule, _), routes in groups.items():
            first = routes[0]
            yield rule.found(
                name,
                peers=listed([peers[route.peer] for route in routes]),
                addr=first.peer,
                reason=first.error,
                mine=endpoint.addr,
                ifname=endpoint.ifname,
                source=first.source,
                other=first.ifname,
                command=_route_command(first, endpoint, inspection.facts.get(peers[first.peer])),
            )


def check_subnets(inspection: Inspection) -> Iterator[Finding]:
    """No other interface of a node is in the subnet of its data plane."""
    for name, found, endpoint in _placed(inspection):
        mine = next((one for one in found.interfaces if endpoint is not None and one.name == endpoint.ifname), None)
        if mine is None or endpoint is None:
            continue
        network = next((one for one in _networks(mine) if _holds(one, endpoint.addr)), None)
        others = [one for one in found.interfaces if one is not mine and one.up and network in _networks(one)]
        if network is None or not others:
            continue
        spare = "".join(
            f"; where {one.name} is not needed: sudo ip address del {address} dev {one.name}"
            for one in others
            for address in one.addresses
            # Without the address that SSH came over its user would be locked out.
            if _holds(network, address.split("/")[0]) and address.split("/")[0] != found.ssh_address
        )
        yield SHARED_SUBNET.found(
            name,
            ifname=mine.name,
            others=listed([one.name for one in others]),
            network=network,
            command=spare,
        )


def check_unset_interface(inspection: Inspection) -> Iterator[Finding]:
    """Whether NCCL, left to itself, would take interfaces over which no other node is reached."""
    cases: dict[Rule, list[tuple[str, dict[str, str]]]] = {NCCL_WOULD_TAKE: [], NCCL_WILL_TAKE: []}
    for name, found, endpoint in _placed(inspection):
        ifname = endpoint.ifname if endpoint else None
        if found.nccl_version is None:
            continue
        taken = select_interfaces(found.interfaces, None, found.nccl_version)
        virtual = [one.name for one in taken if one.name != ifname and _is_virtual(one)]
        if virtual:
            values = {
                "version": found.nccl_version,
                "taken": listed([one.name for one in taken]),
                "virtual": listed(virtual),
                "ifname": ifname or "",
            }
            cases[NCCL_WOULD_TAKE if ifname else NCCL_WILL_TAKE].append((name, values))
    for rule, found_cases in cases.items():
        yield from group_findings(rule, found_cases)


def check_media(inspection: Inspection) -> Iterator[Finding]:
    """The data plane of each node is a cable, and no tunnel."""
    for node, interface in inspection.links:
        rule = _medium(interface)
        if rule is not None and len(inspection.cluster.nodes) > 1:
            wired = [one for one in inspection.facts[node.name].interfaces if _is_wired(one)]
            yield rule.found(
                node.name,
                ifname=interface.name,
                driver=interface.driver or "virtual",
                way=_wired_way(node.name, wired),
            )


def check_hostnames(inspection: Inspection) -> Iterator[Finding]:
    """Whether each node's own name resolves to an address that other nodes get to, which is what gloo would take."""
    cases: dict[Rule, list[tuple[str, dict[str, str]]]] = {NAME_MISLEADS: [], NAME_DECIDES: []}
    for name, found, endpoint in _placed(inspection):
        ifname = endpoint.ifname if endpoint else None
        target = _misleading_target(found, ifname)
        if target is not None:
            rule = NAME_MISLEADS if ifname else NAME_DECIDES
            cases[rule].append((name, {"target": target, "ifname": ifname or ""}))
    for rule, found_cases in cases.items():
        yield from group_findings(rule, found_cases)


def _placed(inspection: Inspection) -> Iterator[tuple[str, NodeFacts, Endpoint | None]]:
    """Nodes that have somebody to talk to, with their place on the data plane where it is known."""
    if len(inspection.cluster.nodes) > 1:
        for node, found in inspection.known:
            endpoint = inspection.endpoints.get(node.name)
            # Whoever is the only one to answer stands on loopback, and that says nothing of its place among others.
            if endpoint is None or endpoint.ifname != "lo":
                yield node.name, found, endpoint


def _judge_route(route: Route, found: NodeFacts, mine: Endpoint, peer: NodeFacts | None) -> Rule | None:
    if _address(route.peer) is None or route.source == route.peer:
        return None
    if route.source == mine.addr:
        # The right address, sent out by another card.
        return None if route.ifname in {None, mine.ifname} else OTHER_ROUTE
    if route.source is None:
        return NO_ROUTE
    networks = [network for one in found.interfaces for network in _networks(one)]
    if any(_holds(network, route.source) and _holds(network, mine.addr) for network in networks):
        # Two cards in one subnet: that is told by itself.
        return None
    # A peer that tells no interfaces is not said to lack one.
    theirs = [network for one in (peer.interfaces if peer else ()) for network in _networks(one)]
    answered = not theirs or any(_holds(network, route.source) for network in theirs)
    return OTHER_ROUTE if answered else UNANSWERABLE_ROUTE


def _reached(inspection: Inspection, name: str, peer: str) -> bool:
    attempts = inspection.meeting.attempts if inspection.meeting else ()
    return any({one.node, one.peer} == {name, peer} and one.error is None for one in attempts)


def _route_command(route: Route, mine: Endpoint, peer: NodeFacts | None) -> str:
    networks = [network for one in (peer.interfaces if peer else ()) for network in _networks(one)]
    network = next((one for one in networks if _holds(one, route.peer)), None)
    way = "" if network is not None and _holds(network, mine.addr) else " via ROUTER"
    command = f"sudo ip route replace {network or route.peer}{way} dev {mine.ifname} src {mine.addr}"
    return f"{command} (ROUTER is the gateway to there in the network of {mine.ifname})" if way else command


def _is_virtual(interface: Interface) -> bool:
    # A bridge of another name, br0 or vmbr0, is how many a machine has its card.
    return interface.kind == "virtual" or _VIRTUAL_NAMES.match(interface.name) is not None


def _medium(interface: Interface) -> Rule | None:
    if interface.kind == "wireless":
        return WIRELESS
    tunnel = interface.driver in _TUNNEL_DRIVERS or (
        interface.kind == "virtual" and _TUNNEL_NAMES.match(interface.name) is not None
    )
    return TUNNEL if tunnel else None


def _is_wired(interface: Interface) -> bool:
    usable = interface.up and bool(interface.addresses) and interface.kind in {"ethernet", "infiniband"}
    return usable and not _is_virtual(interface) and _medium(interface) is None


def _wired_way(node: str, wired: Iterable[Interface]) -> str:
    names = [f"{one.name} ({one.addresses[0].split('/')[0]})" for one in wired]
    if names:
        return f"name a wired interface for every node in the hostfile, ifname=; {node} has: {listed(names)}"
    return "connect the nodes by cable, and name that interface for every node in the hostfile: ifname="


def _misleading_target(found: NodeFacts, ifname: str | None) -> str | None:
    """What is wrong with what the node's own name resolves to; None where it is well, or was not found out."""
    if found.hostname_address is None:
        reason = found.missing.get("hostname_address")
        return None if reason is None else f"no address ({reason})"
    address = _address(found.hostname_address)
    if address is None or address.is_loopback:
        return f"{found.hostname_address}, which is loopback"
    owner = next((one for one in found.interfaces if _has_address(one, found.hostname_address)), None)
    if owner is None:
        return f"{found.hostname_address}, which is no address of the node" if found.interfaces else None
    elsewhere = owner.name != ifname and _is_virtual(owner)
    return f"{found.hostname_address}, which is on {owner.name}" if elsewhere else None


def _networks(interface: Interface) -> list[ipaddress.IPv4Network | ipaddress.IPv6Network]:
    return [ipaddress.ip_interface(address).network for address in interface.addresses]


def _has_address(interface: Interface, address: str | None) -> bool:
    return address in {each.split("/")[0] for each in interface.addresses}


def _holds(network: ipaddress.IPv4Network | ipaddress.IPv6Network, text: str | None) -> bool:
    address = _address(text)
    return address is not None and address in network


def _address(text: str | None) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text or "")
    except ValueError:
        return None
