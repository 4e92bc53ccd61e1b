"""compare: two summaries -> Contrast: how much faster many nodes are than one, and what that is worth. Pure."""

from __future__ import annotations

import msgspec

from multinode.analyse.spread import Spread
from multinode.analyse.summary import Summary
from multinode.errors import UsageError

__all__ = ["Contrast", "Side", "Terms", "compare", "make_side"]

_NOTICEABLE = 0.05


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """One side of a contrast.

    Attributes:
        run_id: the run behind it.
        nodes: how many nodes.
        workers_per_node: workers on each.
        world_size: workers in all.
        samples_per_s: nominal, of all workers, over the steady state.
        step_time_ms: of the slowest worker in each step.
        steady_steps: how many steps count.
    """

    run_id: str
    nodes: int
    workers_per_node: int
    world_size: int
    samples_per_s: float
    step_time_ms: Spread
    steady_steps: int


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """What is compared: see the attributes of the same names in `Contrast`."""

    mode: str
    why: str
    job: str
    rule: str


class Contrast(msgspec.Struct, frozen=True, kw_only=True):
    """One node against many.

    Attributes:
        schema: `multinode.contrast/1`.
        mode: `same-workers` (as many workers on both sides) or `scale-out` (every node full).
        why: why this mode.
        job: the job in a few words.
        baseline: one node.
        candidate: all nodes.
        speedup: samples/s of the candidate over the baseline's.
        efficiency: speed-up over the ratio of workers: 1 is a network that costs nothing.
        verdict: one plain sentence.
        rule: which steps count.
    """

    schema: str = "multinode.contrast/1"
    mode: str
    why: str
    job: str
    baseline: Side
    candidate: Side
    speedup: float
    efficiency: float
    verdict: str
    rule: str


def make_side(summary: Summary, *, nodes: int, workers_per_node: int) -> Side:
    """A side from its run's summary.

    Raises:
        UsageError: the run has no speed to compare.
    """
    if summary.samples_per_s is None or summary.step_time_ms is None:
        reason = summary.missing.get("samples_per_s", "it recorded no steady step")
        raise UsageError(
            f"run {summary.run_id} has no samples/s to compare: {reason}",
            hint="contrast a LLaMA-Factory job, or run more steps with --steps",
        )
    return Side(
        run_id=summary.run_id,
        nodes=nodes,
        workers_per_node=workers_per_node,
        world_size=nodes * workers_per_node,
        samples_per_s=summary.samples_per_s,
        step_time_ms=summary.step_time_ms,
        steady_steps=summary.steady_steps,
    )


def compare(baseline: Side, candidate: Side, terms: Terms) -> Contrast:
    """Contrast one node with many."""
    speedup = candidate.samples_per_s / baseline.samples_per_s
    efficiency = speedup / (candidate.world_size / baseline.world_size)
    return Contrast(
        mode=terms.mode,
        why=terms.why,
        job=terms.job,
        baseline=baseline,
        candidate=candidate,
        speedup=speedup,
        efficiency=efficiency,
        verdict=_verdict(baseline, candidate, speedup, efficiency),
        rule=terms.rule,
    )


def _verdict(baseline: Side, candidate: Side, speedup: float, efficiency: float) -> str:
    nodes = f"{candidate.nodes} nodes"
    if candidate.world_size == baseline.world_size:
        same = f"the same {baseline.world_size} workers"
        if abs(speedup - 1) <= _NOTICEABLE:
            return f"{nodes} are as fast as one with {same}: the network costs next to nothing here."
        if speedup > 1:
            return f"{nodes} are {speedup:.2f} times as fast as one with {same}."
        return f"One node is {1 / speedup:.2f} times as fast as {nodes} with {same}: the network costs the difference."
    if speedup <= 1 + _NOTICEABLE:
        return f"Do not use {nodes} for this job: they are no faster than one alone ({speedup:.2f} times its speed)."
    return f"{nodes} are {speedup:.2f} times as fast as one, {efficiency:.0%} of what their workers could give."
