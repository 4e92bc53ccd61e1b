"""NetworkModel: the time of collectives on the measured network, and scaled to others. Pure.

Owns the scaling to other links and workers, and its uncertainty; no computation.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from multinode.errors import UsageError
from multinode.findings.finding import Finding
from multinode.findings.rule import Rule, RuleGroup
from multinode.network.size_scan import ScanReport
from multinode.predict.draws import OTHERWISE, between, linear
from multinode.traffic.algorithms import (
    Layout,
    algorithms_of,
    between_us,
    bus_factor,
    link_share,
    message_steps,
    nic_factor,
    steps_us,
)
from multinode.traffic.step_calls import SMALL_BYTES, Call, GroupScope, SizeCurve, fit_curve
from multinode.units import BITS_PER_BYTE, ETHERNET_MTU, format_count, format_figure, format_rate, goodput_gb_per_s

_US_PER_MS = 1e3
_GB_PER_S = 1e-3  # of bytes in a microsecond
# TCP rarely passes 3 to 5 GB/s, whatever the link.
_TCP_CAP_GB_PER_S = (3.0, 5.0)
# The uncertainties are chosen, and tested against published figures by the tests and measured ones by `back_test`. A
# slower link limits more than the measured one; on a faster one something else may limit.
_PER_DOUBLING_SLOWER = 0.02
_PER_DOUBLING_FASTER = 0.06
_PER_DOUBLING_OF_NODES = 0.05
_STATED_RATE = 0.25
# Share of its rate that an unmeasured link carries if it is more than a cable: an overlay network, a VPN, Wi-Fi, a
# shared uplink; for RDMA a GPU far from its NIC, PCIe access control, an oversubscribed fabric. Published streams over
# overlays reach 0.62 of the host's (mFlow: 16.5 of 26.6 Gbit/s) and less, collectives over RDMA 0.49 (nccl#700) and
# 0.54 (nccl#2409) of the NICs' rate.
_LEAST_CARRIED = 0.4
# Half of the draws beyond `OTHERWISE`: those of a shared link or an overlay that carries more than that.
_ANY_SHARE = 0.3
# From this rate on, clouds may cap a flow: AWS at 5 Gbit/s, and at 10 within a cluster placement group ("Amazon EC2
# instance network bandwidth").
_CLOUD_LINK_GBIT, _FLOW_CAPS_GBIT = 25.0, (5.0, 10.0)
# No single NIC is faster (ConnectX-7, Slingshot 11); nodes with more have a NIC for each GPU.
_FASTEST_NIC_GBIT = 400.0
# Below this share of its payload rate, the link does not limit a stream, and a faster one may not help.
_AS_RATED = 0.8
_OTHER_COLLECTIVE = 0.2
_ALIKE = 0.01


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """The network between the nodes."""

    gbit_per_s: float  # rate of all NICs of a node together; above zero
    mtu: int = 1500  # in bytes
    rdma: bool = False  # whether collectives use RDMA (InfiniBand, RoCE) instead of TCP

    @property
    def goodput_gb_per_s(self) -> float:
        """One-way payload in GB/s; with RDMA the rate itself."""
        return self.gbit_per_s / 8 if self.rdma else goodput_gb_per_s(self.gbit_per_s, self.mtu)


class NetworkCase(msgspec.Struct, frozen=True, kw_only=True):
    """One way in which NCCL may use a network that nobody measured."""

    name: str  # `one of 8 NICs`, `TCP sockets`
    gb_per_s: tuple[float, float]  # bounds of what a node's collectives carry then, in GB/s


class NetworkModel(msgspec.Struct, frozen=True, kw_only=True):
    """A network and its measurements."""

    link: Link  # that it was measured on, or the nominal one without curves
    layout: Layout  # the measuring workers, on at least two nodes
    backend: str = "nccl"  # `nccl` or `gloo`
    curves: dict[str, SizeCurve] = {}  # time over size by collective; empty if nothing was measured
    error: float = 0.0  # median error of the sweep's sizes when each is held out
    stream_gb_per_s: float | None = None  # measured one-way TCP rate in GB/s; None if unknown
    round_trip_us: float | None = None  # of a tiny message between two nodes; None if unknown
    cap_gb_per_s: tuple[float, float] = _TCP_CAP_GB_PER_S  # bounds of the TCP throughput of the nodes
    # bounds of busbw inside a node; None if a run on one node shows its exposed communication
    local_gb_per_s: tuple[float, float] | None = None
    nics: int | None = None  # NICs of a node that the link's rate is of; None if unknown
    cloud: bool | None = None  # whether the nodes are rented from a cloud, which may cap a flow; None if unknown
    case: NetworkCase | None = None  # how NCCL uses it; None is the likely case: every NIC, RDMA if it has that

    @property
    def is_measured(self) -> bool:
        """Whether more than its rate is known."""
        return bool(self.curves) or self.stream_gb_per_s is not None

    def on(self, link: Link) -> NetworkModel:
        """Copy of the network with another link."""
        return msgspec.structs.replace(self, link=link)

    def may_cap_flows(self, link: Link) -> bool:
        """Whether a cloud may cap a TCP flow far below the rate."""
        if link.rdma or self.cloud is False:
            return False
        return self.cloud is True or link.gbit_per_s >= _CLOUD_LINK_GBIT

    def cases(self) -> tuple[NetworkCase, ...]:
        """Other ways than the likely one to use the link; none of a measured network."""
        if self.is_measured:
            return ()
        goodput, nics = self.link.goodput_gb_per_s, self._nics
        one, (slow, fast) = goodput / nics, self.cap_gb_per_s
        cases = []
        if nics > 1:
            cases.append(NetworkCase(name=f"one of {nics} NICs", gb_per_s=(one * _LEAST_CARRIED, one)))
        if self.link.rdma:
            # NCCL opens sockets on every NIC that has an address: on all of them, or on one.
            tcp = goodput_gb_per_s(self.link.gbit_per_s, self.link.mtu)
            cases.append(NetworkCase(name="TCP sockets", gb_per_s=(min(slow, tcp / nics), min(fast * nics, tcp))))
        elif self.may_cap_flows(self.link):
            low, high = (min(goodput, cap / BITS_PER_BYTE) for cap in _FLOW_CAPS_GBIT)
            cases.append(NetworkCase(name="a capped flow", gb_per_s=(low, high)))
        return tuple(cases)

    @property
    def as_rated(self) -> NetworkCase:
        """The case in which the link carries its rate."""
        goodput = self.link.goodput_gb_per_s
        caps = (math.inf, math.inf) if self.link.rdma else self.cap_gb_per_s
        low, high = (min(goodput, cap) for cap in caps)
        return NetworkCase(name="as rated", gb_per_s=(low, high))

    @property
    def _nics(self) -> int:
        rate = self.link.gbit_per_s
        if self.nics is not None or not self.link.rdma or rate <= _FASTEST_NIC_GBIT:
            return self.nics or 1
        return max(self.layout.workers_per_node, math.ceil(rate / _FASTEST_NIC_GBIT))

    def carried(self, link: Link, position: float) -> float:
        """Payload of a link in GB/s, at `Draw.rate`.

        If the measured link did not carry its rate, another one may carry the same share of its own, or no more than
        was measured.
        """
        goodput = link.goodput_gb_per_s
        if self.case is not None:
            return _bounded(self.case.gb_per_s, position)
        if self.stream_gb_per_s is None:
            return goodput if self.curves or position < OTHERWISE else self._badly_carried(link, position)
        part = min(1.0, self.stream_gb_per_s / self.link.goodput_gb_per_s)
        if part >= _AS_RATED:
            return goodput * part
        slow, fast = sorted((goodput * part, min(goodput, self.stream_gb_per_s)))
        return between(position, fast, math.sqrt(slow * fast), slow)

    def _badly_carried(self, link: Link, position: float) -> float:
        goodput = link.goodput_gb_per_s
        least = goodput * _LEAST_CARRIED
        if link.rdma:
            return least
        # A faster link is never slower, so that this holds below the rates that clouds cap, too.
        if self.cloud is not False:
            least = min(least, _FLOW_CAPS_GBIT[0] / BITS_PER_BYTE)
        # What others leave of a shared link, or an overlay of a processor, is any share down to the least.
        return 1 / linear((position - OTHERWISE) / _ANY_SHARE, 1 / goodput, 1 / goodput, 1 / least)


class UncertaintySource(Finding, frozen=True, kw_only=True):
    """One reason for the width of an interval."""

    part: str  # the field of Draw that it widens
    relative: float  # error in either direction: 0.1 is 10%; 0 if it has its own bounds


class DoubtRule(Rule, frozen=True, kw_only=True):
    """One kind of uncertainty. `relative` is a value of all; without it, draws cover the uncertainty."""

    part: str  # as in `UncertaintySource`

    def found(self, on: str | None, /, **values: object) -> UncertaintySource:
        """As of any rule, with the error."""
        relative: Any = values.get("relative", 0.0)
        return UncertaintySource(**self.fields(on, values), part=self.part, relative=relative)


class DoubtRules(RuleGroup):
    """Rules of uncertainty."""

    def doubt(self, code: str, part: str, *, about: str, message: str) -> DoubtRule:
        """Declare one."""
        return self.add(DoubtRule(code=code, part=part, about=about, message=message))


DOUBTS = DoubtRules("Uncertainty of a prediction: the network")
_ONLY_A_STREAM = DOUBTS.doubt(
    "only-a-stream",
    "network",
    about="a network on which only a TCP stream was measured",
    message="no collective was measured, only a TCP stream of {stream} GB/s",
)
_ONLY_A_RATE = DOUBTS.doubt(
    "only-a-rate",
    "network",
    about="a network for which only the link rate is known",
    message="no collective was measured, and only the link rate is known; {carried}",
)
_HELD_OUT_SIZES = DOUBTS.doubt(
    "held-out-sizes",
    "network",
    about="message sizes that nccl-test did not measure",
    message="times for message sizes that nccl-test did not measure are estimated from the measured sizes",
)
_OTHER_LINK = DOUBTS.doubt(
    "other-link",
    "network",
    about="a link other than the measured one",
    message="the link is {times} times {way} than the measured one",
)
_OTHER_WORKERS = DOUBTS.doubt(
    "other-workers",
    "network",
    about="a number of nodes or workers that was not measured",
    message="the network was measured with {measured}, but the prediction is for {requested}",
)
_OTHER_COLLECTIVES = DOUBTS.doubt(
    "other-collectives",
    "network",
    about="collectives that were not measured",
    message="these collectives were not measured, so their times are derived from others: {collectives}",
)


class CommTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Time of the calls of a step, without overlap, in ms."""

    micro_batch_ms: float = 0.0  # of each micro-batch, hideable; `step_ms` is of what is sent once per step
    step_ms: float = 0.0
    after_ms: float = 0.0  # once per step, for calls that nothing overlaps

    def __mul__(self, factor: float) -> CommTimes:
        """Scaled."""
        micro_batch_ms, step_ms, after_ms = (
            time_ms * factor for time_ms in (self.micro_batch_ms, self.step_ms, self.after_ms)
        )
        return CommTimes(micro_batch_ms=micro_batch_ms, step_ms=step_ms, after_ms=after_ms)


