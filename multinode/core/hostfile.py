"""parse_hostfile: the text of a hostfile -> Cluster. Untrusted input: every wrong line is one error with its number."""

from __future__ import annotations

import ipaddress
import itertools
import re
import shlex
from collections.abc import Callable, Iterator
from typing import Any

from multinode.core.cluster import Cluster, Node
from multinode.errors import HostfileError

__all__ = ["parse_hostfile", "render_hostfile"]

_NAME = re.compile(r"[A-Za-z0-9_.:%][A-Za-z0-9_.:%-]*")
_RANGE = re.compile(r"\[([^\]]*)\]")
_RANGE_PART = re.compile(r"(\d+)(?:-(\d+))?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_MOST_NODES = 4096
_MOST_PORT = 65535


class _Wrong(Exception):
    """What is wrong with a line, before its place is known."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


def parse_hostfile(text: str, source: str = "hostfile") -> Cluster:
    """The nodes of a hostfile, in node-rank order. `source` is its path, for messages.

    Raises:
        HostfileError: `source:line: what is wrong and what was expected`.
    """
    nodes: list[Node] = []
    lines: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            for node in _parse_line(line):
                _check_new(node, lines)
                lines[node.name] = number
                nodes.append(node)
        except _Wrong as wrong:
            raise HostfileError(f"{source}:{number}: {wrong}", hint=wrong.hint) from None
    if not nodes:
        raise HostfileError(f"{source}: it names no node", hint="one node a line, for example: node1 slots=2")
    return Cluster(nodes=tuple(nodes), source=source)


def render_hostfile(cluster: Cluster) -> str:
    """The cluster as a hostfile that reads back the same."""
    return "".join(_render_node(node) + "\n" for node in cluster.nodes)


def _check_new(node: Node, lines: dict[str, int]) -> None:
    if node.name in lines:
        raise _Wrong(f"the node {node.name!r} stands on line {lines[node.name]} already")
    if len(lines) >= _MOST_NODES:
        raise _Wrong(f"more than {_MOST_NODES} nodes")


def _parse_line(line: str) -> Iterator[Node]:
    if any(not char.isprintable() and char != "\t" for char in line):
        raise _Wrong("a control character stands in it")
    try:
        words = shlex.split(line, comments=True)
    except ValueError as error:
        raise _Wrong(f"a quote is not closed ({error})") from None
    if not words:
        return
    name, *settings = words
    if "=" in name:
        raise _Wrong(f"it begins with the setting {name!r}, and a node's name was expected", "node1 slots=2")
    values = _parse_settings(settings)
    user, at, name = name.rpartition("@")
    if at:
        if "user" in values:
            raise _Wrong("both user@ and user= are given")
        values["user"] = _text(user)
    names = _expand(name)
    addrs = _expand_addresses(values.pop("addr", None), len(names))
    for each, addr in zip(names, addrs, strict=True):
        if not _NAME.fullmatch(each):
            raise _Wrong(
                f"{each!r} is not a node's name", "a host name, an address, or an alias of your SSH configuration"
            )
        yield Node(name=each, addr=addr, **values)


def _parse_settings(settings: list[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    env: dict[str, str] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals:
            raise _Wrong(f"{setting!r} is not key=value")
        if key.startswith("env."):
            _add(env, _variable(key.removeprefix("env.")), text)
        elif key in _KEYS:
            _add(values, key, _value(key, text))
        elif key not in {"max_slots", "max-slots"}:  # Open MPI's limit says nothing about ours
            raise _Wrong(f"unknown key {key!r}", f"known are {', '.join(sorted(_KEYS))}, env.NAME")
    if env:
        values["env"] = env
    return _settle_slots(values)


def _settle_slots(values: dict[str, Any]) -> dict[str, Any]:
    gpus = values.get("gpus")
    if gpus is not None and values.setdefault("slots", len(gpus)) != len(gpus):
        raise _Wrong(f"slots={values['slots']} and {len(gpus)} gpus contradict each other", "leave slots= out")
    return values


def _add(values: dict[str, Any], key: str, value: Any) -> None:
    if key in values:
        raise _Wrong(f"{key}= stands twice")
    values[key] = value


def _value(key: str, text: str) -> Any:
    parse, expected = _KEYS[key]
    try:
        return parse(text)
    except ValueError:
        raise _Wrong(f"{key}={text!r}: expected {expected}") from None


def _variable(name: str) -> str:
    if not _VARIABLE.fullmatch(name):
        raise _Wrong(f"{name!r} is not a name for an environment variable")
    return name


def _text(text: str) -> str:
    if not text or text.startswith("-"):
        raise ValueError
    return text


def _whole(least: int, most: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isascii() or not text.isdigit() or not least <= int(text) <= most:
            raise ValueError
        return int(text)

    return parse


def _gpus(text: str) -> tuple[int, ...]:
    gpus = tuple(_whole(0, 1023)(part) for part in text.split(","))
    if len(set(gpus)) != len(gpus):
        raise ValueError
    return gpus


def _price(text: str) -> float:
    if not re.fullmatch(r"\d+(?:\.\d+)?", text, re.ASCII):
        raise ValueError
    return float(text)


_KEYS: dict[str, tuple[Callable[[str], Any], str]] = {
    "slots": (_whole(1, 1024), "a number of workers, 1 or more"),
    "gpus": (_gpus, "GPU ids such as 6,7, none of them twice"),
    "addr": (_text, "an IP address"),
    "ifname": (_text, "the name of an interface"),
    "user": (_text, "a user's name"),
    "port": (_whole(1, _MOST_PORT), "a port, 1 to 65535"),
    "key": (_text, "the path of a private key"),
    "jump": (_text, "a jump host: [user@]host[:port]"),
    "ssh_config": (_text, "the path of an SSH configuration"),
    "python": (_text, "the path of an interpreter on the node"),
    "workdir": (_text, "a directory on the node"),
    "price": (_price, "a price per hour, such as 0.35"),
}


def _expand(pattern: str) -> list[str]:
    """A name with ranges, `node[01-16]` or `gpu[1,3,5-7].lan`, as the names that it stands for."""
    pieces = _RANGE.split(pattern)
    if any("[" in piece or "]" in piece for piece in pieces[::2]):
        raise _Wrong(f"{pattern!r}: a bracket has no partner")
    choices = [[piece] if index % 2 == 0 else list(_range(pattern, piece)) for index, piece in enumerate(pieces)]
    count = 1
    for choice in choices:
        count *= len(choice)
        if count > _MOST_NODES:
            raise _Wrong(f"{pattern!r} stands for more than {_MOST_NODES} nodes")
    return ["".join(parts) for parts in itertools.product(*choices)]


def _range(pattern: str, text: str) -> Iterator[str]:
    for part in text.split(","):
        match = _RANGE_PART.fullmatch(part)
        if match is None or not part.isascii() or len(part) > 20:  # noqa: PLR2004 - two numbers no node name has
            raise _Wrong(f"{pattern!r}: {part!r} is not a number or a range of numbers", "node[01-16] or node[1,3,5-7]")
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first) or int(last) - int(first) >= _MOST_NODES:
            raise _Wrong(f"{pattern!r}: the range {part!r} is empty, or longer than {_MOST_NODES}")
        for number in range(int(first), int(last) + 1):
            yield str(number).zfill(len(first))


def _expand_addresses(pattern: str | None, count: int) -> list[str | None]:
    if pattern is None:
        return [None] * count
    addresses = _expand(pattern)
    if len(addresses) != count:
        raise _Wrong(f"addr={pattern!r} stands for {len(addresses)} addresses, and there are {count} nodes on the line")
    for address in addresses:
        try:
            ipaddress.ip_address(address)
        except ValueError:
            raise _Wrong(f"addr={address!r}: expected an IP address") from None
    return list(addresses)


def _render_node(node: Node) -> str:
    words = [node.name]
    for key in _KEYS:
        value = getattr(node, key)
        if value is None or (key == "slots" and node.gpus is not None):
            continue
        text = ",".join(str(gpu) for gpu in value) if isinstance(value, tuple) else f"{value}"
        words.append(f"{key}={shlex.quote(text)}")
    words += [f"env.{name}={shlex.quote(value)}" for name, value in node.env.items()]
    return " ".join(words)
