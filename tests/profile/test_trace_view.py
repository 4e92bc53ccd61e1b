from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from multinode.profile.calls import SeenCall
from multinode.profile.figures import TraceView
from multinode.profile.step_split import StepSplit
from multinode.profile.trace import CollectiveSpan, TraceEvents, TraceStep, read_trace, view_traces
from multinode.stats.time_spans import merge
from multinode.stats.unknown import Unknown, known, or_none, or_zero, reason_of
from multinode.traffic.step_calls import ScanCurves, fit_curve
from tests import make
from tests.golden import Golden
from tests.reasons import reasons


def codes(view: TraceView) -> list[str]:
    return [finding.code for finding in view.findings]


TRACES = Path(__file__).parent / "traces"
MB = 1_000_000
# Of all-reduces among two workers factor is 1: bytes a microsecond are busbw in MB/s.
times = st.floats(min_value=0, max_value=900)
# No shorter than a microsecond: a clock that runs for weeks cannot show less.
pieces = st.lists(
    st.tuples(times, st.floats(min_value=1, max_value=100)).map(lambda one: (one[0], sum(one))), max_size=8
)


def span(start_us: float, end_us: float, size_bytes: int = MB, op: str = "all_reduce", step: int = 1) -> CollectiveSpan:
    return CollectiveSpan(op=op, size_bytes=size_bytes, step=step, start_us=start_us, end_us=end_us)


def window(
    *spans: CollectiveSpan,
    computing: list[tuple[float, float]] | None = None,
    clock_us: float = 0.0,
    length_us: float = 1000.0,
    device: str = "cpu",
) -> TraceEvents:
    merged = tuple((start + clock_us, end + clock_us) for start, end in merge(computing or []))
    return TraceEvents(
        device=device,
        steps=(TraceStep(step=1, start_us=clock_us, end_us=clock_us + length_us),),
        collectives=tuple(
            CollectiveSpan(
                op=one.op,
                size_bytes=one.size_bytes,
                step=one.step,
                start_us=one.start_us + clock_us,
                end_us=one.end_us + clock_us,
            )
            for one in spans
        ),
        computing=merged,
        hiding=merged,
    )


def counters(exposed_ms: float, step_ms: float) -> StepSplit:
    return StepSplit(source="ddp", mean=make.split(step_ms, exposed_ms=exposed_ms))


def test_communication_is_exposed_where_nothing_is_computed() -> None:
    view = view_traces({0: window(span(100, 300), span(200, 500), computing=[(0, 250), (400, 450)])}, 1)
    (worker,) = view.workers
    assert (worker.step_ms, worker.comm_ms, worker.compute_ms) == (1.0, 0.4, 0.3)
    assert worker.exposed_ms == pytest.approx(0.2)
    assert worker.overlap == pytest.approx(0.5)


def test_the_kernels_of_a_gpu_give_the_figures_that_can_be_read_off_them() -> None:
    # Of eight workers; the group of its collectives has four.
    view = view_traces({0: read_trace((TRACES / "nccl.json").read_bytes())}, 8)
    (worker,) = view.workers
    assert (worker.steps, worker.step_ms, worker.compute_ms) == (2, 1.0, 0.5)
    # 1500 to 2100, 2400 to 2700 and 2950 to 3200; hidden are 1500 to 1600, 2000 to 2100 and 2400 to 2700.
    assert (worker.comm_ms, worker.exposed_ms) == (0.575, 0.325)
    assert worker.overlap == pytest.approx(500 / 1150)
    # 10 MB of all-reduces among four, 1.5 times, in 900 us.
    assert view.busbw_gb_per_s == pytest.approx(10 * 1.5 / 0.9)
    assert view.message_bytes == (4 * MB, 2 * MB)


def test_waiting_for_a_late_worker_is_no_transfer_whatever_the_clocks_say() -> None:
    early = window(span(100, 900))
    late = window(span(700, 900), computing=[(0, 700)], clock_us=5e12)
    view = view_traces({0: early, 1: late}, 2)
    assert view.busbw_gb_per_s == pytest.approx(MB / 200 / 1000)
    assert view.comm_ms == pytest.approx(0.2)
    assert view.exposed_ms == pytest.approx(0.2)
    assert (reasons(view), view.notes) == ({}, ())


def test_two_collectives_at_once_share_the_time_that_they_take() -> None:
    both = window(span(100, 300), span(150, 350))
    assert view_traces({0: both, 1: both}, 2).busbw_gb_per_s == pytest.approx(2 * MB / 250 / 1000)


def test_the_kth_of_a_kind_is_matched_with_the_kth_and_other_kinds_do_not_mix() -> None:
    one = window(span(0, 400), span(400, 450, 64, "broadcast"), span(500, 600), span(700, 800, 2 * MB))
    other = window(span(300, 400), span(440, 450, 64, "broadcast"), span(500, 600), span(750, 800, 2 * MB))
    view = view_traces({0: one, 1: other}, 2)
    assert view.busbw_gb_per_s == pytest.approx(4 * MB / 250 / 1000)
    assert view.message_bytes == (MB, MB, 2 * MB)


