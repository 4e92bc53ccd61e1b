"""give_verdict: a contrast in one plain sentence, and up to three lines of reasons with figures. Pure.

Why the candidate loses what it loses is `slowdown_attribution`'.
"""

from __future__ import annotations

from multinode.analyse.comparison.contrast_figures import (
    Contrast,
    NodeSpeed,
    Side,
    capitalised,
    figure,
    milliseconds,
    name_nodes,
    name_role,
)
from multinode.analyse.comparison.slowdown_attribution import NOTICEABLE, is_noticeable
from multinode.analyse.stats.estimate import Estimate, inverse
from multinode.units import format_count, format_rate, goodput_gb_per_s

__all__ = ["give_reasons", "give_verdict"]

_BITS_PER_BYTE = 8
_BYTES_PER_MB, _BYTES_PER_GB = 1e6, 1e9
_MS_PER_S = 1e3
_MOST_BYTES = 1e18
# What a card can say of its speed and be believed.
_SLOWEST_LINK, _FASTEST_LINK = 1e-6, 1e6
_MOST_NODES = 8
_PARTS = {
    "compute_ms": "computing",
    "exposed_ms": "communication that nothing hides",
    "wait_ms": "waiting for slower workers",
    "data_ms": "waiting for batches",
    "optimizer_ms": "the optimizer",
    "host_ms": "the rest",
}


def give_verdict(contrast: Contrast) -> str:
    """Whether the candidate is worth it, and what costs the difference, in one sentence.

    Args:
        contrast: with everything but its verdict.
    """
    strangers = next((side for side in (contrast.candidate, contrast.baseline) if _train_alone(side)), None)
    if strangers is not None:
        return (
            f"The {strangers.world_size} workers of {name_role(strangers)} train alone, each its own model: "
            "what they do not exchange tells nothing about the network."
        )
    if contrast.mode == "compare":
        return _of_two_runs(contrast)
    if contrast.candidate.world_size == contrast.baseline.world_size:
        return _of_same_workers(contrast)
    return _of_more_workers(contrast)


def _train_alone(side: Side) -> bool:
    return side.bottleneck.kind == "no_communication" and side.world_size > 1


def _of_same_workers(contrast: Contrast) -> str:
    many, few = name_nodes(contrast.candidate), name_nodes(contrast.baseline)
    same, speedup = f"the same {contrast.baseline.world_size} workers", contrast.speedup.value
    if _cannot_tell(contrast):
        return f"Whether {many} are as fast as {few} with {same} cannot be told: {_spread(contrast)}"
    if abs(speedup - 1) <= NOTICEABLE:
        free = ": the network costs next to nothing here" if contrast.loss.cause == "none" else ""
        return f"{capitalised(many)} are as fast as {few} with {same}{free}."
    if speedup > 1:
        return f"{capitalised(many)} are {_times(contrast.speedup)} as fast as {few} with {same}."
    verb, slower = "is" if contrast.baseline.nodes == 1 else "are", _times(inverse(contrast.speedup))
    return f"{capitalised(few)} {verb} {slower} as fast as {many} with {same}: {_culprit(contrast)}."


def _of_more_workers(contrast: Contrast) -> str:
    many, few = name_nodes(contrast.candidate), name_nodes(contrast.baseline)
    speedup, alone = contrast.speedup.value, " alone" if contrast.baseline.nodes == 1 else ""
    if _cannot_tell(contrast):
        return f"Whether {many} are faster than {few} cannot be told: {_spread(contrast)}"
    if speedup <= 1 + NOTICEABLE:
        slower = f"they are no faster than {few}{alone}, at {_times(contrast.speedup)} its speed"
        return f"Do not use {many} for this job: {slower}; {_culprit(contrast)}."
    said = f"{capitalised(many)} are {_times(contrast.speedup)} as fast as {few}, "
    said += f"{contrast.efficiency:.0%} of what their workers could give"
    lost = contrast.efficiency < 1 - NOTICEABLE and contrast.loss.cause in {"node", "network"}
    return f"{said}: {_culprit(contrast)}." if lost else f"{said}."


def _of_two_runs(contrast: Contrast) -> str:
    """Two stored runs may have any number of nodes: each is called by its id, and nothing is advised."""
    baseline, candidate, speedup = contrast.baseline, contrast.candidate, contrast.speedup.value
    first, last = _name_run(baseline), _name_run(candidate)
    if _cannot_tell(contrast):
        return f"Whether {last} is faster than {first} cannot be told: {_spread(contrast)}"
    if abs(speedup - 1) <= NOTICEABLE:
        return f"{capitalised(last)} is as fast as {first}."
    if speedup < 1:
        return f"{capitalised(first)} is {_times(inverse(contrast.speedup))} as fast as {last}: {_culprit(contrast)}."
    return f"{capitalised(last)} is {_times(contrast.speedup)} as fast as {first}."


def _name_run(side: Side) -> str:
    workers = format_count(side.world_size, "worker")
    return f"run {side.run_ids[-1]} ({name_nodes(side)}, {workers})"


def _times(speedup: Estimate) -> str:
    """`6.66 times (6.1 to 7.3)`: the figure and its confidence interval."""
    return f"{figure(speedup.value)} times ({figure(speedup.low)} to {figure(speedup.high)})"


