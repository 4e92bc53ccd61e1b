"""A contrast in words: its verdict in one sentence, what it loses and why, and the reasons with their figures.

`with_words` fills a contrast's text fields, once, where it is made; whatever shows it takes them from there.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from multinode.contrast.comparability import Difference, find_differences
from multinode.contrast.figures import Contrast, NodeSpeed, Side, SlowdownAttribution
from multinode.contrast.judge import Outcome, judge, unsynchronised_side
from multinode.contrast.slowdown_attribution import (
    Case,
    case_of,
    exposed_ms,
    is_noticeable,
    most_grown,
    network_ms_of,
    reference_of,
)
from multinode.render.sheet import range_of_times, times
from multinode.stats.estimate import Estimate, inverse
from multinode.units import format_count, format_list, format_rate, goodput_gb_per_s

_THREE_DIGITS = 100


def figure(value: float) -> str:
    """Three digits that count, above the point all of them: `1342`, `24.1`, `0.512`."""
    return f"{value:.0f}" if abs(value) >= _THREE_DIGITS else f"{value:.3g}"


def milliseconds(time_ms: float) -> str:
    """`1342 ms`, `4.2 ms`."""
    return f"{figure(time_ms)} ms"


def name_nodes(side: Side) -> str:
    """`1 node`, `2 nodes`; of one node alone its name."""
    if side.role == "each-node" and side.node_names:
        return side.node_names[0]
    return format_count(side.nodes, "node")


def name_side(side: Side, mode: str) -> str:
    """A side within a sentence: `2 nodes`, `n2 alone`; of two stored runs `run 20260104-ab`.

    Args:
        side: of a contrast.
        mode: of the contrast.
    """
    if mode == "compare":
        return f"run {side.run_ids[-1]}"
    return f"{name_nodes(side)} alone" if side.role == "each-node" else name_nodes(side)


def capitalised(sentence: str) -> str:
    """With a capital first letter; the rest as it is, names of nodes too."""
    return sentence[:1].upper() + sentence[1:]


# Settings that are not called by the name of their field.
_NAMES = {
    "lora_rank": "LoRA rank",
    "per_device_batch": "per-device batch",
    "accumulation": "gradient accumulation",
    "recompute": "gradient checkpointing",
    "overlap": "overlap of communication",
    "grad_compress": "gradient compression",
    "averaging": "averaging between nodes",
}
_LEVERS, _NONE = frozenset({"averaging", "grad_compress"}), "none"
_LONGEST = 60


def difference_words(found: Difference, baseline: Side, mode: str) -> str:
    """What differs from the baseline in a contrast of this mode, in one sentence."""
    mine, theirs = name_side(baseline, mode), name_side(found.side, mode)
    if found.kind == "no_settings":
        unknown = " and ".join(name_side(side, mode) for side in (baseline, found.side) if side.settings is None)
        return capitalised(f"{unknown} did not keep the settings: whether they are the same is unknown.")
    if found.kind in {"global_batch", "unequal_batch"}:
        return _batch(found, mine, theirs)
    if found.kind == "link":
        name, ours, other = "link", *(format_rate(one) for one in (found.baseline, found.candidate))
    else:
        name = _NAMES.get(found.name, found.name.replace("_", " ")) if found.kind == "setting" else _written(found.name)
        # Both are left out where there is none.
        values = [_NONE if one is None and found.name in _LEVERS else one for one in (found.baseline, found.candidate)]
        ours, other = map(_written, values)
    said = f"{name} differs: {ours} on {mine}, {other} on {theirs}."
    return said if found.kind == "version" else capitalised(said)


def _batch(found: Difference, mine: str, theirs: str) -> str:
    said = f"Global batch differs: {found.baseline} on {mine}, {found.candidate} on {theirs}"
    if found.kind == "unequal_batch":
        return f"{said}, though both were to train as many."
    times = figure(found.candidate / found.baseline)
    return f"{said}: 1/{times} of the optimizer steps per epoch; learning rate and warm-up may have to change."


def _written(value: object) -> str:
    """As a person would write it, in one line."""
    if value is None:
        return "unknown"
    if isinstance(value, bool):
        return "on" if value else "off"
    text = "".join(letter if letter.isprintable() else " " for letter in str(value))
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


_BITS_PER_BYTE = 8
_BYTES_PER_MB, _BYTES_PER_GB = 1e6, 1e9
_MS_PER_S = 1e3
_MOST_BYTES = 1e18
# What a NIC can say of its speed and be believed.
_SLOWEST_LINK, _FASTEST_LINK = 1e-6, 1e6
_MOST_NODES = 8
_PARTS = {
    "compute_ms": "compute",
    "exposed_ms": "exposed communication",
    "wait_ms": "waiting for slower workers",
    "data_ms": "waiting for data",
    "optimizer_ms": "optimizer",
    "host_ms": "other host time",
}
_GROWN = _PARTS | {
    "compute_ms": "slower compute",
    "optimizer_ms": "a slower optimizer",
    "host_ms": "host time outside compute, communication, data and optimizer",
}


def with_words(contrast: Contrast) -> Contrast:
    """The contrast with its verdict, reasons, differences, what disturbed it, and the sentence of its loss."""
    baseline = contrast.baseline
    differences = [
        difference_words(one, baseline, contrast.mode)
        for side in (contrast.candidate, *contrast.others)
        for one in find_differences(baseline, side, contrast.mode)
    ]
    loss = msgspec.structs.replace(contrast.loss, sentence=_loss(contrast.loss, case_of(contrast)))
    contrast = msgspec.structs.replace(contrast, loss=loss, differences=tuple(dict.fromkeys(differences)))
    return msgspec.structs.replace(contrast, verdict=_verdict(contrast), reasons=_reasons(contrast))


def _verdict(contrast: Contrast) -> str:
    """Which is faster, by how much, and what costs the difference, in one sentence."""
    outcome = judge(contrast)
    if outcome == "unsynchronised":
        stranger = unsynchronised_side(contrast) or contrast.candidate
        workers = f"the {stranger.world_size} workers on {name_side(stranger, contrast.mode)}"
        return (
            f"No gradient synchronisation detected: {workers} each train a model of their own, "
            "which says nothing about the network."
        )
    if contrast.mode == "compare":
        # Two stored runs may have any number of nodes: each is called by its id, and nothing is advised.
        many, few, are = _name_run(contrast.candidate), _name_run(contrast.baseline), "is"
    else:
        many, few, are = name_nodes(contrast.candidate), name_nodes(contrast.baseline), "are"
        if contrast.candidate.world_size == contrast.baseline.world_size:
            few += f" with the same {format_count(contrast.baseline.world_size, 'worker')}"
        elif outcome in {"equal", "slower"}:
            slower = "no faster" if outcome == "equal" else _slower(contrast)
            return f"Do not use {many} for this job: they are {slower} than {few}; {_culprit(contrast)}."
    if outcome == "inconclusive":
        spread = f"within noise (speed-up {range_of_times(contrast.speedup)})"
        return f"Inconclusive: {many} against {few} is {spread}; measure with more --repeats or --steps."
    return f"{capitalised(many)} {are} {_relation(contrast, outcome, few)}"


def _relation(contrast: Contrast, outcome: Outcome, few: str) -> str:
    """What the candidate is beside the baseline, which is called `few`."""
    is_same = contrast.mode != "compare" and contrast.candidate.world_size == contrast.baseline.world_size
    if outcome == "equal":
        return f"as fast as {few}{': no network bottleneck' if is_same and contrast.loss.cause == 'none' else ''}."
    if outcome == "slower":
        return f"{_slower(contrast)} than {few}: {_culprit(contrast)}."
    said = f"{times(contrast.speedup.value)} faster{_range(contrast.speedup)} than {few}"
    if contrast.mode == "compare" or is_same:
        return f"{said}."
    is_lost = is_noticeable(1 - contrast.efficiency, 1.0) and contrast.loss.cause in {"node", "network"}
    return f"{said} ({contrast.efficiency:.0%} scaling efficiency){f': {_culprit(contrast)}' if is_lost else ''}."


def _slower(contrast: Contrast) -> str:
    slower = inverse(contrast.speedup)
    return f"{times(slower.value)} slower{_range(slower)}"


def _range(measured: Estimate) -> str:
    return f" ({range_of_times(measured)})" if measured.high > measured.low else ""


def prefers_one_node(contrast: Contrast) -> bool:
    """Whether several nodes were measured to be slower than one, or no faster with more workers."""
    if contrast.mode == "compare" or contrast.baseline.nodes != 1:
        return False
    outcome, has_more = judge(contrast), contrast.candidate.world_size > contrast.baseline.world_size
    return outcome == "slower" or (outcome == "equal" and has_more)


def _name_run(side: Side) -> str:
    return f"run {side.run_ids[-1]} ({name_nodes(side)}, {format_count(side.world_size, 'worker')})"


def _culprit(contrast: Contrast) -> str:
    """What costs the difference, in half a sentence."""
    loss = contrast.loss
    if loss.cause == "network":
        return "the network is the bottleneck"
    if loss.cause == "node":
        rate = f" (at {loss.relative:.0%} of the others' speed)" if loss.relative is not None else ""
        return f"{loss.node}{rate} is the bottleneck, not the network"
    if loss.cause == "none" and contrast.scaling != "strong" and _has_fewer_workers(contrast):
        return "it has fewer workers"
    if loss.cause == "none":
        return "costs per step that more workers do not share are the bottleneck"
    return "the cause is unknown"


def _has_fewer_workers(contrast: Contrast) -> bool:
    return contrast.candidate.world_size < contrast.baseline.world_size


def _loss(loss: SlowdownAttribution, case: Case) -> str:
    """What a step costs beyond ideal scaling, and why, in one sentence without its full stop."""
    words = {"node": _of_node, "network": _of_network, "none": _of_none, "unknown": _of_unknown}
    return words[loss.cause](loss, case, reference_of(case))


def _of_node(loss: SlowdownAttribution, case: Case, reference: Side) -> str:
    step, adds = milliseconds(case.candidate.step_time_ms.value), milliseconds(loss.node_ms or 0.0)
    if case.alone:
        said = f"alone, {loss.node} runs at {loss.relative or 0:.0%} of the speed of {reference.node_names[0]}"
        said += f", which adds {adds} to each step of {step}"
    else:
        said = f"the other nodes wait {adds} per step of {step} for {loss.node}"
        said += f", which runs at about {loss.relative:.0%} of their speed" if loss.relative is not None else ""
    return said + (f"; the network adds {milliseconds(loss.network_ms)}" if loss.network_ms is not None else "")


def _of_network(loss: SlowdownAttribution, case: Case, reference: Side) -> str:
    step, adds = milliseconds(case.candidate.step_time_ms.value), milliseconds(loss.network_ms or 0.0)
    if network_ms_of(case, reference) is None:
        return f"the network adds {adds} to each step of {step}, inferred from the step times alone"
    beyond = f" beyond that of {name_side(reference, case.mode)}" if exposed_ms(reference) else ""
    said = f"exposed communication is {adds} of each step of {step}{beyond}"
    return said + (f"; slow node {loss.node} adds {milliseconds(loss.node_ms)}" if loss.node and loss.node_ms else "")


def _of_none(loss: SlowdownAttribution, case: Case, reference: Side) -> str:
    step_ms, ideal_ms = case.candidate.step_time_ms.value, loss.ideal_ms or 0.0
    found = "nothing is lost" if is_noticeable(ideal_ms - step_ms, ideal_ms) else "no noticeable loss"
    return f"{found}: a step takes {milliseconds(step_ms)}, and {milliseconds(ideal_ms)} with {_ideal(reference, case)}"


def _of_unknown(loss: SlowdownAttribution, case: Case, reference: Side) -> str:
    candidate = case.candidate
    lost_ms = candidate.step_time_ms.value - (loss.ideal_ms or 0.0)
    lost = f"a step takes {milliseconds(lost_ms)} more than with {_ideal(reference, case)}"
    if loss.network_ms is not None and loss.node_ms is not None:
        return f"{lost}, which neither communication nor a slow node explains{_grown(case, reference)}"
    blind = next((side for side in (candidate, reference) if exposed_ms(side) is None), candidate)
    reason = blind.missing.get("exposed_ms", "it was not timed")
    advice = "" if case.alone else "; --each-node tells a slow node from a slow network"
    return f"{lost}; how much of that is exposed communication is unknown: {reason}{advice}"


def _grown(case: Case, reference: Side) -> str:
    found = most_grown(case, reference)
    if found is None:
        return ""
    name, grown_ms = found
    late = f", {case.candidate.stragglers[0]} most" if name == "wait_ms" and case.candidate.stragglers else ""
    return f": {milliseconds(grown_ms)} of it is {_GROWN[name]}{late}"


def _ideal(reference: Side, case: Case) -> str:
    return "ideal scaling" if reference.nodes == 1 else f"the network of {name_side(reference, case.mode)}"


def _reasons(contrast: Contrast) -> tuple[str, ...]:
    """Where the step goes, what passes the network, and what the nodes do without it; as far as each is known."""
    passes = network_words(contrast.candidate)
    found = (_where_it_goes(contrast), f"Network: {passes}." if passes else "", _without_network(contrast))
    return tuple(dict.fromkeys(reason for reason in found if reason))


def _where_it_goes(contrast: Contrast) -> str:
    told = []
    for side in (contrast.candidate, contrast.baseline):
        parts, takes = _told_parts(side), milliseconds(side.step_time_ms.value)
        told.append(f"{takes} on {name_side(side, contrast.mode)}{f': {parts}' if parts else ''}")
    if not _told_parts(contrast.candidate):
        return f"{capitalised(contrast.loss.sentence)}."
    return f"A step takes {'; '.join(told)}."


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


def network_words(side: Side) -> str:
    """Bytes per step through the busiest node's NIC, and the rate that makes, of its link; empty where not known."""
    seen = side.bytes_per_step
    counted = next((size for size in (seen.card, seen.expected) if size is not None), None)
    if counted is None or side.nodes == 1 or not 0 < counted <= _MOST_BYTES:
        return ""
    gbit_per_s = counted * _BITS_PER_BYTE / _BYTES_PER_GB / (side.step_time_ms.value / _MS_PER_S)
    by_rule = "" if seen.card is not None else " (expected from the strategy, not counted)"
    said = f"{figure(counted / _BYTES_PER_MB)} MB per step and direction{by_rule}"
    link = side.link_gbit_per_s
    if link is None or not _SLOWEST_LINK <= link <= _FASTEST_LINK:
        return f"{said}, on average {format_rate(gbit_per_s)}"
    most = goodput_gb_per_s(link) * _BITS_PER_BYTE
    carried = f"{format_rate(most)} on a link of {format_rate(link)}"
    return f"{said}: on average {gbit_per_s / most:.0%} of TCP line rate ({carried})"


