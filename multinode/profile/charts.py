"""Charts of a run: step time, loss, each worker's split, and all machines over one time axis."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Sequence

import msgspec

from multinode.profile.nics import nic_rates
from multinode.profile.observed import Observed, ObservedNode
from multinode.profile.step_split import PARTS, StepSplit
from multinode.records.samples import CpuSample, GpuSample, LossSample, NicSample, StepSample
from multinode.render.charts import PALETTE, Figure, Scatter, make_subplots, stacked_bars, thinned, with_axes
from multinode.render.sheet import html_text
from multinode.stats.unknown import or_none

# A browser draws each one again at every move.
_MOST_SHADES = 20


def step_time_chart(observed: Observed) -> Figure | None:
    """One line per node over the step number, with unmeasured steps shaded. None without times."""
    figure = Figure()
    for node in observed.nodes:
        times = dict(_node_step_times(observed, node))
        if times:
            steps, milliseconds = thinned(list(times), list(times.values()))
            figure.add_trace(Scatter(x=steps, y=milliseconds, mode="lines", name=html_text(node.name)))
    if not figure.data:
        return None
    _shade(figure, list(_uncounted(observed)))
    return with_axes(figure, "step", "step time (ms)")


def loss_chart(observed: Observed) -> Figure | None:
    """The loss of the first worker that logged one, with gaps at divergence; None without one."""
    samples = observed.of(LossSample)
    if not samples:
        return None
    rank = min(sample.rank for sample in samples)
    losses = {sample.step: sample.loss for sample in samples if sample.rank == rank}
    steps, values = thinned(sorted(losses), [losses[step] for step in sorted(losses)])
    figure = Figure(Scatter(x=steps, y=values, mode="lines+markers", name="loss"))
    figure.update_xaxes(title_text="step")
    figure.update_yaxes(title_text="loss")
    return figure


def split_chart(split: StepSplit) -> Figure | None:
    """One stacked bar per worker with the parts of its step; None without a split."""
    parts = {part.title: [or_none(getattr(worker, part.name)) for worker in split.workers] for part in PARTS}
    return stacked_bars([f"rank {worker.rank}" for worker in split.workers], parts, "ms of a step, mean")


def _shade(figure: Figure, stretches: Sequence[tuple[int, int]]) -> None:
    longest = sorted(stretches, key=lambda stretch: stretch[0] - stretch[1])[:_MOST_SHADES]
    if not longest:
        return
    across: dict[str, object] = {"xref": "x", "yref": "y domain"}
    drawn = {"type": "rect", "y0": 0, "y1": 1, "fillcolor": "rgba(128,128,128,0.18)", "line": {"width": 0}, **across}
    title = "excluded"
    if len(stretches) > len(longest):
        title += f" (the {len(longest)} longest of {len(stretches)} stretches)"
    note = {"text": title, "x": min(longest)[0] - 0.5, "xanchor": "left", "y": 1, "yanchor": "top", "showarrow": False}
    # Added at once, because plotly revalidates the figure for each trace.
    figure.update_layout(
        shapes=[{"x0": first - 0.5, "x1": last + 0.5, **drawn} for first, last in sorted(longest)],
        annotations=[{**note, **across}],
    )


def _uncounted(observed: Observed) -> Iterator[tuple[int, int]]:
    counted = set(observed.counted)
    for counts, stretch in itertools.groupby(observed.steps, key=lambda number: number in counted):
        if not counts:
            numbers = list(stretch)
            yield numbers[0], numbers[-1]


def _node_step_times(observed: Observed, node: ObservedNode) -> Iterator[tuple[int, float]]:
    for number, workers in observed.steps.items():
        times = [
            sample.step_time_us
            for rank, sample in workers.items()
            if rank in node.ranks and sample.step_time_us is not None
        ]
        if times:
            yield number, statistics.median(times) / 1000


_NIC_LANES = {"net in<br>(Gbit/s)": "in_gbit_per_s", "net out<br>(Gbit/s)": "out_gbit_per_s"}
_GPU_LANES = {
    "SM (%)": "sm_percent",
    "power (W)": "power_w",
    "clock (MHz)": "sm_clock_mhz",
    "memory (GiB)": "memory_used_gib",
    "temp (C)": "temperature_c",
}
_LANES = ("step (ms)", *_NIC_LANES, *_GPU_LANES, "CPU (%)")
# Lines of a node have its color and differ in style.
_DASHES = ("solid", "dot", "dash", "dashdot")
_LONG_DASH = "longdash"


class _Line(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a lane."""

    node: int  # Position of the node, which gives the colour.
    name: str
    points: Sequence[tuple[float, float | None]]  # Time and value.
    dash: str = "solid"


