"""IMPORTED: the columns of foreign tables and their values; words of units are in `predict/published_words.toml`.

Units are those of their titles: `tokens/s/GPU`, `s/it`, `MiB` or `hours`, with factors.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from multinode.predict.published import (
    WORDS,
    PublishedLink,
    any_of,
    parse_link,
    parse_period,
    parse_published,
    plain_text,
)
from multinode.predict.rounded import parse_count
from multinode.stats.estimate import Estimate, exactly
from multinode.sweep.figures import CELL_FIGURES
from multinode.tables.columns import COLUMNS, ColumnKind, TableColumn, column_name
from multinode.units import parse_clock

OF_DEVICE = {"tokens_per_s": "tgs", "samples_per_s": "samples_per_s_per_gpu"}
"""Speeds of all workers, with the name of the speed per worker."""


class Unit(NamedTuple):
    """A quantity (the name of a column, or one that several have), and the factor to our unit or SI."""

    measures: str
    scale: float = 1.0


_SECONDS = {
    name: float(period.seconds) for period in WORDS.periods for name in period.names if name != "m"
} | WORDS.seconds
_THINGS = {name: thing for thing, names in WORDS.things.items() for name in names}
_COUNTED_UNITS = {name: column for column, names in WORDS.counted.items() for name in names}
_MEASURED_IN = {
    "step_time_ms": ("time", 1e3),
    "whole_s": ("time", 1.0),
    "peak_memory_gib": ("memory", 1 / (1 << 30)),
    "mfu": ("share", 1.0),
    "hfu": ("share", 1.0),
    "network_share": ("share", 1.0),
}
_NOUNS = {
    "sequence_length": "tokens",
    "tokens": "tokens",
    "tokens_per_sample": "tokens",
    "dataset_samples": "samples",
    "per_device_batch": "samples",
    "all_devices_batch": "samples",
    "global_batch": "samples",
    "steps": "steps",
    "accumulation": "steps",
    "world_size": "world_size",
    "workers_per_node": "world_size",
    "parameters": "parameters",
    "trainable_parameters": "parameters",
    "nodes": "nodes",
    "epochs": "epochs",
}
_PER = re.compile(r"\s*/\s*|\s+per\s+|_per_")
_PERIODS = {name: float(period.seconds) for period in WORDS.periods for name in period.names}


def parse_unit(text: str) -> Unit | None:
    """The quantity of a unit, or of a title that is only a unit; None if unknown.

    Times are in seconds, memory in bytes, shares as fractions, rates per second; `s/it` is in milliseconds, as
    step_time_ms.
    """
    text = " ".join(text.lower().split()).strip(" .")
    if text == "%":
        return Unit("share", 0.01)
    first, slash, rest = text.partition("/")
    text = WORDS.rates.words.get(first.strip(), first) + slash + rest
    parts = [part.strip() for part in _PER.split(text)]
    if len(parts) == 1:
        return _single(text)
    if parts[0] in _SECONDS:
        is_step = len(parts) == 2 and _THINGS.get(parts[1]) == "steps"  # noqa: PLR2004 - a time a step
        return Unit("step_time_ms", _SECONDS[parts[0]] * 1e3) if is_step else None
    return _rate(parts)


def _single(text: str) -> Unit | None:
    if text in _SECONDS:
        return Unit("time", _SECONDS[text])
    if text in WORDS.bytes:
        return Unit("memory", WORDS.bytes[text])
    noun = _COUNTED_UNITS.get(text) or _THINGS.get(text)
    return Unit(noun) if noun else None


def _rate(parts: list[str]) -> Unit | None:
    thing, scale = _thing(parts[0])
    rest = parts[1:]
    times = [part for part in rest if part in _SECONDS]
    devices = [part for part in rest if part in WORDS.rates.of_device]
    if thing is None or len(times) != 1 or len(devices) > 1 or len(times) + len(devices) != len(rest):
        return None
    unit = Unit(f"{thing}_per_s", scale / _SECONDS[times[0]])
    return unit_of_device(unit) if devices else unit


def _thing(text: str) -> tuple[str | None, float]:
    if text in _THINGS:
        return _THINGS[text], 1.0
    prefix, rest = text[:1], text[1:].strip()
    return (_THINGS[rest], WORDS.thousands[prefix]) if prefix in WORDS.thousands and rest in _THINGS else (None, 1.0)


def unit_of_device(unit: Unit) -> Unit | None:
    """The unit per worker, if we have such a column."""
    return Unit(OF_DEVICE[unit.measures], unit.scale) if unit.measures in OF_DEVICE else None


def find_unit(text: str, column: TableColumn) -> Unit | None:
    """A unit of a column, with the factor to the column's unit; None if it measures something else."""
    if column.kind == "link":
        return link_unit(text)
    if column.kind == "clock" and text.lower() in _PERIODS:
        return Unit(column.name, _PERIODS[text.lower()])
    unit = parse_unit(text)
    if unit is None:
        return None
    quantity, scale = _MEASURED_IN.get(column.name, ("", 1.0))
    if unit.measures == quantity:
        return Unit(column.name, unit.scale * scale)
    if _NOUNS.get(column.name) == unit.measures:
        return Unit(column.name)
    if column.name in OF_DEVICE.values() and unit.measures in OF_DEVICE:
        # An explicit column name already says whose speed it is.
        unit = unit_of_device(unit) or unit
    return unit if unit.measures == column.name else None


