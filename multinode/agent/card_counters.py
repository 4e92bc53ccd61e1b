"""Counters of all network cards of a node at one moment, RDMA ports among them, and what they grew by."""

from __future__ import annotations

import os
from typing import Optional

__all__ = ["Counters", "grown", "read_cards"]

_NET = "/sys/class/net"
_INFINIBAND = "/sys/class/infiniband"
_FIELDS = ("tx_bytes", "rx_bytes", "tx_packets", "rx_packets")
# Counted in words of four bytes (InfiniBand Architecture Specification, PortCounters).
_RDMA_FIELDS = {"tx_bytes": "port_xmit_data", "rx_bytes": "port_rcv_data"}
_RDMA_WORD_BYTES = 4

Counters = dict[str, dict[str, Optional[int]]]


def read_cards(net: str = _NET, infiniband: str = _INFINIBAND) -> Counters:
    """Bytes and packets by interface name, or by `device/port` for an RDMA port; one that cannot be read is left out.

    Args:
        net: where the kernel lists interfaces.
        infiniband: where it lists RDMA cards, which no interface counts.
    """
    cards: Counters = {}
    for name in _names(net):
        counters = {field: _read(f"{net}/{name}/statistics/{field}") for field in _FIELDS}
        if None not in counters.values():
            cards[name] = counters
    for device in _names(infiniband):
        for port in _names(f"{infiniband}/{device}/ports"):
            words = {
                field: _read(f"{infiniband}/{device}/ports/{port}/counters/{name}")
                for field, name in _RDMA_FIELDS.items()
            }
            if None not in words.values():
                cards[f"{device}/{port}"] = {field: (word or 0) * _RDMA_WORD_BYTES for field, word in words.items()}
    return cards


def grown(before: Counters, after: Counters) -> Counters:
    """What each card that is in both counted between the two."""
    return {
        name: {field: (now or 0) - (before[name].get(field) or 0) for field, now in counters.items()}
        for name, counters in after.items()
        if name in before
    }


def _names(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def _read(path: str) -> Optional[int]:
    try:
        with open(path, encoding="ascii") as file:
            return int(file.read())
    except (OSError, ValueError):
        # A card may go while it is read.
        return None
