"""ScanEvidence: all that a size scan measured, and what follows from it: shares of the network, and what is slow."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from multinode.cluster.facts import Interface
from multinode.figures.figure import Figure, Row
from multinode.network.nic_path import NicPathCheck
from multinode.records.samples import CollectiveSample
from multinode.stats.estimate import Estimate, estimate_median, exactly, spread_of
from multinode.traffic.algorithms import Layout, bus_factor, link_share, nic_factor
from multinode.traffic.pair_speeds import NetworkFinding, PairSpeed, RawTcp, find_odd, slowest_gb_per_s
from multinode.units import BITS_PER_BYTE, ETHERNET_MTU, goodput_gb_per_s

_LARGE_BYTES = 1 << 20
_US_PER_MS = 1e3
SMALL_BYTES = 4096
# From this rate on, processors limit TCP, and repeats differ.
_FAST_LINK_GBIT = 10.0
_MOSTLY = 0.5
# A longer time is not the cost of a message: workers are waiting.
_START_MOST_US = 2000.0
# Thresholds of slowness for links that TCP fills easily, and for faster ones. A stream fills 10 Gbit/s; a collective
# there shares the processor with it.
_COLLECTIVE_ENOUGH = (0.85, 0.7)
_TCP_ENOUGH = (0.8, 0.5)
# Share of a link that RDMA carries; a PCIe slot loses some of its rate to packets.
_RDMA_ENOUGH = 0.7
# Of the line rate, by a raw stream alone.
_RAW_ENOUGH = 0.7
# No link carries more: larger frames than the MTU says, and clock errors, matter less.
MORE_THAN_A_LINK = 1.05
# TCP rarely passes 3 to 5 GB/s, whatever the link.
_TCP_MOST_GB_PER_S = 3.0


class SizeShare(msgspec.Struct, frozen=True, kw_only=True):
    """The network use of one large message."""

    collective: str
    size_bytes: int
    nic_gb_per_s: float  # through the busiest NIC in one direction
    busbw_gb_per_s: float  # as in nccl-tests
    share_of_ceiling: float | None = None  # of the TCP line rate of the slowest link; None if its rate is unknown
    share_of_tcp: float | None = None  # of raw TCP around the ring; None if not measured; also `share_of_rdma`
    share_of_rdma: float | None = None
    usual_share: float = 1.0  # share of a link that the backend normally gets for this collective
    latency_share: float = 0.0  # of its time, what a small message takes as well; 1 for a small message
    # of the smaller of the two and of `usual_share`, without the time of a small message; None if neither is known
    fill: float | None = None


class ScanEvidence(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """All data of a size scan; unmeasured values are empty."""

    rows: tuple[CollectiveRow, ...]
    layout: Layout = Layout(nodes=2)
    backend: str = "unknown"  # `nccl` or `gloo`
    nics: dict[str, Interface] = {}  # data-plane NICs by node, as far as known; empty for a single node
    nics_gbit_per_s: dict[str, tuple[float, ...]] = {}  # rates of the used NICs by node, if known
    tcp: RawTcp = RawTcp()
    rdma: tuple[PairSpeed, ...] = ()  # ib_write_bw around the ring
    path: NicPathCheck = NicPathCheck(ok=None)
    # whether the collectives used RDMA, which TCP cannot be compared with; None if unknown
    over_rdma: bool | None = False
    link_layer: str | None = None  # of the RDMA ports: `InfiniBand` or `Ethernet` (RoCE)
    bonds: tuple[str, ...] = ()  # used interfaces or RDMA devices that are bonds of several NICs
    rdma_program: str = "ib_write_bw"  # that measured `rdma`
    is_raw_only: bool = False  # whether only raw TCP or RDMA was to be measured, without collectives
    lost_share: float | None = None  # share of segments that raw TCP sent again, if counted
    tcp_in_one_thread: bool = False  # whether one thread ran all connections of raw TCP
    processes_alone: int = 0  # tests that had one worker, where several were started
    wrong_beside_rows: int = 0  # wrong values that only a summary of the rows counts
    # share of the operations' time in which the node's workers waited for others, 0 to 1
    wait_share_by_node: dict[str, float] = {}
    busy_percent_by_node: dict[str, float] = {}  # processors, during the collectives

    @functools.cached_property
    def link_gbit_per_s(self) -> float | None:
        """Combined rate of the used NICs of the slowest node; None if one is unknown."""
        rates = [sum(self.nics_gbit_per_s.get(name, ())) or nic.speed_gbit_per_s for name, nic in self.nics.items()]
        measured = [rate for rate in rates if rate]
        return min(measured) if measured and len(measured) == len(rates) else None

    @property
    def link_nics(self) -> int:
        """Number of NICs whose combined rate is `link_gbit_per_s`."""
        rates = [self.nics_gbit_per_s.get(name) or (nic.speed_gbit_per_s or 0.0,) for name, nic in self.nics.items()]
        return len(min(rates, key=sum, default=(0.0,)))

    @property
    def num_wrong(self) -> int:
        """Wrong values of all messages."""
        return sum(row.num_wrong or 0 for row in self.rows) or self.wrong_beside_rows

    @functools.cached_property
    def mtu(self) -> int | None:
        """The smallest of the NICs."""
        return min((nic.mtu for nic in self.nics.values() if nic.mtu), default=None)

    @functools.cached_property
    def goodput_gb_per_s(self) -> float | None:
        """TCP payload of the slowest link."""
        link = self.link_gbit_per_s
        return goodput_gb_per_s(link, self.mtu or ETHERNET_MTU) if link else None

    @functools.cached_property
    def odd(self) -> tuple[NetworkFinding, ...]:
        """Outliers among individually measured pairs."""
        return find_odd(self.tcp.pairs, nic_ceilings(self.nics)) if self.tcp.pairs else ()

    @functools.cached_property
    def tcp_gb_per_s(self) -> float | None:
        """Raw TCP at the slowest place of the ring, for comparison."""
        return None if self.over_rdma else slowest_gb_per_s(self.tcp.ring)

    @functools.cached_property
    def rdma_gb_per_s(self) -> float | None:
        """Speed of raw RDMA on the slowest link, if the collectives used RDMA."""
        return slowest_gb_per_s(self.rdma) if self.over_rdma else None

    @functools.cached_property
    def ceiling_gb_per_s(self) -> float | None:
        """Payload of the slowest link; RDMA headers take a few percent of the rate."""
        link = self.link_gbit_per_s
        return self.goodput_gb_per_s if not self.over_rdma else link / BITS_PER_BYTE if link else None

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
        """Of the largest size of each collective, the one that fills the network least, if any."""
        return self.beyond or min(
            self._largest, key=lambda share: 0.0 if share.fill is None else share.fill, default=None
        )

    @functools.cached_property
    def beyond(self) -> SizeShare | None:
        """Of these, one above the link rate, if any."""
        large = [share for share in self._largest if share.size_bytes >= _LARGE_BYTES]
        most = max(large, key=lambda share: share.share_of_ceiling or 0.0, default=None)
        return most if most is not None and (most.share_of_ceiling or 0.0) > MORE_THAN_A_LINK else None

    @property
    def _largest(self) -> list[SizeShare]:
        by_size = sorted(self.shares, key=lambda share: share.size_bytes)
        return list({share.collective: share for share in by_size}.values())

    def algorithm_of(self, row: CollectiveRow) -> str | None:
        """The backend's algorithm, if the NIC counters show it."""
        ran = ((message.algorithm, message.collective, message.size_bytes) for message in self.path.messages)
        return next((name for name, *rest in ran if rest == [row.collective, row.size_bytes]), None)

    @property
    def is_fast_link(self) -> bool:
        """Whether the links, or the TCP rate, are 10 Gbit/s or more."""
        return max(self.link_gbit_per_s or 0.0, (self.tcp_gb_per_s or 0.0) * BITS_PER_BYTE) >= _FAST_LINK_GBIT

    @property
    def tcp_is_slow(self) -> bool | None:
        """Whether raw TCP is below the link's capability; None if unknown."""
        if self.tcp_gb_per_s is None or self.ceiling_gb_per_s is None:
            return None
        is_faster = (self.link_gbit_per_s or 0.0) > _FAST_LINK_GBIT
        return self.tcp_gb_per_s < min(_TCP_ENOUGH[is_faster] * self.ceiling_gb_per_s, _TCP_MOST_GB_PER_S)

    @property
    def rdma_is_slow(self) -> bool | None:
        """Whether raw RDMA is below the link's capability; None if unknown."""
        if self.rdma_gb_per_s is None or self.ceiling_gb_per_s is None:
            return None
        return self.rdma_gb_per_s < _RDMA_ENOUGH * self.ceiling_gb_per_s

    @property
    def collective_is_slow(self) -> bool | None:
        """Whether `worst` is below raw TCP, or else the link; None if unknown."""
        if self.worst is None or self.worst.fill is None or self.beyond is not None or self.is_latency:
            return None
        return self.worst.fill < _COLLECTIVE_ENOUGH[self.is_fast_link]

    @property
    def is_latency(self) -> bool:
        """Whether the largest message mostly measured the latency, which says nothing of the bandwidth."""
        return self.worst is not None and self.worst.latency_share > _MOSTLY

    @property
    def is_well(self) -> bool:
        """Whether TCP, RDMA and collectives are known not to be slow."""
        if self.is_raw_only:
            return self.raw_is_slow is False
        return self.collective_is_slow is False and not self.tcp_is_slow and not self.rdma_is_slow

    @property
    def raw_gb_per_s(self) -> float | None:
        """Raw RDMA if the collectives used it, else raw TCP, at the slowest place of the ring."""
        return self.rdma_gb_per_s if self.over_rdma else self.tcp_gb_per_s

    @property
    def raw_is_slow(self) -> bool | None:
        """Whether a raw stream that nothing else disturbs is below its link; None if unknown."""
        raw, ceiling = self.raw_gb_per_s, self.ceiling_gb_per_s
        return raw < _RAW_ENOUGH * ceiling if raw is not None and ceiling is not None else None


