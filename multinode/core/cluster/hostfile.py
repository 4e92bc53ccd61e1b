"""parse_hostfile: the text of a hostfile -> Cluster, and back. Untrusted input: a wrong line is an error that names it.

What a key may hold stands in hostfile_keys.py.
"""

from __future__ import annotations

import ipaddress
import re
import shlex
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from multinode.core.cluster.cluster import Cluster, Node
from multinode.core.cluster.hostfile_keys import EXCLUSIVE, KEYS, check_variable, parse_value
from multinode.core.cluster.ranges import expand_ranges
from multinode.core.text.secret_values import REDACTED, hides, redact_text
from multinode.errors import HostfileError

__all__ = ["parse_hostfile", "redact_hostfile", "render_hostfile"]

# A word as a shell has it: bare characters, escapes and quotes side by side.
_WORD = re.compile(r"""(?:[^\s'"\\]|\\.|'[^']*'|"(?:[^"\\]|\\.)*")+""")
_NAME = re.compile(r"[A-Za-z0-9_.][A-Za-z0-9_.-]{0,254}")
_ADDRESS = re.compile(r"[0-9A-Fa-f:.]+(?:%[A-Za-z0-9_.-]+)?")
_MOST_NODES = 4096
_MOST_CHARACTERS = 1 << 16
_BYTE_ORDER_MARK = "\ufeff"

# Open MPI's limit on oversubscription: it says nothing about how many workers the user wants.
_PASSED_OVER = frozenset({"max_slots", "max-slots"})


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
    # Not splitlines(): that also splits at form feeds and their like, which no editor counts as lines.
    for number, line in enumerate(text.removeprefix(_BYTE_ORDER_MARK).split("\n"), start=1):
        try:
            for node in _parse_line(line.removesuffix("\r")):
                _check_new(node, lines)
                lines[node.name] = number
                nodes.append(node)
        except _Wrong as wrong:
            raise HostfileError(f"{source}:{number}: {wrong}", hint=wrong.hint) from None
    if not nodes:
        raise HostfileError(f"{source}:1: it names no node", hint="one node a line, for example: node1 slots=2")
    return Cluster(nodes=tuple(nodes), source=source)


def render_hostfile(cluster: Cluster) -> str:
    """The cluster as a hostfile that reads back the same."""
    return "".join(_render_node(node) + "\n" for node in cluster.nodes)


def redact_hostfile(text: str) -> str:
    """The text of a hostfile, which reads back the same but for the values of its secrets."""
    return "\n".join(redact_text(_WORD.sub(_redact_word, line)) for line in text.split("\n"))


def _redact_word(word: re.Match[str]) -> str:
    key, equals, value = "".join(shlex.split(word[0])).partition("=")
    return f"{key}='{REDACTED}'" if equals and hides(key, value) else word[0]


def _check_new(node: Node, lines: dict[str, int]) -> None:
    if node.name in lines:
        raise _Wrong(
            f"the node {node.name!r} stands on line {lines[node.name]} already",
            "one line a node; several workers on it are slots=2",
        )
    if len(lines) >= _MOST_NODES:
        raise _Wrong(f"there are more than {_MOST_NODES} nodes")


def _parse_line(line: str) -> Iterator[Node]:
    words = _split(line)
    if not words:
        return
    name, *settings = words
    if "=" in name:
        raise _Wrong(f"it begins with {name!r}, and a node's name was expected", "for example: node1 slots=2")
    values = _parse_settings(settings)
    user, at, pattern = name.rpartition("@")
    if at:
        if "user" in values:
            raise _Wrong(f"the user stands both in {name!r} and in user=", "keep one of them")
        values["user"] = _value("user", user)
    names = _expand(pattern)
    addrs = _expand_addresses(values.pop("addr", None), len(names))
    for each, addr in zip(names, addrs, strict=True):
        _check_name(each)
        yield Node(name=each, addr=addr, **values)


def _split(line: str) -> list[str]:
    """The words of a line. `#` begins a comment where a word could begin, as in a shell; inside one it is itself."""
    if len(line) > _MOST_CHARACTERS:
        raise _Wrong(f"it is longer than {_MOST_CHARACTERS} characters")
    odd = next((char for char in line if not char.isprintable() and char != "\t"), None)
    if odd is not None:
        raise _Wrong(f"the character U+{ord(odd):04X} stands in it", "only printable characters, spaces and tabs")
    words: list[str] = []
    at = _skip_blanks(line, 0)
    while at < len(line) and line[at] != "#":
        match = _WORD.match(line, at)
        end = match.end() if match else at
        if match is None or (end < len(line) and not line[end].isspace()):
            raise _Wrong("a quote is not closed, or a backslash stands at its end", "values are quoted as in a shell")
        words += shlex.split(match[0])
        at = _skip_blanks(line, end)
    return words


