from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from multinode.contrast.figures import ASKED, Contrast
from multinode.contrast.judge import compare, find_differences
from multinode.contrast.screen import show
from multinode.contrast.side import make_side
from multinode.model.workload import FullRun, JobSettings, Workload
from multinode.profile.bottleneck import Bottleneck
from multinode.profile.figures import Straggler
from multinode.profile.step_bytes import BytesPerStep
from multinode.profile.step_split import StepSplit, WorkerSplit
from multinode.profile.summary import Comm, StepTimes
from multinode.runs.stored_run import StoredRun
from multinode.stats.unknown import Unknown, known, or_none
from tests.contrast.made_up_sides import SETTINGS, measured, node_use, run_of, side_of, split_of, summary_of
from tests.golden import Golden, error_of, screen_of

MODES = ("same-workers", "scale-out", "fixed-global-batch", "compare")


def terms(mode: str = "scale-out") -> dict[str, Any]:
    return {"mode": mode, "why": ASKED.found(None), "job": "job", "rule": "all count"}


def test_with_the_same_workers_efficiency_is_the_speed_up() -> None:
    sides = [side_of("baseline", 100.0, workers_per_node=4), side_of("candidate", 25.0, nodes=2, workers_per_node=2)]
    contrast = compare(sides, **terms("same-workers"))
    assert contrast.speedup.value == contrast.efficiency == pytest.approx(0.25)
    assert contrast.scaling == "same workers"


@pytest.mark.parametrize(("mode", "scaling"), [("scale-out", "weak"), ("fixed-global-batch", "strong")])
def test_with_more_workers_efficiency_is_for_each_of_them(mode: str, scaling: str) -> None:
    contrast = compare([side_of("baseline", 100.0), side_of("candidate", 180.0, nodes=2)], **terms(mode))
    assert contrast.efficiency == pytest.approx(0.9)
    assert contrast.scaling == scaling


def test_the_speed_up_is_as_uncertain_as_both_sides_together() -> None:
    sides = [side_of("baseline", 100.0, spread=0.1), side_of("candidate", 150.0, nodes=2, spread=0.2)]
    speedup = compare(sides, **terms()).speedup
    low, high = math.hypot(math.log(1.1), math.log(1 / 0.8)), math.hypot(math.log(1 / 0.9), math.log(1.2))
    assert [speedup.low, speedup.high] == pytest.approx([1.5 * math.exp(-low), 1.5 * math.exp(high)])


@pytest.mark.parametrize(
    ("nodes", "batches", "scaling"),
    [
        ((1, 2), (4, 8), "weak"),
        ((1, 2), (8, 8), "strong"),
        ((2, 2), (4, 8), "same workers"),
        ((1, 2), (None, 8), "weak"),
    ],
)
def test_of_two_stored_runs_what_is_held_equal_names_the_efficiency(
    nodes: tuple[int, int], batches: tuple[int | None, int | None], scaling: str
) -> None:
    first, last = (
        side_of(role, 100.0, nodes=count, global_batch=batch)
        for role, count, batch in zip(("baseline", "candidate"), nodes, batches, strict=True)
    )
    assert compare([first, last], **terms("compare")).scaling == scaling


def test_two_runs_on_one_node_are_not_told_apart_by_a_network() -> None:
    before = side_of("baseline", 100.0, split=split_of(40.0, 2.0))
    after = side_of("candidate", 50.0, split=split_of(80.0, 42.0))
    compared = compare([before, after], **terms("compare"))
    assert compared.verdict.code == "slower"
    assert compared.verdict.figures["speedup"] == pytest.approx(0.5)
    assert compared.verdict.message.endswith(": communication inside the node is the bottleneck.")
    text = " ".join(screen_of(show(compared), 160, details=True).split())
    assert "Exposed communication takes 40 ms more than in run run-baseline" in text
    assert "etwork" not in text


