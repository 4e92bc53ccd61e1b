"""Meter of NICs: the kernel's counters of the node's NICs and RDMA ports at the end of steps.

Only the node's first worker reads them. $MULTINODE_IFNAMES lists the NICs.
"""

from __future__ import annotations

import os
import time
from typing import Any, Dict, Mapping, Optional, Tuple

from ..node.files import counter_paths, rdma_ports
from .guard import Guard

_INTERVAL_S = 0.1
_LONGEST_NUMBER = 32


def meter(guard: Guard, environ: Mapping[str, str]) -> Optional[NicMeter]:
    """The meter of the field `nics`, to add to the meters of Steps; None if this worker reads no NICs."""
    names = [name for name in environ.get("MULTINODE_IFNAMES", "").split(",") if name]
    if not names or environ.get("LOCAL_RANK") != "0":
        return None
    return NicMeter(guard, names)


class NicMeter:
    """Reads counters through descriptors that stay open.

    Args:
        guard: reports a NIC that is gone.
        names: interfaces to read. RDMA ports, whose traffic no interface counts, are found here.
        classes: directory where the kernel lists its devices by class.
        interval_s: shortest time between two readings.
    """

    def __init__(
        self,
        guard: Guard,
        names: "list[str]",
        classes: str = "/sys/class",
        interval_s: float = _INTERVAL_S,
    ) -> None:
        self._guard = guard
        self._interval_s = interval_s
        self._due_s = 0.0
        self._counters: Dict[str, Dict[str, Tuple[int, int]]] = {}
        for name in names:
            self._open(name, classes, is_named=True)
        for name, _folder in rdma_ports(classes):
            self._open(name, classes, is_named=False)

    def __call__(self, _step: int) -> Dict[str, Any]:
        """The field `nics`, if the interval has passed."""
        now_s = time.monotonic()
        if now_s < self._due_s or not self._counters:
            return {}
        self._due_s = now_s + self._interval_s
        nics = {name: self._read(name) for name in list(self._counters)}
        return {"nics": {name: counters for name, counters in nics.items() if counters is not None}}

    def read_soon(self) -> None:
        """Read the counters at the end of this step, however short it is: nodes have averaged in it."""
        self._due_s = 0.0

    def _open(self, name: str, classes: str, *, is_named: bool) -> None:
        opened: Dict[str, Tuple[int, int]] = {}
        paths, unit = counter_paths(name, classes)
        try:
            for field, path in paths.items():
                opened[field] = (os.open(path, os.O_RDONLY | os.O_CLOEXEC), unit)
        except OSError as error:
            _close(opened)
            # Emulated ports, and those of virtual functions, may have no counters.
            if is_named:
                self._guard.tell("reading the counters of %s" % name, error)
            return
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