class _Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where a call runs."""

    link: Link
    layout: Layout
    position: float  # `Draw.rate`


def comm_times(
    network: NetworkModel, calls: Iterable[Call], link: Link, layout: Layout, position: float = 0.0
) -> CommTimes:
    """Time of the calls of a step on another link with other workers.

    Of each measured time, alpha is constant per step of the algorithm, and the rest scales with the bytes through the
    busiest NIC and with the inverse goodput of the link. Calls inside a node are excluded if a run on one node was
    measured, which shows what they expose.

    Args:
        network: as measured.
        calls: of a step.
        link: between the nodes.
        layout: of the workers.
        position: `Draw.rate`.
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
        place = _Place(link=link, layout=layout, position=position)
        totals[kind] += call.times * _call_us(network, call, place) / _US_PER_MS
    return CommTimes(**totals)


def network_doubts(
    network: NetworkModel, calls: Sequence[Call], link: Link, layout: Layout
) -> tuple[UncertaintySource, ...]:
    """Errors of the times, by reason; caps and algorithms have their own bounds and are excluded."""
    if not network.curves:
        return (_stated(network, link),)
    doubts = [_HELD_OUT_SIZES.found(None, relative=network.error)] if network.error else []
    doublings = math.log2(link.goodput_gb_per_s / network.link.goodput_gb_per_s)
    if abs(doublings) > _ALIKE:
        rate = _PER_DOUBLING_FASTER if doublings > 0 else _PER_DOUBLING_SLOWER
        way, times = "faster" if doublings > 0 else "slower", format_figure(2 ** abs(doublings))
        doubts.append(_OTHER_LINK.found(None, relative=rate * abs(doublings), times=times, way=way))
    if layout != network.layout:
        more = abs(math.log2(layout.nodes / network.layout.nodes))
        more = max(more, abs(math.log2(layout.workers / network.layout.workers)))
        told = {"measured": _told(network.layout), "requested": _told(layout)}
        doubts.append(_OTHER_WORKERS.found(None, relative=_PER_DOUBLING_OF_NODES * more, **told))
    others = sorted({call.collective for call in calls if call.size_bytes >= SMALL_BYTES} - set(network.curves))
    if others:
        doubts.append(_OTHER_COLLECTIVES.found(None, relative=_OTHER_COLLECTIVE, collectives=", ".join(others)))
    return tuple(doubts)


