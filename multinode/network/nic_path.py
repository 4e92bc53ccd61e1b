"""The path of collectives between nodes: by NCCL's log, and by the counters of the NICs against the algorithms' bytes.

Reads the output of NCCL_DEBUG=INFO since 2.18; lines in another form are skipped. Untrusted text, shown as data.
"""

from __future__ import annotations

import functools
import operator
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum

import msgspec

from multinode.profile.card_bytes import LEAST_BYTES_A_WORKER, find_carrier
from multinode.profile.cards import LOOPBACK, Carried, is_rdma, payload
from multinode.records.samples import CollectiveSample
from multinode.traffic.algorithms import Layout, NodeFlow, algorithms_of, node_flows, protocols_of
from multinode.units import format_list, format_size

# Counters agreed with the table within 0.02% for large messages; an IPv6 header or a lost packet adds a per cent.
_AGREES = 0.03
# Share of the expected traffic below which another NIC's is negligible (SSH, sampler records).
_TRIFLE = 0.05
# Two algorithms with an equally good fit are not distinguished.
_SAME_FIT = 0.002
# The window also contains barriers, ARP and keepalives.
_LEAST_WINDOW_BYTES = 1 << 20
_MIB = 1 << 20
_PER_CENT = 100


class Way(StrEnum):
    """The path of a node's bytes."""

    NIC = "nic"
    OTHER = "other"
    RDMA = "rdma"
    UNSEEN = "unseen"
    DIFFERS = "differs"


class NicLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Traffic of a node's NICs in one iteration."""

    node: str
    ifname: str | None  # its data-plane NIC, or several separated by commas; None if unknown
    passed: Carried | None = None  # over this NIC; None without counters
    expected: Carried | None = None  # of the algorithm; None if unknown
    deviation: float | None = None  # the larger one of both directions, relative to the busier direction of `expected`
    # by name, other interfaces with more than 5% of the expected traffic; for `lo`, the part beyond the exchange inside
    # the node
    others: dict[str, Carried] = {}
    way: Way | None = None  # the path of the bytes; None if not judged

    @property
    def gap(self) -> Carried:
        """Difference between counted and expected bytes, in each direction."""
        return _gap(self.passed or Carried(), self.expected or Carried())

    @property
    def lacks_sending(self) -> bool:
        """Whether more is missing in sending than in receiving."""
        return _lacks_sending(self.passed or Carried(), self.expected or Carried())

    @property
    def detour(self) -> str | None:
        """The interface that carried the missing bytes; None if no counter explains them."""
        return _find_other(self.passed or Carried(), self.expected or Carried(), self.others)


class MessagePath(msgspec.Struct, frozen=True, kw_only=True):
    """The path of one message."""

    collective: str
    size_bytes: int  # S
    # that fits the counters, or several joined by `or`; None if none fits or none was judged
    algorithm: str | None = None
    protocol: str | None = None  # likewise NCCL's, with more bytes on the wire than payload
    loads: tuple[NicLoad, ...] = ()  # one per node with counters


class NicPathCheck(msgspec.Struct, frozen=True, kw_only=True):
    """The NICs that carried the messages."""

    ok: bool | None  # whether all judged messages used the data plane's NICs; None if nothing could be judged
    sentences: tuple[str, ...] = ()  # the findings in words, the most serious first
    messages: tuple[MessagePath, ...] = ()  # in order of measurement

    @property
    def over_rdma(self) -> bool:
        """Whether RDMA ports carried the bytes."""
        return any(load.way is Way.RDMA for message in self.messages for load in message.loads)

    def rdma_ports(self, node: str) -> tuple[str, ...]:
        """The RDMA ports that carried a node's messages, `device/port`."""
        loads = (load for message in self.messages for load in message.loads if load.node == node)
        return tuple(dict.fromkeys(name for load in loads for name in load.others if is_rdma(name)))


class _Model(msgspec.Struct, frozen=True, kw_only=True):
    """One way in which the backend may have implemented a message."""

    algorithm: str
    protocol: str
    flows: tuple[NodeFlow, ...]


