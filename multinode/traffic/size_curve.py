"""SizeCurve: time of a collective by size, from a size scan, and how reliable it is.

Knows only sizes and times; what a curve should look like is not decided here.
"""

from __future__ import annotations

import bisect
import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from multinode.records.samples import plausible_us

Point = tuple[int, float]

# With a larger residual at any size, two numbers do not describe the curve. Measured on virtual nodes (gloo, 2 and 4 of
# them, 1 Gbit/s, 8 B to 16 MiB, all six collectives): residuals reach 46% to 96%, as a shaper's burst lets small
# messages pass. Median error at held-back sizes of 1 MiB and more: fit 3.7% to 48%; interpolation in size and time 0.1%
# to 4.9%, in their logarithms 0.1% to 6.8%. At 100 Mbit/s interpolation is off by 0% to 6.1% (2 nodes) and 1.9% to 8.7%
# (4 nodes), where the larger sizes had 5 to 9 iterations; smoother curves through more neighbors did no better.
_POOR_FIT = 0.05
_LEAST_SIZES = 2
_US_PER_GB_PER_S = 1e-3


class SizeCurve(msgspec.Struct, frozen=True, kw_only=True):
    """Time over size of one collective."""

    points: tuple[Point, ...]  # sizes in bytes and measured times in microseconds, by size
    alpha_us: float  # of the fit t = alpha + size / bandwidth: the cost of every message, at least zero
    bandwidth_gb_per_s: float | None  # of the fit, 1e9 bytes per second; None if the times do not grow with size
    residuals: tuple[float, ...]  # of the fit, by point: (fitted - measured) / measured
    # what predicts: the fit, or interpolation if the fit is off by more than 5% at any point
    method: Literal["fit", "interpolation"]

    def predict_us(self, size_bytes: float) -> float:
        """Time of a message of this size, in microseconds.

        Interpolation is linear in size and time between two points; below the smallest point it takes that
        point's
        time, and beyond the largest it continues at the last slope.
        """
        if self.method == "fit":
            return _line_us(self.alpha_us, self.bandwidth_gb_per_s, size_bytes)
        return _interpolate_us(self.points, size_bytes)


class ScanCurves(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a size scan that other runs can use."""

    run_id: str
    world_size: int
    nodes: tuple[str, ...]
    # of the slowest node: total rate of the NICs that the collectives used; None if one is unknown, or for one node
    link_gbit_per_s: float | None = None
    curves: dict[str, SizeCurve] = {}  # time over size, by collective, if several sizes were measured


class HeldBack(msgspec.Struct, frozen=True, kw_only=True):
    """One point, predicted from all others."""

    size_bytes: int
    predicted_us: float  # by the curve through the others
    measured_us: float

    @property
    def error(self) -> float:
        """Relative to the measurement; negative if the prediction is lower."""
        return self.predicted_us / self.measured_us - 1


def fit_curve(points: Iterable[Point]) -> SizeCurve:
    """The curve through points in bytes and microseconds; several of one size become their median."""
    unique = _clean(points)
    alpha_us, bandwidth = _fit(unique)
    residuals = tuple(_line_us(alpha_us, bandwidth, size) / time_us - 1 for size, time_us in unique)
    poor = max(map(abs, residuals)) > _POOR_FIT
    return SizeCurve(
        points=unique,
        alpha_us=alpha_us,
        bandwidth_gb_per_s=bandwidth,
        residuals=residuals,
        method="interpolation" if poor else "fit",
    )


def held_back(points: Iterable[Point], least_bytes: int) -> tuple[HeldBack, ...]:
    """Each point from this size on, predicted from the others; empty if fewer than two others remain."""
    unique = _clean(points)
    if len(unique) <= _LEAST_SIZES:
        return ()
    return tuple(
        HeldBack(
            size_bytes=size,
            predicted_us=fit_curve(unique[:place] + unique[place + 1 :]).predict_us(size),
            measured_us=time_us,
        )
        for place, (size, time_us) in enumerate(unique)
        if size >= least_bytes
    )


def median_error(held: Iterable[HeldBack]) -> float | None:
    """The median of the absolute errors; None without errors."""
    errors = [abs(one.error) for one in held]
    return statistics.median(errors) if errors else None


def _clean(points: Iterable[Point]) -> tuple[Point, ...]:
    times: dict[int, list[float]] = {}
    for size, time_us in points:
        if not 0 < size < math.inf or not plausible_us(time_us):
            raise ValueError(f"{size} bytes in {time_us} us is implausible")
        times.setdefault(size, []).append(time_us)
    if len(times) < _LEAST_SIZES:
        raise ValueError(f"a curve needs at least two sizes: there are {len(times)}")
    return tuple((size, statistics.median(mine)) for size, mine in sorted(times.items()))


def _fit(points: Sequence[Point]) -> tuple[float, float | None]:
    """Least squares of (alpha + size * slope) / time - 1, neither below zero: alpha and 1 / slope."""
    # Sizes relative to the largest, times relative to the smallest: products stay within a float.
    unit, least_us = points[-1][0], min(time_us for _, time_us in points)
    ones = [least_us / time_us for _, time_us in points]
    sizes = [size / unit * one for (size, _), one in zip(points, ones, strict=True)]
    ones_ones, ones_sizes, sizes_sizes = (_product(*pair) for pair in ((ones, ones), (ones, sizes), (sizes, sizes)))
    sum_ones, sum_sizes = math.fsum(ones), math.fsum(sizes)
    determinant = ones_ones * sizes_sizes - ones_sizes**2
    alpha = (sum_ones * sizes_sizes - sum_sizes * ones_sizes) / determinant if determinant > 0 else 0.0
    slope = (sum_sizes * ones_ones - sum_ones * ones_sizes) / determinant if determinant > 0 else -1.0
    if alpha <= 0 < sizes_sizes:
        alpha, slope = 0.0, sum_sizes / sizes_sizes
    elif slope <= 0:
        alpha, slope = sum_ones / ones_ones, 0.0
    slope_us = slope * least_us
    return alpha * least_us, unit / slope_us * _US_PER_GB_PER_S if slope_us > 0 else None


def _product(left: Sequence[float], right: Sequence[float]) -> float:
    return math.fsum(one * other for one, other in zip(left, right, strict=True))


def _line_us(alpha_us: float, bandwidth_gb_per_s: float | None, size_bytes: float) -> float:
    return alpha_us + (size_bytes / bandwidth_gb_per_s * _US_PER_GB_PER_S if bandwidth_gb_per_s else 0.0)


def _interpolate_us(points: Sequence[Point], size_bytes: float) -> float:
    if size_bytes <= points[0][0]:
        return points[0][1]
    after = min(bisect.bisect_left(points, size_bytes, key=lambda point: point[0]), len(points) - 1)
    (size, time_us), (next_size, next_us) = points[after - 1 : after + 1]
    way = (size_bytes - size) / (next_size - size)
    if size_bytes > next_size:
        # A last point faster than the previous one is noise: larger messages do not take less time.
        return next_us + max(next_us - time_us, 0.0) * (way - 1)
    return time_us * (1 - way) + next_us * way
