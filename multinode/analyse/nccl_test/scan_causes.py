"""Causes: what may be wrong, judging by the evidence around a collective sweep; each is one small function.

A cause is told only where its own evidence shows, and never of a sweep that is well, unless it is wrong in itself.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator

import msgspec

from multinode.analyse.nccl_test.pair_speeds import fastest_of, find_odd_in_ring
from multinode.analyse.nccl_test.scan_evidence import Reading, slowest_gb_per_s
from multinode.units import format_rate, format_size, goodput_gb_per_s

__all__ = ["Cause", "find_causes"]

_BITS_PER_BYTE = 8
_ETHERNET_MTU = 1500
_SMALL_BYTES = 4096
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


def find_causes(reading: Reading) -> tuple[Cause, ...]:
    """Whatever the evidence shows, the likeliest first: what is wrong for certain, then the network, then the nodes."""
    over_rdma = reading.evidence.over_rdma
    causes = [cause for find in _IN_ORDER if not (over_rdma and find in _OF_TCP) for cause in find(reading)]
    if not causes and reading.tcp_is_slow:
        causes = [_slow_network(reading)]
    if not causes and reading.collective_is_slow:
        causes = [_slow_for_no_reason(reading)]
    return tuple(causes)


def _wrong_values(reading: Reading) -> Iterator[Cause]:
    wrong = [row for row in reading.evidence.rows if row.num_wrong]
    if wrong:
        count = sum(row.num_wrong or 0 for row in wrong)
        where = ", ".join(dict.fromkeys(f"{row.collective} of {row.dtype}" for row in wrong))
        yield Cause(
            text=f"{count} values were wrong ({where}): no speed counts until they are right",
            hint="measure once more; if it stays: one version of NCCL and of the driver on all nodes, memory "
            "(nvidia-smi -q -d ECC) and the kernel's log (dmesg) on each",
        )


def _wrong_path(reading: Reading) -> Iterator[Cause]:
    evidence = reading.evidence
    if evidence.path_ok is False:
        said = " ".join(evidence.path_sentences).rstrip(". ")
        yield Cause(
            text=said or "the traffic did not take the cards that it should",
            hint="name the interface in the hostfile (ifname=), and set no NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME",
        )


def _half_duplex(reading: Reading) -> Iterator[Cause]:
    half = tuple(name for name, duplex in reading.evidence.duplex_by_node.items() if duplex == "half")
    if half and not reading.is_well:
        yield Cause(
            text=f"the card of {_names(half)} runs in half duplex: it cannot send and receive at once",
            hint="card and switch port must both negotiate: sudo ethtool -s INTERFACE autoneg on; else the cable",
            nodes=half,
        )


def _odd_pairs(reading: Reading) -> Iterator[Cause]:
    evidence = reading.evidence
    odd = evidence.odd or find_odd_in_ring(fastest_of(evidence.tcp_one, evidence.tcp_many), _ceilings(reading))
    for one in odd:
        yield Cause(text=one.text, hint=one.hint, nodes=one.nodes)


def _slower_link(reading: Reading) -> Iterator[Cause]:
    links = reading.evidence.link_by_node
    most = max(links.values(), default=0.0)
    slow = tuple(name for name, link in links.items() if link < most)
    if slow and len(slow) <= len(links) / 2:
        rates = _names(tuple(f"{name} negotiated {format_rate(links[name])}" for name in slow))
        yield Cause(
            text=f"{rates} where others have {format_rate(most)}: every collective goes at the pace of the slowest",
            hint="cable or switch port: sudo ethtool INTERFACE tells what the card and its partner advertise",
            nodes=slow,
        )


def _mixed_mtu(reading: Reading) -> Iterator[Cause]:
    mtus = reading.evidence.mtu_by_node
    least, most = min(mtus.values(), default=0), max(mtus.values(), default=0)
    if least < most and not reading.is_well:
        small = tuple(name for name, mtu in mtus.items() if mtu < most)
        yield Cause(
            text=f"the MTU of {_names(tuple(f'{name} is {mtus[name]}' for name in small))} where others have {most}: "
            "large packets may be lost",
            hint="the same MTU on every card and on the switch: sudo ip link set dev INTERFACE mtu 1500",
            nodes=small,
        )


def _one_connection(reading: Reading) -> Iterator[Cause]:
    evidence = reading.evidence
    one, many = slowest_gb_per_s(evidence.tcp_one), slowest_gb_per_s(evidence.tcp_many)
    if not one or not many or one >= _ONE_OF_MANY * many or reading.collective_is_slow is False:
        return
    why = "one processor core" if reading.is_fast_link else "one processor core or by small socket buffers"
    yield Cause(
        text=f"one TCP connection reaches {one:.3g} GB/s and several together {many:.3g} GB/s: a single connection is "
        f"bound by {why}",
        hint=_SOCKETS_HINT
        if evidence.backend == "nccl" and reading.is_fast_link
        else "a larger MTU, a faster core, or socket buffers: sysctl net.ipv4.tcp_rmem net.ipv4.tcp_wmem",
    )


def _straggler(reading: Reading) -> Iterator[Cause]:
    waits = reading.evidence.wait_share_by_node
    if len(waits) < 2 or reading.is_well:  # noqa: PLR2004 - somebody, and others who wait
        return
    last = min(waits, key=lambda name: waits[name])
    others = statistics.median(share for name, share in waits.items() if name != last)
    if others - waits[last] >= _WAIT_NOTICED:
        yield Cause(
            text=f"the others wait {others:.0%} of the time, and {last} {waits[last]:.0%}: they wait for {last}",
            hint=f"other work on {last}, or throttled processors or GPUs: top; nvidia-smi -q -d PERFORMANCE",
            nodes=(last,),
        )


def _busy(reading: Reading) -> Iterator[Cause]:
    busy = {name: used for name, used in reading.evidence.busy_percent_by_node.items() if used >= _BUSY_PERCENT}
    if busy and not reading.is_well:
        figures = ", ".join(f"{name} {used:.0f}%" for name, used in busy.items())
        yield Cause(
            text=f"the processors are busy while the sweep runs ({figures}): TCP needs them too",
            hint="top tells what runs there; fewer workers a node, or a larger MTU, need less of them",
            nodes=tuple(busy),
        )


def _sockets(reading: Reading) -> Iterator[Cause]:
    fine = reading.tcp_gb_per_s is not None and not reading.tcp_is_slow
    if reading.evidence.backend == "nccl" and reading.is_fast_link and fine and reading.collective_is_slow:
        yield Cause(
            text="raw TCP is fine and NCCL does not fill it: at such speeds it may need more sockets",
            hint=_SOCKETS_HINT,
        )


def _far_apart(reading: Reading) -> Iterator[Cause]:
    trips = reading.evidence.latency_us
    if not trips:
        return
    usual = statistics.median(trips.values())
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


def _slow_start(reading: Reading) -> Iterator[Cause]:
    evidence = reading.evidence
    small = [row for row in evidence.rows if row.size_bytes <= _SMALL_BYTES]
    if not small or not evidence.latency_us or statistics.median(evidence.latency_us.values()) > _LAN_ROUND_TRIP_US:
        return
    row = min(small, key=lambda row: row.size_bytes)
    trip_us = statistics.median(evidence.latency_us.values())
    needed_us = _steps(row.collective, evidence.ranks or 2) * trip_us / 2
    if row.time_us >= max(_SMALL_FACTOR * needed_us, _SMALL_LEAST_US):
        yield Cause(
            text=f"{row.collective} of {format_size(row.size_bytes)} takes {_ms(row.time_us)}, where round trips need "
            f"{_ms(needed_us)}: the workers wait, and not for the wire",
            hint="processors shared with others or saving power: top; cpupower frequency-info",
        )


def _tcp_limit(reading: Reading) -> Iterator[Cause]:
    tcp, ceiling = reading.tcp_gb_per_s, reading.ceiling_gb_per_s
    link = reading.evidence.link_gbit_per_s or 0.0
    if (
        tcp
        and ceiling
        and link >= _TCP_LIMIT_LINK_GBIT
        and not reading.tcp_is_slow
        and tcp < _TCP_LIMIT_SHARE * ceiling
    ):
        yield Cause(
            text=f"raw TCP itself gives {tcp:.3g} GB/s of {ceiling:.3g} GB/s: it rarely passes 3 to 5 GB/s, "
            "whatever the link",
            hint="only RDMA (RoCE, InfiniBand) gets more out of such cards: multinode check tells which have it",
        )


_OF_TCP = frozenset({_odd_pairs, _mixed_mtu, _one_connection, _sockets, _tcp_limit})
"""What explains TCP alone."""

_IN_ORDER: tuple[Callable[[Reading], Iterator[Cause]], ...] = (
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


def _slow_network(reading: Reading) -> Cause:
    return Cause(
        text=f"raw TCP is slow as well, {reading.tcp_gb_per_s:.3g} GB/s at the slowest place of the ring: the network, "
        "not the collective",
        hint="cables, the switch, other traffic on it: multinode check --bandwidth; on every node ip -s link",
    )


def _slow_for_no_reason(reading: Reading) -> Cause:
    if reading.evidence.over_rdma:
        return Cause(
            text="the traffic goes by RDMA and does not fill the link: the port, its switch, the way from GPU to card",
            hint="ibstat, and ib_write_bw between the nodes; GPUDirect: NCCL_DEBUG=INFO tells GDRDMA or not",
        )
    if reading.tcp_gb_per_s is None:
        return Cause(
            text="whether the network or the collective is slow, raw TCP would tell, and it was not tried",
            hint="multinode check --bandwidth",
        )
    return Cause(
        text="raw TCP is fine, so cables and switch are: the collective loses it on the nodes",
        hint="processors and workers of each node while it runs: top; the backend's own log: NCCL_DEBUG=INFO",
    )


def _ceilings(reading: Reading) -> dict[str, float]:
    """Goodput in Gbit/s of every node whose link is known."""
    evidence = reading.evidence
    return {
        name: goodput_gb_per_s(link, evidence.mtu_by_node.get(name, evidence.mtu or _ETHERNET_MTU)) * _BITS_PER_BYTE
        for name, link in evidence.link_by_node.items()
    }


def _steps(collective: str, ranks: int) -> int:
    """Messages that wait for each other, one way each, in the longest way of the usual algorithms."""
    if collective in {"all_reduce", "reduce_scatter"}:
        return 2 * (ranks - 1)
    if collective in {"all_gather", "all_to_all"}:
        return ranks - 1
    return max(1, math.ceil(math.log2(ranks))) if collective == "broadcast" else 1


def _names(nodes: tuple[str, ...]) -> str:
    return nodes[0] if len(nodes) == 1 else f"{', '.join(nodes[:-1])} and {nodes[-1]}"


def _ms(time_us: float) -> str:
    return f"{time_us / 1000:.3g} ms"
