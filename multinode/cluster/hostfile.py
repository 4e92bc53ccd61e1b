"""parse_hostfile: the text of a hostfile -> Cluster, and back. Untrusted input: an error names the line.

Hostfiles of DeepSpeed and Open MPI, PBS nodefiles and Horovod's lists are valid unchanged. `Node` bounds the values of
keys; the messages are here, for every reader of hosts.
"""

from __future__ import annotations

import contextlib
import difflib
import ipaddress
import itertools
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from decimal import Decimal
from typing import Any

import msgspec

from multinode.cluster.cluster import Cluster, Node
from multinode.cluster.hostfile_line import (
    ALIASES,
    KEYS,
    MOST_SLOTS,
    NAME,
    PASSED_OVER,
    WORD,
    WrongLine,
    is_address,
    join_settings,
    raw_words,
    refuse_port,
    split_words,
)
from multinode.decoding import convert
from multinode.errors import HostfileError
from multinode.secret_values import REDACTED, hides, redact_text
from multinode.units import format_count

_MAX_NODES = 4096
_HCA_VARIABLE = "NCCL_IB_HCA"
# Alternatives: for the whole node, and for each GPU in use.
_EXCLUSIVE = (("price", "price_gpu"), ("price_purchase", "price_purchase_gpu"))
BYTE_ORDER_MARK = "\ufeff"

# Horovod's `worker-0:4`, and an IPv6 address in brackets.
_WITH_SLOTS = re.compile(r"(?P<name>[^:\[\]]*(?:\[[^\]:]*\][^:\[\]]*)*):(?P<slots>\d{1,9})", re.ASCII)
_BRACKETED = re.compile(r"\[(?P<name>[^\[\]]*:[^\[\]]*)\](?::(?P<slots>\d{1,9}))?", re.ASCII)
_COMMA = re.compile(r",(?![^\[]*\])")
_NUMERIC = re.compile(r"[0-9]+(?:\.[0-9]*)+")
_LOCAL = "localhost"
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_WHOLE = re.compile(r"\d{1,9}", re.ASCII)
_PRICE = re.compile(r"\d+(?:\.\d+)?", re.ASCII)
_FIELD = re.compile(r"`\$\.(\w+)")
_BRACKETS = re.compile(r"\[([^\]]*)\]")
# Longer numbers would only cost time and memory.
_PART = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?", re.ASCII)
_LAST_NUMBER = re.compile(r"(.*?)(\d{1,9})(\D*)", re.ASCII | re.DOTALL)


class NodeList:
    """Collects the nodes of a text, in node-rank order; errors get the line number.

    Args:
        source: path of the text, for messages.
        is_typed: whether it is a list that was typed in place of a path, and the text itself is its source.
    """

    def __init__(self, source: str, *, is_typed: bool = False) -> None:
        self._source = source
        self._is_typed = is_typed
        self._nodes: list[Node] = []
        # By name, by what else a name is the same as, and by `addr=` and the address.
        self._lines: dict[str, tuple[str, Node]] = {}

    @contextlib.contextmanager
    def line(self, place: int | str) -> Iterator[None]:
        """While a line, or the host of this name, is being read.

        Raises:
            HostfileError: `source:place: what is wrong and what was expected`.
        """
        try:
            yield
        except WrongLine as wrong:
            where, hint = f"{self._source}:{place}", wrong.hint
            if self._is_typed:
                where = self._source
                # A list has no settings.
                hint = f"{hint}, in a file: --hosts FILE" if hint and "=" in hint else hint
            raise HostfileError(f"{where}: {wrong}", hint=hint) from None

    def add(self, place: int | str, node: Node) -> None:
        """One more, of this line or host.

        Raises:
            WrongLine: it exists, or there are too many.
        """
        once = "write one line per node; for several workers: slots=2"
        if self._is_typed:
            once = f"name each node once, with the number of its workers: {node.name}:2"
        if node.name in self._lines:
            where, _ = self._lines[node.name]
            raise WrongLine(f"duplicate node {node.name!r} ({where})", once)
        same = _canonical(node.name)
        if (first := self._lines.get(same)) is not None and not _share_nothing(node, first[1]):
            raise WrongLine(
                f"{node.name!r} is another name of {first[1].name!r} ({first[0]})",
                once,
            )
        if (first := self._lines.get(f"addr={node.addr}")) is not None and not _share_nothing(node, first[1]):
            raise WrongLine(
                f"addr={node.addr} is also the address of {first[1].name!r} in {first[0]}",
                "give each node its own address in the training network; to list a node's addresses: ip -br address",
            )
        if len(self._nodes) >= _MAX_NODES:
            raise WrongLine(f"there are more than {_MAX_NODES} nodes")
        where = "this list" if self._is_typed else f"line {place}" if isinstance(place, int) else place
        for name in (node.name, same, *([f"addr={node.addr}"] if node.addr is not None else [])):
            self._lines.setdefault(name, (where, node))
        self._nodes.append(node)

    def cluster(self) -> Cluster:
        """All of them.

        Raises:
            HostfileError: there is none.
        """
        if not self._nodes:
            hint = "write one node per line, for example: node1 slots=2"
            raise HostfileError(f"{self._source}:1: it lists no nodes", hint=hint)
        return Cluster(nodes=tuple(self._nodes), source=self._source)


