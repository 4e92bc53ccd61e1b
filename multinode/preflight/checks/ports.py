"""Ports: the rendezvous can be bound and reached, and so can the ephemeral ports of every collective."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Iterator

import msgspec

from multinode.core.check.finding import Finding, Rule
from multinode.core.cluster.facts import NodeFacts
from multinode.preflight.inspection import Inspection
from multinode.preflight.network.meeting import Attempted

__all__ = ["check_master_port", "check_ports"]

PORT_IN_USE = Rule(
    check="master-port",
    severity="error",
    catches="MASTER_PORT is in use on node 0, by which process and user",
    message="port {port}, the rendezvous, is {user}: the workers could not find each other there",
    hint="end that process, or choose another port: --master-port {other}",
)
MASTER_PORT_BLOCKED = Rule(
    check="master-port",
    severity="error",
    catches="a firewall blocks MASTER_PORT alone",
    message="{callers} cannot reach its port {port}, the rendezvous ({error}), and other ports of it can be reached: "
    "a firewall blocks this one, and the rendezvous would hang",
    hint="on {node}, let it in: sudo ufw allow proto tcp from {network} to any port {port}; or choose another port: "
    "--master-port",
)
EPHEMERAL_BLOCKED = Rule(
    check="ports",
    severity="error",
    catches="ephemeral ports are blocked between nodes, while MASTER_PORT is open",
    message="{callers} cannot reach its ports {ports} at {addr} ({error}): the rendezvous will work, and the first "
    "collective will hang, because NCCL and gloo listen on any of the ephemeral ports",
    hint="on {node} a firewall stands before them (see: sudo nft list ruleset; sudo iptables -S). Let the nodes in: "
    "sudo ufw allow proto tcp from {network} to any port {first}:{last}; with iptables: sudo iptables -I INPUT -s "
    "{network} -p tcp -j ACCEPT; with nft: take out the rule that the list shows",
)
UNREACHABLE = Rule(
    check="ports",
    severity="error",
    catches="a node cannot be reached on the data plane at all: no route, refused, timed out",
    message="{callers} cannot reach it at {addr} on any port ({error}): no collective can work",
    hint="{way!s}",
)
CALLER_BLOCKED = Rule(
    check="ports",
    severity="error",
    catches="a node cannot reach out: every other node is reached by all but this one",
    message="it cannot reach {peers} ({error}), and others can: its own firewall or cable is in the way",
    hint="on {node}, see: ip route get {addr}; sudo nft list ruleset; sudo iptables -S OUTPUT",
)
IMPOSTOR = Rule(
    check="ports",
    severity="error",
    catches="somebody else answers at a node's data-plane address",
    message="what answers {callers} at {addr} is not it: two machines have this address, or a proxy or NAT stands "
    "between",
    hint="on {node}: ip address show; correct addr= or ifname= in the hostfile (arping -D finds a double address)",
)
LARGE_PACKETS_LOST = Rule(
    check="link",
    severity="error",
    catches="path MTU: small packets pass and large ones vanish without a message",
    message="small packets from {callers} reach it at {addr}, large ones vanish (its card sends {mtu} bytes a packet): "
    "the rendezvous will work and the first gradients will hang. A switch or tunnel on the way passes less",
    hint="give every node the MTU that all of the path passes; on each node: sudo ip link set dev {ifname} mtu 1500",
)

_LAST_PORT = 65535
_USUAL_RANGE = (32768, 60999)
_SHOWN_PORTS = 4
_WAYS = {
    "refused": "on {node} a firewall rejects it: sudo nft list ruleset; let the nodes in: "
    "sudo ufw allow proto tcp from {network}",
    "timed out": "is {addr} the right address? On {node}: ip address show dev {ifname}. If it is, a firewall drops the "
    "packets: sudo ufw allow proto tcp from {network}",
}
_NO_WAY = (
    "the address is wrong, or a cable is out: on {caller}: ip route get {addr}; correct addr= or ifname= in the "
    "hostfile"
)


class Edge(msgspec.Struct, frozen=True):
    """What one node found at another.

    Attributes:
        error: in a word.
        ports: that failed.
    """

    caller: str
    peer: str
    trouble: Rule
    error: str
    ports: tuple[int, ...]


def check_master_port(inspection: Inspection) -> Iterator[Finding]:
    """MASTER_PORT is free on node 0."""
    first = inspection.cluster.nodes[0].name
    port = inspection.master_port
    users = dict(inspection.facts[first].port_users) if first in inspection.facts else {}
    for listening in inspection.meeting.listening if inspection.meeting else ():
        if listening.node == first:
            users = {str(taken): reason for taken, reason in listening.failed.items()} | users
    user = users.get(str(port))
    if user is not None:
        known = user if user.startswith("in use") else f"in use by {user}"
        yield PORT_IN_USE.found(first, port=port, user=known, other=port + 1 if port < _LAST_PORT else port - 1)


def check_ports(inspection: Inspection) -> Iterator[Finding]:
    """Nodes reach each other on the data plane: on MASTER_PORT, on ephemeral ports, with packets of any size."""
    down = {node.name for node, interface in inspection.links if not interface.up}
    tried = _by_pair(inspection, down)
    edges = _causes([edge for pair, attempts in tried.items() for edge in _judge(pair, attempts, inspection)])
    silent = _silent_callers(edges, set(tried))
    for caller in silent:
        mine = [edge for edge in edges if edge.caller == caller]
        yield CALLER_BLOCKED.found(
            caller,
            peers=_listed(edge.peer for edge in mine),
            error=mine[0].error,
            addr=_addr(inspection, mine[0].peer),
        )
    others = [edge for edge in edges if edge.caller not in silent]
    groups: dict[tuple[str, str, str], list[Edge]] = {}
    for edge in _one_way(others):
        groups.setdefault((edge.peer, edge.trouble.catches, edge.error), []).append(edge)
    for group in groups.values():
        yield _finding(group, inspection)


def _by_pair(inspection: Inspection, down: set[str]) -> dict[tuple[str, str], list[Attempted]]:
    """Attempts by caller and peer; those of a node whose card is down are told by the check of the link."""
    pairs: dict[tuple[str, str], list[Attempted]] = {}
    for attempt in inspection.meeting.attempts if inspection.meeting else ():
        if not {attempt.node, attempt.peer} & down:
            pairs.setdefault((attempt.node, attempt.peer), []).append(attempt)
    return pairs


def _judge(pair: tuple[str, str], attempts: list[Attempted], inspection: Inspection) -> Iterator[Edge]:
    failed = [attempt for attempt in attempts if attempt.error is not None]
    if not failed:
        return
    errors = {str(attempt.error) for attempt in failed}
    error = str(failed[0].error)
    trouble: Rule | None
    if "wrong answer" in errors:
        trouble = IMPOSTOR
    elif errors == {"large packets lost"}:
        trouble = LARGE_PACKETS_LOST
    elif len(failed) == len(attempts):
        trouble = UNREACHABLE
    elif all(attempt.port == inspection.master_port for attempt in failed):
        # It matters on node 0 alone: nobody else is the rendezvous.
        trouble = MASTER_PORT_BLOCKED if pair[1] == inspection.cluster.nodes[0].name else None
    else:
        trouble = EPHEMERAL_BLOCKED
    if trouble is not None:
        yield Edge(*pair, trouble, error, tuple(sorted(attempt.port for attempt in failed)))


def _causes(edges: list[Edge]) -> list[Edge]:
    """Without those that follow from others.

    A firewall that knows no connections drops the answers to its own node's calls as well, because they come to an
    ephemeral port: that node then reaches nobody who is kept from its ephemeral ports.
    """
    blocked = {(edge.peer, edge.caller) for edge in edges if edge.trouble is EPHEMERAL_BLOCKED}
    return [edge for edge in edges if not (edge.trouble is UNREACHABLE and (edge.caller, edge.peer) in blocked)]


def _silent_callers(edges: list[Edge], tried: set[tuple[str, str]]) -> list[str]:
    """Nodes that fail to reach every peer, where each of these peers is reached by somebody else."""
    failing = {(edge.caller, edge.peer) for edge in edges if edge.trouble in {UNREACHABLE, EPHEMERAL_BLOCKED}}
    callers = dict.fromkeys(edge.caller for edge in edges)
    return [caller for caller in callers if _is_silent(caller, failing, tried)]


def _is_silent(caller: str, failing: set[tuple[str, str]], tried: set[tuple[str, str]]) -> bool:
    peers = [peer for one, peer in tried if one == caller]
    return len(peers) > 1 and all(
        (caller, peer) in failing
        and any(other != caller and other_peer == peer for other, other_peer in tried - failing)
        for peer in peers
    )


def _one_way(edges: list[Edge]) -> list[Edge]:
    """Where two nodes do not reach each other at all, one of the two says it: that of the later node."""
    unreachable = {(edge.caller, edge.peer) for edge in edges if edge.trouble is UNREACHABLE}
    kept: list[Edge] = []
    for edge in edges:
        told = any((one.caller, one.peer) == (edge.peer, edge.caller) for one in kept)
        if not (told and edge.trouble is UNREACHABLE and (edge.peer, edge.caller) in unreachable):
            kept.append(edge)
    return kept


def _finding(group: list[Edge], inspection: Inspection) -> Finding:
    first = group[0]
    values = _values(first, inspection)
    values["callers"] = _listed(edge.caller for edge in group)
    values["ports"] = ", ".join(
        str(port) for port in sorted({port for edge in group for port in edge.ports})[:_SHOWN_PORTS]
    )
    values["way"] = _WAYS.get(first.error, _NO_WAY).format_map(values)
    return first.trouble.found(first.peer, **values)


def _values(edge: Edge, inspection: Inspection) -> dict[str, object]:
    found = inspection.facts.get(edge.peer)
    endpoint = inspection.endpoints.get(edge.peer)
    ifname = endpoint.ifname if endpoint else None
    first, last = (found.port_range if found else None) or _USUAL_RANGE
    return {
        "node": edge.peer,
        "caller": edge.caller,
        "addr": _addr(inspection, edge.peer),
        "port": inspection.master_port,
        "error": edge.error,
        "ifname": ifname or "IFNAME",
        "mtu": next((one.mtu for one in found.interfaces if one.name == ifname), None) if found else None,
        "network": _network(found, ifname),
        "first": first,
        "last": last,
    }


def _network(found: NodeFacts | None, ifname: str | None) -> str:
    for interface in found.interfaces if found else ():
        if interface.name == ifname and interface.addresses:
            return str(ipaddress.ip_interface(interface.addresses[0]).network)
    return "ADDRESS/LENGTH"


def _addr(inspection: Inspection, node: str) -> str | None:
    endpoint = inspection.endpoints.get(node)
    return endpoint.addr if endpoint else None


def _listed(names: Iterable[str]) -> str:
    each = list(dict.fromkeys(names))
    return each[0] if len(each) == 1 else f"{', '.join(each[:-1])} and {each[-1]}"
