"""Links: NICs are as fast and healthy as they should be, have one MTU, and streams reach the link speed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import permutations
from typing import NamedTuple

from multinode.check.rule import Check, CheckFinding, CheckRules, Inspection, disagreements, launch_check
from multinode.cluster.facts import Interface
from multinode.traffic.pair_speeds import Pair, PairSpeed, blame_pairs, least_of_due
from multinode.units import BITS_PER_BYTE, ETHERNET_MTU, format_rate, goodput_gb_per_s

_LINK = CheckRules("link")

LINK_DOWN = _LINK.error(
    about="the data-plane NIC has no link (cable unplugged, switch port off, interface down)",
    message="the training interface {ifname} is down, so other nodes cannot reach this one",
    hint="if it stays down, check the cable and switch port, and run on {node}:\nsudo ip link set dev {ifname} up",
)
BELOW_MAXIMUM = _LINK.warning(
    about="a NIC negotiated a lower rate than it supports (bad cable, slower switch port)",
    message="{ifname} runs at {speed}, but the NIC supports {best}. A cable, connector or switch port limits it, and "
    "every collective runs at the speed of the slowest link",
    hint="try another cable and switch port. To see which rates both ends advertise, run on {node}:\nsudo ethtool "
    "{ifname}",
)
BELOW_PEERS = _LINK.warning(
    about="a node has a slower link than the others",
    message="{ifname} runs at {speed}, but the link of {peer} runs at {best}. Every collective runs at the slower "
    "speed",
    hint="try another cable, NIC or switch port for {node}. If it has a faster NIC, set it in the hostfile: ifname=",
)
HALF_DUPLEX = _LINK.warning(
    about="half duplex: one end of the link does not negotiate",
    message="{ifname} runs in half duplex. It loses packets, and it cannot send and receive at the same time, although "
    "ring algorithms need this",
    hint="enable autonegotiation on the switch port and on {node}:\nsudo ethtool -s {ifname} autoneg on",
)
LINK_ERRORS = _LINK.warning(
    about="a NIC counts errors (bad cable or connector)",
    message="{ifname} has counted {errors} errors in {packets} packets. TCP retransmits each damaged packet, so the "
    "link is slower than its rate",
    hint="replace the cable or connector of {node}. To check whether the count still grows:\nip -s link show {ifname}",
)

MTU_DIFFERS = _LINK.warning(
    about="MTUs on the data plane differ, so large packets are lost, or all nodes are slower than necessary",
    message="{ifname} has MTU {mtu}, but {peer} has {expected}. Large packets may be lost without an error",
    hint="set the same MTU on {node}; the switches must support it too:\nsudo ip link set dev {ifname} mtu {expected}",
)
SLOW_NODE = _LINK.warning(
    about="a node's link carries much less than its rate, in both directions",
    message="{ifname} sends and receives at most {best} of {ceiling}. Every collective runs at the speed of this node",
    hint="check the cable, connector and switch port of {node}, and measure again on an idle network:\n"
    "ip -s link show {ifname}\nsudo ethtool {ifname}\nmultinode check --bandwidth",
)
SLOW_SENDER = _LINK.warning(
    about="a node sends slowly but receives at full speed",
    message="{ifname} sends at most {best} of {ceiling}, but receives at full speed. Every collective runs at the "
    "speed of this node",
    hint="look for a traffic shaper or other traffic on {node}:\ntc -s qdisc show dev {ifname}\nsudo ethtool -S "
    "{ifname}",
)
SLOW_RECEIVER = _LINK.warning(
    about="a node receives slowly but sends at full speed",
    message="{ifname} receives at most {best} of {ceiling}, but sends at full speed. Every collective runs at the "
    "speed of this node",
    hint="look for lost packets, a policer, or other traffic to {node}:\ntc -s qdisc show dev {ifname}\nsudo ethtool "
    "-S {ifname}",
)
SLOW_PAIR = _LINK.warning(
    about="the network is slow between two nodes, but each of them is fast with other nodes",
    message=(
        "a stream from {source} to {target} reaches only {best} of {ceiling}, so something between the two nodes "
        "limits it"
    ),
    hint="check whether the nodes are on different switches with a slower link between them. Run on {source}:\n"
    "traceroute -n {addr}",
)
SLOW_BETWEEN = _LINK.warning(
    about="the network is slow between two nodes in both directions",
    message="a stream between {source} and {target} reaches at most {best} of {ceiling} in both directions. The cause "
    "is a NIC, cable or switch port of one of the nodes, or something between them",
    hint="replace the cables of both nodes and check again. Run on both:\nsudo ethtool {ifname}\nip -s link show "
    "{ifname}",
)
ALL_SLOW = _LINK.note(
    about="the network as a whole carries less traffic than the links could",
    message=(
        "no stream between the nodes exceeds {best} of {ceiling}. Either the switch limits the streams, or the CPUs "
        "are busy"
    ),
    hint="measure again on idle nodes, or measure collectives:\nmultinode nccl-test",
)
ONE_CONNECTION = _LINK.note(
    about="one TCP connection cannot use the full rate of a link with 10 Gbit/s or more",
    message="one TCP connection reaches at most {best} of {ceiling}. One CPU core limits a connection at this speed, "
    "but NCCL opens several connections",
    hint="measure collectives:\nmultinode nccl-test",
)

_MUCH_LESS = 0.95
_ERROR_RATE = 1e-6
_FEW_ERRORS = 100
_FILLED = 0.7
_CPU_BOUND_GBIT = 10.0
_RULES = {
    "node": SLOW_NODE,
    "sends": SLOW_SENDER,
    "receives": SLOW_RECEIVER,
    "one_way": SLOW_PAIR,
    "cable": SLOW_BETWEEN,
    "all": ALL_SLOW,
}


class _LinkedStream(NamedTuple):
    """What the slower of two links carries, and what a stream over both reached."""

    goodput_gbit_per_s: float
    link_gbit_per_s: float
    speed: PairSpeed

    @property
    def least_gbit_per_s(self) -> float:
        """That of a healthy stream."""
        return least_of_due(self.goodput_gbit_per_s, self.link_gbit_per_s)


@launch_check
def check_link_up(inspection: Inspection) -> Iterator[CheckFinding]:
    """The NICs for data have a link."""
    for nics in inspection.rails:
        for name, link in nics.items():
            if not link.up or link.running is False:
                yield LINK_DOWN.found(name, ifname=link.name)


@Check
def check_links(inspection: Inspection) -> Iterator[CheckFinding]:
    """NICs run at their maximum speed, all as fast, with one MTU, full duplex, and lose no packets to errors."""
    for nics in inspection.rails:
        yield from _slow_links(nics)
        for name, link in nics.items():
            if link.duplex == "half":
                yield HALF_DUPLEX.found(name, ifname=link.name)
            errors, packets = link.errors or 0, link.packets or 0
            if errors >= _FEW_ERRORS and errors > _ERROR_RATE * packets:
                yield LINK_ERRORS.found(name, ifname=link.name, errors=errors, packets=packets)
        mtus = {name: link.mtu for name, link in nics.items() if link.mtu is not None}
        for name, mtu, peer, expected in disagreements(mtus, majority=True):
            yield MTU_DIFFERS.found(name, ifname=nics[name].name, mtu=mtu, peer=peer, expected=expected)


def _slow_links(nics: Mapping[str, Interface]) -> Iterator[CheckFinding]:
    speeds = {name: link.speed_gbit_per_s for name, link in nics.items() if link.speed_gbit_per_s}
    fastest = max(speeds, key=lambda name: speeds[name], default="")
    for name, speed in speeds.items():
        best, values = nics[name].nic_gbit_per_s, {"ifname": nics[name].name, "speed": format_rate(speed)}
        if best is not None and speed < _MUCH_LESS * best:
            yield BELOW_MAXIMUM.found(name, best=format_rate(best), **values)
        if speed < _MUCH_LESS * speeds[fastest]:
            yield BELOW_PEERS.found(name, peer=fastest, best=format_rate(speeds[fastest]), **values)


@Check
def check_streams(inspection: Inspection) -> Iterator[CheckFinding]:
    """Streams reach the link speed; a node that is slow in all of its streams is blamed for them."""
    links = {node.name: interface for node, interface in inspection.links}
    paths = {pair: path for pair, path in _paths(inspection).items() if path.speed.gbit_per_s is not None}
    slow = {pair: _reached(path) < path.least_gbit_per_s for pair, path in paths.items()}
    fast = [path for path in paths.values() if path.link_gbit_per_s >= _CPU_BOUND_GBIT]
    bound = all(_reached(path) < _FILLED * path.goodput_gbit_per_s for path in fast)
    if fast and bound and not any(slow.values()):
        yield ONE_CONNECTION.found(None, **_figures(fast))
    for blame in blame_pairs(slow, tuple(links)):
        words: dict[str, object] = {**_figures([paths[pair] for pair in blame.pairs])}
        if blame.nodes:
            source, target = blame.nodes[0], blame.nodes[-1]
            addr = inspection.place(target).addr
            words |= {"source": source, "target": target, "ifname": links[source].name, "addr": addr}
        # Between two nodes either may be the cause; if all are slow, none is singled out.
        nobody = blame.kind in {"cable", "all"}
        yield _RULES[blame.kind].found(None if nobody else blame.nodes[0], **words)


def least_speeds(inspection: Inspection) -> dict[Pair, float]:
    """Gbit/s that a healthy stream reaches at least, by pair of nodes with known links."""
    return {pair: path.least_gbit_per_s for pair, path in _paths(inspection).items()}


def _paths(inspection: Inspection) -> dict[Pair, _LinkedStream]:
    links = {node.name: (nic, nic.speed_gbit_per_s) for node, nic in inspection.links if nic.speed_gbit_per_s}
    streams = {(stream.source, stream.target): stream for stream in inspection.connectivity.streams}
    paths = {}
    for (source, (sender, sends)), (target, (receiver, receives)) in permutations(links.items(), 2):
        link = min(sends, receives)
        mtu = min(sender.mtu or ETHERNET_MTU, receiver.mtu or ETHERNET_MTU)
        speed = streams.get((source, target)) or PairSpeed(source=source, target=target)
        paths[source, target] = _LinkedStream(goodput_gb_per_s(link, mtu) * BITS_PER_BYTE, link, speed)
    return paths


def _reached(path: _LinkedStream) -> float:
    return path.speed.gbit_per_s or 0.0


def _figures(paths: Sequence[_LinkedStream]) -> dict[str, str]:
    best = max(paths, key=_reached)
    reached = format_rate(_reached(best))
    if best.speed.worse_gbit_per_s is not None:
        reached += f" (the better of two measurements; the other: {format_rate(best.speed.worse_gbit_per_s)})"
    return {"best": reached, "ceiling": format_rate(best.goodput_gbit_per_s)}
