"""Published: a figure as people write it, with separators, a unit, a spread, a range or an "about". Pure."""

from __future__ import annotations

import html
import re
import unicodedata
from collections.abc import Iterable
from decimal import Decimal
from importlib.resources import files

import msgspec

from multinode.predict.rounded import parse_rounded
from multinode.stats.estimate import Estimate
from multinode.units import parse_rate


class Period(msgspec.Struct, frozen=True, kw_only=True):
    """A unit of a time such as 1d 2h, longest names first."""

    seconds: int
    names: tuple[str, ...]


class Rates(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Spellings of rates."""

    of_device: frozenset[str]
    words: dict[str, str]


class Links(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Words of links between nodes."""

    rdma: tuple[str, ...]
    tcp: tuple[str, ...]
    rates: dict[str, float]


class Words(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file; its comments explain each key."""

    about: tuple[str, ...]
    about_behind: tuple[str, ...]
    to: tuple[str, ...]
    no_figure: frozenset[str]
    yes: tuple[str, ...]
    no: tuple[str, ...]
    out_of_memory: tuple[str, ...]
    of_gpu: tuple[str, ...]
    of_node: tuple[str, ...]
    thousands: dict[str, float]
    periods: tuple[Period, ...]
    seconds: dict[str, float]
    bytes: dict[str, float]
    things: dict[str, tuple[str, ...]]
    counted: dict[str, tuple[str, ...]]
    rates: Rates
    links: Links
    names: dict[str, tuple[str, ...]]
    bare: dict[str, tuple[str, ...]]


WORDS = msgspec.toml.decode(files(__package__).joinpath("published_words.toml").read_bytes(), type=Words)
"""The file's content."""


def any_of(words: Iterable[str]) -> str:
    """A pattern of any of these words, longest first, on word boundaries."""
    ordered = sorted(words, key=len, reverse=True)
    return "|".join(
        re.escape(word) + (r"(?![a-z])" if word[-1:].isascii() and word[-1:].isalpha() else "") for word in ordered
    )


class Published(msgspec.Struct, frozen=True, kw_only=True):
    """A figure and its lower-case unit, if any."""

    figure: Estimate
    unit: str = ""


_TAGS = re.compile(r"<sup>.*?</sup>|<br\s*/?>|</?\w+[^>]*>", re.IGNORECASE)
_PLUS_MINUS = "\u00b1"
# Daggers, a section sign, and arrows for the better direction.
_MARKS = re.compile(r"[*\u2020\u2021\u00a7\u2191\u2193]|\[\w\]$|\^\w$")
_QUOTED = re.compile(r"`([^`]*)`|\*\*(.*?)\*\*|__(.*?)__")


def plain_text(text: str) -> str:
    """A title or cell without Markdown and HTML markup and footnote marks.

    Full-width characters become ASCII; raised, circled or fraction digits stay, as they would change the number before
    them.
    """
    text = _TAGS.sub(" ", html.unescape(text))
    text = _QUOTED.sub(lambda match: next(filter(None, match.groups()), ""), text)
    text = "".join(char if unicodedata.category(char) == "No" else unicodedata.normalize("NFKC", char) for char in text)
    return _MARKS.sub("", text.strip()).strip()


_GROUPED = r"[1-9][0-9]{0,2}(?:,[0-9]{3})+|[1-9][0-9]{0,2}(?:[ '\u2009\u202f][0-9]{3})+|[0-9]{1,40}"
_NUMBER = rf"(?:(?:{_GROUPED})(?:\.[0-9]{{0,40}})?|\.[0-9]{{1,40}})(?:[eE][-+]?[0-9]{{1,3}})?"
_THOUSANDS = f"(?:{any_of(WORDS.thousands)})"
_UNIT = r"(?:[^\W\d_]|[%/])[^0-9\u00b1~()\[\]\u2013\u2014+]*"
_TO = f"(?:{any_of(WORDS.to)})"
_FIGURE = re.compile(
    rf"(?P<about>(?:{any_of(WORDS.about)})\s*)?"
    rf"(?P<value>{_NUMBER})\s*(?P<times>{_THOUSANDS})?"
    rf"(?:\s*(?P<first>{_UNIT})?\s*\(?\s*(?:{_PLUS_MINUS}|\+/?-)\s*(?P<spread>{_NUMBER})\s*(?P<spread_times>{_THOUSANDS})?"
    rf"\s*(?P<percent>%)?\s*(?P<last>{_UNIT})?\)?"
    rf"|\s*(?P<low_unit>{_UNIT})?\s*{_TO}\s*(?P<high>{_NUMBER})\s*(?P<high_times>{_THOUSANDS})?"
    rf"|\s*[(\[]\s*(?P<least>{_NUMBER})\s*(?:{_TO}|,)\s*(?P<most>{_NUMBER})\s*[)\]])?"
    rf"\s*(?P<unit>{_UNIT})?",
    re.IGNORECASE,
)


def parse_published(text: str, *, kilo: int = 1000) -> Published:
    """A published figure, with its published bounds or those of its digits.

    Args:
        text: of a cell, plain: `1,234.5`, `3.2k tokens/s`, `119.6 +- 0.3`, `12~14`, `13 (12-14)`, `about 900`.
        kilo: the meaning of K.

    Raises:
        ValueError: it is not a positive number.
    """
    behind = next((word for word in WORDS.about_behind if text.endswith(word)), "")
    match = _FIGURE.fullmatch(text.removesuffix(behind).strip())
    if match is None:
        raise ValueError(f"{text!r} is not a number")
    value = _number(match, "value", "times", kilo)
    if match["spread"]:
        value = _with_spread(match, value, kilo)
    elif match["high"]:
        value = _between(_number(match, "value", "times" if match["times"] else "high_times", kilo), match, kilo)
    elif match["least"]:
        low, high = (_scaled(match[name], match["times"], kilo).value for name in ("least", "most"))
        if not low <= value.value <= high:
            raise ValueError(f"{text!r} is outside its own range")
        value = Estimate(value=value.value, low=low, high=high)
    elif match["about"] or behind:
        value = _about(match, value, kilo)
    units = {unit.strip().lower() for name in ("first", "last", "low_unit", "unit") if (unit := match[name])}
    if len(units) > 1:
        raise ValueError(f"{text!r} has two units")
    return Published(figure=value, unit=units.pop() if units else "")


def _number(match: re.Match[str], name: str, times: str, kilo: int) -> Estimate:
    return _scaled(match[name], match[times], kilo)


def _scaled(text: str, times: str | None, kilo: int) -> Estimate:
    scale = WORDS.thousands[times.lower()] if times else 1
    if times and times.lower() == "k":
        scale = kilo
    digits = _digits(text)
    return parse_rounded(f"0{digits}" if digits.startswith(".") else digits, scale=scale)


def _digits(text: str) -> str:
    return re.sub(r"[, '\u2009\u202f]", "", text)


def _with_spread(match: re.Match[str], value: Estimate, kilo: int) -> Estimate:
    spread = _scaled(match["spread"], match["spread_times"] or match["times"], kilo).value
    if match["percent"]:
        spread *= value.value / 100
    if spread >= value.value:
        raise ValueError(f"{match[0]!r} may be zero")
    return Estimate(value=value.value, low=value.value - spread, high=value.value + spread)


def _between(low: Estimate, match: re.Match[str], kilo: int) -> Estimate:
    high = _number(match, "high", "high_times", kilo)
    if not low.value <= high.value:
        raise ValueError(f"{match[0]!r} ends before it begins")
    return Estimate(value=(low.value + high.value) / 2, low=low.value, high=high.value)


def _about(match: re.Match[str], value: Estimate, kilo: int) -> Estimate:
    """One unit of the last non-zero digit in both directions: about 900 is 800 to 1000."""
    digits = Decimal(_digits(match["value"])).normalize()
    unit = _scaled(f"{Decimal(1).scaleb(int(digits.as_tuple().exponent)):f}", match["times"], kilo).value
    return Estimate(value=value.value, low=max(value.value - unit, value.value / 2), high=value.value + unit)


_PERIOD = re.compile(
    r"\s*,?\s*".join(
        rf"(?:(?P<p{period.seconds}>[0-9]{{1,9}}(?:\.[0-9]{{1,6}})?)\s*(?:{any_of(period.names)}))?"
        for period in WORDS.periods
    ),
    re.IGNORECASE,
)


def parse_period(text: str) -> Estimate:
    """A time in seconds, in English or Chinese: `2h05m`, `20 min 10 s`, `7.3 hours`.

    Raises:
        ValueError: it is not a time, or zero.
    """
    match = _PERIOD.fullmatch(text.strip())
    sizes = [period.seconds for period in WORDS.periods]
    parts = [(match[f"p{size}"], size) for size in sizes if match[f"p{size}"]] if match else []
    total = sum(float(number) * size for number, size in parts)
    if not total:
        raise ValueError(f"{text!r} is not a time")
    number, size = parts[-1]
    half = float(Decimal(1).scaleb(int(Decimal(number).as_tuple().exponent)) * size / 2)
    return Estimate(value=total, low=max(total - half, total / 2), high=total + half)


class PublishedLink(msgspec.Struct, frozen=True, kw_only=True):
    """The network of a node; None is unknown."""

    gbit_per_s: float | None = None  # of all its NICs together
    nics: int | None = None  # that the rate is of, if the text counts them
    rdma: bool | None = None  # whether collectives use RDMA


_NICS = r"(?<![\w.-])(?:(?P<nics>[1-9][0-9]?)\s*[xX\u00d7*]\s*)?"
_LINK_NUMBER = r"(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+|[0-9]{1,6})(?:\.[0-9]{1,6})?"
_LINK_BITS = r"(?:[bB]?[eE]|(?i:ig(?:abit)?e?|bits?)(?:/s|ps)?|b(?:/s|ps)?)"
_LINK_RATE = re.compile(rf"{_NICS}(?P<number>{_LINK_NUMBER})[\s-]?(?P<times>[kmgtKMGT]){_LINK_BITS}?(?!\w|/s)")
_BARE_LINK = re.compile(rf"{_NICS}(?P<number>{_LINK_NUMBER})")
_NAMED_LINK = re.compile(rf"{_NICS}(?P<name>{any_of(WORDS.links.rates)})(?![a-z0-9])")
_RDMA, _TCP = (
    re.compile(rf"(?<![a-z0-9])(?:{any_of(words)})(?![a-z0-9])") for words in (WORDS.links.rdma, WORDS.links.tcp)
)
_NUMBERED = re.compile(r"(?<![\w.-])[0-9]")


def parse_link(text: str, *, bare_gbit: float | None = None) -> PublishedLink:
    """A network as people write it: `10GbE`, `100 Gbit/s over RDMA`, `8x400G InfiniBand`, `4x HDR`, `RoCE`.

    Args:
        text: plain.
        bare_gbit: the unit of a number without one, in Gbit/s; None if it must have one.

    Raises:
        ValueError: it has a number in another unit, or several rates; the message says how to write one.
    """
    text, lower = text.strip(), text.strip().lower()
    rates = _link_rates(text, bare_gbit)
    # `25 GB/s` is of bytes, or bits written carelessly.
    if len(rates) > 1 or any(not rate for _, rate in rates) or (not rates and _NUMBERED.search(text)):
        raise ValueError(f"{text!r} is not a link rate; write it in bits per second, as 10GbE, 100G or 8x400G")
    rdma = False if _TCP.search(lower) else True if _RDMA.search(lower) else None
    if not rates:
        return PublishedLink(rdma=rdma)
    ((nics, rate),) = rates
    return PublishedLink(gbit_per_s=(nics or 1) * rate, nics=nics, rdma=rdma)


def _link_rates(text: str, bare_gbit: float | None) -> set[tuple[int | None, float]]:
    """NICs, if they are counted, and the rate of one in Gbit/s: as numbers, else by name."""
    bare = _BARE_LINK.fullmatch(text)
    if bare is not None and bare_gbit is not None:
        return {(_nics(bare), float(_digits(bare["number"])) * bare_gbit)}
    numbers = {
        (_nics(found), float(_digits(found["number"])) * parse_rate(f"1{found['times']}bit"))
        for found in _LINK_RATE.finditer(text)
    }
    return numbers or {(_nics(found), WORDS.links.rates[found["name"]]) for found in _NAMED_LINK.finditer(text.lower())}


def _nics(found: re.Match[str]) -> int | None:
    return int(found["nics"]) if found["nics"] else None
