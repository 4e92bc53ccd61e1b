"""How NCCL connected, from its own log: version, network, interfaces, transports between ranks, channels, rings.

Reads what NCCL_DEBUG=INFO prints since 2.18; a line of another form is passed over. Untrusted text, shown as data.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

import msgspec

__all__ = ["NcclPath", "parse_nccl_log"]

_VERSION = re.compile(r"NCCL version (\S+)")
_NETWORK = re.compile(r"Using network (\w[\w-]*)")
_BOOTSTRAP = re.compile(r"Bootstrap ?: Using (?:\[\d+\])?([\w.:@-]+?):")
_SOCKET = re.compile(r"NET/Socket ?: Using (.*)")
_CARD = re.compile(r"\[\d+\]([\w.@-]+?):")
_IB = re.compile(r"NET/IB ?: Using (.*)")
_IB_CARD = re.compile(r"\[\d+\]([\w.-]+):(\d+)/(\w+)")
_VIA = re.compile(r"Channel \d+(?:/\d+)? : (\d+)\[[^\]]*\] -> (\d+)\[[^\]]*\](?: \[(send|receive)\])? via (\S+)")
_RING = re.compile(r"Channel \d+/(\d+) :((?:\s+\d+)+)\s*$")
_RANKS = re.compile(r"\bnranks (\d+)\b")
_COLL_CHANNELS = re.compile(r"(\d+) coll channels")
_MOST = 64


class NcclPath(msgspec.Struct, frozen=True, kw_only=True):
    """What the log says.

    Attributes:
        network: `Socket`, `IB`, or a plugin's name.
        bootstrap_ifname: where ranks met.
        cards: what the network uses: interface names, or `device:port/kind` of RDMA cards.
        transports: connections by their transport (`NET/Socket/0`, `P2P/CUMEM`, `SHM/direct`), over all workers.
        channels: of collectives; None where it is not told.
        ring: the ranks in the order of the first ring; empty where it is not told, or not all of it.
    """

    version: str | None = None
    network: str | None = None
    bootstrap_ifname: str | None = None
    cards: tuple[str, ...] = ()
    transports: dict[str, int] = {}
    channels: int | None = None
    ring: tuple[int, ...] = ()

    @property
    def sentence(self) -> str:
        """All of it in plain words."""
        over = f" over {', '.join(self.cards)}" if self.cards else ""
        how = ", ".join(f"{name} ({count})" for name, count in self.transports.items())
        channels = f", {self.channels} channels" if self.channels is not None else ""
        version = f"NCCL {self.version}" if self.version else "NCCL"
        said = f"{version}: network {self.network or 'unknown'}{over}{channels}"
        return f"{said}; connections: {how}" if how else said


def parse_nccl_log(lines: Iterable[str]) -> NcclPath | None:
    """What the lines of all workers say together; None where they say nothing."""
    found: dict[str, str] = {}
    cards: dict[str, None] = {}
    transports: Counter[str] = Counter()
    channels: int | None = None
    ring: tuple[int, ...] = ()
    lines = list(lines)
    for line in lines:
        for name, pattern in (("version", _VERSION), ("network", _NETWORK), ("bootstrap_ifname", _BOOTSTRAP)):
            if (match := pattern.search(line)) is not None:
                found.setdefault(name, match[1])
        if (match := _SOCKET.search(line)) is not None:
            cards |= dict.fromkeys(_CARD.findall(match[1]))
        elif (match := _IB.search(line)) is not None:
            cards |= {f"{device}:{port}/{kind}": None for device, port, kind in _IB_CARD.findall(match[1])}
        elif (match := _VIA.search(line)) is not None:
            # Both ends write a connection over the network down: the sender's counts.
            transports[match[4]] += match[3] != "receive"
        elif (match := _RING.search(line)) is not None:
            ring = ring or tuple(int(rank) for rank in match[2].split())
        elif (match := _COLL_CHANNELS.search(line)) is not None:
            channels = int(match[1])
    if not found and not cards and not transports:
        return None
    return NcclPath(
        version=found.get("version"),
        network=found.get("network"),
        bootstrap_ifname=found.get("bootstrap_ifname"),
        cards=tuple(cards)[:_MOST],
        transports={name: count for name, count in transports.most_common(_MOST) if count},
        channels=channels,
        # Up to 2.21 a line has 20 ranks at most, and from 2.27 on 128 characters: of a part of a ring nothing is said.
        ring=ring if sorted(ring) == list(range(max(_count_ranks(lines), len(ring)))) else (),
    )


def _count_ranks(lines: Iterable[str]) -> int:
    """As many as there are at least, of all that the lines name."""
    numbers = [int(match[1]) for line in lines if (match := _RANKS.search(line)) is not None]
    ends = [max(int(match[1]), int(match[2])) + 1 for line in lines if (match := _VIA.search(line)) is not None]
    return max([*numbers, *ends], default=0)
