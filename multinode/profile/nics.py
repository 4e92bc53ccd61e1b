"""The counters of each NIC and RDMA port of a node, and its traffic in the measured steps, without headers. Pure.

The only reader of NIC counters. Rates use the records that read a NIC more often in the span: the sampler's, or those
of the steps.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from multinode.figures.figure import Figure, Row
from multinode.profile.observed import LOOPBACK, Observed, ObservedNode
from multinode.records.progress import NicRate, nic_rate
from multinode.records.samples import NicBytes, NicSample, StepSample, WorkerSample
from multinode.stats.counter_rates import Reading, Span, grown_in, in_whole, peak_in
from multinode.stats.estimate import known_max
from multinode.stats.unknown import UNMEASURED, Unknown, UnknownError, found, or_none

Counters = Sequence[tuple[int, NicBytes]]
"""Counters of one NIC by monotonic time of the node, ascending."""

# Bits in a nanosecond are Gbit in a second.
_GBIT_PER_BYTE = 8e-9
# More than any NIC or bond carries.
_ABSURD_GBIT = 1e5
# Counters include headers, and reading takes time.
_OVER_LINK = 1.05
# Ethernet, IPv4 and TCP with timestamps: 14 + 20 + 32.
_HEADER_BYTES = 66
_MOST_NICS = 64
_LONGEST_NAME = 64
_ZERO = NicBytes(tx_bytes=0, rx_bytes=0)
_FIELDS = ("tx_bytes", "rx_bytes", "tx_packets", "rx_packets")
_FAULTS = {"errors": ("rx_errors", "tx_errors"), "drops": ("rx_dropped", "tx_dropped")}


RATES = ("in_gbit_per_s", "out_gbit_per_s", "peak_in_gbit_per_s", "peak_out_gbit_per_s")
"""Fields of NicUse that are known together."""


class Carried(msgspec.Struct, frozen=True, kw_only=True):
    """Payload bytes through a NIC in each direction."""

    sent: float = msgspec.field(default=0.0, name="sent_bytes")
    received: float = msgspec.field(default=0.0, name="received_bytes")

    def one_way(self, *, sends: bool) -> float:
        """Bytes of one direction."""
        return self.sent if sends else self.received

    @property
    def busier(self) -> float:
        """Bytes of the busier direction."""
        return max(self.sent, self.received)

    @property
    def both(self) -> float:
        """Bytes of both directions."""
        return self.sent + self.received

    def __add__(self, other: Carried) -> Carried:
        """The sum of both."""
        return Carried(sent=self.sent + other.sent, received=self.received + other.received)

    def times(self, factor: float) -> Carried:
        """A multiple."""
        return Carried(sent=self.sent * factor, received=self.received * factor)


class NicUse(msgspec.Struct, frozen=True, kw_only=True):
    """One NIC or RDMA port."""

    ifname: str
    # as counted, including headers, mean over the window; also `out_gbit_per_s`
    in_gbit_per_s: float | Unknown = UNMEASURED
    out_gbit_per_s: float | Unknown = UNMEASURED
    peak_in_gbit_per_s: float | Unknown = UNMEASURED  # maximum between two samples; also `peak_out_gbit_per_s`
    peak_out_gbit_per_s: float | Unknown = UNMEASURED
    # before the first worker started; also `idle_out_gbit_per_s`; None if not sampled
    idle_in_gbit_per_s: float | None = None
    idle_out_gbit_per_s: float | None = None
    errors: int | Unknown = UNMEASURED  # in the whole run, both directions; also `drops`
    drops: int | Unknown = UNMEASURED
    link_gbit_per_s: float | None = None  # its reported rate; `share` is the mean of the busier direction over it
    share: float | Unknown = UNMEASURED


def _peak(row: Row) -> str:
    nic: NicUse = row.item
    return NIC_PEAK.text(known_max(map(or_none, (nic.peak_in_gbit_per_s, nic.peak_out_gbit_per_s))))


def _losses(row: Row) -> str:
    return f"{NIC_DROPS.text(row.item.errors)}/{NIC_DROPS.text(row.item.drops)}"


NIC_NAME = Figure[str]("ifname", "NIC", about="name of the NIC, or of the RDMA port")
NIC_IN = Figure[float]("in_gbit_per_s", "in", "Gbit/s", form="thousandths", about="mean receive rate of the NIC")
NIC_OUT = Figure[float]("out_gbit_per_s", "out", "Gbit/s", form="thousandths", about="mean send rate of the NIC")
NIC_PEAK = Figure[float](
    "peak_in_gbit_per_s",
    "peak",
    "Gbit/s",
    form="thousandths",
    about="highest rate between two samples, in the NIC's busier direction",
    cell=_peak,
)
NIC_PEAKS: tuple[Figure[float], ...] = (
    Figure("peak_in_gbit_per_s", about="highest receive rate of the NIC between two samples"),
    Figure("peak_out_gbit_per_s", about="highest send rate of the NIC between two samples"),
)
NIC_LINK = Figure[float]("link_gbit_per_s", "link", "Gbit/s", form="number", about="line rate that the NIC reports")
NIC_SHARE = Figure[float](
    "share", "of link", form="share", about="traffic of the NIC in its busier direction, as a share of the line rate"
)
BUSIEST_LINK = Figure[float](
    "busiest_share",
    "of the busiest link",
    form="share",
    about="traffic of the busiest NIC as a share of its link rate",
)
NIC_DROPS = Figure[int](
    "drops", "errors", "/drops", form="whole", about="errors and dropped packets in the whole run", cell=_losses
)


def is_nic(name: str) -> bool:
    """Whether it is a valid NIC name, safe to print."""
    return name.isprintable() and len(name) <= _LONGEST_NAME


def is_rdma(name: str) -> bool:
    """Whether it is an RDMA port, `device/port`: interface names contain no slash."""
    return "/" in name


def sampled_nics(node: ObservedNode) -> dict[str, list[NicSample]]:
    """The sampler's readings by NIC, ascending in time."""
    nics: dict[str, list[NicSample]] = {}
    for sample in sorted(node.of(NicSample), key=lambda sample: sample.mono_ns):
        if is_nic(sample.ifname):
            nics.setdefault(sample.ifname, []).append(sample)
    return nics


