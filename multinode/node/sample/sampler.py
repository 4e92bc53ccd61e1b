"""Samples of the node itself: NICs, processors, memory, kernel log, GPUs; taken in the caller's own loop.

A separate process reads GPUs: a driver call on a GPU that fell off the bus may never return.

Processor time is that of all cores, and of all processes of a job, including those that have ended.

Nothing here raises: a failure is noted once in the samples, and the job continues.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import signal
import time
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, NamedTuple, Optional

from ..channel import Record
from ..facts.cgroups import GroupFinder, Memory, MemoryReader, read_cpu_limit
from ..facts.nics import list_rdma_ports, read_nic
from ..files import append_lines, read_text
from ..nccl_files import InspectorReader
from ..processes import fork_child, list_pids, stat_fields
from ..rundir import RunDir, is_samples_name

_GIB = 1 << 30
_LEAST_INTERVAL_S = 0.1
# Traffic before the first worker starts, a few seconds from now, does not belong to this job.
_IDLE_INTERVAL_S, _IDLE_LOOK_S = 0.2, 2.0
# Everything but the NICs is sampled once a second: with many cores, the kernel takes a while to list their times.
_SLOW_INTERVAL_S = 1.0
# The controller interprets these lines; here the pattern only filters the kernel's log.
_TELLING = re.compile(
    r"NVRM: Xid|amdgpu.*(?:ring \w+ timeout|GPU reset|uncorrectable)|EDAC .*UE|Hardware Error|Machine check"
    r"|I/O error|(?:EXT4|XFS|BTRFS).*(?:error|corruption)|[Rr]emounting filesystem read-only"
)
_KERNEL_RECORD_BYTES = 8192
# A failing disk repeats its errors; the first lines matter.
_MOST_KERNEL_LINES = 100
_MOST_KERNEL_CHARACTERS = 300


class SampleFile:
    """A JSONL file of samples that one process appends to."""

    def __init__(self, run: RunDir, name: str) -> None:
        self._path = os.path.join(run.samples, name)
        self._noted: set[str] = set()

    def append(self, records: list[Record]) -> None:
        """Append records; each gets wall clock and monotonic clock, unless it has them."""
        stamp: Record = {"schema": 1, "time_s": time.time(), "mono_ns": time.monotonic_ns()}
        data = b"".join(json.dumps({**stamp, **record}).encode() + b"\n" for record in records)
        append_lines(self._path, data)

    def note(self, message: str, lacks: str = "") -> None:
        """Record a failure once, and the kind of samples that are missing; if that fails, it is dropped."""
        if message not in self._noted:
            self._noted.add(message)
            with contextlib.suppress(OSError):
                self.append([{"kind": "note", "message": message, "lacks": lacks}])


class KernelLog:
    """Follows the kernel's log from now on, for messages about failing hardware. Often only root can read it.

    Args:
        path: device that returns one record per read (Documentation/ABI/testing/dev-kmsg).
    """

    def __init__(self, path: str = "/dev/kmsg") -> None:
        self._left = _MOST_KERNEL_LINES
        self._fd: Optional[int] = None
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            os.lseek(self._fd, 0, os.SEEK_END)
        except OSError:
            self.close()

    def read(self) -> list[Record]:
        """New `kernel` records since the last call."""
        records: list[Record] = []
        while self._fd is not None and self._left:
            try:
                text = os.read(self._fd, _KERNEL_RECORD_BYTES).decode(errors="replace")
            except OSError as error:
                if error.errno == errno.EPIPE:
                    # The record was overwritten before it was read: the next read continues after the gap.
                    continue
                if error.errno != errno.EAGAIN:
                    self.close()
                break
            message = text.partition(";")[2].partition("\n")[0]
            if not text:
                break
            if _TELLING.search(message):
                self._left -= 1
                records.append({"kind": "kernel", "message": message[:_MOST_KERNEL_CHARACTERS]})
        return records

    def close(self) -> None:
        """Stop following the log."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


