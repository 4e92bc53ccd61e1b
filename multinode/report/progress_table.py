"""The live table: progress in, renderable out."""

from __future__ import annotations

from rich.markup import escape
from rich.table import Table

from multinode.core.progress import NodeProgress, RunProgress
from multinode.core.stall import Stall
from multinode.report.many_nodes import Rest, sum_up, worst_first
from multinode.report.table import make_table
from multinode.units import format_duration

__all__ = ["progress_line", "progress_table", "stall_line"]

_STATE_STYLES = {"running": "green", "ended": "bold", "lost": "bold red", "stopping": "yellow"}
_UNKNOWN = "-"
# A table is read at a glance, a line even faster.
_MOST_ROWS = 12
_MOST_PARTS = 6


def progress_table(progress: RunProgress) -> Table:
    """A row a node: state, step, speed, loss, network and, where there is one, GPU. Of many the worst come first."""
    gpus = any(node.gpu_percent is not None for node in progress.nodes)
    table = make_table(f"{progress.job}  run {progress.run_id}  {_duration(progress)}")
    for name in ("node", "ranks", "state"):
        table.add_column(name, no_wrap=True)
    for name in ("step", "step time\n(ms)", "samples/s", "loss", "net in\n(Gbit/s)", "net out\n(Gbit/s)", "link"):
        table.add_column(name, justify="right", no_wrap=True)
    if gpus:
        table.add_column("GPU", justify="right", no_wrap=True)
    shown, rest = worst_first(progress.nodes, _MOST_ROWS)
    for node in shown:
        table.add_row(*_row(node, gpus=gpus))
    if rest:
        table.add_row(*_rest_row(sum_up(rest)), *([_UNKNOWN] if gpus else []))
    if progress.stall is not None:
        table.caption = f"[bold red]{escape(progress.stall.message)}[/]"
        table.caption_justify = "left"
    return table


def progress_line(progress: RunProgress) -> str:
    """The whole run in one line of text, for an output that is not a terminal."""
    parts = []
    shown, rest = worst_first(progress.nodes, _MOST_PARTS)
    for node in shown:
        words = [node.name, node.message or node.state]
        if node.state == "running" and node.step is not None:
            words = [node.name, f"step {_step(node)}"]
            if node.step_time_us is not None:
                words.append(f"{node.step_time_us / 1000:.0f} ms")
            if node.loss is not None:
                words.append(f"loss {node.loss:.4g}")
        parts.append(" ".join(words))
    if rest:
        others = sum_up(rest)
        at = f", step {others.step} at least" if others.step is not None else ""
        parts.append(f"{others.count} others: {others.states}{at}")
    return f"{_duration(progress)}  " + " | ".join(parts)


def stall_line(stall: Stall) -> str:
    """A standstill, what is behind it, and what mends it."""
    said = f"stalled: no step and no log on any node for {format_duration(stall.silent_s)}: {stall.message}"
    return f"{said}\n  hint: {stall.hint}" if stall.hint else said


def _duration(progress: RunProgress) -> str:
    elapsed = format_duration(progress.elapsed_s)
    left_s = progress.left_s
    return f"{elapsed}, about {format_duration(left_s)} left" if left_s else elapsed


def _row(node: NodeProgress, *, gpus: bool) -> list[str]:
    state = f"[{_STATE_STYLES.get(node.state, 'dim')}]{escape(node.message or node.state)}[/]"
    row = [
        escape(node.name),
        _ranks(node.ranks),
        state,
        _step(node),
        _number(node.step_time_us and node.step_time_us / 1000, "{:.1f}"),
        _number(node.samples_per_s, "{:.1f}"),
        _number(node.loss, "{:.4g}"),
        _number(node.net_in_gbit_per_s, "{:.3f}"),
        _number(node.net_out_gbit_per_s, "{:.3f}"),
        _link(node),
    ]
    return [*row, _number(node.gpu_percent, "{:.0f} %")] if gpus else row


def _rest_row(rest: Rest) -> list[str]:
    busier = [rate for rate in (rest.net_in_gbit_per_s, rest.net_out_gbit_per_s) if rate is not None]
    share = f"{max(busier) / rest.link_gbit_per_s:.0%}" if busier and rest.link_gbit_per_s else _UNKNOWN
    return [
        f"{rest.count} others",
        "",
        rest.states,
        _UNKNOWN if rest.step is None else f">= {rest.step}",
        _number(rest.step_time_us and rest.step_time_us / 1000, "{:.1f}"),
        _number(rest.samples_per_s, "{:.1f}"),
        _UNKNOWN,
        _number(rest.net_in_gbit_per_s, "{:.3f}"),
        _number(rest.net_out_gbit_per_s, "{:.3f}"),
        share,
    ]


def _ranks(ranks: tuple[int, ...]) -> str:
    return f"{ranks[0]}-{ranks[-1]}" if len(ranks) > 1 else str(ranks[0])


def _step(node: NodeProgress) -> str:
    if node.step is None:
        return _UNKNOWN
    return f"{node.step}/{node.total_steps}" if node.total_steps else str(node.step)


def _link(node: NodeProgress) -> str:
    """The busier direction as a share of what the card says it can."""
    rates = [rate for rate in (node.net_in_gbit_per_s, node.net_out_gbit_per_s) if rate is not None]
    if not rates or not node.link_gbit_per_s:
        return _UNKNOWN
    return f"{max(rates) / node.link_gbit_per_s:.0%}"


def _number(value: float | None, form: str) -> str:
    return _UNKNOWN if value is None else form.format(value)