def check_nic_path(
    samples: Iterable[CollectiveSample],
    *,
    nics: Mapping[int, Sequence[str]],
    layout: Layout,
    backend: str,
    node_names: Sequence[str],
) -> NicPathCheck:
    """Compare counters with what the backend's algorithms move.

    Args:
        samples: of all workers; those with counters count.
        nics: by node rank, the NICs of the data plane; none are not known.
        layout: the workers.
        backend: `nccl` or `gloo`; of another one nothing is judged.
        node_names: in the order of node ranks.
    """
    if layout.nodes == 1:
        return NicPathCheck(ok=None)
    by_message: dict[int, list[CollectiveSample]] = {}
    for sample in samples:
        if sample.cards is not None and sample.card_iters > 0 and 0 <= sample.rank < layout.workers:
            by_message.setdefault(sample.index, []).append(sample)
    models = _Models(backend, layout)
    messages = tuple(
        _trace(sorted(mine, key=lambda one: one.rank), nics, models, node_names)
        for _, mine in sorted(by_message.items())
    )
    ways = {load.way for message in messages for load in message.loads if load.way is not None}
    ok = False if Way.OTHER in ways else True if ways == {Way.NIC} else None
    return NicPathCheck(ok=ok, messages=messages, sentences=tuple(_sentences(messages, backend)))


class _Models:
    """What may have run for each collective, computed once; the usual one first."""

    def __init__(self, backend: str, layout: Layout) -> None:
        self.layout = layout
        self._backend = backend
        self._known: dict[str, tuple[_Model, ...]] = {}

    def of(self, collective: str) -> tuple[_Model, ...]:
        if collective not in self._known:
            self._known[collective] = tuple(
                _Model(algorithm=one.name, protocol=protocol, flows=_times(factor, one.flows(self.layout), self.layout))
                for protocol, factor in protocols_of(self._backend).items()
                for one in algorithms_of(self._backend, collective)
            )
        return self._known[collective]


def _times(factor: float, flows: Mapping[tuple[int, int], float], layout: Layout) -> tuple[NodeFlow, ...]:
    return node_flows({edge: factor * part for edge, part in flows.items()}, layout)


def _trace(
    samples: Sequence[CollectiveSample], nics: Mapping[int, Sequence[str]], models: _Models, node_names: Sequence[str]
) -> MessagePath:
    first = samples[0]
    node_of = [node for node, ranks in enumerate(models.layout.ranks) for _ in ranks]

    def loads(model: _Model | None) -> tuple[NicLoad, ...]:
        return tuple(
            _load(sample, node_names[node], nics.get(node, ()), model.flows[node] if model else None, models.layout)
            for sample in samples
            for node in (node_of[sample.rank],)
        )

    tried = [(model, loads(model)) for model in models.of(first.collective)]
    misfits = [_misfit(each) for _, each in tried]
    best = min((misfit for misfit in misfits if misfit is not None), default=None)
    if best is None or best > _AGREES:
        usual = tried[0][1] if tried else loads(None)
        return MessagePath(collective=first.collective, size_bytes=first.size_bytes, loads=usual)
    fitting = [
        one for one, misfit in zip(tried, misfits, strict=True) if misfit is not None and misfit - best < _SAME_FIT
    ]
    return MessagePath(
        collective=first.collective,
        size_bytes=first.size_bytes,
        algorithm=" or ".join(dict.fromkeys(model.algorithm for model, _ in fitting)),
        protocol=" or ".join(dict.fromkeys(model.protocol for model, _ in fitting)) or None,
        loads=fitting[0][1],
    )


def _misfit(loads: Iterable[NicLoad]) -> float | None:
    return max((load.deviation for load in loads if load.way is not None and load.deviation is not None), default=None)


