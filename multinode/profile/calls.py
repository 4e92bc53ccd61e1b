"""The calls of each worker's steps on torch.distributed, with its groups and its description of its model. Pure.

Untrusted: an impossible call (unknown kind, undescribed group, absurd size) is reported, not counted. `nic_flows`
gives the traffic of the calls.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import msgspec

from multinode.profile.observed import Observed, ObservedNode
from multinode.records.samples import CallCount, GroupSample, ModelSample, TrafficSample
from multinode.traffic.algorithms import algorithms_of, bus_factor
from multinode.traffic.step_calls import SMALL_BYTES


def last_models(observed: Observed) -> dict[int, ModelSample]:
    """The last model record of each worker, by rank; a node is trusted about its own workers only."""
    told = {model.rank: model for node in observed.nodes for model in node.of(ModelSample) if model.rank in node.ranks}
    return {rank: told[rank] for rank in sorted(told)}


_ONE_TO_MANY = {"gather", "scatter"}
# Collectives whose ranks may finish at different times.
_ROOTED = frozenset({"broadcast", "reduce", "gather", "scatter", "send", "recv"})
_ONE_WAY = {"send", "reduce", "broadcast"}
_SENDS_NOTHING = {"recv", "barrier"}
_OPS = (
    frozenset({"all_reduce", "all_gather", "reduce_scatter", "all_to_all"}) | _ONE_TO_MANY | _ONE_WAY | _SENDS_NOTHING
)
_LONGEST_WORD = 40


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """A process group."""

    ranks: tuple[int, ...]  # global ranks, in the group's order
    backend: str | None  # of the model's device, `nccl` or `gloo`; None if unknown


class CallKind(msgspec.Struct, frozen=True, kw_only=True):
    """Calls of one kind and size per step of a worker."""

    op: str  # as in CallCount; likewise `size_bytes` and `source`
    group: Group
    size_bytes: float
    count: float  # per step, averaged over the measured steps
    source: str

    @property
    def is_small(self) -> bool:
        """Whether it carries less than 1 KiB, or is a barrier."""
        return self.op == "barrier" or self.size_bytes < SMALL_BYTES

    @property
    def step_bytes(self) -> float:
        """S of all these calls of a step."""
        return self.size_bytes * self.count

    @property
    def asked_bytes(self) -> float:
        """Bytes per step that they ask this worker to send: factor(op, ranks) x S."""
        return asked_factor(self.op, len(self.group.ranks)) * self.step_bytes


class WorkerCalls(msgspec.Struct, frozen=True, kw_only=True):
    """The calls of one worker per step."""

    rank: int
    kinds: tuple[CallKind, ...]  # the readable calls
    odd: str = ""  # why others are unreadable; empty if none

    @property
    def asked_bytes(self) -> float:
        """Bytes per step that all of them ask the worker to send."""
        return sum((kind.asked_bytes for kind in self.kinds), 0.0)


def asked_factor(op: str, ranks: int) -> float:
    """Fraction of S that a worker is asked to send: busbw's factor, and (n-1)/n for gather and scatter.

    A send counts for the sender only, so a recv counts nothing; a barrier carries nothing.
    """
    if ranks <= 1 or op in _SENDS_NOTHING:
        return 0.0
    if op in _ONE_TO_MANY:
        return (ranks - 1) / ranks
    return 1.0 if op in _ONE_WAY else bus_factor(op, ranks)


def read_calls(observed: Observed) -> dict[int, WorkerCalls]:
    """The mean step of each worker that recorded calls in a measured step, by rank."""
    ranks = frozenset(rank for node in observed.nodes for rank in node.ranks)
    devices = {rank: model.device for rank, model in last_models(observed).items() if model.device}
    # A worker without a record trains on the same device as the others.
    usual = next(iter(devices.values()), None)
    found: dict[int, WorkerCalls] = {}
    for node in observed.nodes:
        traffic = {(sample.rank, sample.traffic): sample for sample in node.of(TrafficSample)}
        for rank in node.ranks:
            records = [step[rank].traffic for step in observed.counted_steps if rank in step]
            times = Counter(number for number in records if number is not None and (rank, number) in traffic)
            if times:
                groups = _groups(node, rank, ranks, devices.get(rank, usual))
                found[rank] = _mean_step(rank, {traffic[rank, one]: count for one, count in times.items()}, groups)
    return found


def _groups(node: ObservedNode, rank: int, ranks: frozenset[int], device: str | None) -> dict[str, Group]:
    return {
        sample.group: Group(ranks=sample.ranks, backend=_backend_of(sample.backend, device))
        for sample in node.of(GroupSample)
        if sample.rank == rank and rank in sample.ranks and _is_possible(sample.ranks, ranks)
    }


def _is_possible(group: tuple[int, ...], ranks: frozenset[int]) -> bool:
    return len(group) <= len(ranks) and len(set(group)) == len(group) and ranks.issuperset(group)


def _backend_of(told: str, device: str | None) -> str | None:
    """The backend of the device, from torch's text: `nccl`, or `cpu:gloo,cuda:nccl`."""
    pairs = [part.strip().lower().rpartition(":") for part in told[: 4 * _LONGEST_WORD].split(",")]
    wanted = (device or "").partition(":")[0]
    names = {name for kind, _, name in pairs if kind in {"", wanted}} or {name for _, _, name in pairs}
    name = names.pop() if len(names) == 1 else ""
    return name if algorithms_of(name, "all_reduce") else None


def _mean_step(rank: int, records: Mapping[TrafficSample, int], groups: Mapping[str, Group]) -> WorkerCalls:
    """The mean of steps; `records` counts the calls."""
    counts: Counter[tuple[str, str, float, str]] = Counter()
    odd: dict[str, None] = {}
    for record, times in records.items():
        for call in record.calls:
            reason = _why_odd(call, groups)
            if reason:
                odd[reason] = None
            else:
                counts[call.op, call.group, call.size_bytes, call.source] += times * call.count
    steps = sum(records.values())
    kinds = tuple(
        CallKind(op=op, group=groups[group], size_bytes=size, count=count / steps, source=source)
        for (op, group, size, source), count in counts.items()
        if group in groups
    )
    return WorkerCalls(rank=rank, kinds=kinds, odd=next(iter(odd), ""))


def _why_odd(call: CallCount, groups: Mapping[str, Group]) -> str:
    if call.op not in _OPS:
        return f"calls of an unknown kind, {_word(call.op)}"
    if call.group not in groups and call.op != "barrier" and call.size_bytes >= SMALL_BYTES:
        return f"calls of {call.op} in a group that was not recorded"
    return ""


def _word(text: str) -> str:
    return repr(text if len(text) <= _LONGEST_WORD else text[:_LONGEST_WORD] + "...")


def busiest_worker(workers: Iterable[WorkerCalls]) -> WorkerCalls | None:
    """The first of the workers that are asked to send most, among those with readable calls."""
    return max((one for one in workers if not one.odd), key=lambda one: (one.asked_bytes, -one.rank), default=None)


def rooted_part(workers: Iterable[WorkerCalls]) -> float:
    """Share of the bytes sent by calls that workers may leave at different times."""
    asked = [(kind.op, kind.asked_bytes) for worker in workers for kind in worker.kinds]
    total = sum(size for _, size in asked)
    return sum(size for op, size in asked if op in _ROOTED) / total if total else 0.0
