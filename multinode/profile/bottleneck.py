"""Bottleneck: what a step spends most of its time on that is not compute. Its words are `report`'s. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from multinode.profile.step_split import StepSplit
from multinode.profile.stragglers import Straggler, Waiting

WORTH = 0.05
"""Of the step: below it there is nothing to win that a user would notice."""


class Bottleneck(msgspec.Struct, frozen=True, kw_only=True):
    """What holds the training up most.

    Attributes:
        kind: `network`, `straggler`, `data`, `host`; `compute`: compute-bound;
            `no_communication`: each worker trains alone; or `unknown`.
        share: of the step that it takes.
        take_turns: whether stragglers are late in turns, so that none of them is to blame.
        sentence: with its figures, written by `report`.
    """

    kind: str
    share: float | None = None
    take_turns: bool = False
    sentence: str = ""


def find_bottleneck(
    split: StepSplit, stragglers: Sequence[Straggler] = (), waiting: Waiting | None = None
) -> Bottleneck:
    """What takes most of the step, of what takes more than 5 %; of equals the network, then stragglers, then data.

    Args:
        split: where a step's time goes.
        stragglers: nodes that the others wait for.
        waiting: what nodes wait for each other where none of them is a straggler.
    """
    waiting = waiting or Waiting()
    mean = split.mean
    if mean is None or mean.exposed_ms is None or mean.step_ms <= 0:
        return Bottleneck(kind="unknown")
    lost_ms = {
        "network": mean.exposed_ms,
        "straggler": max((straggler.late_ms for straggler in stragglers), default=waiting.late_ms or 0.0),
        "data": 0.0 if is_bound(split) else mean.data_ms or 0.0,
        "host": mean.host_ms or 0.0,
    }
    kind = max(lost_ms, key=lambda name: lost_ms[name])
    share = lost_ms[kind] / mean.step_ms
    if share > WORTH:
        return Bottleneck(
            kind=kind, share=share, take_turns=kind == "straggler" and not stragglers and waiting.take_turns
        )
    own_ms = None if mean.compute_ms is None else mean.compute_ms + (mean.optimizer_ms or 0.0)
    return Bottleneck(kind="compute", share=None if own_ms is None else own_ms / mean.step_ms)


def is_bound(split: StepSplit) -> bool:
    """Whether the host's waits for batches are but an upper bound: a GPU may have computed all the while."""
    return split.mean is not None and split.mean.compute_ms is None and split.device != "cpu"
