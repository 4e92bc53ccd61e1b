"""nccl-test, bench and the sampler on a real GPU, held against torch's own events and nvidia-smi."""

from __future__ import annotations

import statistics
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Self

import pytest

from multinode.bench.measure import bench
from multinode.launch.context import ExecuteOptions, Launched, RunContext
from multinode.network.measure import Extent, nccl_test
from multinode.records.benchmark import CollectiveTest, DeviceTest, Message
from multinode.records.samples import GpuSample, parse_samples

from .one_gpu import launch_of

pytestmark = pytest.mark.gpu

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
SIZE = 4096
# A second and more of it.
ROUNDS, IN_A_ROW = 300, 25


def test_collectives_of_two_ranks_are_exact_and_go_over_sockets(context: RunContext) -> None:
    messages = tuple(Message(collective=name, size_bytes=size) for name in OPERATIONS for size in (1 << 10, 1 << 22))
    test = CollectiveTest(messages=messages, iters=5, backend="nccl")
    report = nccl_test(launch_of(test, execute=ExecuteOptions(kind="nccl-test", lease_s=60.0)), Extent(), context)
    assert (report.backend, report.timer, report.world_size) == ("nccl", "cuda", 2)
    assert [(row.collective, row.size_bytes, row.num_wrong) for row in report.rows] == [
        (message.collective, message.size_bytes, 0) for message in messages
    ]
    nccl = report.nccl
    assert nccl is not None
    assert (nccl.network, nccl.bootstrap_ifname, nccl.ring) == ("Socket", "lo", (0, 1))
    assert nccl.version
    # Nothing takes a way that two hosts do not have.
    assert set(nccl.transports) == {"NET/Socket/0"}


def time_matmul() -> float:
    """Median seconds of a product, by torch's own events around as many in a row as keep the GPU as busy as bench does.

    One alone would begin a launch later than its event, and at the clock of a GPU that rests in between.
    """
    import torch

    left, right = (torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    pairs = []
    for _ in range(ROUNDS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(IN_A_ROW):
            torch.mm(left, right)
        end.record()
        pairs.append((start, end))
    torch.cuda.synchronize()
    seconds: list[float] = [start.elapsed_time(end) / 1000 / IN_A_ROW for start, end in pairs[ROUNDS // 4 :]]
    return statistics.median(seconds)


def test_a_matrix_product_is_as_fast_as_in_a_plain_loop(context: RunContext) -> None:
    test = DeviceTest(kinds=("matmul",), dtypes=("bf16",), sizes=(SIZE,), seconds=1.0)
    ratios = []
    for number in range(3):
        execute = ExecuteOptions(kind="bench", lease_s=60.0)
        (worker,) = bench(launch_of(test, nodes=1, execute=execute, run_id=f"b{number}"), ("alone",), context).workers
        (found,) = worker.tests
        assert found.alone is not None
        # bench says TFLOP/s.
        ratios.append(found.alone.value.value / (2 * SIZE**3 / time_matmul() / 1e12))
    assert statistics.median(ratios) == pytest.approx(1.0, abs=0.05)


def test_a_short_product_is_measured_without_its_launch(context: RunContext) -> None:
    test = DeviceTest(kinds=("matmul",), dtypes=("bf16",), sizes=(1024,), seconds=0.5)
    execute = ExecuteOptions(kind="bench", lease_s=60.0)
    (worker,) = bench(launch_of(test, nodes=1, execute=execute, run_id="short"), ("alone",), context).workers
    (found,) = worker.tests
    assert found.alone is not None
    assert not found.alone.launch_bound


class NvidiaSmi:
    """Utilisation and memory of GPU 0 by nvidia-smi, read while it is entered."""

    def __init__(self) -> None:
        self.utilisation: list[float] = []
        self.memory_mib: list[float] = []
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join(timeout=60)

    def _read(self) -> None:
        query = ["nvidia-smi", "-i", "0", "--query-gpu=utilization.gpu,memory.used", "--format=csv,noheader,nounits"]
        while not self._ends.wait(1.0):
            text = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True).stdout
            utilisation, memory_mib = text.split(",")
            self.utilisation.append(float(utilisation))
            self.memory_mib.append(float(memory_mib))


def test_the_sampler_says_what_nvidia_smi_says(train: Callable[..., Launched]) -> None:
    began = time.time()
    with NvidiaSmi() as smi:
        launched = train("--seconds", "30", "--batch", "4096")
    ended = time.time()
    assert launched.run.status == "succeeded", launched.run.first_failure
    lines = launched.directory.sample_lines(0)
    samples = [sample for sample in parse_samples(lines) if isinstance(sample, GpuSample)]
    assert len(samples) > 20
    assert ended - began > 30
    # Of the time in which both saw the training: the middle of what each read.
    busy = statistics.median(sample.sm_percent for sample in samples if sample.sm_percent is not None)
    used_gib = max(sample.memory_used_gib for sample in samples if sample.memory_used_gib is not None)
    assert busy == pytest.approx(statistics.median(smi.utilisation), abs=5)
    assert used_gib == pytest.approx(max(smi.memory_mib) / 1024, rel=0.02)
