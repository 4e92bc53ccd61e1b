"""The keys of a hostfile: what each may hold, and how to say so. Knows nothing of lines, names or files."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

__all__ = ["EXCLUSIVE", "KEYS", "Key", "check_variable", "parse_value"]

_MOST_SLOTS = 1024
_MOST_GPU = 1023
_MOST_PORT = 65535

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_USER = re.compile(r"[^\s-]\S*")
# The kernel's limit is 15 characters. `^`, `=` and `,` are NCCL's syntax: the plan writes that itself.
_IFNAME = re.compile(r"[A-Za-z0-9_.][A-Za-z0-9_.:@-]{0,14}")
_JUMP = re.compile(r"(?:[^\s@-][^\s@]*@)?[A-Za-z0-9_.:][A-Za-z0-9_.:%-]*")
_PRICE = re.compile(r"\d+(?:\.\d+)?", re.ASCII)
_ONE_CURRENCY = "a number alone: all nodes have the same currency"


class Key(NamedTuple):
    """A key.

    Attributes:
        parse: text to value; raises ValueError.
        expected: what it may hold, for messages.
        hint: what else to know when it is wrong.
    """

    parse: Callable[[str], Any]
    expected: str
    hint: str | None = None


def parse_value(key: str, text: str) -> Any:
    """The value of a known key.

    Raises:
        ValueError: it is not what the key may hold.
    """
    return KEYS[key].parse(text)


def check_variable(name: str) -> bool:
    """Whether an environment variable can have this name in every shell."""
    return _VARIABLE.fullmatch(name) is not None


def _text(text: str) -> str:
    # What begins with `-` would be taken for an option by the first program that is given it.
    if not text.strip() or text.startswith("-"):
        raise ValueError
    return text


def _pattern(pattern: re.Pattern[str]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if not pattern.fullmatch(text):
            raise ValueError
        return text

    return parse


def _whole(least: int, most: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isascii() or not text.isdigit() or not least <= int(text) <= most:
            raise ValueError
        return int(text)

    return parse


def _gpus(text: str) -> tuple[int, ...]:
    gpus = tuple(_whole(0, _MOST_GPU)(part) for part in text.split(","))
    if len(set(gpus)) != len(gpus):
        raise ValueError
    return gpus


def _price(text: str) -> float:
    if not _PRICE.fullmatch(text) or not math.isfinite(float(text)):
        raise ValueError
    return float(text)


# In the order in which a hostfile is written.
KEYS: dict[str, Key] = {
    "slots": Key(_whole(1, _MOST_SLOTS), f"a number of workers, 1 to {_MOST_SLOTS}", "a node without workers: no line"),
    "gpus": Key(_gpus, "GPU ids such as 6,7, none of them twice", "as nvidia-smi -L numbers them on the node"),
    "addr": Key(_text, "an IP address", "of this node, on the network that the training uses"),
    "ifname": Key(_pattern(_IFNAME), "the name of one network interface", "as `ip addr` names it on the node"),
    "user": Key(_pattern(_USER), "a user's name"),
    "port": Key(_whole(1, _MOST_PORT), f"a port, 1 to {_MOST_PORT}"),
    "key": Key(_text, "the path of a private key", "on the controller"),
    "jump": Key(_pattern(_JUMP), "one jump host, [user@]host[:port]", "several go into the SSH configuration"),
    "ssh_config": Key(_text, "the path of an SSH configuration", "on the controller"),
    "python": Key(_text, "the path of an interpreter", "on the node"),
    "workdir": Key(_text, "the path of a directory", "on the node"),
    "price": Key(_price, "a price per hour such as 0.35", _ONE_CURRENCY),
    "price_gpu": Key(_price, "a price per hour and GPU such as 0.35", _ONE_CURRENCY),
    "price_purchase": Key(_price, "a price to buy the node such as 15000", _ONE_CURRENCY),
    "price_purchase_gpu": Key(_price, "a price to buy one GPU such as 15000", _ONE_CURRENCY),
}

# Two ways to say one thing: for the whole node, and for each GPU in use.
EXCLUSIVE = (("price", "price_gpu"), ("price_purchase", "price_purchase_gpu"))
