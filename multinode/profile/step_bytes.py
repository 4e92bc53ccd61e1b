"""Bytes of a step: requested by collectives, expected from the backend, and counted by the NICs.

If they differ, a sentence says why, or "unexplained". Pure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from multinode.profile.calls import SeenCall, WorkerCalls, busiest_worker
from multinode.profile.nic_flows import Manner, NicFlows, Share, expect_flows
from multinode.profile.nics import LEAST_BYTES_A_WORKER, Carried, NodeNics, find_carrier, is_rdma, read_node_nics
from multinode.profile.observed import Observed
from multinode.records.samples import WorkerSample
from multinode.stats.unknown import UNMEASURED, Unknown, UnknownError, found
from multinode.traffic.algorithms import algorithms_of, protocols_of
from multinode.units import format_count, format_figure, format_list

_MOST_ROWS = 64
_NO_STEPS = "no step counts"
_MOST_REASONS = 4
_ASKED_GAP = 0.03
_NIC_GAP = 0.05
# From this size on NCCL sends by its protocol for bandwidth.
_LARGE_BYTES = 1 << 20
# Required fit of another algorithm, and misfit of the usual one.
_FITS = 0.03
_IDLE_IS_MUCH = 0.01
# Share of the excess.
_MOST = 0.5
_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


class BytesPerStep(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes per optimizer step in one direction, over the measured steps."""

    calls: float | Unknown = UNMEASURED  # requested by the busiest worker: factor(op, ranks) x S, with busbw's factors
    expected: float | Unknown = UNMEASURED  # through the busiest node's NIC, by the backend's algorithms
    nic: float | Unknown = UNMEASURED  # payload counted by that NIC in that direction, without headers


class SeenTraffic(msgspec.Struct, frozen=True, kw_only=True):
    """The communication of a step."""

    bytes_per_step: BytesPerStep = BytesPerStep()  # three figures for the same step
    calls: tuple[SeenCall, ...] = ()  # of the busiest worker, most bytes first
    # one sentence per difference above 3% (calls and expected) or 5% (expected and NIC); an unexplained one starts with
    # "unexplained"
    explained: tuple[str, ...] = ()


def see_traffic(observed: Observed, every: Mapping[int, WorkerCalls]) -> SeenTraffic:
    """The communication per measured step.

    Calls of less than 1 KiB and barriers are listed, but need no known algorithm. The NIC's figure is raw: idle traffic
    is not subtracted, but reported above 1%.

    Args:
        observed: the run.
        every: its calls, from `read_calls`.
    """
    # A worker with unreadable calls would distort the calls of its groups.
    calls = {rank: worker for rank, worker in every.items() if not worker.odd}
    flows, nics = expect_flows(calls, observed), read_node_nics(observed)
    busiest = busiest_worker(calls.values())
    alone = len(observed.nodes) == 1
    figures = BytesPerStep(
        calls=found(lambda: _asked(busiest, observed, every)),
        expected=0.0 if alone else found(lambda: _expected(busiest, observed, every, flows)),
        nic=found(lambda: _counted(observed, flows, nics)),
    )
    is_expected = not isinstance(figures.expected, Unknown)
    explained = _why_nic_differs(observed, calls, nics, flows if is_expected else None)
    if busiest is not None and is_expected and not alone:
        explained = [*_why_expected_differs(busiest, flows), *explained]
    return SeenTraffic(
        bytes_per_step=figures,
        calls=_rows(busiest) if busiest else (),
        explained=tuple(explained),
    )


def _asked(busiest: WorkerCalls | None, observed: Observed, every: Mapping[int, WorkerCalls]) -> float:
    if busiest is not None:
        return busiest.asked_bytes
    if not observed.counted:
        raise UnknownError(_NO_STEPS)
    if every:
        raise UnknownError(next(worker.odd for worker in every.values()))
    if observed.world_size == 1:
        return 0.0
    raise UnknownError("no worker recorded its collectives")


def _expected(
    busiest: WorkerCalls | None, observed: Observed, every: Mapping[int, WorkerCalls], flows: NicFlows
) -> float:
    _asked(busiest, observed, every)
    if flows.unknown:
        raise UnknownError("; ".join(f"{op}: {reason}" for op, reason in flows.unknown.items()))
    return flows.most