def _stated(network: NetworkModel, link: Link) -> UncertaintySource:
    if network.stream_gb_per_s is not None:
        stream = format_figure(network.stream_gb_per_s)
        return _ONLY_A_STREAM.found(None, relative=_STATED_RATE, stream=stream)
    least = f"{_LEAST_CARRIED:.0%}"
    if link.rdma:
        carried = (
            "with GPUs far from their NIC, PCIe access control or an oversubscribed fabric, collectives may reach "
            f"only {least} of it"
        )
    else:
        carried = f"overlay networks, VPNs, Wi-Fi and shared uplinks may carry only {least} of it"
        if network.may_cap_flows(link):
            carried += f", and clouds may cap a flow at {_FLOW_CAPS_GBIT[0]:g} Gbit/s"
    return _ONLY_A_RATE.found(None, relative=_STATED_RATE, carried=carried)


def why_measure(network: NetworkModel) -> str:
    """Why to measure a stream, and how to name it; empty if one was measured, or the rate is sufficient."""
    if network.is_measured or not network.may_cap_flows(network.link):
        return ""
    low, high = _FLOW_CAPS_GBIT
    return (
        f"{format_rate(network.link.gbit_per_s)} is nominal, not measured: clouds cap a flow at {low:g} to {high:g} "
        "Gbit/s and advertise the maximum. Measure a stream (iperf3) and give its rate: --stream RATE, or "
        "payload_gbit_per_s in a figures file. If the nodes are not in a cloud, set network.cloud: false"
    )