class NodeSampler:
    """Samples NICs at an interval and everything else once a second; it never raises.

    Args:
        run: the run; samples go to its samples/node.jsonl.
        ifnames: NICs to read; active RDMA ports are read as well.
        interval_s: seconds between samples of the NICs.
        spared: children of the caller that do not belong to the job.
    """

    def __init__(
        self,
        run: RunDir,
        ifnames: list[str],
        interval_s: float,
        spared: Collection[int],
        memory: Optional[MemoryReader] = None,
    ) -> None:
        self._folder = run.samples
        self._file = SampleFile(run, "node.jsonl")
        self._ifnames = ifnames
        self._rdma_ports = [
            f"{port['device']}/{port['port']}" for port in list_rdma_ports() if port["state"] == "ACTIVE"
        ]
        self._interval_s = max(interval_s, _LEAST_INTERVAL_S)
        self._due = self._slow_due = time.monotonic()
        self._idle_until = self._due + _IDLE_LOOK_S
        self._ticks: Optional[Ticks] = None
        self._clock = JobClock(os.getpid(), spared)
        self._groups = GroupFinder("cpu")
        self._memory = MemoryReader() if memory is None else memory
        self._kernel_log = KernelLog()
        self._inspector = InspectorReader(run.path)
        self.job_pid: Optional[int] = None  # pid of the job, once it has started
        self.serves: Optional[int] = None  # port on which the job is to answer requests, until it listens there

    def due_in_s(self) -> float:
        """Seconds until the next sample is due."""
        return max(0.0, self._due - time.monotonic())

    def tick(self) -> None:
        """Take a sample if one is due."""
        now = time.monotonic()
        if now >= self._due:
            interval_s = min(_IDLE_INTERVAL_S, self._interval_s) if now < self._idle_until else self._interval_s
            self._due += interval_s
            if self._due <= now:
                # After the node was suspended, missed samples are not made up for.
                self._due = now + interval_s
            self._sample(is_slow_due=now >= self._slow_due)

    def sample_last(self) -> None:
        """Take the last sample, of everything, now; note files whose names the controller does not accept."""
        self._sample(is_slow_due=True)
        with contextlib.suppress(OSError):
            names = sorted(name for name in os.listdir(self._folder) if name.endswith(".jsonl"))
            strange = [name for name in names if not is_samples_name(name)]
            if strange:
                others = f" and {len(strange) - 1} more" if len(strange) > 1 else ""
                self._file.note(
                    f"samples in {strange[0][:100]!r}{others} are ignored: that is not the name of a samples file"
                )

    def _sample(self, *, is_slow_due: bool) -> None:
        readers: list[Callable[[], Record]] = [partial(_read_nic, name) for name in (*self._ifnames, *self._rdma_ports)]
        if is_slow_due:
            # Due half an interval early: otherwise a sample slightly before the full second would delay it to two.
            self._slow_due = time.monotonic() + _SLOW_INTERVAL_S - self._interval_s / 2
            readers += [self._read_processors, lambda: parse_snmp(read_text("/proc/net/snmp"))]
        records = [record for read in readers for record in self._try(read)]
        if is_slow_due:
            records += [*self._read_limit(), *self._kernel_log.read(), *self._inspector.read()]
            records += self._try(self._read_listening)
        self._try(partial(self._file.append, records))

    def _try(self, action: Callable[[], Optional[Record]]) -> list[Record]:
        try:
            record = action()
        except (OSError, ValueError, KeyError) as error:
            self._file.note(f"a sample could not be taken: {error}")
            return []
        return [] if record is None else [record]

    def _read_processors(self) -> Record:
        before, self._ticks = self._ticks, read_ticks()
        return {
            "kind": "cpu",
            **_shares(before, self._ticks),
            "job_cores": self._clock.read_cores(),
            **_in_gib(self._memory.read(self.job_pid)),
        }

    def _read_listening(self) -> Optional[Record]:
        port = self.serves
        if port is None:
            return None
        from ..facts.network import listens

        if not listens(port, self._clock.members):
            return None
        self.serves = None
        return {"kind": "listening", "port": port}

    def _read_limit(self) -> list[Record]:
        try:
            return [read_cpu_limit(self._groups.find(self.job_pid))]
        except (OSError, ValueError) as error:
            self._file.note(str(error), "cgroup")
            return []