def link_unit(text: str) -> Unit | None:
    """A unit of link rates, with its factor to Gbit/s: `Gbps`, `Mbit/s`; None for bytes, whose B is a capital."""
    try:
        rate = parse_link(f"1 {text.strip()}").gbit_per_s
    except ValueError:
        return None
    return Unit("network_gbit_per_s", rate) if rate is not None else None


_POWER = re.compile(r"[x\u00d7*]?\s*(?:10\^|1e\+?|10\*\*)(?P<exponent>[1-9])|[x\u00d7*]\s*(?P<number>1[0,]*0)")
_COUNTED_IN_THOUSANDS = frozenset({"tokens", "dataset_samples", "steps", "sequence_length"})


def find_scale(text: str, column: TableColumn) -> float | None:
    """The factor of a title: 1000 for `k` or `x1000`, a million for `M`; None for another word or column.

    A B behind a batch, or an N behind GPUs, is the letter of a formula.
    """
    is_large = column.kind in {"number", "measured", "price"} or column.name in _COUNTED_IN_THOUSANDS
    if column.name == "step_time_ms" or not is_large:
        return None
    word = text.lower().removeprefix("in ").strip()
    if (power := _POWER.fullmatch(word)) is not None:
        return float(f"1e{power['exponent']}" if power["exponent"] else power["number"].replace(",", ""))
    return float(_kilo(column)) if word == "k" else WORDS.thousands.get(word)


def _kilo(column: TableColumn) -> int:
    # A context of 4k tokens is 4096 long.
    return 1024 if column.name == "sequence_length" else 1000


def fits(unit: Unit, column: TableColumn) -> bool:
    """Whether the column uses this unit."""
    return _NOUNS.get(column.name) == unit.measures


def is_rate(unit: Unit) -> bool:
    """Whether it defines the column alone, as `tokens/s` does and `GB` does not."""
    return unit.measures.endswith("_per_s") or unit.measures in {*OF_DEVICE.values(), "step_time_ms"}


_DIGITS = r"(?:[0-9][0-9,.]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?"
_NUMBER = re.compile(rf"[-+<>\u2264\u2265]?\s*[$\u20ac\u00a3\u00a5]?\s*{_DIGITS}\s*(?:[x\u00d7%]|[^\W\d_]{{0,12}})")


def is_told(cell: str) -> bool:
    """Whether a cell says anything."""
    text = plain_text(cell).lower()
    return bool(text) and text not in _NONE and text not in WORDS.no_figure


def is_number(cell: str) -> bool:
    """Whether a cell of an unknown column is a number, alone or with a sign, a unit, a spread or a range; or a time."""
    text = plain_text(cell)
    if not is_told(cell):
        return False
    if _NUMBER.fullmatch(text) is not None:
        return True
    for parse in (parse_published, parse_period, parse_clock):
        try:
            parse(text)
        except ValueError:
            continue
        return True
    return False


class ImplausibleError(ValueError):
    """A value that cannot have been measured; the message says why."""


class OutOfMemory(NamedTuple):
    """Stands for a missing figure; says whose memory ran out: `gpu` or `node`."""

    out_of: str


Value = str | Estimate | OutOfMemory | PublishedLink | None

