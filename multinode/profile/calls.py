"""Calls: what each worker's steps called on torch.distributed, with its groups, and what it said of its model. Pure.

Untrusted: a call that cannot be (an unknown kind, a group that nobody described, an absurd size) is named, not counted.
What the calls put on a card is `card_flows`'.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import msgspec

from multinode.profile.observed import Observed, ObservedNode
from multinode.records.samples import CallCount, GroupSample, ModelSample, TrafficSample
from multinode.traffic.algorithms import algorithms_of, bus_factor


def last_models(observed: Observed) -> dict[int, ModelSample]:
    """By rank, ascending, the last word of each worker; a node is believed about its own workers alone."""
    told = {model.rank: model for node in observed.nodes for model in node.of(ModelSample) if model.rank in node.ranks}
    return {rank: told[rank] for rank in sorted(told)}


_ONE_TO_MANY = {"gather", "scatter"}
# Those that a worker may leave while others still wait in them, as its part in them is another.
_ROOTED = frozenset({"broadcast", "reduce", "gather", "scatter", "send", "recv"})
_ONE_WAY = {"send", "reduce", "broadcast"}
_SENDS_NOTHING = {"recv", "barrier"}
_OPS = (
    frozenset({"all_reduce", "all_gather", "reduce_scatter", "all_to_all"}) | _ONE_TO_MANY | _ONE_WAY | _SENDS_NOTHING
)
# A loss, a gradient norm, a flag: as many bytes of headers go with it.
_SMALL_BYTES = 1 << 10
_LONGEST_WORD = 40


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """A process group.

    Attributes:
        ranks: global ranks, in the group's order.
        backend: that serves the model's device, `nccl` or `gloo`; None is unknown.
    """

    ranks: tuple[int, ...]
    backend: str | None


class Kind(msgspec.Struct, frozen=True, kw_only=True):
    """Calls of one kind and size that a worker makes in a step.

    Attributes:
        op: as CallCount has it; likewise `size_bytes` and `source`.
        count: a step, on average over the measured steps.
    """

    op: str
    group: Group
    size_bytes: float
    count: float
    source: str

    @property
    def is_small(self) -> bool:
        """Whether it carries next to nothing: a barrier, or less than 1 KiB."""
        return self.op == "barrier" or self.size_bytes < _SMALL_BYTES

    @property
    def step_bytes(self) -> float:
        """S of all these calls of a step together."""
        return self.size_bytes * self.count

    @property
    def asked_bytes(self) -> float:
        """What they ask this worker to send in a step: factor(op, ranks) x S."""
        return asked_factor(self.op, len(self.group.ranks)) * self.step_bytes


class WorkerCalls(msgspec.Struct, frozen=True, kw_only=True):
    """What one worker calls in a step.

    Attributes:
        kinds: the calls that can be read.
        odd: why others cannot; empty where there are none.
    """

    rank: int
    kinds: tuple[Kind, ...]
    odd: str = ""

    @property
    def asked_bytes(self) -> float:
        """What all of them ask the worker to send in a step."""
        return sum((kind.asked_bytes for kind in self.kinds), 0.0)


def asked_factor(op: str, ranks: int) -> float:
    """The part of S that a worker is asked to send: busbw's factor, and (n-1)/n for gather and scatter, likewise.

    A send counts with the sender alone, so a recv counts nothing; a barrier carries nothing.
    """
    if ranks <= 1 or op in _SENDS_NOTHING:
        return 0.0
    if op in _ONE_TO_MANY:
        return (ranks - 1) / ranks
    return 1.0 if op in _ONE_WAY else bus_factor(op, ranks)


def read_calls(observed: Observed) -> dict[int, WorkerCalls]:
    """By rank, the mean step of each worker that recorded what it called in a measured step."""
    ranks = frozenset(rank for node in observed.nodes for rank in node.ranks)
    devices = {rank: model.device for rank, model in last_models(observed).items() if model.device}
    # Who does not say it trains on what the others train on.
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
    """The one that serves the device, of what torch says: `nccl`, or `cpu:gloo,cuda:nccl`."""
    pairs = [part.strip().lower().rpartition(":") for part in told[: 4 * _LONGEST_WORD].split(",")]
    wanted = (device or "").partition(":")[0]
    names = {name for kind, _, name in pairs if kind in {"", wanted}} or {name for _, _, name in pairs}
    name = names.pop() if len(names) == 1 else ""
    return name if algorithms_of(name, "all_reduce") else None


def _mean_step(rank: int, records: Mapping[TrafficSample, int], groups: Mapping[str, Group]) -> WorkerCalls:
    """The mean of steps; `records` says how many called what."""
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
        Kind(op=op, group=groups[group], size_bytes=size, count=count / steps, source=source)
        for (op, group, size, source), count in counts.items()
        if group in groups
    )
    return WorkerCalls(rank=rank, kinds=kinds, odd=next(iter(odd), ""))


def _why_odd(call: CallCount, groups: Mapping[str, Group]) -> str:
    """Why a call cannot be counted; empty where it can, or need not be."""
    if call.op not in _OPS:
        return f"calls of an unknown kind, {_word(call.op)}"
    if call.group not in groups and call.op != "barrier" and call.size_bytes >= _SMALL_BYTES:
        return f"calls of {call.op} in a group that was not recorded"
    return ""


def _word(text: str) -> str:
    return repr(text if len(text) <= _LONGEST_WORD else text[:_LONGEST_WORD] + "...")


def busiest_worker(workers: Iterable[WorkerCalls]) -> WorkerCalls | None:
    """The one that is asked to send most, of those whose calls can all be read; the first of several."""
    return max((one for one in workers if not one.odd), key=lambda one: (one.asked_bytes, -one.rank), default=None)


def rooted_part(workers: Iterable[WorkerCalls]) -> float:
    """Of all that workers are asked to send, the part in calls that they need not leave together."""
    asked = [(kind.op, kind.asked_bytes) for worker in workers for kind in worker.kinds]
    total = sum(size for _, size in asked)
    return sum(size for op, size in asked if op in _ROOTED) / total if total else 0.0
