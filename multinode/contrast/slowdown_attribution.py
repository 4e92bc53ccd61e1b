"""The cost of the candidate beyond ideal scaling, and its cause. Pure.

A synchronous step takes as long as its slowest node's, so a slow node is considered before the network.
"""

from __future__ import annotations

import msgspec

from multinode.contrast.figures import Side, SlowdownAttribution, channel, name_side, on_side
from multinode.findings.rule import Rule, RuleGroup
from multinode.profile.step_split import PARTS
from multinode.stats.estimate import Estimate, ratio
from multinode.stats.unknown import Unknown, or_none, or_zero, reason_of
from multinode.traffic.step_calls import Strategy
from multinode.units import format_ms

NOTICEABLE = 0.05
"""Fraction of a whole that a user would notice."""
_MS_PER_S = 1e3
# These communicate once per step, all others in every micro-batch.
_ONCE_PER_STEP = frozenset({Strategy.DDP, Strategy.ZERO1})
_SAME_WORK = ("same-workers", "scale-out")
_GROWING = ("compute_ms", "data_ms")
_GROWN = {part.name: part.words for part in PARTS} | {
    "compute_ms": "slower compute",
    "optimizer_ms": "a slower optimizer",
    "host_ms": "host time outside compute, communication, data and optimizer",
}


SLOWDOWNS = RuleGroup("Contrast: where the candidate loses time")
_NODE_ALONE = SLOWDOWNS.rule(
    "node-alone",
    about="a node that is slow alone",
    message="alone, {node} runs at {relative:.0%} of the speed of {fastest}, which adds {adds} to each step of "
    "{step}{network}",
)
_NODE_LATE = SLOWDOWNS.rule(
    "node-late",
    about="a node that the others wait for",
    message="the other nodes wait {adds} for {node} in each step of {step}{slower}{network}",
)
_NETWORK = SLOWDOWNS.rule(
    "network",
    about="exposed communication",
    message="exposed communication takes {takes} each step of {step}{late}",
)
_NETWORK_INFERRED = SLOWDOWNS.rule(
    "network-inferred",
    about="the network, if its cost can only be inferred from step times",
    message="{network} adds {adds} to each step of {step} (estimated from step times alone)",
)
_NO_LOSS = SLOWDOWNS.rule(
    "none",
    about="no slowdown",
    message="{outcome}: a step takes {step}, compared with {ideal_step} with {ideal}",
)
_NEITHER = SLOWDOWNS.rule(
    "neither",
    about="a slowdown that neither the network nor a slow node explains",
    message="a step takes {lost} longer than with {ideal}; neither communication nor a slow node explains this{grown}",
)
_UNKNOWN = SLOWDOWNS.rule(
    "unknown",
    about="a slowdown, if exposed communication is unknown",
    message="a step takes {lost} longer than with {ideal}; the share of exposed communication is unknown "
    "({reason}){advice}",
)


class CandidateLoss(msgspec.Struct, frozen=True, kw_only=True):
    """The inputs of the attribution."""

    baseline: Side  # the side with fewer nodes; `candidate` with more
    candidate: Side
    alone: tuple[Side, ...] = ()  # every node alone, including the baseline if it is one; empty if not requested
    mode: str  # as in Contrast


def is_noticeable(part_ms: float, whole_ms: float) -> bool:
    """Whether it is above a twentieth."""
    return part_ms > NOTICEABLE * whole_ms


def step_like(side: Side, case: CandidateLoss) -> Estimate:
    """The side's step in ms, scaled to the candidate's samples per worker."""
    grows = _growing_share(side)
    return side.step_time_ms * ((1 - grows) + work_ratio(side, case) * grows)


def work_ratio(side: Side, case: CandidateLoss) -> float:
    """Samples per worker and step on the candidate over those on the side."""
    candidate = case.candidate
    ours, theirs = or_none(side.global_batch), or_none(candidate.global_batch)
    if ours and theirs:
        return theirs / candidate.world_size / (ours / side.world_size)
    if case.mode in _SAME_WORK or side is candidate:
        return 1.0
    if case.mode == "fixed-global-batch":
        # Each node alone does the work of a baseline worker.
        return case.baseline.world_size / candidate.world_size
    return _samples_of_worker(candidate) / _samples_of_worker(side)


def _samples_of_worker(side: Side) -> float:
    return side.samples_per_s.value * side.step_time_ms.value / _MS_PER_S / side.world_size


def _growing_share(side: Side) -> float:
    split = or_none(side.split)
    if split is None or isinstance(split.compute_ms, Unknown):
        return 1.0
    growing_ms = split.compute_ms + or_zero(split.data_ms)
    if _exchanges_in_micro_batches(side):
        growing_ms += or_zero(split.exposed_ms) + or_zero(split.wait_ms)
    return min(1.0, max(0.0, growing_ms / split.step_ms))


