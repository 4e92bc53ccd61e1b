"""Likely causes: what slows a machine or its GPUs, beside its peers or by itself (disturbances). Pure.

A cause has figures of both sides: what is the same everywhere makes nobody slow. A disturbance marks a figure as
measured under conditions that another time may not have.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from multinode.analyse.stats.spread import known_max, known_median
from multinode.analyse.telemetry.gpus import GpuUse
from multinode.analyse.telemetry.machine_use import NodeUse

__all__ = ["THROTTLES", "Beside", "LikelyCause", "Throttle", "compare_machines", "find_disturbances"]

# Of another GPU's clocks. Where they are as fast, a power cap costs nothing.
_SLOWER_CLOCK = 0.95
# Parts of the time. Sampled at 1 Hz over some tens of seconds, a tenth is a few samples: less is noise.
_THROTTLED_MORE = 0.1
_THROTTLED = 0.05
_HOT_C = 85
_LITTLE_MEMORY_GIB = 1.0
_OTHERS_PERCENT = 25


class LikelyCause(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that may make a machine slow: cause and hint as Straggler has them, and a sentence with figures."""

    cause: str
    sentence: str
    hint: str


class _Condition(msgspec.Struct, frozen=True, kw_only=True):
    """A figure of a machine that is the larger the slower it is. Sentences take node, they, mine, theirs and limit."""

    figure: str  # Of NodeUse, or of what else has fields of these names.
    more: float = math.inf  # Than the peers' median, to be a cause.
    beyond: float = math.inf  # To be a disturbance.
    cause: str = ""
    beside: str = ""
    unlike: str = ""  # Where no peer has the figure; without it, that is no cause.
    hint: str = ""
    alone: str = ""


_PROCESSORS = (
    _Condition(
        figure="throttled_share",
        more=0.1,
        beyond=0.02,
        cause="cpu",
        beside="CPU throttled (cgroup) on {node}{limit} for {mine:.0%} of the time, on {they} for {theirs:.0%}",
        unlike="CPU throttled (cgroup) on {node}{limit} for {mine:.0%} of the time, no limit on {they}",
        hint="raise the CPU limit of the job on {node}: CPUQuota= of systemd, --cpus of docker, limits.cpu of a "
        "pod, --cpus-per-task of Slurm",
        alone="CPU throttled (cgroup) for {mine:.0%} of the time",
    ),
    _Condition(
        figure="cpu_steal_percent",
        more=5,
        beyond=2,
        cause="cpu",
        beside="CPU steal {mine:.0f} % on {node}, {theirs:.0f} % on {they}",
        hint="{node} shares its CPUs with other virtual machines: give it dedicated ones, or leave it out",
        alone="CPU steal {mine:.0f}%",
    ),
)
_REST = (
    _Condition(
        figure="cpu_iowait_percent",
        more=10,
        cause="disk",
        beside="iowait {mine:.0f} % on {node}, {theirs:.0f} % on {they}",
        hint="see which disk it is: ssh {node} iostat -x 1 5",
    ),
    _Condition(
        figure="retransmitted_share",
        beyond=0.001,
        alone="TCP retransmits: {mine:.2%} of the segments that it sent",
    ),
)


class Throttle(msgspec.Struct, frozen=True, kw_only=True):
    """What throttles a GPU's clocks: a word in NVML's names of the reasons, and ours for it."""

    cause: str
    reason: str
    what: str
    hint: str

    def share(self, gpu: GpuUse) -> float:
        """Part of the time in which it throttled the clocks."""
        return max((share for reason, share in gpu.throttle.items() if self.reason in reason), default=0.0)


THROTTLES = (
    Throttle(
        cause="gpu_heat",
        reason="thermal",
        what="heat",
        hint="cool it better: fans, dust, the GPUs next to it; see ssh {node} nvidia-smi -q -d TEMPERATURE,PERFORMANCE",
    ),
    Throttle(
        cause="gpu_power",
        reason="power",
        what="a power limit",
        hint="compare the power limits: ssh {node} nvidia-smi -q -d POWER,PERFORMANCE",
    ),
)


class Beside(msgspec.Struct, frozen=True, kw_only=True):
    """A slow machine beside others.

    Attributes:
        they: the others in words.
        use: as NodeUse, or with some of its fields; likewise `others`.
        gpus: those of it that are looked at; `peers` those that they are compared with.
        clocks_tell: whether what holds clocks down delays nobody where they are as fast.
    """

    node: str
    they: str
    use: object
    others: Sequence[object]
    gpus: Sequence[GpuUse]
    peers: Sequence[GpuUse]
    clocks_tell: bool = True


def compare_machines(beside: Beside) -> Iterator[LikelyCause]:
    """What differs, the best evidence first."""
    node, they = beside.node, beside.they
    yield from _compare(_PROCESSORS, beside)
    yield from _compare_gpus(beside)
    yield from _compare(_REST, beside)
    left, left_there = _figure(beside.use, "memory_available_gib"), _median_of(beside.others, "memory_available_gib")
    if left is not None and left_there is not None and left < _LITTLE_MEMORY_GIB <= left_there:
        yield LikelyCause(
            cause="memory",
            sentence=f"{node} had {left:.2f} GiB of memory left, {they} {left_there:.2f} GiB",
            hint=f"see what uses it, and whether it swaps: ssh {node} 'free -h; ps aux --sort=-rss | head'; what "
            "a container may use is not in `free`, but in multinode check",
        )


