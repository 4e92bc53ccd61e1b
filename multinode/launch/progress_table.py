"""The live table: from progress to a renderable. The columns are chosen when the width is known."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from multinode.cluster.hostfile import fold_ranges
from multinode.figures.figure import Figure
from multinode.records.progress import NODE_FIGURES, NodeProgress, RunProgress
from multinode.records.run import Stall
from multinode.render.sheet import sanitize
from multinode.render.table import make_table
from multinode.units import format_duration, format_figure, format_ms, ms_digits

# States that need attention come first.
_STATES = ("lost", "stopping", "waiting", "starting", "ended", "running")


class Rest(msgspec.Struct, frozen=True, kw_only=True):
    """Nodes that have no row of their own."""

    count: int
    states: str  # in a few words, `24 running, 1 ended`
    step: int | None  # their minimum step
    step_time_us: float | None  # their median; None if none is known


def worst_first(nodes: Sequence[NodeProgress], most: int) -> tuple[tuple[NodeProgress, ...], tuple[NodeProgress, ...]]:
    """At most this number of nodes, worst first, and the others; few nodes are all shown, in node-rank order."""
    if len(nodes) <= most:
        return tuple(nodes), ()
    ranked = sorted(nodes, key=_badness)
    return tuple(ranked[: most - 1]), tuple(ranked[most - 1 :])


def sum_up(nodes: Sequence[NodeProgress]) -> Rest:
    """The nodes as one."""
    states = Counter(node.state for node in nodes)
    steps = [node.step for node in nodes if node.step is not None]
    times = [node.step_time_us for node in nodes if node.step_time_us is not None]
    return Rest(
        count=len(nodes),
        states=", ".join(f"{states[state]} {state}" for state in _STATES if states[state]),
        step=min(steps, default=None),
        step_time_us=statistics.median(times) if times else None,
    )


def _badness(node: NodeProgress) -> tuple[int, bool, int, float, int]:
    state = _STATES.index(node.state) if node.state in _STATES else 0
    step = node.step if node.step is not None else -1
    return state, not node.message, step, -(node.step_time_us or 0.0), node.node_rank


_STATE_STYLES = {"running": "green", "ended": "bold", "lost": "bold red", "stopping": "yellow"}
_UNKNOWN = "-"
# A table takes a glance, a line even less.
_MOST_ROWS = 12
_MOST_PARTS = 6
# Longer names of a group would take space from figures.
_LONGEST_NAMES = 20
# From here on a figure is wider than its column.
_LONG = 1e9


class _Column(msgspec.Struct, frozen=True, kw_only=True):
    """How the table treats a figure."""

    rank: int  # The higher, the earlier it gives way where the terminal is narrow.
    of_rest: Callable[[Sequence[float]], float] | None = None  # Of a group of nodes, from the known values.
    by_worker: bool = False  # Whether a node counts as often as it has workers.
    is_rate: bool = False  # Of this moment, so an idle node has none.


_COLUMNS = {
    "samples_per_s": _Column(rank=3, of_rest=sum),
    "tgs": _Column(rank=7, of_rest=statistics.fmean, by_worker=True),
    "loss": _Column(rank=6),
    "exposed_share": _Column(rank=1, of_rest=min),
    "net_in_gbit_per_s": _Column(rank=4, of_rest=sum, is_rate=True),
    "net_out_gbit_per_s": _Column(rank=4, of_rest=sum, is_rate=True),
    "link_share": _Column(rank=2, of_rest=statistics.fmean, is_rate=True),
    "gpu_percent": _Column(rank=5, of_rest=statistics.fmean),
    "gpu_memory_gib": _Column(rank=8),
    "gpu_power_w": _Column(rank=9),
    "gpu_temperature_c": _Column(rank=10),
}
_FIGURES = tuple(figure for figure in NODE_FIGURES if figure.title)


class ProgressTable:
    """One row per node; with many nodes, one for each of the worst, and one per state for the others.

    On a narrow terminal the least important columns are left out.

    Args:
        progress: what is shown.
    """

    def __init__(self, progress: RunProgress) -> None:
        self._progress = progress
        _, rest = worst_first(progress.nodes, _MOST_ROWS)
        states = [state for state in _STATES if any(node.state == state for node in rest)]
        self._shown, rest = worst_first(progress.nodes, _MOST_ROWS + 1 - max(1, len(states)))
        groups = ([node for node in rest if node.state == state] for state in _STATES)
        self._groups = [sorted(group, key=lambda node: node.node_rank) for group in groups if group]
        # By name and node rank. Some are slow to compute, and a table that does not fit is laid out again.
        self._values: dict[str, dict[int, float]] = {
            figure.name: {
                node.node_rank: value
                for node in progress.nodes
                if (value := getattr(node, figure.name)) is not None
                and not (_COLUMNS[figure.name].is_rate and node.state == "ended")
            }
            for figure in _FIGURES
        }

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        figures = [figure for figure in _FIGURES if self._values[figure.name]]
        table = self._table(figures)
        while figures and Measurement.get(console, options.update(max_width=1000), table).maximum > options.max_width:
            least = max(_COLUMNS[figure.name].rank for figure in figures)
            figures = [figure for figure in figures if _COLUMNS[figure.name].rank != least]
            table = self._table(figures)
        # As wide as the terminal, where the table is narrow.
        yield Text(sanitize(f"{self._progress.job}  run {self._progress.run_id}"), style="italic")
        yield table
        yield self._caption(has_tgs=any(figure.name == "tgs" for figure in figures))

    def _table(self, figures: Sequence[Figure[float]]) -> Table:
        table = make_table()
        for name in ("node", "ranks", "state"):
            table.add_column(name, no_wrap=True)
        for name in ("step", "time\n(ms)", *(f"{figure.title}\n{figure.unit}".strip() for figure in figures)):
            table.add_column(name, justify="right", no_wrap=True)
        for node in self._shown:
            values = (self._values[figure.name].get(node.node_rank) for figure in figures)
            table.add_row(
                *_row(node), *(_number(value, figure.text) for figure, value in zip(figures, values, strict=True))
            )
        for group in self._groups:
            rest = sum_up(group)
            table.add_row(
                *_rest_row(group, rest),
                *(_number(self._of_group(figure, group), figure.text) for figure in figures),
            )
        return table

    def _of_group(self, figure: Figure[float], group: Sequence[NodeProgress]) -> float | None:
        column, mine = _COLUMNS[figure.name], self._values[figure.name]
        known = [(mine[node.node_rank], len(node.ranks)) for node in group if node.node_rank in mine]
        values = [value for value, workers in known for _ in range(workers if column.by_worker else 1)]
        return column.of_rest(values) if column.of_rest is not None and values else None

    def _caption(self, *, has_tgs: bool) -> Text:
        progress = self._progress
        text = _duration(progress)
        exposed = min(self._values["exposed_share"].values(), default=None)
        if exposed is not None:
            text += f"; exposed communication {exposed:.0%} (of the worker that waited least)"
        if has_tgs:
            text += f"; TGS: tokens per second per {'GPU' if any(node.gpus for node in progress.nodes) else 'worker'}"
        caption = Text(text)
        if progress.note:
            caption.append("\n" + sanitize(progress.note), style="bold")
        if progress.stall is not None:
            caption.append("\n" + sanitize(progress.stall.message), style="bold red")
        return caption


def progress_line(progress: RunProgress) -> str:
    """The whole run in one line of text, for output that is not a terminal."""
    parts = []
    shown, rest = worst_first(progress.nodes, _MOST_PARTS)
    for node in shown:
        words = [node.name, node.doing]
        if node.state == "running" and node.step is not None and not node.message:
            words = [node.name, f"step {_step(node)}"]
            if node.step_time_us is not None:
                words.append(format_ms(node.step_time_us / 1000))
            if node.loss is not None:
                words.append(f"loss {format_figure(node.loss, digits=4)}")
        parts.append(" ".join(words))
    if rest:
        others = sum_up(rest)
        at = f", at least step {others.step}" if others.step is not None else ""
        parts.append(f"{others.count} others: {others.states}{at}")
    exposed = progress.exposed_share
    text = "" if exposed is None else f"  exposed communication {exposed:.0%}"
    return sanitize(f"{_duration(progress)}  " + " | ".join(parts) + text)


def stall_line(stall: Stall) -> str:
    """A standstill, its cause, and the fix."""
    text = f"stalled: no new step or log line on any node for {format_duration(stall.silent_s)}; {stall.message}"
    return f"{text}\n  hint: {stall.hint}" if stall.hint else text


def _duration(progress: RunProgress) -> str:
    text = format_duration(progress.elapsed_s)
    if progress.attempt is not None:
        text = f"attempt {progress.attempt} of {progress.attempts}: {text}"
    training = progress.training
    if training is not None:
        text += f", trained {format_duration(training.trained_s)} of {format_duration(training.limit_s)}"
    left_s = progress.left_s
    if left_s:
        text += f", about {format_duration(left_s)} left"
    rates = [
        node.samples_per_s for node in progress.nodes if node.state == "running" and node.samples_per_s is not None
    ]
    if len(rates) == len(progress.nodes) > 1:
        text += f"; {sum(rates):,.1f} samples/s in total"
    return text


def _row(node: NodeProgress) -> list[Text]:
    return [
        Text(sanitize(node.name)),
        Text(f"{node.ranks[0]}-{node.ranks[-1]}" if len(node.ranks) > 1 else str(node.ranks[0])),
        Text(sanitize(node.doing), style=_STATE_STYLES.get(node.state, "dim")),
        Text(_step(node)),
        Text(_number(node.step_time_us and node.step_time_us / 1000, ms_digits)),
    ]


def _rest_row(group: Sequence[NodeProgress], rest: Rest) -> list[str]:
    named = f"{rest.count} others: {sanitize(fold_ranges([node.name for node in group]))}"
    return [
        named if len(named) <= _LONGEST_NAMES else f"{rest.count} others",
        "",
        rest.states,
        _UNKNOWN if rest.step is None else f">= {rest.step}",
        _number(rest.step_time_us and rest.step_time_us / 1000, ms_digits),
    ]


def _step(node: NodeProgress) -> str:
    if node.step is None:
        return _UNKNOWN
    return f"{node.step}/{node.total_steps}" if node.total_steps else str(node.step)


def _number(value: float | None, form: Callable[[float], str]) -> str:
    if value is None:
        return _UNKNOWN
    # A node may report anything; the other columns stay visible.
    return form(value) if math.isinf(value) or not abs(value) >= _LONG else f"over {_LONG:,.0f}"
