"""compare: the sides of a contrast -> Contrast: how much faster many nodes are than few, and why. Pure.

Sides are made by `contrast_side`, causes found by `slowdown_attribution`; the words are `report`'s.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from multinode.contrast.cost import with_full_run
from multinode.contrast.figures import Contrast, CurvePoint, NodeSpeed, Side
from multinode.contrast.slowdown_attribution import Case, attribute_slowdown, sides_alone
from multinode.errors import UsageError
from multinode.stats.estimate import ratio

_SCALING = {"same-workers": "same workers", "scale-out": "weak", "fixed-global-batch": "strong"}


def compare(sides: Sequence[Side], *, mode: str, why: str, job: str, rule: str) -> Contrast:
    """Contrast the candidate with the baseline; further sides make a curve, and tell slow nodes from slow networks.

    Args:
        sides: each with its role; one is the baseline and one the candidate.
        mode: as Contrast has it; likewise `why`, `job` and `rule`.
        why: of the mode.
        job: in a few words.
        rule: which steps are measured.

    Raises:
        UsageError: there is no baseline, or no candidate.
    """
    sides = with_full_run(sides, _of_role(sides, "candidate"))
    baseline, candidate = _of_role(sides, "baseline"), _of_role(sides, "candidate")
    alone = sides_alone(sides, baseline)
    speedup = ratio(candidate.samples_per_s, baseline.samples_per_s)
    return Contrast(
        mode=mode,
        why=why,
        job=job,
        baseline=baseline,
        candidate=candidate,
        others=tuple(side for side in sides if side is not baseline and side is not candidate),
        speedup=speedup,
        efficiency=speedup.value / (candidate.world_size / baseline.world_size),
        scaling=_SCALING.get(mode) or _scaling(baseline, candidate),
        curve=_curve(sides),
        each_node=_each_node(alone),
        loss=attribute_slowdown(Case(baseline=baseline, candidate=candidate, alone=alone, mode=mode)),
        rule=rule,
    )


def _of_role(sides: Sequence[Side], role: str) -> Side:
    found = next((side for side in sides if side.role == role), None)
    if found is None:
        raise UsageError(f"there is no {role} to compare", hint="a contrast has a baseline and a candidate")
    return found


def _scaling(baseline: Side, candidate: Side) -> str:
    """Of two stored runs: by their workers, else by what is the same in a step: the samples of all, or of each."""
    if baseline.world_size == candidate.world_size:
        return "same workers"
    return "strong" if baseline.global_batch == candidate.global_batch is not None else "weak"


def _curve(sides: Sequence[Side]) -> tuple[CurvePoint, ...]:
    if all(side.role != "point" for side in sides):
        return ()
    ordered = sorted((side for side in sides if side.role != "each-node"), key=lambda side: side.nodes)
    return tuple(_point(side, ordered[0]) for side in ordered)


def _point(side: Side, fewest: Side) -> CurvePoint:
    speedup = ratio(side.samples_per_s, fewest.samples_per_s)
    if side is fewest:
        # Over itself it is 1, however much its repeats scatter.
        speedup = msgspec.structs.replace(speedup, low=1.0, high=1.0)
    return CurvePoint(
        nodes=side.nodes,
        world_size=side.world_size,
        samples_per_s=side.samples_per_s,
        speedup=speedup,
        efficiency=speedup.value / (side.world_size / fewest.world_size),
    )


def _each_node(alone: Sequence[Side]) -> tuple[NodeSpeed, ...]:
    fastest = max((side.samples_per_s.value for side in alone), default=1.0)
    return tuple(
        NodeSpeed(
            node=side.node_names[0],
            samples_per_s=side.samples_per_s,
            step_time_ms=side.step_time_ms,
            relative=side.samples_per_s.value / fastest,
        )
        for side in alone
    )