def find_disturbances(repeats: Sequence[Sequence[NodeUse]], cores: Mapping[str, int]) -> tuple[str, ...]:
    """Other load, thermals and losses that were seen on the nodes of repeated runs; of the same, the strongest.

    Args:
        repeats: what the nodes of each run did.
        cores: processors of each node, by its name; of others, load beside the job's is not known.
    """
    strongest: dict[tuple[str, str], tuple[float, str]] = {}
    for use in (use for uses in repeats for use in uses):
        for kind, strength, words in _disturbances(use, cores.get(use.node)):
            seen = (strength if math.isfinite(strength) else 0.0, f"{use.node}: {words}")
            strongest[use.node, kind] = max(strongest.get((use.node, kind), seen), seen, key=lambda one: one[0])
    return tuple(sentence for _, sentence in strongest.values())


def _compare(conditions: Iterable[_Condition], beside: Beside) -> Iterator[LikelyCause]:
    quota = _figure(beside.use, "quota_cores")
    words = {
        "node": beside.node,
        "they": beside.they,
        "limit": f" ({quota:.2f} cores)" if quota is not None else "",
    }
    for one in conditions:
        figure, there = _figure(beside.use, one.figure), _median_of(beside.others, one.figure)
        sentence = one.unlike if there is None and beside.others else one.beside if there is not None else ""
        if figure is not None and sentence and figure >= (there or 0.0) + one.more:
            text = sentence.format(mine=figure, theirs=there, **words)
            yield LikelyCause(cause=one.cause, sentence=text, hint=one.hint.format(**words))


def _compare_gpus(beside: Beside) -> Iterator[LikelyCause]:
    """Clocks and NVML's reasons for them: a power cap that costs no clocks, or is reached everywhere, delays nobody."""
    node, they, gpus, peers = beside.node, beside.they, beside.gpus, beside.peers
    if not peers:
        return
    slowest = min(gpus, key=lambda gpu: math.inf if gpu.sm_clock_mhz is None else gpu.sm_clock_mhz, default=None)
    clock = slowest.sm_clock_mhz if slowest is not None else None
    clock_there = known_median(gpu.sm_clock_mhz for gpu in peers)
    hot, hot_there = known_max(gpu.temperature_c for gpu in gpus), known_median(gpu.temperature_c for gpu in peers)
    degrees = f" ({hot:.0f} C and {hot_there:.0f} C)" if hot is not None and hot_there is not None else ""
    slower = None if clock is None or clock_there is None else clock < _SLOWER_CLOCK * clock_there
    for one in THROTTLES if slower is not False or not beside.clocks_tell else ():
        held, held_there = max(map(one.share, gpus), default=0.0), statistics.median(map(one.share, peers))
        if held >= held_there + _THROTTLED_MORE:
            yield LikelyCause(
                cause=one.cause,
                sentence=f"clocks of a GPU of {node} throttled ({one.what}) for {held:.0%} of the time, of {they} for "
                f"{held_there:.0%}{degrees}",
                hint=one.hint.format(node=node),
            )
    if slower and slowest is not None:
        most = f" of {slowest.sm_clock_max_mhz:.0f}" if slowest.sm_clock_max_mhz is not None else ""
        yield LikelyCause(
            cause="gpu_clocks",
            sentence=f"GPU {slowest.index} of {node} ran at {clock:.0f}{most} MHz, {they} at {clock_there:.0f} MHz",
            hint=f"see what throttles its clocks: ssh {node} nvidia-smi -q -d CLOCK,PERFORMANCE",
        )
    wide = next((gpu for gpu in peers if gpu.pcie is not None and not gpu.pcie_reduced), None)
    narrow = next((gpu for gpu in gpus if wide is not None and gpu.is_narrower(wide)), None)
    if wide is not None and narrow is not None:
        yield LikelyCause(
            cause="pcie",
            sentence=f"GPU {narrow.index} of {node} had PCIe {narrow.pcie}, {they} {wide.pcie}",
            hint="reseat the GPU, or give it a slot with all lanes; see "
            f"ssh {node} nvidia-smi --query-gpu=index,pcie.link.width.current,pcie.link.width.max --format=csv",
        )


def _disturbances(use: NodeUse, cores: int | None) -> Iterator[tuple[str, float, str]]:
    """Kind, strength in a unit of its own, and words."""
    for one in (*_PROCESSORS, *_REST):
        figure = _figure(use, one.figure)
        if figure is not None and figure > one.beyond:
            yield one.figure, figure, one.alone.format(mine=figure)
    if use.cpu_busy_percent is not None and use.job_cores is not None and cores:
        others = use.cpu_busy_percent - 100 * use.job_cores / cores
        if others > _OTHERS_PERCENT:
            words = f"other processes used {others:.0f}% of its {cores} CPU cores"
            yield "load", others, words
    for gpu in use.gpus:
        if gpu.temperature_c is not None and gpu.temperature_c >= _HOT_C:
            yield f"heat {gpu.index}", gpu.temperature_c, f"its GPU {gpu.index} reached {gpu.temperature_c:.0f} C"
        for reason, part in gpu.throttle.items():
            if part >= _THROTTLED and any(one.reason in reason for one in THROTTLES):
                words = f"clocks of its GPU {gpu.index} throttled ({reason}) for {part:.0%} of the time"
                yield f"{reason} {gpu.index}", part, words


def _figure(use: object, name: str) -> float | None:
    value: float | None = getattr(use, name, None)
    return value


def _median_of(uses: Iterable[object], name: str) -> float | None:
    return known_median(_figure(use, name) for use in uses)
