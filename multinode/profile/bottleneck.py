"""The bottleneck: the largest part of a step other than compute. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from multinode.findings.finding import Finding
from multinode.findings.rule import Rule, RuleGroup
from multinode.profile.figures import Straggler, Waiting
from multinode.profile.step_split import StepSplit, WorkerSplit
from multinode.stats.unknown import Unknown, or_none, or_zero, unknown_fields
from multinode.units import format_ms

WORTH = 0.05
"""Fraction of the step below which nothing noticeable can be gained."""
_UNTIMED_PASSES = "; whether the step is launch-bound is unknown, because passes are timed on the GPU only with DDP"


class Bottleneck(Finding, frozen=True, kw_only=True):
    """The main limit of a training."""

    # `network`; `local`: communication between the workers of a node; `straggler`, `data`, `host`; `launch`: the GPU
    # waits for the host in what is called compute; `compute`: compute-bound; `no_communication`: each worker trains
    # alone; or `unknown`
    kind: str
    share: float | None = None  # of the step


class BottleneckRule(Rule, frozen=True, kw_only=True):
    """One kind of bottleneck. `share` is a value of all."""

    kind: str  # as in `Bottleneck`

    def found(self, on: str | None, /, **values: object) -> Bottleneck:
        """As of any rule, with the share of the step."""
        share: Any = values.get("share")
        return Bottleneck(**self.fields(on, values), kind=self.kind, share=share)


BOTTLENECKS = RuleGroup("Bottleneck of a training run")


_PART_FIGURES = ("part_ms", "step_ms")


def _rule(code: str, *, about: str, message: str, kind: str = "", figures: tuple[str, ...] = ()) -> BottleneckRule:
    return BOTTLENECKS.add(BottleneckRule(code=code, kind=kind or code, about=about, message=message, figures=figures))


UNKNOWN_BOTTLENECK = _rule("unknown", about="the bottleneck is unknown", message="bottleneck unknown: {reason}")
_PARTS = {
    "network": _rule(
        "network",
        about="communication between nodes",
        message="exposed communication takes {takes}{known}",
        figures=_PART_FIGURES,
    ),
    "local": _rule(
        "local",
        about="communication inside a node",
        message="exposed communication between the workers of a node takes {takes}{known}",
        figures=_PART_FIGURES,
    ),
    "data": _rule("data", about="the data loader", message="waiting for batches takes {takes}", figures=_PART_FIGURES),
    "host": _rule(
        "host",
        about="host time outside the measured parts of a step",
        message="the host spends {takes} outside compute, communication, data and optimizer",
        figures=_PART_FIGURES,
    ),
}
_STRAGGLER = _rule(
    "straggler", about="one slow node", message="waiting for {node} takes {takes}{evidence}", figures=_PART_FIGURES
)
_ALTERNATING = _rule(
    "alternating-stragglers",
    kind="straggler",
    about="nodes that are late at different times",
    message="waiting for slower workers takes {takes}; different nodes are slow at different times, so no single node "
    "is the cause",
    figures=_PART_FIGURES,
)
_NO_STRAGGLER = _rule(
    "no-straggler",
    kind="straggler",
    about="waits for other workers, although no single node is often late",
    message="waiting for other workers takes {takes}; no single node stands out",
    figures=_PART_FIGURES,
)
_LAUNCH = _rule(
    "launch",
    about="the host launches kernels more slowly than the GPU runs them",
    message="launch-bound: forward and backward take {host} on the host but only {gpu} on the GPU, so the GPU waits "
    "for the host. Either the host launches many small kernels, or it blocks, for example in .item()",
)
_COMPUTE = _rule(
    "compute",
    about="no part other than compute takes long",
    message="compute-bound: compute and optimizer take {takes}; no other part takes more than {worth:.0%}",
    figures=_PART_FIGURES,
)
_NOT_NOTICED = _rule(
    "nothing-noticeable",
    kind="compute",
    about="no measured part takes long; compute was not measured",
    message="no measured part takes more than {worth:.0%} of the step time ({step}){unmeasured}",
)
NO_COMMUNICATION = _rule(
    "no-communication",
    kind="no_communication",
    about="workers that do not synchronize their gradients",
    message="no gradient synchronization detected: {reason}",
)


def find_bottleneck(
    split: StepSplit, stragglers: Sequence[Straggler] = (), waiting: Waiting | None = None, *, nodes: int = 2
) -> Bottleneck:
    """The largest noticeable part of a step; of equal ones the network, then stragglers, then data.

    Args:
        split: of the step.
        stragglers: nodes that the others wait for.
        waiting: waits between nodes if none is a straggler.
        nodes: how many there are; on one of them all communication stays inside.
    """
    waiting = waiting or Waiting()
    mean, exposed_ms = or_none(split.mean), split.exposed_ms
    if mean is None or isinstance(exposed_ms, Unknown) or mean.step_ms <= 0:
        why = exposed_ms.reason if isinstance(exposed_ms, Unknown) else "no measured step was recorded"
        return UNKNOWN_BOTTLENECK.found(None, reason=why)
    local_ms = exposed_ms if nodes == 1 else mean.local_ms or 0.0
    host_ms, compute_ms = or_zero(mean.host_ms), or_none(mean.compute_ms)
    lost_ms = {
        "network": exposed_ms - local_ms,
        "local": local_ms,
        "straggler": max((straggler.late_ms for straggler in stragglers), default=waiting.late_ms or 0.0),
        "data": 0.0 if is_bound(split) else or_zero(mean.data_ms),
        "host": host_ms,
    }
    kind = max(lost_ms, key=lambda name: lost_ms[name])
    share = lost_ms[kind] / mean.step_ms
    passes = split.passes
    own_ms = None if compute_ms is None else compute_ms + or_zero(mean.optimizer_ms)
    if passes is not None and own_ms is not None and passes.host_sets_pace and (kind == "host" or share <= WORTH):
        share = (own_ms + host_ms) / mean.step_ms
        return _LAUNCH.found(None, share=share, host=format_ms(passes.host_ms), gpu=format_ms(passes.gpu_ms))
    if share <= WORTH:
        return _compute_bound(own_ms, split, mean)
    part = _part(lost_ms[kind], mean)
    if kind != "straggler":
        known = f", {split.steps.words}" if kind in {"network", "local"} and split.steps.words else ""
        return _PARTS[kind].found(None, **part, known=known)
    if stragglers:
        worst = max(stragglers, key=lambda straggler: straggler.late_ms)
        evidence = f": {worst.causes[0].message}" if worst.causes else ""
        return _STRAGGLER.found(worst.node, **part, evidence=evidence)
    return (_ALTERNATING if waiting.take_turns else _NO_STRAGGLER).found(None, **part)


def is_bound(split: StepSplit) -> bool:
    """Whether the host's waits for batches are only an upper bound, as a GPU may have computed meanwhile."""
    mean = or_none(split.mean)
    return mean is not None and isinstance(mean.compute_ms, Unknown) and split.device != "cpu"


