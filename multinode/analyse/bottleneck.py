"""Bottleneck: what a step spends most of its time on that is not computing, in one plain sentence. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from multinode.analyse.step_split import StepSplit, WorkerSplit
from multinode.analyse.stragglers import Straggler

__all__ = ["Bottleneck", "find_bottleneck"]

# Below a twentieth of the step there is nothing to win that a user would notice.
_WORTH = 0.05

_WORDS = {
    "network": "communication that nothing hides",
    "straggler": "waiting for slower workers, which take turns: no single node is to blame",
    "data": "waiting for batches",
    "host": "outside of computing, communication, data and optimizer",
}


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


def find_bottleneck(split: StepSplit, stragglers: Sequence[Straggler] = ()) -> Bottleneck:
    """What takes most of the step, of what takes more than 5 %; of equals the network, then stragglers, then data."""
    mean = split.mean
    if mean is None or mean.exposed_ms is None or mean.step_ms <= 0:
        reason = split.missing.get("exposed_ms", "no step that counts was recorded")
        return Bottleneck(kind="unknown", sentence=f"what holds the training up is not known: {reason}")
    lost_ms = {
        "network": mean.exposed_ms,
        "straggler": _waited_ms(mean, stragglers),
        "data": mean.data_ms or 0.0,
        "host": mean.host_ms or 0.0,
    }
    kind = max(lost_ms, key=lambda name: lost_ms[name])
    share = lost_ms[kind] / mean.step_ms
    if share <= _WORTH:
        return _nothing(split, mean)
    return Bottleneck(kind=kind, share=share, sentence=_sentence(kind, lost_ms[kind], mean, stragglers))


def _waited_ms(mean: WorkerSplit, stragglers: Sequence[Straggler]) -> float:
    """The others wait for a straggler, and it for nobody: what it costs is its own lateness, not the workers' mean."""
    if stragglers:
        return max(straggler.late_ms for straggler in stragglers)
    return mean.wait_ms or 0.0


def _sentence(kind: str, lost_ms: float, mean: WorkerSplit, stragglers: Sequence[Straggler]) -> str:
    of_step = f"of {_ms(mean.step_ms)} a step, {_ms(lost_ms)} ({lost_ms / mean.step_ms:.0%}) "
    if kind != "straggler" or not stragglers:
        return f"{of_step}are {_WORDS[kind]}"
    worst = max(stragglers, key=lambda straggler: straggler.late_ms)
    why = f": {worst.evidence[0]}" if worst.evidence else ""
    return f"{of_step}are waiting for {worst.node}{why}"


def _nothing(split: StepSplit, mean: WorkerSplit) -> Bottleneck:
    threshold = f"{_WORTH:.0%}"
    unknown = [name.removesuffix("_ms") for name in ("data_ms", "host_ms") if name in split.missing]
    if mean.compute_ms is None:
        sentence = f"of {_ms(mean.step_ms)} a step, nothing that could be told holds up more than {threshold}"
        return Bottleneck(
            kind="compute", sentence=f"{sentence}; not told: {', '.join(unknown)}" if unknown else sentence
        )
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
