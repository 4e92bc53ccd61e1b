"""Meter of cards: what had passed the node's network cards and RDMA ports when a step ended, by the kernel's counters.

Of the node's first worker alone. Which cards there are to look at is told by $MULTINODE_IFNAMES.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any, Callable, Dict, Iterator, Mapping, Optional, Tuple

import multinode_guard

__all__ = ["Cards", "meter"]

_INTERVAL_S = 0.1
_NET_FIELDS = ("tx_bytes", "rx_bytes", "tx_packets", "rx_packets")
# Counted in words of four bytes (InfiniBand Architecture Specification, PortCounters).
_RDMA_FIELDS = {"tx_bytes": "port_xmit_data", "rx_bytes": "port_rcv_data"}
_RDMA_WORD_BYTES = 4
_LONGEST_NUMBER = 32


def meter(guard: multinode_guard.Guard, environ: Mapping[str, str]) -> Optional[Callable[[int], Dict[str, Any]]]:
    """The meter of `cards`, to be added to the meters of Steps; None where this worker has no cards to look at."""
    names = [name for name in environ.get("MULTINODE_IFNAMES", "").split(",") if name]
    if not names or environ.get("LOCAL_RANK") != "0":
        return None
    return Cards(guard, names)


class Cards:
    """Reads counters through descriptors that stay open.

    Args:
        guard: tells of a card that has gone.
        names: interfaces; RDMA ports, which no interface counts, are looked for here.
        classes: where the kernel lists its devices by class.
        interval_s: counters are not read more often than this.
    """

    def __init__(
        self,
        guard: multinode_guard.Guard,
        names: "list[str]",
        classes: str = "/sys/class",
        interval_s: float = _INTERVAL_S,
    ) -> None:
        self._guard = guard
        self._interval_s = interval_s
        self._due_s = 0.0
        self._counters: Dict[str, Dict[str, Tuple[int, int]]] = {}
        for name in names:
            paths = {field: "%s/net/%s/statistics/%s" % (classes, name, field) for field in _NET_FIELDS}
            try:
                self._open(name, paths, 1)
            except OSError as error:
                self._guard.tell("reading the counters of %s" % name, error)
        for name, folder in _rdma_ports(classes + "/infiniband"):
            paths = {field: "%s/counters/%s" % (folder, file) for field, file in _RDMA_FIELDS.items()}
            # Emulated ports, and those of virtual functions, may have no counters.
            with contextlib.suppress(OSError):
                self._open(name, paths, _RDMA_WORD_BYTES)

    def __call__(self, _step: int) -> Dict[str, Any]:
        """The field `cards`, where it is time for it."""
        now_s = time.monotonic()
        if now_s < self._due_s or not self._counters:
            return {}
        self._due_s = now_s + self._interval_s
        cards = {name: self._read(name) for name in list(self._counters)}
        return {"cards": {name: counters for name, counters in cards.items() if counters is not None}}

    def _open(self, name: str, paths: Dict[str, str], unit: int) -> None:
        opened: Dict[str, Tuple[int, int]] = {}
        try:
            for field, path in paths.items():
                opened[field] = (os.open(path, os.O_RDONLY | os.O_CLOEXEC), unit)
        except OSError:
            _close(opened)
            raise
        self._counters[name] = opened

    def _read(self, name: str) -> Optional[Dict[str, int]]:
        try:
            return {
                field: int(os.pread(descriptor, _LONGEST_NUMBER, 0)) * unit
                for field, (descriptor, unit) in self._counters[name].items()
            }
        except (OSError, ValueError) as error:
            _close(self._counters.pop(name))
            self._guard.tell("reading the counters of %s" % name, error)
            return None


def _close(opened: Dict[str, Tuple[int, int]]) -> None:
    for descriptor, _unit in opened.values():
        os.close(descriptor)


def _rdma_ports(root: str) -> Iterator[Tuple[str, str]]:
    for device in _names(root):
        for port in _names("%s/%s/ports" % (root, device)):
            yield "%s/%s" % (device, port), "%s/%s/ports/%s" % (root, device, port)


def _names(folder: str) -> "list[str]":
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []
