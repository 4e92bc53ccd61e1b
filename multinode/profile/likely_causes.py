"""Likely causes of a slow machine or GPU, relative to its peers or on its own (disturbances). Pure.

A cause has figures of both sides: what is the same everywhere slows nobody. A disturbance marks a figure as measured
under conditions that may not repeat.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from multinode.findings.finding import Finding
from multinode.findings.rule import Rule, RuleGroup
from multinode.profile.figures import LikelyCause, Peers
from multinode.profile.machine_use import GpuUse, NodeUse
from multinode.stats.estimate import known_max, known_median
from multinode.stats.unknown import Unknown, or_none

# Relative to another GPU's clocks: a power cap at equal clocks costs nothing.
_SLOWER_CLOCK = 0.95
# Fractions of time. At 1 Hz over some tens of seconds, a tenth is a few samples: less is noise.
_THROTTLED_MORE = 0.1
_THROTTLED = 0.05
_HOT_C = 85
_LITTLE_MEMORY_GIB = 1.0
_OTHERS_PERCENT = 25


_RAISE_CPU_LIMIT = (
    "raise the job's CPU limit on {node!s}: CPUQuota= (systemd), --cpus (docker), limits.cpu (Kubernetes), "
    "--cpus-per-task (Slurm)"
)


class CauseRule(Rule, frozen=True, kw_only=True):
    """One kind of likely cause. Its words may refer to the peers as `{they}`."""

    cause: str  # as in `LikelyCause`

    def found(self, on: str | None, /, **values: object) -> LikelyCause:
        """As of any rule, of a node that has no peers."""
        return LikelyCause(**self.fields(on, values), cause=self.cause)


class CauseRules(RuleGroup):
    """Rules of likely causes."""

    def cause(self, code: str, *, cause: str = "", **words: Any) -> CauseRule:
        """Declare one with the words of a rule; its cause is its code if none is given."""
        return self.add(CauseRule(code=code, cause=cause or code, **words))


CAUSES = CauseRules("Likely causes: a machine compared with its peers")
_CPU_THROTTLED = CAUSES.cause(
    "throttled_share",
    cause="cpu",
    about="a CPU limit that throttles the node more than its peers",
    message="a cgroup CPU limit{limit} throttled the job on {node} for {throttled_share:.0%} of the time, compared "
    "with {peers_throttled_share:.0%} on {they}",
    hint=_RAISE_CPU_LIMIT,
    figures=("quota_cores", "throttled_share", "peers_throttled_share"),
)
_CPU_THROTTLED_ALONE = CAUSES.cause(
    "throttled_share_alone",
    cause="cpu",
    about="a CPU limit that throttles the node, while its peers have no limit",
    message="a cgroup CPU limit{limit} throttled the job on {node} for {throttled_share:.0%} of the time, but there "
    "is no such limit on {they}",
    hint=_RAISE_CPU_LIMIT,
    figures=("quota_cores", "throttled_share"),
)
_CPU_STEAL = CAUSES.cause(
    "cpu_steal_percent",
    cause="cpu",
    about="CPU time that the hypervisor gives to other virtual machines",
    message="CPU steal was {cpu_steal_percent:.0f}% on {node}, compared with {peers_cpu_steal_percent:.0f}% on {they}",
    hint="{node!s} shares its CPUs with other virtual machines: give it dedicated CPUs, or exclude it",
    figures=("cpu_steal_percent", "peers_cpu_steal_percent"),
)
_IOWAIT = CAUSES.cause(
    "cpu_iowait_percent",
    cause="disk",
    about="CPUs that wait for a disk",
    message="iowait was {cpu_iowait_percent:.0f}% on {node}, compared with {peers_cpu_iowait_percent:.0f}% on {they}",
    hint="find the disk that causes the wait: ssh {node} iostat -x 1 5",
    figures=("cpu_iowait_percent", "peers_cpu_iowait_percent"),
)
_LITTLE_MEMORY = CAUSES.cause(
    "little_memory",
    cause="memory",
    about="a node with very little free memory, while its peers have more",
    message="{node} had {memory_available_gib:.2f} GiB of free memory, compared with {peers_memory_available_gib:.2f} "
    "GiB on {they}",
    hint="find out what uses the memory and whether the node swaps: ssh {node} 'free -h; ps aux --sort=-rss | head'; "
    "to see the memory limit of a container, which `free` does not show: multinode check",
    figures=("memory_available_gib", "peers_memory_available_gib"),
)
_THROTTLED_FIGURES = ("throttled_share", "peers_throttled_share", "temperature_c", "peers_temperature_c")
_HEAT = CAUSES.cause(
    "gpu_heat",
    about="a GPU that is throttled by heat more than its peers",
    message="heat throttled a GPU on {node} for {throttled_share:.0%} of the time, compared with "
    "{peers_throttled_share:.0%} on {they}{degrees}",
    hint=(
        "improve the cooling of the GPU (fans, dust, adjacent GPUs); to watch its temperature: ssh {node} "
        "nvidia-smi -q -d TEMPERATURE,PERFORMANCE"
    ),
    figures=_THROTTLED_FIGURES,
)
_POWER = CAUSES.cause(
    "gpu_power",
    about="a GPU that is throttled by a power limit more than its peers",
    message="a power limit throttled a GPU on {node} for {throttled_share:.0%} of the time, compared with "
    "{peers_throttled_share:.0%} on {they}{degrees}",
    hint="compare the power limits: ssh {node} nvidia-smi -q -d POWER,PERFORMANCE",
    figures=_THROTTLED_FIGURES,
)
_CLOCKS = CAUSES.cause(
    "gpu_clocks",
    about="a GPU with lower clocks than its peers",
    message="GPU {gpu} on {node} ran at {sm_clock_mhz:.0f}{most} MHz, compared with {peers_sm_clock_mhz:.0f} MHz on "
    "{they}",
    hint="find out what lowers the clocks of the GPU: ssh {node} nvidia-smi -q -d CLOCK,PERFORMANCE",
    figures=("gpu", "sm_clock_mhz", "sm_clock_max_mhz", "peers_sm_clock_mhz"),
)
_PCIE = CAUSES.cause(
    "pcie",
    about="a GPU with a narrower PCIe link than its peers",
    message="GPU {gpu} on {node} had a PCIe link of {pcie}, compared with {peers_pcie} on {they}",
    hint="reseat the GPU, or use a slot with all lanes; to see the link width: ssh {node} nvidia-smi "
    "--query-gpu=index,pcie.link.width.current,pcie.link.width.max --format=csv",
    figures=("gpu", "pcie", "peers_pcie"),
)


DISTURBANCES = RuleGroup("Disturbances of a measurement")
_THROTTLED_ANYWAY = DISTURBANCES.rule(
    "throttled_share",
    about="a CPU limit",
    message="{node}: a cgroup CPU limit throttled the job for {throttled_share:.0%} of the time",
    figures=("throttled_share",),
)
_STOLEN = DISTURBANCES.rule(
    "cpu_steal_percent",
    about="CPU time that the hypervisor gave to other virtual machines",
    message="{node}: CPU steal was {cpu_steal_percent:.0f}%",
    figures=("cpu_steal_percent",),
)
_RETRANSMITTED = DISTURBANCES.rule(
    "retransmitted_share",
    about="packets that the network lost",
    message="{node}: TCP retransmitted {retransmitted_share:.2%} of the segments it sent",
    figures=("retransmitted_share",),
)
_OTHER_LOAD = DISTURBANCES.rule(
    "other_load",
    about="processes that do not belong to the job",
    message="{node}: other processes used {others_percent:.0f}% of its {node_cores} CPU cores",
    figures=("others_percent", "node_cores"),
)
_HOT = DISTURBANCES.rule(
    "heat",
    about="a hot GPU",
    message="{node}: GPU {gpu} reached {temperature_c:.0f} C",
    figures=("gpu", "temperature_c"),
)
_THROTTLED_CLOCKS = DISTURBANCES.rule(
    "throttled_clocks",
    about="a GPU throttled by heat or a power limit",
    message="{node}: GPU {gpu} was throttled ({reason}) for {throttled_share:.0%} of the time",
    figures=("gpu", "reason", "throttled_share"),
)


class _Condition(msgspec.Struct, frozen=True, kw_only=True):
    """A figure of a machine that is larger the slower it is."""

    figure: str  # Of NodeUse, or of what else has fields of these names.
    more: float = math.inf  # Than the peers' median, to be a cause.
    beyond: float = math.inf  # To be a disturbance.
    rule: CauseRule | None = None  # Of the cause.
    alone: CauseRule | None = None  # Where no peer has the figure; None where it is no cause then.
    disturbance: Rule | None = None  # None where it is none.


_PROCESSORS = (
    _Condition(
        figure="throttled_share",
        more=0.1,
        beyond=0.02,
        rule=_CPU_THROTTLED,
        alone=_CPU_THROTTLED_ALONE,
        disturbance=_THROTTLED_ANYWAY,
    ),
    _Condition(figure="cpu_steal_percent", more=5, beyond=2, rule=_CPU_STEAL, disturbance=_STOLEN),
)
_REST = (
    _Condition(figure="cpu_iowait_percent", more=10, rule=_IOWAIT),
    _Condition(figure="retransmitted_share", beyond=0.001, disturbance=_RETRANSMITTED),
)


class Throttle(msgspec.Struct, frozen=True, kw_only=True):
    """A reason for throttled GPU clocks."""

    reasons: frozenset[str]  # NVML's names of it
    rule: CauseRule  # where it throttles a GPU more than its peers

    def share(self, gpu: GpuUse) -> float:
        """Fraction of time in which it throttled the clocks."""
        return max((share for reason, share in gpu.throttle.items() if reason in self.reasons), default=0.0)


HEAT = Throttle(reasons=frozenset({"sw_thermal_slowdown", "hw_thermal_slowdown"}), rule=_HEAT)
POWER_LIMIT = Throttle(reasons=frozenset({"sw_power_cap", "hw_power_brake_slowdown"}), rule=_POWER)
THROTTLES = (HEAT, POWER_LIMIT)


class Beside(msgspec.Struct, frozen=True, kw_only=True):
    """A slow machine and its peers."""

    node: str
    they: Peers  # the peers
    use: object  # as in NodeUse, or some of its fields; also `others`
    others: Sequence[object]
    gpus: Sequence[GpuUse]  # its GPUs in question; `peers` are those to compare with
    peers: Sequence[GpuUse]
    clocks_tell: bool = True  # whether a limit on clocks matters only if they are slower than the peers'
    write_hint: Callable[[str], str] = str  # adapts a hint to the way the node is reached

    def cause(self, rule: CauseRule, **values: object) -> LikelyCause:
        """A cause with these values."""
        found = rule.found(self.node, they=str(self.they), **values)
        return msgspec.structs.replace(found, peers=self.they, hint=self.write_hint(found.hint or "") or None)


def compare_machines(beside: Beside) -> Iterator[LikelyCause]:
    """The differences, the best evidence first."""
    yield from _compare(_PROCESSORS, beside)
    yield from _compare_gpus(beside)
    yield from _compare(_REST, beside)
    left, left_there = _figure(beside.use, "memory_available_gib"), _median_of(beside.others, "memory_available_gib")
    if left is not None and left_there is not None and left < _LITTLE_MEMORY_GIB <= left_there:
        yield beside.cause(_LITTLE_MEMORY, memory_available_gib=left, peers_memory_available_gib=left_there)


def find_disturbances(repeats: Sequence[Sequence[NodeUse]], cores: Mapping[str, int]) -> tuple[Finding, ...]:
    """Other load, thermals and losses on the nodes of repeated runs; the strongest of each.

    Args:
        repeats: use of the nodes in each run.
        cores: processors by node; for other nodes, load beyond the job's is unknown.
    """
    strongest: dict[object, tuple[float, Finding]] = {}
    for use in (use for uses in repeats for use in uses):
        for strength, finding in _disturbances(use, cores.get(use.node)):
            alike = (use.node, finding.code, finding.figures.get("gpu"), finding.figures.get("reason"))
            seen = (strength if math.isfinite(strength) else 0.0, finding)
            strongest[alike] = max(strongest.get(alike, seen), seen, key=lambda pair: pair[0])
    return tuple(finding for _, finding in strongest.values())


def _compare(conditions: Iterable[_Condition], beside: Beside) -> Iterator[LikelyCause]:
    for condition in conditions:
        figure, there = _figure(beside.use, condition.figure), _median_of(beside.others, condition.figure)
        rule = condition.rule if there is not None else condition.alone if beside.others else None
        if figure is not None and rule is not None and figure >= (there or 0.0) + condition.more:
            quota = _figure(beside.use, "quota_cores") if condition.alone else None
            limit = f" ({quota:.2f} cores)" if quota is not None else ""
            yield beside.cause(
                rule, limit=limit, quota_cores=quota, **{condition.figure: figure, f"peers_{condition.figure}": there}
            )


def _compare_gpus(beside: Beside) -> Iterator[LikelyCause]:
    gpus, peers = beside.gpus, beside.peers
    if not peers:
        return
    slowest = min(gpus, key=lambda gpu: math.inf if gpu.sm_clock_mhz is None else gpu.sm_clock_mhz, default=None)
    clock = slowest.sm_clock_mhz if slowest is not None else None
    clock_there = known_median(gpu.sm_clock_mhz for gpu in peers)
    hot, hot_there = known_max(gpu.temperature_c for gpu in gpus), known_median(gpu.temperature_c for gpu in peers)
    slower = None if clock is None or clock_there is None else clock < _SLOWER_CLOCK * clock_there
    degrees = f" ({hot:.0f} C and {hot_there:.0f} C)" if hot is not None and hot_there is not None else ""
    for throttle in THROTTLES if slower is not False or not beside.clocks_tell else ():
        held, held_there = max(map(throttle.share, gpus), default=0.0), statistics.median(map(throttle.share, peers))
        if held >= held_there + _THROTTLED_MORE:
            yield beside.cause(
                throttle.rule,
                throttled_share=held,
                peers_throttled_share=held_there,
                degrees=degrees,
                temperature_c=hot,
                peers_temperature_c=hot_there,
            )
    if slower and slowest is not None:
        most = f" of {slowest.sm_clock_max_mhz:.0f}" if slowest.sm_clock_max_mhz is not None else ""
        yield beside.cause(
            _CLOCKS,
            gpu=slowest.index,
            sm_clock_mhz=clock,
            most=most,
            sm_clock_max_mhz=slowest.sm_clock_max_mhz,
            peers_sm_clock_mhz=clock_there,
        )
    wide = next((gpu for gpu in peers if gpu.pcie is not None and not gpu.pcie_reduced), None)
    narrow = next((gpu for gpu in gpus if wide is not None and gpu.is_narrower(wide)), None)
    if wide is not None and narrow is not None:
        yield beside.cause(_PCIE, gpu=narrow.index, pcie=narrow.pcie, peers_pcie=wide.pcie)


def _disturbances(use: NodeUse, cores: int | None) -> Iterator[tuple[float, Finding]]:
    """With how strong each is."""
    node = use.node
    for condition in (*_PROCESSORS, *_REST):
        figure = _figure(use, condition.figure)
        if figure is not None and condition.disturbance is not None and figure > condition.beyond:
            yield figure, condition.disturbance.found(node, **{condition.figure: figure})
    busy, job_cores = or_none(use.cpu_busy_percent), or_none(use.job_cores)
    if busy is not None and job_cores is not None and cores:
        others = busy - 100 * job_cores / cores
        if others > _OTHERS_PERCENT:
            yield others, _OTHER_LOAD.found(node, others_percent=others, node_cores=cores)
    for gpu in use.gpus:
        heat = gpu.temperature_c
        if heat is not None and heat >= _HOT_C:
            yield heat, _HOT.found(node, gpu=gpu.index, temperature_c=heat)
        for reason, part in gpu.throttle.items():
            if part >= _THROTTLED and any(reason in throttle.reasons for throttle in THROTTLES):
                yield part, _THROTTLED_CLOCKS.found(node, gpu=gpu.index, reason=reason, throttled_share=part)


def _figure(use: object, name: str) -> float | None:
    value: float | Unknown | None = getattr(use, name, None)
    return or_none(value)


def _median_of(uses: Iterable[object], name: str) -> float | None:
    return known_median(_figure(use, name) for use in uses)