def _exchanges_in_micro_batches(side: Side) -> bool:
    strategy = None if isinstance(side.settings, Unknown) else side.settings.strategy
    return strategy is not None and strategy not in _ONCE_PER_STEP


def exposed_ms(side: Side) -> float | None:
    """Exposed part of the median step, by the share of the split steps; 0 for one worker."""
    split = or_none(side.split)
    if split is None or isinstance(split.exposed_ms, Unknown):
        return 0.0 if side.world_size == 1 else None
    return split.exposed_ms / split.step_ms * side.step_time_ms.value


def network_ms_of(case: CandidateLoss, reference: Side) -> float | None:
    """Exposed communication of the candidate beyond the reference's, at least 0."""
    mine, own = exposed_ms(case.candidate), exposed_ms(reference)
    if mine is None or own is None:
        return None
    grows = work_ratio(reference, case) if _exchanges_in_micro_batches(reference) else 1.0
    return max(0.0, mine - own * grows)


def part_ms(side: Side, name: str, case: CandidateLoss) -> float | None:
    """A part of its median step, scaled to the candidate's samples per worker."""
    split = or_none(side.split)
    value: float | None = getattr(split, name, None)
    if split is None or value is None:
        return None
    grows = work_ratio(side, case) if name in _GROWING else 1.0
    return value / split.step_ms * side.step_time_ms.value * grows


def most_grown(case: CandidateLoss, reference: Side) -> tuple[str, float] | None:
    """The part of the step that grew most, in ms; None if none grew, or is known."""
    grown_ms = {
        name: now - before
        for name in _GROWN
        if name != "exposed_ms"
        and (now := part_ms(case.candidate, name, case)) is not None
        and (before := part_ms(reference, name, case)) is not None
    }
    most = max(grown_ms, key=lambda name: grown_ms[name], default=None)
    if most is None or not is_noticeable(grown_ms[most], case.candidate.step_time_ms.value):
        return None
    return most, grown_ms[most]


class _Loss(msgspec.Struct, frozen=True, kw_only=True):
    """Fields as in SlowdownAttribution."""

    ideal_ms: float
    node: str | None = None
    relative: float | None = None
    node_ms: float | None = None
    network_ms: float | None = None
    other_ms: float | None = None


class _Slowest(msgspec.Struct, frozen=True, kw_only=True):
    """The slowest node: its cost per candidate step, and its relative speed; or none."""

    node: str | None = None
    adds_ms: float = 0.0
    relative: float | None = None


def attribute_slowdown(case: CandidateLoss) -> SlowdownAttribution:
    """Attribute the candidate's step.

    The reference is the fastest node alone if each was measured, otherwise the baseline, scaled to the same samples per
    worker and step. If steps were not split and each node was measured alone, the network's part is the rest.
    """
    step_ms = case.candidate.step_time_ms.value
    reference = reference_of(case)
    ideal_ms = step_like(reference, case).value
    slowest = _slowest_alone(case, reference) if case.alone else _latest(case)
    if slowest is None:
        return _explained(_Loss(ideal_ms=ideal_ms, network_ms=network_ms_of(case, reference)), case)
    if not case.alone and slowest.node in reference.node_names:
        # The baseline's own node is the slow one: an equal node would have been that much faster.
        ideal_ms = max(0.0, ideal_ms - slowest.adds_ms)
    unexplained_ms = step_ms - ideal_ms - slowest.adds_ms
    network_ms = network_ms_of(case, reference)
    if network_ms is None and case.alone:
        network_ms = max(0.0, unexplained_ms)
    loss = _Loss(
        ideal_ms=ideal_ms,
        node=slowest.node,
        relative=slowest.relative,
        node_ms=slowest.adds_ms,
        network_ms=network_ms,
        other_ms=None if network_ms is None else unexplained_ms - network_ms,
    )
    return _explained(loss, case)


def reference_of(case: CandidateLoss) -> Side:
    """The reference of the candidate."""
    return min(case.alone or (case.baseline,), key=lambda side: step_like(side, case).value)


def _slowest_alone(case: CandidateLoss, fastest: Side) -> _Slowest:
    mine = [side for side in case.alone if set(side.node_names) <= set(case.candidate.node_names)]
    slowest = max(mine or case.alone, key=lambda side: step_like(side, case).value)
    slow, fast = step_like(slowest, case), step_like(fastest, case)
    if ratio(slow, fast).low <= 1:
        return _Slowest()
    node = slowest.node_names[0]
    seen = _latest(case)
    # With fewer workers, a node may be less slow than alone: then the actual wait counts.
    is_seen = seen is not None and seen.node == node and slowest.workers_per_node != case.candidate.workers_per_node
    adds_ms = seen.adds_ms if seen is not None and is_seen else slow.value - fast.value
    return _Slowest(node=node, adds_ms=adds_ms, relative=fast.value / slow.value)