def _load(sample: CollectiveSample, node: str, nics: Sequence[str], flow: NodeFlow | None, layout: Layout) -> NicLoad:
    nic = ", ".join(nics) or None
    passed = {name: payload(each).times(1 / sample.card_iters) for name, each in (sample.cards or {}).items()}
    each = [passed.pop(name) for name in nics if name in passed]
    mine = functools.reduce(operator.add, each) if each else None
    if flow is None:
        return NicLoad(node=node, ifname=nic, passed=mine)
    expected = Carried(sent=flow.sent * sample.size_bytes, received=flow.received * sample.size_bytes)
    if LOOPBACK in passed:
        passed[LOOPBACK] = _less(passed[LOOPBACK], flow.inside * sample.size_bytes)
    most = expected.busier
    others = {name: each for name, each in passed.items() if each.busier > _TRIFLE * most}
    told = sample.cards or {}
    # A NIC that came anew while it was read has counted from zero again: nothing follows from that.
    restarted = any(one.tx_bytes < 0 or one.rx_bytes < 0 for one in told.values())
    if nic is None or mine is None or restarted or not _is_telling(most, sample.card_iters, layout):
        return NicLoad(node=node, ifname=nic, passed=mine, expected=expected, others=others)
    return NicLoad(
        node=node,
        ifname=nic,
        passed=mine,
        expected=expected,
        deviation=_gap(mine, expected).busier / most,
        others=others,
        way=_find_way(mine, expected, others),
    )


def _is_telling(most_bytes: float, iters: int, layout: Layout) -> bool:
    least = max(LEAST_BYTES_A_WORKER * layout.workers, _LEAST_WINDOW_BYTES / iters)
    return most_bytes >= least


def _find_way(seen: Carried, expected: Carried, others: Mapping[str, Carried]) -> Way:
    most = expected.busier
    if _gap(seen, expected).busier <= _AGREES * most:
        return Way.NIC
    if _lacks(seen, expected) > _AGREES * most:
        found = _find_other(seen, expected, others)
        if found is not None:
            return Way.RDMA if is_rdma(found) else Way.OTHER
        if seen.busier <= _TRIFLE * most:
            return Way.UNSEEN
    return Way.DIFFERS


def _find_other(seen: Carried, expected: Carried, others: Mapping[str, Carried]) -> str | None:
    sends = _lacks_sending(seen, expected)
    lack = expected.one_way(sends=sends) - seen.one_way(sends=sends)
    return find_carrier(others, lack, sends=sends, least=_TRIFLE * expected.busier)


def _less(passed: Carried, size_bytes: float) -> Carried:
    return Carried(sent=max(0.0, passed.sent - size_bytes), received=max(0.0, passed.received - size_bytes))


def _gap(seen: Carried, expected: Carried) -> Carried:
    return Carried(
        sent=abs(seen.sent - expected.sent),
        received=abs(seen.received - expected.received),
    )


def _lacks(seen: Carried, expected: Carried) -> float:
    return max(expected.sent - seen.sent, expected.received - seen.received)


def _lacks_sending(seen: Carried, expected: Carried) -> bool:
    less = (expected.received - seen.received) - (expected.sent - seen.sent)
    return less <= _AGREES * expected.busier


def _sentences(messages: Sequence[MessagePath], backend: str) -> Iterator[str]:
    loads = [load for message in messages for load in message.loads]
    for way in (Way.OTHER, Way.RDMA, Way.UNSEEN, Way.DIFFERS):
        nodes: dict[str, list[str]] = {}
        for message, load in _largest(messages, way).values():
            nodes.setdefault(_load_words(way, message, load), []).append(load.node)
        yield from (f"{format_list(names)} {text}" for text, names in nodes.items())
    judged = [load for load in loads if load.way is not None]
    if judged and all(load.way is Way.NIC for load in judged):
        names = ", ".join(dict.fromkeys(load.ifname for load in judged if load.ifname))
        within = _PER_CENT * max(load.deviation or 0.0 for load in judged)
        yield f"NIC counters match the expected traffic ({names}, within {within:.2g}%)."
    elif not judged and loads:
        yield "Path not checked: no message was large enough for the NIC counters, or data is missing."
    if backend == "nccl":
        yield from _algorithms(messages)


def _largest(messages: Iterable[MessagePath], way: Way) -> dict[str, tuple[MessagePath, NicLoad]]:
    largest: dict[str, tuple[MessagePath, NicLoad]] = {}
    for message in sorted(messages, key=lambda one: one.size_bytes):
        largest.update({load.node: (message, load) for load in message.loads if load.way is way})
    return largest