_NONE = frozenset({"-", "null", "none", "n/a", "na"})
_LONGEST_WORDS = 200
_FLAGS = dict.fromkeys(WORDS.yes, "yes") | dict.fromkeys(WORDS.no, "no")
_OUT_OF_MEMORY, _OF_NODE, _OF_GPU = (
    re.compile(rf"(?<![a-z])(?:{any_of(words)})") for words in (WORDS.out_of_memory, WORDS.of_node, WORDS.of_gpu)
)
_TIMES_SIGN = re.compile(r"^[x\u00d7]\s*(?=\d)|(?<=\d)\s*[x\u00d7]$")
_COUNTED = re.compile(r"(?<=\d)\s*(?P<noun>[^\W\d_]+)$")
_SCALED_NUMBER = re.compile(rf"[0-9.]\s*(?:{any_of(WORDS.thousands)})", re.IGNORECASE)
_SCALED = re.compile(rf"[0-9.]+\s*(?:{'|'.join(WORDS.thousands)})", re.IGNORECASE)
_ABOUT = re.compile(rf"^(?:{any_of(WORDS.about)})\s*", re.IGNORECASE)
_DAYS = re.compile(r"(?P<days>\d{1,5}) days?, (?P<clock>\d{1,2}:\d\d:\d\d(?:\.\d+)?)", re.ASCII)
_DAY_S = 86400
# A larger value is in another unit.
_MOST_GIB = 1024
# A larger value counts tokens.
_MOST_SAMPLES = 100_000


class ImportedColumn(NamedTuple):
    """A column of a foreign table, under one of its names."""

    column: TableColumn
    scale: float | None = 1.0  # factor from its unit to ours; None if each cell has its own unit
    times: float = 1.0  # factor of numbers without a scale or a unit of their own: 1000 of `samples (k)`

    @property
    def written(self) -> str:
        """Its name in messages."""
        return self.column.written or self.column.name

    @property
    def is_measured(self) -> bool:
        """Whether it is a result of the training, which may be OOM."""
        return self.column.is_measured

    @property
    def expected(self) -> str:
        """What a cell may hold, for messages."""
        if self.scale is None and self.column.kind != "link":
            return "a positive number with its unit, because the title has none"
        return _EXPECTED[self.column.kind]

    def value(self, cell: str) -> Value:
        """The value of a non-empty cell.

        Raises:
            ValueError: the cell does not fit the column.
        """
        text = plain_text(cell)
        if text.lower() in _NONE:
            return None
        if self.column.kind == "text":
            return _words(cell.strip(), self.column)
        if self.column.kind == "flag":
            return _flag(text)
        # A footnote mark may follow the word.
        if text.lower() in WORDS.no_figure or not text:
            return None
        if self.is_measured and (out_of := _out_of_memory(text)) is not None:
            return out_of
        value = _PARSERS[self.column.kind](text, self)
        if isinstance(value, Estimate):
            if self.times != 1 and _is_bare(text):
                value *= exactly(self.times)
            self._refuse_implausible(value)
        return value

    def _refuse_implausible(self, value: Estimate) -> None:
        if self.column.name == "peak_memory_gib" and value.value > _MOST_GIB:
            raise ImplausibleError(f"{value.value:,.0f} GiB is more than a worker can have; did you mean MiB?")
        if self.column.name == "per_device_batch" and value.value > _MOST_SAMPLES:
            raise ImplausibleError(
                f"{value.value:,.0f} samples is too large for a worker's batch; did you mean tokens?"
            )


def _is_bare(text: str) -> bool:
    return parse_published(text).unit == "" and _SCALED_NUMBER.search(text) is None


def _words(text: str, column: TableColumn) -> str:
    if len(text) > _LONGEST_WORDS or (column.name == "device" and text.isdecimal()):
        raise ValueError(text)
    return text


def _flag(text: str) -> str:
    if text.lower() not in _FLAGS:
        raise ValueError(text)
    return _FLAGS[text.lower()]


def _out_of_memory(text: str) -> OutOfMemory | None:
    text = text.lower()
    match = _OUT_OF_MEMORY.search(text)
    # Text after it, as in `OOM (24GB)`, is a comment; text before it may be a figure.
    if match is None or any(char.isdigit() for char in text[: match.start()]):
        return None
    return OutOfMemory("node" if _OF_NODE.search(text) and not _OF_GPU.search(text) else "gpu")


def _count(text: str, column: ImportedColumn) -> Estimate:
    text = _TIMES_SIGN.sub("", text)
    noun = _COUNTED.search(text)
    if noun is not None and (unit := parse_unit(noun["noun"])) is not None and fits(unit, column.column):
        text = text[: noun.start()]
    scaled = _SCALED.fullmatch(text)
    if scaled is None and column.times != 1:
        return parse_published(text).figure
    if scaled is None:
        return parse_count(text.replace(",", "") if _is_grouped(text) else text)
    value = parse_published(text, kilo=_kilo(column.column)).figure.value
    if not round(value, 6).is_integer():
        raise ValueError(text)
    return exactly(round(value))


