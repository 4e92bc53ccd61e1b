"""NetworkModel: what collectives take on the network that was measured, and on others by the measured one. Pure.

Owns how a time carries over to another link and to other workers, and how far that may be trusted; no computation.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec

from multinode.errors import UsageError
from multinode.job.step_calls import SMALL_BYTES, StepCall
from multinode.network.size_scan import ScanReport
from multinode.traffic.algorithms import (
    Layout,
    algorithms_of,
    between_us,
    bus_factor,
    card_factor,
    link_share,
    message_steps,
    node_flows,
    steps_us,
)
from multinode.traffic.size_curve import SizeCurve, fit_curve, held_back, median_error
from multinode.traffic.traffic import GroupScope
from multinode.units import format_count, format_rate, goodput_gb_per_s

_US_PER_MS = 1e3
_BITS_PER_BYTE = 8
_GB_PER_S = 1e-3  # of bytes in a microsecond
# TCP rarely passes 3 to 5 GB/s, whatever the link.
_TCP_CAP_GB_PER_S = (3.0, 5.0)
# Doubts are chosen, and held against published figures by the tests and against measured ones by `back_test`. A slower
# link is more of a limit than the measured one was; on a faster one something else may be.
_PER_DOUBLING_SLOWER = 0.02
_PER_DOUBLING_FASTER = 0.06
_PER_DOUBLING_OF_NODES = 0.05
_STATED_RATE = 0.25
# What a link carries of its rate where nobody has measured it and it is more than a cable: an overlay network, a VPN,
# Wi-Fi, a shared uplink; of RDMA a GPU that is far from its NIC, PCIe access control, an oversubscribed fabric. Chosen:
# published streams over overlays reach 0.62 of the host's (mFlow: 16.5 of 26.6 Gbit/s) and less, collectives over RDMA
# 0.49 (nccl#700) and 0.54 (nccl#2409) of the NICs'.
_LEAST_CARRIED = 0.4
# Rates from here on are those of servers and of clouds, which cap a flow: AWS at 5 Gbit/s, and at 10 within a cluster
# placement group ("Amazon EC2 instance network bandwidth").
_CLOUD_LINK_GBIT, _FLOW_CAPS_GBIT = 25.0, (5.0, 10.0)
# Below this part of its payload rate, a link is not what limits a stream: a faster one need not help.
_AS_RATED = 0.8
_OTHER_COLLECTIVE = 0.2
_ALIKE = 0.01


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """The network between the nodes.

    Attributes:
        gbit_per_s: rate of a node's NIC, of all its NICs together; above zero.
        mtu: in bytes.
        rdma: whether collectives go by RDMA (InfiniBand, RoCE) and not by TCP.
    """

    gbit_per_s: float
    mtu: int = 1500
    rdma: bool = False

    @property
    def goodput_gb_per_s(self) -> float:
        """Payload that it carries one way, GB/s; of RDMA the rate itself."""
        return self.gbit_per_s / 8 if self.rdma else goodput_gb_per_s(self.gbit_per_s, self.mtu)


class NetworkModel(msgspec.Struct, frozen=True, kw_only=True):
    """A network and what was measured on it.

    Attributes:
        link: that it was measured on, or, without curves, that was stated.
        layout: the workers that measured, on two nodes at least.
        backend: `nccl` or `gloo`.
        curves: time over size by collective; empty where nothing was measured.
        error: median error of the sweep's sizes when each is held back.
        stream_gb_per_s: what TCP was measured to carry on the link one way, GB/s; None where nobody has measured it.
        round_trip_us: of a message of next to no bytes between two nodes; None is unknown.
        cap_gb_per_s: of what the nodes themselves get through TCP, between which bounds.
        local_gb_per_s: busbw among the workers of one node, between which bounds; None where a run on one node tells
            what they expose.
    """

    link: Link
    layout: Layout
    backend: str = "nccl"
    curves: dict[str, SizeCurve] = {}
    error: float = 0.0
    stream_gb_per_s: float | None = None
    round_trip_us: float | None = None
    cap_gb_per_s: tuple[float, float] = _TCP_CAP_GB_PER_S
    local_gb_per_s: tuple[float, float] | None = None

    def carried(self, link: Link, end: int) -> float:
        """GB/s of payload that a link carries, at an end of what is not known.

        Where the measured one did not carry its rate, another may carry the same part of its own, or no more than was
        measured, whatever it says.
        """
        goodput = link.goodput_gb_per_s
        if self.stream_gb_per_s is None:
            if end <= 0 or self.curves:
                return goodput
            least = goodput * _LEAST_CARRIED
            return least if link.rdma else min(least, _FLOW_CAPS_GBIT[0] / _BITS_PER_BYTE)
        part = min(1.0, self.stream_gb_per_s / self.link.goodput_gb_per_s)
        if part >= _AS_RATED:
            return goodput * part
        slow, fast = sorted((goodput * part, min(goodput, self.stream_gb_per_s)))
        return {-1: fast, 0: math.sqrt(slow * fast), 1: slow}[end]


class Assumed(msgspec.Struct, frozen=True, kw_only=True):
    """Which end of what is not known is taken.

    Attributes:
        end: -1 the fast end, 0 the middle, 1 the slow end.
        stretch: what every call's time is multiplied with; `bulk` besides that of calls that are no small ones.
    """

    end: int = 0
    stretch: float = 1.0
    bulk: float = 1.0


USUAL = Assumed()


class UncertaintySource(msgspec.Struct, frozen=True, kw_only=True):
    """One reason for which an interval is wide.

    Attributes:
        part: of what: `network`, `compute`, `cores` (compute, which may take less), `overlap` or `step`, the whole.
        relative: how far off that may be, upwards or downwards: 0.1 is 10 %; 0 where it is an end of its own.
    """

    part: str
    relative: float
    why: str


class CommTimes(msgspec.Struct, frozen=True, kw_only=True):
    """What the calls of a step take alone, in ms.

    Attributes:
        micro_batch_ms: of each micro-batch, hideable; likewise `step_ms` once a step.
        after_ms: once a step, of calls beside which nothing is computed.
    """

    micro_batch_ms: float = 0.0
    step_ms: float = 0.0
    after_ms: float = 0.0


class _Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where a call is to be made, and what is assumed of it."""

    link: Link
    layout: Layout
    assumed: Assumed


