"""A small run as its nodes would have recorded it: two nodes of two workers, 40 steps, the first five slower.

The second node is late in every step, and a little hotter.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from multinode.findings.finding import Finding
from multinode.profile.bottleneck import Bottleneck
from multinode.profile.calls import SeenCall
from multinode.profile.figures import Alone, InTraining, LikelyCause, Straggler, TraceView, WorkerTrace
from multinode.profile.machine_use import GpuUse, NodeUse
from multinode.profile.nics import NicUse
from multinode.profile.observed import Observed, ObservedNode, observe
from multinode.profile.step_bytes import BytesPerStep
from multinode.profile.step_split import StepSplit, WorkerSplit
from multinode.profile.summary import Comm, StepTimes, summarise_run
from multinode.profile.throughput import Utilisation
from multinode.records.run import NodeRun, Run
from multinode.records.run_directory import RunDirectory
from multinode.records.samples import (
    CallCount,
    CollectiveSample,
    CpuSample,
    DdpSample,
    GpuSample,
    GroupSample,
    LossSample,
    NicSample,
    Sample,
    StepSample,
    TcpSample,
    TrafficSample,
    WorkerSample,
)
from multinode.records.status import Status
from multinode.stats.estimate import exactly
from multinode.stats.unknown import UNMEASURED, Unknown
from tests import make

__all__ = ["NAMES", "PLAN", "RUN", "STEPS", "SUMMARY", "collective_samples", "observed", "store_observed"]

STEPS = 40
NAMES = ("box1", "box2")
_WARM_UP = 5
_BEGUN_S = 1_800_000_000.0
_STEP_S = 0.4
_WORKERS = 2
# Node clocks differ, and their monotonic clocks began at different times.
_CLOCK_S = (0.0, 0.25)
_SECOND_NS = 10**9

RUN = make.run(
    *(
        NodeRun(name=name, node_rank=index, state="ended", status=Status(state="ended", exit_code=0, cause="exited"))
        for index, name in enumerate(NAMES)
    ),
    run_id="20260102-aa",
    job="sft.yaml (LLaMA-Factory sft)",
    engine="llamafactory",
    started_s=_BEGUN_S - 20,
    ended_s=_BEGUN_S + 30,
    world_size=len(NAMES) * _WORKERS,
)

PLAN = make.plan(*NAMES, workers=_WORKERS, link_gbit_per_s=10.0, run_id=RUN.run_id, engine=RUN.engine, job=RUN.job)

SUMMARY = make.summary(
    run_id=RUN.run_id,
    strategy="DDP",
    world_size=RUN.world_size,
    steps=STEPS,
    steady_steps=35,
    rule="the first 5 of 40 steps are excluded as warm-up",
    step_time_ms=StepTimes(median=exactly(401.25), p95=433.5, cv=0.031),
    samples_per_s=39.87,
    tokens_per_s=exactly(20413.0),
    effective_tokens_per_s=17350.0,
    tgs=exactly(5103.25),
    effective_tgs=4337.5,
    tokens_per_sample=512.0,
    attention_length=Unknown("the Trainer did not finish"),
    micro_steps=2.0,
    parameters=8_030_261_248,
    trainable=20_971_520,
    first_loss=2.5,
    last_loss=1.11,
    comm=Comm(
        bytes_per_step=BytesPerStep(calls=125.8e6, expected=126.3e6, nic=127.1e6),
        exposed_ms=exactly(120.5),
        exposed_share=0.3003,
        overlap=0.41,
        in_training_gb_per_s=0.951,
        in_training=InTraining(
            busbw_gb_per_s=0.951,
            source="ddp span",
            alone=Alone(run_id="20260101-ff", busbw_gb_per_s=1.12),
            findings=(Finding(message="The training's all-reduces reach 0.951 GB/s busbw"),),
        ),
        calls=(
            SeenCall(op="all_reduce", ranks=4, nodes=2, backend="nccl", size_bytes=25e6, count=3.0, source="ddp"),
            SeenCall(op="all_reduce", ranks=4, nodes=2, backend="nccl", size_bytes=8.886e6, count=1.0, source="ddp"),
        ),
        findings=(Finding(message="NIC counters match the expected traffic, within 1%"),),
    ),
    split=StepSplit(
        source="ddp",
        mean=make.split(
            401.25, compute_ms=210.0, exposed_ms=120.5, wait_ms=22.5, data_ms=8.25, optimizer_ms=30.0,
            host_ms=10.0, overlap=0.41,
        ),
        workers=tuple(
            WorkerSplit(
                rank=rank, step_ms=401.25, compute_ms=210.0 + 15 * (rank // 2), exposed_ms=120.5,
                wait_ms=30.0 - 15 * (rank // 2), data_ms=8.25, optimizer_ms=30.0, host_ms=2.5, overlap=0.41,
            )
            for rank in range(4)
        ),
        comm_ms=204.0,
        rule="means over the 35 measured steps",
    ),
    bottleneck=Bottleneck(
        kind="network",
        share=0.3003,
        message="exposed communication takes 120 of 401 ms per step (30%)",
    ),
    stragglers=(
        Straggler(
            node="box2",
            ranks=(2, 3),
            late_ms=22.5,
            share=0.056,
            slower=1.06,
            message="box2 is 6% slower: box1 waited 6% of the time",
            hint="check the fans of box2",
            causes=(
                LikelyCause(cause="gpu_heat", message="GPU 1 of box2 runs at 1410 of 2520 MHz, at 88 C"),
            ),
        ),
    ),
    nodes=tuple(
        NodeUse(
            node=name,
            node_rank=index,
            ranks=(2 * index, 2 * index + 1),
            nics=(
                NicUse(
                    ifname="ens1f0", in_gbit_per_s=2.41, out_gbit_per_s=2.53, peak_in_gbit_per_s=8.9,
                    peak_out_gbit_per_s=9.1, errors=0, drops=17 * index, link_gbit_per_s=10.0, share=0.253,
                ),
            ),
            gpus=(
                GpuUse(
                    index=6, sm_percent=97.0, peak_memory_gib=20.25, memory_total_gib=24.0, power_w=311.0,
                    power_limit_w=450.0, sm_clock_mhz=2505.0, sm_clock_max_mhz=2520.0, temperature_c=71.0 + 17 * index,
                    pcie="gen 4 x16", throttle={"hw_thermal_slowdown": 0.4} if index else {},
                ),
            ),
            cpu_busy_percent=23.5,
            job_cores=3.75,
            memory_available_gib=101.5,
            retransmitted_share=0.0002,
            cpu_steal_percent=Unknown("this kernel does not report it") if index else UNMEASURED,
        )
        for index, name in enumerate(NAMES)
    ),
    utilisation=Utilisation(
        model_tflops=51.2, hardware_tflops=68.1, mfu=0.3099, hfu=0.4122,
        denominator="165.2 TFLOP/s per GPU, dense bf16 with fp32 accumulation (maker)",
        rule="4 x 7,504,924,672 matrix parameters (with the output layer, without the embedding) + 6 x 20,971,520 of "
        "the adapter",
    ),
    trace=TraceView(
        workers=(
            WorkerTrace(
                rank=0, steps=5, step_ms=410.0, comm_ms=199.0, exposed_ms=118.0, overlap=0.407, compute_ms=250.0
            ),
        ),
        comm_ms=199.0,
        exposed_ms=118.0,
        overlap=0.407,
        busbw_gb_per_s=0.97,
        findings=(Finding(message="They agree within 2% of the step"),),
    ),
    dataset_samples=Unknown("the Trainer did not finish"),
)  # fmt: skip


def observed(*, gpus: bool = True, steps: int = STEPS) -> Observed:
    """What the two nodes recorded; without `gpus` as on nodes that have none."""
    return observe(RUN.run_id, [_node(index, name, steps=steps, gpus=gpus) for index, name in enumerate(NAMES)])


def store_observed(root: Path, run: Run = RUN, *, torn: bytes = b"", **documents: Any) -> RunDirectory:
    """The run as a launch stores it: record, plan and samples.

    Args:
        root: directory of runs.
        run: its record.
        torn: the last line of each file of samples.
        documents: what else is stored, as for `make.store`; without `summary`, that of the samples.
    """
    plan = msgspec.structs.replace(PLAN, run_id=run.run_id)
    directory = make.store(root, run.run_id, plan=plan, run=run, **documents)
    for node in observed().nodes:
        lines = b"".join(msgspec.json.encode(sample) + b"\n" for sample in node.samples)
        directory.append_samples(node.node_rank, "all.jsonl", lines + torn)
    if "summary" not in documents:
        summarise_run(directory, plan)
    return directory


def collective_samples() -> list[Sample]:
    """Two messages of a collective test, measured by one worker."""
    return [
        CollectiveSample(
            rank=0, collective="all_reduce", dtype="float", size_bytes=size, count=size // 4, times_us=(100.0, 110.5),
            num_wrong=0, index=index,
        )
        for index, size in enumerate((1024, 4096))
    ]  # fmt: skip


def _node(index: int, name: str, *, steps: int, gpus: bool) -> ObservedNode:
    ranks = (2 * index, 2 * index + 1)
    samples = [sample for rank in ranks for sample in _worker(rank, steps)]
    samples += [sample for second in range(-2, 19) for sample in _machine(index, second, gpus=gpus)]
    return ObservedNode(
        name=name, node_rank=index, ranks=ranks, ifname="ens1f0", link_gbit_per_s=10.0, samples=tuple(samples)
    )


def _worker(rank: int, steps: int) -> Iterator[Sample]:
    node = rank // _WORKERS
    yield WorkerSample(
        rank=rank, local_rank=rank % _WORKERS, world_size=4, time_s=_BEGUN_S - 1 + _CLOCK_S[node], source="trainer"
    )
    yield GroupSample(rank=rank, group="default", ranks=(0, 1, 2, 3), backend="nccl")
    buckets = (CallCount(op="all_reduce", group="default", size_bytes=25e6, count=3, source="ddp"),)
    yield TrafficSample(rank=rank, traffic=0, calls=buckets)
    for number in range(1, steps + 1):
        took_s = 2 * _STEP_S if number <= _WARM_UP else _STEP_S + 0.0001 * ((7 * number) % 11)
        since_s = _STEP_S * (number + min(number, _WARM_UP))
        yield StepSample(
            rank=rank, step=number, total_steps=steps, time_s=_BEGUN_S + since_s + _CLOCK_S[node],
            mono_ns=int((since_s + 100 * (node + 1)) * _SECOND_NS), step_time_us=took_s * 1e6, samples=4, micro_steps=2,
            tokens=2048, effective_tokens=1740, traffic=0,
            phases_us={"data": 8250.0, "forward": 70_000.0, "backward": 260_000.0, "optimizer": 30_000.0},
        )  # fmt: skip
        yield DdpSample(
            rank=rank, step=number, iteration=number, bucket_sizes_bytes=(25_000_000,) * 3, forward_us=70_000.0,
            backward_us=140_000.0, comm_us=204_000.0, overlap_us=83_500.0,
        )  # fmt: skip
        if rank == 0 and number % 5 == 0:
            yield LossSample(rank=0, step=number, loss=2.5 - 0.03 * number)


def _machine(index: int, second: int, *, gpus: bool) -> Iterator[Sample]:
    time_s = _BEGUN_S + second + _CLOCK_S[index]
    mono_ns = int((second + 100 * (index + 1)) * _SECOND_NS)
    # A second before the first step the NIC is idle, then 2.4 Gbit/s come in and 2.56 go out.
    since = max(0, second) + 1000
    yield NicSample(
        time_s=time_s, mono_ns=mono_ns, ifname="ens1f0", rx_bytes=300_000_000 * since, tx_bytes=320_000_000 * since,
        rx_packets=207_000 * since, tx_packets=221_000 * since, rx_errors=0, tx_errors=0, rx_dropped=0, tx_dropped=0,
    )  # fmt: skip
    yield TcpSample(time_s=time_s, mono_ns=mono_ns, sent_segments=1000 * since, retransmitted_segments=since // 10)
    yield CpuSample(
        time_s=time_s, mono_ns=mono_ns, busy_percent=20.0 + second % 5, iowait_percent=0.5, job_cores=3.5,
        memory_available_gib=101.5, memory_total_gib=128.0,
    )  # fmt: skip
    if gpus:
        yield GpuSample(
            time_s=time_s, mono_ns=mono_ns, index=6, sm_percent=97.0, memory_used_gib=20.25, memory_total_gib=24.0,
            power_w=311.0, power_limit_w=450.0, sm_clock_mhz=2505.0, sm_clock_max_mhz=2520.0, temperature_c=71.0,
            throttle=("sw_power_cap",) if index else (),
        )  # fmt: skip