def is_host_list(text: str) -> bool:
    """Whether a text in place of a hostfile's path names nodes: `a,b`, `node[1-4]`, `a:2`, `[2001:db8::1]`."""
    name = text.rpartition("@")[2]
    has_list = "," in text or _BRACKETS.search(text) is not None
    return "/" not in text and (has_list or _WITH_SLOTS.fullmatch(name) is not None)


def parse_host_list(text: str) -> tuple[Cluster, str]:
    """The nodes of a list as in `is_host_list`, and the hostfile that says the same.

    Blanks around a comma and a comma at the end have no meaning.
    """
    line = ",".join(part for part in map(str.strip, text.split(",")) if part) + "\n"
    return parse_hostfile(line, text, is_typed=True), line


def parse_hostfile(text: str, source: str = "hostfile", *, is_typed: bool = False) -> Cluster:
    """The nodes of a hostfile, in node-rank order.

    Args:
        text: of the hostfile.
        source: its path, for messages.
        is_typed: as for `NodeList`.

    Raises:
        HostfileError: a line is invalid, or there is none.
    """
    listed = NodeList(source, is_typed=is_typed)
    # Not splitlines(), which also splits at form feeds and other characters that editors do not count.
    lines = [line.removesuffix("\r") for line in text.removeprefix(BYTE_ORDER_MARK).split("\n")]
    counts = count_slots(text)
    for number, line in enumerate(lines, start=1):
        with listed.line(number):
            for node in _parse_line(line):
                if counts is None:
                    listed.add(number, node)
                elif slots := counts.pop(node.name, 0):
                    # A repeated name keeps the place of its first line.
                    listed.add(number, make_node(node.name, {"slots": str(slots)}, {}))
    return listed.cluster()


def count_slots(text: str) -> Counter[str] | None:
    """How often each name occurs in a PBS nodefile or a list such as `a,a,b,b`, once per slot; None for others.

    Open MPI reads such files and lists in the same way. Without repeated names, slots are not specified.
    """
    lines = text.removeprefix(BYTE_ORDER_MARK).split("\n")
    names = [name.strip() for line in lines if line.strip() for name in line.split(",")]
    counts = Counter(names)
    return counts if len(counts) < len(names) and all(NAME.fullmatch(name) for name in counts) else None


def render_hostfile(cluster: Cluster) -> str:
    """The cluster as a hostfile that parses to the same."""
    return "".join(_render_node(node) + "\n" for node in cluster.nodes)


def redact_hostfile(text: str) -> str:
    """The text of a hostfile with secret values replaced."""
    return "\n".join(redact_text(WORD.sub(_redact_word, line)) for line in text.split("\n"))


def check_variable(name: str) -> bool:
    """Whether an environment variable may have this name in every shell."""
    return _VARIABLE.fullmatch(name) is not None


def expand_ranges(pattern: str, limit: int) -> list[str]:
    """The names that a pattern with ranges in brackets stands for; a number keeps the zeros of its range's first.

    Raises:
        ValueError: a range is invalid, or there would be more than `limit` names; the message names the pattern.
    """
    pieces = _BRACKETS.split(pattern)
    if any("[" in piece or "]" in piece for piece in pieces[::2]):
        raise ValueError(f"{pattern!r}: unmatched bracket")
    names = [""]
    for index, piece in enumerate(pieces):
        # re.split alternates between what stands outside the brackets and what stands inside.
        choices = [piece] if index % 2 == 0 else _numbers(pattern, piece, limit)
        if len(names) * len(choices) > limit:
            raise ValueError(_too_many(pattern, limit))
        names = [name + choice for name in names for choice in choices]
    return names


def fold_ranges(names: Sequence[str]) -> str:
    """Names as few comma-separated patterns, which expand to the same names in the same order."""
    patterns: list[str] = []
    for (before, after, numbered), group in itertools.groupby(names, key=_around_number):
        same = list(group)
        if not numbered:
            patterns += same
            continue
        numbers = [name[len(before) : len(name) - len(after)] for name in same]
        ranges = ["-".join(ends) for ends in _fold_numbers(numbers)]
        patterns.append(before + (ranges[0] if len(same) == 1 else f"[{','.join(ranges)}]") + after)
    return ",".join(patterns)