def _told(layout: Layout) -> str:
    nodes = format_count(layout.nodes, "node")
    return f"{layout.workers} workers on {nodes}"


def _call_us(network: NetworkModel, call: Call, place: _Place) -> float:
    if place.layout.nodes == 1 or call.reach is GroupScope.NODE:
        rate = _bounded(network.local_gb_per_s or (math.inf, math.inf), place.position)
        return bus_factor(call.collective, place.layout.workers_per_node) * call.size_bytes / rate * _GB_PER_S
    layout = place.layout
    if call.reach in {GroupScope.ACROSS, GroupScope.LEADERS}:
        place = msgspec.structs.replace(place, layout=Layout(nodes=layout.nodes))
    steps = message_steps(network.backend, call.collective, place.layout)
    if call.size_bytes < SMALL_BYTES and network.round_trip_us is not None:
        return steps_us(network.backend, steps, network.round_trip_us)
    # One ring per local rank through the same NICs: like one call of all their bytes between single workers.
    size = call.size_bytes * (layout.workers_per_node if call.reach is GroupScope.ACROSS else 1)
    passing = nic_factor(network.backend, call.collective, place.layout) * size
    if not network.curves:
        rate = min(network.carried(place.link, place.position), _cap(network, place))
        return passing / rate * _GB_PER_S
    measured = call.collective if call.collective in network.curves else next(iter(network.curves))
    alpha_us, rest_us = _alpha_and_rest(network.curves[measured], size)
    message_us = between_us(network.backend, message_steps(network.backend, measured, network.layout), alpha_us)
    rest_us *= _passes(network, measured, call.collective, place)
    return steps_us(network.backend, steps, message_us) + _on_link(network, rest_us, passing, place)


def _on_link(network: NetworkModel, rest_us: float, passing_bytes: float, place: _Place) -> float:
    goodput, measured = (network.carried(link, place.position) for link in (place.link, network.link))
    there_us = rest_us * measured / goodput
    if place.layout != network.layout:
        there_us = max(there_us, passing_bytes / goodput * _GB_PER_S)
    if goodput <= measured:
        return there_us
    # The cap is a general one of TCP; the measured rate may be higher.
    return max(there_us, min(rest_us, passing_bytes / _cap(network, place) * _GB_PER_S))


def _cap(network: NetworkModel, place: _Place) -> float:
    if place.link.rdma or network.case is not None:
        return math.inf
    return _bounded(network.cap_gb_per_s, place.position)