def comm_times(
    network: NetworkModel, calls: Iterable[StepCall], link: Link, layout: Layout, assumed: Assumed = USUAL
) -> CommTimes:
    """What the calls of a step take on another link with other workers.

    Of each measured time, alpha stays as it is for every step of the algorithm, and the rest grows with what passes the
    busiest NIC and with one over the link's goodput. Calls inside a node are left out where a run on one was measured,
    which tells what they expose.
    """
    totals = {"micro_batch_ms": 0.0, "step_ms": 0.0, "after_ms": 0.0}
    alone = layout.nodes == 1
    for call in calls:
        if alone and call.reach in {GroupScope.ACROSS, GroupScope.LEADERS}:
            continue
        inside = alone or call.reach is GroupScope.NODE
        if inside and (network.local_gb_per_s is None or layout.workers_per_node == 1):
            continue
        kind = "after_ms" if not call.hideable else "micro_batch_ms" if call.per_micro_batch else "step_ms"
        place = _Place(link=link, layout=layout, assumed=assumed)
        stretch = assumed.stretch * (1.0 if call.size_bytes < SMALL_BYTES else assumed.bulk)
        totals[kind] += call.times * stretch * _call_us(network, call, place) / _US_PER_MS
    return CommTimes(**totals)


def network_doubts(
    network: NetworkModel, calls: Sequence[StepCall], link: Link, layout: Layout
) -> tuple[UncertaintySource, ...]:
    """How far off the times may be, by reason; caps and algorithms are ends of their own, and not among them."""
    if not network.curves:
        return (_doubt(_STATED_RATE, _why_stated(network, link)),)
    found = [_doubt(network.error, "the error on sizes held back from the size scan")] if network.error else []
    doublings = math.log2(link.goodput_gb_per_s / network.link.goodput_gb_per_s)
    if abs(doublings) > _ALIKE:
        rate = _PER_DOUBLING_FASTER if doublings > 0 else _PER_DOUBLING_SLOWER
        way = "faster" if doublings > 0 else "slower"
        found.append(_doubt(rate * abs(doublings), f"the link is {2 ** abs(doublings):.3g} times {way} than measured"))
    if layout != network.layout:
        more = abs(math.log2(layout.nodes / network.layout.nodes))
        more = max(more, abs(math.log2(layout.workers / network.layout.workers)))
        found.append(
            _doubt(
                _PER_DOUBLING_OF_NODES * more,
                f"{_told(network.layout)} measured, {_told(layout)} requested",
            )
        )
    others = sorted({call.collective for call in calls if call.size_bytes >= SMALL_BYTES} - set(network.curves))
    if others:
        found.append(_doubt(_OTHER_COLLECTIVE, f"not measured, derived from other collectives: {', '.join(others)}"))
    return tuple(found)