def idle_samples(node: ObservedNode, samples: Iterable[NicSample]) -> list[NicSample]:
    """Readings before any worker of the node started."""
    begun = min(
        (sample.begun_mono_ns for sample in node.of(WorkerSample) if sample.begun_mono_ns is not None), default=0
    )
    return [sample for sample in samples if sample.mono_ns <= begun]


def nic_rates(samples: Iterable[NicSample]) -> dict[str, list[NicRate]]:
    """Rates between consecutive samples, by NIC."""
    nics: dict[str, list[NicSample]] = {}
    for sample in samples:
        nics.setdefault(sample.ifname, []).append(sample)
    return {
        ifname: [
            nic_rate(before, after) for before, after in itertools.pairwise(taken) if after.mono_ns > before.mono_ns
        ]
        for ifname, taken in nics.items()
    }


def payload(after: NicBytes, before: NicBytes = _ZERO) -> Carried:
    """The counter increase without headers."""
    return _less_headers(*((getattr(after, name) or 0) - (getattr(before, name) or 0) for name in _FIELDS))


def carried_in(counters: Counters, span: Span) -> Carried:
    """Payload through a NIC in a span."""
    each = ([Reading(moment, getattr(counter, name) or 0) for moment, counter in counters] for name in _FIELDS)
    return _less_headers(*(grown_in(readings, span).count for readings in each))