def _counted(observed: Observed, flows: NicFlows, nics: Sequence[NodeNics]) -> float:
    if not observed.counted:
        raise UnknownError(_NO_STEPS)
    read = [node.carried for node in nics if node.carried is not None]
    if not read:
        reasons = "; ".join(f"{node.node}: {node.reason}" for node in nics[:_MOST_REASONS])
        raise UnknownError(reasons or "no node has records")
    if flows.most and not flows.unknown:
        return max(nic.one_way(sends=flows.busiest[1]) for nic in read)
    return max(nic.busier for nic in read)


def _rows(worker: WorkerCalls) -> tuple[SeenCall, ...]:
    """Its calls, those in groups of equal size as one."""
    counts: dict[SeenCall, float] = defaultdict(float)
    for call in worker.calls:
        counts[msgspec.structs.replace(call, count=0.0)] += call.count
    rows = [msgspec.structs.replace(row, count=count) for row, count in counts.items()]
    rows.sort(key=lambda row: (-row.asked_bytes, -row.size_bytes))
    return tuple(rows[:_MOST_ROWS])


def _why_expected_differs(worker: WorkerCalls, flows: NicFlows) -> list[str]:
    """Why the expected NIC traffic differs from the requested bytes of the busiest worker.

    Args:
        worker: the busiest.
        flows: expected traffic of all workers' calls.
    """
    asked_all = worker.asked_bytes
    if abs(flows.most - asked_all) <= _ASKED_GAP * max(flows.most, asked_all):
        return []
    node, sends = flows.busiest
    sentences = []
    for share in flows.shares:
        asked_bytes = sum(
            call.asked_bytes
            for call in worker.calls
            if (call.op, call.backend, call.ranks) == (share.op, share.backend, share.ranks)
        )
        carried = share.carried[node].one_way(sends=sends)
        if abs(carried - asked_bytes) > _ASKED_GAP / 2 * max(flows.most, asked_all):
            reason = "; ".join(_why_share(share, node, carried, asked_bytes))
            sentences.append(
                f"{share.op}: {_size(asked_bytes)} requested, {_size(carried)} expected at a NIC: {reason}."
            )
    return sentences


def _why_share(share: Share, node: int, carried: float, asked_bytes: float) -> Iterator[str]:
    workers = f"{share.ranks} workers"
    if share.spans == 1:
        yield f"its {workers} are on one node, and it stays there"
        return
    if share.groups[node] > 1:
        yield f"{share.groups[node]} groups of {workers} share the NIC"
    if share.backend == "gloo" and share.op == "reduce_scatter":
        yield "gloo implements reduce_scatter as an all-reduce and sends twice as much"
    elif share.backend == "gloo" and share.op == "broadcast":
        yield "gloo broadcasts with a tree: the root sends to several workers, others send nothing"
    elif share.op == "all_to_all":
        yield "every worker of a node sends its parts to the other nodes; parts for its own node stay there"
    elif share.groups[node] <= 1:
        more = "more than once" if carried > asked_bytes else "less often than a worker sends"
        yield f"the path of {share.backend} through {workers} on {share.spans} nodes passes a NIC {more}"


class _Gap(msgspec.Struct, frozen=True, kw_only=True):
    """Counted and expected traffic of a node's NIC, in the direction with the largest difference."""

    nics: NodeNics
    sends: bool
    seen: float
    expected: float

    @property
    def beyond(self) -> float:
        """Counted minus expected."""
        return self.seen - self.expected

    def beyond_share(self, most: float) -> float:
        """The difference as a share of what is expected here, or at the busiest NIC (`most`) if that is more."""
        return abs(self.beyond) / max(most, self.expected)


