"""judge_scan: evidence -> Verdict: whether a size scan is what the network gives, and who or what to look at if not.

Wrong values come before any speed. A cause is told only where its own evidence shows, and never of a scan that is well,
unless it is wrong in itself; each is one small function.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterator

import msgspec

from multinode.analyse.collectives.algorithms import Layout, card_factor, link_share, message_steps
from multinode.analyse.collectives.collectives import CollectiveRow
from multinode.analyse.nccl_test.nic_path_check import NicPathCheck
from multinode.analyse.nccl_test.pair_speeds import Odd, RawTcp, find_odd, find_odd_in_ring, slowest_gb_per_s
from multinode.core.cluster.facts import Interface
from multinode.units import format_list, format_rate, format_size, goodput_gb_per_s

__all__ = ["Cause", "Evidence", "SizeShare", "Verdict", "card_ceilings", "judge_scan"]

_BITS_PER_BYTE = 8
_ETHERNET_MTU = 1500
_LARGE_BYTES = 1 << 20
_SMALL_BYTES = 4096
# From here on processors bound what TCP reaches, and repeats differ.
_FAST_LINK_GBIT = 10.0
# More than that is not what a message costs: somebody is waited for.
_START_MOST_US = 2000.0
# Below the first a figure is slow on links that TCP fills with ease, below the second on faster ones.
_COLLECTIVE_ENOUGH = (0.85, 0.7)
_TCP_ENOUGH = (0.8, 0.5)
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

_SOCKETS_HINT = (
    "measure before setting: NCCL_SOCKET_NTHREADS=2 NCCL_NSOCKS_PERTHREAD=4; their product is at most 64, and more can "
    "be far slower"
)


class SizeShare(msgspec.Struct, frozen=True, kw_only=True):
    """How much of the network one large message used.

    Attributes:
        card_gb_per_s: what passed the busiest card one way.
        busbw_gb_per_s: as nccl-tests has it.
        share_of_ceiling: of what TCP can carry over the slowest link; None where its rate is not known.
        share_of_tcp: of what raw TCP reached around the ring; None where it was not tried.
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
    usual_share: float = 1.0
    fill: float | None = None


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """One explanation.

    Attributes:
        text: what was seen and what it means, a sentence without its full stop.
        hint: what to look at or to try.
        nodes: where, as far as the evidence tells.
    """

    text: str
    hint: str
    nodes: tuple[str, ...] = ()


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be said of a size scan.

    Attributes:
        text: one or two plain sentences.
        nodes: names to look at, the likeliest first.
        causes: likewise; empty where there is nothing to fix.
        shares: how much of the network every large message used.
    """

    text: str
    nodes: tuple[str, ...] = ()
    causes: tuple[Cause, ...] = ()
    shares: tuple[SizeShare, ...] = ()


class Evidence(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """What is known of a size scan, and what it comes to; whatever was not measured stays empty.

    Attributes:
        backend: `nccl` or `gloo`.
        cards: of the data plane, by node, as far as nodes tell; empty of a single node, whose workers use none.
        over_rdma: whether the collectives went by RDMA, for which TCP is no peer.
        wait_share_by_node: part of the operations' time in which the node's workers waited for others, 0 to 1.
        busy_percent_by_node: processors, while the collectives ran.
    """

    rows: tuple[CollectiveRow, ...]
    layout: Layout = Layout(nodes=2)
    backend: str = "unknown"
    cards: dict[str, Interface] = {}
    tcp: RawTcp = RawTcp()
    path: NicPathCheck = NicPathCheck(ok=None)
    over_rdma: bool = False
    wait_share_by_node: dict[str, float] = {}
    busy_percent_by_node: dict[str, float] = {}

    @functools.cached_property
    def link_gbit_per_s(self) -> float | None:
        """Rate of the slowest card; None where one does not tell."""
        rates = [card.speed_gbit_per_s for card in self.cards.values()]
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
        largest = {share.collective: share for share in sorted(self.shares, key=lambda share: share.size_bytes)}
        return min(largest.values(), key=lambda share: 0.0 if share.fill is None else share.fill, default=None)

    @property
    def is_fast_link(self) -> bool:
        """Whether the links, or what TCP reached, are of 10 Gbit/s and more."""
        return max(self.link_gbit_per_s or 0.0, (self.tcp_gb_per_s or 0.0) * _BITS_PER_BYTE) >= _FAST_LINK_GBIT

    @property
    def tcp_is_slow(self) -> bool | None:
        """Whether raw TCP stays below what the link gives; None is not known."""
        if self.tcp_gb_per_s is None or self.ceiling_gb_per_s is None:
            return None
        return self.tcp_gb_per_s < min(_TCP_ENOUGH[self.is_fast_link] * self.ceiling_gb_per_s, _TCP_MOST_GB_PER_S)

    @property
    def collective_is_slow(self) -> bool | None:
        """Whether `worst` stays below what raw TCP, or else the link, gives; None is not known."""
        if self.worst is None or self.worst.fill is None:
            return None
        return self.worst.fill < _COLLECTIVE_ENOUGH[self.is_fast_link]

    @property
    def is_well(self) -> bool:
        """Whether neither TCP nor a collective is slow, and something is known to say so."""
        return self.collective_is_slow is False and not self.tcp_is_slow


def card_ceilings(cards: dict[str, Interface]) -> dict[str, float]:
    """Payload in Gbit/s that the card of each node carries, of those whose rate is known."""
    return {
        name: goodput_gb_per_s(card.speed_gbit_per_s, card.mtu or _ETHERNET_MTU) * _BITS_PER_BYTE
        for name, card in cards.items()
        if card.speed_gbit_per_s
    }


def judge_scan(seen: Evidence) -> Verdict:
    """Hold the largest size of each collective against raw TCP and the link."""
    causes = _find_causes(seen)
    return Verdict(
        text=_text(seen, causes),
        nodes=tuple(dict.fromkeys(name for cause in causes for name in cause.nodes)),
        causes=causes,
        shares=seen.shares,
    )


def _share(row: CollectiveRow, seen: Evidence) -> SizeShare:
    ceiling = seen.ceiling_gb_per_s
    tcp = None if seen.over_rdma else row.tcp_gb_per_s or seen.tcp_gb_per_s
    across = seen.layout.nodes > 1
    what = (seen.backend, row.collective, seen.layout)
    speed = card_factor(*what) * row.algbw_gb_per_s if across else row.busbw_gb_per_s
    best = min((each for each in (ceiling, tcp) if each), default=None)
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
        usual_share=usual_share,
        fill=fill,
    )


def _text(seen: Evidence, causes: tuple[Cause, ...]) -> str:
    if any(row.num_wrong for row in seen.rows):
        return f"{causes[0].text}."
    if seen.path.ok is False:
        return f"This says nothing of the network that was meant. Look first: {causes[0].text}."
    if seen.worst is None:
        return "No size was measured by all workers."
    measured = _measured(seen, seen.worst)
    if causes:
        # Where the scan is well, something beside it may not be.
        look = "Look at this all the same" if seen.is_well else "Look first"
        return f"{measured}. {look}: {causes[0].text}."
    return f"{measured}. Nothing to mend." if seen.is_well else f"{measured}."


def _measured(seen: Evidence, worst: SizeShare) -> str:
    what = f"{worst.collective} of {format_size(worst.size_bytes)}"
    if len({share.collective for share in seen.shares}) > 1:
        what += ", which fills it least,"
    speed = f"{worst.card_gb_per_s:.3g} GB/s"
    if seen.layout.nodes == 1:
        return (
            f"{what} reaches {worst.busbw_gb_per_s:.3g} GB/s of busbw between workers of one node: no network was used"
        )
    if seen.collective_is_slow is None:
        return f"{what} moves {speed} through a card; neither a link's rate nor raw TCP is known to hold it against"
    shares = []
    if worst.share_of_ceiling is not None:
        best = "its line rate" if seen.over_rdma else "what TCP can carry"
        shares.append(f"{worst.share_of_ceiling:.0%} of {best}")
    if worst.share_of_tcp is not None:
        shares.append(f"{worst.share_of_tcp:.0%} of what raw TCP reached")
    network = f"a {format_rate(seen.link_gbit_per_s)} link" if seen.link_gbit_per_s else "this network"
    if worst.usual_share < 1:
        network += f" to {seen.backend}, which sends and receives large messages in turns on a connection"
    if seen.is_well:
        return f"This is what {network} gives: {' and '.join(shares)} ({what} moves {speed} through a card)"
    return f"{what} moves {speed} through a card of {network}: {' and '.join(shares)}"


def _find_causes(seen: Evidence) -> tuple[Cause, ...]:
    """Whatever the evidence shows, the likeliest first: what is wrong for certain, then the network, then the nodes."""
    causes = [cause for find in _IN_ORDER if not (seen.over_rdma and find in _OF_TCP) for cause in find(seen)]
    if not causes and seen.tcp_is_slow:
        return (
            Cause(
                text=f"raw TCP is slow as well, {seen.tcp_gb_per_s:.3g} GB/s at the slowest place of the ring: the "
                "network, not the collective",
                hint="cables, the switch, other traffic on it: multinode check --bandwidth; on every node ip -s link",
            ),
        )
    if not causes and seen.collective_is_slow:
        known = "rdma" if seen.over_rdma else "no_tcp" if seen.tcp_gb_per_s is None else "tcp"
        return (_SLOW_FOR_NO_REASON[known],)
    return tuple(causes)


_SLOW_FOR_NO_REASON = {
    "rdma": Cause(
        text="the traffic goes by RDMA and does not fill the link: the port, its switch, the way from GPU to card",
        hint="ibstat, and ib_write_bw between the nodes; GPUDirect: NCCL_DEBUG=INFO tells GDRDMA or not",
    ),
    "no_tcp": Cause(
        text="whether the network or the collective is slow, raw TCP would tell, and it was not tried",
        hint="multinode check --bandwidth",
    ),
    "tcp": Cause(
        text="raw TCP is fine, so cables and switch are: the collective loses it on the nodes",
        hint="processors and workers of each node while it runs: top; the backend's own log: NCCL_DEBUG=INFO",
    ),
}


def _wrong_values(seen: Evidence) -> Iterator[Cause]:
    wrong = [row for row in seen.rows if row.num_wrong]
    if wrong:
        count = sum(row.num_wrong or 0 for row in wrong)
        where = ", ".join(dict.fromkeys(f"{row.collective} of {row.dtype}" for row in wrong))
        yield Cause(
            text=f"{count} values were wrong ({where}): no speed counts until they are right",
            hint="measure once more; if it stays: one version of NCCL and of the driver on all nodes, memory "
            "(nvidia-smi -q -d ECC) and the kernel's log (dmesg) on each",
        )


def _wrong_path(seen: Evidence) -> Iterator[Cause]:
    if seen.path.ok is False:
        said = " ".join(seen.path.sentences).rstrip(". ")
        yield Cause(
            text=said or "the traffic did not take the cards that it should",
            hint="name the interface in the hostfile (ifname=), and set no NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME",
        )


def _half_duplex(seen: Evidence) -> Iterator[Cause]:
    half = tuple(name for name, card in seen.cards.items() if card.duplex == "half")
    if half and not seen.is_well:
        yield Cause(
            text=f"the card of {format_list(half)} runs in half duplex: it cannot send and receive at once",
            hint="card and switch port must both negotiate: sudo ethtool -s INTERFACE autoneg on; else the cable",
            nodes=half,
        )


def _odd_pairs(seen: Evidence) -> Iterator[Cause]:
    for one in seen.odd or find_odd_in_ring(seen.tcp.ring, card_ceilings(seen.cards)):
        yield Cause(text=one.text, hint=one.hint, nodes=one.nodes)


def _slower_link(seen: Evidence) -> Iterator[Cause]:
    links = {name: card.speed_gbit_per_s for name, card in seen.cards.items() if card.speed_gbit_per_s}
    most = max(links.values(), default=0.0)
    slow = {name: format_rate(link) for name, link in links.items() if link < most}
    if slow and len(slow) <= len(links) / 2:
        rates = format_list([f"{name} negotiated {rate}" for name, rate in slow.items()])
        yield Cause(
            text=f"{rates} where others have {format_rate(most)}: every collective goes at the pace of the slowest",
            hint="cable or switch port: sudo ethtool INTERFACE tells what the card and its partner advertise",
            nodes=tuple(slow),
        )


def _mixed_mtu(seen: Evidence) -> Iterator[Cause]:
    mtus = {name: card.mtu for name, card in seen.cards.items() if card.mtu}
    most = max(mtus.values(), default=0)
    small = {name: mtu for name, mtu in mtus.items() if mtu < most}
    if small and not seen.is_well:
        which = format_list([f"{name} is {mtu}" for name, mtu in small.items()])
        yield Cause(
            text=f"the MTU of {which} where others have {most}: large packets may be lost",
            hint="the same MTU on every card and on the switch: sudo ip link set dev INTERFACE mtu 1500",
            nodes=tuple(small),
        )


def _one_connection(seen: Evidence) -> Iterator[Cause]:
    one, many = slowest_gb_per_s(seen.tcp.one), slowest_gb_per_s(seen.tcp.several)
    if not one or not many or one >= _ONE_OF_MANY * many or seen.collective_is_slow is False:
        return
    why = "one processor core" if seen.is_fast_link else "one processor core or by small socket buffers"
    yield Cause(
        text=f"one TCP connection reaches {one:.3g} GB/s and several together {many:.3g} GB/s: a single connection is "
        f"bound by {why}",
        hint=_SOCKETS_HINT
        if seen.backend == "nccl" and seen.is_fast_link
        else "a larger MTU, a faster core, or socket buffers: sysctl net.ipv4.tcp_rmem net.ipv4.tcp_wmem",
    )


def _straggler(seen: Evidence) -> Iterator[Cause]:
    waits = seen.wait_share_by_node
    if len(waits) < 2 or seen.is_well:  # noqa: PLR2004 - somebody, and others who wait
        return
    last = min(waits, key=lambda name: waits[name])
    others = statistics.median(share for name, share in waits.items() if name != last)
    if others - waits[last] >= _WAIT_NOTICED:
        yield Cause(
            text=f"the others wait {others:.0%} of the time, and {last} {waits[last]:.0%}: they wait for {last}",
            hint=f"other work on {last}, or throttled processors or GPUs: top; nvidia-smi -q -d PERFORMANCE",
            nodes=(last,),
        )


def _busy(seen: Evidence) -> Iterator[Cause]:
    busy = {name: used for name, used in seen.busy_percent_by_node.items() if used >= _BUSY_PERCENT}
    if busy and not seen.is_well:
        figures = ", ".join(f"{name} {used:.0f}%" for name, used in busy.items())
        yield Cause(
            text=f"the processors are busy while the sweep runs ({figures}): TCP needs them too",
            hint="top tells what runs there; fewer workers a node, or a larger MTU, need less of them",
            nodes=tuple(busy),
        )


def _sockets(seen: Evidence) -> Iterator[Cause]:
    fine = seen.tcp_gb_per_s is not None and not seen.tcp_is_slow
    if seen.backend == "nccl" and seen.is_fast_link and fine and seen.collective_is_slow:
        yield Cause(
            text="raw TCP is fine and NCCL does not fill it: at such speeds it may need more sockets",
            hint=_SOCKETS_HINT,
        )


def _far_apart(seen: Evidence) -> Iterator[Cause]:
    trips, usual = seen.tcp.round_trips_us, seen.tcp.round_trip_us
    if usual is None:
        return
    for (source, target), trip in trips.items():
        if len(trips) >= _ODD_NEEDS and trip >= max(_ODD_ROUND_TRIP_US, _ODD_ROUND_TRIPS * usual):
            yield Cause(
                text=f"a round trip from {source} to {target} takes {_ms(trip)}, where {_ms(usual)} is usual: small "
                "messages wait for it",
                hint=f"the way between the two, and what else uses it: on {source}, tracepath -n to {target}'s address",
                nodes=(source, target),
            )
    if usual > _LAN_ROUND_TRIP_US:
        yield Cause(
            text=f"a round trip between the nodes takes {_ms(usual)}, far more than a switch needs: small messages "
            "are bound by it",
            hint="a VPN, a wireless link or a router between them, or a power-saving card: tracepath -n to a peer's "
            "address",
        )


def _slow_start(seen: Evidence) -> Iterator[Cause]:
    small = [row for row in seen.rows if row.size_bytes <= _SMALL_BYTES]
    trip_us = seen.tcp.round_trip_us
    if not small or trip_us is None or trip_us > _LAN_ROUND_TRIP_US:
        return
    row = min(small, key=lambda row: row.size_bytes)
    needed_us = message_steps(seen.backend, row.collective, seen.layout) * trip_us / 2
    if row.time_us >= max(_SMALL_FACTOR * needed_us, _SMALL_LEAST_US):
        yield Cause(
            text=f"{row.collective} of {format_size(row.size_bytes)} takes {_ms(row.time_us)}, where round trips need "
            f"{_ms(needed_us)}: the workers wait, and not for the wire",
            hint="processors shared with others or saving power: top; cpupower frequency-info",
        )


def _tcp_limit(seen: Evidence) -> Iterator[Cause]:
    tcp, ceiling = seen.tcp_gb_per_s, seen.ceiling_gb_per_s
    link = seen.link_gbit_per_s or 0.0
    is_limit = tcp and ceiling and not seen.tcp_is_slow and tcp < _TCP_LIMIT_SHARE * ceiling
    if is_limit and link >= _TCP_LIMIT_LINK_GBIT:
        yield Cause(
            text=f"raw TCP itself gives {tcp:.3g} GB/s of {ceiling:.3g} GB/s: it rarely passes 3 to 5 GB/s, "
            "whatever the link",
            hint="only RDMA (RoCE, InfiniBand) gets more out of such cards: multinode check tells which have it",
        )


_OF_TCP = frozenset({_odd_pairs, _mixed_mtu, _one_connection, _sockets, _tcp_limit})
"""What explains TCP alone."""

_IN_ORDER: tuple[Callable[[Evidence], Iterator[Cause]], ...] = (
    _wrong_values,
    _wrong_path,
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


def _ms(time_us: float) -> str:
    return f"{time_us / 1000:.3g} ms"
