"""A line of a hostfile: its words, the keys that it may have, and what is a name and what an address."""

from __future__ import annotations

import ipaddress
import re
import shlex
import unicodedata
from collections.abc import Iterator
from typing import NamedTuple

# A word as in a shell: bare characters, escapes and quotes.
WORD = re.compile(r"""(?:[^\s'"\\]|\\.|'[^']*'|"(?:[^"\\]|\\.)*")+""")
NAME = re.compile(r"[A-Za-z0-9_.][A-Za-z0-9_.-]{0,254}")
_ADDRESS = re.compile(r"[0-9A-Fa-f:.]+(?:%[A-Za-z0-9_.-]+)?")
_MOST_CHARACTERS = 1 << 16
_SSH_PORT = 22
MOST_SLOTS = 1024


class Key(NamedTuple):
    """What a key accepts, in words, and a remark for when it is wrong."""

    expected: str
    hint: str | None = None


_ONE_CURRENCY = "use a plain number; the currency is the same for all nodes"
# In the order of a written hostfile.
KEYS = {
    "slots": Key("a number of workers, 1 to 1024", "to leave a node out, remove its line"),
    "gpus": Key("distinct GPU ids such as 6,7 or 0-7", "use the numbers of nvidia-smi -L on the node"),
    "addr": Key("an IP address", "use this node's address in the training network"),
    "ifname": Key("distinct names of network interfaces such as ens1f0,ens1f1", "use the names of `ip addr`"),
    "hca": Key("distinct names of RDMA devices such as mlx5_0,mlx5_1:1", "use the names of `rdma link`"),
    "user": Key("a user's name"),
    "port": Key("a port, 1 to 65535"),
    "key": Key("the path of a private key", "use a path on the controller"),
    "jump": Key("one jump host, [user@]host[:port]", "for several jump hosts, use the SSH configuration"),
    "ssh_config": Key("the path of an SSH configuration", "use a path on the controller"),
    "slurm_job": Key("the id of a Slurm job", "use an allocation that contains the node; --hosts auto writes its id"),
    "python": Key("the path of an interpreter", "use a path on the node"),
    "workdir": Key("the path of a directory", "use a path on the node"),
    "price": Key("a price per hour such as 0.35", _ONE_CURRENCY),
    "price_gpu": Key("a price per GPU-hour such as 0.35", _ONE_CURRENCY),
    "price_purchase": Key("a price to buy the node such as 15000", _ONE_CURRENCY),
    "price_purchase_gpu": Key("a price to buy one GPU such as 15000", _ONE_CURRENCY),
}
# Open MPI's names.
ALIASES = {"count": "slots", "cpu": "slots", "username": "user", "user_name": "user", "user-name": "user"}
# Open MPI's limit on oversubscription, not the number of workers.
PASSED_OVER = frozenset(
    f"{first}{between}{second}"
    for noun in ("slots", "cpu", "cpus", "count")
    for first, second in (("max", noun), (noun, "max"))
    for between in "_-"
)


class WrongLine(Exception):
    """What is wrong with a line, before its line number is known."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


def split_words(line: str) -> list[str]:
    """The words of a line. `#` begins a comment where a word could begin, as in a shell; inside one it is itself."""
    if len(line) > _MOST_CHARACTERS:
        raise WrongLine(f"it is longer than {_MOST_CHARACTERS} characters")
    odd = next((char for char in line if not char.isprintable() and char != "\t"), None)
    if odd is not None:
        blank = unicodedata.category(odd) == "Zs"
        hint = "replace it with an ordinary space" if blank else "use only printable characters, spaces and tabs"
        raise WrongLine(f"invalid character U+{ord(odd):04X}", hint)
    return [part for word in raw_words(line) for part in shlex.split(word[0])]


def raw_words(line: str) -> Iterator[re.Match[str]]:
    """The words of a line before its comment, with their quotes.

    Raises:
        WrongLine: a quote is not closed.
    """
    at = _skip_blanks(line, 0)
    while at < len(line) and line[at] != "#" and not line.startswith("//", at):
        match = WORD.match(line, at)
        end = match.end() if match else at
        if match is None or (end < len(line) and not line[end].isspace()):
            wrong = "a quote is not closed, or the line ends with a backslash"
            raise WrongLine(wrong, "quote values as in a shell")
        yield match
        at = _skip_blanks(line, end)


def _skip_blanks(line: str, at: int) -> int:
    while at < len(line) and line[at].isspace():
        at += 1
    return at


def join_settings(settings: list[str]) -> Iterator[str]:
    """The settings of a line without spaces around the `=` of a key; a variable may be empty, and stays one word."""
    keys = {*KEYS, *ALIASES, *PASSED_OVER}
    at = 0
    while at < len(settings):
        word, at = settings[at], at + 1
        if word in keys and at < len(settings) and settings[at].startswith("="):
            word, at = word + settings[at], at + 1
        if word.removesuffix("=") in keys and word.endswith("=") and at < len(settings) and "=" not in settings[at]:
            word, at = word + settings[at], at + 1
        yield word


def refuse_port(name: str, number: str, text: str) -> None:
    """Refuse a number behind a name, as they stand in the text, that may be a port.

    Raises:
        WrongLine: it may be.
    """
    if int(number) == _SSH_PORT or int(number) > MOST_SLOTS:
        raise WrongLine(
            f"{number} in {text!r} may be a port or a number of workers",
            f"write {name} port={number}, or {name} slots={number}",
        )


def is_name(text: str) -> bool:
    """Whether a node may have this name, an IPv4 address included."""
    return NAME.fullmatch(text) is not None


def is_address(text: str) -> bool:
    """Whether a name is an IP address of one machine."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    # The zone of an IPv6 address is an interface; the library accepts anything.
    return _ADDRESS.fullmatch(text) is not None and not address.is_unspecified