def _load_words(way: Way, message: MessagePath, load: NicLoad) -> str:
    seen, expected = load.passed or Carried(), load.expected or Carried()
    call = f"per iteration ({message.collective} of {format_size(message.size_bytes)})"
    if way is Way.DIFFERS:
        sends = load.gap.sent >= load.gap.received
        return (
            f"{'sent' if sends else 'received'} {_size(seen.one_way(sends=sends))} {call} over {load.ifname}, "
            f"{_size(expected.one_way(sends=sends))} expected: other traffic, or a different algorithm of the "
            "backend."
        )
    sends, other = load.lacks_sending, load.detour
    verb, should = "sent" if sends else "received", _size(expected.one_way(sends=sends))
    if other is None:
        return f"{verb} {should} {call}, but no counter shows it."
    text = f"{verb} {_size(load.others[other].one_way(sends=sends))} of {should} {call} over"
    if way is Way.RDMA:
        return f"{text} the RDMA port {other}: the counters of {load.ifname} do not include RDMA."
    return (
        f"{text} {other}, not over {load.ifname}: the kernel routes to the other nodes use it, or the backend is "
        f"configured to use {other}."
    )


def _algorithms(messages: Iterable[MessagePath]) -> Iterator[str]:
    shown = {
        message.collective: message
        for message in sorted(messages, key=lambda one: one.size_bytes)
        if message.algorithm is not None and len(algorithms_of("nccl", message.collective)) > 1
    }
    for message in shown.values():
        size = format_size(message.size_bytes)
        yield f"According to the NIC counters, NCCL ran the {message.collective} of {size} as a {message.algorithm}."


def _size(size_bytes: float) -> str:
    return format_size(round(size_bytes)) if size_bytes < _MIB else f"{size_bytes / _MIB:.1f} MiB"


_VERSION = re.compile(r"NCCL version (\S+)")
# Since 2.27, per communicator: `Assigned NET plugin Socket to comm`. A plugin's name may contain spaces: AWS Libfabric.
_NETWORK = re.compile(r"(?:Using network|Assigned NET plugin) (\w[\w -]{0,63}?)(?: to comm.*)?\s*$")
_BOOTSTRAP = re.compile(r"Bootstrap ?: Using (?:\[\d+\])?([\w.:@-]+?):")
_SOCKET = re.compile(r"NET/Socket ?: Using (.*)")
_NIC = re.compile(r"\[(\d+)\]([\w.@-]+?):")
_IB = re.compile(r"NET/IB ?: Using (.*)")
# NCCL 2.20 to 2.22 merge ports: `[0]={[0] mlx5_0:1/RoCE, [1] mlx5_1:1/RoCE}`. Later ones are separate from the list.
_IB_DEVICE = re.compile(r"\[(\d+)\] ?(?:= ?\{([^}]*)\}|([\w.-]+:\d+/\w+))")
_IB_PORT = re.compile(r"[\w.-]+:\d+/\w+")
_IB_JOINED = re.compile(r"NET/IB ?: Made virtual device \[(\d+)\] name=([\w.+-]+)")
_VIA = re.compile(
    r"Channel \d+(?:/\d+)? : (\d+)\[[^\]]*\] -> (\d+)\[[^\]]*\](?: \[(send|receive)\])? "
    r"via (\S.{0,99}?)(?: comm 0x.*)?\s*$"
)
_VIA_DEVICE = re.compile(r"NET/[^/]+/(\d+)")
# Networks over TCP; NCCL's others, and those of plugins, bypass the kernel.
_OF_TCP = frozenset({"Socket", "FastSocket"})
_RING = re.compile(r"Channel \d+/(\d+) :((?:\s+\d+)+)\s*$")
_RANKS = re.compile(r"\bnranks (\d+)\b")
_COLL_CHANNELS = re.compile(r"(\d+) coll channels")
_MOST = 64


