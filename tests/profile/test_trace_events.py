from __future__ import annotations

import gzip
import json
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multinode.profile.trace import TraceEvents, read_trace
from multinode.stats.time_spans import length, subtract
from tests.golden import Golden, raised

TRACES = Path(__file__).parent / "traces"
NCCL = (TRACES / "nccl.json").read_bytes()
# Parameters of two Linear(384, 384), as float32: what two buckets per step hold each.
BUCKET_BYTES = (384 * 384 + 384) * 4


def event(name: str, ts: float, dur: float = 1.0, **more: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": "cpu_op", "name": name, "pid": 1, "tid": 1, "ts": ts, "dur": dur, **more}


def mark(step: int, ts: float) -> dict[str, Any]:
    return event(f"multinode step {step} ends", ts, cat="user_annotation")


def gloo(ts: float, dur: float, dims: Any, types: Any, name: str = "all_reduce") -> dict[str, Any]:
    more = {"cat": "user_annotation", "tid": 2, "args": {"Input Dims": dims, "Input type": types}}
    return event(f"gloo:{name}", ts, dur, **more)


def trace(*events: dict[str, Any]) -> bytes:
    return json.dumps({"schemaVersion": 1, "traceEvents": [mark(1, 0), *events, mark(2, 1000)]}).encode()


def test_a_real_trace_of_two_gloo_workers_is_read() -> None:
    for rank in (0, 1):
        events = read_trace((TRACES / f"gloo-rank-{rank}.json.gz").read_bytes())
        assert events.device == "cpu"
        assert [step.step for step in events.steps] == [10, 11]
        assert events.steps[0].end_us == events.steps[1].start_us
        assert {span.op for span in events.collectives} == {"all_reduce"}
        assert [span.step for span in events.collectives] == [10] * 4 + [11] * 4
        assert {span.size_bytes for span in events.collectives} == {BUCKET_BYTES}
        window = (events.steps[0].start_us, events.steps[-1].end_us)
        assert 0 < length(events.computing) < window[1] - window[0]
        # What is computed hides communication.
        assert length(subtract(events.computing, events.hiding)) < 1


def test_kernels_of_nccl_are_told_apart_and_belong_to_the_step_that_launched_them() -> None:
    events = read_trace(NCCL)
    assert events.device == "cuda"
    assert [(step.step, step.start_us, step.end_us) for step in events.steps] == [(5, 1000, 2000), (6, 2000, 3000)]
    assert [
        (span.op, span.size_bytes, span.ranks, span.step, span.start_us, span.end_us) for span in events.collectives
    ] == [
        ("all_reduce", 4_000_000, 4, 5, 1500, 1900),
        ("all_reduce", 2_000_000, 4, 5, 1900, 2100),
        ("all_reduce", 4_000_000, 4, 6, 2400, 2700),
        ("all_gather", 8192, 4, 6, 2950, 3200),
    ]
    assert events.computing == events.hiding == ((1200, 1600), (2000, 2100), (2300, 2800))


def test_a_kernel_of_an_older_torch_is_known_by_its_name_and_has_no_size() -> None:
    name = "ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)"
    (span,) = read_trace(trace(event(name, 10, 5, cat="kernel", tid="stream 20"))).collectives
    assert (span.op, span.size_bytes, span.ranks) == ("all_reduce", None, None)


def test_an_operator_in_a_thread_of_gloo_computes_nothing() -> None:
    copies = trace(
        event("c10d::allgather_", 100, 20),
        gloo(110, 300, [[16]], ["c10::BFloat16"], "all_gather"),
        event("aten::copy_", 350, 50, tid=2),
        event("aten::mm", 500, 100),
    )
    events = read_trace(copies)
    assert list(events.computing) == [(500, 600)]
    assert [(span.op, span.size_bytes) for span in events.collectives] == [("all_gather", 32)]


def test_a_gap_hides_communication_only_where_no_collective_ends_in_it() -> None:
    busy = [event("aten::mm", start, 90) for start in (0, 100, 400)]
    events = read_trace(trace(*busy, gloo(150, 200, [[4]], ["float"])))
    # The thread stood still from 190 to 400, until the collective had ended at 350; from 90 to 100 Python ran.
    assert list(events.hiding) == [(0, 190), (400, 1000)]
    assert list(events.computing) == [(0, 90), (100, 190), (400, 490)]


def test_an_operator_that_waits_for_its_own_call_does_not_compute_meanwhile() -> None:
    """As in FSDP 2, whose hooks gather before and reduce after an operator of the backward pass, inside autograd's."""
    events = read_trace(
        trace(
            event("autograd::engine::evaluate_function: MmBackward0", 100, 400),
            event("c10d::_allgather_base_", 110, 20),
            gloo(120, 150, [[4]], ["float"], "all_gather"),
            event("MmBackward0", 300, 200),
            event("autograd::engine::evaluate_function: PostBackward", 500, 200),
            event("aten::cat", 510, 40),
            event("c10d::_reduce_scatter_base_", 560, 10),
            gloo(565, 100, [[4]], ["float"]),
            event("_c10d_functional::wait_tensor", 800, 100),
            event("aten::mm", 900, 50),
        )
    )
    assert list(events.computing) == [(300, 500), (510, 550), (900, 950)]
    exposed = length(subtract([(span.start_us, span.end_us) for span in events.collectives], events.hiding))
    assert exposed == 150 + 100


def test_several_tensors_are_one_message_and_an_unknown_type_leaves_the_size_open() -> None:
    sizes = [
        read_trace(trace(gloo(1, 1, dims, types))).collectives[0].size_bytes
        for dims, types in (
            ([[18], [2, 3]], ["float", "double"]),
            ([[18]], ["c10::Quaternion"]),
            ([[18], [2]], ["float"]),
            ("no list", None),
            ([[-1]], ["float"]),
            ([[1 << 40, 1 << 40]], ["float"]),
        )
    ]
    assert sizes == [18 * 4 + 6 * 8, None, None, None, None, None]


def test_a_window_with_a_hole_ends_at_the_hole() -> None:
    data = json.dumps({"traceEvents": [mark(1, 0), mark(2, 10), mark(3, 20), mark(5, 40), mark(6, 50)]}).encode()
    assert [step.step for step in read_trace(data).steps] == [2, 3]


def test_times_that_cannot_be_are_passed_over() -> None:
    events = read_trace(trace(event("aten::mm", 1e300), event("aten::mm", 5, -3), event("aten::mm", 10, 1e300)))
    assert events.computing == ()


def test_what_is_no_trace_and_what_unpacks_to_too_much_is_refused(golden: Golden) -> None:
    packer = zlib.compressobj(1, wbits=31)
    cases = {
        "nothing": b"",
        "a list": b"[]",
        "events that are a number": b'{"traceEvents": 3}',
        "a time that is a word": b'{"traceEvents": [{"ph": "X", "ts": "soon"}]}',
        "no events": b'{"traceEvents": []}',
        "the first bytes of gzip alone": b"\x1f\x8b and then nothing of the kind",
        "a gzip that was cut off": gzip.compress(NCCL)[:-20],
        "a deep list": b'{"traceEvents": [{"args": {"Input Dims": ' + b"[" * 100_000,
        "no UTF-8": b'\xff{"traceEvents": []}',
        "more than a controller has memory": b"".join(packer.compress(bytes(1 << 20)) for _ in range(257))
        + packer.flush(),
    }
    errors = {case: raised(ValueError, read_trace, data) for case, data in cases.items()}
    for case, data in {"gzip": gzip.compress(bytes(10_001)), "text": b" " * 10_001}.items():
        errors[f"{case} of more than is allowed"] = raised(ValueError, read_trace, data, most_bytes=10_000)
    golden.check_errors("refused_traces", errors)


@pytest.mark.parametrize("tiny", [b"{}", b'{"args":{}}', b'{"args":{"correlation":1}}'])
def test_events_that_are_smaller_than_any_are_refused_before_they_take_memory(tiny: bytes, golden: Golden) -> None:
    text = b'{"traceEvents":[' + tiny + (b"," + tiny) * 500_000 + b"]}"
    tracemalloc.start()
    try:
        refused = raised(ValueError, read_trace, gzip.compress(text, 1))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 6 * len(text)
    golden.check_errors("refused_tiny_events", {"500,001 of them": refused})


json_values = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists, max_leaves=5)
ARGUMENTS = ("Collective name", "In msg nelems", "dtype", "Group size", "correlation", "Input Dims", "Input type")


@given(st.dictionaries(st.sampled_from(ARGUMENTS), json_values), st.sampled_from(["kernel", "user_annotation"]))
def test_whatever_a_node_writes_as_arguments_is_read_or_refused(arguments: dict[str, Any], category: str) -> None:
    names = ("ncclDevKernel_AllReduce", "gloo:all_reduce")
    data = trace(*(event(name, 10, 5, cat=category, args=arguments) for name in names))
    try:
        events = read_trace(data)
    except ValueError:
        return
    assert isinstance(events, TraceEvents)
    assert all(span.size_bytes is None or span.size_bytes >= 0 for span in events.collectives)