def _without_network(contrast: Contrast) -> str:
    if contrast.each_node:
        nodes = sorted(contrast.each_node, key=lambda node: -node.samples_per_s.value)
        told = ", ".join(_told_node(node) for node in nodes[:_MOST_NODES])
        more = f" and {len(nodes) - _MOST_NODES} more, the slowest at {nodes[-1].relative:.0%}"
        return f"Alone: {told}{more if len(nodes) > _MOST_NODES else ''}."
    ours, theirs = _compute_ms(contrast.baseline), _compute_ms(contrast.candidate)
    if contrast.loss.cause != "network" or ours is None or theirs is None:
        return f"{capitalised(contrast.loss.sentence)}."
    left = milliseconds(contrast.candidate.step_time_ms.value - (contrast.loss.network_ms or 0.0))
    on_both = f"{milliseconds(theirs)} on {name_side(contrast.candidate, contrast.mode)}, {milliseconds(ours)} on "
    on_both += name_side(contrast.baseline, contrast.mode)
    return f"Compute per step is {on_both}: without the network's cost a step would take about {left}."


def _compute_ms(side: Side) -> float | None:
    return side.split.compute_ms if side.split is not None else None


def _told_node(node: NodeSpeed) -> str:
    return f"{node.node} {figure(node.samples_per_s.value)} samples/s ({node.relative:.0%})"


ASKED = "asked for with --mode"


def compared_words(candidate: str, baseline: str) -> str:
    """Of two stored runs, by their ids."""
    return f"run {candidate} against run {baseline}"


def named_words(gpus: int) -> str:
    """So many GPUs are named for the baseline."""
    return f"--baseline-gpus names {gpus} GPUs of node 0"


def enough_words(first: Sequence[int], most: int) -> str:
    """The slots of the first nodes suffice for the workers of all."""
    where = "node 0 has" if len(first) == 1 else f"the first {len(first)} nodes have"
    return f"{where} {sum(first)} slots, enough for the workers of all {most} nodes"


def too_few_words(first: Sequence[int], workers: int, most: int) -> str:
    """They do not."""
    one = len(first) == 1
    where = f"node 0 has slots={first[0]}" if one else f"the first {len(first)} nodes have {sum(first)} slots"
    return f"{where}, too few for {format_count(workers, 'worker')} of each of the {most} nodes"


def uneven_words(counts: Sequence[int]) -> str:
    """No number of workers divides among these numbers of nodes."""
    numbers = format_list([str(count) for count in counts])
    return f"no number of workers that these nodes can have divides among {numbers} nodes"
