"""Read a title of a foreign table: its column, its unit, and the settings of its rows. Pure.

A title is known as a whole, or as a known name with units and words that change nothing; otherwise it is unknown.
Unreadable parts are never dropped, as they may change the meaning.
"""

from __future__ import annotations

import difflib
import re
from typing import NamedTuple

from multinode.experiment.columns import COLUMNS
from multinode.experiment.imported_columns import (
    IMPORTED,
    OF_DEVICE,
    ImportedColumn,
    Unit,
    column_name,
    find_unit,
    imported_column,
    is_rate,
    parse_unit,
    unit_of_device,
)
from multinode.predict.published import WORDS, any_of, parse_published, plain_text

_MOST_SUGGESTED = 4
_SHORTEST_SUGGESTED = 5


class SpeedColumn(NamedTuple):
    """A column called throughput or speed: the unit of each cell decides its meaning."""

    of_device: bool = False

    @property
    def expected(self) -> str:
        """The values that a cell may hold, for messages."""
        return "a speed with its unit, such as 12.3 samples/s, as the title has none"

    def with_unit(self, text: str) -> ImportedColumn | None:
        """The column with this unit, if any."""
        unit = parse_unit(text)
        if self.of_device and unit is not None:
            unit = unit_of_device(unit) or (unit if unit.measures in OF_DEVICE.values() else None)
        return ImportedColumn(COLUMNS[unit.measures], unit.scale) if unit is not None and is_rate(unit) else None

    def column(self, cell: str) -> ImportedColumn:
        """The column of a cell.

        Raises:
            ValueError: its unit is not that of a speed.
        """
        text = plain_text(cell)
        try:
            found = self.with_unit(parse_published(text).unit)
        except ValueError:
            # Without a figure, any of them says why.
            found = ImportedColumn(COLUMNS["samples_per_s"], None)
        if found is None:
            raise ValueError(cell)
        return found


class Title(NamedTuple):
    """A known title."""

    columns: tuple[ImportedColumn | SpeedColumn, ...]  # one, or several if a cell has several figures separated by `|`
    # settings of the figures below it, by column name: `samples/s (2 nodes)`
    settings: tuple[tuple[str, str], ...] = ()


# In lower case the first would mean seconds.
_LETTERS = {"S/s": "samples/s", "T/s": "tokens/s", "T/s/GPU": "tokens/s/gpu", "S/s/GPU": "samples/s/gpu"}
# Names that Transformers uses in W&B.
_LOGGED = re.compile(r"^train/(?=\w+$)")
_LEADING = re.compile(rf"^(?:{any_of(WORDS.titles.leading)})\s*(?P<rest>.+)$")
_EACH = re.compile(rf"^(?:{any_of(WORDS.rates.each_device)})\s*(?P<rest>.+)$")
_PARENTHESES = re.compile(r"[(\[]([^()\[\]]*)[)\]]")
_SETTING = re.compile(
    rf"(?P<number>[0-9]{{1,5}})\s*[x\u00d7]?\s*"
    rf"(?:(?P<nodes>{any_of(WORDS.counted['nodes'])})|(?P<world_size>{any_of(WORDS.counted['world_size'])}))",
    re.IGNORECASE,
)


def is_passed_over(title: str) -> bool:
    """Whether the table does not need this column, such as a final loss or a ratio of its own rows."""
    title = _PARENTHESES.sub("", title)
    names = {column_name(_LOGGED.sub(whose, title)) for whose in ("", "train_")}
    return not names.isdisjoint(WORDS.titles.passed_over)


def read_title(title: str) -> Title | None:
    """The meaning of a title, if known."""
    plain = plain_text(title)
    match = _SETTING.search(plain)
    if match is not None and match[0] != plain:
        rest = re.sub(r"[(\[]\s*[)\]]|[-,_@:\s]+$|^[-,_@:\s]+", "", plain.replace(match[0], "", 1)).strip()
        found = _columns(rest)
        if found and all(isinstance(column, SpeedColumn) or column.is_measured for column in found):
            return Title(found, (_setting(match),))
    columns = _columns(plain)
    return Title(columns) if columns else None


def settings_of(title: str) -> tuple[tuple[str, str], ...]:
    """The settings in a title that names no column: `2 nodes`."""
    match = _SETTING.fullmatch(plain_text(title))
    return () if match is None else (_setting(match),)


def _setting(match: re.Match[str]) -> tuple[str, str]:
    return "nodes" if match["nodes"] else "world_size", match["number"]


def _columns(plain: str) -> tuple[ImportedColumn | SpeedColumn, ...]:
    if (one := _column(plain)) is not None:
        return (one,)
    inside = _PARENTHESES.findall(plain)
    parts = (inside[-1] if len(inside) == 1 and "|" in inside[0] else plain).split("|")
    found = [_column(part.strip()) for part in parts] if len(parts) > 1 else []
    return tuple(column for column in found if column is not None) if all(found) else ()


