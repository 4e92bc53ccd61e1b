"""Trainings of two NCCL ranks on one GPU: bytes, exposed communication, hooks, and what becomes of one that fails."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from multinode.contrast.measure import ContrastRequest, contrast
from multinode.job.job import ScriptJob
from multinode.launch.context import ExecuteOptions, Launched, RunContext
from multinode.launch.launch import launch
from multinode.levers.levers import NONE
from multinode.records.run import StallRecord
from multinode.stats.unknown import known
from tests.levers.compressed import compressed

from .one_gpu import TRACED, TRAIN, launch_of

pytestmark = pytest.mark.gpu

# What each rank has on `lo` is what both send.
BOTH = 2
HAS_RAS = (2, 24)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_calls_formula_and_interface_agree_on_the_bytes(train: Callable[..., Launched], strategy: str) -> None:
    launched = train("--strategy", strategy, "--steps", "60", "--width", "2048")
    assert launched.run.status == "succeeded", launched.run.first_failure
    summary = launched.summary
    found = summary.comm.bytes_per_step
    assert summary.split.device == "cuda"
    assert known(found.nic) / BOTH == pytest.approx(known(found.expected), rel=0.03)
    assert 0 <= known(summary.comm.exposed_ms).value <= known(summary.step_time_ms).median.value


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_exposed_communication_is_what_a_trace_shows(train: Callable[..., Launched], strategy: str) -> None:
    arguments = ("--strategy", strategy, "--steps", "40", "--width", "2048")
    counted = train(*arguments).summary
    trace = train(*arguments, observation=TRACED).summary.trace
    assert trace is not None
    assert trace.exposed_ms is not None, trace.notes
    assert counted.comm.exposed_share is not None, counted.comm.exposed_ms
    shown = trace.exposed_ms / trace.workers[0].step_ms
    assert counted.comm.exposed_share == pytest.approx(shown, abs=0.1), trace.findings


@pytest.mark.parametrize("kind", ["fp16", "bf16"])
def test_compressed_gradients_halve_what_is_sent(train: Callable[..., Launched], kind: str) -> None:
    whole, half = (
        train("--width", "2048", levers=levers).summary.comm.bytes_per_step.nic for levers in (NONE, compressed(kind))
    )
    assert known(half) / known(whole) == pytest.approx(0.5, abs=0.03)


@pytest.mark.parametrize("number", range(5))
def test_a_rank_that_sleeps_is_blamed_and_not_the_one_that_waits_for_the_gpu(context: RunContext, number: int) -> None:
    from torch.cuda import nccl

    asleep = number % BOTH
    # A cold start of torch, CUDA and NCCL is silent for as long as some of this.
    execute = ExecuteOptions(lease_s=60.0, stall_s=30.0, on_stall="stop", grace_s=1.0)
    launched = launch(launch_of(ScriptJob(argv=(str(TRAIN), "--asleep-rank", str(asleep))), execute=execute), context)
    record = launched.directory.read("stall.json", StallRecord)
    assert record is not None
    blamed = next((stall for stall in record.stalls if stall.rank is not None), record.stalls[0])
    assert (blamed.rank, blamed.node) == (asleep, f"gpu{asleep}"), blamed.message
    if nccl.version() >= HAS_RAS:
        assert any(isinstance(node.ras, str) for node in record.nodes), [node.ras for node in record.nodes]
    assert all(node.status.processes_left == 0 for node in launched.run.nodes)


def test_a_rank_that_is_killed_is_the_first_failure(train: Callable[..., Launched]) -> None:
    run = train("--seconds", "600", "--killed-rank", "1").run
    failure = run.first_failure
    assert failure is not None
    assert (failure.node, failure.rank, failure.signal) == ("gpu1", 1, "SIGKILL"), failure
    assert all(node.status.processes_left == 0 for node in run.nodes)


def test_a_batch_that_does_not_fit_is_told_as_out_of_memory(train: Callable[..., Launched]) -> None:
    launched = train("--batch", str(1 << 28), "--width", "4096")
    failure = launched.run.first_failure
    assert failure is not None
    assert failure.kind == "out_of_gpu_memory", failure


def test_one_rank_alone_is_faster_than_two_over_sockets(context: RunContext) -> None:
    job = ScriptJob(argv=(str(TRAIN), "--width", "2048", "--steps", "40"))
    found = contrast(launch_of(job, run_id="contrast"), context, ContrastRequest(mode="scale-out")).contrast
    assert (found.baseline.nodes, found.candidate.nodes) == (1, 2)
    # Both share the GPU, and the two of them exchange 50 MB per step through sockets.
    assert found.efficiency < 1
    assert found.verdict.code