def parse_snmp(text: str) -> Record:
    """A `tcp` record of sent and retransmitted segments in our network namespace.

    `text` is that of /proc/net/snmp: a line of names, then a line of values, for each protocol.
    """
    names, values = (line.split()[1:] for line in text.splitlines() if line.startswith("Tcp:"))
    counters = dict(zip(names, values))
    return {
        "kind": "tcp",
        "sent_segments": int(counters["OutSegs"]),
        "retransmitted_segments": int(counters["RetransSegs"]),
    }


def _read_nic(name: str) -> Record:
    # Stamped at the reading, since rates are computed from these: other readings come before the records are written.
    return {"kind": "nic", "ifname": name, "mono_ns": time.monotonic_ns(), **read_nic(name)}


def _shares(before: Optional[Ticks], now: Ticks) -> Record:
    """Shares of all cores' time since the previous sample, in percent; the kernel's idle time may decrease a little."""
    total = 0 if before is None else now.all - before.all
    if before is None or total <= 0:
        return {"busy_percent": None, "iowait_percent": None, "steal_percent": None}

    def percent(ticks: int) -> float:
        return round(100 * min(1.0, max(0.0, ticks / total)), 1)

    return {
        "busy_percent": percent(total - (now.idle - before.idle)),
        "iowait_percent": percent(now.iowait - before.iowait),
        "steal_percent": percent(now.steal - before.steal),
    }


def _in_gib(memory: Memory) -> Record:
    return {"memory_available_gib": memory.available / _GIB, "memory_total_gib": memory.total / _GIB}


# Columns of the first line of /proc/stat (proc(5)). The first two already contain guest time, which follows these.
_IDLE, _IOWAIT, _STEAL, _COLUMNS = 3, 4, 7, 8
# Fields after the name in /proc/PID/stat (proc(5)): the parent; user and system time, and both of reaped children.
_PARENT = 1
_TIMES = slice(11, 15)
_LOOK_AGAIN_S = 30.0
# Clock ticks are 10 ms: over a shorter time, the figure would be too coarse.
_LEAST_SPAN_S = 0.5


class Ticks(NamedTuple):
    """Clock ticks of all cores since boot."""

    all: int
    idle: int  # nothing ran, `iowait` included
    iowait: int  # nothing ran, and a disk was waited for
    steal: int  # taken by the hypervisor


def read_ticks(path: str = "/proc/stat") -> Ticks:
    """Read the clock ticks of all cores.

    Raises:
        OSError, ValueError: the file cannot be read, or has another format.
    """
    columns = [int(word) for word in read_text(path).partition("\n")[0].split()[1:]][:_COLUMNS]
    if len(columns) < _COLUMNS:
        raise ValueError(f"{path} does not begin with the times of all cores")
    return Ticks(sum(columns), columns[_IDLE] + columns[_IOWAIT], columns[_IOWAIT], columns[_STEAL])


