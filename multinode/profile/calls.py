"""The calls of each worker's steps on torch.distributed, with its groups and its description of its model. Pure.

Untrusted: an impossible call (unknown kind, undescribed group, absurd size) is reported, not counted. `nic_flows`
gives the traffic of the calls.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

import msgspec

from multinode.profile.observed import Observed
from multinode.records.samples import CallCount, GroupSample, ModelSample, TrafficSample
from multinode.traffic.algorithms import algorithms_of, bus_factor
from multinode.traffic.step_calls import SMALL_BYTES


def last_models(observed: Observed) -> dict[int, ModelSample]:
    """The last model record of each worker, by rank; a node is trusted about its own workers only."""
    models = {
        model.rank: model for node in observed.nodes for model in node.of(ModelSample) if model.rank in node.ranks
    }
    return {rank: models[rank] for rank in sorted(models)}


_ONE_TO_MANY = {"gather", "scatter"}
# Collectives whose ranks may finish at different times.
_ROOTED = frozenset({"broadcast", "reduce", "gather", "scatter", "send", "recv"})
_ONE_WAY = {"send", "reduce", "broadcast"}
_SENDS_NOTHING = {"recv", "barrier"}
_OPS = (
    frozenset({"all_reduce", "all_gather", "reduce_scatter", "all_to_all"}) | _ONE_TO_MANY | _ONE_WAY | _SENDS_NOTHING
)
_LONGEST_WORD = 40


class SeenCall(msgspec.Struct, frozen=True, kw_only=True):
    """Calls of one kind, group size and message size per step of one worker."""

    op: str  # as in CallCount
    ranks: int  # workers in the group
    nodes: int  # of the group
    backend: str | None  # of the group on the model's device, `nccl` or `gloo`; None if unknown
    size_bytes: float  # S of one call
    count: float  # calls per step, averaged over the measured steps
    source: str = "call"  # as in CallCount

    @property
    def is_small(self) -> bool:
        """Whether it carries less than `SMALL_BYTES`, or is a barrier."""
        return self.op == "barrier" or self.size_bytes < SMALL_BYTES

    @property
    def step_bytes(self) -> float:
        """S of all these calls of a step."""
        return self.size_bytes * self.count

    @property
    def asked_bytes(self) -> float:
        """Bytes per step that they ask this worker to send: busbw's factor x S, and (n-1)/n x S for gather and scatter.

        A send counts for the sender only, so a recv counts nothing; a barrier carries nothing.
        """
        if self.ranks <= 1 or self.op in _SENDS_NOTHING:
            return 0.0
        if self.op in _ONE_TO_MANY:
            return (self.ranks - 1) / self.ranks * self.step_bytes
        return (1.0 if self.op in _ONE_WAY else bus_factor(self.op, self.ranks)) * self.step_bytes


class WorkerCalls(msgspec.Struct, frozen=True, kw_only=True):
    """The calls of one worker per step."""

    rank: int
    by_group: dict[tuple[int, ...], list[SeenCall]]  # the readable calls, by the global ranks of their group, in order
    odd: str = ""  # why others are unreadable; empty if none

    @property
    def calls(self) -> list[SeenCall]:
        """The readable calls."""
        return [call for calls in self.by_group.values() for call in calls]

    @property
    def asked_bytes(self) -> float:
        """Bytes per step that all of them ask the worker to send."""
        return sum((call.asked_bytes for call in self.calls), 0.0)


def read_calls(observed: Observed) -> dict[int, WorkerCalls]:
    """The mean step of each worker that recorded calls in a measured step, by rank."""
    node_of = observed.node_of
    devices = {rank: model.device for rank, model in last_models(observed).items() if model.device}
    # A worker without a record trains on the same device as the others.
    usual = next(iter(devices.values()), None)
    calls_of: dict[int, WorkerCalls] = {}
    for node in observed.nodes:
        traffic: dict[tuple[int, int | None], TrafficSample] = {
            (sample.rank, sample.traffic): sample for sample in node.of(TrafficSample)
        }
        described = node.of(GroupSample)
        for rank in node.ranks:
            numbers = Counter(step[rank].traffic for step in observed.counted_steps if rank in step)
            records = {traffic[rank, number]: count for number, count in numbers.items() if (rank, number) in traffic}
            if records:
                groups = {
                    group.group: msgspec.structs.replace(group, backend=_backend_of(group, devices.get(rank, usual)))
                    for group in described
                    if group.rank == rank and rank in group.ranks and _is_possible(group.ranks, node_of)
                }
                calls_of[rank] = _mean_step(rank, records, groups, node_of)
    return calls_of


def _is_possible(group: tuple[int, ...], node_of: Mapping[int, int]) -> bool:
    ranks = set(group)
    return len(ranks) == len(group) and ranks <= node_of.keys()


def _backend_of(group: GroupSample, device: str | None) -> str:
    """The backend of the device, from torch's text: `nccl`, or `cpu:gloo,cuda:nccl`; empty if unknown."""
    pairs = [part.strip().lower().rpartition(":") for part in group.backend[: 4 * _LONGEST_WORD].split(",")]
    wanted = (device or "").partition(":")[0]
    names = {name for kind, _, name in pairs if kind in {"", wanted}} or {name for _, _, name in pairs}
    name = names.pop() if len(names) == 1 else ""
    return name if algorithms_of(name, "all_reduce") else ""