def _share(row: CollectiveRow, seen: ScanEvidence) -> SizeShare:
    ceiling = seen.ceiling_gb_per_s
    tcp = None if seen.over_rdma else row.tcp_gb_per_s or seen.tcp_gb_per_s
    across = seen.layout.nodes > 1
    case = (seen.backend, row.collective, seen.layout)
    speed = nic_factor(*case, seen.algorithm_of(row)) * row.algbw_gb_per_s if across else row.busbw_gb_per_s
    rdma = seen.rdma_gb_per_s
    best = min((each for each in (ceiling, tcp, rdma) if each), default=None)
    usual_share = link_share(*case)
    fill = None
    small = [other for other in seen.rows if other.collective == row.collective and other.size_bytes <= SMALL_BYTES]
    start_us = min((other.time_us.value for other in small if other.size_bytes < row.size_bytes), default=0.0)
    start_us = min(start_us, _START_MOST_US)
    if best is not None and speed > 0:
        # Time needed by the network, and the fixed cost of every message.
        fill = (row.time_us.value * speed / (best * usual_share) + start_us) / row.time_us.value
    return SizeShare(
        collective=row.collective,
        size_bytes=row.size_bytes,
        nic_gb_per_s=speed,
        busbw_gb_per_s=row.busbw_gb_per_s,
        share_of_ceiling=speed / ceiling if ceiling else None,
        share_of_tcp=speed / tcp if tcp else None,
        share_of_rdma=speed / rdma if rdma else None,
        usual_share=usual_share,
        latency_share=1.0 if row.size_bytes <= SMALL_BYTES else start_us / row.time_us.value,
        fill=fill,
    )