def _compute_bound(own_ms: float | None, split: StepSplit, mean: WorkerSplit) -> Bottleneck:
    if own_ms is not None:
        return _COMPUTE.found(None, **_part(own_ms, mean), worth=WORTH)
    unknown = [name.removesuffix("_ms") for name in ("data_ms", "host_ms") if name in unknown_fields(mean)]
    unmeasured = f"; not measured: {', '.join(unknown)}" if unknown else ""
    data_ms = or_zero(mean.data_ms)
    if is_bound(split) and data_ms > WORTH * mean.step_ms:
        waited = f"{format_ms(data_ms)} ({data_ms / mean.step_ms:.0%})"
        unmeasured += f"; the host waited {waited} for batches, while the GPU may have been computing"
    # FSDP and ZeRO have no counters of their passes, as DDP has.
    unmeasured += _UNTIMED_PASSES if split.device == "cuda" and split.passes is None else ""
    return _NOT_NOTICED.found(None, worth=WORTH, step=format_ms(mean.step_ms), unmeasured=unmeasured)


def _part(time_ms: float, mean: WorkerSplit) -> dict[str, object]:
    """The values that refer to a part of a step."""
    share = time_ms / mean.step_ms
    takes = f"{format_ms(time_ms)} of {format_ms(mean.step_ms)} per step ({share:.0%})"
    return {"part_ms": time_ms, "step_ms": mean.step_ms, "share": share, "takes": takes}
