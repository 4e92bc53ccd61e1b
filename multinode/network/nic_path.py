"""The path of collectives between nodes: by NCCL's log, and by the counters of the NICs against the algorithms' bytes.

Reads the output of NCCL_DEBUG=INFO since 2.18; lines in another form are skipped. Untrusted text, shown as data.
"""

from __future__ import annotations

import functools
import math
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum

import msgspec

from multinode.findings.finding import Finding
from multinode.findings.rule import Rule, RuleGroup
from multinode.profile.nics import LEAST_BYTES_A_WORKER, Carried, find_carrier, is_rdma, payload
from multinode.profile.observed import LOOPBACK
from multinode.records.samples import CollectiveSample
from multinode.traffic.algorithms import Layout, NodeFlow, algorithms_of, node_flows, protocols_of
from multinode.units import MIB, format_figure, format_list, format_size

# Counters agreed with the table within 0.02% for large messages; an IPv6 header or a lost packet adds a per cent.
_AGREES = 0.03
# Share of the expected traffic below which another NIC's is negligible (SSH, sampler records).
_TRIFLE = 0.05
# Two algorithms with an equally good fit are not distinguished.
_SAME_FIT = 0.002
# The window also contains barriers, ARP and keepalives.
_LEAST_WINDOW_BYTES = 1 << 20
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

    def lack(self, *, sends: bool) -> float:
        """Expected bytes that this NIC did not count, in one direction."""
        passed, expected = self.passed or Carried(), self.expected or Carried()
        return expected.one_way(sends=sends) - passed.one_way(sends=sends)

    @property
    def lacks_sending(self) -> bool:
        """Whether more is missing in sending than in receiving."""
        least = _AGREES * (self.expected or Carried()).busier
        return self.lack(sends=False) - self.lack(sends=True) <= least

    @property
    def detour(self) -> str | None:
        """The interface that carried the missing bytes; None if no counter explains them."""
        sends, least = self.lacks_sending, _TRIFLE * (self.expected or Carried()).busier
        return find_carrier(self.others, self.lack(sends=sends), sends=sends, least=least)


class MessagePath(msgspec.Struct, frozen=True, kw_only=True):
    """The path of one message."""

    collective: str
    size_bytes: int  # S
    # that fits the counters, or several joined by `or`; None if none fits or none was judged
    algorithm: str | None = None
    protocol: str | None = None  # NCCL's protocol that fits, with more bytes on the wire than payload
    loads: tuple[NicLoad, ...] = ()  # one per node with counters


_CALL = "per iteration ({collective} of {size})"
_MESSAGE_FIGURES = ("collective", "size_bytes", "ifname")
NIC_PATHS = RuleGroup("Path of collectives between nodes")
_RULES: Mapping[Way, Rule] = {
    Way.OTHER: NIC_PATHS.rule(
        "other-interface",
        about="an interface other than the data plane's NIC carried the messages",
        message=f"{{names}} {{verb}} {{seen}} of {{expected}} {_CALL} over {{other}}, not over {{ifname}}. The kernel "
        "routes traffic to the other nodes over {other}, or the backend is configured to use {other}.",
        figures=(*_MESSAGE_FIGURES, "other"),
    ),
    Way.RDMA: NIC_PATHS.rule(
        "rdma-port",
        about="an RDMA port carried the messages",
        message=f"{{names}} {{verb}} {{seen}} of {{expected}} {_CALL} over the RDMA port {{other}}. The counters of "
        "{ifname} do not include RDMA.",
        figures=(*_MESSAGE_FIGURES, "other"),
    ),
    Way.UNSEEN: NIC_PATHS.rule(
        "not-counted",
        about="no counter shows the messages",
        message=f"{{names}} should have {{verb}} {{expected}} {_CALL}, but no counter shows this traffic.",
        figures=_MESSAGE_FIGURES,
    ),
    Way.DIFFERS: NIC_PATHS.rule(
        "other-amount",
        about="the NIC counted a different amount than the algorithm sends",
        message=f"{{names}} {{verb}} {{seen}} {_CALL} over {{ifname}}, but {{expected}} was expected. There was other "
        "traffic, or the backend used another algorithm.",
        figures=_MESSAGE_FIGURES,
    ),
    Way.NIC: NIC_PATHS.rule(
        "expected-nics",
        about="the NICs of the data plane carried all messages that could be checked",
        message="The NIC counters match the expected traffic ({ifname}, within {within}%).",
        figures=("ifname", "within_percent"),
    ),
}
_NOT_CHECKED = NIC_PATHS.rule(
    "not-checked",
    about="no message could be checked",
    message="Path not checked: no message was large enough for NIC counters, or data is missing.",
)
_ALGORITHM = NIC_PATHS.rule(
    "algorithm",
    about="the NCCL algorithm that matches the counters",
    message="According to the NIC counters, NCCL ran the {collective} of {size} with its {algorithm} algorithm.",
    figures=("collective", "size_bytes", "algorithm"),
)


