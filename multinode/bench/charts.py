"""The charts of a bench on its page: each worker's speed, and matrix products over their size."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from multinode.bench.figures import MATRIX_ROWS, TFLOPS, BenchReport, BenchTest, DeviceSpeed
from multinode.render.charts import PALETTE, Bar, Figure, Scatter, error_bars, line_style, with_axes
from multinode.render.sheet import Chart, html_text

_MOST_BARS = 64
# Bars beside each other in the height of one plot.
_BARS_A_PLOT = 6


def bench_charts(report: BenchReport) -> Iterator[Chart]:
    """Speeds of all workers in the fastest matrix product of each type and in each memory test; products by size."""
    tests = [test for worker in report.workers for test in worker.tests if test.speeds]
    for kind, name, unit in dict.fromkeys((*_group(test), test.unit) for test in tests if test.kind != "layers"):
        figure, bars = _worker_chart(report, kind, name, unit)
        if bars > 1:
            title = f"{'matrix products in ' if kind == 'matmul' else ''}{name} by worker"
            note = f"The first {_MOST_BARS} of {bars} speeds are drawn." if bars > _MOST_BARS else ""
            rows = max(1, min(bars, _MOST_BARS) // _BARS_A_PLOT)
            yield Chart(title=title, name=f"{kind}-{name}".replace(" ", "-"), figure=figure, rows=rows, note=note)
    sizes = _size_chart([test for test in tests if test.kind == "matmul"])
    if sizes is not None:
        yield Chart(title="matrix products by size, median of all workers", name="sizes", figure=sizes, rows=2)


def _group(test: BenchTest) -> tuple[str, str]:
    return test.kind, test.dtype if test.kind == "matmul" else test.name


def _worker_chart(report: BenchReport, kind: str, name: str, unit: str) -> tuple[Figure, int]:
    """A bar per worker and phase, the fastest of the tests; and how many there are, drawn or not."""
    figure, bars = Figure(), 0
    for number, phase in enumerate(report.phases):
        speeds: dict[str, DeviceSpeed] = {}
        for node in report.nodes:
            for worker in node.workers:
                mine = [speed for test in worker.tests if _group(test) == (kind, name) if (speed := test.speed(phase))]
                if mine:
                    speeds[f"{node.node}/{worker.rank}"] = max(mine, key=lambda speed: speed.value.value)
        bars += len(speeds)
        drawn = dict(list(speeds.items())[: _MOST_BARS // len(report.phases)])
        # The first one is on top.
        values = [speed.value for speed in reversed(drawn.values())]
        figure.add_trace(
            Bar(
                y=[html_text(worker) for worker in reversed(drawn)],
                x=[value.value for value in values],
                error_x=error_bars(values),
                orientation="h",
                name=phase,
                marker={"color": PALETTE[number % len(PALETTE)]},
                hovertemplate=f"%{{y}}: %{{x:,.4r}} {unit}",
            )
        )
    return with_axes(figure, unit, type="linear", rangemode="tozero"), bars


def _size_chart(tests: Sequence[BenchTest]) -> Figure | None:
    by_dtype: dict[str, dict[int, list[float]]] = {}
    for test in tests:
        if test.size.isdecimal():
            points = by_dtype.setdefault(test.dtype, {}).setdefault(int(test.size), [])
            points.append(max(speed.value.value for speed in test.speeds))
    if all(len(by_size) < 2 for by_size in by_dtype.values()):  # noqa: PLR2004 - a line has two ends
        return None
    figure = Figure()
    for number, (dtype, by_size) in enumerate(by_dtype.items()):
        sizes = sorted(by_size)
        speeds = [statistics.median(by_size[size]) for size in sizes]
        line = line_style(number)
        figure.add_trace(Scatter(x=sizes, y=speeds, mode="lines+markers", name=html_text(dtype), line=line))
    ticks = sorted({size for by_size in by_dtype.values() for size in by_size})
    figure.update_layout(showlegend=True)
    return with_axes(figure, MATRIX_ROWS.about, TFLOPS.unit, type="log", tickvals=ticks)