def _why_stated(network: NetworkModel, link: Link) -> str:
    if network.stream_gb_per_s is not None:
        return f"no collective was measured: a TCP stream of {network.stream_gb_per_s:.3g} GB/s is all that is known"
    told = "no collective was measured: the link's rate is all that is known, of which "
    if link.rdma:
        least = f"{_LEAST_CARRIED:.0%}"
        return f"{told}GPUs far from their NIC, PCIe access control and oversubscribed fabrics leave down to {least}"
    told += f"overlay networks, VPNs, Wi-Fi and shared uplinks carry down to {_LEAST_CARRIED:.0%}"
    return f"{told}, and clouds a flow of {_FLOW_CAPS_GBIT[0]:g} Gbit/s" if _may_cap_flows(link) else told


def _may_cap_flows(link: Link) -> bool:
    return not link.rdma and link.gbit_per_s >= _CLOUD_LINK_GBIT


def why_measure(network: NetworkModel) -> str:
    """Why a stream should be measured, and how to name it; empty where one was, or the rate tells as much."""
    if network.curves or network.stream_gb_per_s is not None or not _may_cap_flows(network.link):
        return ""
    low, high = _FLOW_CAPS_GBIT
    return (
        f"{format_rate(network.link.gbit_per_s)} is stated and not measured: clouds cap a flow at {low:g} to {high:g} "
        "Gbit/s, and promise rates up to theirs. Measure what a stream carries (iperf3) and name it: --stream RATE, or "
        "payload_gbit_per_s in a file of figures"
    )


def widest(doubts: Iterable[UncertaintySource], part: str) -> float:
    """All doubts of a part together, as a factor of at least 1."""
    return math.prod(1 + doubt.relative for doubt in doubts if doubt.part == part)


def _doubt(relative: float, why: str) -> UncertaintySource:
    return UncertaintySource(part="network", relative=relative, why=why)


def _told(layout: Layout) -> str:
    nodes = format_count(layout.nodes, "node")
    return f"{layout.workers} workers on {nodes}"


def _call_us(network: NetworkModel, call: StepCall, place: _Place) -> float:
    """One call of this size there."""
    if place.layout.nodes == 1 or call.reach is GroupScope.NODE:
        low, high = network.local_gb_per_s or (math.inf, math.inf)
        rate = _between(low, high, place.assumed)
        return bus_factor(call.collective, place.layout.workers_per_node) * call.size_bytes / rate * _GB_PER_S
    layout = place.layout
    if call.reach in {GroupScope.ACROSS, GroupScope.LEADERS}:
        place = msgspec.structs.replace(place, layout=Layout(nodes=layout.nodes))
    steps = message_steps(network.backend, call.collective, place.layout)
    if call.size_bytes < SMALL_BYTES and network.round_trip_us is not None:
        return steps_us(network.backend, steps, network.round_trip_us)
    # One ring for each local rank, all through the same NICs: as one call of their bytes between single workers.
    size = call.size_bytes * (layout.workers_per_node if call.reach is GroupScope.ACROSS else 1)
    passing = card_factor(network.backend, call.collective, place.layout) * size
    if not network.curves:
        rate = min(network.carried(place.link, place.assumed.end), _cap(network, place))
        return passing / rate * _GB_PER_S
    measured = call.collective if call.collective in network.curves else next(iter(network.curves))
    alpha_us, rest_us = _alpha_and_rest(network.curves[measured], size)
    message_us = between_us(network.backend, message_steps(network.backend, measured, network.layout), alpha_us)
    rest_us *= _passes(network, measured, call.collective, place)
    return steps_us(network.backend, steps, message_us) + _on_link(network, rest_us, passing, place)


def _on_link(network: NetworkModel, rest_us: float, passing_bytes: float, place: _Place) -> float:
    """What of a time is bandwidth, on another link."""
    goodput, measured = (network.carried(link, place.assumed.end) for link in (place.link, network.link))
    there_us = rest_us * measured / goodput
    if place.layout != network.layout:
        there_us = max(there_us, passing_bytes / goodput * _GB_PER_S)
    if goodput <= measured:
        return there_us
    # The cap is of TCP in general: what was measured here may be better.
    return max(there_us, min(rest_us, passing_bytes / _cap(network, place) * _GB_PER_S))


