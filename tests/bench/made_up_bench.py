"""Nodes that measured their devices, made up: each with the speeds, clocks and limits that a test wants."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from multinode.bench.figures import BenchReport
from multinode.bench.judge import summarise_bench
from multinode.bench.nodes import BenchPart
from multinode.records.benchmark import DeviceTest
from multinode.records.samples import CgroupSample, CpuSample, DeviceSample, GpuSample, Sample, SpeedSample

SECOND = 1_000_000_000
A100 = "NVIDIA A100-SXM4-80GB"
XEON = "Intel(R) Xeon(R) Processor @ 2.50GHz"
# What an A100 does in bf16 with matrices of 4096 rows, TFLOP/s; a copy in its memory and over its bus, GB/s.
MATMUL, COPY, BUS = 250.0, 1700.0, 24.0


def speed(test: str, rate: float, *, rank: int = 0, index: int = 0, **more: Any) -> SpeedSample:
    """A test that went at this rate, in TFLOP/s or GB/s; ten timings that scatter by 1%."""
    fields: dict[str, Any] = {"dtype": "bf16", "size": 4096} if test == "matmul" else {"dtype": "fp32"}
    if test in {"copy", "to_device"}:
        fields |= {"size": 1 << 28, "width_bytes": 4}
    work = 2 * 4096**3 / 1e12 if test == "matmul" else (2 if test == "copy" else 1) * (4 << 28) / 1e9
    times = [work / rate * 1e6 * (1 + 0.01 * (-1) ** number) for number in range(10)]
    began = (10 + index) * SECOND
    fields |= {"times_us": tuple(times), "began_mono_ns": began, "ended_mono_ns": began + SECOND}
    return SpeedSample(rank=rank, index=index, test=test, **(fields | more))


def speeds(scale: float = 1.0, *, rank: int = 0, bus: float = 1.0) -> list[Sample]:
    """All tests at this share of what an A100 does; the bus at another."""
    rates = (("matmul", MATMUL * scale), ("copy", COPY * scale), ("to_device", BUS * scale * bus))
    return [speed(test, rate, rank=rank, index=index) for index, (test, rate) in enumerate(rates)]


def gpu(index: int = 0, **readings: Any) -> list[Sample]:
    """A GPU's samples over the time of all tests."""
    usual: dict[str, Any] = {
        "sm_percent": 100,
        "sm_clock_mhz": 1400,
        "sm_clock_max_mhz": 1410,
        "temperature_c": 60,
        "pcie_gen": 4,
        "pcie_width": 16,
        "pcie_gen_max": 4,
        "pcie_width_max": 16,
    }
    return [GpuSample(time_s=0, mono_ns=at * SECOND, index=index, **(usual | readings)) for at in range(9, 15)]


def processors(busy: float = 50.0, *, steal: float = 0.0, job: float = 1.0) -> list[Sample]:
    """A node's processors over that time."""
    return [
        CpuSample(time_s=0, mono_ns=at * SECOND, busy_percent=busy, steal_percent=steal, job_cores=job)
        for at in range(9, 15)
    ]


def limited(cores: float | None, share: float = 0.7) -> list[Sample]:
    """A control group's samples; it was held back for this share of the time."""
    return [
        CgroupSample(
            time_s=0,
            mono_ns=at * SECOND,
            quota_cores=cores,
            throttled_us=at * share * 1e6,
            periods=at * 10,
            throttled_periods=at * 7,
        )
        for at in range(9, 15)
    ]


def on_gpu(*samples: Sequence[Sample], rank: int = 0, **about: Any) -> tuple[Sample, ...]:
    """What a worker with an A100 recorded."""
    told: dict[str, Any] = {
        "device": "cuda",
        "name": A100,
        "capability": "sm_80",
        "cores": 16,
        "node_cores": 16,
        "torch": "2.8.0",
        "cuda": "12.8",
    }
    return (DeviceSample(rank=rank, local_rank=rank, **(told | about)), *(one for some in samples for one in some))


def on_cpu(*samples: Sequence[Sample], rank: int = 0, **about: Any) -> tuple[Sample, ...]:
    """What a worker on two cores recorded."""
    told: dict[str, Any] = {
        "device": "cpu",
        "name": XEON,
        "threads": 2,
        "cores": 2,
        "node_cores": 2,
        "capability": "AVX512",
        "torch": "2.8.0",
    }
    return (DeviceSample(rank=rank, local_rank=rank, **(told | about)), *(one for some in samples for one in some))


def part(node_rank: int, samples: Sequence[Sample], phase: str = "alone", **more: Any) -> BenchPart:
    """A node's part, with a worker and a GPU for each rank that said what it is."""
    ranks = tuple(sorted({one.rank for one in samples if isinstance(one, DeviceSample)}))
    fields: dict[str, Any] = {"ranks": ranks, "gpus": ranks, "run_id": f"r-{phase}-{node_rank}"}
    fields |= {"phase": phase, "node": f"node{node_rank}", "node_rank": node_rank, "samples": tuple(samples)}
    return BenchPart(**(fields | more))


def report(*parts: BenchPart) -> BenchReport:
    """The report of these parts."""
    return summarise_bench("r", parts, DeviceTest())


def verdict(found: BenchReport) -> tuple[str, ...]:
    """The sentences of its plain text, without further causes and fixes."""
    last = [found.outcome.message] if found.outcome is not None else []
    return (
        *(part.message for part in found.unmeasured),
        *(anomaly.text for anomaly in found.anomalies),
        *last,
    )
