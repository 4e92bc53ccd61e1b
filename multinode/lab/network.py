"""The lab's two networks: a switch in a namespace of its own, and a link from it to each node and to the controller.

The switch stands apart so that no firewall rule of the controller touches what nodes send each other, and so that the
controller has but one interface of ours, `mn-mgmt`. Nothing here routes: nodes reach nodes and the controller.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from multinode.lab.programs import run_batch, run_program
from multinode.lab.shaping import shape_lines
from multinode.lab.spec import (
    DATA_IFNAME,
    MANAGEMENT_IFNAME,
    LabNode,
    LabSpec,
    controller_address,
    node_addresses,
    node_name,
)

__all__ = [
    "CONTROLLER_IFNAME",
    "SWITCH_NAMESPACE",
    "make_links",
    "make_namespaces",
    "set_port",
    "shape_link",
    "shape_node",
]

SWITCH_NAMESPACE = "mn-switch"
CONTROLLER_IFNAME = "mn-mgmt"
# The training network's switch, in its namespace.
DATA_BRIDGE = "data"

_DOCKER_ADDRESS = "172.17.0.1/16"


def make_namespaces(spec: LabSpec) -> None:
    """Make the network namespaces of the switch and of the nodes, empty.

    Raises:
        MultinodeError: one could not be made.
    """
    names = [SWITCH_NAMESPACE, *(f"mn-{node_name(rank)}" for rank in range(spec.node_count))]
    run_batch(["ip"], [f"netns add {name}" for name in names])


def make_links(spec: LabSpec) -> None:
    """Join the nodes and the controller to the switch, give addresses, and shape the training links.

    Raises:
        MultinodeError: `ip` or `tc` refused.
    """
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
        for rank in range(spec.node_count):
            shape_node(rank, spec.rate_gbit_per_s)


def shape_node(node_rank: int, rate_gbit_per_s: float | None) -> None:
    """Give a node's training link this rate in both directions; None takes the shaping away.

    Raises:
        MultinodeError: `tc` refused, or the namespace is gone.
    """
    _shape_end(f"mn-{node_name(node_rank)}", DATA_IFNAME, rate_gbit_per_s)
    _shape_end(SWITCH_NAMESPACE, f"data{node_rank}", rate_gbit_per_s)


def shape_link(
    node: LabNode, ifname: str, rate_gbit_per_s: float | None, *, sends: bool = True, receives: bool = True
) -> None:
    """Give one of a node's links this rate, for now; None takes the shaping away.

    Args:
        node: whose link.
        ifname: the node's end of it.
        rate_gbit_per_s: line rate.
        sends: whether what the node sends is shaped: it passes the node's end first.
        receives: whether what it receives is: it passes the switch's end first.

    Raises:
        MultinodeError: `tc` refused, or the namespace is gone.
    """
    if sends:
        _shape_end(node.namespace, ifname, rate_gbit_per_s)
    if receives:
        _shape_end(SWITCH_NAMESPACE, node.port_of(ifname), rate_gbit_per_s)


def set_port(node: LabNode, ifname: str, *, up: bool) -> None:
    """Set the switch's end of one of a node's links up or down; down takes the carrier from the node's end.

    Raises:
        MultinodeError: `ip` refused, or the namespace is gone.
    """
    run_program(["ip", "-netns", SWITCH_NAMESPACE, "link", "set", node.port_of(ifname), "up" if up else "down"])


def _shape_end(namespace: str, end: str, rate_gbit_per_s: float | None) -> None:
    # Either end shapes what it sends; nothing shapes what arrives.
    run_batch(["tc", "-netns", namespace], shape_lines(end, rate_gbit_per_s))


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
        f"addr add {addresses.data}/24 brd + dev {DATA_IFNAME}",
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