def test_points_between_make_a_curve_by_nodes() -> None:
    sides = [
        side_of("candidate", 280.0, nodes=4),
        side_of("point", 160.0, nodes=2),
        side_of("baseline", 100.0),
        side_of("each-node", 90.0, node_names=("n2",)),
    ]
    contrast = compare(sides, **terms())
    assert [(point.nodes, point.world_size) for point in contrast.measured] == [(1, 2), (2, 4), (4, 8)]
    assert [point.speedup.value for point in contrast.measured] == pytest.approx([1.0, 1.6, 2.8])
    assert [point.efficiency for point in contrast.measured] == pytest.approx([1.0, 0.8, 0.7])
    assert (contrast.baseline.speedup.low, contrast.baseline.speedup.high) == (1.0, 1.0)
    assert {side.role for side in contrast.others} == {"point", "each-node"}


def test_each_node_alone_counts_the_baseline_in_and_is_relative_to_the_fastest() -> None:
    sides = [
        side_of("baseline", 20.0),
        side_of("candidate", 30.0, nodes=3),
        side_of("each-node", 25.0, node_names=("n2",)),
        side_of("each-node", 10.0, node_names=("n3",)),
    ]
    contrast = compare(sides, **terms())
    assert {side.node_names[0]: side.relative for side in contrast.alone} == pytest.approx(
        {"n1": 0.8, "n2": 1.0, "n3": 0.4}
    )


def test_a_baseline_of_several_nodes_is_no_node_alone() -> None:
    sides = [
        side_of("baseline", 20.0, nodes=2),
        side_of("candidate", 30.0, nodes=4),
        *(side_of("each-node", 10.0, node_names=(name,)) for name in ("n1", "n2", "n3", "n4")),
    ]
    assert [side.node_names[0] for side in compare(sides, **terms()).alone] == ["n1", "n2", "n3", "n4"]


def test_the_whole_job_is_priced_on_both_sides() -> None:
    whole: dict[str, Any] = {"whole": FullRun(steps=100), "price_per_hour": 2.0}
    contrast = compare([side_of("baseline", 20.0, **whole), side_of("candidate", 30.0, nodes=2, **whole)], **terms())
    assert contrast.baseline.whole_s is not None
    assert known(contrast.baseline.whole_s).value == pytest.approx(40.0)  # 100 steps of the candidate's 8 samples
    assert contrast.candidate.whole_cost == pytest.approx(800 / 30 / 3600 * 2)


def test_what_differs_is_marked() -> None:
    other = msgspec.structs.replace(SETTINGS, precision="bf16")
    sides = [side_of("baseline", 1.0), side_of("candidate", 1.0, nodes=2, settings=other)]
    contrast = compare(sides, **terms())
    assert contrast.differences
    assert contrast.differences == find_differences(sides[0], sides[1], "scale-out")


def test_a_count_of_any_size_is_kept_to_its_last_digit() -> None:
    sides = [side_of("baseline", 1.0, global_batch=(1 << 60) + 1), side_of("candidate", 1.0, nodes=2, global_batch=1)]
    contrast = compare(sides, **terms())
    assert {"baseline": (1 << 60) + 1, "candidate": 1} in [found.figures for found in contrast.differences]
    assert msgspec.json.decode(msgspec.json.encode(contrast), type=Contrast) == contrast


def test_a_contrast_needs_both_sides(golden: Golden) -> None:
    golden.check_errors(
        "refused_roles",
        {role: error_of(compare, [side_of(role, 1.0)], **terms()) for role in ("baseline", "candidate")},
    )


POSITIVE = st.floats(min_value=1e-6, max_value=1e12)
UNKNOWN = st.just(Unknown("nobody looked"))
ANYTHING = st.none() | st.floats(min_value=0, max_value=1e12)
COUNTS = st.none() | st.integers(min_value=0, max_value=1 << 60)


