"""Units: parsing what people write (`1gbit`, `64M`, `1h30m`) and printing numbers. GB is 1e9, GiB is 2**30."""

from __future__ import annotations

import math
import re
import signal
from collections.abc import Sequence

# What of the line rate is left for the payload of a TCP stream (IPv4, timestamps): each frame of `mtu` bytes carries
# mtu - 52 bytes and takes mtu + 38 on the wire (Ethernet header, FCS, preamble, gap).
BITS_PER_BYTE = 8
MIB, GIB = 1 << 20, 1 << 30
ETHERNET_MTU = 1500
_TCP_IP_HEADER_BYTES = 52
_ETHERNET_FRAMING_BYTES = 38

# An upper-case B, and bps as tc reads it, would be bytes.
_RATE = re.compile(
    r"(?P<number>\d+(?:\.\d+)?)\s*(?:(?P<times>[kmgtKMGT]?)(?i:bit)(?:/s)?|(?P<short>[kmgtKMGT])(?:b(?:/s)?)?)?"
)
_RATE_GBIT = {"": 1e-9, "k": 1e-6, "m": 1e-3, "g": 1.0, "t": 1e3}
_SIZE = re.compile(r"(?P<number>\d+)(?P<unit>[kmg]?)i?b?", re.IGNORECASE)
_SIZE_BYTES = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_DURATION = re.compile(
    r"(?:(?P<d>\d{1,6}(?:\.\d{1,6})?)d)?\s*(?:(?P<h>\d{1,6}(?:\.\d{1,6})?)h)?\s*"
    r"(?:(?P<m>\d{1,6}(?:\.\d{1,6})?)m(?:in)?)?\s*(?:(?P<s>\d{1,9}(?:\.\d{1,6})?)s)?",
    re.ASCII | re.IGNORECASE,
)
# `3:35:20` and `28:04` as tqdm and the Trainer print them: two parts are minutes and seconds.
_CLOCK = re.compile(r"(?:(?P<h>\d{1,6}):)?(?P<m>\d{1,6}):(?P<s>\d{2}(?:\.\d{1,6})?)", re.ASCII)
_MOST_NICS = 64
_SLOWEST_GBIT_PER_S, _FASTEST_GBIT_PER_S = 1e-4, 1e5
UNKNOWN = "-"
"""A figure that is unknown, in a table."""
# Rounded to three digits, 0.9995 is 1.00; below the least, decimals would fill a table.
_ONE, _LEAST = 0.9995, 1e-6
_MINUTE_S = 60
_HOUR_S = 3600
_DURATION_S = {"d": 86400, "h": _HOUR_S, "m": _MINUTE_S, "s": 1}
_MOST_FIGURE, _MOST_DECIMALS = 1e15, 9
_CENTURY_S = 100 * 365 * 86400


def parse_rate(text: str) -> float:
    """A link rate such as `100mbit`, `2.5gbit`, `100G`, `25 Gb/s`, in Gbit/s: decimal multiples of bits per second.

    A bare number is in Gbit/s.

    Raises:
        ValueError: it is not a rate, or it is zero; the message says how to write one.
    """
    match = _RATE.fullmatch(text.strip())
    if match is None or float(match["number"]) == 0:
        raise ValueError(f"{text!r} is not a link rate; write it as 100mbit, 1gbit or 2.5gbit")
    times = match["short"] if match["times"] is None else match["times"]
    return float(match["number"]) * (1.0 if times is None else _RATE_GBIT[times.lower()])


def is_link_rate(gbit_per_s: float) -> bool:
    """Whether a link can be that fast: from 100 kbit/s to 100 Tbit/s."""
    return _SLOWEST_GBIT_PER_S <= gbit_per_s <= _FASTEST_GBIT_PER_S


