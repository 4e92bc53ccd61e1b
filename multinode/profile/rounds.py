"""Rounds of averaging between nodes: frequency, bytes, time and drift, over the measured steps. Pure."""

from __future__ import annotations

import statistics

import msgspec

from multinode.profile.observed import Observed
from multinode.records.samples import SyncSample


class Rounds(msgspec.Struct, frozen=True, kw_only=True):
    """The measured rounds of a training that averages every H steps."""

    every: int  # H, optimizer steps per round
    dtype: str | None = None  # of changes on the wire; None sends the parameters unchanged
    outer_lr: float | None = None  # of DiLoCo's outer optimizer; None is local SGD. `momentum` likewise.
    momentum: float = 0.0
    rounds: int = 0  # measured rounds; `early` of them were closed early by a checkpoint or evaluation
    early: int = 0
    steps: float | None = None  # per round, on average; None if none was measured
    sync_ms: float | None = None  # median time of averaging, including waits for slower nodes
    size_bytes: float | None = None  # S of a round's all-reduces between nodes
    # norm of the difference between a node's parameters and the mean, of the node that drifted most; median of the
    # rounds. `last_drift` of the last round.
    drift: float | None = None
    last_drift: float | None = None


def see_rounds(observed: Observed) -> Rounds | None:
    """The measured rounds; None without averaging."""
    told = observed.averaging
    if told is None:
        return None
    found = Rounds(every=told.every, dtype=told.dtype, outer_lr=told.outer_lr, momentum=told.momentum)
    measured = set(observed.counted)
    syncs: dict[int, list[SyncSample]] = {}
    for node in observed.nodes:
        for sync in node.of(SyncSample):
            if sync.step in measured and sync.rank in node.ranks and sync.drift is not None:
                syncs.setdefault(sync.step, []).append(sync)
    if not syncs:
        return found
    rounds = [syncs[step] for step in sorted(syncs)]
    drifts = [max(one.drift or 0.0 for one in nodes) for nodes in rounds]
    return msgspec.structs.replace(
        found,
        rounds=len(rounds),
        early=sum(nodes[0].reason != "round" for nodes in rounds),
        steps=statistics.fmean(nodes[0].steps for nodes in rounds),
        sync_ms=statistics.median(statistics.median(one.sync_us for one in nodes) for nodes in rounds) / 1000,
        size_bytes=statistics.fmean(max(one.size_bytes for one in nodes) for nodes in rounds),
        drift=statistics.median(drifts),
        last_drift=drifts[-1],
    )


def round_times_ms(observed: Observed, times_ms: list[float]) -> list[float]:
    """Mean step of each measured round; without rounds, the times of the measured steps."""
    ends = set(observed.syncs)
    rounds: list[list[float]] = [[]]
    for number, time_ms in zip(observed.counted, times_ms, strict=True):
        rounds[-1].append(time_ms)
        if number in ends:
            rounds.append([])
    return [statistics.fmean(one) for one in rounds if one] if ends else times_ms
