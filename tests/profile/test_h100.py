"""What trainings of one and of two ranks on an H100 recorded (tests/gpu/h100), read as `show` reads it."""

from __future__ import annotations

from pathlib import Path

import pytest

from multinode.network.nic_path import parse_nccl_log
from multinode.profile.calls import last_models
from multinode.profile.exposure import find_exposure
from multinode.profile.observed import Observed, ObservedNode, observe
from multinode.profile.step_split import PART_NAMES, StepSplit, split_steps
from multinode.profile.summary import summarise
from multinode.profile.throughput import ModelWork, Utilisation
from multinode.records.samples import GpuSample, parse_samples
from multinode.stats.unknown import known, or_zero

RECORDS = Path(__file__).parents[1] / "gpu" / "h100"


def observed(*names: str) -> Observed:
    nodes = [
        ObservedNode(
            name=f"gpu{rank}",
            node_rank=rank,
            ranks=(rank,),
            ifname="lo",
            samples=tuple(parse_samples((RECORDS / f"{name}.jsonl").read_bytes().splitlines())),
        )
        for rank, name in enumerate(names)
    ]
    return observe("h100", nodes)


def split(*names: str) -> StepSplit:
    return split_steps(find_exposure(observed(*names)))


def test_one_rank_alone_computes_for_as_long_as_ddp_s_counters_say() -> None:
    alone = split("alone-rank-0")
    mean = known(alone.mean)
    assert (alone.source, alone.device) == ("alone", "cuda")
    assert mean.step_ms == pytest.approx(2.97, abs=0.01)
    # A step whose counters are longer than itself is left out.
    assert alone.rule.startswith("Means over 33 of the 34 measured steps")
    assert mean.compute_ms == pytest.approx(1.745, abs=0.001)
    assert (mean.exposed_ms, mean.wait_ms) == (0.0, 0.0)
    assert mean.host_ms == pytest.approx(1.006, abs=0.001)


def test_a_rank_alone_whose_gpu_follows_the_host_is_launch_bound() -> None:
    # 25.8 GFLOP are 0.49 ms at the 52.1 TFLOP/s of a bench of this GPU, and compute is 1.745 ms.
    passes = split("alone-rank-0").passes
    assert passes is not None
    assert (passes.host_ms, passes.gpu_ms) == pytest.approx((2.02, 1.79), abs=0.01)
    bottleneck = summarise(observed("alone-rank-0")).bottleneck
    assert bottleneck is not None
    assert bottleneck.kind == "launch"
    assert bottleneck.message.startswith(
        "launch-bound: forward and backward take 2.02 ms on the host but only 1.79 ms on the GPU"
    )
    # Where the network takes most of the step, that is said.
    pair = summarise(observed("pair-rank-0", "pair-rank-1")).bottleneck
    assert pair is not None
    assert pair.kind == "network"


def test_two_ranks_over_sockets_wait_for_the_network() -> None:
    pair = split("pair-rank-0", "pair-rank-1")
    mean = known(pair.mean)
    assert (pair.source, pair.device) == ("ddp", "cuda")
    assert known(mean.exposed_ms) / mean.step_ms == pytest.approx(0.87, abs=0.01)
    for worker in pair.workers:
        parts = [getattr(worker, name) for name in PART_NAMES]
        assert sum(or_zero(part) for part in parts) == pytest.approx(worker.step_ms)


# Wrapper, parameters, trainable ones, what exposed communication is seen by, and it and the step in ms.
RUNS = {
    "lora": ("ddp", 209_821_056, 2_199_552, "ddp", 7.4, 337.9),
    "zero2": ("deepspeed", 207_621_504, 207_621_504, "device", 525.5, 661.0),
    "zero3": ("deepspeed", 207_621_504, 207_621_504, "device", 580.1, 1315.2),
    "compiled": ("ddp", 23_112_704, 23_112_704, "ddp", 49.5, 81.9),
}


def test_counters_of_the_first_iterations_alone_are_said_to_be_such() -> None:
    assert (
        "4 of the 10 measured steps; all of them among DDP's first 10 iterations"
        in split("compiled-rank-0", "compiled-rank-1").rule
    )
    assert "first 10 iterations" not in split("pair-rank-0", "pair-rank-1").rule


@pytest.mark.parametrize("run", RUNS)
def test_llamafactory_deepspeed_and_torch_compile_are_seen_for_what_they_are(run: str) -> None:
    *is_trained, source, exposed_ms, step_ms = RUNS[run]
    seen = observed(f"{run}-rank-0", f"{run}-rank-1")
    model = last_models(seen)[0]
    assert [model.wrapper, model.parameters, model.trainable] == is_trained
    summary = summarise(seen, work=ModelWork(by_workers=True))
    # The peak is that of the tensor cores, also where the weights are in fp32 and only autocast says so.
    assert isinstance(summary.utilisation, Utilisation)
    assert summary.utilisation.denominator is not None
    assert summary.utilisation.denominator.startswith("989.5 TFLOP/s per GPU, dense bf16")
    parts = summary.split
    mean = known(parts.mean)
    assert parts.source == source
    assert mean.exposed_ms == pytest.approx(exposed_ms, abs=0.1)
    assert mean.step_ms == pytest.approx(step_ms, abs=0.1)


def test_the_calls_of_zero_2_and_the_interface_agree_on_the_bytes() -> None:
    # An epoch has 7 micro-batches, so that every fourth step has one of them only: 35 in 19 steps.
    found = summarise(observed("zero2-rank-0", "zero2-rank-1")).comm.bytes_per_step
    # Both ranks send over `lo`.
    assert known(found.nic) / 2 == pytest.approx(found.expected, rel=0.002)


@pytest.mark.parametrize("run", ["pair", "zero2", "zero3", "compiled"])
def test_two_ranks_on_one_interface_need_no_protocol_to_explain_their_bytes(run: str) -> None:
    told = {finding.code: finding for finding in summarise(observed(f"{run}-rank-0", f"{run}-rank-1")).comm.findings}
    assert told["shared-interface"].message.startswith("gpu0 and gpu1 share the interface lo,")
    assert not [code for code in told if code == "other-algorithm" or code.startswith("unexplained")]


def test_the_gpu_s_samples_are_read_whole() -> None:
    samples = parse_samples((RECORDS / "pair-gpu.jsonl").read_bytes().splitlines())
    gpus = [sample for sample in samples if isinstance(sample, GpuSample)]
    assert len(gpus) == len((RECORDS / "pair-gpu.jsonl").read_text().splitlines())
    busiest = max(gpus, key=lambda sample: sample.sm_percent or 0)
    assert busiest.memory_total_gib == pytest.approx(79.65, abs=0.01)
    assert (busiest.sm_percent, busiest.sm_clock_mhz, busiest.power_limit_w) == (99, 1980, 700)
    assert (busiest.pcie_gen, busiest.pcie_width, busiest.ecc_uncorrected) == (5, 16, 0)


def test_the_log_of_nccl_2_28_tells_its_way() -> None:
    path = parse_nccl_log((RECORDS / "nccl.log").read_text().splitlines())
    assert path is not None
    assert (path.version, path.network, path.bootstrap_ifname) == ("2.28.9+cuda13.0", "Socket", "lo")
    assert (path.ring, path.channels) == ((0, 1), 2)
    assert set(path.transports) == {"NET/Socket/0"}