def _mean_step(
    rank: int, records: Mapping[TrafficSample, int], groups: Mapping[str, GroupSample], node_of: Mapping[int, int]
) -> WorkerCalls:
    """The mean of steps; `records` has the number of steps with each."""
    counts: defaultdict[str, Counter[tuple[str, float, str]]] = defaultdict(Counter)
    odd: dict[str, None] = {}
    for record, times in records.items():
        for call in record.calls:
            reason = _why_odd(call, groups)
            if reason:
                odd[reason] = None
            else:
                counts[call.group][call.op, call.size_bytes, call.source] += times * call.count
    steps = sum(records.values())
    by_group: dict[tuple[int, ...], list[SeenCall]] = {}
    for name, group in groups.items():
        nodes = len({node_of[rank] for rank in group.ranks})
        by_group.setdefault(group.ranks, []).extend(
            SeenCall(
                op=op,
                ranks=len(group.ranks),
                nodes=nodes,
                backend=group.backend or None,
                size_bytes=size,
                count=count / steps,
                source=source,
            )
            for (op, size, source), count in counts[name].items()
        )
    return WorkerCalls(rank=rank, by_group=by_group, odd=next(iter(odd), ""))


def _why_odd(call: CallCount, groups: Mapping[str, GroupSample]) -> str:
    if call.op not in _OPS:
        return f"calls of an unknown kind, {_word(call.op)}"
    if call.group not in groups and call.op != "barrier" and call.size_bytes >= SMALL_BYTES:
        return f"calls of {call.op} in a group that was not recorded"
    return ""


def _word(text: str) -> str:
    return repr(text if len(text) <= _LONGEST_WORD else text[:_LONGEST_WORD] + "...")


def busiest_worker(workers: Iterable[WorkerCalls]) -> WorkerCalls | None:
    """The first of the workers that are asked to send most, among those with readable calls."""
    return max(
        (worker for worker in workers if not worker.odd),
        key=lambda worker: (worker.asked_bytes, -worker.rank),
        default=None,
    )


def rooted_part(workers: Iterable[WorkerCalls]) -> float:
    """Share of the bytes sent by calls that workers may leave at different times."""
    sizes = [(call.op, call.asked_bytes) for worker in workers for call in worker.calls]
    total = sum(size for _, size in sizes)
    return sum(size for op, size in sizes if op in _ROOTED) / total if total else 0.0
