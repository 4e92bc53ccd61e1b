"""Values of faults as a command line has them: a range of ports, how far a clock is off, a name and its value."""

from __future__ import annotations

import re

__all__ = ["parse_offset", "parse_pair", "parse_ports"]

_OFFSET = re.compile(r"(?P<number>[+-]\d+(?:\.\d+)?)(?P<unit>s|m|h|d)")
_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def parse_ports(text: str) -> tuple[int, int]:
    """One port or a range, `29500` or `30000-60999`, as its first and its last.

    Raises:
        ValueError: it is neither.
    """
    first, _, last = text.partition("-")
    if not (first.isdecimal() and (last or first).isdecimal()):
        raise ValueError(f"{text!r} is not a range of ports; write it as 29500 or 30000-60999")
    return int(first), int(last or first)


def parse_offset(text: str) -> float:
    """How far a clock is off, `+90s`, `-5m`, `+2h` or `+1d`, in seconds.

    Raises:
        ValueError: it is not that.
    """
    match = _OFFSET.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} does not say how far a clock is off; write it as +90s, -5m, +2h or +1d")
    return float(match["number"]) * _UNIT_S[match["unit"]]


def parse_pair(text: str) -> tuple[str, str]:
    """`NAME=VALUE` as its two parts.

    Raises:
        ValueError: there is no name, or no `=`.
    """
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise ValueError(f"{text!r} has no name and value; write it as NAME=VALUE")
    return name, value