def parse_nics(text: str) -> tuple[float, ...]:
    """The rates of a node's NICs, in Gbit/s: `200gbit`, or of four `4x200gbit`.

    Raises:
        ValueError: it is neither; the message says how to write it.
    """
    count, cross, rate = text.strip().lower().rpartition("x")
    if cross and not (count.strip().isdecimal() and 0 < int(count) <= _MOST_NICS):
        raise ValueError(f"{text!r} is not a NIC rate; write it as 100gbit or 4x200gbit")
    return (parse_rate(rate),) * (int(count) if cross else 1)


def parse_size(text: str) -> int:
    """A message size such as `8`, `64K`, `128M`, in bytes (as nccl-tests reads it: powers of 1024).

    Raises:
        ValueError: it is not a size; the message says how to write one.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a size; write it as 8, 64K, 128M or 1G")
    return int(match["number"]) * _SIZE_BYTES[match["unit"].lower()]


def parse_duration(text: str) -> float:
    """A time such as `8h`, `90m`, `1h30m`, `2d`, `45s`, in seconds.

    Raises:
        ValueError: it is none, or zero; the message says how to write one.
    """
    match = _DURATION.fullmatch(text.strip())
    parts = match.groupdict() if match is not None else {}
    seconds = sum(float(parts[unit]) * size for unit, size in _DURATION_S.items() if parts.get(unit))
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
    if match is None or float(match["s"]) >= _MINUTE_S or (match["h"] is not None and minutes >= _MINUTE_S):
        raise ValueError(f"{text!r} is not a time; write it as 3:35:20 (hours), 28:04 (minutes) or in seconds")
    return int(match["h"] or 0) * _HOUR_S + minutes * _MINUTE_S + float(match["s"])


def goodput_gb_per_s(link_gbit_per_s: float, mtu: int = 1500) -> float:
    """The most payload that TCP gets through an Ethernet link of this rate, in GB/s (IPv4 with timestamps)."""
    return link_gbit_per_s / 8 * (mtu - _TCP_IP_HEADER_BYTES) / (mtu + _ETHERNET_FRAMING_BYTES)


def format_figure(value: float, digits: int = 3) -> str:
    """A figure for people, without an exponent: `1,342`, `24.1`, `0.512`, `0.0000123`.

    Args:
        value: above 1e15 it is `over 1,000,000,000,000,000`.
        digits: how many are significant; every digit before the point is kept, and at most nine decimals.
    """
    if _MOST_FIGURE < abs(value) < math.inf:
        return f"{'over ' if value > 0 else 'under -'}{_MOST_FIGURE:,.0f}"
    rounded = float(f"{value:.{digits}g}")
    if abs(rounded) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    # Adding 0.0 removes the sign of a zero.
    text = f"{round(rounded, _MOST_DECIMALS) + 0.0:,.{_MOST_DECIMALS}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def format_sig(value: float | None) -> str:
    """A figure in a table, with three or four significant digits and their last zeros, or a dash.

    In a sentence it is `format_figure`.
    """
    if value is None or value == 0:
        return UNKNOWN if value is None else "0"
    for digits, below in ((2, 9.995), (1, 999.95)):
        if _ONE <= abs(value) < below:
            return f"{value:.{digits}f}"
    if _LEAST < abs(value) < _ONE:
        return f"{value:.{2 - math.floor(math.log10(abs(value)))}f}"
    return format_figure(value)


def times(factor: float) -> str:
    """A ratio of speeds: `1.78x`, `6.7x`, `12x`."""
    for digits, below in ((2, 1.995), (1, 9.95)):
        if factor < below:
            return f"{factor:.{digits}f}x"
    return f"{factor:,.0f}x"


def ms_digits(time_ms: float) -> str:
    """A time of a step or of a part of it in a table, under the unit ms: `1,342`, `4.20`."""
    return format_sig(time_ms)


def format_ms(time_ms: float) -> str:
    """A time of a part of a step: `1,342 ms`, `4.2 ms`."""
    return f"{format_figure(time_ms)} ms"


def format_rate(gbit_per_s: float, digits: int = 3) -> str:
    """A link rate for people: `100 Mbit/s`, `2.5 Gbit/s`."""
    value, unit = (gbit_per_s * 1000, "Mbit/s") if gbit_per_s < 1 else (gbit_per_s, "Gbit/s")
    return f"{format_figure(float(f'{value:.{digits}g}'))} {unit}"


def format_link(gbit_per_s: float) -> str:
    """A link by its rate, with its article: `a 100 Gbit/s link`, `an 800 Mbit/s link`."""
    rate = format_rate(gbit_per_s)
    article = "an" if re.match(r"8|1[18]\b", rate) else "a"
    return f"{article} {rate} link"


def format_range(low: str, word: str, high: str) -> str:
    """Two amounts, the unit once where both have the same: `610 and 840 Mbit/s`."""
    number, _, unit = low.partition(" ")
    return f"{number if high.endswith(f' {unit}') else low} {word} {high}"


_DECIMAL = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def format_size(size_bytes: int) -> str:
    """A size for people, in powers of 1024: `512 B`, `64 KiB`, `1 GiB`."""
    value = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:  # noqa: PLR2004 - the step between these units
            return f"{format_figure(value, digits=4)} {unit}"
        value /= 1024
    return f"{format_figure(value, digits=4)} TiB"


def format_bytes(size_bytes: float) -> str:
    """Bytes in decimal units: `14.8 MB`."""
    for unit_bytes, unit in _DECIMAL:
        if size_bytes >= unit_bytes:
            return f"{format_figure(size_bytes / unit_bytes)} {unit}"
    return f"{size_bytes:.0f} B"


def format_count(number: int, noun: str) -> str:
    """`1 worker`, `2 workers`; of nouns whose plural has an s."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def format_list(words: Sequence[str], most: int | None = None, noun: str = "others", conjunction: str = "and") -> str:
    """`a`, `a and b`, `a, b and c`; of more than `most` of them `a, b and 7 others`."""
    if most is not None and len(words) > most:
        words = [*words[: most - 1], f"{len(words) - most + 1} {noun}"]
    return f" {conjunction} ".join(part for part in (", ".join(words[:-1]), *words[-1:]) if part)


