"""Samples of the node itself: network cards, processor and memory, read from /sys and /proc in the caller's own loop.

Never raises: what fails is noted once in the samples, and the job goes on. GPUs are in gpu_sampler.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Optional

from .channel import Record
from .rundir import RunDir

__all__ = ["NodeSampler", "SampleFile"]

_COUNTERS = (
    "rx_bytes",
    "tx_bytes",
    "rx_packets",
    "tx_packets",
    "rx_errors",
    "tx_errors",
    "rx_dropped",
    "tx_dropped",
)
_KIB_PER_GIB = 1 << 20
# Columns 4 and 5 of the first line of /proc/stat, idle and iowait (proc(5)).
_IDLE_COLUMNS = slice(3, 5)
# Columns 9 and 10, guest time, are counted in the first two already.
_ALL_COLUMNS = slice(0, 8)


class SampleFile:
    """A JSONL file of samples that one process appends to.

    Args:
        run: whose samples.
        name: of the file.
    """

    def __init__(self, run: RunDir, name: str) -> None:
        self._path = os.path.join(run.samples, name)
        self._noted: set[str] = set()

    def append(self, records: list[Record]) -> None:
        """Write the records, each stamped with wall clock and monotonic clock; all or none of them.

        Raises:
            OSError: they could not be written.
        """
        stamp: Record = {"schema": 1, "time_s": time.time(), "mono_ns": time.monotonic_ns()}
        data = b"".join(json.dumps({**stamp, **record}).encode() + b"\n" for record in records)
        fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            size = os.fstat(fd).st_size
            if os.write(fd, data) < len(data):
                # Half a line would spoil the next one as well.
                os.ftruncate(fd, size)
        finally:
            os.close(fd)

    def note(self, message: str) -> None:
        """Record a failure, once; one that cannot be recorded is let go."""
        if message not in self._noted:
            self._noted.add(message)
            with contextlib.suppress(OSError):
                self.append([{"kind": "note", "message": message}])


class NodeSampler:
    """Samples cards and processor at an interval, and never disturbs its caller.

    Args:
        run: whose samples; they go to samples/node.jsonl.
        ifnames: the network cards to read.
        interval_s: from one sample to the next.
    """

    def __init__(self, run: RunDir, ifnames: list[str], interval_s: float) -> None:
        self._file = SampleFile(run, "node.jsonl")
        self._ifnames = ifnames
        self._interval_s = interval_s
        self._due = time.monotonic()
        self._ticks: Optional[tuple[int, int]] = None

    def due_in_s(self) -> float:
        """Time until the next sample is due."""
        return max(0.0, self._due - time.monotonic())

    def tick(self) -> None:
        """Take a sample if one is due."""
        now = time.monotonic()
        if now >= self._due:
            self._due += self._interval_s
            if self._due <= now:
                # After a pause of the node, samples that were missed are not made up for.
                self._due = now + self._interval_s
            self.sample()

    def sample(self) -> None:
        """Take a sample now."""
        readers: list[Callable[[], Record]] = [partial(_read_card, ifname) for ifname in self._ifnames]
        records = [record for read in [*readers, self._read_processor] for record in self._try(read)]
        self._try(partial(self._file.append, records))

    def _try(self, action: Callable[[], Optional[Record]]) -> list[Record]:
        try:
            record = action()
        except (OSError, ValueError, KeyError) as error:
            self._file.note(f"a sample could not be taken: {error}")
            return []
        return [] if record is None else [record]

    def _read_processor(self) -> Record:
        busy_percent = None
        before, self._ticks = self._ticks, _read_ticks()
        if before is not None and self._ticks[1] > before[1]:
            idle = (self._ticks[0] - before[0]) / (self._ticks[1] - before[1])
            busy_percent = round(100 * min(1.0, max(0.0, 1 - idle)), 1)
        return {"kind": "cpu", "busy_percent": busy_percent, "memory_available_gib": _read_memory_available_gib()}


def _read_card(ifname: str) -> Record:
    record: Record = {"kind": "nic", "ifname": ifname}
    for counter in _COUNTERS:
        with open(f"/sys/class/net/{ifname}/statistics/{counter}", encoding="ascii") as file:
            record[counter] = int(file.read())
    return record


def _read_ticks() -> tuple[int, int]:
    """Idle ticks and all ticks of all cores since boot."""
    with open("/proc/stat", encoding="ascii") as file:
        columns = [int(word) for word in file.readline().split()[1:]]
    return sum(columns[_IDLE_COLUMNS]), sum(columns[_ALL_COLUMNS])


def _read_memory_available_gib() -> float:
    with open("/proc/meminfo", encoding="ascii") as file:
        lines = dict(line.split(":", 1) for line in file)
    return int(lines["MemAvailable"].split()[0]) / _KIB_PER_GIB
