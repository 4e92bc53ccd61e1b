"""Ports of RDMA cards, InfiniBand and RoCE, as the kernel lists them."""

from __future__ import annotations

import os
import re
from typing import Optional

from ..channel import Record

__all__ = ["list_rdma_ports"]

_ROOT = "/sys/class/infiniband"
_MAX_PORTS = 64
_RATE = re.compile(r"(?P<gbit>[\d.]+) Gb/sec")


def list_rdma_ports(root: str = _ROOT) -> list[Record]:
    """One record a port; a node without such cards has none.

    Args:
        root: where the kernel shows its cards.
    """
    ports = [(device, int(port)) for device in _names(root) for port in _names(f"{root}/{device}/ports")]
    return [_describe(root, device, port) for device, port in ports[:_MAX_PORTS]]


def _describe(root: str, device: str, port: int) -> Record:
    place = f"{root}/{device}/ports/{port}"
    state = _read(f"{place}/state")
    rate = _RATE.match(_read(f"{place}/rate") or "")
    return {
        "device": device,
        "port": port,
        # `4: ACTIVE`: the number is InfiniBand's, the word says the same.
        "state": None if state is None else state.rpartition(":")[2].strip(),
        "link_layer": _read(f"{place}/link_layer"),
        "rate_gbit_per_s": float(rate["gbit"]) if rate else None,
    }


def _names(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def _read(path: str) -> Optional[str]:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read().strip()
    except OSError:
        # A port may be there and not answer, as while its firmware restarts.
        return None
