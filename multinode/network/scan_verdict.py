"""judge_scan: evidence -> Verdict: whether a size scan is what the network gives, and who or what to look at if not.

Wrong values come before any speed. A cause needs evidence of its own, and a scan that is well has none but what is
wrong in itself; each is one small function.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from multinode.cluster.facts import Interface
from multinode.network.nic_path_check import NicPathCheck
from multinode.traffic.algorithms import (
    CollectiveRow,
    Layout,
    algorithms_of,
    card_factor,
    link_share,
    message_steps,
    steps_us,
)
from multinode.traffic.pair_speeds import Odd, PairSpeed, RawTcp, find_odd, find_odd_in_ring, slowest_gb_per_s
from multinode.units import format_list, format_rate, format_size, goodput_gb_per_s

_BITS_PER_BYTE = 8
_ETHERNET_MTU = 1500
_LARGE_BYTES = 1 << 20
_SMALL_BYTES = 4096
# From here on processors bound what TCP reaches, and repeats differ.
_FAST_LINK_GBIT = 10.0
# More than that is not what a message costs: somebody is waited for.
_START_MOST_US = 2000.0
# Below the first a figure is slow on links that TCP fills with ease, below the second on faster ones. A stream fills
# 10 Gbit/s; a collective there shares the processor with it.
_COLLECTIVE_ENOUGH = (0.85, 0.7)
_TCP_ENOUGH = (0.8, 0.5)
# What RDMA carries of a link; a slot's own packets take some of what it says.
_RDMA_ENOUGH = 0.7
# More than that no link carries: frames that are larger than its MTU says, and clocks, make less of a difference.
_MORE_THAN_A_LINK = 1.05
# AWS caps a flow at 5 Gbit/s, and at 10 within a cluster placement group ("Amazon EC2 instance network bandwidth").
_FLOW_CAPS_GBIT, _NEAR_A_CAP = (5.0, 10.0), (0.9, 1.02)
# Sizes from here on reach half of what smaller ones do: packets are lost.
_FALLEN, _LEAST_FALLEN = 0.6, 2
# TCP rarely passes 3 to 5 GB/s, whatever the link.
_TCP_MOST_GB_PER_S = 3.0
_BUSY_PERCENT = 90.0
_WAIT_NOTICED = 0.2
_ONE_OF_MANY = 0.7
# Where TCP itself is the limit, and not a fault.
_TCP_LIMIT_LINK_GBIT = 25.0
_TCP_LIMIT_SHARE = 0.7
# A switch answers in a tenth of it.
_LAN_ROUND_TRIP_US = 1000.0
_ODD_ROUND_TRIP_US = 500.0
_ODD_ROUND_TRIPS = 5.0
_ODD_NEEDS = 3
# A small message may take ten times what the wire needs: that is the software. Beyond, somebody waits.
_SMALL_FACTOR = 10.0
_SMALL_LEAST_US = 5000.0
_SOCKETS = (
    "measure before setting: NCCL_SOCKET_NTHREADS=2 NCCL_NSOCKS_PERTHREAD=4; their product is at most 64, and more can "
    "be far slower"
)
_BUFFERS = "a larger MTU, a faster core, or socket buffers: sysctl net.ipv4.tcp_rmem net.ipv4.tcp_wmem"
_PLACEMENT = "on AWS, put the nodes into one cluster placement group"


class SizeShare(msgspec.Struct, frozen=True, kw_only=True):
    """How much of the network one large message used.

    Attributes:
        card_gb_per_s: what passed the busiest card one way.
        busbw_gb_per_s: as nccl-tests has it.
        share_of_ceiling: of the TCP line rate of the slowest link; None where its rate is not known.
        share_of_tcp: of what raw TCP reached around the ring; None where it was not tried. Likewise `share_of_rdma`.
        usual_share: the share of a link that the backend gets for this collective where all is well.
        fill: of the lesser of the two and of `usual_share`, less the time that a small message takes as well; None
            where neither is known.
    """

    collective: str
    size_bytes: int
    card_gb_per_s: float
    busbw_gb_per_s: float
    share_of_ceiling: float | None = None
    share_of_tcp: float | None = None
    share_of_rdma: float | None = None
    usual_share: float = 1.0
    fill: float | None = None


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """One explanation.

    Attributes:
        code: what tells it from others.
        figures: what was seen, each with its unit in its name, and names of nodes or collectives.
        by_node: the figure of each node concerned.
        text: what was seen and what it means, a sentence without its full stop; likewise `hint`, what to look at or to
            try; empty where a cause before it has the same.
        nodes: where, as far as the evidence tells.
    """

    code: str = ""
    figures: dict[str, float | str] = {}
    by_node: dict[str, float] = {}
    text: str = ""
    hint: str = ""
    nodes: tuple[str, ...] = ()


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be said of a size scan.

    Attributes:
        status: `ok`, `slow`, `wrong_values`, `wrong_path` (other interfaces carried it), `one_node`, `inconclusive` or
            `empty` (nothing was measured by all workers).
        text: one line.
        over_rdma: whether the collectives went by RDMA.
        worst: of the largest size of each collective, the one that fills the network least; one that passed more than
            the link carries before it.
        nics: how many NICs of a node the link's rate is of.
        nodes: names to look at, the likeliest first.
        causes: likewise; empty where there is nothing to fix.
        shares: how much of the network every large message used.
    """

    status: str = ""
    text: str = ""
    over_rdma: bool = False
    worst: SizeShare | None = None
    nics: int = 1
    nodes: tuple[str, ...] = ()
    causes: tuple[Cause, ...] = ()
    shares: tuple[SizeShare, ...] = ()