def _latest(case: CandidateLoss) -> _Slowest | None:
    candidate, late_ms = case.candidate, or_none(case.candidate.late_ms)
    if late_ms is None:
        return None
    if not candidate.stragglers:
        return _Slowest()
    own_ms = candidate.step_time_ms.value - (exposed_ms(candidate) or 0.0)
    relative = 1 - late_ms / own_ms if own_ms > late_ms else None
    return _Slowest(node=candidate.stragglers[0], adds_ms=late_ms, relative=relative)


def _explained(loss: _Loss, case: CandidateLoss) -> SlowdownAttribution:
    cause = _cause(loss, case.candidate.step_time_ms.value)
    judge = {"node": _of_node, "network": _of_network, "none": _of_none}.get(cause, _of_unknown)
    rule, values = judge(loss, case, reference_of(case))
    values = {"step": format_ms(case.candidate.step_time_ms.value), **values}
    return SlowdownAttribution(**rule.fields(loss.node, values) | msgspec.structs.asdict(loss), cause=cause)


def _cause(loss: _Loss, step_ms: float) -> str:
    gap_ms = step_ms - loss.ideal_ms
    node_ms = loss.node_ms or 0.0
    # Upper bound of an unmeasured network's cost.
    network_ms = max(0.0, gap_ms - node_ms) if loss.network_ms is None else loss.network_ms
    if node_ms > network_ms and is_noticeable(node_ms, step_ms):
        return "node"
    if loss.network_ms is not None and is_noticeable(network_ms, step_ms):
        return "network"
    return "unknown" if is_noticeable(gap_ms, step_ms) else "none"


_Judged = tuple[Rule, dict[str, object]]


def _of_node(loss: _Loss, case: CandidateLoss, reference: Side) -> _Judged:
    network = f"; {channel(case.candidate)} adds {format_ms(loss.network_ms)}" if loss.network_ms is not None else ""
    values: dict[str, object] = {"adds": format_ms(loss.node_ms or 0.0), "network": network}
    if case.alone:
        return _NODE_ALONE, values | {"relative": loss.relative or 0, "fastest": reference.node_names[0]}
    slower = f"; {loss.node} runs at about {loss.relative:.0%} of their speed" if loss.relative is not None else ""
    return _NODE_LATE, values | {"slower": slower}


def _of_network(loss: _Loss, case: CandidateLoss, reference: Side) -> _Judged:
    adds = format_ms(loss.network_ms or 0.0)
    if network_ms_of(case, reference) is None:
        return _NETWORK_INFERRED, {"network": channel(case.candidate), "adds": adds}
    takes = f"{adds} more than {on_side(reference, case.mode)}, in" if exposed_ms(reference) else f"{adds} of"
    late = f"; slow node {loss.node} adds {format_ms(loss.node_ms)}" if loss.node and loss.node_ms else ""
    return _NETWORK, {"takes": takes, "late": late}


def _of_none(loss: _Loss, case: CandidateLoss, reference: Side) -> _Judged:
    gained_ms = loss.ideal_ms - case.candidate.step_time_ms.value
    outcome = "no slowdown" if is_noticeable(gained_ms, loss.ideal_ms) else "no noticeable slowdown"
    return _NO_LOSS, {"outcome": outcome, "ideal_step": format_ms(loss.ideal_ms), "ideal": _ideal(reference, case)}


def _of_unknown(loss: _Loss, case: CandidateLoss, reference: Side) -> _Judged:
    candidate = case.candidate
    lost = format_ms(candidate.step_time_ms.value - loss.ideal_ms)
    values: dict[str, object] = {"lost": lost, "ideal": _ideal(reference, case)}
    if loss.network_ms is not None and loss.node_ms is not None:
        return _NEITHER, values | {"grown": _grown(case, reference)}
    blind = next((side for side in (candidate, reference) if exposed_ms(side) is None), candidate)
    advice = "" if case.alone else "; --each-node distinguishes a slow node from a slow network"
    return _UNKNOWN, values | {"reason": reason_of(blind.exposed_ms), "advice": advice}


def _grown(case: CandidateLoss, reference: Side) -> str:
    cause = most_grown(case, reference)
    if cause is None:
        return ""
    name, grown_ms = cause
    late = f", {case.candidate.stragglers[0]} most" if name == "wait_ms" and case.candidate.stragglers else ""
    return f": {format_ms(grown_ms)} of it is {_GROWN[name]}{late}"


def _ideal(reference: Side, case: CandidateLoss) -> str:
    return "ideal scaling" if reference.nodes == 1 else f"the network of {name_side(reference, case.mode)}"