def _why_nic_differs(
    observed: Observed, calls: Mapping[int, WorkerCalls], nics: Sequence[NodeNics], flows: NicFlows | None
) -> list[str]:
    """Why NICs counted something other than expected, with remarks on the counters.

    Args:
        observed: the records.
        calls: of the workers that recorded any.
        nics: counted by each node's NICs.
        flows: expected; None if unknown.
    """
    read = [node for node in nics if node.carried is not None]
    notes = [*_about_counters(read), *_about_idle(read)]
    if len(observed.nodes) == 1:
        return [
            *notes,
            "All workers are on one node, so their calls stay there and its NIC counts other traffic.",
        ]
    if flows is None or not read:
        return notes
    shared = observed.shared_interfaces
    gaps = _gaps(flows, nics, shared)
    if not flows.most:
        return [*notes, _explain_silence(observed, gaps)]
    notes.extend(_about_shared(observed, gaps, shared))
    if any(gap.beyond_share(flows.most) > _NIC_GAP for gap in gaps):
        if flows.most < LEAST_BYTES_A_WORKER * observed.world_size:
            return [
                *notes,
                (f"{_size(flows.most)} per step is too little to distinguish from headers and other traffic."),
            ]
        other = _other_manner(observed, calls, nics, flows.most)
        notes.extend([other] if other else _by_node(gaps, flows.most))
    return notes


def _explain_silence(observed: Observed, gaps: Sequence[_Gap]) -> str:
    most = max(gaps, key=lambda gap: gap.seen)
    if most.seen < LEAST_BYTES_A_WORKER * observed.world_size:
        return "No call crosses nodes: the NICs counted other traffic."
    return (
        f"unexplained: no call that crosses nodes was recorded, but {most.nics.ifname} of {most.nics.node} "
        f"{_verb(most)} {_size(most.seen)} per step: other traffic, or collectives of compiled code, not recorded."
    )


def _about_counters(nics: Sequence[NodeNics]) -> Iterator[str]:
    if interpolated := [node.node for node in nics if node.interpolated]:
        names = format_list(interpolated, 2, "more nodes")
        yield f"The counters of {names} were read during the training and are interpolated to its steps."
    rdma = [node for node in nics if node.rdma]
    if rdma:
        names = format_list([node.node for node in rdma], 2, "more nodes")
        yield f"RDMA ({', '.join(rdma[0].rdma)}) carried most of {names}: its ports are included in the NIC's count."


def _about_shared(observed: Observed, gaps: Sequence[_Gap], shared: Sequence[Sequence[int]]) -> Iterator[str]:
    by_node = {gap.nics.node: gap for gap in gaps}
    for indices in shared:
        names = [observed.nodes[index].name for index in indices]
        gap = by_node.get(names[0])
        if gap is not None:
            yield (
                f"{format_list(names, _MOST_REASONS, 'more nodes')} share the interface {gap.nics.ifname}: it counted "
                f"{_size(gap.seen)} per step for {_size(gap.expected)} expected of all of them."
            )


def _about_idle(nics: Sequence[NodeNics]) -> Iterator[str]:
    for node in nics:
        if node.idle is not None and node.carried is not None:
            idle = node.idle.busier
            if idle > _IDLE_IS_MUCH * node.carried.busier:
                yield (
                    f"Before the training started, {node.ifname} of {node.node} carried {_size(idle)} in the time "
                    "of a step; this is not subtracted."
                )
                return


def _gaps(flows: NicFlows, nics: Sequence[NodeNics], shared: Sequence[Sequence[int]]) -> list[_Gap]:
    """Of each node whose NIC was read; an interface that several nodes share counts what all of them send."""
    sums = {index: sum((flows.nodes[each] for each in indices), Carried()) for indices in shared for index in indices}
    gaps = []
    for index, (alone, node) in enumerate(zip(flows.nodes, nics, strict=True)):
        expected = sums.get(index, alone)
        if node.carried is not None:
            both = [
                _Gap(nics=node, sends=way, seen=node.carried.one_way(sends=way), expected=expected.one_way(sends=way))
                for way in (True, False)
            ]
            gaps.append(max(both, key=lambda gap: abs(gap.beyond)))
    return gaps


