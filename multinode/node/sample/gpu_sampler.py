"""Samples of the GPUs, in a process of its own: a driver call on a GPU that fell off the bus may never return.

Uses pynvml, which rides in the archive; without it, or without a driver, one note says so.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from typing import Any, Optional

from ..channel import Record
from ..processes import fork_child
from ..rundir import RunDir
from .sampler import SampleFile

_GIB = 1 << 30
_KB_PER_GB = 1e6
_LEAST_INTERVAL_S = 0.1
# NVML counts what passes PCIe for 20 ms, each way, and the call takes as long.
_PCIE_INTERVAL_S = 1.0
_PCIE_ASK_S = 0.04
# Part of the time between two samples that may be spent on that.
_PCIE_SHARE = 0.4
# Bits of nvmlClocksThrottleReason* (nvml.h), and the names that nvidia-smi has for them.
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
    """Fork the sampler, which writes samples/gpu.jsonl until its parent is gone or kills it; its pid."""
    parent = os.getpid()

    def sample() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        _sample_until_alone(SampleFile(run, "gpu.jsonl"), indices, max(interval_s, _LEAST_INTERVAL_S), parent)

    return fork_child(sample)


def _sample_until_alone(file: SampleFile, indices: list[int], interval_s: float, parent: int) -> None:
    try:
        import pynvml

        pynvml.nvmlInit()
    except ImportError:
        file.note("no GPU samples: pynvml is not installed")
        return
    except pynvml.NVMLError as error:
        file.note(f"no GPU samples: {error}")
        return
    gpus = [gpu for index in indices if (gpu := _open(pynvml, index, file)) is not None]
    due = time.monotonic()
    while os.getppid() == parent:
        asked = _whose_pcie(gpus, interval_s)
        with contextlib.suppress(OSError):
            file.append([gpu.read(pcie=gpu in asked) for gpu in gpus])
        due = max(due + interval_s, time.monotonic())
        time.sleep(max(0.0, due - time.monotonic()))


def _open(nvml: Any, index: int, file: SampleFile) -> Optional[_Gpu]:
    """The GPU; None where there is none of this number, or it fell off the bus: the others are sampled all the same."""
    try:
        return _Gpu(nvml, index)
    except nvml.NVMLError as error:
        file.note(f"no GPU samples: GPU {index}: {error}")
        return None


class _Gpu:
    """One GPU. What it has no sensor for is None."""

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

    def read(self, *, pcie: bool) -> Record:
        """A `gpu` record; with `pcie` after the 40 ms that it takes to count what passes."""
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
        return {
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

    def _memory(self) -> Optional[Any]:
        """As nvidia-smi has it since driver 510: the first version of the call counts the driver's reserve as used."""
        version = getattr(self._nvml, "nvmlMemory_v2", None)
        second = None if version is None else self._ask("MemoryInfo", version)
        return self._ask("MemoryInfo") if second is None else second

    def _ask(self, what: str, *arguments: object, per: Optional[float] = None) -> Optional[Any]:
        """What nvmlDeviceGet... answers; divided where NVML's unit is a smaller one than ours."""
        query: Callable[..., Any] = getattr(self._nvml, f"nvmlDeviceGet{what}")
        try:
            answer = query(self._handle, *arguments)
        except self._nvml.NVMLError:
            # A GPU that lacks one sensor, or a driver that lacks one call, still has the others.
            return None
        return answer if per is None else answer / per

    def _throttle(self) -> list[str]:
        reasons = self._ask("CurrentClocksThrottleReasons") or 0
        return [name for bit, name in _THROTTLE_REASONS.items() if reasons & bit]


def _whose_pcie(gpus: list[_Gpu], interval_s: float) -> list[_Gpu]:
    """Whose turn it is to have its PCIe counted: those longest not asked, as many as the time allows."""
    now = time.monotonic()
    # A sampling interval that does not divide a second must not make it every other second.
    due = [gpu for gpu in gpus if now - gpu.pcie_asked > _PCIE_INTERVAL_S - interval_s / 2]
    count = max(1, int(interval_s * _PCIE_SHARE / _PCIE_ASK_S))
    return sorted(due, key=lambda gpu: gpu.pcie_asked)[:count]