def _bounded(bounds: tuple[float, float], position: float) -> float:
    return between(position, bounds[1], math.sqrt(math.prod(bounds)), bounds[0])


def _alpha_and_rest(curve: SizeCurve, size_bytes: float) -> tuple[float, float]:
    time_us = curve.predict_us(size_bytes)
    # The fit of an interpolated curve is poor: its smallest message is a better estimate of the fixed cost.
    alpha_us = min(curve.alpha_us if curve.method == "fit" else curve.points[0][1], time_us)
    return alpha_us, time_us - alpha_us


def _passes(network: NetworkModel, measured: str, collective: str, place: _Place) -> float:
    """Bytes through the busiest NIC relative to the measurement.

    The backend may use any of its algorithms: the usual one is assumed, and the bounds cover all.
    """
    ours, theirs = (network.backend, collective, place.layout), (network.backend, measured, network.layout)
    usual = nic_factor(*ours) / link_share(*ours) / (nic_factor(*theirs) / link_share(*theirs))
    if not place.position or place.layout == network.layout or measured != collective:
        return usual
    ratios = [usual]
    for algorithm in algorithms_of(network.backend, collective):
        there, here = (
            nic_factor(network.backend, collective, layout, algorithm.name) for layout in (place.layout, network.layout)
        )
        if here > 0:
            ratios.append(there / here)
    return between(place.position, min(ratios), usual, max(ratios))


# Smaller messages take the fixed cost only.
_LEAST_BYTES = 1 << 20
_LEAST_OTHERS = 2


def network_of_scan(report: ScanReport, link_gbit_per_s: float | None) -> NetworkModel:
    """The network from an nccl-test.

    Args:
        report: of an nccl-test on several nodes.
        link_gbit_per_s: rate of a node's NIC; None if unknown.

    Raises:
        UsageError: it ran on one node, its link rate is unknown, or its times are implausible.
    """
    if len(report.nodes) <= 1:
        raise UsageError(
            f"nccl-test {report.run_id} ran on one node, which says nothing about a network",
            hint="measure on several nodes: multinode nccl-test --hosts H",
        )
    if link_gbit_per_s is None:
        raise UsageError(
            f"nccl-test {report.run_id} does not report its link rate, so it cannot be scaled to another link",
            hint="give it: --link-measured 1gbit",
        )
    fits = {name: _again(curve, report.run_id) for name, curve in report.curves.items()}
    curves = {name: curve for name, curve in fits.items() if curve.bandwidth_gb_per_s is not None}
    errors = [held_back_errors(curve).values() for curve in curves.values()]
    over_rdma = report.path is not None and report.path.over_rdma
    rdma = over_rdma or (report.nccl is not None and report.nccl.over_rdma)
    return NetworkModel(
        link=Link(gbit_per_s=link_gbit_per_s, mtu=report.mtu or ETHERNET_MTU, rdma=rdma),
        layout=Layout.of(report.workers),
        backend=report.backend,
        curves=curves,
        stream_gb_per_s=report.tcp_gb_per_s if report.tcp_gb_per_s and not rdma else None,
        # Over RDMA, NCCL's small messages do not use TCP.
        round_trip_us=None if rdma else report.tcp.round_trip_us,
        error=max((statistics.median(map(abs, each)) for each in errors if each), default=0.0),
    )


def stated_network(link: Link, layout: Layout, backend: str, stream_gb_per_s: float | None = None) -> NetworkModel:
    """A network with only a nominal link rate, and the measured TCP rate if there is one."""
    return NetworkModel(link=link, layout=layout, backend=backend, stream_gb_per_s=stream_gb_per_s)


def held_back_errors(curve: SizeCurve, least_bytes: int = _LEAST_BYTES) -> dict[int, float]:
    """Relative error of each point from this size on, predicted from all others; negative if the prediction is lower.

    By size in bytes; empty if the curve has fewer than three points.
    """
    points = curve.points
    if len(points) <= _LEAST_OTHERS:
        return {}
    return {
        size_bytes: fit_curve(points[:place] + points[place + 1 :]).predict_us(size_bytes) / time_us - 1
        for place, (size_bytes, time_us) in enumerate(points)
        if size_bytes >= least_bytes
    }


def _again(curve: SizeCurve, run_id: str) -> SizeCurve:
    try:
        return fit_curve(curve.points)
    except ValueError as error:
        raise UsageError(
            f"nccl-test {run_id} cannot be used: {error}", hint="measure again: multinode nccl-test"
        ) from None