def test_one_traced_worker_of_several_says_that_its_waiting_counts() -> None:
    view = view_traces({2: window(span(0, 400))}, 4)
    assert view.busbw_gb_per_s == pytest.approx(1.5 * MB / 400 / 1000)
    (note,) = view.notes
    assert (note.concerns, note.figures) == ("transfer", {"rank": 2})
    assert "only rank 2 was traced" in note.message


@pytest.mark.parametrize(
    ("spans", "said"),
    [
        ((), "no all-reduce"),
        ((span(0, 10, op="all_gather"),), "no all-reduce"),
        # By which ZeRO-3 looks for overflows.
        ((span(0, 10, op="all_gather"), span(20, 3000, 4)), "no all-reduce of 1024 bytes"),
        ((CollectiveSpan(op="all_reduce", size_bytes=None, step=1, start_us=0, end_us=5),), "sizes"),
        ((span(5, 5),), "no time"),
    ],
)
def test_without_all_reduces_that_can_be_measured_it_says_why(spans: tuple[CollectiveSpan, ...], said: str) -> None:
    view = view_traces({0: window(*spans), 1: window(*spans)}, 2)
    assert said in reason_of(view.busbw_gb_per_s)


def test_one_worker_is_said_plainly() -> None:
    alone = view_traces({0: window(computing=[(0, 900)])}, 1)
    assert (alone.comm_ms, alone.exposed_ms, alone.overlap) == (0, 0, None)
    assert alone.busbw_gb_per_s == Unknown("there is one worker")


@pytest.mark.parametrize(
    ("split", "code"),
    [(StepSplit(), "window-alone"), (counters(0.25, 1.0), "agree"), (counters(0.1, 1.0), "few-steps")],
)
def test_the_window_stands_beside_the_counters(split: StepSplit, code: str) -> None:
    (found,) = view_traces({0: window(span(0, 300))}, 2, or_none(split.mean)).findings
    assert found.code == code
    assert (found.figures["window_exposed_ms"], found.figures["window_step_ms"]) == pytest.approx((0.3, 1.0))


@pytest.mark.parametrize(
    ("split", "device", "code"),
    [
        (counters(0.1, 0.5), "cpu", "profiled-step"),
        (counters(0.1, 1.0), "cuda", "idle-gpu"),
        # A step that is a little longer does not explain all that is apart.
        (counters(0.1, 0.85), "cuda", "idle-gpu"),
        (counters(0.1, 1.0), "cpu", "unexplained"),
        # Neither makes a trace show less.
        (counters(0.9, 1.0), "cuda", "unexplained"),
        (counters(0.9, 0.5), "cuda", "unexplained"),
    ],
)
def test_figures_that_differ_come_with_a_reason(split: StepSplit, device: str, code: str) -> None:
    assert codes(view_traces({0: four_steps(device)}, 2, or_none(split.mean))) == [code]


def four_steps(device: str) -> TraceEvents:
    """Of a millisecond, with a collective of 0.6 ms in each."""
    steps = tuple(TraceStep(step=1 + k, start_us=1000.0 * k, end_us=1000.0 * (k + 1)) for k in range(4))
    spans = tuple(span(1000 * k, 1000 * k + 600, step=1 + k) for k in range(4))
    return TraceEvents(device=device, steps=steps, collectives=spans, computing=(), hiding=())


def test_what_is_said_of_a_window(golden: Golden) -> None:
    one, four = window(span(0, 300)), {device: four_steps(device) for device in ("cpu", "cuda")}
    gathers = SeenCall(op="all_gather", ranks=2, nodes=1, backend="nccl", size_bytes=1e6, count=48.0)
    cases = {
        "only the window": view_traces({0: one}, 2),
        "both agree": view_traces({0: one}, 2, known(counters(0.25, 1.0).mean)),
        "a short window": view_traces({0: one}, 2, known(counters(0.1, 1.0).mean)),
        "a slow profiler": view_traces({0: four["cpu"]}, 2, known(counters(0.1, 0.5).mean)),
        "a GPU that waits": view_traces({0: four["cuda"]}, 2, known(counters(0.1, 1.0).mean)),
        "no reason": view_traces({0: four["cpu"]}, 2, known(counters(0.1, 1.0).mean)),
        "few kernels": view_traces({0: four["cuda"]}, 2, None, [gathers]),
        "an nccl-test agrees with the window": decided(500, 900.0),
        "an nccl-test agrees with the counters": decided(1186, 580.0),
    }
    golden.check_findings("windows", {name: view.findings for name, view in cases.items()})


