"""Samples that averaging needs: the table is the one that benchmarks/averaging.py prints, and what follows from it."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multinode.levers.averaging import Averaging, parse_average
from multinode.predict.step_efficiency import REPLACED, REPLACED_BY_DILOCO, samples_ratio, step_efficiency
from tests.warm import run_warm

ROOT = Path(__file__).parent.parent.parent
BENCHMARKS = ROOT / "benchmarks"
METHODS = {"DDP": 1, "local:16": 16, "local:64": 64}
# Each method at a decaying rate, and its r: `| local:16, 384 steps | 0.001, 1.782 (1.778-1.787) | 1.52 (1.43-1.59) |`.
ROW = re.compile(r"^\| (\S+), \d+ steps \| [^|]*\| [\d.]+ \(([\d.]+)-([\d.]+)\) \|", re.MULTILINE)
AVERAGES = st.builds(
    Averaging,
    every=st.integers(1, 1_000_000),
    dtype=st.sampled_from([None, "fp16"]),
    outer_lr=st.sampled_from([None, 0.7]),
)


@pytest.mark.torch
def test_the_table_is_the_measured_one() -> None:
    found: dict[str, list[float]] = {}
    for name in ("averaging.json", "averaging-long.json"):
        report = run_warm(
            [BENCHMARKS / "averaging.py", "--report", BENCHMARKS / name],
            os.environ | {"PYTHONPATH": str(ROOT)},
            timeout=600,
        )
        assert report.returncode == 0, report.stderr
        # Of all parameters; the last table is of LoRA.
        for method, *ends in ROW.findall(report.stdout.partition("LoRA")[0]):
            found.setdefault(method, []).extend(map(float, ends))
    ranges = {name: (min(found[name]), max(found[name])) for name in METHODS}
    assert ranges == {name: REPLACED[every] for name, every in METHODS.items()}
    assert max(found["diloco:64"]) == REPLACED_BY_DILOCO


@pytest.mark.parametrize(
    ("average", "fewest", "most"),
    [
        ("local:1", 0.875, 1.0),
        # Nothing was measured between DDP and 16 steps, nor beyond 64.
        ("local:4", 0.675, 1.0),
        ("local:16:fp16", 0.675, 0.795),
        ("local:32", 0.62, 0.795),
        ("local:64", 0.62, 0.71),
        ("local:500", 0.62, 0.71),
        ("diloco:64", 0.655, 1.0),
    ],
)
def test_a_step_of_nodes_that_average_is_worth_less_than_one_of_each(average: str, fewest: float, most: float) -> None:
    assert step_efficiency(parse_average(average)) == pytest.approx((fewest, most))
    # Beside DDP, it takes the more samples.
    expected = (max(1, 0.875 / most), 1 / fewest) if average != "local:1" else (1, 1)
    assert samples_ratio(None, parse_average(average)) == pytest.approx(expected)


@given(today=AVERAGES | st.none(), changed=AVERAGES | st.none())
def test_equal_efficiency_takes_as_many_samples_and_no_change_fewer(
    today: Averaging | None, changed: Averaging | None
) -> None:
    fewest, most = samples_ratio(today, changed)
    assert 1 <= fewest <= most
    assert samples_ratio(today, today) == (1, 1)
    if step_efficiency(today) == step_efficiency(changed):
        assert (fewest, most) == (1, 1)


@given(shorter=st.integers(1, 300), longer=st.integers(1, 300))
def test_longer_rounds_take_no_fewer_samples(shorter: int, longer: int) -> None:
    shorter, longer = sorted((shorter, longer))
    less, more = (samples_ratio(None, Averaging(every=every)) for every in (shorter, longer))
    assert less[0] <= more[0]
    assert less[1] <= more[1]