def use_of_nics(node: ObservedNode, span: Span | None) -> tuple[NicUse, ...]:
    """The sampled NICs, the data plane's first.

    Args:
        node: its records.
        span: of the measured steps; None excludes figures of the span.
    """
    sampled: dict[str, Counters] = {
        name: [(sample.mono_ns, sample) for sample in samples] for name, samples in sampled_nics(node).items()
    }
    stepped: dict[str, list[tuple[int, NicBytes]]] = {}
    for step in node.of(StepSample):
        for name, counters in (step.nics or {}).items():
            stepped.setdefault(name, []).append((step.mono_ns, counters))
    names = {name for name in (*sampled, *stepped) if is_nic(name) and name != LOOPBACK}
    ordered = sorted(names, key=lambda name: (name != node.ifname, name))[:_MOST_NICS]
    nics = [_of_the_run(node, name, sampled.get(name, ())) for name in ordered]
    if span is not None:
        for place, name in enumerate(ordered):
            finer = max(sampled.get(name, ()), stepped.get(name, ()), key=lambda counters: _count_in(counters, span))
            nics[place] = _with_rates(nics[place], finer, span)
    return tuple(nics)


def _count_in(counters: Counters, span: Span) -> int:
    return sum(span.start_ns <= moment <= span.end_ns for moment, _ in counters)


def _of_the_run(node: ObservedNode, name: str, sampled: Counters) -> NicUse:
    idle_in, idle_out = _idle(node, sampled)
    return NicUse(
        ifname=name,
        idle_in_gbit_per_s=idle_in,
        idle_out_gbit_per_s=idle_out,
        link_gbit_per_s=node.link_gbit_per_s if name == node.ifname else None,
        **{kind: _faults(sampled, fields) for kind, fields in _FAULTS.items()},
    )


def _faults(sampled: Counters, fields: Iterable[str]) -> int | Unknown:
    complete = [readings for field in fields if (readings := _readings(sampled, field))]
    return found(lambda: round(sum(map(in_whole, complete)))) if complete else UNMEASURED


def _idle(node: ObservedNode, sampled: Counters) -> tuple[float | None, float | None]:
    idle = idle_samples(node, [sample for _, sample in sampled if isinstance(sample, NicSample)])
    if not idle or idle[0].mono_ns == idle[-1].mono_ns:
        return None, None
    try:
        return _gbit_in(sampled, Span(start_ns=idle[0].mono_ns, end_ns=idle[-1].mono_ns))
    except UnknownError:
        # The span of the steps reports the same missing counters.
        return None, None


def _with_rates(nic: NicUse, counters: Counters, span: Span) -> NicUse:
    try:
        received, sent = _gbit_in(counters, span)
        peaks = [_gbit(peak_in(_readings(counters, field), span)) for field in ("rx_bytes", "tx_bytes")]
    except UnknownError as error:
        return msgspec.structs.replace(nic, **dict.fromkeys(RATES, Unknown(str(error))))
    link = nic.link_gbit_per_s
    share: float | Unknown = max(received, sent) / link if link is not None and link > 0 else UNMEASURED
    if not isinstance(share, Unknown) and share > _OVER_LINK:
        # Counters are measured; the reported rate of a virtual NIC is often arbitrary.
        share = Unknown(f"it carried more than the {link:g} Gbit/s that it reports")
    return msgspec.structs.replace(
        nic,
        in_gbit_per_s=received,
        out_gbit_per_s=sent,
        peak_in_gbit_per_s=peaks[0],
        peak_out_gbit_per_s=peaks[1],
        share=share,
    )


def _gbit_in(counters: Counters, span: Span) -> tuple[float, float]:
    received, sent = (_gbit(grown_in(_readings(counters, name), span).per_s) for name in ("rx_bytes", "tx_bytes"))
    return received, sent


def _gbit(bytes_per_s: float) -> float:
    rate = bytes_per_s * _GBIT_PER_BYTE
    if rate > _ABSURD_GBIT:
        raise UnknownError("its counter shows more than any NIC can carry")
    return rate


