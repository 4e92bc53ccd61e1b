"""Judge the sides of a contrast: whether they compare, how much faster many nodes are than few, and why. Pure.

`side` makes sides, `slowdown_attribution` finds causes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Literal

import msgspec

from multinode.contrast.figures import (
    Contrast,
    Side,
    capitalised,
    channel,
    name_nodes,
    name_side,
    network_words,
    on_side,
)
from multinode.contrast.slowdown_attribution import (
    NOTICEABLE,
    CandidateLoss,
    attribute_slowdown,
    is_noticeable,
)
from multinode.errors import UsageError
from multinode.findings.finding import Finding, distinct
from multinode.findings.rule import Rule, RuleGroup
from multinode.levers.levers import TYPES
from multinode.model.workload import FullRun
from multinode.profile.measured import asked_epochs, dataset_size, full_run_s, with_costs
from multinode.profile.step_split import PARTS
from multinode.stats.estimate import Estimate, ratio
from multinode.stats.unknown import Unknown, found, known, or_none
from multinode.units import format_count, format_figure, format_ms, format_rate

_LEVERS = {lever.column: lever.title for lever in TYPES.values()}
# Settings that make another training, and settings that change its speed.
_TRAINED = ("model", "dataset", "stage", "method", "sequence_length", "precision")
_ASKED = (
    *("lora_rank", "strategy", "per_device_batch", "accumulation", "packing", "recompute", "overlap"),
    *(*_LEVERS, "command"),
)
_SAME_LINK = 0.01
# Display names of settings.
_NAMES = {
    "lora_rank": "LoRA rank",
    "per_device_batch": "per-device batch",
    "accumulation": "gradient accumulation",
    "recompute": "gradient checkpointing",
    "overlap": "overlap of communication",
    **_LEVERS,
}
_NONE = "none"
_LONGEST = 60


DIFFERENCES = RuleGroup("How the sides of a contrast differ")
_BOTH = ("baseline", "candidate")
_SETTING = DIFFERENCES.rule(
    "setting",
    about="a setting, link rate or package version that differs between two sides",
    message="{name}: {baseline} {on_baseline}, {candidate} {on_candidate}.",
    figures=("name", *_BOTH),
)
_UNRECORDED = DIFFERENCES.rule(
    "no-settings",
    about="a side without recorded settings",
    message="{sides}: no settings were recorded, so it is unknown whether the settings of the sides match.",
)
_UNEQUAL_BATCH = DIFFERENCES.rule(
    "unequal-batch",
    about="different global batches that should be equal",
    message="Global batch: {baseline} {on_baseline}, {candidate} {on_candidate}. Both sides should have the same "
    "global batch.",
    figures=_BOTH,
)
_LARGER_BATCH = DIFFERENCES.rule(
    "larger-batch",
    about="a larger global batch with more nodes",
    message="Global batch: {baseline} {on_baseline}, {candidate} {on_candidate}. With the larger batch, an "
    "epoch has only 1/{fewer} as many optimizer steps, so you may have to adjust the learning rate and the warm-up.",
    figures=_BOTH,
)


def require_alike(baseline: Side, candidate: Side, *, anyway: bool = False) -> None:
    """Refuse to compare sides that did not train the same.

    Args:
        baseline: with its settings; unknown ones never differ.
        candidate: with its settings; unknown ones never differ.
        anyway: whether to compare them regardless; `find_differences` then marks it.

    Raises:
        UsageError: model, dataset, stage, method, sequence length or precision differ.
    """
    differing = [name for name in _TRAINED if _is_other(baseline, candidate, name)]
    if differing and not anyway:
        settings = [
            f"{name.replace('_', ' ')} {_asked(baseline, name)!r} and {_asked(candidate, name)!r}" for name in differing
        ]
        raise UsageError(
            f"the runs have different settings: {', '.join(settings)}",
            hint="compare runs of one job, or use --force to compare them anyway and mark the differences",
        )


def find_differences(baseline: Side, candidate: Side, mode: str) -> tuple[Finding, ...]:
    """Differences between two sides beyond those compared.

    Args:
        baseline: one side.
        candidate: the other, or a further one.
        mode: as in Contrast: with every node full, the samples per step differ by design; with equal samples per step,
            the accumulation does.
    """
    mine, theirs = name_side(baseline, mode), name_side(candidate, mode)

    def differs(name: str, ours: object, other: object) -> Finding:
        on = {"on_baseline": on_side(baseline, mode), "on_candidate": on_side(candidate, mode)}
        return _SETTING.found(None, name=name, baseline=_written(ours), candidate=_written(other), **on)

    unknown = [name for side, name in ((baseline, mine), (candidate, theirs)) if isinstance(side.settings, Unknown)]
    if unknown:
        differences = [_UNRECORDED.found(None, sides=capitalised(" and ".join(unknown)))]
    else:
        differences = [
            differs(capitalised(_NAMES.get(name, name.replace("_", " "))), *_given(name, ours, other))
            for name in (*_TRAINED, *_ASKED)
            if (ours := _asked(baseline, name)) != (other := _asked(candidate, name))
            and not (mode == "fixed-global-batch" and name == "accumulation")
        ]
    if mode == "compare" and (links := _links(baseline, candidate)):
        differences.append(differs("Link", *links))
    batch = _global_batch(baseline, candidate, mode)
    versions = (differs(_written(name), *both) for name, both in _versions(baseline, candidate).items())
    return (*differences, *([batch] if batch else []), *versions)


def _asked(side: Side, name: str) -> object:
    return None if isinstance(side.settings, Unknown) else side.settings.by_name[name]


def _is_other(baseline: Side, candidate: Side, name: str) -> bool:
    ours, theirs = _asked(baseline, name), _asked(candidate, name)
    return ours is not None and theirs is not None and ours != theirs


def _given(name: str, *values: object) -> list[object]:
    return [_NONE if value is None and name in _LEVERS else value for value in values]


def _links(baseline: Side, candidate: Side) -> tuple[str, ...]:
    ours, theirs = or_none(baseline.link_gbit_per_s), or_none(candidate.link_gbit_per_s)
    if ours is None or theirs is None or math.isclose(ours, theirs, rel_tol=_SAME_LINK):
        return ()
    return format_rate(ours), format_rate(theirs)


def _global_batch(baseline: Side, candidate: Side, mode: str) -> Finding | None:
    ours, theirs = or_none(baseline.global_batch), or_none(candidate.global_batch)
    if ours is None or theirs is None or ours == theirs or candidate.role == "each-node":
        return None
    on = {"on_baseline": on_side(baseline, mode), "on_candidate": on_side(candidate, mode)}
    if mode in {"same-workers", "fixed-global-batch"}:
        return _UNEQUAL_BATCH.found(None, baseline=ours, candidate=theirs, **on)
    if candidate.role == "point":
        # Every node full: covered by the finding about the two sides.
        return None
    return _LARGER_BATCH.found(None, baseline=ours, candidate=theirs, fewer=format_figure(theirs / ours), **on)


def _versions(baseline: Side, candidate: Side) -> dict[str, tuple[str | None, str | None]]:
    if not baseline.versions or not candidate.versions:
        return {}
    return {
        package: (ours, theirs)
        for package in sorted(baseline.versions.keys() | candidate.versions.keys())
        if (ours := baseline.versions.get(package)) != (theirs := candidate.versions.get(package))
    }


def _written(value: object) -> str:
    if value is None:
        return "unknown"
    if isinstance(value, bool):
        return "yes" if value else "no"
    text = "".join(letter if letter.isprintable() else " " for letter in str(value))
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


_MS_PER_S = 1e3
_MOST_NODES = 8


def with_full_run(sides: Sequence[Side], candidate: Side) -> tuple[Side, ...]:
    """The sides with time and cost of the full run at their measured rate, without start and end.

    Args:
        sides: all of a contrast.
        candidate: the one whose optimizer steps are those of the job.
    """
    samples = found(lambda: _samples((candidate, *sides)))

    def whole_s(side: Side) -> Estimate:
        return full_run_s(side.samples_per_s, known(samples))

    return tuple(with_costs(msgspec.structs.replace(side, whole_s=found(partial(whole_s, side)))) for side in sides)


def _samples(sides: Sequence[Side]) -> float:
    """Samples of the full run, with the steps of the first side."""
    first, full = sides[0], FullRun.first_of(side.whole for side in sides)
    if (steps := full.steps) is not None:
        return steps * (or_none(first.global_batch) or first.samples_per_s.value * first.step_time_ms.value / _MS_PER_S)
    return asked_epochs(full) * dataset_size(or_none(side.dataset_samples) for side in sides)


_SCALING = {"same-workers": "same workers", "scale-out": "weak", "fixed-global-batch": "strong"}


def compare(sides: Sequence[Side], *, mode: str, why: Finding, job: str, rule: str) -> Contrast:
    """Contrast the candidate with the baseline; further sides make a curve, or separate slow nodes from slow networks.

    Args:
        sides: with their roles; one baseline and one candidate.
        mode: as in Contrast; also `why`, `job` and `rule`.
        why: of the mode.
        job: for people.
        rule: which steps are measured.
    """
    sides = with_speeds(with_full_run(sides, _of_role(sides, "candidate")))
    baseline, candidate = _of_role(sides, "baseline"), _of_role(sides, "candidate")
    alone = _sides_alone(sides, baseline)
    others = tuple(side for side in sides if side is not baseline and side is not candidate)
    differences = [difference for side in (candidate, *others) for difference in find_differences(baseline, side, mode)]
    contrast = Contrast(
        mode=mode,
        why=why,
        job=job,
        baseline=baseline,
        candidate=candidate,
        others=others,
        scaling=_SCALING.get(mode) or _scaling(baseline, candidate),
        loss=attribute_slowdown(CandidateLoss(baseline=baseline, candidate=candidate, alone=alone, mode=mode)),
        differences=distinct(differences),
        rule=rule,
    )
    return msgspec.structs.replace(contrast, verdict=_verdict(contrast), reasons=_reasons(contrast))


def _sides_alone(sides: Sequence[Side], baseline: Side) -> tuple[Side, ...]:
    """Every node alone, in node order; empty if fewer than two were measured."""
    alone = [side for side in sides if side.role == "each-node"]
    if alone and baseline.nodes == 1 and all(side.node_names != baseline.node_names for side in alone):
        alone.insert(0, baseline)
    return tuple(alone) if len(alone) > 1 else ()


def with_speeds(sides: Sequence[Side]) -> tuple[Side, ...]:
    """The sides with their speed-up over the baseline, and nodes alone with their speed relative to the fastest."""
    baseline = _of_role(sides, "baseline")
    alone = _sides_alone(sides, baseline)
    fastest = max((_worker_rate(side) for side in alone), default=1.0)
    return tuple(
        msgspec.structs.replace(
            side,
            # Of itself it is exactly 1.
            speedup=baseline.speedup if side is baseline else ratio(side.samples_per_s, baseline.samples_per_s),
            efficiency=_worker_rate(side) / _worker_rate(baseline),
            relative=_worker_rate(side) / fastest if side in alone else None,
        )
        for side in sides
    )


def _worker_rate(side: Side) -> float:
    return side.samples_per_s.value / side.world_size


def _of_role(sides: Sequence[Side], role: str) -> Side:
    matching = next((side for side in sides if side.role == role), None)
    if matching is None:
        raise UsageError(f"there is no {role} to compare", hint="a contrast needs a baseline and a candidate")
    return matching


def _scaling(baseline: Side, candidate: Side) -> str:
    if baseline.world_size == candidate.world_size:
        return "same workers"
    batch = or_none(baseline.global_batch)
    return "strong" if batch is not None and batch == candidate.global_batch else "weak"


Outcome = Literal["unsynchronised", "inconclusive", "equal", "faster", "slower"]
"""Of the candidate against the baseline; `unsynchronised` workers train separate models."""


def judge(contrast: Contrast) -> Outcome:
    """Inconclusive if the interval includes slower and faster, and is wider than equality allows."""
    if unsynchronised_side(contrast) is not None:
        return "unsynchronised"
    low, value, high = contrast.speedup.low, contrast.speedup.value, contrast.speedup.high
    if low <= 1 <= high and (low < 1 - NOTICEABLE or high > 1 + NOTICEABLE):
        return "inconclusive"
    if abs(value - 1) <= NOTICEABLE:
        return "equal"
    return "faster" if value > 1 else "slower"


def unsynchronised_side(contrast: Contrast) -> Side | None:
    """A side whose workers exchange no gradients, if there is one."""
    sides = (contrast.candidate, contrast.baseline)
    return next((side for side in sides if side.bottleneck.kind == "no_communication" and side.world_size > 1), None)


_VERDICTS = RuleGroup("Verdict of a contrast")
_SPEEDUP_FIGURES = ("speedup", "low", "high", "efficiency")


def _verdict_rule(code: str, about: str, message: str) -> Rule:
    return _VERDICTS.rule(code, about=about, message=message, figures=_SPEEDUP_FIGURES)


_UNSYNCHRONISED = _verdict_rule(
    "unsynchronised",
    "workers that do not synchronize gradients",
    "No gradient synchronization detected: {workers} each train their own model, so the contrast shows nothing about "
    "the network.",
)
_INCONCLUSIVE = _verdict_rule(
    "inconclusive",
    "the interval of the speed-up includes both outcomes",
    "Inconclusive: the difference between {many} and {few} is within the noise (speed-up {span}). Measure with more "
    "--repeats or {longer}.",
)
_NO_FASTER = _verdict_rule(
    "no-faster",
    "the candidate, with more nodes and a different number of workers, is not faster",
    "Do not use {many} for this job: they are no faster than {few}; {culprit}.",
)
_HARMFUL = _verdict_rule(
    "harmful",
    "the candidate, with more nodes and a different number of workers, is slower",
    "Do not use {many} for this job: they are {faster} than {few}; {culprit}.",
)
_EQUAL = _verdict_rule("equal", "the sides are equally fast", "{many} {are} as fast as {few}{unlimited}.")
_SLOWER = _verdict_rule(
    "slower", "the candidate is slower with the same number of workers", "{many} {are} {faster} than {few}: {culprit}."
)
_FASTER = _verdict_rule("faster", "the candidate is faster", "{many} {are} {faster} than {few}{scaling}.")


def _verdict(contrast: Contrast) -> Finding:
    outcome, speedup = judge(contrast), contrast.speedup
    is_same = contrast.candidate.world_size == contrast.baseline.world_size
    is_comparison = contrast.mode == "compare"
    # Two stored runs are called by their ids, and nothing is advised.
    name = _name_run if is_comparison else name_nodes
    many, few = name(contrast.candidate), name(contrast.baseline)
    if is_same and not is_comparison:
        few += f" with the same {format_count(contrast.baseline.world_size, 'worker')}"
    settings = contrast.baseline.settings
    is_script = not isinstance(settings, Unknown) and settings.command is not None
    stranger = unsynchronised_side(contrast) or contrast.candidate
    is_advised = not is_comparison and not is_same
    rule = {
        "unsynchronised": _UNSYNCHRONISED,
        "inconclusive": _INCONCLUSIVE,
        "equal": _NO_FASTER if is_advised else _EQUAL,
        "slower": _HARMFUL if is_advised else _SLOWER,
        "faster": _FASTER,
    }[outcome]
    return rule.found(
        None,
        workers=f"the {stranger.world_size} workers {on_side(stranger, contrast.mode)}",
        many=many if rule in {_INCONCLUSIVE, _NO_FASTER, _HARMFUL} else capitalised(many),
        few=few,
        are="is" if is_comparison else "are",
        span=speedup.text("times_range"),
        longer="a script that trains longer" if is_script else "--steps",
        faster=speedup.text("faster"),
        culprit=_culprit(contrast),
        unlimited=": no network bottleneck" if is_same and not is_comparison and contrast.loss.cause == "none" else "",
        scaling=_scaling_words(contrast) if is_advised else "",
        speedup=speedup.value,
        low=speedup.low,
        high=speedup.high,
        efficiency=contrast.efficiency,
    )


def _scaling_words(contrast: Contrast) -> str:
    is_lost = is_noticeable(1 - contrast.efficiency, 1.0) and contrast.loss.cause in {"node", "network"}
    return f" ({contrast.efficiency:.0%} scaling efficiency){f': {_culprit(contrast)}' if is_lost else ''}"


def prefers_one_node(contrast: Contrast) -> bool:
    """Whether several nodes were measured to be slower than one, or no faster with more workers."""
    if contrast.mode == "compare" or contrast.baseline.nodes != 1:
        return False
    outcome, has_more = judge(contrast), contrast.candidate.world_size > contrast.baseline.world_size
    return outcome == "slower" or (outcome == "equal" and has_more)


def _name_run(side: Side) -> str:
    return f"run {side.run_ids[-1]} ({name_nodes(side)}, {format_count(side.world_size, 'worker')})"


def _culprit(contrast: Contrast) -> str:
    loss = contrast.loss
    if loss.cause == "network":
        return f"{channel(contrast.candidate)} is the bottleneck"
    if loss.cause == "node":
        rate = f" (at {loss.relative:.0%} of the others' speed)" if loss.relative is not None else ""
        return f"{loss.node}{rate} is the bottleneck, not {channel(contrast.candidate)}"
    if loss.cause == "none" and contrast.scaling != "strong" and _has_fewer_workers(contrast):
        return "it has fewer workers"
    if loss.cause == "none":
        return "fixed costs per step, which more workers do not reduce, are the bottleneck"
    return "the cause is unknown"


def _has_fewer_workers(contrast: Contrast) -> bool:
    return contrast.candidate.world_size < contrast.baseline.world_size


_REASONS = RuleGroup("Reasons for a contrast's verdict")
_STEP_PARTS = _REASONS.rule(
    "step-parts", about="the largest parts of a step on both sides", message="A step takes {candidate}; {baseline}."
)
_LOSS = _REASONS.rule("loss", about="what slows down the candidate, if anything does", message="{loss}.")
TRAFFIC = _REASONS.rule(
    "traffic",
    about="traffic per step on the busiest NIC, and the utilization of its link",
    message="Network: {traffic}.",
)
_EACH_ALONE = _REASONS.rule(
    "each-alone", about="the speed of each node alone (--each-node)", message="Each node alone: {speeds}."
)
_COMPUTE = _REASONS.rule(
    "compute",
    about="compute time per step on both sides, and the step time without the cost of the network",
    message="Compute time per step is {candidate} and {baseline}. Without the cost of the network, a step would take "
    "about {left}.",
)


def _reasons(contrast: Contrast) -> tuple[Finding, ...]:
    passes = network_words(contrast.candidate)
    traffic = (TRAFFIC.found(None, traffic=passes),) if passes else ()
    return distinct((_where_it_goes(contrast), *traffic, _without_network(contrast)))


def _loss(contrast: Contrast) -> Finding:
    return _LOSS.found(None, loss=capitalised(contrast.loss.message))


def _where_it_goes(contrast: Contrast) -> Finding:
    notes = []
    for side in (contrast.candidate, contrast.baseline):
        parts, takes = _told_parts(side), format_ms(side.step_time_ms.value)
        notes.append(f"{takes} {on_side(side, contrast.mode)}{f': {parts}' if parts else ''}")
    if not _told_parts(contrast.candidate):
        return _loss(contrast)
    candidate, baseline = notes
    return _STEP_PARTS.found(None, candidate=candidate, baseline=baseline)


def _told_parts(side: Side) -> str:
    split = or_none(side.split)
    if split is None:
        return ""
    shares = {
        part.words: part_ms / split.step_ms
        for part in PARTS
        if (part_ms := or_none(getattr(split, part.name))) is not None
    }
    noticed = [words for words in sorted(shares, key=lambda words: -shares[words]) if is_noticeable(shares[words], 1.0)]
    return ", ".join(f"{shares[words]:.0%} {words}" for words in noticed)


def _without_network(contrast: Contrast) -> Finding:
    if alone := contrast.alone:
        nodes = sorted(alone, key=lambda side: -(side.relative or 0.0))
        unequal = len({side.world_size for side in alone}) > 1
        speeds = ", ".join(_told_node(side, unequal=unequal) for side in nodes[:_MOST_NODES])
        more = f" and {len(nodes) - _MOST_NODES} more, the slowest at {nodes[-1].relative:.0%}"
        return _EACH_ALONE.found(None, speeds=f"{speeds}{more if len(nodes) > _MOST_NODES else ''}")
    ours, theirs = _compute_ms(contrast.baseline), _compute_ms(contrast.candidate)
    is_network = contrast.loss.cause == "network" and contrast.candidate.nodes > 1
    if not is_network or ours is None or theirs is None:
        return _loss(contrast)
    left = format_ms(contrast.candidate.step_time_ms.value - (contrast.loss.network_ms or 0.0))
    candidate = f"{format_ms(theirs)} {on_side(contrast.candidate, contrast.mode)}"
    baseline = f"{format_ms(ours)} {on_side(contrast.baseline, contrast.mode)}"
    return _COMPUTE.found(None, candidate=candidate, baseline=baseline, left=left)


def _compute_ms(side: Side) -> float | None:
    return None if isinstance(side.split, Unknown) else or_none(side.split.compute_ms)


def _told_node(side: Side, *, unequal: bool) -> str:
    workers = f" with {format_count(side.world_size, 'worker')}" if unequal else ""
    share = f"{side.relative:.0%} per worker" if unequal else f"{side.relative:.0%}"
    return f"{side.node_names[0]} {format_figure(side.samples_per_s.value)} samples/s{workers} ({share})"
