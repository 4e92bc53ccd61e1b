"""Counters of all network cards of a node at one moment, RDMA ports among them, and what they grew by."""

from __future__ import annotations

import os
from typing import Optional

__all__ = ["Counters", "grown", "read_cards", "read_interface", "read_rdma_port"]

_NET = "/sys/class/net"
_INFINIBAND = "/sys/class/infiniband"
_FIELDS = ("tx_bytes", "rx_bytes", "tx_packets", "rx_packets")
_FAULT_FIELDS = ("rx_errors", "tx_errors", "rx_dropped", "tx_dropped")
# Counted in words of four bytes (InfiniBand Architecture Specification, PortCounters).
_RDMA_FIELDS = {"tx_bytes": "port_xmit_data", "rx_bytes": "port_rcv_data"}
_RDMA_WORD_BYTES = 4
_RDMA_FAULT_FIELDS = {"rx_errors": "port_rcv_errors", "tx_dropped": "port_xmit_discards"}

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
            sizes = _rdma_bytes(f"{infiniband}/{device}/ports/{port}/counters")
            if None not in sizes.values():
                cards[f"{device}/{port}"] = sizes
    return cards


def read_interface(name: str, net: str = _NET) -> dict[str, Optional[int]]:
    """Bytes, packets, errors and drops of one interface, and how often its link went or came.

    Raises:
        OSError: there is none of this name.
        ValueError: it does not answer with numbers.
    """
    counters: dict[str, Optional[int]] = {"carrier_changes": _read(f"{net}/{name}/carrier_changes")}
    for field in (*_FIELDS, *_FAULT_FIELDS):
        with open(f"{net}/{name}/statistics/{field}", encoding="ascii") as file:
            counters[field] = int(file.read())
    return counters


def read_rdma_port(name: str, infiniband: str = _INFINIBAND) -> dict[str, Optional[int]]:
    """Bytes, receive errors and drops of one RDMA port, `device/port`; faults that it does not count are None.

    Raises:
        OSError: its bytes cannot be read.
    """
    device, _, port = name.rpartition("/")
    place = f"{infiniband}/{device}/ports/{port}/counters"
    counters = _rdma_bytes(place)
    if None in counters.values():
        raise OSError(f"the RDMA port {name} does not say what it carried")
    return {**counters, **{field: _read(f"{place}/{counter}") for field, counter in _RDMA_FAULT_FIELDS.items()}}


def grown(before: Counters, after: Counters) -> Counters:
    """What each card that is in both counted between the two."""
    return {
        name: {field: (now or 0) - (before[name].get(field) or 0) for field, now in counters.items()}
        for name, counters in after.items()
        if name in before
    }


def _rdma_bytes(place: str) -> dict[str, Optional[int]]:
    words = {field: _read(f"{place}/{counter}") for field, counter in _RDMA_FIELDS.items()}
    return {field: None if count is None else count * _RDMA_WORD_BYTES for field, count in words.items()}


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