def nic_ceilings(nics: dict[str, Interface]) -> dict[str, float]:
    """Payload of each node's NIC in Gbit/s, if its rate is known."""
    return {
        name: goodput_gb_per_s(nic.speed_gbit_per_s, nic.mtu or ETHERNET_MTU) * BITS_PER_BYTE
        for name, nic in nics.items()
        if nic.speed_gbit_per_s
    }


class CollectiveRow(msgspec.Struct, frozen=True, kw_only=True):
    """One message of a size scan."""

    collective: str = "all_reduce"
    dtype: str = "float"  # nccl-tests' name of the element type
    redop: str = "sum"  # nccl-tests' name of the reduction, or `none`
    size_bytes: int  # S as nccl-tests prints it
    count: int  # elements, as nccl-tests prints them
    iters: int  # timed iterations
    time_us: Estimate  # duration of the operation: median over iterations of the slowest worker's time
    p95_us: float  # 95th percentile of the slowest worker's time
    cv: float = 0.0  # coefficient of variation, standard deviation over mean; 0 for a single iteration
    transfer_us: float  # time without waiting for others: median over iterations of the fastest worker's time
    algbw_gb_per_s: float  # size over time, 1e9 bytes per second
    busbw_gb_per_s: float  # algbw times the collective's factor
    num_wrong: int | None = None  # elements with a wrong value, over all workers; None if they were not verified
    tcp_gb_per_s: float | None = None  # raw TCP in turns with it; None without turns
    # busbw over the goodput ceiling of the slowest link; None if no link speed is known
    share_of_ceiling: float | None = None
    # busbw over raw TCP between the same NICs, in turns with it or with another message; None if raw TCP was not
    # measured
    share_of_tcp: float | None = None

    def speed(self, gb_per_s: float) -> Estimate:
        """Its algbw or busbw with an interval: they are inverse to the time."""
        time_us = self.time_us
        if time_us.is_exact or time_us.low <= 0:
            return exactly(gb_per_s)
        low, high = (gb_per_s * time_us.value / end for end in (time_us.high, time_us.low))
        return Estimate(value=gb_per_s, low=low, high=high, repeats=time_us.repeats)


