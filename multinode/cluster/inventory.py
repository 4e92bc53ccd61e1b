"""parse_inventory: a group of what `ansible-inventory --list` prints -> Cluster. Untrusted input, as a hostfile is.

Ansible itself has read the inventory: its ranges, variables of groups, files beside it, and plugins. Of the variables,
those that lead to a node are read; of the others the names are told.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from multinode.cluster.cluster import Cluster
from multinode.cluster.hostfile import NodeList, WrongLine, make_node
from multinode.decoding import convert, decode_json
from multinode.errors import HostfileError, UsageError, printable_line

_HOST = "host"
# Including the names from before Ansible 2.0, which it still reads.
_READ = {
    "ansible_host": _HOST,
    "ansible_ssh_host": _HOST,
    "ansible_port": "port",
    "ansible_ssh_port": "port",
    "ansible_user": "user",
    "ansible_ssh_user": "user",
    "ansible_ssh_private_key_file": "key",
    "ansible_private_key_file": "key",
}
_SECTION = re.compile(r"\[\s*[A-Za-z_][^\[\]:\s]*\s*(?::\s*\w+\s*)?\]\s*(?:[#;].*)?")
# The first line that says something, of a YAML document whose keys are groups, or of JSON.
_KEYS = re.compile(r"(?:---|\{|[\"']?[A-Za-z_][\w.-]*[\"']?:(?:\s|$))")
_COMMENTS = ("#", ";")
_META = "_meta"
_SHOWN = 12


class _Group(msgspec.Struct, frozen=True):
    hosts: list[str] = []
    children: list[str] = []


class _Meta(msgspec.Struct, frozen=True):
    hostvars: dict[str, dict[str, Any]] = {}


def is_inventory(text: str) -> bool:
    """Whether a text is an Ansible inventory with groups, and not a hostfile."""
    lines = [line.strip() for line in text.split("\n")]
    said = [line for line in lines if line and not line.startswith(_COMMENTS)]
    return bool(said) and (_KEYS.match(said[0]) is not None or any(_SECTION.fullmatch(line) for line in said))


def parse_inventory(listing: str, group: str | None, source: str = "inventory") -> tuple[Cluster, tuple[str, ...]]:
    """The hosts of a group, in their order, and the names of the variables that say nothing here.

    Args:
        listing: what `ansible-inventory --list` printed.
        group: its name; None is no choice, which is refused with the names that there are.
        source: the inventory's path, for messages.

    Raises:
        HostfileError: `source:host: what is wrong and what was expected`, or it is no such listing.
        UsageError: there is no such group.
    """
    try:
        parts = decode_json(listing, dict[str, Any])
        variables = convert(parts.pop(_META, {}), _Meta).hostvars
        groups = convert(parts, dict[str, _Group])
    except msgspec.DecodeError as wrong:
        raise HostfileError(
            f"{source}: not an output of ansible-inventory --list: {wrong}",
            hint="ansible-inventory -i INVENTORY --list | multinode ... --hosts -:GROUP",
        ) from None
    hosts = _members(groups, group) if group is not None else []
    if not hosts:
        raise _no_group(group, groups, source)
    found, ignored = NodeList(source), dict[str, None]()
    for host in hosts:
        with found.line(printable_line(host)):
            said = variables.get(host, {})
            ignored |= dict.fromkeys(name for name in said if name not in _READ)
            keys = {_READ[name]: _text(name, value) for name, value in said.items() if name in _READ}
            found.add(printable_line(host), make_node(keys.pop(_HOST, host), keys, {}))
    return found.cluster(), tuple(ignored)


def _text(name: str, value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise WrongLine(f"{name} is not text", "encrypted values and lists are not supported there")
    return str(value)


def _members(groups: dict[str, _Group], name: str) -> list[str]:
    """The hosts of a group, then those of the groups within it."""
    within = {name: None}
    hosts: dict[str, None] = {}
    waiting = [name]
    for one in waiting:
        group = groups.get(one, _Group())
        hosts |= dict.fromkeys(group.hosts)
        waiting += [child for child in dict.fromkeys(group.children) if child not in within]
        within |= dict.fromkeys(group.children)
    return list(hosts)


def _no_group(group: str | None, groups: dict[str, _Group], source: str) -> UsageError:
    what = "no group was named" if group is None else f"it has no group {group!r} with hosts"
    names = [printable_line(name) for name in groups if _members(groups, name)]
    listed = ", ".join(names[:_SHOWN]) or "none"
    return UsageError(
        f"{source} is an Ansible inventory, but {what}", hint=f"use --hosts {source}:GROUP; groups with hosts: {listed}"
    )
