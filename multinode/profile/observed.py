"""Observed: the records of one run, read from its directory and sorted for the analysis.

`find_steady_state` decides the measured steps; nothing is averaged here.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from multinode.records.plan import LaunchPlan
from multinode.records.run_directory import RunDirectory
from multinode.records.sample_files import EvenStretches
from multinode.records.samples import (
    AveragingSample,
    DdpSample,
    DeviceWaitSample,
    EvaluationSample,
    LossSample,
    Sample,
    StepSample,
    SyncSample,
    TraceSample,
    WorkerSample,
    parse_samples,
)
from multinode.units import format_size

LOOPBACK = "lo"
# NCCL connects lazily and DDP rebuilds its buckets after the first iteration: at least five steps.
_LEAST_DROPPED = 5
_STABLE_WITHIN = 1.5
_SHARE_DROPPED = 1 / 3


class SteadyState(msgspec.Struct, frozen=True, kw_only=True):
    """The measured steps."""

    first: int  # index of the first measured step
    count: int
    rule: str  # why, in words


def find_steady_state(step_times_us: Sequence[float]) -> SteadyState:
    """Drop the first 5 steps (of fewer than 15: a third), and further ones above 1.5 times the median of the rest.

    At most a third is dropped; at least one step is measured if there is one.
    """
    total = len(step_times_us)
    most = int(total * _SHARE_DROPPED)
    first = min(_LEAST_DROPPED, most)
    if total - first > 0:
        limit = _STABLE_WITHIN * statistics.median(step_times_us[first:])
        while first < most and step_times_us[first] > limit:
            first += 1
    return SteadyState(
        first=first, count=total - first, rule=f"the first {first} of {total} steps are excluded as warm-up"
    )


def steps_to_run(counted: int) -> int:
    """Steps that a training needs for this many measured ones, without slow steps."""
    total = counted
    while total - min(_LEAST_DROPPED, int(total * _SHARE_DROPPED)) < counted:
        total += 1
    return total


_Kind = TypeVar("_Kind")
# Records of single steps. Records of models and groups may hold for the next training.
_OF_STEPS = (StepSample, LossSample, EvaluationSample, DdpSample, DeviceWaitSample, SyncSample, TraceSample)


class ObservedNode(msgspec.Struct, frozen=True, kw_only=True):
    """The records of one node."""

    name: str
    node_rank: int
    ranks: tuple[int, ...]  # global ranks of its workers
    ifname: str | None = None  # its data-plane interface; None if unknown
    ifnames: tuple[str, ...] = ()  # all interfaces of the hostfile, if several
    link_gbit_per_s: float | None = None  # reported rate of the interface; None if unknown
    samples: tuple[Sample, ...] = ()  # in the order of their files

    def of(self, kind: type[_Kind]) -> list[_Kind]:
        """Its samples of one kind."""
        return [sample for sample in self.samples if isinstance(sample, kind)]


class Observed(msgspec.Struct, frozen=True, kw_only=True):
    """The records of all nodes."""

    run_id: str
    world_size: int
    nodes: tuple[ObservedNode, ...]  # in node-rank order; of a restarted worker, records since the restart
    recorded: int  # number of recorded steps, including those not read
    steps: dict[int, dict[int, StepSample]]  # records by rank, by step number, ascending
    counted: tuple[int, ...]  # numbers of the measured steps, ascending; those in `steps` with a time
    rule: str  # which these are, in words
    # measured steps in which nodes averaged their parameters; the measured steps then cover whole rounds
    syncs: tuple[int, ...] = ()
    write_hint: Callable[[str], str] = str  # adapts a hint to the way its node is reached

    def of(self, kind: type[_Kind]) -> list[_Kind]:
        """Samples of one kind, of all nodes."""
        return [sample for node in self.nodes for sample in node.of(kind)]

    @property
    def averaging(self) -> AveragingSample | None:
        """How nodes average, from the lowest rank that reports it; None if at each step."""
        return min(self.of(AveragingSample), key=lambda sample: sample.rank, default=None)

    @property
    def shared_interfaces(self) -> tuple[tuple[int, ...], ...]:
        """Indices of the nodes that count the traffic of one interface, for each interface that several count.

        Loopback joins processes of one network namespace alone.
        """
        sharing: dict[tuple[str | None, str], list[int]] = {}
        for index, node in enumerate(self.nodes):
            network = next((sample.network for sample in node.of(WorkerSample) if sample.network), None)
            if node.ifname is not None and (network is not None or node.ifname == LOOPBACK):
                sharing.setdefault((None if node.ifname == LOOPBACK else network, node.ifname), []).append(index)
        return tuple(tuple(indices) for indices in sharing.values() if len(indices) > 1)

    @property
    def node_of(self) -> dict[int, int]:
        """Index of the node of each worker, by rank."""
        return {rank: index for index, node in enumerate(self.nodes) for rank in node.ranks}

    @property
    def counted_steps(self) -> list[dict[int, StepSample]]:
        """Records of the measured steps, by rank."""
        return [self.steps[number] for number in self.counted]


def observe(run_id: str, nodes: Sequence[ObservedNode], recorded: int = 0) -> Observed:
    """Sort the records, and choose the measured steps; `recorded` is the number of steps if more than are here.

    A node is trusted about its own workers only. If a worker's steps restarted (by its launcher, or a script that
    trains twice), earlier records are excluded.
    """
    cut = [_without_earlier(node) for node in nodes]
    rules = ["earlier training in the same run is excluded"] if any(was_cut for _, was_cut in cut) else []
    nodes = tuple(node for node, _ in cut)
    steps: dict[int, dict[int, StepSample]] = {}
    for node in nodes:
        for sample in node.of(StepSample):
            if sample.rank in node.ranks:
                steps.setdefault(sample.step, {})[sample.rank] = sample
    steps = {number: steps[number] for number in sorted(steps)}
    if recorded > len(steps):
        rules.append(f"only {len(steps)} of {recorded} steps are read, in evenly spaced groups")
    timed = [number for number, workers in steps.items() if _times(workers)]
    steady = find_steady_state([statistics.median(_times(steps[number])) for number in timed])
    counted, rule = _without_traced(timed[steady.first :], nodes, steady.rule)
    syncs: tuple[int, ...] = ()
    if any(node.of(AveragingSample) for node in nodes):
        counted, syncs, whole = _whole_rounds(counted, nodes)
        rules.insert(0, whole)
    return Observed(
        run_id=run_id,
        world_size=sum(len(node.ranks) for node in nodes),
        nodes=nodes,
        recorded=max(recorded, len(steps)),
        steps=steps,
        counted=counted,
        rule="; ".join([rule, *rules]),
        syncs=syncs,
    )


def _whole_rounds(
    counted: Sequence[int], nodes: Sequence[ObservedNode]
) -> tuple[tuple[int, ...], tuple[int, ...], str]:
    """The measured steps in whole rounds, those of them with averaging, and the rule in words.

    A median step excludes the averaging, and a partial round has too much or too little of it.
    """
    ended = {sync.step for node in nodes for sync in node.of(SyncSample) if sync.rank in node.ranks}
    measured = set(counted)
    rounds = [range(before + 1, after + 1) for before, after in itertools.pairwise(sorted(ended))]
    whole = tuple(number for round_steps in rounds if measured.issuperset(round_steps) for number in round_steps)
    if not whole:
        return (), (), "no complete round was measured after the warm-up"
    syncs = tuple(sorted(ended.intersection(whole)))
    return whole, syncs, f"{len(whole)} steps are {len(syncs)} complete rounds of averaging between nodes"


def _without_earlier(node: ObservedNode) -> tuple[ObservedNode, bool]:
    last: dict[int, StepSample] = {}
    begins: dict[int, int] = {}
    for place, sample in enumerate(node.samples):
        if not isinstance(sample, StepSample):
            continue
        before = last.get(sample.rank)
        if before is not None and sample.step <= before.step and sample.mono_ns > before.mono_ns:
            begins[sample.rank] = place
        last[sample.rank] = sample
    if not begins:
        return node, False
    kept = tuple(
        sample
        for place, sample in enumerate(node.samples)
        if not isinstance(sample, _OF_STEPS) or place >= begins.get(sample.rank, 0)
    )
    return msgspec.structs.replace(node, samples=kept), True


def _times(workers: dict[int, StepSample]) -> list[float]:
    return [sample.step_time_us for sample in workers.values() if sample.step_time_us is not None]


def _without_traced(counted: Sequence[int], nodes: Sequence[ObservedNode], rule: str) -> tuple[tuple[int, ...], str]:
    windows = [sample for node in nodes for sample in node.of(TraceSample) if sample.first_step and sample.last_step]
    if not windows:
        return tuple(counted), rule
    first = min(window.first_step or 0 for window in windows) - 1
    last = max(window.disturbed_to or (window.last_step or 0) + 1 for window in windows)
    left = tuple(number for number in counted if not first <= number <= last)
    if not left:
        return tuple(counted), f"{rule}; all other steps ({first} to {last}) were slowed by the profiler"
    return left, f"{rule}; steps {first} to {last}, which the profiler slowed, are excluded too"


# Of a run's samples; records in memory are about five times larger.
_MOST_BYTES = 96 << 20
# Interval of progress messages.
_MOST_WORDS = 4


def observe_run(
    directory: RunDirectory,
    plan: LaunchPlan,
    say: Callable[[str], None] = lambda _: None,
    *,
    most_bytes: int = _MOST_BYTES,
) -> Observed:
    """The records of a run's nodes, as far as they have been transferred.

    `say` is called if reading takes a while. Beyond `most_bytes`, samples are read in evenly spread stretches.
    """
    paths = [path for place in plan.places for path in directory.sample_files(place.node_rank)]
    size_bytes = sum(path.stat().st_size for path in paths)
    stretches = None
    if size_bytes > most_bytes:
        # Long enough for whole rounds of averaging.
        rounds = 3 * plan.levers.round_steps if plan.levers.round_steps > 1 else 0
        stretches = EvenStretches(paths, most_bytes, rounds)
    nodes = []
    for number, node in enumerate(plan.nodes):
        if stretches is not None and number % max(1, len(plan.nodes) // _MOST_WORDS) == 0:
            done = number / len(plan.nodes)
            say(f"reading {format_size(size_bytes)} of samples: {done:.0%}")
        nodes.append(
            ObservedNode(
                name=node.place.node,
                node_rank=node.place.node_rank,
                ranks=node.place.ranks,
                ifname=node.place.endpoint.ifname,
                ifnames=node.place.endpoint.ifnames,
                link_gbit_per_s=node.place.endpoint.link_gbit_per_s,
                samples=tuple(parse_samples(directory.sample_lines(node.place.node_rank, stretches))),
            )
        )
    return observe(plan.run_id, nodes, stretches.recorded if stretches is not None else 0)
