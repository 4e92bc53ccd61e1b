"""attribute_slowdown: what a step of the candidate costs beyond that with a free network and equal nodes. Pure.

A synchronous step takes as long as its slowest node's, so a slow node is looked for before the network is blamed.
"""

from __future__ import annotations

import msgspec

from multinode.analyse.comparison.comparable_steps import Case, exposed_ms, is_noticeable, network_ms_of, step_like
from multinode.analyse.comparison.contrast_figures import Side, SlowdownAttribution
from multinode.analyse.comparison.loss_words import say_network, say_node, say_none, say_unknown

__all__ = ["attribute_slowdown"]


class _Slowest(msgspec.Struct, frozen=True, kw_only=True):
    """The node that the others wait for: what it adds to the candidate's step, and its speed, of theirs; or none."""

    node: str | None = None
    adds_ms: float = 0.0
    relative: float | None = None


def attribute_slowdown(case: Case) -> SlowdownAttribution:
    """The candidate's step, taken apart.

    It is held against the fastest node alone where each was measured, else against the baseline, as if that had as
    many samples a worker and step. Where the steps were not split and each node was measured alone, the network's part
    is what the nodes leave unexplained.
    """
    step_ms = case.candidate.step_time_ms.value
    reference = min(case.alone or (case.baseline,), key=lambda side: step_like(side, case).value)
    ideal_ms = step_like(reference, case).value
    slowest = _slowest_alone(case, reference) if case.alone else _latest(case)
    if slowest is None:
        return _concluded(
            SlowdownAttribution(ideal_ms=ideal_ms, network_ms=network_ms_of(case, reference)), case, reference
        )
    if not case.alone and slowest.node in reference.node_names:
        # The baseline's own node is the late one: an equal node would have taken that much less.
        ideal_ms = max(0.0, ideal_ms - slowest.adds_ms)
    unexplained_ms = step_ms - ideal_ms - slowest.adds_ms
    network_ms = network_ms_of(case, reference)
    if network_ms is None and case.alone:
        network_ms = max(0.0, unexplained_ms)
    loss = SlowdownAttribution(
        ideal_ms=ideal_ms,
        node=slowest.node,
        relative=slowest.relative,
        node_ms=slowest.adds_ms,
        network_ms=network_ms,
        other_ms=None if network_ms is None else unexplained_ms - network_ms,
    )
    return _concluded(loss, case, reference)


def _slowest_alone(case: Case, fastest: Side) -> _Slowest:
    """The candidate's slowest node by what each does alone; none where its spread reaches the fastest's."""
    mine = [side for side in case.alone if set(side.node_names) <= set(case.candidate.node_names)]
    slowest = max(mine or case.alone, key=lambda side: step_like(side, case).value)
    slow, fast = step_like(slowest, case), step_like(fastest, case)
    if slow.low <= fast.high:
        return _Slowest()
    node = slowest.node_names[0]
    seen = _latest(case)
    # With fewer workers on it, a node may be less slow than it was alone: then what the others waited for it counts.
    is_seen = seen is not None and seen.node == node and slowest.workers_per_node != case.candidate.workers_per_node
    adds_ms = seen.adds_ms if seen is not None and is_seen else slow.value - fast.value
    return _Slowest(node=node, adds_ms=adds_ms, relative=fast.value / slow.value)


def _latest(case: Case) -> _Slowest | None:
    """The node that the candidate's others waited for; None where nobody timed what they wait."""
    candidate = case.candidate
    if candidate.late_ms is None:
        return None
    if not candidate.stragglers:
        return _Slowest()
    own_ms = candidate.step_time_ms.value - (exposed_ms(candidate) or 0.0)
    relative = 1 - candidate.late_ms / own_ms if own_ms > candidate.late_ms else None
    return _Slowest(node=candidate.stragglers[0], adds_ms=candidate.late_ms, relative=relative)


def _concluded(loss: SlowdownAttribution, case: Case, reference: Side) -> SlowdownAttribution:
    """With its cause, and that in words."""
    cause = _cause(loss, case.candidate.step_time_ms.value)
    say = {"node": say_node, "network": say_network, "none": say_none, "unknown": say_unknown}[cause]
    return msgspec.structs.replace(loss, cause=cause, sentence=say(loss, case, reference))


def _cause(loss: SlowdownAttribution, step_ms: float) -> str:
    gap_ms = step_ms - (loss.ideal_ms or 0.0)
    node_ms = loss.node_ms or 0.0
    # What a network that nobody timed costs at most.
    network_ms = max(0.0, gap_ms - node_ms) if loss.network_ms is None else loss.network_ms
    if node_ms > network_ms and is_noticeable(node_ms, step_ms):
        return "node"
    if loss.network_ms is not None and is_noticeable(network_ms, step_ms):
        return "network"
    return "unknown" if is_noticeable(gap_ms, step_ms) else "none"
