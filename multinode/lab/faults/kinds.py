"""What can be taken from a node: one frozen type a kind, each judging its own values. Pure: nothing is done here."""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Mapping

import msgspec

from multinode.errors import UsageError
from multinode.lab.shaping import rate_text
from multinode.lab.spec import DATA_IFNAME, MANAGEMENT_IFNAME
from multinode.units import format_size

__all__ = [
    "PORT_MTU",
    "SECOND_IFNAME",
    "Address",
    "Clock",
    "Cpu",
    "DiskFull",
    "Fault",
    "FileMissing",
    "FileText",
    "Interface",
    "LinkDown",
    "LinkSlow",
    "Memory",
    "Mtu",
    "NodeState",
    "Package",
    "Ports",
    "Route",
    "SshdState",
    "Variable",
]

# What every port of the switch passes.
PORT_MTU = 1500
# The second port of the card whose first is the training interface.
SECOND_IFNAME = "ens1f1"

_MAX_MTU = 65535
_MAX_PORT = 65535
_MAX_IFNAME = 15
# sshd must still answer within the time that clients give it.
_LEAST_SHARE = 0.05
# sshd, a session and an interpreter want about half of it.
_LEAST_BYTES = 64 << 20
_CARDS = (DATA_IFNAME, MANAGEMENT_IFNAME)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PACKAGE = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")
# PEP 440 in outline: release, then pre-, post- and development release, then the local part.
_VERSION = re.compile(
    r"(?:\d+!)?\d+(?:\.\d+)*(?:[-_.]?(?:a|b|c|rc|alpha|beta|pre|post|rev|r|dev)[-_.]?\d*)*(?:\+[a-z0-9]+(?:[-_.][a-z0-9]+)*)?",
    re.IGNORECASE,
)

_WAY_WORDS = {"both": "carries", "send": "sends", "receive": "receives"}
_FIREWALL_WORDS = {"drop": "dropped", "reject": "rejected"}
_SSHD_WORDS = {
    "stop": "is stopped",
    "freeze": "is frozen: it accepts and says nothing",
    "new-host-key": "has another host key than known_hosts says",
    "refuse-key": "authorises no key",
    "crowded": "drops new connections: all its places are taken",
}
_NODE_WORDS = {"kill": "killed, links and all", "freeze": "all its processes are frozen"}


class _Fault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind"):
    """What every kind has."""

    node: str  # whom the fault is taken from


class LinkDown(_Fault, frozen=True, kw_only=True, tag="link-down"):
    """The cable of a card is pulled: the card has no carrier."""

    ifname: str = DATA_IFNAME

    def __post_init__(self) -> None:
        """Judge the card."""
        _check_card(self.ifname)

    def describe(self) -> str:
        """A few words."""
        return f"{self.ifname} has no carrier"


class LinkSlow(_Fault, frozen=True, kw_only=True, tag="link-slow"):
    """A card carries less than it says, both ways or one: `send` is what the node sends, the other way is as it was."""

    ifname: str = DATA_IFNAME
    rate_gbit_per_s: float
    way: str = "both"

    def __post_init__(self) -> None:
        """Judge the card, the rate and the way."""
        _check_card(self.ifname)
        _require(self.rate_gbit_per_s > 0, "a link that carries nothing is down", "ask for --down")
        _require(self.way in _WAY_WORDS, f"{self.way!r} is no way of a link", f"one of {', '.join(_WAY_WORDS)}")

    @property
    def sends(self) -> bool:
        """Whether what the node sends is slow."""
        return self.way in {"both", "send"}

    @property
    def receives(self) -> bool:
        """Whether what the node receives is slow."""
        return self.way in {"both", "receive"}

    def describe(self) -> str:
        """A few words."""
        return f"{self.ifname} {_WAY_WORDS[self.way]} {rate_text(self.rate_gbit_per_s)}"