class Evidence(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """What is known of a size scan, and what it comes to; whatever was not measured stays empty.

    Attributes:
        backend: `nccl` or `gloo`.
        cards: of the data plane, by node, as far as nodes tell; empty of a single node, whose workers use none.
        nics_gbit_per_s: by node, the rates of the NICs that the collectives used, where that is known.
        rdma: what ib_write_bw reached around the ring.
        over_rdma: whether the collectives went by RDMA, for which TCP is no peer.
        wait_share_by_node: part of the operations' time in which the node's workers waited for others, 0 to 1.
        busy_percent_by_node: processors, while the collectives ran.
    """

    rows: tuple[CollectiveRow, ...]
    layout: Layout = Layout(nodes=2)
    backend: str = "unknown"
    cards: dict[str, Interface] = {}
    nics_gbit_per_s: dict[str, tuple[float, ...]] = {}
    tcp: RawTcp = RawTcp()
    rdma: tuple[PairSpeed, ...] = ()
    path: NicPathCheck = NicPathCheck(ok=None)
    over_rdma: bool = False
    wait_share_by_node: dict[str, float] = {}
    busy_percent_by_node: dict[str, float] = {}

    @functools.cached_property
    def link_gbit_per_s(self) -> float | None:
        """Of the slowest node, the rate of the NICs that it used together; None where one does not tell."""
        rates = [sum(self.nics_gbit_per_s.get(name, ())) or card.speed_gbit_per_s for name, card in self.cards.items()]
        known = [rate for rate in rates if rate]
        return min(known) if known and len(known) == len(rates) else None

    @functools.cached_property
    def mtu(self) -> int | None:
        """The smallest of the cards."""
        return min((card.mtu for card in self.cards.values() if card.mtu), default=None)

    @functools.cached_property
    def goodput_gb_per_s(self) -> float | None:
        """Payload that TCP carries over the slowest link."""
        link = self.link_gbit_per_s
        return goodput_gb_per_s(link, self.mtu or _ETHERNET_MTU) if link else None

    @functools.cached_property
    def odd(self) -> tuple[Odd, ...]:
        """What is odd between pairs of nodes that were measured one by one."""
        return find_odd(self.tcp.pairs, card_ceilings(self.cards)) if self.tcp.pairs else ()

    @functools.cached_property
    def tcp_gb_per_s(self) -> float | None:
        """What to hold the collectives against: raw TCP at the slowest place of the ring."""
        return None if self.over_rdma else slowest_gb_per_s(self.tcp.ring)

    @functools.cached_property
    def rdma_gb_per_s(self) -> float | None:
        """Likewise raw RDMA, where they went by it."""
        return slowest_gb_per_s(self.rdma) if self.over_rdma else None

    @functools.cached_property
    def ceiling_gb_per_s(self) -> float | None:
        """What the slowest link carries of them; the headers of RDMA's frames take a few hundredths of the rate."""
        link = self.link_gbit_per_s
        return self.goodput_gb_per_s if not self.over_rdma else link / _BITS_PER_BYTE if link else None

    @functools.cached_property
    def shares(self) -> tuple[SizeShare, ...]:
        """Of every large size: 1 MiB and more, or the largest of its collective."""
        largest: dict[str, int] = {}
        for row in self.rows:
            largest[row.collective] = max(row.size_bytes, largest.get(row.collective, 0))
        large = [row for row in self.rows if row.size_bytes >= min(_LARGE_BYTES, largest[row.collective])]
        return tuple(_share(row, self) for row in large)

    @functools.cached_property
    def worst(self) -> SizeShare | None:
        """Of the largest size of each collective, the one that fills the network least; None of no row."""
        return self.beyond or min(
            self._largest, key=lambda share: 0.0 if share.fill is None else share.fill, default=None
        )

    @functools.cached_property
    def beyond(self) -> SizeShare | None:
        """Of these, what passed more than the link carries; None of none."""
        large = [share for share in self._largest if share.size_bytes >= _LARGE_BYTES]
        most = max(large, key=lambda share: share.share_of_ceiling or 0.0, default=None)
        return most if most is not None and (most.share_of_ceiling or 0.0) > _MORE_THAN_A_LINK else None

    @property
    def _largest(self) -> list[SizeShare]:
        by_size = sorted(self.shares, key=lambda share: share.size_bytes)
        return list({share.collective: share for share in by_size}.values())

    def algorithm_of(self, row: CollectiveRow) -> str | None:
        """What the backend ran, where the counters of the NICs tell it."""
        ran = ((one.algorithm, one.collective, one.size_bytes) for one in self.path.messages)
        return next((name for name, *what in ran if what == [row.collective, row.size_bytes]), None)

    @property
    def is_fast_link(self) -> bool:
        """Whether the links, or what TCP reached, are of 10 Gbit/s and more."""
        return max(self.link_gbit_per_s or 0.0, (self.tcp_gb_per_s or 0.0) * _BITS_PER_BYTE) >= _FAST_LINK_GBIT

    @property
    def tcp_is_slow(self) -> bool | None:
        """Whether raw TCP stays below what the link gives; None is not known."""
        if self.tcp_gb_per_s is None or self.ceiling_gb_per_s is None:
            return None
        is_faster = (self.link_gbit_per_s or 0.0) > _FAST_LINK_GBIT
        return self.tcp_gb_per_s < min(_TCP_ENOUGH[is_faster] * self.ceiling_gb_per_s, _TCP_MOST_GB_PER_S)

    @property
    def rdma_is_slow(self) -> bool | None:
        """Whether raw RDMA stays below what the link gives; None is not known."""
        if self.rdma_gb_per_s is None or self.ceiling_gb_per_s is None:
            return None
        return self.rdma_gb_per_s < _RDMA_ENOUGH * self.ceiling_gb_per_s

    @property
    def collective_is_slow(self) -> bool | None:
        """Whether `worst` stays below what raw TCP, or else the link, gives; None is not known."""
        if self.worst is None or self.worst.fill is None or self.beyond is not None:
            return None
        return self.worst.fill < _COLLECTIVE_ENOUGH[self.is_fast_link]

    @property
    def is_well(self) -> bool:
        """Whether neither TCP, RDMA nor a collective is slow, and something is known to say so."""
        return self.collective_is_slow is False and not self.tcp_is_slow and not self.rdma_is_slow


def card_ceilings(cards: dict[str, Interface]) -> dict[str, float]:
    """Payload in Gbit/s that the card of each node carries, of those whose rate is known."""
    return {
        name: goodput_gb_per_s(card.speed_gbit_per_s, card.mtu or _ETHERNET_MTU) * _BITS_PER_BYTE
        for name, card in cards.items()
        if card.speed_gbit_per_s
    }


def judge_scan(seen: Evidence) -> Verdict:
    """Hold the largest size of each collective against raw TCP and the link."""
    status, causes = _status(seen), tuple(_once(_find_causes(seen)))
    nics = len(min(seen.nics_gbit_per_s.values(), key=sum, default=(0,)))
    return Verdict(
        status=status,
        text=_verdict_text(status, seen, causes, nics),
        over_rdma=seen.over_rdma,
        worst=seen.worst,
        nics=nics,
        nodes=tuple(dict.fromkeys(name for cause in causes for name in cause.nodes)),
        causes=causes,
        shares=seen.shares,
    )


def _once(causes: Iterable[Cause]) -> Iterator[Cause]:
    """A hint that several have stands at the first."""
    told: set[str] = set()
    for cause in causes:
        yield msgspec.structs.replace(cause, hint="" if cause.hint in told else cause.hint)
        told.add(cause.hint)


def _verdict_text(status: str, seen: Evidence, causes: Sequence[Cause], nics: int) -> str:
    worst, link = seen.worst, seen.link_gbit_per_s
    if worst is None or status in {"wrong_values", "wrong_path", "empty"}:
        return {
            "wrong_values": "wrong results: values of a collective are not what they should be",
            "wrong_path": "wrong network: the traffic did not take the NICs of the data plane",
        }.get(status, "no result: no size was measured by all workers")
    several = len({share.collective for share in seen.shares}) > 1
    what = f"{worst.collective} of {format_size(worst.size_bytes)}{', the slowest,' if several else ''}"
    if status == "one_node":
        return f"no network used: {what} reaches {worst.busbw_gb_per_s:.3g} GB/s busbw between workers of one node"
    reached = f"{what} reaches {_shares(status, seen, worst, nics)}"
    if status == "inconclusive" and seen.beyond is not None:
        return f"inconclusive: {reached}, more than such a link carries"
    if status == "inconclusive":
        speed = f"{worst.card_gb_per_s:.3g} GB/s per NIC"
        return f"inconclusive: {what} reaches {speed}; neither the link rate nor raw TCP is known to compare with"
    if status == "ok":
        together = f" ({nics} NICs together)" if nics > 1 else ""
        rate = f" for a link of {format_rate(link)}{together}" if link else ""
        return f"network OK{rate}{', see the cause below' if causes else ''}: {reached}"
    return f"slow: {reached}"


def _shares(status: str, seen: Evidence, worst: SizeShare, nics: int) -> str:
    parts, link = [], seen.link_gbit_per_s
    if worst.share_of_ceiling is not None:
        together = f", {nics} NICs together" if nics > 1 else ""
        rate = f" ({format_rate(link)}{together})" if link and status != "ok" else ""
        parts.append(f"{worst.share_of_ceiling:.0%} of {'' if seen.over_rdma else 'TCP '}line rate{rate}")
    if worst.share_of_tcp is not None:
        parts.append(f"{worst.share_of_tcp:.0%} of raw TCP")
    if worst.share_of_rdma is not None:
        parts.append(f"{worst.share_of_rdma:.0%} of raw RDMA")
    turns = ""
    if worst.usual_share < 1:
        turns = f"; {seen.backend} sends and receives large messages in turns: {worst.usual_share:.0%} is its maximum"
    return f"{format_list(parts)}{turns}"


def _share(row: CollectiveRow, seen: Evidence) -> SizeShare:
    ceiling = seen.ceiling_gb_per_s
    tcp = None if seen.over_rdma else row.tcp_gb_per_s or seen.tcp_gb_per_s
    across = seen.layout.nodes > 1
    what = (seen.backend, row.collective, seen.layout)
    speed = card_factor(*what, seen.algorithm_of(row)) * row.algbw_gb_per_s if across else row.busbw_gb_per_s
    rdma = seen.rdma_gb_per_s
    best = min((each for each in (ceiling, tcp, rdma) if each), default=None)
    usual_share = link_share(*what)
    fill = None
    if best is not None and speed > 0:
        # Of the time that this speed took, what the network would have needed, and what every message pays.
        needed_us = row.time_us * speed / (best * usual_share)
        small = [one for one in seen.rows if one.collective == row.collective and one.size_bytes <= _SMALL_BYTES]
        start_us = min((one.time_us for one in small if one.size_bytes < row.size_bytes), default=0.0)
        fill = (needed_us + min(start_us, _START_MOST_US)) / row.time_us
    return SizeShare(
        collective=row.collective,
        size_bytes=row.size_bytes,
        card_gb_per_s=speed,
        busbw_gb_per_s=row.busbw_gb_per_s,
        share_of_ceiling=speed / ceiling if ceiling else None,
        share_of_tcp=speed / tcp if tcp else None,
        share_of_rdma=speed / rdma if rdma else None,
        usual_share=usual_share,
        fill=fill,
    )


def _status(seen: Evidence) -> str:
    if any(row.num_wrong for row in seen.rows):
        return "wrong_values"
    if seen.path.ok is False:
        return "wrong_path"
    if seen.worst is None:
        return "empty"
    if seen.layout.nodes == 1:
        return "one_node"
    if seen.is_well:
        return "ok"
    return "inconclusive" if seen.collective_is_slow is None else "slow"


def _find_causes(seen: Evidence) -> tuple[Cause, ...]:
    """Whatever the evidence shows, the likeliest first: what is wrong for certain, then the network, then the nodes."""
    causes = [cause for find in _IN_ORDER if not (seen.over_rdma and find in _OF_TCP) for cause in find(seen)]
    if not causes and seen.tcp_is_slow:
        tcp = seen.tcp_gb_per_s or 0.0
        return (
            Cause(
                code="slow_tcp",
                figures={"tcp_gb_per_s": tcp},
                text=f"raw TCP is slow as well, {tcp:.3g} GB/s on the slowest link of the ring: the network, not the "
                "collective",
                hint="cables, the switch, other traffic on it: multinode check --bandwidth; on every node ip -s link",
            ),
        )
    if not causes and seen.rdma_gb_per_s is not None and not seen.is_well and seen.collective_is_slow is not None:
        return (_slow_beside_raw_rdma(seen, seen.rdma_gb_per_s),)
    return tuple(causes) or ((_slow(seen),) if seen.collective_is_slow else ())


def _slow_beside_raw_rdma(seen: Evidence, raw_gb_per_s: float) -> Cause:
    ceiling = seen.ceiling_gb_per_s or 0.0
    figures = {"rdma_gb_per_s": raw_gb_per_s, "ceiling_gb_per_s": ceiling}
    if seen.rdma_is_slow:
        return Cause(
            code="slow_raw_rdma",
            figures={**figures},
            text=f"ib_write_bw reaches {raw_gb_per_s:.3g} of {ceiling:.3g} GB/s as well: the network or the "
            "NIC's slot, not NCCL",
            hint="the slot, the other half of a NIC and its network: multinode check; cable and switch port: ibstat; a "
            "NIC that started degraded: power both nodes off, and on again",
        )
    return Cause(
        code="slow_over_rdma",
        figures={**figures},
        text=f"ib_write_bw reaches {raw_gb_per_s:.3g} GB/s between the same ports, which rules out cable and switch: "
        "the path from GPU to NIC, or NCCL itself",
        hint="PCIe access control (ACS) and IOMMU: multinode check, as root; whether NCCL_DEBUG=INFO prints GDRDMA; "
        "which NICs NCCL uses: hca= in the hostfile; another release of NCCL",
    )


def _slow(seen: Evidence) -> Cause:
    """Where nothing says more than that the collective is."""
    if seen.over_rdma:
        return Cause(
            code="slow_rdma",
            text="the traffic goes over RDMA and does not fill the link: the port, its switch, or the path from GPU "
            "to NIC",
            hint="ibstat, and ib_write_bw between the nodes; GPUDirect: NCCL_DEBUG=INFO prints GDRDMA or not; PCIe "
            "access control (ACS) or an IOMMU sends it through the CPU: sudo lspci -vvv | grep ACSCtl; nvidia-smi "
            "topo -m",
        )
    if seen.tcp_gb_per_s is None:
        return Cause(
            code="no_tcp",
            text="raw TCP was not measured: it would show whether the network or the collective is slow",
            hint="multinode check --bandwidth",
        )
    return Cause(
        code="slow_collective",
        text="raw TCP is OK, which rules out cables and switch: the collective itself is slow",
        hint="look at the CPUs of each node while it runs: top; NCCL's own log: --env NCCL_DEBUG=INFO",
    )


def _wrong_values(seen: Evidence) -> Iterator[Cause]:
    wrong = [row for row in seen.rows if row.num_wrong]
    if wrong:
        where = ", ".join(dict.fromkeys(f"{row.collective} of {row.dtype}" for row in wrong))
        count = sum(row.num_wrong or 0 for row in wrong)
        yield Cause(
            code="wrong_values",
            figures={"count": count, "collectives": where},
            text=f"{count} values were wrong ({where}): no speed is valid until they are right",
            hint="measure again; if it stays: the same version of NCCL and of the driver on all nodes, memory "
            "(nvidia-smi -q -d ECC) and the kernel's log (dmesg) on each",
        )


def _wrong_path(seen: Evidence) -> Iterator[Cause]:
    if seen.path.ok is False:
        said = " ".join(seen.path.sentences).rstrip(". ")
        yield Cause(
            code="wrong_path",
            text=said or "the traffic did not take the NICs that it should",
            hint="name the interface in the hostfile (ifname=), and set no NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME",
        )


def _beyond(seen: Evidence) -> Iterator[Cause]:
    """More than the link carries: an algorithm that sends less, or more NICs than are known."""
    share = seen.beyond
    if share is None:
        return
    of_link, link = share.share_of_ceiling or 0.0, format_rate(seen.link_gbit_per_s or 0.0)
    figures: dict[str, float | str] = {
        "card_gb_per_s": share.card_gb_per_s,
        "share": of_link,
        "link_gbit_per_s": seen.link_gbit_per_s or 0.0,
        "collective": share.collective,
    }
    what = (seen.backend, share.collective, seen.layout)
    others = [(card_factor(*what, one.name), one.name) for one in algorithms_of(seen.backend, share.collective)]
    least, name = min(others, default=(math.inf, ""))
    other = of_link * least / card_factor(*what)
    if other <= _MORE_THAN_A_LINK:
        yield Cause(
            code="another_algorithm",
            figures={**figures, "algorithm": name, "other": other},
            text=f"a ring would have passed {of_link:.0%} of the line rate ({link}): the backend ran its {name}, which "
            f"passes less through a NIC, {other:.0%} of the rate, or used more NICs than the one known; which, is "
            "unknown",
            hint="with a ring alone the share is certain: multinode nccl-test with --env NCCL_ALGO=Ring",
        )
    else:
        yield Cause(
            code="more_nics",
            figures=figures,
            text=f"{share.card_gb_per_s:.3g} GB/s through a node are {of_link:.0%} of what its NICs that are known "
            f"carry ({link}): the data went over more NICs than the one known, or a NIC reports too low a rate",
            hint="which ones NCCL uses: --env NCCL_DEBUG=INFO, in its log `NET/IB : Using` and `via NET/`; which there "
            "are, and their rates: multinode check",
        )


def _half_duplex(seen: Evidence) -> Iterator[Cause]:
    half = tuple(name for name, card in seen.cards.items() if card.duplex == "half")
    if half and not seen.is_well:
        yield Cause(
            code="half_duplex",
            nodes=half,
            text=f"the NIC of {format_list(half)} runs in half duplex: it cannot send and receive at the same time",
            hint="NIC and switch port must both negotiate: sudo ethtool -s INTERFACE autoneg on; else the cable",
        )


def _odd_pairs(seen: Evidence) -> Iterator[Cause]:
    for one in seen.odd or find_odd_in_ring(seen.tcp.ring, card_ceilings(seen.cards)):
        code = f"odd_{one.kind.replace('-', '_')}"
        yield Cause(code=code, figures=one.figures, nodes=one.nodes, text=one.text, hint=one.hint)


def _slower_link(seen: Evidence) -> Iterator[Cause]:
    links = {name: card.speed_gbit_per_s for name, card in seen.cards.items() if card.speed_gbit_per_s}
    most = max(links.values(), default=0.0)
    slow = {name: link for name, link in links.items() if link < most}
    if slow and len(slow) <= len(links) / 2:
        each = format_list([f"{name} negotiated {format_rate(link)}" for name, link in slow.items()])
        yield Cause(
            code="slower_link",
            figures={"link_gbit_per_s": most},
            by_node=slow,
            nodes=tuple(slow),
            text=f"{each} where others have {format_rate(most)}: every collective runs at the speed of the slowest "
            "link",
            hint="cable or switch port: sudo ethtool INTERFACE shows what the NIC and its link partner advertise",
        )


def _mixed_mtu(seen: Evidence) -> Iterator[Cause]:
    mtus = {name: float(card.mtu) for name, card in seen.cards.items() if card.mtu}
    most = max(mtus.values(), default=0.0)
    small = {name: mtu for name, mtu in mtus.items() if mtu < most}
    if small and not seen.is_well:
        each = format_list([f"{name} is {mtu:.0f}" for name, mtu in small.items()])
        yield Cause(
            code="mixed_mtu",
            figures={"mtu_bytes": most},
            by_node=small,
            nodes=tuple(small),
            text=f"the MTU of {each} where others have {most:.0f}: large packets may be lost",
            hint="the same MTU on every NIC and on the switch: sudo ip link set dev INTERFACE mtu 1500",
        )


def _one_connection(seen: Evidence) -> Iterator[Cause]:
    one, many = slowest_gb_per_s(seen.tcp.one), slowest_gb_per_s(seen.tcp.several)
    if not one or not many or one >= _ONE_OF_MANY * many or seen.collective_is_slow is False:
        return
    code, hint = "one_connection_fast" if seen.is_fast_link else "one_connection", _BUFFERS
    limit = "by one CPU core, or by a cap on each flow, as clouds have"
    if not seen.is_fast_link:
        limit = "by one CPU core or by small socket buffers"
    figures: dict[str, float | str] = {"one_gb_per_s": one, "several_gb_per_s": many}
    low, high = _NEAR_A_CAP
    cap = next((cap for cap in _FLOW_CAPS_GBIT if low * cap <= one * _BITS_PER_BYTE <= high * cap), None)
    if seen.is_fast_link and cap is not None and many * _BITS_PER_BYTE > cap:
        code, figures = "flow_cap", {**figures, "cap_gbit_per_s": cap}
        limit = f"to {format_rate(cap)}, as AWS caps a flow, and as a bond gives it a single NIC"
        hint = f"{_PLACEMENT}; several workers per node, of which each has connections of its own"
    if seen.backend == "nccl" and seen.is_fast_link:
        hint = f"{_SOCKETS}; or {_PLACEMENT}" if code == "flow_cap" else _SOCKETS
        code = f"{code}_nccl"
    yield Cause(
        code=code,
        figures=figures,
        text=f"one TCP connection reaches {one:.3g} GB/s and several together {many:.3g} GB/s: a single connection is "
        f"limited {limit}",
        hint=hint,
    )


def _straggler(seen: Evidence) -> Iterator[Cause]:
    waits = seen.wait_share_by_node
    if len(waits) < 2 or seen.is_well:  # noqa: PLR2004 - somebody, and others who wait
        return
    last = min(waits, key=lambda name: waits[name])
    others = statistics.median(share for name, share in waits.items() if name != last)
    if others - waits[last] >= _WAIT_NOTICED:
        yield Cause(
            code="straggler",
            figures={"others": others, "share": waits[last]},
            nodes=(last,),
            text=f"the others wait {others:.0%} of the time, and {last} {waits[last]:.0%}: {last} is the straggler",
            hint=f"other work on {last}, or throttled CPUs or GPUs: top; nvidia-smi -q -d PERFORMANCE",
        )


def _busy(seen: Evidence) -> Iterator[Cause]:
    busy = {name: used for name, used in seen.busy_percent_by_node.items() if used >= _BUSY_PERCENT}
    if busy and not seen.is_well:
        each = format_list([f"{name} {used:.0f}%" for name, used in busy.items()])
        yield Cause(
            code="busy_cpus",
            by_node=busy,
            nodes=tuple(busy),
            text=f"the CPUs are busy while the collectives run ({each}): TCP needs them too",
            hint="see what runs there: top; fewer workers per node, or a larger MTU, need less CPU",
        )


def _sockets(seen: Evidence) -> Iterator[Cause]:
    fine = seen.tcp_gb_per_s is not None and not seen.tcp_is_slow
    if (fallen := _fallen(seen)) is not None:
        yield fallen
    elif seen.backend == "nccl" and seen.is_fast_link and fine and seen.collective_is_slow:
        yield Cause(
            code="few_sockets",
            text="raw TCP is OK and NCCL does not fill it: at such speeds it may need more sockets",
            hint=_SOCKETS,
        )


def _fallen(seen: Evidence) -> Cause | None:
    """Where every size beyond the best one falls far behind it: NCCL's sockets together lose packets."""
    if seen.backend != "nccl" or not seen.is_fast_link or not seen.collective_is_slow or seen.worst is None:
        return None
    mine = [one for one in seen.shares if one.collective == seen.worst.collective]
    best = max(mine, key=lambda share: share.card_gb_per_s)
    larger = [one for one in mine if one.size_bytes > best.size_bytes]
    if len(larger) < _LEAST_FALLEN or max(one.card_gb_per_s for one in larger) > _FALLEN * best.card_gb_per_s:
        return None
    least = min(one.card_gb_per_s for one in larger)
    return Cause(
        code="many_sockets",
        figures={"best_gb_per_s": best.card_gb_per_s, "size_bytes": best.size_bytes, "least_gb_per_s": least},
        text=f"NCCL reaches {best.card_gb_per_s:.3g} GB/s at {format_size(best.size_bytes)} and {least:.3g} beyond: "
        "with so many sockets at once large messages lose packets",
        hint="fewer sockets: unset NCCL_SOCKET_NTHREADS and NCCL_NSOCKS_PERTHREAD, or halve their product, and measure "
        "again; nstat -az TcpRetransSegs on each node counts what is lost",
    )


def _far_apart(seen: Evidence) -> Iterator[Cause]:
    trips, usual = seen.tcp.round_trips_us, seen.tcp.round_trip_us
    if usual is None:
        return
    for (source, target), trip in trips.items():
        if len(trips) >= _ODD_NEEDS and trip >= max(_ODD_ROUND_TRIP_US, _ODD_ROUND_TRIPS * usual):
            yield Cause(
                code="odd_round_trip",
                figures={"round_trip_ms": trip / 1000, "usual_ms": usual / 1000},
                nodes=(source, target),
                text=f"a round trip from {source} to {target} takes {trip / 1000:.3g} ms, {usual / 1000:.3g} ms is "
                "usual: small messages wait for it",
                hint=f"the path between the two, and what else uses it: on {source}, tracepath -n to {target}'s "
                "address",
            )
    if usual > _LAN_ROUND_TRIP_US:
        yield Cause(
            code="long_round_trip",
            figures={"round_trip_ms": usual / 1000},
            text=f"a round trip between the nodes takes {usual / 1000:.3g} ms, far more than through a switch: small "
            "messages are latency-bound",
            hint="a VPN, a wireless link or a router between them, or a NIC that saves power: tracepath -n to a peer's "
            "address",
        )


def _slow_start(seen: Evidence) -> Iterator[Cause]:
    small = [row for row in seen.rows if row.size_bytes <= _SMALL_BYTES]
    trip_us = seen.tcp.round_trip_us
    if not small or trip_us is None or trip_us > _LAN_ROUND_TRIP_US:
        return
    row = min(small, key=lambda row: row.size_bytes)
    needed_us = steps_us(seen.backend, message_steps(seen.backend, row.collective, seen.layout), trip_us / 2)
    if row.time_us >= max(_SMALL_FACTOR * needed_us, _SMALL_LEAST_US):
        yield Cause(
            code="slow_start",
            figures={
                "collective": row.collective,
                "size_bytes": row.size_bytes,
                "time_ms": row.time_us / 1000,
                "needed_ms": needed_us / 1000,
            },
            text=f"{row.collective} of {format_size(row.size_bytes)} takes {row.time_us / 1000:.3g} ms, its round "
            f"trips need {needed_us / 1000:.3g} ms: the workers wait, and not for the network",
            hint="CPUs shared with others or saving power: top; cpupower frequency-info",
        )


def _tcp_limit(seen: Evidence) -> Iterator[Cause]:
    tcp, ceiling = seen.tcp_gb_per_s, seen.ceiling_gb_per_s
    link = seen.link_gbit_per_s or 0.0
    is_limit = tcp and ceiling and not seen.tcp_is_slow and tcp < _TCP_LIMIT_SHARE * ceiling
    if is_limit and link >= _TCP_LIMIT_LINK_GBIT:
        yield Cause(
            code="tcp_limit",
            figures={"tcp_gb_per_s": tcp or 0.0, "ceiling_gb_per_s": ceiling or 0.0},
            text=f"raw TCP itself reaches {tcp:.3g} of {ceiling:.3g} GB/s: TCP rarely exceeds 3 to 5 GB/s on any link",
            hint="only RDMA (RoCE, InfiniBand) gets more out of such NICs: multinode check shows which have it",
        )


_OF_TCP = frozenset({_odd_pairs, _mixed_mtu, _one_connection, _sockets, _tcp_limit})
"""What explains TCP alone."""

_IN_ORDER: tuple[Callable[[Evidence], Iterator[Cause]], ...] = (
    _wrong_values,
    _wrong_path,
    _beyond,
    _half_duplex,
    _odd_pairs,
    _slower_link,
    _mixed_mtu,
    _one_connection,
    _straggler,
    _busy,
    _sockets,
    _far_apart,
    _slow_start,
    _tcp_limit,
)