def _readings(counters: Counters, field: str) -> list[Reading]:
    return [Reading(moment, total) for moment, counter in counters if (total := getattr(counter, field)) is not None]


def _less_headers(tx: float, rx: float, tx_packets: float, rx_packets: float) -> Carried:
    return Carried(sent=max(0, tx - _HEADER_BYTES * tx_packets), received=max(0, rx - _HEADER_BYTES * rx_packets))


LEAST_BYTES_A_WORKER = 64 << 10
"""Gloo adds up to 300 bytes (measured) to each of up to two collective steps per worker. Below this many bytes per
worker

these may be 1% of the traffic of a NIC; ARP, SSH and samplers use it too.
"""
# Minimum share of a deficit that the traffic of another NIC must explain.
_ACCOUNTS = 0.5

# Minimum time before the training for measuring idle traffic.
_LEAST_IDLE_NS = 500_000_000


class NodeNics(msgspec.Struct, frozen=True, kw_only=True):
    """Mean payload per step on a node's NICs."""

    node: str
    ifname: str | None  # data-plane NIC; None if unknown
    carried: Carried | Unknown  # by it, and by the RDMA ports if they carried more
    rdma: tuple[str, ...] = ()  # the included RDMA ports
    others: dict[str, Carried] = {}  # traffic of the other NICs by name, without loopback
    typical: Carried | None = None  # of the median step; None with too few readings
    idle: Carried | None = None  # traffic in the time of a step before the training; None if unknown
    interpolated: bool = False  # whether the counters are the sampler's, read during the training


class _Series(msgspec.Struct, frozen=True, kw_only=True):
    """Counters of a NIC over steps, with the end of the first and last step: number and time."""

    counters: list[tuple[int, NicBytes]]
    ends: list[tuple[int, int]]

    @property
    def steps(self) -> int:
        return self.ends[-1][0] - self.ends[0][0]

    @property
    def span(self) -> Span:
        return Span(start_ns=self.ends[0][1], end_ns=self.ends[-1][1])


def read_node_nics(observed: Observed) -> tuple[NodeNics, ...]:
    """Traffic of each node's NICs from the end of the warm-up to the end of the last measured step."""
    window = _window(observed)
    if observed.syncs:
        # A partial round has too much or too little traffic.
        ends = {next(iter(window[0].values())).step, *observed.syncs}
        window = [workers for workers in window if any(end.step in ends for end in workers.values())]
    return tuple(_read_node(node, window) for node in observed.nodes)


def find_carrier(others: Mapping[str, Carried], lack: float, *, sends: bool, least: float = 0.0) -> str | None:
    """The other NIC with most traffic in one direction; None if others do not explain a deficit.

    Args:
        others: their traffic, by name.
        lack: missing bytes.
        sends: the direction.
        least: threshold of negligible traffic.
    """
    carried = {name: size for name, bytes_of in others.items() if (size := bytes_of.one_way(sends=sends)) > least}
    if sum(carried.values()) < _ACCOUNTS * lack:
        return None
    return max(carried, key=lambda name: carried[name], default=None)


def _window(observed: Observed) -> list[dict[int, StepSample]]:
    if not observed.counted:
        return []
    first, last = observed.counted[0], observed.counted[-1]
    start = max((number for number in observed.steps if number < first), default=first)
    return [workers for number, workers in observed.steps.items() if start <= number <= last]


