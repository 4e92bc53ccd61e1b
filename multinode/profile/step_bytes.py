"""Bytes of a step: requested by collectives, expected from the backend, and counted by the NICs.

`byte_gaps` judges why they differ. Pure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from multinode.figures.figure import Figure
from multinode.findings.finding import Finding
from multinode.findings.rule import RuleGroup
from multinode.profile.calls import SeenCall, WorkerCalls, busiest_worker
from multinode.profile.nic_flows import NicFlows, expect_flows
from multinode.profile.nics import NodeNics, read_node_nics
from multinode.profile.observed import Observed
from multinode.render.sheet import percent
from multinode.stats.unknown import UNMEASURED, Unknown, UnknownError, found, reason_of
from multinode.units import format_bytes, format_list

_MOST_ROWS = 64
_NO_STEPS = "no step counts"
_MOST_REASONS = 4
_IDLE_IS_MUCH = 0.01

COUNTERS = RuleGroup("Bytes of a step: NIC counters")
_INTERPOLATED = COUNTERS.rule(
    "interpolated",
    about="counters that were not read at the ends of steps",
    message="The counters of {names} were not read at the ends of steps, so their values there are interpolated.",
)
_RDMA = COUNTERS.rule(
    "rdma",
    about="RDMA ports that carried most of the traffic",
    message="RDMA ({ports}) carried most of the traffic of {names}, so the NIC figures include the RDMA ports.",
    figures=("ports",),
)
_IDLE = COUNTERS.rule(
    "idle",
    about=f"traffic before training that exceeds {percent(_IDLE_IS_MUCH, '.0f')} of the traffic of a step",
    message="Before training, {ifname} on {node} already carried {idle} in a period as long as a step. The measured "
    "NIC traffic includes such traffic.",
    figures=("ifname", "idle_bytes"),
)
_ONE_NODE = COUNTERS.rule(
    "one-node",
    about="a training run on one node",
    message="All workers are on one node, so their calls do not use the NIC. Its counters show only other traffic.",
)


class BytesPerStep(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes per optimizer step in one direction, over the measured steps."""

    calls: float | Unknown = UNMEASURED  # requested by the busiest worker: factor(op, ranks) x S, with busbw's factors
    expected: float | Unknown = UNMEASURED  # through the busiest node's NIC, by the backend's algorithms
    nic: float | Unknown = UNMEASURED  # payload counted by that NIC in that direction, without headers


PAYLOAD = Figure[float](
    "calls",
    "collective payload",
    "MB",
    form="megabytes",
    about="collective payload per step per worker",
    phrase="collective payload per step",
)
NIC_TRAFFIC = Figure[float](
    "nic",
    "measured NIC traffic",
    "MB",
    form="megabytes",
    about="measured traffic per step on the busiest NIC",
    phrase="NIC traffic per step",
)
_EXPECTED = Figure[float](
    "expected", "expected NIC traffic", "MB", form="megabytes", about="expected traffic per step on the busiest NIC"
)
BYTES_FIGURES = (PAYLOAD, _EXPECTED, NIC_TRAFFIC)


class SeenTraffic(msgspec.Struct, frozen=True, kw_only=True):
    """The communication of a step."""

    bytes_per_step: BytesPerStep = BytesPerStep()  # three figures for the same step
    calls: tuple[SeenCall, ...] = ()  # of the busiest worker, most bytes first
    findings: tuple[Finding, ...] = ()  # why they differ, if by much; remarks on the counters


def see_traffic(observed: Observed, every: Mapping[int, WorkerCalls]) -> SeenTraffic:
    """The communication per measured step.

    Small calls and barriers are listed, but need no known algorithm. The NIC's figure is raw: idle traffic is
    not subtracted, but reported if there is much of it.

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
    findings = [*_judge_reading(nics)]
    if alone:
        findings.append(_ONE_NODE.found(None))
    elif is_expected:
        from multinode.profile.byte_gaps import judge_calls, judge_counters

        if busiest is not None:
            findings = [*judge_calls(busiest, flows), *findings]
        if any(not isinstance(node.carried, Unknown) for node in nics):
            findings += judge_counters(observed, calls, nics, flows)
    return SeenTraffic(bytes_per_step=figures, calls=_rows(busiest) if busiest else (), findings=tuple(findings))


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
    read = [node.carried for node in nics if not isinstance(node.carried, Unknown)]
    if not read:
        reasons = "; ".join(f"{node.node}: {reason_of(node.carried)}" for node in nics[:_MOST_REASONS])
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


def _judge_reading(every: Sequence[NodeNics]) -> Iterator[Finding]:
    nics = [node for node in every if not isinstance(node.carried, Unknown)]
    if interpolated := [node.node for node in nics if node.interpolated]:
        yield _INTERPOLATED.found(None, names=format_list(interpolated, 2, "more nodes"))
    if rdma := [node for node in nics if node.rdma]:
        names = format_list([node.node for node in rdma], 2, "more nodes")
        yield _RDMA.found(None, ports=", ".join(rdma[0].rdma), names=names)
    for node in nics:
        if node.idle is not None and not isinstance(node.carried, Unknown):
            idle = node.idle.busier
            if idle > _IDLE_IS_MUCH * node.carried.busier:
                yield _IDLE.found(node.node, ifname=node.ifname, idle=format_bytes(idle), idle_bytes=idle)
                return
