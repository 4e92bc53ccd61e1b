"""Ports: the rendezvous port can be bound and reached, and so can the ephemeral ports of collectives."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from multinode.check.connectivity import Attempted
from multinode.check.rule import CheckFinding, CheckRule, CheckRules, Inspection, listed, meeting_check
from multinode.cluster.facts import Interface
from multinode.job.planning import RENDEZVOUS_PORTS
from multinode.stats.unknown import or_none

_MASTER_PORT = CheckRules("master-port")
_PORTS = CheckRules("ports")
_LINK = CheckRules("link")

PORT_IN_USE = _MASTER_PORT.error(
    about="MASTER_PORT is in use on node 0",
    message="the rendezvous port {port} is {user}, so the workers could not connect",
    hint="end this process, or choose another port: --master-port {other}",
)
MASTER_PORT_BLOCKED = _MASTER_PORT.error(
    about="a firewall blocks MASTER_PORT, but not other ports",
    message="{callers} cannot reach its rendezvous port {port} ({error}), but other ports are reachable. The cause is "
    "probably a firewall rule. The rendezvous would hang",
    hint="choose an open port with --master-port, or open ports on {node}. The first command opens only port {port} "
    "(launch with --master-port {port}). The second command opens the range from which launches choose a port:\nsudo "
    "ufw allow proto tcp from {network} to any port {port}\nsudo ufw allow proto tcp from {network} to any port "
    "{choice}",
)
EPHEMERAL_BLOCKED = _PORTS.error(
    about="ephemeral ports between nodes are blocked, but MASTER_PORT is not",
    message="{callers} cannot reach its ephemeral ports (tried: {ports} at {addr}; {error}). NCCL and gloo listen on "
    "such ports, so the rendezvous may work, but the first collective would hang",
    hint="the cause is usually a firewall on {node}. List its rules, and allow the nodes with ufw or iptables; with "
    "nft, delete the rule that the list shows:\nsudo nft list ruleset\nsudo iptables -S\nsudo ufw allow proto tcp "
    "from {network} to any port {first}:{last}\nsudo iptables -I INPUT -s {network} -p tcp -j ACCEPT",
)
UNREACHABLE = _PORTS.error(
    about="a node cannot be reached on the data plane (no route, refused, timed out)",
    message="{callers} cannot reach it at {addr} on any tested port ({error}), so collectives would hang or fail",
    hint="{way!s}",
)
CALLER_BLOCKED = _PORTS.error(
    about="a node cannot connect to the others, but they can connect to each other",
    message="it cannot reach {peers} ({error}), but other nodes can. The cause is probably its own firewall or cable",
    hint="run on {node}:\nip route get {addr}\nsudo nft list ruleset\nsudo iptables -S OUTPUT",
)
IMPOSTOR = _PORTS.error(
    about="another machine responds at a node's data-plane address",
    message="another machine responds to {callers} at {addr}. Two machines have this address, or a proxy or NAT is "
    "between the nodes",
    hint="correct addr= or ifname= in the hostfile (arping -D finds a duplicate address). To see the addresses of "
    "{node}, run there:\nip address show",
)
LARGE_PACKETS_LOST = _LINK.error(
    about="the path MTU is too small: large packets are lost without an error",
    message="small packets from {callers} reach it at {addr}, but large packets are lost (the MTU of its NIC is "
    "{mtu}). The rendezvous would work, but the first collective would hang. A switch or tunnel on the path probably "
    "has a smaller MTU",
    hint="set the smallest MTU of the path on every node:\nsudo ip link set dev {ifname} mtu 1500",
)

_LAST_PORT = 65535
_USUAL_RANGE = (32768, 60999)
_SHOWN_PORTS = 4
_WAYS = {
    "refused": (
        "a firewall on {node} probably rejects the connection. List its rules, and allow the nodes:",
        "sudo nft list ruleset",
        "sudo ufw allow proto tcp from {network}",
    ),
    "timed out": (
        (
            "if the first command shows {addr} on {node}, a firewall probably drops the packets. The second command "
            "lets them pass:"
        ),
        "ip address show dev {ifname}",
        "sudo ufw allow proto tcp from {network}",
    ),
}
_NO_WAY = (
    (
        "the address is wrong or a cable is unplugged: correct addr= or ifname= in the hostfile; to see the route, run "
        "this on {caller}:"
    ),
    "ip route get {addr}",
)


class _Edge(NamedTuple):
    """The result of one node at another."""

    caller: str
    peer: str
    trouble: CheckRule
    error: str  # in a word
    ports: tuple[int, ...]  # that failed


@meeting_check
def check_master_port(inspection: Inspection) -> Iterator[CheckFinding]:
    """MASTER_PORT is free on node 0."""
    first, port = inspection.cluster.nodes[0].name, inspection.master_port
    refused = [endpoint.failed.get(port) for endpoint in inspection.connectivity.listening if endpoint.node == first]
    asked = [fact for node, facts in inspection.known if node.name == first for fact in facts.ports]
    users = [
        f"in use by {fact.user or 'another process'}" for fact in asked if fact.port == port and fact.taken is True
    ]
    user = next((user for user in (*users, *refused) if user is not None), None)
    if user is not None:
        yield PORT_IN_USE.found(first, port=port, user=user, other=port + 1 if port < _LAST_PORT else port - 1)


@meeting_check
def check_ports(inspection: Inspection) -> Iterator[CheckFinding]:
    """Nodes reach each other: on MASTER_PORT, on ephemeral ports, with packets of any size."""
    # A node whose link is down is reported by the check of the link.
    down = {node.name for node, interface in inspection.links if not interface.up}
    tried: dict[tuple[str, str], list[Attempted]] = {}
    for attempt in inspection.connectivity.attempts:
        if not {attempt.node, attempt.peer} & down:
            tried.setdefault((attempt.node, attempt.peer), []).append(attempt)
    edges = _causes([edge for pair, attempts in tried.items() for edge in _judge(pair, attempts, inspection)])
    silent = _silent_callers(edges, set(tried))
    for caller in silent:
        mine = [edge for edge in edges if edge.caller == caller]
        yield CALLER_BLOCKED.found(
            caller,
            peers=listed(edge.peer for edge in mine),
            error=mine[0].error,
            addr=inspection.place(mine[0].peer).addr,
        )
    groups: dict[tuple[str, CheckRule, str], list[_Edge]] = {}
    for edge in _one_way([edge for edge in edges if edge.caller not in silent]):
        groups.setdefault((edge.peer, edge.trouble, edge.error), []).append(edge)
    for group in groups.values():
        yield _case(group, inspection)


def _judge(pair: tuple[str, str], attempts: list[Attempted], inspection: Inspection) -> Iterator[_Edge]:
    failed = [(attempt.port, attempt.error) for attempt in attempts if attempt.error is not None]
    if not failed:
        return
    ports, errors = zip(*failed, strict=True)
    if "wrong answer" in errors:
        trouble = IMPOSTOR
    elif set(errors) == {"large packets lost"}:
        trouble = LARGE_PACKETS_LOST
    elif len(failed) == len(attempts):
        trouble = UNREACHABLE
    elif set(ports) != {inspection.master_port}:
        trouble = EPHEMERAL_BLOCKED
    elif pair[1] == inspection.cluster.nodes[0].name:
        trouble = MASTER_PORT_BLOCKED
    else:
        # Only node 0 is the rendezvous.
        return
    yield _Edge(*pair, trouble, errors[0], ports)


def _causes(edges: list[_Edge]) -> list[_Edge]:
    """Without findings that follow from others.

    A stateless firewall also drops the answers to its own node's calls, because they arrive at an ephemeral port: that
    node then reaches nobody that cannot reach its ephemeral ports.
    """
    blocked = {(edge.peer, edge.caller) for edge in edges if edge.trouble is EPHEMERAL_BLOCKED}
    return [edge for edge in edges if not (edge.trouble is UNREACHABLE and (edge.caller, edge.peer) in blocked)]


def _silent_callers(edges: list[_Edge], tried: set[tuple[str, str]]) -> list[str]:
    """Callers that reach no peer, although others reach these peers."""
    failing = {(edge.caller, edge.peer) for edge in edges if edge.trouble in {UNREACHABLE, EPHEMERAL_BLOCKED}}
    reached = {peer for _, peer in tried - failing}
    silent = []
    for caller in dict.fromkeys(edge.caller for edge in edges):
        mine = {pair for pair in tried if pair[0] == caller}
        if len(mine) > 1 and mine <= failing and {peer for _, peer in mine} <= reached:
            silent.append(caller)
    return silent


def _one_way(edges: list[_Edge]) -> list[_Edge]:
    """If two nodes cannot reach each other at all, keep only the finding of the later node."""
    unreachable = {(edge.caller, edge.peer) for edge in edges if edge.trouble is UNREACHABLE}
    kept: dict[tuple[str, str], _Edge] = {}
    for edge in edges:
        back = (edge.peer, edge.caller)
        if not (edge.trouble is UNREACHABLE and back in kept and back in unreachable):
            kept[edge.caller, edge.peer] = edge
    return list(kept.values())


def _case(group: list[_Edge], inspection: Inspection) -> CheckFinding:
    edge = group[0]
    facts, place, nic = inspection.facts.get(edge.peer), inspection.place(edge.peer), inspection.link(edge.peer)
    first, last = (or_none(facts.port_range) if facts else None) or _USUAL_RANGE
    mine = ipaddress.ip_address(place.addr) if place.addr is not None else None
    networks = nic.networks if nic and mine else ()
    network = next((network for network in networks if mine in network), "ADDRESS/LENGTH")
    ports = sorted({port for edge in group for port in edge.ports})[:_SHOWN_PORTS]
    values: dict[str, object] = {
        "node": edge.peer,
        "caller": edge.caller,
        "callers": listed(edge.caller for edge in group),
        "addr": place.addr,
        "port": inspection.master_port,
        "ports": ", ".join(map(str, ports)),
        "choice": f"{RENDEZVOUS_PORTS[0]}:{RENDEZVOUS_PORTS[-1]}",
        "error": edge.error,
        "ifname": place.ifname or "IFNAME",
        "mtu": nic.mtu if nic else None,
        "network": str(network),
        "first": first,
        "last": last,
    }
    way = tuple(line.format_map(values) for line in _WAYS.get(edge.error, _NO_WAY))
    return edge.trouble.found(edge.peer, **values, way=way)


MAX_INTERFACES = 16

# Since this version interfaces that are not RUNNING are skipped, and libvirt's bridges come last.
_RUNNING_SINCE = (2, 28, 3)


class _Pattern(msgspec.Struct, frozen=True, kw_only=True):
    """A parsed value of NCCL_SOCKET_IFNAME: `^` and `=` apply to the whole list."""

    names: tuple[str, ...]
    excludes: bool
    exact: bool

    def takes(self, name: str) -> bool:
        # An empty list after the signs matches every name.
        listed = not self.names or (name in self.names if self.exact else name.startswith(self.names))
        return listed != self.excludes


def takes_by_prefix(spec: str) -> bool:
    """Whether the value may select interfaces that it does not name: prefixes, or exclusions."""
    pattern = _parse(spec)
    return pattern.excludes or not pattern.exact or not pattern.names


def select_interfaces(interfaces: Sequence[Interface], spec: str | None, version: str | None) -> tuple[Interface, ...]:
    """The interfaces that NCCL uses: the bootstrap listens on the first, NET/Socket sends over all of them.

    Without `=` an entry of NCCL_SOCKET_IFNAME (`spec`) is a prefix: `eth1` also matches `eth10`; a single character is
    ignored. An unknown version of NCCL gets the rules before 2.28.3, so that none that NCCL may use is left out.
    """
    recent = _is_recent(version)
    usable = [
        interface for interface in interfaces if interface.addresses and (not recent or interface.running is not False)
    ]
    if spec is not None and len(spec) > 1:
        return _matching(spec, usable)
    choices = ("ib", "^docker,lo,virbr" if recent else "^docker,lo", "docker", "lo", "virbr")
    return next(filter(None, (_matching(choice, usable) for choice in choices)), ())


def _parse(spec: str) -> _Pattern:
    rest = spec.removeprefix("^")
    entries = rest.removeprefix("=").split(",")
    # A port may follow a name; it does not matter here.
    names = tuple(name for name in (entry.split(":")[0] for entry in entries) if name)
    return _Pattern(names=names, excludes=spec.startswith("^"), exact=rest.startswith("="))


def _matching(spec: str, interfaces: Sequence[Interface]) -> tuple[Interface, ...]:
    pattern = _parse(spec)
    return tuple(interface for interface in interfaces if pattern.takes(interface.name))[:MAX_INTERFACES]


def _is_recent(version: str | None) -> bool:
    numbers = re.match(r"(\d{1,4})\.(\d{1,4})\.(\d{1,4})", version or "")
    return numbers is not None and tuple(int(number) for number in numbers.groups()) >= _RUNNING_SINCE