class NcclPath(msgspec.Struct, frozen=True, kw_only=True):
    """The content of the log."""

    version: str | None = None
    network: str | None = None  # `Socket`, `IB`, or a plugin's name
    bootstrap_ifname: str | None = None  # interface of the bootstrap
    nics: tuple[str, ...] = ()  # available to the network: interface names, or `device:port/kind` of RDMA NICs
    used: tuple[str, ...] = ()  # those that connections between nodes use; empty if unknown
    # connections by transport (`NET/Socket/0`, `P2P/CUMEM`, `SHM/direct`), of all workers
    transports: dict[str, int] = {}
    channels: int | None = None  # of collectives; None if unknown
    ring: tuple[int, ...] = ()  # ranks in the order of the first ring; empty if not completely known

    @property
    def over_rdma(self) -> bool:
        """Whether collectives bypass the kernel: InfiniBand, RoCE, or a plugin's network."""
        return self.network is not None and self.network not in _OF_TCP

    @property
    def sentence(self) -> str:
        """Everything in one sentence."""
        over = f" over {', '.join(self.nics)}" if self.nics else ""
        how = ", ".join(f"{name} ({count})" for name, count in self.transports.items())
        channels = f", {self.channels} channels" if self.channels is not None else ""
        version = f"NCCL {self.version}" if self.version else "NCCL"
        said = f"{version}: network {self.network or 'unknown'}{over}{channels}"
        return f"{said}; connections: {how}" if how else said


def parse_nccl_log(lines: Iterable[str]) -> NcclPath | None:
    """The combined content of the lines of all workers; None without any."""
    lines = tuple(lines)
    channels = _last(_COLL_CHANNELS, lines)
    told = next((match[2] for line in lines if (match := _RING.search(line)) is not None), "")
    ring = tuple(int(rank) for rank in told.split())
    devices: dict[int, list[str]] = {}
    for number, names in (device for line in lines for device in _devices(line)):
        known = devices.setdefault(number, [])
        known += [name for name in names if name not in known]
    transports, used = _connections(lines)
    path = NcclPath(
        version=_first(_VERSION, lines),
        network=_first(_NETWORK, lines),
        bootstrap_ifname=_first(_BOOTSTRAP, lines),
        nics=tuple(dict.fromkeys(name for names in devices.values() for name in names))[:_MOST],
        used=tuple(dict.fromkeys(name for number in sorted(used) for name in devices.get(number, ())))[:_MOST],
        transports={name: count for name, count in transports.most_common(_MOST) if count},
        channels=int(channels) if channels is not None else None,
        # Up to 2.21 a line has at most 20 ranks, and from 2.27 on 128 characters: a partial ring is ignored.
        ring=ring if sorted(ring) == list(range(max(_count_ranks(lines), len(ring)))) else (),
    )
    return path if path.version or path.network or path.bootstrap_ifname or path.nics or transports else None


def _first(pattern: re.Pattern[str], lines: Sequence[str]) -> str | None:
    return next((match[1] for line in lines if (match := pattern.search(line)) is not None), None)


def _last(pattern: re.Pattern[str], lines: Sequence[str]) -> str | None:
    return _first(pattern, lines[::-1])


def _connections(lines: Sequence[str]) -> tuple[Counter[str], set[int]]:
    transports, used = Counter[str](), set[int]()
    for match in filter(None, map(_VIA.search, lines)):
        # Both ends log a network connection: the sender's counts.
        transports[match[4]] += match[3] != "receive"
        if (device := _VIA_DEVICE.match(match[4])) is not None:
            used.add(int(device[1]))
    return transports, used


def _devices(line: str) -> list[tuple[int, list[str]]]:
    if (match := _SOCKET.search(line)) is not None:
        return [(int(number), [name]) for number, name in _NIC.findall(match[1])]
    if (match := _IB.search(line)) is not None:
        return [
            (int(number), _IB_PORT.findall(joined) or [one])
            for number, joined, one in _IB_DEVICE.findall(match[1])
            if joined or one
        ]
    if (match := _IB_JOINED.search(line)) is not None:
        # Named without ports, which means the first port of each.
        return [(int(match[1]), [f"{name}:1/joined" for name in match[2].split("+")])]
    return []


def _count_ranks(lines: Iterable[str]) -> int:
    numbers = [int(match[1]) for line in lines if (match := _RANKS.search(line)) is not None]
    ends = [max(int(match[1]), int(match[2])) + 1 for line in lines if (match := _VIA.search(line)) is not None]
    return max([*numbers, *ends], default=0)