MESSAGE = Figure[str]("message", "message", about="operation and size of a message")
COLLECTIVE = Figure[str]("collective", "collective", about="collective operation of the test")
DTYPE = Figure[str]("dtype", "type", about="element type of a message, as nccl-tests names it")
REDOP = Figure[str]("redop", "redop", about="reduction of a message, as nccl-tests names it")
SIZE = Figure[int]("size_bytes", "size", "B", form="digits", about="size of a message, as nccl-tests counts it")
TIME = Figure[Estimate](
    "time_us", "time", "us", form="interval", about="median time of the operation on the slowest worker"
)
TIME_MS = Figure[Estimate](
    "time_ms", "time", "ms", form="interval", about="median time of a long operation on the slowest worker"
)
ALGBW = Figure[Estimate]("algbw_gb_per_s", "algbw", "GB/s", form="figure", about="message size divided by time")
BUSBW = Figure[Estimate](
    "busbw_gb_per_s", "busbw", "GB/s", form="figure", about=("algbw multiplied by the factor of the collective")
)
WRONG = Figure[int]("num_wrong", "#wrong", form="digits", about="elements with wrong values, on all workers together")
P95 = Figure[float](
    "p95_us", "p95", "us", form="hundredths", about=("95th percentile of the time on the slowest worker")
)
OF_LINE = Figure[float](
    "share_of_ceiling",
    "of line rate",
    "TCP",
    form="percent",
    about="busbw as a share of the TCP line rate of the slowest NIC",
    phrase="of TCP line rate",
)
OF_TCP = Figure[float](
    "share_of_tcp",
    "of raw TCP",
    form="percent",
    about="busbw as a share of raw TCP between the same NICs in the same run",
)
OF_RDMA = Figure[float](
    "share_of_rdma",
    "of raw RDMA",
    form="percent",
    about="speed through a NIC as a share of raw RDMA between the same NICs",
)


def collective_row(row: CollectiveRow, share: SizeShare | None = None) -> Row:
    """The figures of a message; its shares are its own, or those of `share`."""
    shares: CollectiveRow | SizeShare = share or row
    values: dict[str, object] = {
        figure.name: getattr(shares, figure.name, None) for figure in (OF_LINE, OF_TCP, OF_RDMA)
    }
    speeds = {figure.name: row.speed(getattr(row, figure.name)) for figure in (ALGBW, BUSBW)}
    return Row(row, msgspec.structs.asdict(row) | {TIME_MS.name: row.time_us * (1 / _US_PER_MS)} | speeds | values)


def collective_rows(
    samples: Iterable[CollectiveSample], ranks: int, tcp_gb_per_s: Mapping[int, float | None] | None = None
) -> tuple[CollectiveRow, ...]:
    """One row per message that all `ranks` workers have measured, in order of measurement.

    Args:
        samples: of all workers.
        ranks: number of workers.
        tcp_gb_per_s: raw TCP in turns with a message, by its index.
    """
    tcp = tcp_gb_per_s or {}
    by_message: dict[int, list[CollectiveSample]] = {}
    for sample in samples:
        by_message.setdefault(sample.index, []).append(sample)
    complete = ((index, workers) for index, workers in sorted(by_message.items()) if len(workers) == ranks)
    return tuple(row for index, workers in complete if (row := _row(workers, ranks, tcp.get(index))) is not None)


def with_shares(
    rows: Iterable[CollectiveRow], ceiling_gb_per_s: float | None, tcp_gb_per_s: float | None
) -> tuple[CollectiveRow, ...]:
    """The rows with their shares of the link's goodput and of raw TCP."""
    return tuple(
        msgspec.structs.replace(
            row,
            share_of_ceiling=row.busbw_gb_per_s / ceiling_gb_per_s if ceiling_gb_per_s else None,
            share_of_tcp=row.busbw_gb_per_s / tcp if tcp else None,
        )
        for row in rows
        for tcp in (row.tcp_gb_per_s or tcp_gb_per_s,)
    )


def _row(workers: Sequence[CollectiveSample], ranks: int, tcp_gb_per_s: float | None) -> CollectiveRow | None:
    first = workers[0]
    iterations = list(zip(*(worker.times_us for worker in workers), strict=False))
    if not iterations:
        return None
    times_us = [max(times) for times in iterations]
    slowest, median = spread_of(times_us), estimate_median(times_us)
    algbw = first.size_bytes / slowest.median / 1000
    verified = [worker.num_wrong for worker in workers if worker.num_wrong is not None]
    return CollectiveRow(
        collective=first.collective,
        dtype=first.dtype,
        redop=first.redop,
        size_bytes=first.size_bytes,
        count=first.count,
        iters=len(iterations),
        time_us=median,
        p95_us=slowest.p95,
        cv=slowest.cv,
        transfer_us=statistics.median(min(times) for times in iterations),
        algbw_gb_per_s=algbw,
        busbw_gb_per_s=algbw * bus_factor(first.collective, ranks),
        num_wrong=sum(verified) if len(verified) == len(workers) else None,
        tcp_gb_per_s=tcp_gb_per_s,
    )
