"""Bottleneck: what a step spends most of its time on that is not computing, in one plain sentence. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from multinode.analyse.steps.step_split import StepSplit, WorkerSplit
from multinode.analyse.steps.stragglers import Straggler, Waiting

__all__ = ["Bottleneck", "find_bottleneck"]

# Below a twentieth of the step there is nothing to win that a user would notice.
_WORTH = 0.05

_WORDS = {
    "network": "communication that nothing hides",
    "straggler": "waiting for other workers, none of which stands out as the slow one",
    "data": "waiting for batches",
    "host": "outside of computing, communication, data and optimizer",
}
_TURNS = "waiting for slower workers, which take turns: no single one is to blame"


class Bottleneck(msgspec.Struct, frozen=True, kw_only=True):
    """What holds the training up most.

    Attributes:
        kind: `network`, `straggler`, `data`, `host`; `compute`: nothing but its own work holds it up;
            `no_communication`: each worker trains alone; or `unknown`.
        share: of the step that it takes.
        sentence: with its figures, for people.
    """

    kind: str
    share: float | None = None
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
        reason = split.missing.get("exposed_ms", "no step that counts was recorded")
        return Bottleneck(kind="unknown", sentence=f"what holds the training up is not known: {reason}")
    lost_ms = {
        "network": mean.exposed_ms,
        "straggler": max((straggler.late_ms for straggler in stragglers), default=waiting.late_ms or 0.0),
        "data": 0.0 if _is_bound(split) else mean.data_ms or 0.0,
        "host": mean.host_ms or 0.0,
    }
    kind = max(lost_ms, key=lambda name: lost_ms[name])
    share = lost_ms[kind] / mean.step_ms
    if share <= _WORTH:
        return _nothing(split, mean)
    words = _straggling(stragglers, waiting) if kind == "straggler" else _WORDS[kind]
    return Bottleneck(
        kind=kind,
        share=share,
        sentence=f"of {_ms(mean.step_ms)} a step, {_ms(lost_ms[kind])} ({share:.0%}) are {words}",
    )


def _is_bound(split: StepSplit) -> bool:
    """Whether the host's waits for batches are but an upper bound: a GPU may have computed all the while."""
    return split.mean is not None and split.mean.compute_ms is None and split.device != "cpu"


def _straggling(stragglers: Sequence[Straggler], waiting: Waiting) -> str:
    if not stragglers:
        return _TURNS if waiting.take_turns else _WORDS["straggler"]
    worst = max(stragglers, key=lambda straggler: straggler.late_ms)
    return f"waiting for {worst.node}{f': {worst.evidence[0]}' if worst.evidence else ''}"


def _nothing(split: StepSplit, mean: WorkerSplit) -> Bottleneck:
    threshold = f"{_WORTH:.0%}"
    unknown = [name.removesuffix("_ms") for name in ("data_ms", "host_ms") if name in split.missing]
    if mean.compute_ms is None:
        sentence = f"of {_ms(mean.step_ms)} a step, nothing that could be told holds up more than {threshold}"
        if unknown:
            sentence += f"; not told: {', '.join(unknown)}"
        if _is_bound(split) and mean.data_ms is not None and mean.data_ms > _WORTH * mean.step_ms:
            sentence += (
                f"; the host waited {_ms(mean.data_ms)} ({mean.data_ms / mean.step_ms:.0%}) for batches, in which the "
                "GPU may have computed"
            )
        return Bottleneck(kind="compute", sentence=sentence)
    own_ms = mean.compute_ms + (mean.optimizer_ms or 0.0)
    return Bottleneck(
        kind="compute",
        share=own_ms / mean.step_ms,
        sentence=f"of {_ms(mean.step_ms)} a step, {_ms(own_ms)} ({own_ms / mean.step_ms:.0%}) are its own computing; "
        f"nothing else takes more than {threshold}",
    )


def _ms(time_ms: float) -> str:
    """`512 ms`, `4.2 ms`: three digits that count."""
    return f"{time_ms:.0f} ms" if time_ms >= 100 else f"{time_ms:.3g} ms"  # noqa: PLR2004 - from here on three digits
