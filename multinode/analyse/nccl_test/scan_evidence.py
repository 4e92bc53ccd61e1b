"""ScanEvidence: all that was measured around a collective sweep; Reading: how full cards and raw TCP were, by size.

Judges whether TCP and the collectives are slow; why they are is `sweep_causes`', what to say `sweep_verdict`'s.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from multinode.analyse.collectives.collectives import CollectiveRow
from multinode.analyse.nccl_test.pair_speeds import Odd, PairSpeed, fastest_of
from multinode.units import goodput_gb_per_s

__all__ = ["FAST_LINK_GBIT", "Reading", "ScanEvidence", "SizeShare", "read_evidence", "slowest_gb_per_s"]

FAST_LINK_GBIT = 10.0
"""From here on processors bound what TCP reaches, and repeats differ."""

_LARGE_BYTES = 1 << 20
_SMALL_BYTES = 4096
# More than that is not what a message costs: somebody is waited for.
_START_MOST_US = 2000.0
_ETHERNET_MTU = 1500
_BITS_PER_BYTE = 8
# Below the first a figure is slow on links that TCP fills with ease, below the second on faster ones.
_COLLECTIVE_ENOUGH = (0.85, 0.7)
_TCP_ENOUGH = (0.8, 0.5)
# TCP rarely passes 3 to 5 GB/s, whatever the link.
_TCP_MOST_GB_PER_S = 3.0


class ScanEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a sweep; whatever was not measured stays empty.

    Attributes:
        backend: `nccl` or `gloo`.
        ranks: workers in all.
        card_factors: by collective, the part of S that the busiest card carries one way; without, busbw's own factor.
        nodes: a single one uses no network.
        over_rdma: whether the collectives went by RDMA, for which TCP is no peer.
        link_shares: by collective, the share of a link that the backend gets where all is well; without, all of it.
        link_gbit_per_s: rate of the slowest card; likewise `mtu`, the smallest, in bytes.
        tcp_one: raw TCP around the ring of nodes, all at once, over one connection each; `tcp_many` over several.
        latency_us: round trip of a small TCP message, by caller and peer.
        odd: what is odd between pairs of nodes that were measured one by one.
        path_ok: whether the traffic took the cards that it should; None is not known.
        path_sentences: what is to be said of it.
        wait_share_by_node: part of the operations' time in which the node's workers waited for others, 0 to 1.
        busy_percent_by_node: processors, while the sweep ran.
        duplex_by_node: of the card of the data plane; likewise `mtu_by_node`, `link_by_node` (Gbit/s).
    """

    rows: tuple[CollectiveRow, ...]
    backend: str | None = None
    ranks: int | None = None
    card_factors: dict[str, float] = {}
    nodes: int | None = None
    over_rdma: bool = False
    link_shares: dict[str, float] = {}
    link_gbit_per_s: float | None = None
    mtu: int | None = None
    tcp_one: tuple[PairSpeed, ...] = ()
    tcp_many: tuple[PairSpeed, ...] = ()
    latency_us: dict[tuple[str, str], float] = {}
    odd: tuple[Odd, ...] = ()
    path_ok: bool | None = None
    path_sentences: tuple[str, ...] = ()
    wait_share_by_node: dict[str, float] = {}
    busy_percent_by_node: dict[str, float] = {}
    duplex_by_node: dict[str, str] = {}
    mtu_by_node: dict[str, int] = {}
    link_by_node: dict[str, float] = {}


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


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """The evidence, and what it comes to.

    Attributes:
        ceiling_gb_per_s: payload that the slowest link carries.
        tcp_gb_per_s: raw TCP at the slowest place of the ring, each pair over as many connections as were best.
        shares: of every large size: 1 MiB and more, or the largest of its collective.
        worst: of the largest size of each collective, the one that fills the network least; None of no row.
        tcp_is_slow: whether raw TCP stays below what the link gives; None is not known.
        collective_is_slow: whether `worst` stays below what raw TCP, or else the link, gives; None is not known.
    """

    evidence: ScanEvidence
    ceiling_gb_per_s: float | None
    tcp_gb_per_s: float | None
    shares: tuple[SizeShare, ...]
    worst: SizeShare | None
    tcp_is_slow: bool | None
    collective_is_slow: bool | None

    @property
    def is_fast_link(self) -> bool:
        """Whether the links, or what TCP reached, are of 10 Gbit/s and more."""
        return _is_fast(self.evidence, self.tcp_gb_per_s)

    @property
    def is_well(self) -> bool:
        """Whether neither TCP nor a collective is slow, and something is known to say so."""
        return self.collective_is_slow is False and not self.tcp_is_slow