def _cannot_tell(contrast: Contrast) -> bool:
    """Whether the interval reaches from slower to faster, and wider than anybody would call equal."""
    low, high = contrast.speedup.low, contrast.speedup.high
    return low <= 1 <= high and (low < 1 - NOTICEABLE or high > 1 + NOTICEABLE)


def _spread(contrast: Contrast) -> str:
    speedup = contrast.speedup
    return (
        f"{figure(speedup.value)} times its speed, 95 % confidence interval {figure(speedup.low)} to "
        f"{figure(speedup.high)}; more --repeats or --steps would tell."
    )


def _culprit(contrast: Contrast) -> str:
    """What costs the difference, in half a sentence."""
    loss, step = contrast.loss, milliseconds(contrast.candidate.step_time_ms.value)
    if loss.cause == "network":
        return f"the network costs {milliseconds(loss.network_ms or 0.0)} of a step of {step}"
    if loss.cause == "node":
        rate = f" at {loss.relative:.0%} of the others' speed" if loss.relative is not None else ""
        costs = f"{milliseconds(loss.node_ms or 0.0)} of a step of {step}"
        return f"the node, not the network, is the cause: {loss.node}{rate} costs {costs}"
    if (
        loss.cause == "none"
        and contrast.scaling != "strong"
        and contrast.candidate.world_size < contrast.baseline.world_size
    ):
        return "it has fewer workers"
    if loss.cause == "none":
        return "what a step does but once, however many workers share its samples, is what costs"
    return "what costs the difference is not known"


def give_reasons(contrast: Contrast) -> tuple[str, ...]:
    """Where the step goes, what passes the network, and what the nodes do without it; as far as each is known."""
    found = (_where_it_goes(contrast), _what_passes(contrast), _without_network(contrast))
    return tuple(dict.fromkeys(reason for reason in found if reason))


def _where_it_goes(contrast: Contrast) -> str:
    candidate, baseline = contrast.candidate, contrast.baseline
    parts = _told_parts(candidate)
    if not parts:
        return f"{capitalised(contrast.loss.sentence)}."
    theirs = _told_parts(baseline)
    against = f"; on {name_role(baseline)} {milliseconds(baseline.step_time_ms.value)}{f': {theirs}' if theirs else ''}"
    return f"A step of {name_role(candidate)} takes {milliseconds(candidate.step_time_ms.value)}: {parts}{against}."


def _told_parts(side: Side) -> str:
    """The parts that anybody would notice, the largest first; empty where the steps were not split."""
    split = side.split
    if split is None:
        return ""
    shares = {
        words: part / split.step_ms for name, words in _PARTS.items() if (part := getattr(split, name)) is not None
    }
    noticed = [words for words in sorted(shares, key=lambda words: -shares[words]) if is_noticeable(shares[words], 1.0)]
    return ", ".join(f"{shares[words]:.0%} {words}" for words in noticed)


def _what_passes(contrast: Contrast) -> str:
    """Bytes through the busiest node's card, the rate that makes over the whole step, and of what link."""
    candidate = contrast.candidate
    seen = candidate.bytes_per_step
    counted = next((size for size in (seen.card, seen.expected) if size is not None), None)
    if counted is None or candidate.nodes == 1 or not 0 < counted <= _MOST_BYTES:
        return ""
    gbit_per_s = counted * _BITS_PER_BYTE / _BYTES_PER_GB / (candidate.step_time_ms.value / _MS_PER_S)
    by_rule = "" if seen.card is not None else " by the backend's algorithms"
    said = f"{figure(counted / _BYTES_PER_MB)} MB a step pass the busiest node's card one way{by_rule}"
    said += f": {format_rate(gbit_per_s)} in the mean"
    link = candidate.link_gbit_per_s
    if link is None or not _SLOWEST_LINK <= link <= _FASTEST_LINK:
        return f"{said}."
    most = goodput_gb_per_s(link) * _BITS_PER_BYTE / link
    return f"{said}, {gbit_per_s / link:.0%} of its {format_rate(link)}; with usual frames TCP gets at most {most:.0%}."


def _without_network(contrast: Contrast) -> str:
    if contrast.each_node:
        nodes = sorted(contrast.each_node, key=lambda node: -node.samples_per_s.value)
        told = ", ".join(_told_node(node) for node in nodes[:_MOST_NODES])
        more = f" and {len(nodes) - _MOST_NODES} more, the slowest at {nodes[-1].relative:.0%}"
        return f"Alone: {told}{more if len(nodes) > _MOST_NODES else ''}."
    ours, theirs = _computing_ms(contrast.baseline), _computing_ms(contrast.candidate)
    if contrast.loss.cause != "network" or ours is None or theirs is None:
        return f"{capitalised(contrast.loss.sentence)}."
    left = milliseconds(contrast.candidate.step_time_ms.value - (contrast.loss.network_ms or 0.0))
    on_both = f"{milliseconds(theirs)} on {name_role(contrast.candidate)}, {milliseconds(ours)} on "
    on_both += name_role(contrast.baseline)
    return f"Of a step, computing takes {on_both}: without what the network costs, a step would take about {left}."


def _computing_ms(side: Side) -> float | None:
    return side.split.compute_ms if side.split is not None else None


def _told_node(node: NodeSpeed) -> str:
    return f"{node.node} {figure(node.samples_per_s.value)} samples/s ({node.relative:.0%})"
