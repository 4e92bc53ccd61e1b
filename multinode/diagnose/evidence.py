"""What is known of a node while its run goes on, and once it has ended: faults of its hardware, exceptions, its log.

Faults come from the kernel log (GPU Xid errors: NVIDIA's "Xid Errors" documentation; machine checks, disks), the
counters of network interfaces and RDMA ports for links, errors and drops, and NVML's count of uncorrectable ECC errors.
What the log says is read only of a job that failed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec

from multinode.errors import MultinodeError
from multinode.findings.finding import Finding
from multinode.records.log import clean_log
from multinode.records.run import NodeRun
from multinode.records.samples import ExceptionSample, FlightSample, GpuSample, KernelSample, NicSample, Sample

if TYPE_CHECKING:
    from multinode.diagnose.log_words import LogReading

# Of an interface or RDMA port, by how much a counter has to grow between two samples, about a second apart: less is the
# noise of a working link, and a busy receiver drops some packets.
_COUNTERS = (
    ("carrier_changes", 1, "lost its link"),
    ("link_recoveries", 1, "had to recover its link from errors"),
    ("rx_errors", 100, "counted {} receive errors"),
    ("tx_errors", 100, "counted {} transmit errors"),
    ("symbol_errors", 100, "counted {} symbol errors"),
    ("rx_dropped", 10_000, "dropped {} received packets"),
    ("tx_dropped", 10_000, "dropped {} outgoing packets"),
)
_MOST_FAULTS = 100
# More than any node has.
_MOST_DEVICES = 256
# Xid errors of hardware or driver. Those that a program causes itself (13, 31), or that follow from its end (43, 45),
# are left to the worker's own words.
_PROGRAMS_OWN = {13, 31, 43, 45}
_XIDS = {
    48: "an uncorrectable (double bit) ECC error",
    62: "an internal micro-controller halt",
    63: "a memory row remapping",
    64: "a failed memory row remapping",
    74: "an NVLink error",
    79: "the GPU has fallen off the bus",
    92: "a high rate of corrected ECC errors",
    94: "a contained uncorrectable ECC error",
    95: "an uncontained uncorrectable ECC error",
    119: "the GPU's system processor (GSP) does not respond",
    120: "an error of the GPU's system processor (GSP)",
}
_XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]{1,20})\): (\d{1,4})\b")
_HINTS = {
    "gpu": "see the kernel log: ssh {node} 'dmesg -T | grep -i -e xid -e nvrm'; reset or replace the GPU, or exclude "
    "it",
    "link": "check the cable, transceiver and switch port of {node}; its log: ssh {node} 'dmesg -T | grep -i link'",
    "disk": "see the kernel log and the disk's health: ssh {node} 'dmesg -T | grep -i error'; smartctl -a",
    "memory": "see the kernel log: ssh {node} 'dmesg -T | grep -i -e edac -e mce -e hardware'; test the memory",
}
_FILE_SYSTEM = [f"{name}...{what}..." for name in ("EXT4", "XFS", "BTRFS") for what in ("error", "corruption")]
_LOG_KINDS = (
    ("gpu", ("amdgpu...",)),
    ("memory", ("EDAC...", "Hardware Error...", "Machine check...")),
    ("disk", ("I/O error...", "remounting filesystem read-only", *_FILE_SYSTEM)),
)


class MachineFault(Finding, frozen=True, kw_only=True):
    """One fault: `code` is `gpu`, `link`, `disk` or `memory`; `time_s` the node's wall clock."""

    time_s: float


class FaultWatch:
    """Finds the faults of one node in its samples, in the order in which they come."""

    def __init__(self, node: str) -> None:
        self._node = node
        self.faults: list[MachineFault] = []
        self._nics: dict[str, NicSample] = {}
        self._ecc: dict[int, int] = {}

    def take(self, samples: Iterable[Sample]) -> None:
        """Look at more samples."""
        for sample in samples:
            if isinstance(sample, NicSample):
                self._take_nic(sample)
            elif isinstance(sample, GpuSample):
                self._take_gpu(sample)
            elif isinstance(sample, KernelSample):
                self._take_kernel(sample)

    def _add(self, kind: str, time_s: float, message: str) -> None:
        if len(self.faults) < _MOST_FAULTS:
            hint = _HINTS[kind].format(node=self._node)
            self.faults.append(MachineFault(code=kind, node=self._node, time_s=time_s, message=message, hint=hint))

    def _take_nic(self, sample: NicSample) -> None:
        before = self._nics.get(sample.ifname)
        if before is not None or len(self._nics) < _MOST_DEVICES:
            self._nics[sample.ifname] = sample
        if before is None:
            return
        name = clean_log(sample.ifname)
        for field, least, words in _COUNTERS:
            now, then = getattr(sample, field), getattr(before, field)
            if now is not None and then is not None and now - then >= least:
                self._add("link", sample.time_s, f"{name} {words.format(now - then)}")

    def _take_gpu(self, sample: GpuSample) -> None:
        before = self._ecc.get(sample.index)
        if sample.ecc_uncorrected is not None:
            if before is not None or len(self._ecc) < _MOST_DEVICES:
                self._ecc[sample.index] = sample.ecc_uncorrected
            if before is not None and sample.ecc_uncorrected > before:
                self._add("gpu", sample.time_s, f"GPU {sample.index} had an uncorrectable ECC error")

    def _take_kernel(self, sample: KernelSample) -> None:
        from multinode.text_pattern import find_values

        line = clean_log(sample.message).strip()
        xid = _XID.search(line)
        if xid is not None:
            number = int(xid[2])
            if number not in _PROGRAMS_OWN:
                meaning = f": {_XIDS[number]}" if number in _XIDS else ""
                self._add("gpu", sample.time_s, f"the GPU at {xid[1]} reported Xid {number}{meaning}")
            return
        kind = next((kind for kind, texts in _LOG_KINDS if find_values(texts, line) is not None), None)
        if kind is not None:
            self._add(kind, sample.time_s, f"the kernel logged: {line}")


class NodeEvidence(msgspec.Struct, kw_only=True):
    """What is known of a node when a run has ended."""

    run: NodeRun
    exceptions: list[ExceptionSample] = []
    flights: list[FlightSample] = []  # the last collectives of workers that have ended
    clock_offset_s: float | None = None  # the node's clock minus the controller's; None is unknown
    # whether all of it came as it happened, without a gap in the contact: then `exceptions_heard_s` and `ended_heard_s`
    # say when, on the controller's clock
    came_live: bool = False
    exceptions_heard_s: list[float] = []
    ended_heard_s: float | None = None
    error: MultinodeError | None = None
    log: str = ""  # its end; `reading` is what it says, None where that is not read yet
    reading: LogReading | None = None
    nccl_warnings: list[str] = []  # the last of each process, from NCCL's own logs
    faults: Sequence[MachineFault] = ()  # of its hardware, in the order in which they came

    def read(self) -> LogReading:
        """What the log says: only that of a job that failed is read."""
        from multinode.diagnose.log_words import read_log

        if self.reading is None:
            self.reading = read_log(self.log, has_failed=True)
        return self.reading
