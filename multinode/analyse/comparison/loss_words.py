"""say_...: why the candidate loses what it loses, a sentence for each cause: `slowdown_attribution` finds it."""

from __future__ import annotations

from multinode.analyse.comparison.comparable_steps import (
    NOTICEABLE,
    Case,
    exposed_ms,
    is_noticeable,
    network_ms_of,
    part_ms,
)
from multinode.analyse.comparison.contrast_figures import Side, SlowdownAttribution
from multinode.analyse.comparison.contrast_words import milliseconds, name_role

__all__ = ["say_network", "say_node", "say_none", "say_unknown"]

_WORDS = {
    "compute_ms": "slower computing",
    "wait_ms": "waiting for slower workers",
    "data_ms": "waiting for batches",
    "optimizer_ms": "a slower optimizer",
    "host_ms": "outside of computing, communication, data and optimizer",
}


def say_node(loss: SlowdownAttribution, case: Case, reference: Side) -> str:
    """That the slowest node costs most of it, by how much, and how slow it is."""
    step, adds = milliseconds(case.candidate.step_time_ms.value), milliseconds(loss.node_ms or 0.0)
    if case.alone:
        said = f"alone, {loss.node} runs at {loss.relative or 0:.0%} of the speed of {reference.node_names[0]}"
        said += f", which adds {adds} to a step of {step}"
    else:
        said = f"the other nodes wait {adds} of a step of {step} for {loss.node}"
        said += f", which runs at about {loss.relative:.0%} of their speed" if loss.relative is not None else ""
    return said + (f"; the network adds {milliseconds(loss.network_ms)}" if loss.network_ms is not None else "")


def say_network(loss: SlowdownAttribution, case: Case, reference: Side) -> str:
    """That the network costs most of it, how much, and whether that was timed or inferred."""
    step, adds = milliseconds(case.candidate.step_time_ms.value), milliseconds(loss.network_ms or 0.0)
    if network_ms_of(case, reference) is None:
        return f"the network adds {adds} to a step of {step}, inferred from the times of the steps alone"
    beyond = f" beyond that of {name_role(reference)}" if exposed_ms(reference) else ""
    said = f"of a step of {step}, {adds} are communication that nothing hides{beyond}"
    return said + (f"; the slower {loss.node} adds {milliseconds(loss.node_ms)}" if loss.node and loss.node_ms else "")


def say_none(loss: SlowdownAttribution, case: Case, reference: Side) -> str:
    """That there is nothing to speak of."""
    step, ideal = milliseconds(case.candidate.step_time_ms.value), milliseconds(loss.ideal_ms or 0.0)
    is_faster = case.candidate.step_time_ms.value < (1 - NOTICEABLE) * (loss.ideal_ms or 0.0)
    found = "nothing is lost" if is_faster else "no loss to speak of"
    return f"a step takes {step}, and {ideal} with {_ideal(reference)}: {found}"


def say_unknown(loss: SlowdownAttribution, case: Case, reference: Side) -> str:
    """What is lost, and why its cause cannot be told; or what neither the network nor a node explains."""
    candidate = case.candidate
    lost_ms = candidate.step_time_ms.value - (loss.ideal_ms or 0.0)
    lost = f"a step takes {milliseconds(lost_ms)} more than with {_ideal(reference)}"
    if loss.network_ms is not None and loss.node_ms is not None:
        grown = _most_grown(case, reference)
        return f"{lost}, which neither communication nor a slow node explains{f': {grown}' if grown else ''}"
    blind = next((side for side in (candidate, reference) if exposed_ms(side) is None), candidate)
    reason = blind.missing.get("exposed_ms", "it was not timed")
    advice = "" if case.alone else "; --each-node tells a slow node from a slow network"
    return f"{lost}; how much of that is communication is not known: {reason}{advice}"


def _ideal(reference: Side) -> str:
    return "a free network and equal nodes" if reference.nodes == 1 else f"the network of {name_role(reference)}"


def _most_grown(case: Case, reference: Side) -> str:
    """The part of the step that grew most, in words; empty where none did, or it is not known."""
    grown_ms = {
        name: now - before
        for name in _WORDS
        if (now := part_ms(case.candidate, name, case)) is not None
        and (before := part_ms(reference, name, case)) is not None
    }
    most = max(grown_ms, key=lambda name: grown_ms[name], default=None)
    if most is None or not is_noticeable(grown_ms[most], case.candidate.step_time_ms.value):
        return ""
    late = f", {case.candidate.stragglers[0]} most" if most == "wait_ms" and case.candidate.stragglers else ""
    return f"{milliseconds(grown_ms[most])} of it are {_WORDS[most]}{late}"