@st.composite
def runs(draw: st.DrawFn, nodes: int) -> StoredRun:
    """A run that says anything that its decoded records allow, or nothing."""
    names = ("compute_ms", "exposed_ms", "wait_ms", "data_ms", "optimizer_ms", "host_ms")
    mean = draw(UNKNOWN | st.builds(WorkerSplit, rank=st.just(-1), step_ms=st.floats(1e-6, 1e9)))
    if not isinstance(mean, Unknown):
        mean = msgspec.structs.replace(mean, **{name: draw(UNKNOWN | POSITIVE) for name in names})
    late = draw(st.lists(st.floats(0, 1e9), max_size=2))
    steps_ms = draw(POSITIVE)
    summary = summary_of(
        draw(POSITIVE),
        steps_ms,
        steady_steps=draw(st.integers(min_value=0, max_value=1 << 40)),
        tokens_per_s=draw(UNKNOWN | st.builds(measured, POSITIVE)),
        split=StepSplit(mean=mean),
        stragglers=tuple(Straggler(node="n1", ranks=(0,), late_ms=late_ms, share=0.1, message="") for late_ms in late),
        comm=Comm(bytes_per_step=BytesPerStep(nic=draw(UNKNOWN | POSITIVE))),
        bottleneck=draw(st.none() | st.just(Bottleneck(kind="network", message=""))),
        dataset_samples=draw(UNKNOWN | st.integers(min_value=0, max_value=1 << 60)),
        nodes=(node_use(cpu_busy_percent=draw(ANYTHING), job_cores=draw(ANYTHING), throttled_share=draw(ANYTHING)),),
    )
    times = StepTimes(median=measured(steps_ms), p95=steps_ms, cv=draw(st.floats(min_value=0, max_value=1e3)))
    settings = JobSettings(
        per_device_batch=draw(COUNTS), accumulation=draw(COUNTS), strategy=draw(st.none() | st.text())
    )
    workload = Workload(settings=settings, whole=FullRun(steps=draw(COUNTS), epochs=draw(ANYTHING)))
    return run_of(
        msgspec.structs.replace(summary, step_time_ms=times),
        nodes=nodes,
        workers=tuple(draw(st.integers(min_value=1, max_value=8)) for _ in range(nodes)),
        workload=draw(st.none() | st.just(workload)),
        price_per_hour=draw(ANYTHING),
        cores=(draw(COUNTS),),
        link_gbit_per_s=draw(ANYTHING),
    )


@given(data=st.data(), mode=st.sampled_from(MODES), repeats=st.integers(1, 2))
def test_any_figures_make_a_contrast_that_can_be_kept(data: st.DataObject, mode: str, repeats: int) -> None:
    further = data.draw(st.sampled_from([[], [("each-node", 1), ("point", 3)]]))
    roles = [("baseline", 1), ("candidate", 2), *further]
    sides = [make_side(role, [data.draw(runs(nodes)) for _ in range(repeats)]) for role, nodes in roles]
    contrast = compare(sides, **terms(mode))
    assert contrast.speedup.value * contrast.baseline.samples_per_s.value == pytest.approx(
        contrast.candidate.samples_per_s.value
    )
    times = filter(None, (or_none(one.whole_s) for one in (contrast.baseline, contrast.candidate)))
    for figure in (contrast.speedup, *times):
        assert figure.low <= figure.value * (1 + 1e-12)
        assert figure.value <= figure.high * (1 + 1e-12)
    assert contrast.verdict.message.endswith(".")
    assert screen_of(show(contrast))
    assert len(contrast.reasons) <= 3
    assert all(map(math.isfinite, numbers(msgspec.to_builtins(contrast))))
    assert msgspec.json.decode(msgspec.json.encode(contrast), type=Contrast) == contrast


def numbers(document: Any) -> list[float]:
    """Every number of a document."""
    if isinstance(document, dict):
        return [number for value in document.values() for number in numbers(value)]
    if isinstance(document, list | tuple):
        return [number for value in document for number in numbers(value)]
    return [document] if isinstance(document, int | float) else []
