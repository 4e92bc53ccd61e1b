"""Disturbances: other load, thermals and losses that were seen on the nodes of a run, a sentence each. Pure.

They mark a figure as measured under conditions that another time may not have. What they cost is not said here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from multinode.analyse.steps.summary import Summary
from multinode.analyse.telemetry.gpus import GpuUse
from multinode.analyse.telemetry.machine_use import NodeUse

__all__ = ["find_disturbances"]

_STOLEN_PERCENT = 2
_OTHERS_PERCENT = 25
# Parts: of the window, of the samples of a GPU, of the segments sent.
_HELD = 0.02
_THROTTLED = 0.05
_RETRANSMITTED = 0.001
_HOT_C = 85
_SLOWING = ("thermal", "power")


class _Seen(msgspec.Struct, frozen=True, kw_only=True):
    """One disturbance: on which node, of which kind, how strong in its own unit, and in words."""

    node: str
    kind: str
    strength: float
    sentence: str


def find_disturbances(summaries: Sequence[Summary], cores: Mapping[str, int]) -> tuple[str, ...]:
    """What disturbed these runs; of repeats that saw the same, the strongest.

    Args:
        summaries: of the runs.
        cores: processors of each node, by its name; of others, load beside the job's cannot be told.
    """
    strongest: dict[tuple[str, str], _Seen] = {}
    for use in (use for summary in summaries for use in summary.nodes):
        for seen in (*_processors(use, cores.get(use.node)), *_network(use), *_gpus(use)):
            key = (seen.node, seen.kind)
            if key not in strongest or seen.strength > strongest[key].strength:
                strongest[key] = seen
    return tuple(seen.sentence for seen in strongest.values())


def _processors(use: NodeUse, cores: int | None) -> Iterator[_Seen]:
    stolen = use.cpu_steal_percent
    if stolen is not None and stolen > _STOLEN_PERCENT:
        yield _seen(use, "steal", stolen, f"its hypervisor took {stolen:.0f}% of its processor time for others")
    if use.cpu_busy_percent is not None and use.job_cores is not None and cores:
        others = use.cpu_busy_percent - 100 * use.job_cores / cores
        if others > _OTHERS_PERCENT:
            words = f"other processes kept {others:.0f}% of its {cores} processors busy beside the training"
            yield _seen(use, "load", others, words)
    held = use.throttled_share
    if held is not None and held > _HELD:
        yield _seen(use, "quota", held, f"its cgroup held its processors back for {held:.0%} of the time")


def _network(use: NodeUse) -> Iterator[_Seen]:
    again = use.retransmitted_share
    if again is not None and again > _RETRANSMITTED:
        yield _seen(use, "retransmissions", again, f"{again:.2%} of the TCP segments that it sent were sent again")


def _gpus(use: NodeUse) -> Iterator[_Seen]:
    for gpu in use.gpus:
        hot = gpu.temperature_c
        if hot is not None and hot >= _HOT_C:
            yield _seen(use, f"heat {gpu.index}", hot, f"its GPU {gpu.index} was {hot:.0f} C hot")
        yield from _throttled(use, gpu)


def _throttled(use: NodeUse, gpu: GpuUse) -> Iterator[_Seen]:
    for reason, part in gpu.throttle.items():
        if part >= _THROTTLED and any(word in reason for word in _SLOWING):
            words = f"{reason} held the clocks of its GPU {gpu.index} down for {part:.0%} of the time"
            yield _seen(use, f"{reason} {gpu.index}", part, words)


def _seen(use: NodeUse, kind: str, strength: float, words: str) -> _Seen:
    return _Seen(
        node=use.node, kind=kind, strength=strength if math.isfinite(strength) else 0.0, sentence=f"{use.node}: {words}"
    )