def format_placement(nodes: int, workers_per_node: int | None, workers: int | None) -> str:
    """Workers on nodes: `2 x 8`, of unequal nodes `10 on 2`; `2 x ?` where nobody knows."""
    if workers is not None and workers != nodes * (workers_per_node or 0):
        return f"{workers} on {nodes}"
    return f"{nodes} x {'?' if workers_per_node is None else workers_per_node}"


def format_duration(seconds: float) -> str:
    """A duration for people: `12.3 s`, `4 min 05 s`, `2 h 03 min`; what is no number is `unknown`."""
    if math.isnan(seconds):
        return "unknown"
    if seconds < 0:
        return f"-{format_duration(-seconds)}"
    if seconds >= _CENTURY_S:
        return "over 100 years"
    if round(seconds, 1) < _MINUTE_S:
        return f"{seconds:.1f} s"
    seconds = max(seconds, _MINUTE_S)
    if seconds < _HOUR_S:
        return f"{int(seconds // _MINUTE_S)} min {int(seconds % _MINUTE_S):02d} s"
    return f"{int(seconds // _HOUR_S)} h {int(seconds % _HOUR_S // _MINUTE_S):02d} min"


def about(seconds: float) -> str:
    """An estimate for people: `about 40 s`, `about 4 min`, `about 2 h 10 min`."""
    if seconds < 1.5 * _MINUTE_S:
        return f"about {max(10, round(seconds, -1)):.0f} s"
    minutes = round(seconds / _MINUTE_S)
    if seconds < 1.5 * _HOUR_S:
        return f"about {minutes} min"
    hours, rest = divmod(round(minutes, -1), _MINUTE_S)
    return f"about {hours} h {rest:02d} min" if rest else f"about {hours} h"


def signal_name(number: int) -> str:
    """`SIGKILL` for 9; realtime signals have no name of their own."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
