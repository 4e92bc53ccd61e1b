from __future__ import annotations

import itertools
import math

import msgspec
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from multinode.traffic.step_calls import SizeCurve, fit_curve
from tests.golden import raised

MIB = 1 << 20
SIZES = tuple(1 << exponent for exponent in range(3, 27))
sizes = st.integers(min_value=1, max_value=1 << 34)
times = st.floats(min_value=1e-3, max_value=1e9)
# All-reduce with gloo, two virtual nodes, 1 Gbit/s: a burst of the shaper lets 128 KiB pass at once.
SHAPED = (
    (8, 336.0),
    (64, 365.0),
    (512, 367.0),
    (4096, 439.0),
    (16384, 513.0),
    (65536, 519.0),
    (131072, 1135.0),
    (262144, 4350.0),
    (524288, 4477.0),
    (MIB, 8929.0),
    (2 * MIB, 17848.0),
    (4 * MIB, 36003.0),
    (8 * MIB, 71358.0),
    (16 * MIB, 143342.0),
)


def line(alpha_us: float, gb_per_s: float) -> tuple[tuple[int, float], ...]:
    return tuple((size, alpha_us + size / gb_per_s / 1000) for size in SIZES)


@given(st.floats(min_value=1e-3, max_value=1e5), st.floats(min_value=1e-3, max_value=50), sizes)
def test_points_on_a_line_give_the_line_back(alpha_us: float, gb_per_s: float, size: int) -> None:
    curve = fit_curve(line(alpha_us, gb_per_s))
    assert curve.method == "fit"
    assert max(map(abs, curve.residuals)) < 1e-6
    assert curve.alpha_us >= 0
    # Below the time of one byte there is nothing that could tell alpha.
    assert curve.alpha_us == pytest.approx(alpha_us, rel=1e-4, abs=1e-6 * (alpha_us + 8 / gb_per_s / 1000))
    assert curve.predict_us(size) == pytest.approx(alpha_us + size / gb_per_s / 1000, rel=1e-4)


@given(st.dictionaries(sizes, times, min_size=2, max_size=20), st.lists(sizes, min_size=2, max_size=5))
def test_whatever_was_measured_predictions_are_times(measured: dict[int, float], asked: list[int]) -> None:
    curve = fit_curve(measured.items())
    assert curve.alpha_us >= 0
    assert curve.bandwidth_gb_per_s is None or curve.bandwidth_gb_per_s > 0
    for size in asked:
        assert 0 < curve.predict_us(size) < math.inf


@given(
    st.lists(sizes, min_size=2, max_size=20, unique=True),
    st.lists(times, min_size=20, max_size=20),
    st.lists(sizes, min_size=2, max_size=8),
)
def test_where_larger_messages_took_longer_they_are_predicted_to(
    some: list[int], some_times: list[float], asked: list[int]
) -> None:
    curve = fit_curve(zip(sorted(some), sorted(some_times)[: len(some)], strict=True))
    predicted = [curve.predict_us(size) for size in sorted(asked)]
    assert all(after >= before * (1 - 1e-9) for before, after in itertools.pairwise(predicted))


@given(st.dictionaries(sizes, times, min_size=2, max_size=20))
def test_an_interpolation_passes_through_every_point(measured: dict[int, float]) -> None:
    curve = fit_curve(measured.items())
    assume(curve.method == "interpolation")
    assert [curve.predict_us(size) for size, _ in curve.points] == pytest.approx([time for _, time in curve.points])


def test_a_poor_fit_is_not_used_and_tells_how_poor_it_is() -> None:
    curve = fit_curve(SHAPED)
    assert curve.method == "interpolation"
    assert max(map(abs, curve.residuals)) > 0.3
    assert curve.predict_us(3 * MIB) == pytest.approx((17848 + 36003) / 2)
    assert curve.predict_us(4) == 336
    # Beyond the largest it goes on as it went: 8 MiB in 71984 us.
    assert curve.predict_us(32 * MIB) == pytest.approx(143342 + 2 * 71984)


def test_a_last_point_that_was_quicker_is_no_slope() -> None:
    curve = fit_curve([(1, 10), (2, 30), (3, 20)])
    assert curve.method == "interpolation"
    assert curve.predict_us(10) == 20


def test_times_that_do_not_grow_have_no_bandwidth() -> None:
    curve = fit_curve([(8, 300.0), (64, 299.0), (512, 298.0)])
    assert curve.bandwidth_gb_per_s is None
    assert curve.alpha_us == pytest.approx(299, rel=0.001)
    assert curve.predict_us(4096) == curve.alpha_us


def test_of_several_times_of_a_size_the_median_counts() -> None:
    assert fit_curve([(8, 1.0), (8, 900.0), (8, 2.0), (16, 4.0)]).points == ((8, 2.0), (16, 4.0))


@pytest.mark.parametrize(
    ("points", "says"),
    [
        ([], "a curve needs at least two sizes: there are 0"),
        ([(8, 1.0)], "a curve needs at least two sizes: there are 1"),
        ([(8, 1.0), (8, 2.0)], "a curve needs at least two sizes: there are 1"),
        ([(8, 0.0), (16, 1.0)], "8 bytes in 0.0 us is implausible"),
        ([(8, 1.0), (16, 1e300)], "16 bytes in 1e+300 us is implausible"),
        ([(8, 6e-88), (16, 1.0)], "8 bytes in 6e-88 us is implausible"),
        ([(8, 1.0), (16, math.nan)], "16 bytes in nan us is implausible"),
        ([(8, 1.0), (16, math.inf)], "16 bytes in inf us is implausible"),
        ([(0, 1.0), (16, 1.0)], "0 bytes in 1.0 us is implausible"),
    ],
)
def test_what_makes_no_curve_is_told(points: list[tuple[int, float]], says: str) -> None:
    assert str(raised(ValueError, fit_curve, points)) == says


def test_a_curve_survives_json() -> None:
    curve = fit_curve(SHAPED)
    assert msgspec.json.decode(msgspec.json.encode(curve), type=SizeCurve) == curve


@given(st.dictionaries(sizes, st.floats(min_value=1e-3, max_value=1e12), min_size=2))
@example({1: 1e12, 1 << 34: 1e-3})
@example({1: 1e-3, 1 << 34: 1e12})
@example({(1 << 34) - 1: 1e-3, 1 << 34: 1e12})
def test_any_times_that_can_be_make_a_curve(points: dict[int, float]) -> None:
    curve = fit_curve(points.items())
    assert 0 <= curve.alpha_us < math.inf
    assert curve.bandwidth_gb_per_s is None or 0 < curve.bandwidth_gb_per_s < math.inf
    assert all(math.isfinite(residual) for residual in curve.residuals)
    assert all(0 <= curve.predict_us(size) < math.inf for size in (1, *points, 1 << 40))
