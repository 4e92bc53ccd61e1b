"""parse_inventory: a group of an Ansible inventory, INI or YAML -> Cluster. Untrusted input, as a hostfile is.

As in Ansible: groups contain hosts and other groups (`children`), `all` contains everything, and a variable of a host
goes before that of its group, which goes before that of a group around it (docs.ansible.com, "How to build your
inventory"). The variables that lead to a node are read; of the others the names are told.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterator
from typing import NamedTuple

import yaml

from multinode.cluster.cluster import Cluster
from multinode.cluster.hostfile import MAX_NODES, NodeList, WrongLine, expand_ranges, make_node, split_words
from multinode.errors import HostfileError, UsageError
from multinode.strict_yaml import YamlError, yaml_nodes

_HOST = "host"
# With the names that Ansible had for them before 2.0, which it still reads.
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
_ALL, _UNGROUPED = "all", "ungrouped"
_SECTION = re.compile(r"\[\s*([A-Za-z_][^\[\]:\s]*)\s*(?::\s*(\w+)\s*)?\]\s*(?:[#;].*)?")
# The first line that says something, of a YAML document whose keys are groups.
_YAML = re.compile(r"(?:---|\{|[\"']?[A-Za-z_][\w.-]*[\"']?:(?:\s|$))")
_COMMENTS = ("#", ";")
# A host's name with its ranges, and the port that may follow.
_HOST_PORT = re.compile(r"((?:[^:\[\]]|\[[^\[\]]*\])+):(\d{1,9})", re.ASCII)
_RANGE = re.compile(r"(?:(\d{1,9}):(\d{1,9})|([A-Za-z]):([A-Za-z]))(?::(\d{1,9}))?", re.ASCII)
_NULL = "tag:yaml.org,2002:null"
# Hosts of all groups, each counted wherever it stands.
_MOST_HOSTS = 1 << 16
_SHOWN = 12
_PLAIN = "what Ansible makes of it can be read: ansible-inventory -i FILE --list --yaml | multinode ... --hosts -:GROUP"
_MERGE = yaml.constructor.SafeConstructor()


class _Key(NamedTuple):
    """A key of a mapping, and its line."""

    text: str
    line: int


class _Group:
    """One group, from wherever the inventory speaks of it."""

    def __init__(self) -> None:
        # By name, each with its line.
        self.hosts: dict[str, int] = {}
        self.children: dict[str, int] = {}
        self.variables: dict[str, str] = {}
        # How far it is within others.
        self.depth = 0


class _Inventory:
    """All groups, and what stands beside the hosts themselves."""

    def __init__(self, found: NodeList) -> None:
        self.found = found
        self.groups = {_ALL: _Group()}
        self.hosts: dict[str, dict[str, str]] = {}
        self.ignored: dict[str, None] = {}
        self._count = 0

    def group(self, name: str) -> _Group:
        """The group of this name; a new one where there was none."""
        return self.groups.setdefault(name, _Group())

    def add_hosts(self, group: str, pattern: str, variables: dict[str, str], line: int) -> None:
        """The hosts that a pattern stands for, with what stands beside it."""
        name, port = _split_port(pattern)
        if port is not None:
            variables = {"ansible_port": port} | variables
        try:
            names = expand_ranges(name, MAX_NODES, _choices)
        except ValueError as error:
            raise WrongLine(str(error)) from None
        self._count += len(names)
        if self._count > _MOST_HOSTS:
            raise WrongLine(f"there are more than {_MOST_HOSTS} hosts")
        for one in names:
            self.group(group).hosts.setdefault(one, line)
            self.hosts.setdefault(one, {}).update(variables)

    def members(self, name: str) -> dict[str, int]:
        """The hosts of a group and of those within it, in their order, each with its line."""
        groups = {name: None} if name != _ALL else dict.fromkeys(self.groups)
        waiting = [name]
        for group in waiting:
            new = [child for child in self.groups[group].children if child not in groups]
            groups |= dict.fromkeys(new)
            waiting += new
        found: dict[str, int] = {}
        for host, line in (one for group in groups for one in self.groups[group].hosts.items()):
            found.setdefault(host, line)
        return found

    def variables(self, hosts: dict[str, int]) -> dict[str, dict[str, str]]:
        """What holds for each of these hosts."""
        found: dict[str, dict[str, str]] = {host: {} for host in hosts}
        for name, group in sorted(self.groups.items(), key=lambda one: (one[0] != _ALL, one[1].depth, one[0])):
            for host in self.members(name) if group.variables else ():
                if host in found:
                    found[host] |= group.variables
        return {host: inherited | self.hosts[host] for host, inherited in found.items()}

    def settle(self) -> None:
        """Find how far each group is within others.

        Raises:
            HostfileError: there is no such group, or it is within itself.
        """
        outside = dict.fromkeys(self.groups, 0)
        for group in self.groups.values():
            for child, line in group.children.items():
                with self.found.line(line):
                    if child not in self.groups:
                        raise WrongLine(f"there is no group {child!r}", f"its hosts stand below [{child}]")
                outside[child] += 1
        order = [name for name, count in outside.items() if not count]
        for name in order:
            for child in self.groups[name].children:
                self.groups[child].depth = max(self.groups[child].depth, self.groups[name].depth + 1)
                outside[child] -= 1
                if not outside[child]:
                    order.append(child)
        around = next((name for name, count in outside.items() if count), None)
        if around is not None:
            with self.found.line(next(iter(self.groups[around].children.values()), 1)):
                raise WrongLine(f"the group {around!r} is within itself, or within one that is")


def is_inventory(text: str) -> bool:
    """Whether a text is an Ansible inventory with groups, and no hostfile."""
    lines = [line.strip() for line in text.split("\n")]
    said = [line for line in lines if line and not line.startswith(_COMMENTS)]
    return bool(said) and (_YAML.match(said[0]) is not None or any(_SECTION.fullmatch(line) for line in said))


def parse_inventory(text: str, group: str | None, source: str = "inventory") -> tuple[Cluster, tuple[str, ...]]:
    """The hosts of a group, in their order, and the names of the variables that say nothing here.

    Args:
        text: INI or YAML.
        group: its name; None is no choice, which is refused with the names that there are.
        source: the inventory's path, for messages.

    Raises:
        HostfileError: `source:line: what is wrong and what was expected`.
        UsageError: there is no such group.
    """
    found = NodeList(source)
    inventory = _Inventory(found)
    first = next((line for line in map(str.strip, text.split("\n")) if line and not line.startswith(_COMMENTS)), "")
    read = _read_yaml if _YAML.match(first) is not None else _read_ini
    try:
        read(inventory, text)
    except YamlError as wrong:
        raise HostfileError(f"{source}:{wrong.line or 1}: {wrong}", hint=_PLAIN) from None
    except yaml.MarkedYAMLError as wrong:
        raise HostfileError(f"{source}:1: {wrong.problem}", hint=_PLAIN) from None
    inventory.settle()
    hosts = inventory.members(group) if group in inventory.groups else {}
    if group is None or not hosts:
        raise _no_group(group, inventory, source)
    ignored = inventory.ignored
    for name, variables in inventory.variables(hosts).items():
        ignored |= dict.fromkeys(one for one in variables if one not in _READ)
        keys = {_READ[one]: value for one, value in variables.items() if one in _READ}
        with found.line(hosts[name]):
            found.add(hosts[name], make_node(keys.pop(_HOST, name), keys, {}))
    return found.cluster(), tuple(ignored)


def _no_group(group: str | None, inventory: _Inventory, source: str) -> UsageError:
    what = "no group of it was named" if group is None else f"no group {group!r} of it has hosts"
    names = [name for name in inventory.groups if inventory.members(name)]
    listed = ", ".join(names[:_SHOWN]) or "none"
    return UsageError(
        f"{source} is an Ansible inventory, and {what}", hint=f"--hosts {source}:GROUP; its groups with hosts: {listed}"
    )


def _read_ini(inventory: _Inventory, text: str) -> None:
    group, kind = _UNGROUPED, "hosts"
    later: list[tuple[int, str, str]] = []
    for number, line in enumerate((one.strip() for one in text.removeprefix("\ufeff").split("\n")), start=1):
        with inventory.found.line(number):
            if not line or line.startswith(_COMMENTS):
                continue
            section = _SECTION.fullmatch(line)
            if section is None and kind == "vars":
                later.append((number, group, line))
            elif section is None:
                _read_ini_line(inventory, group, kind, line, number)
            else:
                group, kind = section[1], section[2] or "hosts"
                if kind not in {"hosts", "vars", "children"}:
                    raise WrongLine(f"[{group}:{kind}]: expected [{group}], [{group}:vars] or [{group}:children]")
                if kind != "vars":
                    inventory.group(group)
    for number, group, line in later:
        with inventory.found.line(number):
            name, equals, value = line.partition("=")
            if not equals:
                raise WrongLine(f"{line!r} is not NAME=VALUE", "a variable of the group, such as ansible_user=alice")
            if group not in inventory.groups:
                raise WrongLine(f"there is no group {group!r}", f"its hosts stand below [{group}]")
            inventory.groups[group].variables[name.strip()] = " ".join(split_words(value))


def _read_ini_line(inventory: _Inventory, group: str, kind: str, line: str, number: int) -> None:
    name, *settings = split_words(line)
    wrong = next((one for one in settings if kind == "children" or "=" not in one), None)
    if wrong is not None:
        raise WrongLine(f"{wrong!r} is not NAME=VALUE of a host", "no spaces around =; a value with spaces is quoted")
    if kind == "children":
        inventory.group(group).children.setdefault(name, number)
        return
    pairs = (one.partition("=") for one in settings)
    inventory.add_hosts(group, name, {key: value for key, _, value in pairs}, number)


def _read_yaml(inventory: _Inventory, text: str) -> None:
    root = yaml_nodes(text)
    for key, value in _entries(inventory, root, "groups") if root is not None else ():
        _read_yaml_group(inventory, key.text, value)


def _read_yaml_group(inventory: _Inventory, name: str, node: yaml.Node) -> None:
    group = inventory.group(name)
    for key, value in _entries(inventory, node, "hosts, vars and children"):
        if key.text == "hosts":
            for host, variables in _entries(inventory, value, "hosts"):
                with inventory.found.line(host.line):
                    inventory.add_hosts(name, host.text, _variables(inventory, variables), host.line)
        elif key.text == "vars":
            group.variables |= _variables(inventory, value)
        elif key.text == "children":
            for child, inner in _entries(inventory, value, "groups"):
                group.children.setdefault(child.text, child.line)
                _read_yaml_group(inventory, child.text, inner)
        else:
            inventory.ignored[key.text] = None


def _variables(inventory: _Inventory, node: yaml.Node) -> dict[str, str]:
    """The text of each; what is no text, such as a list, is nothing that is read here."""
    return {
        key.text: str(value.value) if isinstance(value, yaml.ScalarNode) else ""
        for key, value in _entries(inventory, node, "variables")
    }


def _entries(inventory: _Inventory, node: yaml.Node, what: str) -> Iterator[tuple[_Key, yaml.Node]]:
    """The entries of a mapping, which may be left empty."""
    if isinstance(node, yaml.ScalarNode) and node.tag == _NULL:
        return
    with inventory.found.line(node.start_mark.line + 1):
        if not isinstance(node, yaml.MappingNode):
            raise WrongLine(f"expected a mapping of {what}", _PLAIN)
    _MERGE.flatten_mapping(node)
    for key, value in node.value:
        line = key.start_mark.line + 1
        with inventory.found.line(line):
            if not isinstance(key, yaml.ScalarNode):
                raise WrongLine(f"expected a name in the mapping of {what}", _PLAIN)
        yield _Key(str(key.value), line), value


def _split_port(pattern: str) -> tuple[str, str | None]:
    """`host:22` taken apart; an IPv6 address may stand in brackets."""
    match = _HOST_PORT.fullmatch(pattern)
    name, port = (match[1], match[2]) if match is not None else (pattern, None)
    inner = name[1:-1]
    # Two colons at least; a range of an inventory that is all of a name has one, or a step.
    bracketed = name.startswith("[") and name.endswith("]") and _RANGE.fullmatch(inner) is None and ":" in inner
    return (inner if bracketed else name), port


def _choices(pattern: str, text: str, limit: int) -> list[str]:
    """What `01:16`, `a:f` or `0:10:2` stand for."""
    match = _RANGE.fullmatch(text)
    if match is None:
        raise ValueError(f"{pattern!r}: {text!r} is not a range, as in node[01:16] or node[a:f]")
    letters = string.ascii_letters
    first, last = (int(match[1]), int(match[2])) if match[1] else (letters.index(match[3]), letters.index(match[4]))
    step = int(match[5] or 1)
    if last < first or not step:
        raise ValueError(f"{pattern!r}: the range {text!r} ends before it begins")
    if (last - first) // step >= limit:
        raise ValueError(f"{pattern!r} stands for more than {limit} names")
    numbers = range(first, last + 1, step)
    return [str(one).zfill(len(match[1])) for one in numbers] if match[1] else [letters[one] for one in numbers]
