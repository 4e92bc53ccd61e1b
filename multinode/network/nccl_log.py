"""How NCCL connected, from its log: version, network, interfaces, transports between ranks, channels, rings.

Reads the output of NCCL_DEBUG=INFO since 2.18; lines in another form are skipped. Untrusted text, shown as data.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

_VERSION = re.compile(r"NCCL version (\S+)")
# Since 2.27, per communicator: `Assigned NET plugin Socket to comm`. A plugin's name may contain spaces: AWS Libfabric.
_NETWORK = re.compile(r"(?:Using network|Assigned NET plugin) (\w[\w -]{0,63}?)(?: to comm.*)?\s*$")
_BOOTSTRAP = re.compile(r"Bootstrap ?: Using (?:\[\d+\])?([\w.:@-]+?):")
_SOCKET = re.compile(r"NET/Socket ?: Using (.*)")
_CARD = re.compile(r"\[(\d+)\]([\w.@-]+?):")
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
    cards: tuple[str, ...] = ()  # available to the network: interface names, or `device:port/kind` of RDMA NICs
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
        over = f" over {', '.join(self.cards)}" if self.cards else ""
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
        cards=tuple(dict.fromkeys(name for names in devices.values() for name in names))[:_MOST],
        used=tuple(dict.fromkeys(name for number in sorted(used) for name in devices.get(number, ())))[:_MOST],
        transports={name: count for name, count in transports.most_common(_MOST) if count},
        channels=int(channels) if channels is not None else None,
        # Up to 2.21 a line has at most 20 ranks, and from 2.27 on 128 characters: a partial ring is ignored.
        ring=ring if sorted(ring) == list(range(max(_count_ranks(lines), len(ring)))) else (),
    )
    return path if path.version or path.network or path.bootstrap_ifname or path.cards or transports else None


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
        return [(int(number), [name]) for number, name in _CARD.findall(match[1])]
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