def _other_manner(
    observed: Observed, calls: Mapping[int, WorkerCalls], nics: Sequence[NodeNics], most: float
) -> str | None:
    if all(call.backend != "nccl" for worker in calls.values() for call in worker.calls):
        return None
    tried: list[tuple[float, str]] = []
    for protocol, factor in _possible_protocols(observed, calls).items():
        for algorithm in algorithms_of("nccl", "all_reduce"):
            flows = expect_flows(calls, observed, Manner(all_reduce=algorithm.name, wire_factor=factor))
            gaps = _gaps(flows, nics, observed.shared_interfaces)
            misfit = max(gap.beyond_share(most) for gap in gaps)
            tried.append((misfit, f"all-reduces as a {algorithm.name} and the protocol {protocol}"))
    misfit, words = min(tried)
    return (
        f"NIC counters match NCCL with {words}, within {format_figure(100 * misfit, digits=2)}%."
        if misfit <= _FITS
        else None
    )


def _possible_protocols(observed: Observed, calls: Mapping[int, WorkerCalls]) -> dict[str, float]:
    """NCCL's protocols that can have carried most bytes, each with its factor.

    Between nodes those for small messages have a fraction of the bandwidth, and NCCL takes them for large ones only if
    NCCL_PROTO says so (nccl/src/graph/tuning.cc).
    """
    named = {word.strip().casefold() for text in _proto_variables(observed) for word in text.split(",")}
    small = all(
        call.size_bytes < _LARGE_BYTES
        for worker in calls.values()
        for call in worker.calls
        if call.backend == "nccl" and call.nodes > 1
    )
    every = protocols_of("nccl")
    return {name: factor for name, factor in every.items() if small or factor == 1.0 or name.casefold() in named}


def _proto_variables(observed: Observed) -> Iterator[str]:
    for sample in observed.of(WorkerSample):
        # `^` excludes what follows it.
        if sample.nccl_proto is not None and not sample.nccl_proto.startswith("^"):
            yield sample.nccl_proto


def _by_node(gaps: Sequence[_Gap], most: float) -> Iterator[str]:
    for sign, explain in ((-1, _explain_lack), (1, _explain_excess)):
        mine = [gap for gap in gaps if sign * gap.beyond > 0 and gap.beyond_share(most) > _NIC_GAP]
        if mine:
            worst = max(mine, key=lambda gap: abs(gap.beyond))
            others = len(mine) - 1
            verb = "differs" if others == 1 else "differ"
            likewise = f" {format_count(others, 'more node')} {verb} in the same way." if others else ""
            yield explain(worst) + likewise


def _explain_lack(gap: _Gap) -> str:
    node, verb = gap.nics, _verb(gap)
    other = find_carrier(node.others, -gap.beyond, sends=gap.sends)
    if other is not None:
        carried = node.others[other].one_way(sends=gap.sends)
        text = f"{node.node} {verb} {_size(carried)} per step over {other}, and {_size(gap.seen)}"
        if is_rdma(other):
            return f"{text} over {node.ifname}, which does not count RDMA."
        return (
            f"{text} of the {_size(gap.expected)} expected over {node.ifname}: the kernel routes to the other nodes "
            f"use {other}, or the backend is configured to use it."
        )
    return (
        f"unexplained: {node.ifname} of {node.node} {verb} {_size(gap.seen)} of the {_size(gap.expected)} expected "
        "per step, and no other NIC carried the rest; RDMA without counters and memory shared by nodes on one "
        "machine are not visible."
    )


def _explain_excess(gap: _Gap) -> str:
    node = gap.nics
    text = f"{node.ifname} of {node.node} {_verb(gap)} {_size(gap.seen)} per step for {_size(gap.expected)} expected"
    if node.idle is not None and node.idle.one_way(sends=gap.sends) >= _MOST * gap.beyond:
        return f"{text}: it carries as much before the training starts."
    if node.typical is not None:
        usual = node.typical.one_way(sends=gap.sends) - gap.expected
        if abs(usual) <= _NIC_GAP * gap.seen:
            return (
                f"{text}, but not more in the median step: a few steps carried the rest, such as checkpoints or "
                "evaluations."
            )
    return f"unexplained: {text}: data or checkpoints on a network file system, or another job, may use it too."


def _verb(gap: _Gap) -> str:
    return "sent" if gap.sends else "received"


def _size(size_bytes: float) -> str:
    for unit_bytes, unit in _UNITS:
        if size_bytes >= unit_bytes:
            return f"{format_figure(size_bytes / unit_bytes)} {unit}"
    return f"{size_bytes:.0f} B"