class NicPathCheck(msgspec.Struct, frozen=True, kw_only=True):
    """The NICs that carried the messages."""

    ok: bool | None  # whether all judged messages used the data plane's NICs; None if nothing could be judged
    findings: tuple[Finding, ...] = ()  # the most serious first
    messages: tuple[MessagePath, ...] = ()  # in order of measurement

    @property
    def over_rdma(self) -> bool:
        """Whether RDMA ports carried the bytes."""
        return any(load.way is Way.RDMA for message in self.messages for load in message.loads)

    def rdma_ports(self, node: str) -> tuple[str, ...]:
        """The RDMA ports that carried a node's messages, `device/port`."""
        loads = (load for message in self.messages for load in message.loads if load.node == node)
        return tuple(dict.fromkeys(name for load in loads for name in load.others if is_rdma(name)))


class _Implementation(msgspec.Struct, frozen=True, kw_only=True):
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

    `nics` are those of the data plane by node rank. Only `nccl` and `gloo` are judged.
    """
    if layout.nodes == 1:
        return NicPathCheck(ok=None)
    by_message: dict[int, list[CollectiveSample]] = {}
    for sample in samples:
        if sample.nics is not None and sample.nic_iters > 0 and 0 <= sample.rank < layout.workers:
            by_message.setdefault(sample.index, []).append(sample)
    implementations = functools.cache(functools.partial(_implementations, backend, layout))
    messages = tuple(
        _trace(
            implementations(mine[0].collective),
            [
                functools.partial(_load, sample, nics, node_names, layout)
                for sample in sorted(mine, key=lambda sample: sample.rank)
            ],
            mine[0],
        )
        for _, mine in sorted(by_message.items())
    )
    ways = {load.way for message in messages for load in message.loads if load.way is not None}
    ok = False if Way.OTHER in ways else True if ways == {Way.NIC} else None
    return NicPathCheck(ok=ok, messages=messages, findings=tuple(_judge(messages, backend)))


def _implementations(backend: str, layout: Layout, collective: str) -> tuple[_Implementation | None, ...]:
    """The usual one first; None alone if none is known."""
    return tuple(
        _Implementation(
            algorithm=algorithm.name,
            protocol=protocol,
            flows=node_flows({edge: factor * part for edge, part in algorithm.flows(layout).items()}, layout),
        )
        for protocol, factor in protocols_of(backend).items()
        for algorithm in algorithms_of(backend, collective)
    ) or (None,)


def _trace(
    implementations: Iterable[_Implementation | None],
    nodes: Iterable[Callable[[Sequence[NodeFlow]], NicLoad]],
    message: CollectiveSample,
) -> MessagePath:
    tried = [
        (implementation, tuple(load(implementation.flows if implementation is not None else ()) for load in nodes))
        for implementation in implementations
    ]
    misfits = [
        max((load.deviation for load in loads if load.way is not None and load.deviation is not None), default=math.inf)
        for _, loads in tried
    ]
    path = MessagePath(collective=message.collective, size_bytes=message.size_bytes, loads=tried[0][1])
    if min(misfits) > _AGREES:
        return path
    fitting = [
        (implementation, loads)
        for (implementation, loads), misfit in zip(tried, misfits, strict=True)
        if implementation is not None and misfit - min(misfits) < _SAME_FIT
    ]
    return msgspec.structs.replace(
        path,
        algorithm=" or ".join(dict.fromkeys(implementation.algorithm for implementation, _ in fitting)),
        protocol=" or ".join(dict.fromkeys(implementation.protocol for implementation, _ in fitting)) or None,
        loads=fitting[0][1],
    )


def _load(
    sample: CollectiveSample,
    nics_of_nodes: Mapping[int, Sequence[str]],
    node_names: Sequence[str],
    layout: Layout,
    flows: Sequence[NodeFlow],
) -> NicLoad:
    node = next(node for node, ranks in enumerate(layout.ranks) if sample.rank in ranks)
    nics = nics_of_nodes.get(node, ())
    counted = sample.nics or {}
    passed = {name: payload(each).times(1 / sample.nic_iters) for name, each in counted.items()}
    each = [passed.pop(name) for name in nics if name in passed]
    mine = functools.reduce(operator.add, each) if each else None
    load = NicLoad(node=node_names[node], ifname=", ".join(nics) or None, passed=mine)
    if not flows:
        return load
    flow = flows[node]
    expected = Carried(sent=flow.sent * sample.size_bytes, received=flow.received * sample.size_bytes)
    if LOOPBACK in passed:
        inside, seen = flow.inside * sample.size_bytes, passed[LOOPBACK]
        passed[LOOPBACK] = Carried(sent=max(0.0, seen.sent - inside), received=max(0.0, seen.received - inside))
    most = expected.busier
    others = {name: each for name, each in passed.items() if each.busier > _TRIFLE * most}
    load = msgspec.structs.replace(load, expected=expected, others=others)
    # A NIC that came anew while it was read has counted from zero again: nothing follows from that.
    restarted = any(count.tx_bytes < 0 or count.rx_bytes < 0 for count in counted.values())
    least = max(LEAST_BYTES_A_WORKER * layout.workers, _LEAST_WINDOW_BYTES / sample.nic_iters)
    if not nics or mine is None or restarted or most < least:
        return load
    deviation = max(abs(load.lack(sends=sends)) for sends in (True, False)) / most
    return msgspec.structs.replace(load, deviation=deviation, way=_find_way(load, deviation))


def _find_way(load: NicLoad, deviation: float) -> Way:
    expected, passed = load.expected or Carried(), load.passed or Carried()
    if deviation <= _AGREES:
        return Way.NIC
    if max(load.lack(sends=sends) for sends in (True, False)) > _AGREES * expected.busier:
        if load.detour is not None:
            return Way.RDMA if is_rdma(load.detour) else Way.OTHER
        if passed.busier <= _TRIFLE * expected.busier:
            return Way.UNSEEN
    return Way.DIFFERS


def _judge(messages: Sequence[MessagePath], backend: str) -> Iterator[Finding]:
    loads = [load for message in messages for load in message.loads]
    for way in (Way.OTHER, Way.RDMA, Way.UNSEEN, Way.DIFFERS):
        largest: dict[str, tuple[MessagePath, NicLoad]] = {}
        for message in sorted(messages, key=lambda message: message.size_bytes):
            largest |= {load.node: (message, load) for load in message.loads if load.way is way}
        nodes: dict[tuple[tuple[str, object], ...], list[str]] = {}
        for message, load in largest.values():
            nodes.setdefault(tuple(_values(way, message, load).items()), []).append(load.node)
        for values, names in nodes.items():
            on = names[0] if len(names) == 1 else None
            yield _RULES[way].found(on, names=format_list(names), **dict(values))
    judged = [load for load in loads if load.way is not None]
    if judged and all(load.way is Way.NIC for load in judged):
        ifnames = ", ".join(dict.fromkeys(load.ifname for load in judged if load.ifname))
        within = max(1.0, _PER_CENT * max(load.deviation or 0.0 for load in judged))
        yield _RULES[Way.NIC].found(None, ifname=ifnames, within_percent=within, within=format_figure(within, digits=2))
    elif not judged and loads:
        yield _NOT_CHECKED.found(None)
    if backend == "nccl":
        yield from _algorithms(messages)


def _values(way: Way, message: MessagePath, load: NicLoad) -> dict[str, object]:
    """The values of the message of a node, in words where nodes with equal words share a finding."""
    seen, expected, other = load.passed or Carried(), load.expected or Carried(), load.detour
    if way is Way.DIFFERS:
        sends = abs(load.lack(sends=True)) >= abs(load.lack(sends=False))
    else:
        sends = load.lacks_sending
        seen = load.others[other] if other is not None else seen
    return {
        "verb": "sent" if sends else "received",
        "seen": _size(seen.one_way(sends=sends)),
        "expected": _size(expected.one_way(sends=sends)),
        "collective": message.collective,
        "size_bytes": message.size_bytes,
        "size": format_size(message.size_bytes),
        "ifname": load.ifname,
        "other": other,
    }


def _algorithms(messages: Iterable[MessagePath]) -> Iterator[Finding]:
    shown = {
        message.collective: message
        for message in sorted(messages, key=lambda message: message.size_bytes)
        if message.algorithm is not None and len(algorithms_of("nccl", message.collective)) > 1
    }
    for message in shown.values():
        yield _ALGORITHM.found(
            None,
            collective=message.collective,
            size_bytes=message.size_bytes,
            size=format_size(message.size_bytes),
            algorithm=message.algorithm,
        )


def _size(size_bytes: float) -> str:
    return format_size(round(size_bytes)) if size_bytes < MIB else f"{size_bytes / MIB:.1f} MiB"


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
    used: tuple[str, ...] = ()  # NICs that connections between nodes use; empty if unknown
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
        text = f"{version}: network {self.network or 'unknown'}{over}{channels}"
        return f"{text}; connections: {how}" if how else text


def parse_nccl_log(lines: Iterable[str]) -> NcclPath | None:
    """The combined content of the lines of all workers; None without any."""
    lines = tuple(lines)
    channels = _first(_COLL_CHANNELS, lines[::-1])
    order = next((match[2] for line in lines if (match := _RING.search(line)) is not None), "")
    ring = tuple(int(rank) for rank in order.split())
    devices: dict[int, list[str]] = {}
    for number, names in (device for line in lines for device in _devices(line)):
        names_of = devices.setdefault(number, [])
        names_of += [name for name in names if name not in names_of]
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
            (int(number), _IB_PORT.findall(joined) or [device])
            for number, joined, device in _IB_DEVICE.findall(match[1])
            if joined or device
        ]
    if (match := _IB_JOINED.search(line)) is not None:
        # Named without ports, which means the first port of each.
        return [(int(match[1]), [f"{name}:1/joined" for name in match[2].split("+")])]
    return []


def _count_ranks(lines: Iterable[str]) -> int:
    numbers = [int(match[1]) for line in lines if (match := _RANKS.search(line)) is not None]
    ends = [max(int(match[1]), int(match[2])) + 1 for line in lines if (match := _VIA.search(line)) is not None]
    return max([*numbers, *ends], default=0)
