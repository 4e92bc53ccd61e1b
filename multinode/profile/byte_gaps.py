"""Differences between the bytes of a step that calls request, that the backend's algorithms send, and that NICs count.

Of several nodes: on one node no call passes a NIC. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from multinode.findings.finding import Finding
from multinode.findings.rule import Rule, RuleGroup
from multinode.profile.calls import WorkerCalls
from multinode.profile.nic_flows import Manner, NicFlows, Share, expect_flows
from multinode.profile.nics import LEAST_BYTES_A_WORKER, Carried, NodeNics, find_carrier, is_rdma
from multinode.profile.observed import Observed
from multinode.records.samples import WorkerSample
from multinode.stats.unknown import Unknown
from multinode.traffic.algorithms import algorithms_of, protocols_of
from multinode.units import format_bytes, format_count, format_figure, format_list

_MOST_NAMED = 4
_ASKED_GAP = 0.03
_NIC_GAP = 0.05
# From this size on NCCL sends by its protocol for bandwidth.
_LARGE_BYTES = 1 << 20
# Required fit of another algorithm, and misfit of the usual one.
_FITS = 0.03
# Share of the excess.
_MOST = 0.5

CALLS_AT_NICS = RuleGroup("Bytes of a step: requested by calls and expected at NICs")
_CALL = "{op}: the calls request {asked}, but the expected NIC traffic is {expected}: {sharing}"
_CALL_FIGURES = ("op", "asked_bytes", "expected_bytes")


def _call_rule(code: str, about: str, reason: str) -> Rule:
    return CALLS_AT_NICS.rule(code, about=about, message=f"{_CALL}{reason}.", figures=_CALL_FIGURES)


_STAYS = _call_rule(
    "inside-a-node",
    "calls of groups inside a node",
    ("the {workers} of the group are on one node, so the data does not leave the node"),
)
_SHARED_NIC = _call_rule(
    "groups-share-a-nic", "several groups that share a NIC", "{groups} groups of {workers} share the NIC"
)
_GLOO_REDUCE_SCATTER = _call_rule(
    "gloo-reduce-scatter",
    "reduce_scatter on gloo",
    "gloo implements reduce_scatter as an all-reduce, which sends twice as much",
)
_GLOO_BROADCAST = _call_rule(
    "gloo-broadcast",
    "broadcast on gloo",
    "gloo broadcasts over a tree, in which the root sends to several workers and some workers send nothing",
)
_ALL_TO_ALL = _call_rule(
    "all-to-all",
    "all_to_all between nodes with several workers",
    "every worker sends a part to each worker on the other nodes; only the parts for its own node stay on the node",
)
_PATH = _call_rule(
    "path-of-a-call",
    "a path on which a NIC carries the data more than once, or only part of the data",
    "the path that {backend} takes through {workers} on {nodes} nodes sends {often} through a NIC",
)

NIC_COUNTS = RuleGroup("Bytes of a step: expected and counted at NICs")
_GAP_FIGURES = ("ifname", "seen_bytes", "expected_bytes")
_OTHER_TRAFFIC = NIC_COUNTS.rule(
    "other-traffic",
    about="no call sends data between nodes, and the NIC counters show little traffic",
    message="No call sends data between nodes, so the NICs counted only other traffic.",
)
_UNEXPLAINED_TRAFFIC = NIC_COUNTS.rule(
    "unexplained-traffic",
    about="no call sends data between nodes, but a NIC counted enough bytes to be training traffic",
    message="unexplained: no call that sends data between nodes was recorded, but {ifname} on {node} {verb} {seen} "
    "per step. This may be other traffic, or collectives in compiled code, which multinode cannot record.",
    figures=("ifname", "seen_bytes"),
)
_SHARED_INTERFACE = NIC_COUNTS.rule(
    "shared-interface",
    about="nodes that share an interface, such as nodes on one machine",
    message=(
        "{names} share the interface {ifname}, which counted {seen} per step. The expected traffic of these nodes is "
        "{expected}."
    ),
    figures=_GAP_FIGURES,
)
_TOO_LITTLE = NIC_COUNTS.rule(
    "too-little",
    about="a training run that sends too little for a comparison",
    message="The expected traffic ({expected} per step) is too small to distinguish from headers and other traffic.",
    figures=("expected_bytes",),
)
_OTHER_ALGORITHM = NIC_COUNTS.rule(
    "other-algorithm",
    about="the counters match another algorithm or protocol of NCCL",
    message=(
        "The NIC counters match, to within {within}%, all-reduces that use NCCL's {algorithm} algorithm and {protocol} "
        "protocol."
    ),
    figures=("algorithm", "protocol", "within_percent"),
)
_OVER_OTHER = "Per step, {node} {verb} {carried} over {other}, and only {seen}"
_RDMA_PORT = NIC_COUNTS.rule(
    "rdma-port",
    about="an RDMA port carried the traffic that is missing from the NIC's counters",
    message=f"{_OVER_OTHER} over {{ifname}}, whose counters do not include RDMA.{{more}}",
    figures=(*_GAP_FIGURES, "other"),
)
_OTHER_INTERFACE = NIC_COUNTS.rule(
    "other-interface",
    about="another interface carried the traffic that is missing from the NIC's counters",
    message=f"{_OVER_OTHER} of the expected {{expected}} over {{ifname}}. The kernel routes traffic to the other nodes "
    "over {other}, or the backend is configured to use {other}.{more}",
    figures=(*_GAP_FIGURES, "other"),
)
_UNEXPLAINED_LACK = NIC_COUNTS.rule(
    "unexplained-lack",
    about="a NIC counted less than expected, and no other NIC carried the rest",
    message="unexplained: per step, {ifname} on {node} {verb} only {seen} of the expected {expected}, and no other "
    "NIC carried the rest. RDMA without counters, or memory shared by nodes on one machine, may have carried "
    "it.{more}",
    figures=_GAP_FIGURES,
)
_EXCESS = "{ifname} on {node} {verb} {seen} per step instead of the expected {expected}"
_EXCESS_BEFORE = NIC_COUNTS.rule(
    "excess-before",
    about="a NIC counted more than expected, and was already busy before training",
    message=f"{_EXCESS}. Traffic that was already present before training explains at least half of the "
    "difference.{more}",
    figures=_GAP_FIGURES,
)
_EXCESS_OF_FEW_STEPS = NIC_COUNTS.rule(
    "excess-of-few-steps",
    about="a NIC counted more bytes than expected in total, but not in the median step",
    message=f"{_EXCESS}, but only the expected amount in the median step. A few steps carried the rest, for example "
    "steps with checkpoints or evaluations.{more}",
    figures=_GAP_FIGURES,
)
_UNEXPLAINED_EXCESS = NIC_COUNTS.rule(
    "unexplained-excess",
    about="a NIC counted more than expected",
    message=f"unexplained: {_EXCESS}. A network file system with data or checkpoints, or another job, may also use "
    "this NIC.{more}",
    figures=_GAP_FIGURES,
)


def judge_calls(worker: WorkerCalls, flows: NicFlows) -> Iterator[Finding]:
    """Why the expected NIC traffic differs from the requested bytes of the busiest worker.

    Args:
        worker: the busiest.
        flows: expected traffic of all workers' calls.
    """
    asked_all = worker.asked_bytes
    if abs(flows.most - asked_all) <= _ASKED_GAP * max(flows.most, asked_all):
        return
    node, sends = flows.busiest
    for share in flows.shares:
        asked_bytes = sum(
            call.asked_bytes
            for call in worker.calls
            if (call.op, call.backend, call.ranks) == (share.op, share.backend, share.ranks)
        )
        carried = share.carried[node].one_way(sends=sends)
        if abs(carried - asked_bytes) > _ASKED_GAP / 2 * max(flows.most, asked_all):
            yield _judge_share(share, share.groups[node], carried, asked_bytes)


def _judge_share(share: Share, groups: int, carried: float, asked_bytes: float) -> Finding:
    workers = f"{share.ranks} workers"
    shares_nic = share.spans > 1 and groups > 1
    if share.spans == 1:
        rule = _STAYS
    elif share.backend == "gloo" and share.op == "reduce_scatter":
        rule = _GLOO_REDUCE_SCATTER
    elif share.backend == "gloo" and share.op == "broadcast":
        rule = _GLOO_BROADCAST
    elif share.op == "all_to_all":
        rule = _ALL_TO_ALL
    else:
        rule, shares_nic = (_SHARED_NIC, False) if shares_nic else (_PATH, False)
    return rule.found(
        None,
        op=share.op,
        asked=format_bytes(asked_bytes),
        asked_bytes=asked_bytes,
        expected=format_bytes(carried),
        expected_bytes=carried,
        sharing=f"{groups} groups of {workers} share the NIC; " if shares_nic else "",
        groups=groups,
        workers=workers,
        nodes=share.spans,
        backend=share.backend,
        often="data more than once" if carried > asked_bytes else "only part of the data",
    )


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

    def found(self, rule: Rule, **values: object) -> Finding:
        """A finding about this difference."""
        return rule.found(
            self.nics.node,
            ifname=self.nics.ifname,
            verb="sent" if self.sends else "received",
            seen=format_bytes(self.seen),
            seen_bytes=self.seen,
            expected=format_bytes(self.expected),
            expected_bytes=self.expected,
            **values,
        )


def judge_counters(
    observed: Observed, calls: Mapping[int, WorkerCalls], nics: Sequence[NodeNics], flows: NicFlows
) -> Iterator[Finding]:
    """Why NICs counted something other than expected.

    Args:
        observed: the records, of several nodes.
        calls: of the workers that recorded any.
        nics: counted by each node's NICs, of which at least one is known.
        flows: expected.
    """
    shared = observed.shared_interfaces
    gaps = _gaps(flows, nics, shared)
    if not flows.most:
        most = max(gaps, key=lambda gap: gap.seen)
        is_much = most.seen >= LEAST_BYTES_A_WORKER * observed.world_size
        yield most.found(_UNEXPLAINED_TRAFFIC) if is_much else _OTHER_TRAFFIC.found(None)
        return
    yield from _judge_shared(observed, gaps, shared)
    if all(gap.beyond_share(flows.most) <= _NIC_GAP for gap in gaps):
        return
    if flows.most < LEAST_BYTES_A_WORKER * observed.world_size:
        yield _TOO_LITTLE.found(None, expected=format_bytes(flows.most), expected_bytes=flows.most)
    elif (other := _judge_algorithm(observed, calls, nics, flows.most)) is not None:
        yield other
    else:
        yield from _judge_nodes(gaps, flows.most)


def _judge_shared(observed: Observed, gaps: Sequence[_Gap], shared: Sequence[Sequence[int]]) -> Iterator[Finding]:
    by_node = {gap.nics.node: gap for gap in gaps}
    for indices in shared:
        names = [observed.nodes[index].name for index in indices]
        gap = by_node.get(names[0])
        if gap is not None:
            yield gap.found(_SHARED_INTERFACE, names=format_list(names, _MOST_NAMED, "more nodes"))


def _gaps(flows: NicFlows, nics: Sequence[NodeNics], shared: Sequence[Sequence[int]]) -> list[_Gap]:
    """Of each node whose NIC was read; an interface that several nodes share counts what all of them send."""
    sums = {index: sum((flows.nodes[each] for each in indices), Carried()) for indices in shared for index in indices}
    gaps = []
    for index, (alone, node) in enumerate(zip(flows.nodes, nics, strict=True)):
        expected = sums.get(index, alone)
        if not isinstance(node.carried, Unknown):
            both = [
                _Gap(nics=node, sends=way, seen=node.carried.one_way(sends=way), expected=expected.one_way(sends=way))
                for way in (True, False)
            ]
            gaps.append(max(both, key=lambda gap: abs(gap.beyond)))
    return gaps


def _judge_algorithm(
    observed: Observed, calls: Mapping[int, WorkerCalls], nics: Sequence[NodeNics], most: float
) -> Finding | None:
    if all(call.backend != "nccl" for worker in calls.values() for call in worker.calls):
        return None
    tried: list[tuple[float, str, str]] = []
    for protocol, factor in _possible_protocols(observed, calls).items():
        for algorithm in algorithms_of("nccl", "all_reduce"):
            flows = expect_flows(calls, observed, Manner(all_reduce=algorithm.name, wire_factor=factor))
            gaps = _gaps(flows, nics, observed.shared_interfaces)
            tried.append((max(gap.beyond_share(most) for gap in gaps), algorithm.name, protocol))
    misfit, name, protocol = min(tried)
    if misfit > _FITS:
        return None
    within = format_figure(100 * misfit, digits=2)
    return _OTHER_ALGORITHM.found(None, algorithm=name, protocol=protocol, within=within, within_percent=100 * misfit)


def _possible_protocols(observed: Observed, calls: Mapping[int, WorkerCalls]) -> dict[str, float]:
    """NCCL's protocols that can have carried most bytes, each with its factor.

    Between nodes the protocols for small messages have a fraction of the bandwidth, and NCCL takes them for large
    ones only if NCCL_PROTO says so (nccl/src/graph/tuning.cc).
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


