"""parse_duration, parse_clock: how long something may take or took, as people and logs write it, in seconds."""

from __future__ import annotations

import re

__all__ = ["parse_clock", "parse_duration"]

_PARTS = re.compile(
    r"(?:(?P<d>\d{1,6}(?:\.\d{1,6})?)d)?\s*(?:(?P<h>\d{1,6}(?:\.\d{1,6})?)h)?\s*"
    r"(?:(?P<m>\d{1,6}(?:\.\d{1,6})?)m(?:in)?)?\s*(?:(?P<s>\d{1,9}(?:\.\d{1,6})?)s)?",
    re.ASCII | re.IGNORECASE,
)
_SECONDS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
# `3:35:20` and `28:04` as tqdm and the Trainer print them: two parts are minutes and seconds.
_CLOCK = re.compile(r"(?:(?P<h>\d{1,6}):)?(?P<m>\d{1,6}):(?P<s>\d{2}(?:\.\d{1,6})?)", re.ASCII)
_SIXTY = 60


def parse_duration(text: str) -> float:
    """A time such as `8h`, `90m`, `1h30m`, `2d`, `45s`, in seconds.

    Raises:
        ValueError: it is none, or zero; the message says how to write one.
    """
    match = _PARTS.fullmatch(text.strip())
    found = match.groupdict() if match is not None else {}
    seconds = sum(float(found[unit]) * size for unit, size in _SECONDS.items() if found.get(unit))
    if not seconds:
        raise ValueError(f"{text!r} is not a time; write it as 8h, 90m, 1h30m or 2d")
    return seconds


def parse_clock(text: str) -> float:
    """What a clock showed: `h:mm:ss` or `mm:ss`, in seconds.

    Raises:
        ValueError: it is neither.
    """
    match = _CLOCK.fullmatch(text.strip())
    minutes = int(match["m"]) if match is not None else 0
    if match is None or float(match["s"]) >= _SIXTY or (match["h"] is not None and minutes >= _SIXTY):
        raise ValueError(f"{text!r} is not a time; write it as 3:35:20 (hours), 28:04 (minutes) or in seconds")
    return int(match["h"] or 0) * 3600 + minutes * 60 + float(match["s"])
