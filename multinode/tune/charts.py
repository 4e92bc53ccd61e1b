"""The charts of a tune on its page: speed, and time to the loss, of each change."""

from __future__ import annotations

from collections.abc import Iterator

from multinode.profile.throughput import SAMPLES_PER_S
from multinode.render.charts import bars_height, interval_bars
from multinode.render.sheet import Chart
from multinode.tune.judge import Tuning


def tuning_charts(tuning: Tuning) -> Iterator[Chart]:
    """A bar per change, with its interval over seeds."""
    speeds = {row.candidate.name: row.samples_per_s for row in tuning.rows if row.samples_per_s is not None}
    times = {row.candidate.name: row.time_to_loss_s for row in tuning.rows if row.time_to_loss_s is not None}
    for title, name, bars, across in (
        (f"{SAMPLES_PER_S.title} of each change", "changes", speeds, SAMPLES_PER_S.title),
        ("time to the loss of each change", "changes-time", times, "seconds of training"),
    ):
        if bars:
            yield Chart(title=title, name=name, figure=interval_bars(bars, across), rows=bars_height(len(bars)))