@pytest.mark.parametrize(
    ("traced_ms", "counted_ms", "code"),
    [
        # 741 MB a step, as in ZeRO-3: the kernels wait for a late host as well.
        (1186, 580.0, "counters-fit-nccl-test"),
        (500, 900.0, "window-fits-nccl-test"),
        # Bytes do not decide.
        (1186, 800.0, ""),
        (500, 300.0, ""),
    ],
)
def test_bytes_at_the_rate_of_nccl_test_decide_between_window_and_counters(
    traced_ms: float, counted_ms: float, code: str
) -> None:
    assert codes(decided(traced_ms, counted_ms))[1:] == ([code] if code else [])
    # Neither for calls inside nodes, nor without it.
    assert len(decided(traced_ms, counted_ms, ranks=8).findings) == 1
    assert len(decided(traced_ms, counted_ms, tested=False).findings) == 1


def decided(traced_ms: float, counted_ms: float, *, ranks: int = 2, tested: bool = True) -> TraceView:
    """A step that gathers among these ranks, with an nccl-test or without."""
    steps = tuple(TraceStep(step=1 + k, start_us=1.4e6 * k, end_us=1.4e6 * (k + 1)) for k in range(4))
    spans = tuple(span(1.4e6 * k, 1.4e6 * k + 1000 * traced_ms, step=1 + k) for k in range(4))
    events = TraceEvents(device="cuda", steps=steps, collectives=spans, computing=(), hiding=())
    gathers = SeenCall(op="all_gather", ranks=ranks, nodes=2, backend="nccl", size_bytes=1482e6, count=1.0)
    clipping = SeenCall(op="all_reduce", ranks=2, nodes=2, backend="nccl", size_bytes=4.0, count=1.0)
    curve = fit_curve([(size, size / 1.41e3) for size in (1_000_000, 8_000_000, 64_000_000)])
    scan = ScanCurves(run_id="20260104-nt", world_size=2, nodes=("n1", "n2"), curves={"all_reduce": curve})
    split, called = known(counters(counted_ms, 1400.0).mean), [gathers, clipping]
    return view_traces({0: events}, 2, split, called, scan if tested else None)


def test_collectives_that_are_no_kernels_of_nccl_are_missed() -> None:
    events = four_steps("cuda")
    called = SeenCall(op="all_gather", ranks=8, nodes=1, backend="nccl", size_bytes=1e6, count=48.0)
    told = view_traces({0: events}, 8, None, [called])
    assert codes(told) == ["window-alone", "no-kernels"]
    assert told.findings[1].figures == {"kernels": 1.0, "calls": 48.0}
    few = msgspec.structs.replace(called, count=2.0)
    assert codes(view_traces({0: events}, 8, None, [few])) == ["window-alone"]


def test_real_traces_of_two_workers_have_a_bandwidth_and_figures_that_fit_together() -> None:
    traces = {rank: read_trace((TRACES / f"gloo-rank-{rank}.json.gz").read_bytes()) for rank in (0, 1)}
    view = view_traces(traces, 2)
    assert [worker.rank for worker in view.workers] == [0, 1]
    for worker in view.workers:
        assert 0 < worker.exposed_ms < worker.comm_ms < worker.step_ms
        assert worker.overlap == pytest.approx(1 - worker.exposed_ms / worker.comm_ms)
    assert view.message_bytes == (591_360,) * 4
    least = min(view.workers, key=lambda worker: worker.exposed_ms)
    # Bytes over the whole of a worker's communication, waiting and all, are the least that it can be.
    assert known(view.busbw_gb_per_s) > 4 * 591_360 / least.comm_ms / 1e6


@given(pieces, pieces)
def test_exposed_and_hidden_communication_make_up_the_whole(
    talks: list[tuple[float, float]], computes: list[tuple[float, float]]
) -> None:
    (worker,) = view_traces({0: window(*(span(*talk) for talk in talks), computing=computes)}, 1).workers
    assert 0 <= worker.exposed_ms <= worker.comm_ms + 1e-9
    assert worker.comm_ms <= worker.step_ms
    if worker.overlap is not None:
        assert worker.exposed_ms == pytest.approx(worker.comm_ms * (1 - worker.overlap), abs=1e-9)


@given(pieces, st.permutations(range(3)), st.lists(times, min_size=3, max_size=3))
def test_neither_ranks_nor_clocks_change_the_bandwidth(
    talks: list[tuple[float, float]], ranks: list[int], late: list[float]
) -> None:
    spans = [span(start, end) for start, end in sorted(talks)]
    plain = view_traces(dict(enumerate([window(*spans)] * 3)), 3)
    moved = view_traces({rank: window(*spans, clock_us=clock) for rank, clock in zip(ranks, late, strict=True)}, 3)
    assert or_zero(moved.busbw_gb_per_s) == pytest.approx(or_zero(plain.busbw_gb_per_s), rel=1e-3)
    assert reasons(moved) == reasons(plain)
