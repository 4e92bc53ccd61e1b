"""The lab's two networks: a switch in a namespace of its own, a link to each node and to the controller, their rates.

The switch stands apart so that no firewall rule of the controller touches what nodes send each other, and so that the
controller has but one interface of ours, `mn-mgmt`. Nothing here routes: nodes reach nodes and the controller.

A token bucket makes a virtual link as fast as a NIC of a given line rate; what a link then carries is measured.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from multinode.errors import NodeFailed
from multinode.lab.state import (
    DATA_IFNAME,
    MANAGEMENT_IFNAME,
    Lab,
    LabNode,
    LabSpec,
    controller_address,
    node_addresses,
    node_name,
    run_batch,
)
from multinode.node.connectivity.connections import Connections, Listener, TimedStream
from multinode.units import BITS_PER_BYTE, goodput_gb_per_s, parse_rate

T = TypeVar("T")

SWITCH_NAMESPACE = "mn-switch"
CONTROLLER_IFNAME = "mn-mgmt"
# The training network's switch, in its namespace.
DATA_BRIDGE = "data"

_DOCKER_ADDRESS = "172.17.0.1/16"

# tbf counts 14 of the 38 bytes that Ethernet adds to each packet of 1500; a NIC spends its line rate on all of them.
_COUNTED_BYTES = 1514
_ON_THE_WIRE_BYTES = 1538

# A bucket of 16 kB costs gloo a third at 1 Gbit/s; segments of up to 64 kB must fit whole. Beyond that a millisecond of
# the rate: at 25 Gbit/s a bucket of 128 kB carries 3% less.
_LEAST_BURST_BYTES = 128 * 1024
_BURST_S = 1e-3
_QUEUE_MS = 50

_VETH_SPEED = "10000"

ENOUGH = 0.95
"""Share of what the rate leaves for payload below which a link is not what was asked for."""
_WINDOW_S = 0.3
_STREAM_DEADLINE_S = 10.0
_TURN_S = 0.05
_CLONE_NEWNET = 0x40000000


def make_namespaces(spec: LabSpec) -> None:
    """Make the network namespaces of the switch and of the nodes, empty."""
    names = [SWITCH_NAMESPACE, *(f"mn-{node_name(rank)}" for rank in range(spec.node_count))]
    run_batch(["ip"], [f"netns add {name}" for name in names])


def make_links(spec: LabSpec) -> None:
    """Join the nodes and the controller to the switch, give addresses, and shape the training links."""
    run_batch(["ip", "-netns", SWITCH_NAMESPACE], list(_switch_lines(spec)))
    run_batch(
        ["ip"],
        [
            f"link add {CONTROLLER_IFNAME} type veth peer name controller netns {SWITCH_NAMESPACE}",
            f"addr add {controller_address(spec)}/24 dev {CONTROLLER_IFNAME}",
            f"link set {CONTROLLER_IFNAME} up",
        ],
    )
    run_batch(["ip", "-netns", SWITCH_NAMESPACE], ["link set controller master mgmt up"])
    for rank in range(spec.node_count):
        run_batch(["ip", "-netns", f"mn-{node_name(rank)}"], _node_lines(spec, rank))
        if spec.rate_gbit_per_s is not None:
            shape_node(rank, spec.rate_gbit_per_s)


def shape_node(node_rank: int, rate_gbit_per_s: float | None) -> None:
    """Give a node's training link this rate in both directions; None takes the shaping away."""
    shape_end(f"mn-{node_name(node_rank)}", DATA_IFNAME, rate_gbit_per_s)
    shape_end(SWITCH_NAMESPACE, f"data{node_rank}", rate_gbit_per_s)


def shape_end(namespace: str, end: str, rate_gbit_per_s: float | None) -> None:
    """Give what an interface in this namespace sends this rate; None takes the shaping away."""
    # Either end shapes what it sends; nothing shapes what arrives.
    run_batch(["tc", "-netns", namespace], shape_lines(end, rate_gbit_per_s))


def parse_lab_rate(text: str) -> float | None:
    """A line rate in Gbit/s; None for `none` or `0`: unshaped."""
    return None if text.strip().lower() in {"0", "none"} else parse_rate(text)


def rate_text(rate_gbit_per_s: float | None) -> str:
    """A line rate as the command line takes it: `1gbit`, `100mbit`, `none`."""
    if rate_gbit_per_s is None:
        return "none"
    if rate_gbit_per_s < 1:
        return f"{rate_gbit_per_s * 1e3:.6g}mbit"
    return f"{rate_gbit_per_s:.6g}gbit"


def speed_text(rate_gbit_per_s: float | None) -> str:
    """What a NIC of this line rate says in /sys/class/net/X/speed, in Mbit/s; unshaped is what veth says itself."""
    return str(round(rate_gbit_per_s * 1000)) if rate_gbit_per_s is not None else _VETH_SPEED


def shape_lines(ifname: str, rate_gbit_per_s: float | None) -> list[str]:
    """What `tc` has to do to give the sending side of an interface this line rate, whatever it had before."""
    if rate_gbit_per_s is None:
        # Deleting fails where there is nothing to delete: put something there first.
        return [f"qdisc replace dev {ifname} root pfifo", f"qdisc del dev {ifname} root"]
    bits_per_s = round(rate_gbit_per_s * 1e9 * _COUNTED_BYTES / _ON_THE_WIRE_BYTES)
    burst_bytes = max(_LEAST_BURST_BYTES, round(rate_gbit_per_s * 1e9 / 8 * _BURST_S))
    bucket = f"rate {bits_per_s}bit burst {burst_bytes}b latency {_QUEUE_MS}ms"
    return [f"qdisc replace dev {ifname} root tbf {bucket}"]


class LinkSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """One direction between two nodes."""

    source: str
    target: str
    rate_gbit_per_s: float | None  # requested line rate, the lower of both ends; None is unshaped
    expected_gbit_per_s: float | None  # the part of it that TCP payload can use at an MTU of 1500; None is unshaped
    goodput_gbit_per_s: float  # received TCP payload

    @property
    def is_slow(self) -> bool:
        """Whether the link carries less than `ENOUGH` of what it should."""
        return self.expected_gbit_per_s is not None and self.goodput_gbit_per_s < ENOUGH * self.expected_gbit_per_s


def measure_links(lab: Lab) -> Iterator[LinkSpeed]:
    """Measure node 0 to each other node and back, one after the other: about a second a node.

    A slow link is measured once more and the better figure counts: the question is what the link can carry, and all
    nodes share this machine with whatever else runs on it.
    """
    first, *others = lab.nodes
    for other in others:
        for source, target in ((first, other), (other, first)):
            speed = measure_stream(source, target)
            if speed.is_slow:
                speed = max(speed, measure_stream(source, target), key=lambda stream: stream.goodput_gbit_per_s)
            yield speed


def measure_stream(source: LabNode, target: LabNode) -> LinkSpeed:
    """Send from one node to another for a moment, as agents do for `check`.

    Both ends are sockets of this process, each made in its node's network namespace.

    Raises:
        NodeFailed: no connection came about.
    """
    rate = min((node.rate_gbit_per_s for node in (source, target) if node.rate_gbit_per_s is not None), default=None)
    stream = _stream(source, target)
    if stream["error"] is not None or not stream["time_s"]:
        raise NodeFailed(
            f"no stream from {source.name} to {target.addr}: {stream['error'] or 'nothing arrived'}",
            node=target.name,
            hint="restart the lab: multinode lab down",
        )
    return LinkSpeed(
        source=source.name,
        target=target.name,
        rate_gbit_per_s=rate,
        expected_gbit_per_s=None if rate is None else goodput_gb_per_s(rate) * BITS_PER_BYTE,
        goodput_gbit_per_s=stream["size_bytes"] * BITS_PER_BYTE / stream["time_s"] / 1e9,
    )


def _stream(source: LabNode, target: LabNode) -> dict[str, Any]:
    """The record of a `TimedStream`: `size_bytes` that arrived in `time_s`, or an `error`."""
    token = secrets.token_hex(16)
    with contextlib.closing(Connections()) as served, contextlib.closing(Connections()) as calling:
        over = threading.Event()
        server = threading.Thread(target=_serve, args=(served, over), daemon=True)
        with contextlib.closing(Listener(served, token, target.addr)) as listener:
            (port,) = _in_network_of(target, lambda: listener.open_ephemeral(1)) or (0,)
            server.start()
            try:
                where = {"addr": target.addr, "port": port, "seconds": _WINDOW_S}
                call = _in_network_of(source, lambda: TimedStream(where, token, _STREAM_DEADLINE_S))
                calling.begin(call)
                while call.result is None:
                    calling.turn(_TURN_S)
            finally:
                over.set()
                server.join()
        return call.result


def _serve(connections: Connections, over: threading.Event) -> None:
    while not over.is_set():
        connections.turn(_TURN_S)


def _in_network_of(node: LabNode, make: Callable[[], T]) -> T:
    """What a thread makes that enters the node's network namespace, and then ends; sockets stay where they are made."""

    def enter() -> T:
        with Path("/run/netns", node.namespace).open("rb") as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return make()

    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(enter).result()


def _switch_lines(spec: LabSpec) -> Iterator[str]:
    for bridge in ("mgmt", DATA_BRIDGE):
        yield f"link add {bridge} type bridge mcast_snooping 0"
        yield f"link set {bridge} up"
    for rank in range(spec.node_count):
        for bridge, ifname in (("mgmt", MANAGEMENT_IFNAME), (DATA_BRIDGE, DATA_IFNAME)):
            port = f"{bridge}{rank}"
            yield f"link add {port} type veth peer name {ifname} netns mn-{node_name(rank)}"
            yield f"link set {port} master {bridge} up"


def _node_lines(spec: LabSpec, node_rank: int) -> Sequence[str]:
    addresses = node_addresses(spec, node_rank)
    return [
        "link set lo up",
        f"addr add {addresses.management}/24 brd + dev {MANAGEMENT_IFNAME}",
        f"link set {MANAGEMENT_IFNAME} up",
        # Nobody else can have the address, and looking for whoever does (DAD) takes a second.
        f"addr add {addresses.data}/64 dev {DATA_IFNAME} nodad"
        if spec.ipv6
        else f"addr add {addresses.data}/24 brd + dev {DATA_IFNAME}",
        f"link set {DATA_IFNAME} up",
        # As on every machine with Docker: the same address everywhere, and nobody behind it. A bridge notices that it
        # has no carrier only when its last port leaves.
        "link add docker0 address 02:42:ac:11:00:01 type bridge",
        f"addr add {_DOCKER_ADDRESS} brd + dev docker0",
        "link set docker0 up",
        "link add port type veth peer name port-peer",
        "link set port master docker0",
        "link del port",
    ]