def timeline(observed: Observed) -> tuple[Figure, int] | None:
    """The lanes below each other, and their number; None without samples.

    Time is in seconds since the end of the run's first step, by each node's own clock.
    """
    begun = _begun_s(observed)
    if begun is None:
        return None
    lines_of: dict[str, list[_Line]] = {}
    for index, node in enumerate(observed.nodes):
        for title, line in _lines(index, node, begun):
            if any(value is not None for _, value in line.points):
                lines_of.setdefault(title, []).append(line)
    lanes = [(title, lines_of[title]) for title in _LANES if title in lines_of]
    if not lanes:
        return None
    figure = make_subplots(rows=len(lanes), cols=1, shared_xaxes=True, vertical_spacing=0.12 / len(lanes))
    # A click on a node in the legend hides all its lines.
    named: set[int] = set()
    for row, (title, lines) in enumerate(lanes, 1):
        for line in lines:
            figure.add_trace(_scatter(line, first=line.node not in named), row=row, col=1)
            named.add(line.node)
        figure.update_yaxes(title_text=title, rangemode="tozero", row=row, col=1)
    window = _window(observed, begun)
    if window is not None:
        figure.add_vrect(x0=window[0], x1=window[1], fillcolor="rgba(128,128,128,0.12)", line_width=0)
    figure.update_xaxes(title_text="seconds since the run's first step", row=len(lanes), col=1)
    return figure, len(lanes)


def _begun_s(observed: Observed) -> float | None:
    if observed.steps:
        return min(sample.time_s for sample in observed.steps[min(observed.steps)].values())
    kinds = (NicSample, CpuSample, GpuSample)
    samples = (sample for node in observed.nodes for sample in node.samples)
    return min((sample.time_s for sample in samples if isinstance(sample, kinds)), default=None)


def _lines(index: int, node: ObservedNode, begun: float) -> Iterator[tuple[str, _Line]]:
    def line(name: str, points: Sequence[tuple[float, float | None]], dash: str = "solid") -> _Line:
        return _Line(node=index, name=name, points=[(time_s - begun, value) for time_s, value in points], dash=dash)

    # Of the node's first worker, as workers end a step together.
    steps = [
        sample for sample in node.of(StepSample) if sample.rank == node.ranks[0] and sample.step_time_us is not None
    ]
    yield "step (ms)", line(node.name, [(sample.time_s, (sample.step_time_us or 0.0) / 1000) for sample in steps])
    for order, (ifname, rates) in enumerate(sorted(nic_rates(node.of(NicSample)).items())):
        dash = _DASHES[order % len(_DASHES)]
        for title, field in _NIC_LANES.items():
            points = [(rate.sample.time_s, getattr(rate, field)) for rate in rates]
            yield title, line(f"{node.name} {ifname}", points, dash)
            if ifname == node.ifname and points:
                level = [(points[end][0], node.link_gbit_per_s) for end in (0, -1)]
                yield title, line(f"{node.name} link rate", level, _LONG_DASH)
    gpus: dict[int, list[GpuSample]] = {}
    for sample in node.of(GpuSample):
        gpus.setdefault(sample.index, []).append(sample)
    for order, (gpu, samples) in enumerate(sorted(gpus.items())):
        dash = _DASHES[order % len(_DASHES)]
        for title, field in _GPU_LANES.items():
            points = [(sample.time_s, getattr(sample, field)) for sample in samples]
            yield title, line(f"{node.name} GPU {gpu}", points, dash)
    yield "CPU (%)", line(node.name, [(sample.time_s, sample.busy_percent) for sample in node.of(CpuSample)])


def _scatter(line: _Line, *, first: bool) -> Scatter:
    xs, ys = thinned([at for at, _ in line.points], [value for _, value in line.points])
    return Scatter(
        x=xs,
        y=ys,
        mode="lines",
        name=html_text(line.name),
        legendgroup=str(line.node),
        showlegend=first,
        line={"dash": line.dash, "color": PALETTE[line.node % len(PALETTE)], "width": 1.5},
    )


def _window(observed: Observed, begun: float) -> tuple[float, float] | None:
    if not observed.counted:
        return None
    first = observed.steps[observed.counted[0]].values()
    last = observed.steps[observed.counted[-1]].values()
    since = min(sample.time_s - (sample.step_time_us or 0.0) / 1e6 for sample in first)
    return since - begun, max(sample.time_s for sample in last) - begun
