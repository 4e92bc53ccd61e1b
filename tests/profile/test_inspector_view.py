"""NCCL's own records: those of the plugin's documentation, by which ours are reconciled, and then one on every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from multinode.node.nccl_files import shorten
from multinode.profile.figures import TraceView
from multinode.profile.in_training import busbw_gb_per_s, in_training, total_bytes, view_inspector
from multinode.profile.observed import Observed, ObservedNode, observe
from multinode.records.samples import DdpSample, NcclOpSample, Sample, StepSample, parse_samples
from multinode.stats.unknown import UnknownError, reason_of
from tests.golden import Golden

from .inspector_records import ALL_REDUCE, REDUCE_SCATTER, line

WORLD = 8
STEPS = 20
# The step ends where the documentation's record was written.
END_S = 1748030377.7
GIB_16 = 17179869184


def sample_of(record: dict[str, Any]) -> NcclOpSample:
    shortened = shorten(line(record))
    (found,) = parse_samples([msgspec.json.encode(shortened)])
    assert isinstance(found, NcclOpSample)
    return found


OP = sample_of(ALL_REDUCE)


@pytest.mark.parametrize(("record", "size_bytes"), [(ALL_REDUCE, GIB_16), (REDUCE_SCATTER, 8 * 2147483648)])
def test_our_bandwidth_of_the_documentations_records_is_theirs(record: dict[str, Any], size_bytes: int) -> None:
    op = sample_of(record)
    # Of a reduce-scatter the call has one rank's share.
    assert total_bytes(op) == size_bytes
    assert busbw_gb_per_s(op) == pytest.approx(op.busbw_gb_per_s, rel=1e-4)
    assert size_bytes / op.time_us / 1e3 == pytest.approx(record["coll_perf"]["coll_algobw_gbs"], rel=1e-4)


def seen(*ops: Sample, world_size: int = WORLD) -> Observed:
    """Steps of half a second, the last of them at END_S, on one node of so many workers."""
    steps = [
        StepSample(
            rank=rank, step=step, time_s=END_S - (STEPS - step) / 2, mono_ns=step * 500_000_000, step_time_us=5e5
        )
        for rank in range(world_size)
        for step in range(1, STEPS + 1)
    ]
    return observe("r", [ObservedNode(name="a", node_rank=0, ranks=tuple(range(world_size)), samples=(*steps, *ops))])


def on_all_ranks(op: NcclOpSample = OP, **changes: Any) -> list[Sample]:
    """One operation, for which the ranks after the first had to wait longer and longer."""
    return [
        msgspec.structs.replace(
            op,
            comm_rank=rank,
            time_us=op.time_us * (1 + rank),
            busbw_gb_per_s=op.busbw_gb_per_s / (1 + rank),
            **changes,
        )
        for rank in range(WORLD)
    ]


def test_an_all_reduce_counts_with_the_worker_that_waited_least() -> None:
    view = view_inspector(seen(*on_all_ranks()))
    assert view.busbw_gb_per_s == pytest.approx(485.119, rel=1e-4)


def test_the_messages_of_a_step_and_what_they_add_up_to() -> None:
    numbered = [on_all_ranks(number=number, written_s=END_S - number / 10) for number in range(30)]
    observed = seen(*(op for several in numbered for op in several))
    assert len(observed.counted) == 15
    view = view_inspector(observed)
    assert view.sizes_bytes == (GIB_16, GIB_16)
    assert view.bytes_per_step == pytest.approx(2 * GIB_16)


PLUGINS = Path(__file__).parent / "inspector"


def written_by(release: str, *ranks: int) -> list[Sample]:
    """What the plugin of that release wrote of 120 all-reduces in 3 s (of two, the first 30), on these ranks."""
    lines = (PLUGINS / f"{release}.log").read_bytes().splitlines()
    ops = [sample_of(msgspec.json.decode(text)) for text in lines]
    last_s = ops[-1].written_s
    return [
        msgspec.structs.replace(op, comm_rank=rank, written_s=END_S - (last_s - op.written_s))
        for rank in ranks
        for op in ops
    ]


@pytest.mark.parametrize("release", ["2.28.9", "2.30.7"])
def test_a_plugin_that_records_every_operation_tells_the_bytes_of_a_step(release: str) -> None:
    view = view_inspector(seen(*written_by(release, 0, 1), world_size=2))
    assert view.recorded == 1.0
    sent_bytes = sum(total_bytes(op) for op in ops_of(written_by(release, 0)))
    assert view.bytes_per_step == sent_bytes / 15
    # Each took 10 ms.
    assert view.busbw_gb_per_s == pytest.approx(sent_bytes / 0.3 / 1e9)


def test_a_plugin_that_keeps_one_operation_between_two_writes_samples_them() -> None:
    # 7 of 120: no bytes of a step come of them, and the bandwidth says how few they are.
    view = view_inspector(seen(*written_by("2.29.7", 0, 1), world_size=2))
    assert (view.bytes_per_step, view.sizes_bytes) == (None, ())
    assert view.recorded == pytest.approx(7 / 102, rel=0.1)
    found = in_training(seen(*written_by("2.29.7", 0, 1), world_size=2), None, asked_bytes=1e6)
    assert found.asked_bytes is None
    assert [finding.code for finding in found.findings] == ["nccl-inspector", "sampled"]
    assert found.findings[1].figures["recorded_share"] == view.recorded


def test_ranks_that_kept_other_operations_say_that_they_are_samples() -> None:
    ops = written_by("2.29.7", 0)
    moved = [msgspec.structs.replace(op, comm_rank=1, number=op.number + 1) for op in ops_of(ops)]
    with pytest.raises(
        UnknownError, match="on all workers: it recorded 7% of the operations, but a plugin built from NCCL"
    ):
        view_inspector(seen(*ops, *moved, world_size=2))


def ops_of(samples: list[Sample]) -> list[NcclOpSample]:
    return [one for one in samples if isinstance(one, NcclOpSample)]


@pytest.mark.parametrize(
    ("ops", "why"),
    [
        ([], "recorded no all-reduce of 1024 bytes"),
        (on_all_ranks()[:3], "recorded no all-reduce on all workers"),
        # Before the measured steps, and of a part of the workers.
        (on_all_ranks(written_s=END_S - 9), "recorded no all-reduce of 1024 bytes"),
        (on_all_ranks(comm_ranks=4), "recorded no all-reduce of 1024 bytes"),
        (on_all_ranks(size_bytes=4), "recorded no all-reduce of 1024 bytes or more across all workers"),
        ([sample_of(REDUCE_SCATTER)], "recorded no all-reduce of 1024 bytes"),
        ([msgspec.structs.replace(OP, busbw_gb_per_s=277.2)], "reports a bandwidth for 1 operations"),
    ],
)
def test_without_usable_records_the_reason_says_why(ops: list[Sample], why: str) -> None:
    with pytest.raises(UnknownError, match=why):
        view_inspector(seen(*ops))


def ddp(observed: Observed) -> list[Sample]:
    return [
        DdpSample(
            rank=rank,
            step=step,
            iteration=step,
            bucket_sizes_bytes=(1_000_000,),
            forward_us=1.0,
            backward_us=1.0,
            comm_us=10_000.0,
            overlap_us=0.0,
        )
        for rank in range(WORLD)
        for step in observed.counted
    ]


def test_it_stands_above_ddps_counters_and_below_a_trace() -> None:
    records = on_all_ranks()
    observed = seen(*records, *ddp(seen()))
    found = in_training(observed, None)
    assert found.source == "nccl inspector"
    assert found.busbw_gb_per_s == pytest.approx(485.119, rel=1e-4)
    assert [finding.code for finding in found.findings] == ["nccl-inspector"]
    trace = TraceView(busbw_gb_per_s=0.118, message_bytes=(1_000_000,))
    assert in_training(observed, trace).source == "trace"
    # Where its records tell nothing, DDP's counters do.
    assert in_training(seen(*records[:3], *ddp(seen())), None).source == "ddp span"
    few = in_training(seen(*records[:3]), None)
    assert "NCCL's Inspector recorded no all-reduce on all workers" in reason_of(few.busbw_gb_per_s)


def test_what_is_said_of_the_inspector_s_bandwidth(golden: Golden) -> None:
    cases = {
        "all operations": in_training(seen(*on_all_ranks()), None, asked_bytes=1e6),
        "a part of them": in_training(seen(*written_by("2.29.7", 0, 1), world_size=2), None, asked_bytes=1e6),
    }
    golden.check_findings("bandwidth_of_inspector", {name: found.findings for name, found in cases.items()})


@pytest.mark.parametrize(("share", "code"), [(1.02, "bytes-agree"), (0.5, "bytes-differ")])
def test_the_bytes_by_nccl_stand_beside_those_of_the_calls(share: float, code: str) -> None:
    found = in_training(seen(*on_all_ranks()), None)
    assert found.bytes_per_step is not None
    both = in_training(seen(*on_all_ranks()), None, asked_bytes=share * found.bytes_per_step)
    assert [finding.code for finding in both.findings] == ["nccl-inspector", code]
    assert both.findings[1].figures["counted_bytes"] == found.bytes_per_step