class Mtu(_Fault, frozen=True, kw_only=True, tag="mtu"):
    """The training card sends larger frames than its switch port passes: they vanish, small ones arrive.

    Two nodes agree on the smaller of their TCP segments, so a stream suffers only where both ends have the fault.
    """

    mtu: int

    def __post_init__(self) -> None:
        """Judge the size."""
        good = PORT_MTU < self.mtu <= _MAX_MTU
        _require(good, f"an MTU of {self.mtu} is no fault here", f"{PORT_MTU + 1} to {_MAX_MTU}, for example 9000")

    def describe(self) -> str:
        """A few words."""
        return f"{DATA_IFNAME} has an MTU of {self.mtu}, its switch port passes {PORT_MTU}"


class Ports(_Fault, frozen=True, kw_only=True, tag="ports"):
    """A firewall turns away TCP connections to these ports that come in on the training card."""

    first: int
    last: int
    action: str

    def __post_init__(self) -> None:
        """Judge the range."""
        good = 1 <= self.first <= self.last <= _MAX_PORT
        _require(good, f"{self.first}-{self.last} is not a range of ports", "for example 29500 or 30000-60999")
        _require_one_of(self.action, _FIREWALL_WORDS)

    def describe(self) -> str:
        """A few words."""
        ports = f"{self.first}-{self.last} on {DATA_IFNAME}"
        return f"connections to ports {ports} are {_FIREWALL_WORDS[self.action]}"


class SshdState(_Fault, frozen=True, kw_only=True, tag="sshd"):
    """The SSH daemon is stopped or frozen, or does not take this client, or not now."""

    how: str

    def __post_init__(self) -> None:
        """Judge the word."""
        _require_one_of(self.how, _SSHD_WORDS)

    def describe(self) -> str:
        """A few words."""
        return f"sshd {_SSHD_WORDS[self.how]}"


class NodeState(_Fault, frozen=True, kw_only=True, tag="node"):
    """The node lost its power, or none of its processes runs any more."""

    how: str

    def __post_init__(self) -> None:
        """Judge the word."""
        _require_one_of(self.how, _NODE_WORDS)

    def describe(self) -> str:
        """A few words."""
        return _NODE_WORDS[self.how]


class Cpu(_Fault, frozen=True, kw_only=True, tag="cpu"):
    """All processes of the node together get this much of a core, 0.3 of one: a quota, as containers have it."""

    share: float

    def __post_init__(self) -> None:
        """Judge the share."""
        good = _LEAST_SHARE <= self.share < math.inf
        _require(good, f"a node cannot do with {self.share:g} of a core", f"{_LEAST_SHARE} or more, for example 0.3")

    def describe(self) -> str:
        """A few words."""
        return f"its processes get {self.share:g} of a core together"


class Memory(_Fault, frozen=True, kw_only=True, tag="memory"):
    """All processes of the node together have this much memory and no swap: the kernel kills one that wants more."""

    limit_bytes: int

    def __post_init__(self) -> None:
        """Judge the limit."""
        least = format_size(_LEAST_BYTES)
        good = self.limit_bytes >= _LEAST_BYTES
        _require(good, f"a node cannot do with {format_size(self.limit_bytes)}", f"{least} or more, for example 700MiB")

    def describe(self) -> str:
        """A few words."""
        return f"its processes have {format_size(self.limit_bytes)} of memory together"


class DiskFull(_Fault, frozen=True, kw_only=True, tag="disk"):
    """Nothing more can be written to the node's disk."""

    def describe(self) -> str:
        """A few words."""
        return "its disk is full"


class Package(_Fault, frozen=True, kw_only=True, tag="package"):
    """The job's interpreter finds another version of a package installed; its code is unchanged."""

    name: str
    version: str

    def __post_init__(self) -> None:
        """Judge both."""
        _require(
            bool(_PACKAGE.fullmatch(self.name)), f"{self.name!r} is not the name of a package", "for example torch"
        )
        good = bool(_VERSION.fullmatch(self.version))
        _require(good, f"{self.version!r} is not a version", "for example 2.4.1 or 2.4.1+cpu")

    def describe(self) -> str:
        """A few words."""
        return f"{self.name} says it is {self.version}"


class FileMissing(_Fault, frozen=True, kw_only=True, tag="file-missing"):
    """A file or directory is gone."""

    path: str

    def __post_init__(self) -> None:
        """Judge the path."""
        _check_path(self.path)

    def describe(self) -> str:
        """A few words."""
        return f"{self.path} is missing"