def _skip_blanks(line: str, at: int) -> int:
    while at < len(line) and line[at].isspace():
        at += 1
    return at


def _parse_settings(settings: list[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    env: dict[str, str] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals:
            raise _Wrong(f"{setting!r} is not key=value", "no spaces around =; a value with spaces is quoted")
        if key.startswith("env."):
            _add_variable(env, key, text)
        elif key in KEYS:
            _add(values, key, _value(key, text))
        elif key not in _PASSED_OVER:
            raise _Wrong(f"unknown key {key!r}: expected one of {', '.join(KEYS)}, env.NAME")
    if env:
        values["env"] = env
    for one, other in EXCLUSIVE:
        if one in values and other in values:
            raise _Wrong(f"{one}= and {other}= are both given", "a price of the whole node, or of each of its GPUs")
    return _settle_slots(values)


def _settle_slots(values: dict[str, Any]) -> dict[str, Any]:
    gpus = values.get("gpus")
    if gpus is not None and values.setdefault("slots", len(gpus)) != len(gpus):
        raise _Wrong(f"slots={values['slots']} contradicts the {len(gpus)} ids of gpus=", "leave slots= out")
    return values


def _add(values: dict[str, Any], key: str, value: Any) -> None:
    if key in values:
        raise _Wrong(f"{key}= is given twice")
    values[key] = value


def _add_variable(env: dict[str, str], key: str, text: str) -> None:
    name = key.removeprefix("env.")
    if not check_variable(name):
        raise _Wrong(f"{key!r}: {name!r} cannot name an environment variable", "letters, digits and _")
    if name in env:
        raise _Wrong(f"{key}= is given twice")
    env[name] = text


def _value(key: str, text: str) -> Any:
    try:
        return parse_value(key, text)
    except ValueError:
        raise _Wrong(f"{key}={text!r}: expected {KEYS[key].expected}", KEYS[key].hint) from None


def _check_name(name: str) -> None:
    if ":" in name:
        if not _is_address(name):
            raise _Wrong(f"{name!r} is neither a name nor an IPv6 address", "a port is port=, workers are slots=")
    elif not _NAME.fullmatch(name):
        raise _Wrong(
            f"{name!r} is not a node's name: expected a host name, an address, or an alias of the SSH configuration"
        )


def _is_address(text: str) -> bool:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    # What follows the % of an IPv6 address is an interface; the library takes anything for one.
    return _ADDRESS.fullmatch(text) is not None and not address.is_unspecified


def _expand(pattern: str) -> list[str]:
    try:
        return expand_ranges(pattern, _MOST_NODES)
    except ValueError as error:
        raise _Wrong(str(error)) from None


def _expand_addresses(pattern: str | None, count: int) -> list[str | None]:
    """The address of each node of a line: as many as there are nodes, or none."""
    if pattern is None:
        return [None] * count
    addresses = _expand(pattern)
    if len(addresses) != count:
        raise _Wrong(
            f"addr={pattern!r} gives {len(addresses)} address(es) to {count} node(s)",
            "a range with as many, as in node[1-2] addr=10.0.0.[11-12]",
        )
    for address in addresses:
        if not _is_address(address):
            raise _Wrong(f"addr={address!r}: expected {KEYS['addr'].expected}", KEYS["addr"].hint)
    return list(addresses)


def _render_node(node: Node) -> str:
    words = [node.name]
    for key in KEYS:
        value = getattr(node, key)
        if value is None or (key == "slots" and node.gpus is not None):
            continue
        words.append(f"{key}={shlex.quote(_render_value(value))}")
    words += [f"env.{name}={shlex.quote(value)}" for name, value in node.env.items()]
    return " ".join(words)


def _render_value(value: str | float | tuple[int, ...]) -> str:
    if isinstance(value, tuple):
        return ",".join(str(gpu) for gpu in value)
    if isinstance(value, float):
        return f"{Decimal(repr(value)):f}"  # str() would write a small price as 1e-07
    return str(value)
