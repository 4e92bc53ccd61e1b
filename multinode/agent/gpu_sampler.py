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

from .channel import Record
from .fork import fork_child
from .rundir import RunDir
from .sampler import SampleFile

__all__ = ["start_gpu_sampler"]

_GIB = 1 << 30


def start_gpu_sampler(run: RunDir, indices: list[int], interval_s: float) -> int:
    """Fork the sampler, which writes samples/gpu.jsonl until its parent is gone or kills it; its pid."""
    parent = os.getpid()

    def sample() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        _sample_until_alone(SampleFile(run, "gpu.jsonl"), indices, interval_s, parent)

    return fork_child(sample)


def _sample_until_alone(file: SampleFile, indices: list[int], interval_s: float, parent: int) -> None:
    try:
        import pynvml

        pynvml.nvmlInit()
        handles = {index: pynvml.nvmlDeviceGetHandleByIndex(index) for index in indices}
    except ImportError:
        file.note("no GPU samples: pynvml is not there")
        return
    except pynvml.NVMLError as error:
        file.note(f"no GPU samples: {error}")
        return
    while os.getppid() == parent:
        with contextlib.suppress(OSError):
            file.append([_read_gpu(pynvml, index, handle) for index, handle in handles.items()])
        time.sleep(interval_s)


def _read_gpu(nvml: Any, index: int, handle: object) -> Record:
    def ask(query: Callable[[], Any]) -> Optional[Any]:
        # A card that lacks one sensor still has the others.
        try:
            return query()
        except nvml.NVMLError:
            return None

    memory = ask(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
    power_mw = ask(lambda: nvml.nvmlDeviceGetPowerUsage(handle))
    rates = ask(lambda: nvml.nvmlDeviceGetUtilizationRates(handle))
    return {
        "kind": "gpu",
        "index": index,
        "sm_percent": None if rates is None else rates.gpu,
        "memory_used_gib": None if memory is None else memory.used / _GIB,
        "power_w": None if power_mw is None else power_mw / 1000,
        "sm_clock_mhz": ask(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
        "temperature_c": ask(lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
    }