def _judge_nodes(gaps: Sequence[_Gap], most: float) -> Iterator[Finding]:
    for sign, judge in ((-1, _judge_lack), (1, _judge_excess)):
        mine = [gap for gap in gaps if sign * gap.beyond > 0 and gap.beyond_share(most) > _NIC_GAP]
        if mine:
            others = len(mine) - 1
            verb = "differs" if others == 1 else "differ"
            more = f" {format_count(others, 'more node')} {verb} in the same way." if others else ""
            yield judge(max(mine, key=lambda gap: abs(gap.beyond)), more)


def _judge_lack(gap: _Gap, more: str) -> Finding:
    other = find_carrier(gap.nics.others, -gap.beyond, sends=gap.sends)
    if other is None:
        return gap.found(_UNEXPLAINED_LACK, more=more)
    carried = format_bytes(gap.nics.others[other].one_way(sends=gap.sends))
    return gap.found(_RDMA_PORT if is_rdma(other) else _OTHER_INTERFACE, other=other, carried=carried, more=more)


def _judge_excess(gap: _Gap, more: str) -> Finding:
    idle, typical = gap.nics.idle, gap.nics.typical
    if idle is not None and idle.one_way(sends=gap.sends) >= _MOST * gap.beyond:
        return gap.found(_EXCESS_BEFORE, more=more)
    if typical is not None and abs(typical.one_way(sends=gap.sends) - gap.expected) <= _NIC_GAP * gap.seen:
        return gap.found(_EXCESS_OF_FEW_STEPS, more=more)
    return gap.found(_UNEXPLAINED_EXCESS, more=more)
