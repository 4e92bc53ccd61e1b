"""Charts of a run over its steps: step time, loss, and each worker's split. What has a clock is `timeline`'s."""

from __future__ import annotations

import html
import itertools
import statistics
from collections.abc import Iterator, Sequence

from plotly.graph_objects import Bar, Figure, Scatter

from multinode.analyse.run.observed import Observed, ObservedNode
from multinode.analyse.steps.step_split import StepSplit
from multinode.core.run.samples import LossSample
from multinode.report.render.foreign_text import sanitize
from multinode.report.render.page import PALETTE
from multinode.report.render.thinning import thinned
from multinode.report.steps.summary_sheets import PARTS

__all__ = ["label", "loss_chart", "node_step_times", "split_chart", "step_time_chart"]

# A browser draws each one again at every move.
_MOST_SHADES = 20
_COLOURS = dict(zip(PARTS, PALETTE, strict=False))


def label(text: str) -> str:
    """A name in a chart: plotly takes text for a kind of HTML."""
    return html.escape(sanitize(text))


def step_time_chart(observed: Observed) -> Figure | None:
    """A line a node, over the number of the step; what does not count is shaded. None without a time."""
    figure = Figure()
    for node in observed.nodes:
        times = dict(node_step_times(observed, node))
        if times:
            steps, milliseconds = thinned(list(times), list(times.values()))
            figure.add_trace(Scatter(x=steps, y=milliseconds, mode="lines", name=label(node.name)))
    if not figure.data:
        return None
    _shade(figure, list(_uncounted(observed)))
    figure.update_xaxes(title_text="step")
    figure.update_yaxes(title_text="step time (ms)", rangemode="tozero")
    return figure


def loss_chart(observed: Observed) -> Figure | None:
    """The loss as the first worker that tells one logged it; None without one. A loss that diverged is a gap."""
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
    """A bar a worker, stacked of the parts of its step; None where there is no split."""
    if not split.workers:
        return None
    figure = Figure()
    # The first worker stands on top.
    workers = list(reversed(split.workers))
    for field, name in PARTS.items():
        parts_ms = [getattr(worker, field) for worker in workers]
        if any(part_ms is not None for part_ms in parts_ms):
            ranks = [f"rank {worker.rank}" for worker in workers]
            figure.add_trace(
                Bar(y=ranks, x=parts_ms, name=name, orientation="h", marker={"color": _COLOURS[field]}),
            )
    if not figure.data:
        return None
    figure.update_layout(barmode="stack", legend={"traceorder": "normal"})
    figure.update_xaxes(title_text="ms of a step, mean")
    return figure


def _shade(figure: Figure, stretches: Sequence[tuple[int, int]]) -> None:
    """Shade stretches of steps, the longest if they are many; the first one says what that means."""
    longest = sorted(stretches, key=lambda stretch: stretch[0] - stretch[1])[:_MOST_SHADES]
    if not longest:
        return
    across: dict[str, object] = {"xref": "x", "yref": "y domain"}
    drawn = {"type": "rect", "y0": 0, "y1": 1, "fillcolor": "rgba(128,128,128,0.18)", "line": {"width": 0}, **across}
    said = "does not count"
    if len(stretches) > len(longest):
        said += f" (the {len(longest)} longest of {len(stretches)} stretches)"
    note = {"text": said, "x": min(longest)[0] - 0.5, "xanchor": "left", "y": 1, "yanchor": "top", "showarrow": False}
    # All at once: plotly looks at the whole figure again for each that is added.
    figure.update_layout(
        shapes=[{"x0": first - 0.5, "x1": last + 0.5, **drawn} for first, last in sorted(longest)],
        annotations=[{**note, **across}],
    )


def _uncounted(observed: Observed) -> Iterator[tuple[int, int]]:
    """Stretches of steps that do not count: first and last number of each."""
    counted = set(observed.counted)
    for counts, stretch in itertools.groupby(observed.steps, key=lambda number: number in counted):
        if not counts:
            numbers = list(stretch)
            yield numbers[0], numbers[-1]


def node_step_times(observed: Observed, node: ObservedNode) -> Iterator[tuple[int, float]]:
    """Of each step its number and the median of the node's workers, in ms."""
    for number, workers in observed.steps.items():
        times = [
            sample.step_time_us
            for rank, sample in workers.items()
            if rank in node.ranks and sample.step_time_us is not None
        ]
        if times:
            yield number, statistics.median(times) / 1000