def _cap(network: NetworkModel, place: _Place) -> float:
    """GB/s that a node gets through its network at best."""
    if place.link.rdma:
        return math.inf
    return _between(*network.cap_gb_per_s, place.assumed)


def _between(low: float, high: float, assumed: Assumed) -> float:
    """Of a rate's bounds the one at the end that is assumed."""
    return {-1: high, 0: math.sqrt(low * high), 1: low}[assumed.end]


def _alpha_and_rest(curve: SizeCurve, size_bytes: float) -> tuple[float, float]:
    time_us = curve.predict_us(size_bytes)
    # An interpolated curve's line is a poor one: its smallest message tells better what every message costs.
    alpha_us = min(curve.alpha_us if curve.method == "fit" else curve.points[0][1], time_us)
    return alpha_us, time_us - alpha_us


def _passes(network: NetworkModel, measured: str, collective: str, place: _Place) -> float:
    """How many times as much passes the busiest NIC as in what was measured.

    The backend may have run, and may run, any of its algorithms: the usual one is taken, and the ends are of all.
    """
    ours, theirs = (network.backend, collective, place.layout), (network.backend, measured, network.layout)
    usual = card_factor(*ours) / link_share(*ours) / (card_factor(*theirs) / link_share(*theirs))
    if place.assumed.end == 0 or place.layout == network.layout or measured != collective:
        return usual
    ratios = [usual]
    for algorithm in algorithms_of(network.backend, collective):
        there, here = (
            max(max(node.sent, node.received) for node in node_flows(algorithm.flows(layout), layout))
            for layout in (place.layout, network.layout)
        )
        if here > 0:
            ratios.append(there / here)
    return max(ratios) if place.assumed.end > 0 else min(ratios)


_ETHERNET_MTU = 1500
# Smaller messages take what every message costs, whatever they carry.
_LEAST_BYTES = 1 << 20


def network_of_scan(report: ScanReport, link_gbit_per_s: float | None) -> NetworkModel:
    """What the sweep measured.

    Args:
        report: of an nccl-test on several nodes.
        link_gbit_per_s: rate of a node's NIC; None is unknown.

    Raises:
        UsageError: it ran on one node, its link's rate is not known, or it has no times that can be.
    """
    if len(report.nodes) <= 1:
        raise UsageError(
            f"nccl-test {report.run_id} ran on one node: that tells nothing of a network",
            hint="measure on several: multinode nccl-test --hosts H",
        )
    if link_gbit_per_s is None:
        raise UsageError(
            f"nccl-test {report.run_id} does not tell the rate of its link: no other link can be told from it",
            hint="name it, in Gbit/s: --link-measured 1",
        )
    curves = {name: _again(curve, report.run_id) for name, curve in report.curves.items()}
    errors = [median_error(held_back(curve.points, _LEAST_BYTES)) for curve in curves.values()]
    over_rdma = report.path is not None and report.path.over_rdma
    rdma = over_rdma or (report.nccl is not None and report.nccl.over_rdma)
    return NetworkModel(
        link=Link(gbit_per_s=link_gbit_per_s, mtu=report.mtu or _ETHERNET_MTU, rdma=rdma),
        layout=Layout.of(report.workers),
        backend=report.backend,
        curves=curves,
        stream_gb_per_s=report.tcp_gb_per_s if report.tcp_gb_per_s and not rdma else None,
        # NCCL's small messages over RDMA pass no TCP.
        round_trip_us=None if rdma else report.tcp.round_trip_us,
        error=max((error for error in errors if error is not None), default=0.0),
    )


def stated_network(link: Link, layout: Layout, backend: str, stream_gb_per_s: float | None = None) -> NetworkModel:
    """Of a link whose rate is all that is known, and what TCP was measured to carry on it."""
    return NetworkModel(link=link, layout=layout, backend=backend, stream_gb_per_s=stream_gb_per_s)


def _again(curve: SizeCurve, run_id: str) -> SizeCurve:
    """Through the same points: a file may hold anything."""
    try:
        return fit_curve(curve.points)
    except ValueError as error:
        raise UsageError(
            f"nccl-test {run_id} cannot be used: {error}", hint="measure anew: multinode nccl-test"
        ) from None