def fold_numbers(numbers: Sequence[int]) -> str:
    """Numbers for a sentence, three or more consecutive ones as a range: `0, 1`, `0-127`, `1, 4-6`."""
    ranges = _fold_numbers([str(number) for number in numbers])
    return ", ".join(("-" if int(ends[-1]) - int(ends[0]) > 1 else ", ").join(ends) for ends in ranges)


def _around_number(name: str) -> tuple[str, str, bool]:
    match = _LAST_NUMBER.fullmatch(name)
    return (match[1], match[3], True) if match is not None else (name, "", False)


def _fold_numbers(numbers: Sequence[str]) -> list[list[str]]:
    """The first and the last of consecutive numbers; one that stands alone is both."""
    ranges: list[list[str]] = []
    for number in numbers:
        # A range keeps the width of its first number.
        if ranges and number == str(int(ranges[-1][-1]) + 1).zfill(len(ranges[-1][0])):
            ranges[-1][1:] = [number]
        else:
            ranges.append([number])
    return ranges


def _redact_word(word: re.Match[str]) -> str:
    key, equals, value = "".join(shlex.split(word[0])).partition("=")
    return f"{key}='{REDACTED}'" if equals and hides(key, value) else word[0]


def _parse_line(line: str) -> Iterator[Node]:
    words = split_words(line)
    if not words:
        return
    raw = next(raw_words(line))[0]
    if "\\" in raw:
        user = raw.rpartition("@")[0]
        hint = f"write {raw.rpartition('@')[2]} user='{user}'" if user else "use a host name, an address or an alias"
        raise WrongLine(f"the name {raw!r} contains a backslash, which a shell would drop", hint)
    try:
        yield from _read_nodes(words)
    except WrongLine:
        from multinode.cluster.other_lines import refuse_other_forms

        refuse_other_forms(words)
        raise


def _read_nodes(words: list[str]) -> Iterator[Node]:
    texts, env = _read_settings(words[1:])
    for name in _COMMA.split(words[0]):
        pattern, settings_text = _read_name(name.strip())
        twice = next((key for key in settings_text if key in texts), None)
        if twice is not None:
            noun = "the user is" if twice == "user" else "the workers are"
            raise WrongLine(f"{noun} set both in {name!r} and in {twice}=", "keep only one")
        node = _decode(texts | settings_text, env)
        names = _expand(pattern)
        for each, addr in zip(names, _expand_addresses(node.addr, len(names)), strict=True):
            _check_name(each)
            yield msgspec.structs.replace(node, name=each, addr=addr)


def _read_name(text: str) -> tuple[str, dict[str, str]]:
    """The pattern of a name, and the keys in it: `alice@node1`, `worker-0:4`, `[2001:db8::1]`."""
    user, at, rest = text.rpartition("@")
    settings = {"user": user} if at else {}
    match = _BRACKETED.fullmatch(rest) or _WITH_SLOTS.fullmatch(rest)
    if match is None:
        return rest, settings
    if match["slots"] is not None:
        refuse_port(f"{user}{at}{match['name']}", match["slots"], rest)
        settings["slots"] = match["slots"]
    return match["name"], settings


def make_node(name: str, texts: dict[str, str], env: dict[str, str]) -> Node:
    """A node of this name, from the texts of its keys."""
    _check_name(name)
    return msgspec.structs.replace(_decode(texts, env), name=name)


def _read_settings(settings: list[str]) -> tuple[dict[str, str], dict[str, str]]:
    texts: dict[str, str] = {}
    env: dict[str, str] = {}
    for setting in join_settings(settings):
        key, equals, text = setting.partition("=")
        if not equals:
            raise WrongLine(f"{setting!r} is not key=value", "write one node per line; quote values with spaces")
        key = ALIASES.get(key, key)
        name = key.removeprefix("env.")
        if key in PASSED_OVER:
            continue
        if name != key and not check_variable(name):
            raise WrongLine(f"{key!r}: {name!r} is not a valid variable name", "use letters, digits and _")
        if name == key and key not in KEYS:
            near = difflib.get_close_matches(key, KEYS, n=1)
            meant = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(KEYS)}, env.NAME"
            raise WrongLine(
                f"unknown key {key!r}: {meant}", f"the keys are {', '.join(KEYS)}, env.NAME" if near else None
            )
        given = texts if name == key else env
        if name in given:
            raise WrongLine(f"{key}= is given twice")
        given[name] = text
    for first, other in _EXCLUSIVE:
        if first in texts and other in texts:
            raise WrongLine(
                f"{first}= and {other}= are both given", "give either a price of the node or a price per GPU"
            )
    if "hca" in texts and _HCA_VARIABLE in env:
        raise WrongLine(f"hca= and env.{_HCA_VARIABLE}= are both given", "keep only one")
    return texts, env