def _column(plain: str) -> ImportedColumn | SpeedColumn | None:
    plain = _LOGGED.sub("", _LETTERS.get(plain, plain))
    if (known := imported_column(plain)) is not None:
        return known
    if (unit := _rate(plain)) is not None:
        return ImportedColumn(COLUMNS[unit.measures], unit.scale)
    base, parts = _split(plain)
    return _with_parts(base, parts)


def _rate(text: str) -> Unit | None:
    text = text.lower().replace("train_", "", 1).strip()
    unit = parse_unit(text.replace("_", " "))
    if unit is None and (leading := _LEADING.match(text)) is not None:
        unit = parse_unit(leading["rest"])
    return unit if unit is not None and is_rate(unit) else None


def _split(plain: str) -> tuple[str, list[str]]:
    parts = [part.strip() for inside in _PARENTHESES.findall(plain) for part in re.split("[,;]", inside)]
    base = _PARENTHESES.sub(" ", plain).strip()
    base, *more = (part.strip() for part in base.split(","))
    parts += more
    shorter, slash, unit = base.rpartition("/")
    is_of_device = unit.strip().lower() in WORDS.rates.of_device
    if slash and (is_of_device or not parts) and imported_column(base) is None:
        base, parts = shorter, [*parts, f"per {unit.strip()}" if is_of_device else unit]
    elif imported_column(base) is None and _rate(base) is None and re.search(r"[ _]", base):
        shorter, unit = re.split(r"[ _](?=[^ _]*$)", base)
        if parse_unit(unit) is not None:
            base, parts = shorter, [*parts, unit]
    return base.strip(), [part for part in parts if part]


def _with_parts(base: str, parts: list[str]) -> ImportedColumn | SpeedColumn | None:
    column = _base(base)
    if column is None and column_name(base) in WORDS.titles.time and len(parts) == 1:
        # The unit of `Time (s/it)` defines it; `Time (h)` is ambiguous.
        column = SpeedColumn()
    if column is None:
        return None
    units: list[str] = []
    for part in parts:
        # `batch size (per GPU)` is one name, and so is `memory (peak)`.
        whole = imported_column(f"{part} {base}") or imported_column(f"{base} {part}")
        if whole is not None:
            column = whole
        elif column_name(part) not in WORDS.titles.neutral | WORDS.titles.of_all:
            units.append(part)
    for unit in units:
        column = _of_device(column) if column_name(unit) in WORDS.titles.of_device else _with_unit(column, unit)
        if column is None:
            return None
    return column


def _base(base: str) -> ImportedColumn | SpeedColumn | None:
    if column_name(base) in WORDS.titles.speed | WORDS.titles.speed_of_device:
        return SpeedColumn(column_name(base) in WORDS.titles.speed_of_device)
    if (unit := _rate(base)) is not None:
        return ImportedColumn(COLUMNS[unit.measures], unit.scale)
    if (known := imported_column(base)) is not None:
        return known
    if (each := _EACH.match(base.lower())) is not None and (column := _base(each["rest"])) is not None:
        return _of_device(column)
    if (leading := _LEADING.match(base.lower())) is not None:
        column = _base(leading["rest"])
        # Average memory is not peak memory.
        is_same = isinstance(column, SpeedColumn) or (column is not None and column.column.name == "step_time_ms")
        return column if is_same else None
    return None


def _with_unit(column: ImportedColumn | SpeedColumn, text: str) -> ImportedColumn | SpeedColumn | None:
    if isinstance(column, SpeedColumn):
        return column.with_unit(_LETTERS.get(text, text))
    if text == "T" and column.column.name == "sequence_length":
        return column
    unit = find_unit(text, column.column)
    if unit is None:
        return None
    if column.column.kind == "count":
        return column
    is_said_twice = is_rate(parse_unit(text) or unit) and column.scale is not None
    return (
        (column if column.scale == unit.scale else None) if is_said_twice else ImportedColumn(column.column, unit.scale)
    )


def _of_device(column: ImportedColumn | SpeedColumn) -> ImportedColumn | SpeedColumn | None:
    if isinstance(column, SpeedColumn):
        return SpeedColumn(of_device=True)
    if column.column.name in OF_DEVICE:
        return ImportedColumn(COLUMNS[OF_DEVICE[column.column.name]], column.scale)
    return column if column.column.name in {"tgs", "peak_memory_gib", "per_device_batch"} else None


def nearest_columns(title: str) -> list[str]:
    """Known columns that a title probably means, most likely first, one per value.

    None for ratios, abbreviations and parts: a similar name may be the inverse, or per worker.
    """
    name = column_name(title)
    if (
        settings_of(title)
        or not name.isascii()
        or len(name) < _SHORTEST_SUGGESTED
        or set(title) & set("/%$")
        or re.search(r"(?:\b|_)(?:per|each|time|cpu|host|node|saved|gain|std|min)(?:\b|_)", title.lower())
    ):
        return []
    names = {column_name(known): column for known, column in IMPORTED.items()}
    begun = [known for known in names if name and known.startswith(name)]
    near = [*begun, *difflib.get_close_matches(name, names, n=2 * _MOST_SUGGESTED, cutoff=0.8)]
    return list(dict.fromkeys(names[known].written for known in near))[:_MOST_SUGGESTED]
