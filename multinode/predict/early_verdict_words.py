"""An EarlyVerdict in one line: which is faster, the time left either way, and the best change."""

from __future__ import annotations

from multinode.records.run import BestChange, EarlyVerdict, Projection
from multinode.render.sheet import times
from multinode.units import format_count, format_duration


def verdict_line(verdict: EarlyVerdict, step: int | None = None) -> str:
    """The verdict in one line.

    Args:
        verdict: the verdict.
        step: current step, for the times; None uses that of the verdict.
    """
    now, alone = verdict.now, verdict.one_node
    if now is None or alone is None:
        return verdict.sentence
    said = f"Early verdict ({format_count(verdict.recorded, 'step')})"
    part = _part_left(verdict, step)
    ways = [
        (now, f"on {verdict.nodes} nodes"),
        (alone, f"on {verdict.node} alone"),
        *([(verdict.best, f"with {_change(verdict.best)}")] if verdict.best is not None else ()),
    ]
    # A finished run has no time left.
    left = ", ".join(words for way, name in ways if part and (words := _left(way, name, part)))
    told = f". Left: {left}" if left else _best(verdict.best)
    return f"{said}: {_head(verdict.nodes, alone)}{told}{_cores(verdict)}{_memory(verdict)}"


def _head(nodes: int, alone: Projection) -> str:
    low, high = alone.speedup_interval
    if low > 1:
        said = f"1 node is {times(alone.speedup)} faster than {nodes} ({times(low)} to {times(high)})"
    elif high < 1:
        said = f"{nodes} nodes are {times(1 / alone.speedup)} faster than 1 ({times(1 / high)} to {times(1 / low)})"
    else:
        said = f"inconclusive: 1 node is {times(low)} to {times(high)} the speed of {nodes}"
    return f"{said}, with the same workers per node"


def _part_left(verdict: EarlyVerdict, step: int | None) -> float:
    if step is None or verdict.total_steps is None or verdict.total_steps <= verdict.step:
        return 1.0
    return min(1.0, max(0, verdict.total_steps - step) / (verdict.total_steps - verdict.step))


def _left(way: Projection, name: str, part: float) -> str:
    if way.left_s is None or way.left_interval_s is None:
        return ""
    value, low, high = (format_duration(one * part) for one in (way.left_s, *way.left_interval_s))
    return f"{value} {name} ({low} to {high})"


def _best(best: BestChange | None) -> str:
    if best is None:
        return ""
    low, high = best.speedup_interval
    return f". Best change: {_change(best)}, {times(best.speedup)} faster ({times(low)} to {times(high)})"


def _change(best: BestChange) -> str:
    more = f"global batch {best.samples_ratio:g}x" if best.samples_ratio != 1 else ""
    how = "; ".join(one for one in (best.options, more) if one)
    return f"{best.name} [{how}]" if how else best.name


def _cores(verdict: EarlyVerdict) -> str:
    if verdict.core_wait_ms is None:
        return ""
    return (
        f". The interval is wide: workers of {verdict.node} waited {verdict.core_wait_ms:.3g} ms of a step for a core"
    )


def _memory(verdict: EarlyVerdict) -> str:
    if verdict.memory == "fits":
        return ""
    if verdict.memory == "unknown":
        return ". It is unknown whether it fits one node's memory"
    needed = f": {verdict.needed_gib:.3g} GiB per worker" if verdict.needed_gib is not None else ""
    there = f", its GPU has {verdict.gpu_gib:.3g}" if needed and verdict.gpu_gib is not None else ""
    return f". It does not fit one node's memory{needed}{there}"