def _decode(texts: dict[str, str], env: dict[str, str]) -> Node:
    values = {key: _plain(key, text) for key, text in texts.items()}
    try:
        node = convert({"name": "", "env": env, **values}, Node)
    except msgspec.ValidationError as error:
        match = _FIELD.search(str(error))
        raise _unexpected(match[1] if match is not None else "", texts) from None
    for key, names in (("ifname", node.ifnames), ("hca", node.hcas)):
        if len(set(names)) != len(names):
            raise _unexpected(key, texts)
    if node.gpus is None:
        return node
    if len(set(node.gpus)) != len(node.gpus):
        raise _unexpected("gpus", texts)
    if node.slots not in {None, len(node.gpus)}:
        raise WrongLine(f"slots={node.slots} contradicts the {len(node.gpus)} ids in gpus=", "remove slots=")
    return msgspec.structs.replace(node, slots=len(node.gpus))


def _plain(key: str, text: str) -> Any:
    if key == "gpus":
        return [number for part in text.split(",") for number in _read_range(part)]
    if key in {"slots", "port", "slurm_job"} and _WHOLE.fullmatch(text):
        return int(text)
    return float(text) if key.startswith("price") and _PRICE.fullmatch(text) else text


def _read_range(text: str) -> Sequence[int | str]:
    """The numbers of `7` or `0-7`; any other text as it is."""
    match = _PART.fullmatch(text)
    first, last = (int(match[1]), int(match[2] or match[1])) if match is not None else (1, 0)
    return range(first, last + 1) if 0 <= last - first < MOST_SLOTS else [text]


def _unexpected(key: str, texts: dict[str, str]) -> WrongLine:
    return WrongLine(f"{key}={texts[key]!r}: expected {KEYS[key].expected}", KEYS[key].hint)


def _check_name(name: str) -> None:
    if ":" in name:
        if not is_address(name):
            raise WrongLine(
                f"{name!r} is neither a name nor an IPv6 address", ("set a port with port=, workers with slots=")
            )
    elif not NAME.fullmatch(name):
        raise WrongLine(
            f"{name!r} is not a node's name: expected a host name, an address, or an alias of the SSH configuration"
        )
    elif _NUMERIC.fullmatch(name) and not is_address(name):
        raise WrongLine(f"{name!r} is not an IPv4 address", "use four numbers from 0 to 255, without leading zeros")


def _canonical(name: str) -> str:
    if not is_address(name):
        return _LOCAL if name.lower() == _LOCAL else f"host {name.lower()}"
    address = ipaddress.ip_address(name)
    return _LOCAL if address.is_loopback else f"host {address}"


def _share_nothing(node: Node, other: Node) -> bool:
    return node.gpus is not None and other.gpus is not None and not set(node.gpus) & set(other.gpus)


def _expand(pattern: str) -> list[str]:
    try:
        return expand_ranges(pattern, _MAX_NODES)
    except ValueError as error:
        raise WrongLine(str(error)) from None


def _expand_addresses(pattern: str | None, count: int) -> list[str | None]:
    if pattern is None:
        return [None] * count
    bracketed = _BRACKETED.fullmatch(pattern)
    addresses = [bracketed["name"]] if bracketed is not None and bracketed["slots"] is None else _expand(pattern)
    if len(addresses) != count:
        raise WrongLine(
            f"addr={pattern!r} has {format_count(len(addresses), 'IP')} for {format_count(count, 'node')}",
            "use a range of the same length, as in node[1-2] addr=10.0.0.[11-12]",
        )
    for address in addresses:
        if not is_address(address):
            raise _unexpected("addr", {"addr": address})
    # The canonical form of an IPv6 address, as nodes report it.
    return [str(ipaddress.ip_address(address)) for address in addresses]


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


def _numbers(pattern: str, text: str, limit: int) -> list[str]:
    numbers: list[str] = []
    for part in text.split(","):
        match = _PART.fullmatch(part)
        if match is None:
            raise ValueError(
                f"{pattern!r}: {part!r} is not a number or a range of numbers, as in node[01-16] or node[1,3,5-7]"
            )
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first):
            raise ValueError(f"{pattern!r}: the range {part!r} ends before it starts")
        if len(numbers) + int(last) - int(first) >= limit:
            raise ValueError(_too_many(pattern, limit))
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers


def _too_many(pattern: str, limit: int) -> str:
    return f"{pattern!r} expands to more than {limit} names"
