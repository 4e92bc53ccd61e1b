"""The mean step split of repeated runs, and the nodes that any of them finds late. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

import msgspec

from multinode.profile.step_split import PARTS, WorkerSplit
from multinode.profile.summary import Summary
from multinode.stats.estimate import known_mean

# Plausible step times in ms: a nanosecond to eleven days. Stored summaries are untrusted.
_LONGEST_MS, _SHORTEST_MS = 1e9, 1e-6
_PARTS = (*PARTS, "overlap")
_EXPOSED = ("exposed_ms", "exposed_share", "late_ms")


class RepeatedSplit(msgspec.Struct, frozen=True, kw_only=True):
    """The split of a side's runs."""

    split: WorkerSplit | None = None  # mean of each part that all repeats have; None if a repeat was not split
    # one per repeat; None if one has none. `exposed_share` of the step, on average.
    exposed_ms: tuple[float, ...] | None = None
    exposed_share: float | None = None
    stragglers: tuple[str, ...] = ()  # nodes named by a repeat, the latest first
    late_ms: float | None = None  # wait of the others for the latest, mean of the repeats; None if waits were not timed
    missing: dict[str, str] = {}  # reason by name of None values


def average_splits(summaries: Sequence[Summary]) -> RepeatedSplit:
    """The mean of at least one repeat."""
    splits = [mean for one in summaries if (mean := one.split.mean) is not None and _is_plausible(mean)]
    if len(splits) < len(summaries):
        return RepeatedSplit(missing=dict.fromkeys(("split", *_EXPOSED), _reason(summaries)))
    split = WorkerSplit(
        rank=-1,
        step_ms=statistics.fmean(one.step_ms for one in splits),
        **{name: known_mean(getattr(one, name) for one in splits) for name in _PARTS},
    )
    exposed_ms = tuple(one.exposed_ms for one in splits if one.exposed_ms is not None)
    if len(exposed_ms) < len(splits):
        return RepeatedSplit(split=split, missing=dict.fromkeys(_EXPOSED, _reason(summaries)))
    late_ms = _late_ms(summaries)
    return RepeatedSplit(
        split=split,
        exposed_ms=exposed_ms,
        exposed_share=statistics.fmean(exposed_ms) / split.step_ms,
        stragglers=tuple(sorted(late_ms, key=lambda node: -late_ms[node])),
        late_ms=max(late_ms.values(), default=0.0),
    )


def _is_plausible(split: WorkerSplit) -> bool:
    parts = [value for name in _PARTS if (value := getattr(split, name)) is not None]
    return _SHORTEST_MS <= split.step_ms <= _LONGEST_MS and all(abs(value) <= _LONGEST_MS for value in parts)


def _late_ms(summaries: Sequence[Summary]) -> dict[str, float]:
    late_ms: dict[str, float] = {}
    for straggler in (straggler for summary in summaries for straggler in summary.stragglers):
        if 0 <= straggler.late_ms <= _LONGEST_MS:
            late_ms[straggler.node] = late_ms.get(straggler.node, 0.0) + straggler.late_ms / len(summaries)
    return late_ms


def _reason(summaries: Iterable[Summary]) -> str:
    told = (reason for one in summaries if (reason := one.split.missing.get("exposed_ms")))
    return next(told, "its steps were not split")