def _read_node(node: ObservedNode, window: Sequence[dict[int, StepSample]]) -> NodeNics:
    by_steps = _read_by_steps(node, window)
    series = by_steps or _read_by_sampler(node, window)
    rates: dict[str, Carried] = {}
    reasons: dict[str, str] = {}
    for name, nic_series in series.items():
        if not nic_series.steps:
            reasons[name] = f"the counters of {name} were recorded at the end of one step only"
            continue
        try:
            rates[name] = carried_in(nic_series.counters, nic_series.span).times(1 / nic_series.steps)
        except UnknownError:
            reasons[name] = f"{name} was re-created during training, and its counters restarted at zero"
    if node.ifname is None:
        return NodeNics(node=node.name, ifname=None, carried=_no_name(rates), others=_without(rates, ()))
    rdma = tuple(name for name in rates if is_rdma(name))
    if sum(rates[name].both for name in rdma) <= rates.get(node.ifname, Carried()).both:
        rdma = ()
    ifnames = tuple(dict.fromkeys((node.ifname, *node.ifnames)))
    mine = [rates[name] for name in (*ifnames, *rdma) if name in rates]
    nic = series.get(node.ifname)
    no_counters = f"no counters of {node.ifname} were recorded in the measured steps"
    return NodeNics(
        node=node.name,
        ifname=node.ifname,
        carried=sum(mine, Carried()) if mine else Unknown(reasons.get(node.ifname, no_counters)),
        rdma=rdma,
        others=_without(rates, (*ifnames, *rdma)),
        typical=_typical(nic) if by_steps and not rdma and len(ifnames) == 1 and nic is not None else None,
        idle=_idle_bytes(node, nic) if nic is not None and nic.steps else None,
        interpolated=not by_steps,
    )


def _read_by_steps(node: ObservedNode, window: Sequence[dict[int, StepSample]]) -> dict[str, _Series]:
    counted: dict[str, _Series] = {}
    for rank in sorted(node.ranks):
        for sample in (workers[rank] for workers in window if rank in workers):
            for name, nic in (sample.nics or {}).items():
                if is_nic(name):
                    series = counted.setdefault(name, _Series(counters=[], ends=[]))
                    series.counters.append((sample.mono_ns, nic))
                    series.ends.append((sample.step, sample.mono_ns))
        if counted:
            break
    return counted


def _read_by_sampler(node: ObservedNode, window: Sequence[dict[int, StepSample]]) -> dict[str, _Series]:
    ends = [
        (worker.step, worker.mono_ns)
        for workers in window
        for rank, worker in workers.items()
        if rank == min(node.ranks)
    ]
    series = {}
    for name, samples in sampled_nics(node).items():
        seen = [end for end in ends if samples[0].mono_ns <= end[1] <= samples[-1].mono_ns]
        if len(seen) > 1:
            series[name] = _Series(counters=[(sample.mono_ns, sample) for sample in samples], ends=[seen[0], seen[-1]])
    return series


def _typical(series: _Series) -> Carried | None:
    each = [
        payload(after, before).times(1 / (last - first))
        for ((_, before), (_, after)), ((first, _), (last, _)) in zip(
            itertools.pairwise(series.counters), itertools.pairwise(series.ends), strict=True
        )
    ]
    if not each:
        return None
    return Carried(
        sent=statistics.median(bytes_of.sent for bytes_of in each),
        received=statistics.median(bytes_of.received for bytes_of in each),
    )


def _idle_bytes(node: ObservedNode, series: _Series) -> Carried | None:
    before = idle_samples(node, sampled_nics(node).get(node.ifname or "", []))
    idle_ns = before[-1].mono_ns - before[0].mono_ns if before else 0
    if idle_ns < _LEAST_IDLE_NS or not series.span.seconds:
        return None
    try:
        span = Span(start_ns=before[0].mono_ns, end_ns=before[-1].mono_ns)
        carried = carried_in([(sample.mono_ns, sample) for sample in before], span)
    except UnknownError:
        return None
    return carried.times(series.span.seconds / series.steps / span.seconds)


def _without(rates: dict[str, Carried], names: Iterable[str]) -> dict[str, Carried]:
    return {name: carried for name, carried in rates.items() if name not in {*names, LOOPBACK}}


def _no_name(rates: dict[str, Carried]) -> Unknown:
    most = max(_without(rates, ()).items(), key=lambda item: item[1].both, default=None)
    return Unknown("its data-plane NIC is unknown" + (f"; {most[0]} carried the most" if most else ""))