class JobClock:
    """Processor seconds of all descendants of a process that adopts its orphans.

    The parent of a process is read once; after that, processes that are not descendants cost nothing. Since pids are
    reused, all parents are read again every half minute.

    Args:
        root: pid of the caller, which reaps its children.
        spared: pids that do not count, nor do their children; may change.
    """

    def __init__(self, root: int, spared: Collection[int]) -> None:
        self._root = root
        self._spared = spared
        self._members: set[int] = set()
        self._strangers: set[int] = set()
        self._look_again = 0.0
        self._before: Optional[tuple[float, float]] = None

    @property
    def members(self) -> set[int]:
        """The descendants, as of the last reading."""
        return self._members

    def read_cores(self) -> Optional[float]:
        """Cores used since the last call; None for the first call, or if the last one was too recent."""
        before, now = self._before, time.monotonic()
        if before is not None and now - before[0] < _LEAST_SPAN_S:
            return None
        self._before = (now, self.read_s())
        # A process that ends during a reading may be missing in it, so the sum may decrease.
        return None if before is None else round(max(0.0, self._before[1] - before[1]) / (now - before[0]), 3)

    def read_s(self) -> float:
        """Processor seconds of the job so far."""
        self._meet()
        own = os.times()
        ticks = 0
        for pid in sorted(self._members):
            fields = stat_fields(pid)
            ticks += sum(map(int, fields[_TIMES])) if fields else 0
        return own.children_user + own.children_system + ticks / os.sysconf("SC_CLK_TCK")

    def _meet(self) -> None:
        """Sort new processes into descendants and strangers."""
        there = list_pids()
        now = time.monotonic()
        if now >= self._look_again:
            self._look_again = now + _LOOK_AGAIN_S
            self._members, self._strangers = set(), set()
        self._members &= there - set(self._spared)
        self._strangers &= there
        new = {}
        for pid in there - self._members - self._strangers - {self._root, *self._spared}:
            fields = stat_fields(pid)
            if fields:
                new[pid] = int(fields[_PARENT])
        ours = {self._root, *self._members}
        while children := {pid for pid, parent in new.items() if parent in ours} - ours:
            ours |= children
        self._members = ours - {self._root}
        self._strangers |= new.keys() - ours


_KB_PER_GB = 1e6
_LEAST_GPU_INTERVAL_S = 0.1
# NVML measures PCIe throughput for 20 ms per direction, and the call takes that long.
_PCIE_INTERVAL_S = 1.0
_PCIE_ASK_S = 0.04
# Share of the sampling interval that may be spent on PCIe throughput.
_PCIE_SHARE = 0.4
# NVML reports these for the whole GPU: with MIG, other instances would count as well.
_OF_ALL_PARTS = ("sm_percent", "memory_used_gib", "memory_total_gib", "power_w", "energy_j")
# Bits of nvmlClocksThrottleReason* (nvml.h) and nvidia-smi's names of them.
_THROTTLE_REASONS = {
    0x1: "gpu_idle",
    0x2: "applications_clocks_setting",
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
}


def start_gpu_sampler(run: RunDir, indices: list[int], interval_s: float) -> int:
    """Fork the GPU sampler and return its pid; it writes samples/gpu.jsonl until its parent ends or kills it."""
    parent = os.getpid()

    def sample() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        _sample_until_alone(SampleFile(run, "gpu.jsonl"), indices, max(interval_s, _LEAST_GPU_INTERVAL_S), parent)

    return fork_child(sample)


def _sample_until_alone(file: SampleFile, indices: list[int], interval_s: float, parent: int) -> None:
    try:
        import pynvml

        pynvml.nvmlInit()
    except ImportError:
        file.note("pynvml is not installed", "gpus")
        return
    except pynvml.NVMLError as error:
        file.note(str(error), "gpus")
        return
    gpus = [gpu for index in indices if (gpu := _open(pynvml, index, file)) is not None]
    due = time.monotonic()
    while os.getppid() == parent:
        reader = _whose_pcie(gpus, interval_s)
        with contextlib.suppress(OSError):
            file.append([gpu.read(pcie=gpu in reader) for gpu in gpus])
        due = max(due + interval_s, time.monotonic())
        time.sleep(max(0.0, due - time.monotonic()))


def _open(nvml: Any, index: int, file: SampleFile) -> Optional[_Gpu]:
    """The GPU of this index; None if there is none, or it fell off the bus. The others are sampled anyway."""
    try:
        return _Gpu(nvml, index)
    except nvml.NVMLError as error:
        file.note(f"GPU {index}: {error}", "gpus")
        return None


