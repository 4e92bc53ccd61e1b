"""Whatever a stored summary says, a prediction is figures or one clear error."""

from __future__ import annotations

import math

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from multinode.errors import MultinodeError
from multinode.network.measure import load_scan
from multinode.predict.evidence import gather
from multinode.predict.forecast import ForecastRequest, make_forecast
from multinode.profile.calls import SeenCall
from multinode.profile.step_split import StepSplit, WorkerSplit
from multinode.profile.summary import Comm, StepTimes, Summary
from multinode.stats.estimate import exactly
from multinode.stats.unknown import Unknown
from multinode.traffic.step_calls import SizeCurve, Strategy
from tests.predict.stored import sweep_record, training_record

# Mostly what can be, so that predictions are reached.
LIKELY = st.floats(min_value=1e-3, max_value=1e6)
ANY = st.one_of(LIKELY, LIKELY, LIKELY, LIKELY, LIKELY, LIKELY, st.floats(allow_nan=False, allow_infinity=False))
UNKNOWN = st.just(Unknown("nobody looked"))
KNOWN = st.one_of(UNKNOWN, LIKELY, LIKELY, ANY)
ESTIMATES = st.builds(exactly, st.one_of(LIKELY, LIKELY, ANY))
SIZES = st.one_of(st.integers(min_value=1, max_value=1 << 30), st.integers(min_value=-(1 << 62), max_value=1 << 62))


@st.composite
def summaries(draw: st.DrawFn) -> Summary:
    mean = WorkerSplit(
        rank=-1,
        step_ms=draw(ANY),
        compute_ms=draw(KNOWN),
        exposed_ms=draw(KNOWN),
        wait_ms=draw(KNOWN),
        data_ms=draw(KNOWN),
        optimizer_ms=draw(KNOWN),
        host_ms=draw(KNOWN),
    )
    call = SeenCall(
        op=draw(st.sampled_from(["all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send"])),
        ranks=draw(SIZES),
        nodes=draw(SIZES),
        backend=draw(st.sampled_from([None, "gloo", "nccl", "odd"])),
        size_bytes=draw(ANY),
        count=draw(ANY),
    )
    return Summary(
        run_id="r",
        recognised=draw(st.none() | st.sampled_from([Strategy.DDP, Strategy.ZERO3, Strategy.HYBRID_SHARD])),
        steps=draw(SIZES),
        steady_steps=draw(SIZES),
        rule="",
        step_time_ms=StepTimes(median=exactly(draw(ANY)), p95=draw(ANY), cv=draw(ANY)),
        samples_per_s=draw(UNKNOWN | ESTIMATES),
        micro_steps=draw(KNOWN),
        tokens_per_sample=draw(KNOWN),
        parameters=draw(UNKNOWN | SIZES),
        trainable=draw(UNKNOWN | SIZES),
        comm=Comm(calls=(call,)),
        split=StepSplit(mean=draw(UNKNOWN | st.just(mean))),
    )


CURVES = st.builds(
    SizeCurve,
    points=st.lists(st.tuples(SIZES, ANY), max_size=4).map(tuple),
    alpha_us=ANY,
    bandwidth_gb_per_s=KNOWN,
    residuals=st.just(()),
    method=st.sampled_from(["fit", "interpolation"]),
)


@given(
    one=summaries(),
    two=summaries(),
    curve=CURVES,
    link=st.one_of(st.none(), ANY),
    model=st.booleans(),
    swept=st.booleans(),
)
def test_no_record_makes_a_prediction_fail_otherwise(
    one: Summary, two: Summary, curve: SizeCurve, link: float | None, *, model: bool, swept: bool
) -> None:
    records = [training_record("one", 1, link), training_record("two", 2, link, exposed_ms=10.0)]
    records = [record.having(summary=each) for record, each in zip(records, (one, two), strict=True)]
    if not model:
        records = [record.having(model=None) for record in records]
    sweep = sweep_record("sweep")
    assert sweep.sweep is not None
    report = msgspec.structs.replace(sweep.sweep, curves={"all_reduce": curve}, link_gbit_per_s=link)
    if swept:
        records.append(sweep.having(results={load_scan: report}))
    ask = ForecastRequest(links=(0.1, 100.0, *([link] if link and 1e-4 < link < 1e5 else [])), nodes=(1, 2))
    ask = msgspec.structs.replace(ask, strategies=(Strategy.DDP, Strategy.ZERO2))
    try:
        evidence = gather(records)
        found = make_forecast(evidence, ask)
    except MultinodeError:
        return
    for outlook in found.scenarios:
        low, high = outlook.samples_per_s.bounds
        assert 0 <= low <= outlook.samples_per_s.value <= high
        assert math.isfinite(outlook.samples_per_s.value)
        if outlook.measured and evidence.today_samples_per_s is not None:
            assert low * (1 - 1e-6) <= evidence.today_samples_per_s <= high * (1 + 1e-6)
    assert msgspec.json.encode(found)
