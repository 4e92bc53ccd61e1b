"""The bottleneck: the largest part of a step other than compute. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from multinode.profile.figures import Straggler, Waiting
from multinode.profile.step_split import Passes, StepSplit, WorkerSplit
from multinode.stats.unknown import Unknown, or_none, or_zero, unknown_fields
from multinode.units import format_ms

WORTH = 0.05
"""Fraction of the step below which nothing noticeable can be gained."""
_TAKES = {
    "network": "exposed communication",
    "local": "exposed communication between the workers of a node",
    "data": "waiting for batches",
    "host": "time outside compute, communication, data and optimizer",
}
_TURNS = "waiting for slower workers takes {share}; they alternate, so no single node is the cause"
_UNTIMED_PASSES = "; whether it is launch-bound is unknown, because only DDP times its passes on the GPU"
_NO_ONE = "waiting for other workers takes {share}; no single node stands out"


class Bottleneck(msgspec.Struct, frozen=True, kw_only=True):
    """The main limit of a training."""

    # `network`; `local`: communication between the workers of a node; `straggler`, `data`, `host`; `launch`: the GPU
    # waits for the host in what is called compute; `compute`: compute-bound; `no_communication`: each worker trains
    # alone; or `unknown`
    kind: str
    share: float | None = None  # of the step
    take_turns: bool = False  # whether stragglers alternate, so that no single node is the cause
    sentence: str = ""  # with its figures


def find_bottleneck(
    split: StepSplit, stragglers: Sequence[Straggler] = (), waiting: Waiting | None = None, *, nodes: int = 2
) -> Bottleneck:
    """The largest part above 5% of a step; of equal ones the network, then stragglers, then data.

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
        return Bottleneck(kind="unknown", sentence=f"bottleneck unknown: {why}")
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
        paced_ms = own_ms + host_ms
        return Bottleneck(kind="launch", share=paced_ms / mean.step_ms, sentence=_launch_bound(passes))
    if share > WORTH:
        take_turns = kind == "straggler" and not stragglers and waiting.take_turns
        takes = _share(lost_ms[kind], mean)
        if stragglers and kind == "straggler":
            worst = max(stragglers, key=lambda straggler: straggler.late_ms)
            evidence = f": {worst.causes[0].message}" if worst.causes else ""
            sentence = f"waiting for {worst.node} takes {takes}{evidence}"
        elif kind == "straggler":
            sentence = _TURNS.format(share=takes) if take_turns else _NO_ONE.format(share=takes)
        else:
            known = split.steps.words if kind in {"network", "local"} else ""
            sentence = f"{_TAKES[kind]} takes {takes}{f', {known}' if known else ''}"
        return Bottleneck(kind=kind, share=share, take_turns=take_turns, sentence=sentence)
    return Bottleneck(
        kind="compute",
        share=None if own_ms is None else own_ms / mean.step_ms,
        sentence=_compute_bound(own_ms, split, mean),
    )


def _launch_bound(passes: Passes) -> str:
    return (
        f"launch-bound: forward and backward take the host {format_ms(passes.host_ms)} and the "
        f"GPU {format_ms(passes.gpu_ms)}, so "
        "in what is called compute the GPU waits for the host, which launches many small kernels or waits itself "
        "(.item())"
    )


def is_bound(split: StepSplit) -> bool:
    """Whether the host's waits for batches are only an upper bound, as a GPU may have computed meanwhile."""
    mean = or_none(split.mean)
    return mean is not None and isinstance(mean.compute_ms, Unknown) and split.device != "cpu"


def _compute_bound(own_ms: float | None, split: StepSplit, mean: WorkerSplit) -> str:
    threshold = f"{WORTH:.0%}"
    if own_ms is not None:
        own = f"compute and optimizer take {_share(own_ms, mean)}"
        return f"compute-bound: {own}; no other part exceeds {threshold}"
    unknown = [name.removesuffix("_ms") for name in ("data_ms", "host_ms") if name in unknown_fields(mean)]
    sentence = f"no measured part exceeds {threshold} of {format_ms(mean.step_ms)} per step"
    if unknown:
        sentence += f"; not measured: {', '.join(unknown)}"
    data_ms = or_zero(mean.data_ms)
    if is_bound(split) and data_ms > WORTH * mean.step_ms:
        waited = f"{format_ms(data_ms)} ({data_ms / mean.step_ms:.0%})"
        sentence += f"; the host waited {waited} for batches, while the GPU may have computed"
    # FSDP and ZeRO have no counters of their passes, as DDP has.
    return sentence + (_UNTIMED_PASSES if split.device == "cuda" and split.passes is None else "")


def _share(time_ms: float, mean: WorkerSplit) -> str:
    return f"{format_ms(time_ms)} of {format_ms(mean.step_ms)} per step ({time_ms / mean.step_ms:.0%})"
