"""The ways to the peers: from which address the kernel sends, and over which interface. Sends no packet to anyone.

The kernel itself is asked, as `ip route get` does (rtnetlink(7)): rules that choose among tables of routes, as nodes
with several networks and VRFs have them, are its own.
"""

from __future__ import annotations

import socket
import struct
from typing import Optional

from ..channel import Record

_DISCARD_PORT = 9
_ANSWER_S = 2.0
_ANSWER_BYTES = 1 << 16
# linux/netlink.h, linux/rtnetlink.h.
_RTM_GETROUTE, _RTM_NEWROUTE = 26, 24
_NLM_F_REQUEST = 1
_RTA_DST, _RTA_OIF = 1, 4
_MESSAGE, _ROUTE, _ATTRIBUTE, _NUMBER = (struct.Struct(form) for form in ("=IHHII", "=8BI", "=HH", "=I"))
_ALIGNED = 4


def address_family(address: str) -> socket.AddressFamily:
    """Of an IP address as text."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def find_routes(peers: list[str], interfaces: list[Record]) -> list[Record]:
    """For each peer the source address that the kernel picks, and the interface over which it sends."""
    owners = {address.split("/")[0]: link["name"] for link in interfaces for address in link["addresses"]}
    return [_find_route(peer, owners) for peer in peers]


def _find_route(peer: str, owners: dict[str, str]) -> Record:
    route: Record = {"peer": peer, "source": None, "ifname": None, "error": None}
    family = address_family(peer)
    try:
        # Names are for the controller to resolve: a resolver may take longer than all of the probe.
        packed = socket.inet_pton(family, peer)
        with socket.socket(family, socket.SOCK_DGRAM) as datagrams:
            datagrams.connect((peer, _DISCARD_PORT))
            source = datagrams.getsockname()[0]
    except OSError as error:
        route["error"] = error.strerror or "not an IP address"
        return route
    # A route may name another source than the address of the card it leaves by; to itself a node needs no route.
    sender = None if source == peer else sending_interface(family, packed)
    route.update(source=source, ifname=owners.get(source) if sender is None else sender)
    return route


def sending_interface(family: int, packed: bytes) -> Optional[str]:
    """The interface over which the kernel would send to an address; None where it does not tell."""
    destination = _ATTRIBUTE.pack(_ATTRIBUTE.size + len(packed), _RTA_DST) + packed
    route = _ROUTE.pack(family, 8 * len(packed), 0, 0, 0, 0, 0, 0, 0) + destination
    request = _MESSAGE.pack(_MESSAGE.size + len(route), _RTM_GETROUTE, _NLM_F_REQUEST, 1, 0) + route
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as kernel:
            kernel.settimeout(_ANSWER_S)
            kernel.sendto(request, (0, 0))
            return _interface_of(kernel.recv(_ANSWER_BYTES))
    except (OSError, struct.error):
        # A sandbox may have no such sockets.
        return None


def _interface_of(answer: bytes) -> Optional[str]:
    length, kind, _, _, _ = _MESSAGE.unpack_from(answer)
    if kind != _RTM_NEWROUTE:
        return None
    at = _MESSAGE.size + _ROUTE.size
    while at + _ATTRIBUTE.size <= length:
        size, name = _ATTRIBUTE.unpack_from(answer, at)
        if name == _RTA_OIF:
            return socket.if_indextoname(_NUMBER.unpack_from(answer, at + _ATTRIBUTE.size)[0])
        at += max(_ATTRIBUTE.size, (size + _ALIGNED - 1) // _ALIGNED * _ALIGNED)
    return None
