from __future__ import annotations

import msgspec
import pytest

from multinode.profile.figures import InTraining, TraceView
from multinode.profile.in_training import in_training
from multinode.profile.observed import Observed, ObservedNode
from multinode.profile.summary import summarise
from multinode.records.samples import DdpSample, ModelSample, Sample
from multinode.stats.unknown import Unknown, reason_of
from multinode.traffic.step_calls import ScanCurves, fit_curve
from tests.golden import Golden

MB = 1_000_000
BUCKETS = (3 * MB, MB)
# 1 GB/s and 100 us for each message.
CURVE = fit_curve((size, 100 + size / 1000) for size in (1000, MB, 10 * MB))
SCAN = ScanCurves(run_id="20260101-nccl", world_size=2, nodes=("node0",), curves={"all_reduce": CURVE})


def ddp(rank: int, step: int, comm_us: float, sizes: tuple[int, ...] = BUCKETS) -> DdpSample:
    return DdpSample(
        rank=rank,
        step=step,
        iteration=step,
        bucket_sizes_bytes=sizes,
        forward_us=1.0,
        backward_us=1.0,
        comm_us=comm_us,
        overlap_us=0.0,
    )


def observed(*samples: Sample, world_size: int = 2, counted: tuple[int, ...] = (6, 7, 8)) -> Observed:
    node = ObservedNode(name="node0", node_rank=0, ranks=tuple(range(world_size)), samples=samples)
    return Observed(
        run_id="run", world_size=world_size, nodes=(node,), steps={}, recorded=len(counted), counted=counted, rule=""
    )


def test_a_window_of_the_profiler_goes_before_ddps_counters() -> None:
    trace = TraceView(busbw_gb_per_s=0.118, message_bytes=(MB,))
    found = in_training(observed(ddp(0, 6, 100), ddp(1, 6, 100)), trace)
    assert (found.busbw_gb_per_s, found.source, found.sizes_bytes) == (0.118, "trace", (MB,))
    assert [(finding.code, finding.figures) for finding in found.findings] == [("trace", {"busbw_gb_per_s": 0.118})]


def test_ddps_counters_give_the_median_over_steps_of_the_worker_that_waited_least() -> None:
    spans = {5: (1, 1), 6: (40_000, 90_000), 7: (80_000, 50_000), 8: (100_000, 100_000)}
    samples = [ddp(rank, step, span) for step, both in spans.items() for rank, span in enumerate(both)]
    found = in_training(observed(*samples), None)
    # 4 MB, factor 1 among two, in 50 ms; step 5 does not count.
    assert found.busbw_gb_per_s == pytest.approx(0.08)
    assert (found.source, found.sizes_bytes) == ("ddp span", BUCKETS)
    assert [finding.code for finding in found.findings] == ["ddp-span"]


def test_the_factor_is_that_of_all_workers() -> None:
    samples = [ddp(rank, 6, 40_000) for rank in range(4)]
    assert in_training(observed(*samples, world_size=4), None).busbw_gb_per_s == pytest.approx(0.15)


def test_a_step_that_a_worker_did_not_tell_or_cannot_have_had_is_left_out() -> None:
    good = [ddp(0, 6, 40_000), ddp(1, 6, 40_000)]
    alone = [ddp(0, 7, 1)]
    for bad in (0.0, 1e-320):
        found = in_training(observed(*good, *alone, ddp(0, 8, bad), ddp(1, 8, bad)), None)
        assert found.busbw_gb_per_s == pytest.approx(0.1)
    nothing = in_training(observed(ddp(0, 8, 0.0), ddp(1, 8, 0.0, ()), *alone), None)
    assert "all workers" in reason_of(nothing.busbw_gb_per_s)


def test_the_reductions_of_a_step_are_added_up() -> None:
    """Two DDP modules, the second one small: its counters are not the step's."""
    samples = [ddp(rank, 6, *one) for rank in (0, 1) for one in ((100_000, (100 * MB,)), (10_000, (MB,)))]
    found = in_training(observed(*samples), None)
    assert found.busbw_gb_per_s == pytest.approx(101 / 110)
    assert found.sizes_bytes == (100 * MB, MB)


def test_a_node_is_not_believed_about_workers_of_another() -> None:
    whole = observed(ddp(0, 6, 40_000), ddp(1, 6, 40_000))
    hook = ModelSample(rank=0, wrapper="ddp", parameters=1, trainable=1, settings={"comm_hooks": "fp16_compress_hook"})
    liar = ObservedNode(name="node1", node_rank=1, ranks=(), samples=(ddp(0, 6, 1), ddp(1, 6, 1), hook))
    found = in_training(msgspec.structs.replace(whole, nodes=(*whole.nodes, liar)), None)
    assert found.busbw_gb_per_s == pytest.approx(0.1)


def test_without_a_source_the_reason_says_what_would_tell() -> None:
    assert "--trace" in reason_of(in_training(observed(), None).busbw_gb_per_s)
    trace = TraceView(busbw_gb_per_s=Unknown("no all-reduce ran in the window"))
    both = reason_of(in_training(observed(), trace).busbw_gb_per_s)
    assert "no all-reduce ran in the window" in both
    assert "no DDP counters" in both
    alone = summarise(observed(world_size=1, counted=())).comm.in_training
    assert "one worker" in reason_of(alone.busbw_gb_per_s)


def test_a_communication_hook_makes_buckets_no_measure_of_what_travels() -> None:
    model = ModelSample(rank=0, wrapper="ddp", parameters=1, trainable=1, settings={"comm_hooks": "fp16_compress_hook"})
    found = in_training(observed(model, ddp(0, 6, 40_000), ddp(1, 6, 40_000)), None)
    assert "hook" in reason_of(found.busbw_gb_per_s)


def beside(sizes: tuple[int, ...]) -> InTraining:
    trace = TraceView(busbw_gb_per_s=0.5, message_bytes=sizes)
    return in_training(observed(), trace, scan=SCAN)


def test_nccl_test_stands_beside_it_for_the_same_sizes() -> None:
    found = beside(BUCKETS)
    assert found.alone is not None
    assert found.alone.run_id == "20260101-nccl"
    # 3 MB and 1 MB, one after the other: 3100 and 1100 us.
    assert found.alone.busbw_gb_per_s == pytest.approx(4000 / 4200)
    assert found.findings[1].code == "beside-nccl-test"
    assert found.findings[1].figures == pytest.approx(
        {"share": 0.525, "alone_gb_per_s": 4000 / 4200, "run_id": "20260101-nccl"}
    )


def test_what_is_said_of_a_bandwidth(golden: Golden) -> None:
    cases = {
        "a trace, and an nccl-test": beside(BUCKETS),
        "a trace without sizes": beside(()),
        "DDP's counters": in_training(observed(ddp(0, 6, 40_000), ddp(1, 6, 40_000)), None),
    }
    golden.check_findings("bandwidth", {name: found.findings for name, found in cases.items()})


@pytest.mark.parametrize("sizes", [(), (0,)])
def test_without_sizes_nothing_stands_beside_it(sizes: tuple[int, ...]) -> None:
    assert beside(sizes).alone is None
