"""Which network interfaces NCCL takes for its sockets: by NCCL_SOCKET_IFNAME, or by itself where that is not set.

The rules are those of ncclFindInterfaces in NCCL's socket.cc. Knows nothing of nodes, of routes, or of what is good.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from multinode.cluster.facts import Interface

MAX_INTERFACES = 16

# Since then interfaces that are not RUNNING are passed over, and libvirt's bridges come last.
_RUNNING_SINCE = (2, 28, 3)


class _Pattern(msgspec.Struct, frozen=True, kw_only=True):
    """A value of NCCL_SOCKET_IFNAME, read: `^` and `=` stand once, before the whole list."""

    names: tuple[str, ...]
    excludes: bool
    exact: bool

    def takes(self, name: str) -> bool:
        # A list that is empty after its signs matches every name.
        listed = not self.names or (name in self.names if self.exact else name.startswith(self.names))
        return listed != self.excludes


def takes_by_prefix(spec: str) -> bool:
    """Whether the value may take interfaces that it does not name: prefixes, or all but those that it names."""
    pattern = _parse(spec)
    return pattern.excludes or not pattern.exact or not pattern.names


def select_interfaces(interfaces: Sequence[Interface], spec: str | None, version: str | None) -> tuple[Interface, ...]:
    """The interfaces that NCCL takes: the bootstrap listens on the first, NET/Socket sends over all of them.

    Args:
        interfaces: in the kernel's order; those without an address do not count.
        spec: NCCL_SOCKET_IFNAME. Without `=` an entry is a prefix: `eth1` takes `eth10` as well. NCCL reads a value of
            a single character as if there were none.
        version: of NCCL, `2.27.5`. An unknown one gets the rules before 2.28.3, which pass over fewer interfaces: what
            NCCL may take is then never left out.
    """
    recent = _is_recent(version)
    usable = [one for one in interfaces if one.addresses and (not recent or one.running is not False)]
    if spec is not None and len(spec) > 1:
        return _matching(spec, usable)
    choices = ("ib", "^docker,lo,virbr" if recent else "^docker,lo", "docker", "lo", "virbr")
    return next(filter(None, (_matching(choice, usable) for choice in choices)), ())


def _parse(spec: str) -> _Pattern:
    rest = spec.removeprefix("^")
    entries = rest.removeprefix("=").split(",")
    # A port may follow a name; here it says nothing.
    names = tuple(name for name in (entry.split(":")[0] for entry in entries) if name)
    return _Pattern(names=names, excludes=spec.startswith("^"), exact=rest.startswith("="))


def _matching(spec: str, interfaces: Sequence[Interface]) -> tuple[Interface, ...]:
    pattern = _parse(spec)
    return tuple(one for one in interfaces if pattern.takes(one.name))[:MAX_INTERFACES]


def _is_recent(version: str | None) -> bool:
    numbers = re.match(r"(\d{1,4})\.(\d{1,4})\.(\d{1,4})", version or "")
    return numbers is not None and tuple(int(number) for number in numbers.groups()) >= _RUNNING_SINCE