class _Gpu:
    """Reads one GPU. A figure without a sensor is None."""

    def __init__(self, nvml: Any, index: int) -> None:
        self._nvml = nvml
        self._handle = nvml.nvmlDeviceGetHandleByIndex(index)
        self.pcie_asked = float("-inf")
        self._fixed: Record = {
            "index": index,
            "sm_clock_max_mhz": self._ask("MaxClockInfo", nvml.NVML_CLOCK_SM),
            "pcie_gen_max": self._ask("MaxPcieLinkGeneration"),
            "pcie_width_max": self._ask("MaxPcieLinkWidth"),
        }
        # The current mode, and the one after a reset; a GPU without MIG returns an error.
        if (self._ask("MigMode") or [0])[0]:
            self._fixed["mig"] = True

    def read(self, *, pcie: bool) -> Record:
        """A `gpu` record; with `pcie`, it includes PCIe throughput, which takes 40 ms."""
        nvml = self._nvml
        throughput: Record = {}
        if pcie:
            self.pcie_asked = time.monotonic()
            received = self._ask("PcieThroughput", nvml.NVML_PCIE_UTIL_RX_BYTES, per=_KB_PER_GB)
            throughput = {
                "pcie_rx_gb_per_s": received,
                "pcie_tx_gb_per_s": self._ask("PcieThroughput", nvml.NVML_PCIE_UTIL_TX_BYTES, per=_KB_PER_GB),
            }
        memory, rates = self._memory(), self._ask("UtilizationRates")
        record: Record = {
            "kind": "gpu",
            "mono_ns": time.monotonic_ns(),
            **self._fixed,
            "sm_percent": None if rates is None else rates.gpu,
            "memory_used_gib": None if memory is None else memory.used / _GIB,
            "memory_total_gib": None if memory is None else memory.total / _GIB,
            "power_w": self._ask("PowerUsage", per=1000),
            "power_limit_w": self._ask("EnforcedPowerLimit", per=1000),
            "sm_clock_mhz": self._ask("ClockInfo", nvml.NVML_CLOCK_SM),
            "temperature_c": self._ask("Temperature", nvml.NVML_TEMPERATURE_GPU),
            "pcie_gen": self._ask("CurrPcieLinkGeneration"),
            "pcie_width": self._ask("CurrPcieLinkWidth"),
            **throughput,
            "throttle": self._throttle(),
            "energy_j": self._ask("TotalEnergyConsumption", per=1000),
            "ecc_uncorrected": self._ask(
                "TotalEccErrors", nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
            ),
        }
        return {**record, **dict.fromkeys(_OF_ALL_PARTS)} if "mig" in record else record

    def _memory(self) -> Optional[Any]:
        """Memory as nvidia-smi shows it since driver 510: the older call counts the driver's reserve as used."""
        version = getattr(self._nvml, "nvmlMemory_v2", None)
        second = None if version is None else self._ask("MemoryInfo", version)
        return self._ask("MemoryInfo") if second is None else second

    def _ask(self, question: str, *arguments: object, per: Optional[float] = None) -> Optional[Any]:
        """The answer of an nvmlDeviceGet... call, divided by `per`; None if the call fails or does not exist."""
        query: Optional[Callable[..., Any]] = getattr(self._nvml, f"nvmlDeviceGet{question}", None)
        try:
            answer = None if query is None else query(self._handle, *arguments)
        except self._nvml.NVMLError:
            # A GPU without one sensor, or a driver without one call, still has the others.
            return None
        return answer if per is None or answer is None else answer / per

    def _throttle(self) -> list[str]:
        reasons = self._ask("CurrentClocksThrottleReasons") or 0
        return [name for bit, name in _THROTTLE_REASONS.items() if reasons & bit]


def _whose_pcie(gpus: list[_Gpu], interval_s: float) -> list[_Gpu]:
    """GPUs whose PCIe throughput is measured next: the least recently measured, as many as the time allows."""
    now = time.monotonic()
    # With a sampling interval that does not divide a second, this must not become every other second.
    due = [gpu for gpu in gpus if now - gpu.pcie_asked > _PCIE_INTERVAL_S - interval_s / 2]
    count = max(1, int(interval_s * _PCIE_SHARE / _PCIE_ASK_S))
    return sorted(due, key=lambda gpu: gpu.pcie_asked)[:count]