class FileText(_Fault, frozen=True, kw_only=True, tag="file-text"):
    """A file has another content, or has more at its end, or is there at all."""

    path: str
    text: str
    append: bool = False

    def __post_init__(self) -> None:
        """Judge the path."""
        _check_path(self.path)

    def describe(self) -> str:
        """A few words."""
        return f"{self.path} {'ends with' if self.append else 'is'} {self.text!r}"


class Variable(_Fault, frozen=True, kw_only=True, tag="variable"):
    """A variable is set in every SSH session that begins."""

    name: str
    value: str

    def __post_init__(self) -> None:
        """Judge both."""
        _require(bool(_NAME.fullmatch(self.name)), f"{self.name!r} is not the name of a variable", "for example RANK=3")
        _require("\n" not in self.value, f"the value of {self.name} has more than one line", "sshd takes one line")

    def describe(self) -> str:
        """A few words."""
        return f"{self.name}={self.value} in SSH sessions"


class Clock(_Fault, frozen=True, kw_only=True, tag="clock"):
    """The wall clock of SSH sessions that begin is wrong; the monotonic clock is not."""

    offset_s: float

    def describe(self) -> str:
        """A few words."""
        return f"the clock of SSH sessions is wrong by {self.offset_s:+g} s"


class Interface(_Fault, frozen=True, kw_only=True, tag="interface"):
    """There is one more interface, up and with an address, and nobody behind it."""

    name: str
    address: str = "172.18.0.1/16"

    def __post_init__(self) -> None:
        """Judge both."""
        good = 0 < len(self.name) <= _MAX_IFNAME and not re.search(r"[\s/:%]", self.name)
        _require(good, f"{self.name!r} is not the name of an interface", "up to 15 characters, for example br-1234")
        _check_address(self.address)

    def describe(self) -> str:
        """A few words."""
        return f"an interface {self.name} with {self.address}"


class Address(_Fault, frozen=True, kw_only=True, tag="address"):
    """There is a second card, with this address: two cards in one subnet when it is of the training network."""

    address: str

    def __post_init__(self) -> None:
        """Judge the address."""
        _check_address(self.address)

    def describe(self) -> str:
        """A few words."""
        return f"a second card {SECOND_IFNAME} with {self.address}"


class Route(_Fault, frozen=True, kw_only=True, tag="route"):
    """What the node sends to a peer's training address leaves through the management card; answers come as before."""

    peer: str

    def __post_init__(self) -> None:
        """Judge the peer."""
        _require(self.peer != self.node, f"{self.node} has no route to itself", "name another node as the peer")

    def describe(self) -> str:
        """A few words."""
        return f"sends to {self.peer} through {MANAGEMENT_IFNAME}"


Fault = (
    LinkDown
    | LinkSlow
    | Mtu
    | Ports
    | SshdState
    | NodeState
    | Cpu
    | Memory
    | DiskFull
    | Package
    | FileMissing
    | FileText
    | Variable
    | Clock
    | Interface
    | Address
    | Route
)


def _check_card(ifname: str) -> None:
    _require(ifname in _CARDS, f"a node has no card {ifname!r}", f"its cards are {' and '.join(_CARDS)}")


def _check_path(path: str) -> None:
    good = path.startswith("/") and path.rstrip("/") != "" and "\0" not in path
    _require(good, f"{path!r} is not a path from the root", "for example /etc/nccl.conf")


def _check_address(text: str) -> None:
    try:
        ipaddress.IPv4Interface(text)
    except ValueError as error:
        raise UsageError(
            f"{text!r} is not an address with its network: {error}", hint="write it as 172.18.0.1/16"
        ) from error
    _require("/" in text, f"{text!r} does not say its network", "write it as 172.18.0.1/16")


def _require_one_of(word: str, words: Mapping[str, str]) -> None:
    _require(word in words, f"{word!r} is none of the faults of this kind", f"one of {', '.join(words)}")


def _require(good: bool, message: str, hint: str) -> None:  # noqa: FBT001 - reads as a sentence
    if not good:
        raise UsageError(message, hint=hint)