def _is_grouped(text: str) -> bool:
    return re.fullmatch(r"[1-9][0-9]{0,2}(,[0-9]{3})+", text) is not None


def _epochs(text: str, _: ImportedColumn) -> Estimate:
    number = parse_published(text)
    if number.unit not in {"", *WORDS.counted["epochs"]}:
        raise ValueError(text)
    # 3 epochs means exactly 3, not 2.5 to 3.5.
    return number.figure if "." in text else exactly(number.figure.value)


def _measured(text: str, column: ImportedColumn) -> Estimate:
    number = parse_published(text)
    if not number.unit:
        if column.scale is None:
            raise ValueError(text)
        return number.figure * exactly(column.scale)
    unit = find_unit(number.unit, column.column)
    if unit is None:
        raise ValueError(text)
    return number.figure * exactly(unit.scale)


def _clock(text: str, column: ImportedColumn) -> Estimate:
    if (days := _DAYS.fullmatch(text)) is not None:
        seconds = int(days["days"]) * _DAY_S + parse_clock(days["clock"])
    elif ":" in text:
        seconds = parse_clock(text)
    else:
        try:
            return parse_period(_ABOUT.sub("", text))
        except ValueError:
            return _measured(text, column)
    if not seconds:
        raise ValueError(text)
    half = 0.5 if "." not in text else 0.0
    return Estimate(value=seconds, low=seconds - half, high=seconds + half)


def _share(text: str, column: ImportedColumn) -> Estimate:
    value = _measured(text, column)
    if value.value > 1:
        raise ValueError(text)
    return value


def is_percentage(cell: str) -> bool:
    """Whether a share is a bare number above 1, which only a percentage can be."""
    try:
        number = parse_published(plain_text(cell))
    except ValueError:
        return False
    return not number.unit and number.figure.value > 1


def _price(text: str, _: ImportedColumn) -> Estimate:
    number = parse_published(text)
    if number.unit:
        raise ValueError(text)
    return number.figure


def _link(text: str, column: ImportedColumn) -> PublishedLink:
    return parse_link(text, bare_gbit=column.scale)


_EXPECTED: dict[ColumnKind, str] = {
    "text": f"text of at most {_LONGEST_WORDS} characters",
    "flag": "true or false",
    "count": "a whole number, at least 1",
    "number": "a number above 0",
    "epochs": "a number above 0",
    "measured": "a positive number with a decimal point, without a unit or with the unit of the column",
    "clock": "seconds, 2h05m, 28:04 (minutes) or 3:35:20 (hours)",
    "share": "a positive share, such as 0.45 or 45%",
    "price": "a positive price, without a currency",
    "link": "a rate in bits per second, such as 10GbE, 100G, 25 Gbit/s or 8x400G InfiniBand",
}
_PARSERS: dict[ColumnKind, Callable[[str, ImportedColumn], Estimate | PublishedLink]] = {
    "count": _count,
    "number": _measured,
    "epochs": _epochs,
    "measured": _measured,
    "clock": _clock,
    "share": _share,
    "price": _price,
    "link": _link,
}


def _imported() -> dict[str, ImportedColumn]:
    columns: dict[str, ImportedColumn] = {}
    for column in COLUMNS.values():
        plain = ImportedColumn(column)
        names = (*column.figure.aliases, *WORDS.names.get(column.name, ()))
        columns |= dict.fromkeys((plain.written, column.name, *names), plain)
        for name, scale in column.units.items():
            columns[name] = ImportedColumn(column, scale)
        columns |= dict.fromkeys((*column.bare, *WORDS.bare.get(column.name, ())), ImportedColumn(column, None))
    return columns


IMPORTED = _imported()
"""Every name that a column of a foreign table may have."""
SPEEDS = WORDS.bare["speed"]
"""Names of a speed, which is what its unit counts."""
DERIVED = tuple(
    name
    for figure in CELL_FIGURES
    if figure.title and figure.name not in COLUMNS
    for name in (figure.name, figure.title, *figure.aliases, *WORDS.names.get(figure.name, ()))
)
"""Names of what an import works out itself, and therefore leaves out."""
# Our own tables use these names too.
_BY_NAME = {
    **{
        column_name(f"{c.figure.title} ({c.figure.unit})"): ImportedColumn(c) for c in COLUMNS.values() if c.figure.unit
    },
    **{column_name(c.figure.csv): ImportedColumn(c) for c in COLUMNS.values() if c.figure.csv},
    **{column_name(name): column for name, column in IMPORTED.items()},
}


def imported_column(title: str) -> ImportedColumn | None:
    """The column with this title, in any spacing."""
    return _BY_NAME.get(column_name(title))