def read_evidence(evidence: ScanEvidence) -> Reading:
    """The shares, and whether they are enough."""
    link = evidence.link_gbit_per_s
    ceiling = goodput_gb_per_s(link, evidence.mtu or _ETHERNET_MTU) if link else None
    tcp = slowest_gb_per_s(fastest_of(evidence.tcp_one, evidence.tcp_many))
    if evidence.over_rdma:
        # Its frames have other headers, which take a few hundredths of the line rate.
        ceiling, tcp = (link / _BITS_PER_BYTE if link else None), None
    shares = tuple(_share(row, evidence, ceiling, tcp) for row in _large(evidence.rows))
    largest = {share.collective: share for share in sorted(shares, key=lambda share: share.size_bytes)}
    worst = min(largest.values(), key=lambda share: 0.0 if share.fill is None else share.fill, default=None)
    fast = _is_fast(evidence, tcp)
    tcp_is_slow = None
    if tcp is not None and ceiling is not None:
        tcp_is_slow = tcp < min(_TCP_ENOUGH[fast] * ceiling, _TCP_MOST_GB_PER_S)
    return Reading(
        evidence=evidence,
        ceiling_gb_per_s=ceiling,
        tcp_gb_per_s=tcp,
        shares=shares,
        worst=worst,
        tcp_is_slow=tcp_is_slow,
        collective_is_slow=None if worst is None or worst.fill is None else worst.fill < _COLLECTIVE_ENOUGH[fast],
    )


def slowest_gb_per_s(pairs: Iterable[PairSpeed]) -> float | None:
    """What the slowest of the streams that ran reached: a ring is as fast as that."""
    speeds = [one.gbit_per_s for one in pairs if one.gbit_per_s is not None]
    return min(speeds) / _BITS_PER_BYTE if speeds else None


def _is_fast(evidence: ScanEvidence, tcp_gb_per_s: float | None) -> bool:
    return max(evidence.link_gbit_per_s or 0.0, (tcp_gb_per_s or 0.0) * _BITS_PER_BYTE) >= FAST_LINK_GBIT


def _large(rows: Sequence[CollectiveRow]) -> list[CollectiveRow]:
    largest: dict[str, int] = {}
    for row in rows:
        largest[row.collective] = max(row.size_bytes, largest.get(row.collective, 0))
    return [row for row in rows if row.size_bytes >= min(_LARGE_BYTES, largest[row.collective])]


def _share(row: CollectiveRow, evidence: ScanEvidence, ceiling: float | None, tcp: float | None) -> SizeShare:
    factor = evidence.card_factors.get(row.collective)
    speed = row.busbw_gb_per_s if factor is None else factor * row.algbw_gb_per_s
    best = min((each for each in (ceiling, tcp) if each), default=None)
    usual_share = evidence.link_shares.get(row.collective, 1.0)
    fill = None
    if best is not None and speed > 0:
        # Of the time that this speed took, what the network would have needed, and what every message pays.
        needed_us = row.time_us * speed / (best * usual_share)
        small = [one for one in evidence.rows if one.collective == row.collective and one.size_bytes <= _SMALL_BYTES]
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
