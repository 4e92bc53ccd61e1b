"""Read a foreign table from CSV, TSV, Markdown, JSON or YAML into cells.

The meaning of cells is unknown here; the titles show the orientation of the table.
"""

from __future__ import annotations

import csv
import difflib
import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any, NamedTuple

import yaml

from multinode.predict.published import WORDS, any_of, parse_published, plain_text
from multinode.strict_yaml import yaml_nodes
from multinode.sweep.columns import COLUMNS, column_name
from multinode.tables.imported_columns import (
    IMPORTED,
    OF_DEVICE,
    ImportedColumn,
    Unit,
    find_unit,
    imported_column,
    is_rate,
    link_unit,
    parse_unit,
    unit_of_device,
)

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
            form = self.with_unit(parse_published(text).unit)
        except ValueError:
            # Without a figure, any of them says why.
            form = ImportedColumn(COLUMNS["samples_per_s"], None)
        if form is None:
            raise ValueError(cell)
        return form


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
        cells_across = _columns(rest)
        if cells_across and all(isinstance(column, SpeedColumn) or column.is_measured for column in cells_across):
            return Title(cells_across, (_setting(match),))
    columns = _columns(plain)
    return Title(columns) if columns else None


def settings_of(title: str) -> tuple[tuple[str, str], ...]:
    """The settings in a title that names no column: `2 nodes`."""
    match = _SETTING.fullmatch(plain_text(title))
    return () if match is None else (_setting(match),)


def _setting(match: re.Match[str]) -> tuple[str, str]:
    return "nodes" if match["nodes"] else "world_size", match["number"]


def _columns(plain: str) -> tuple[ImportedColumn | SpeedColumn, ...]:
    if (plain_column := _column(plain)) is not None:
        return (plain_column,)
    inside = _PARENTHESES.findall(plain)
    parts = (inside[-1] if len(inside) == 1 and "|" in inside[0] else plain).split("|")
    columns = [_column(part.strip()) for part in parts] if len(parts) > 1 else []
    return tuple(column for column in columns if column is not None) if all(columns) else ()


def _column(plain: str) -> ImportedColumn | SpeedColumn | None:
    plain = _LOGGED.sub("", _LETTERS.get(plain, plain))
    if (column := imported_column(plain)) is not None:
        return column
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
        if parse_unit(unit) is not None or link_unit(unit) is not None:
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
    if (base_column := imported_column(base)) is not None:
        return base_column
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
    names = {column_name(title): column for title, column in IMPORTED.items()}
    begun = [title for title in names if name and title.startswith(name)]
    near = [*begun, *difflib.get_close_matches(name, names, n=2 * _MOST_SUGGESTED, cutoff=0.8)]
    return list(dict.fromkeys(names[title].written for title in near))[:_MOST_SUGGESTED]


HINT = (
    "a table has column names, such as gpu,gpus,batch,samples/s in a CSV, and one row per training; likewise in "
    "TSV, Markdown, JSON or YAML"
)
FORMS = (".csv", ".tsv", ".md", ".markdown", ".json", ".jsonl", ".yaml", ".yml")
"""Suffixes of supported files."""


class Cell(NamedTuple):
    """A cell as written: its line (None for one from the command line), its column's title, its text."""

    line: int | None
    title: str
    text: str
    separator: str = ":"  # Between the file and `line`, which is a row where a form has no lines.


class Line(NamedTuple):
    """A row as written: its line, and its cells."""

    number: int
    cells: Sequence[Cell]


class Form(NamedTuple):
    """A file cut into cells: the titles if they are above the rows, the rows, and its defaults for all rows."""

    lines: Sequence[Line] | Iterator[Line]
    titles: Sequence[Cell] = ()
    defaults: Sequence[Cell] = ()
    ignore: Sequence[str] = ()


class TableError(Exception):
    """An error in a table, before the file is known.

    Args:
        message: one sentence.
        line: its place; None if it has none.
        hint: the fix.
        separator: as in `Cell`.
    """

    def __init__(self, message: str, line: int | None, hint: str = HINT, separator: str = ":") -> None:
        super().__init__(message)
        self.line = line
        self.hint = hint
        self.separator = separator


def read_forms(text: str, source: str) -> list[Form]:
    """The tables of a file, by its suffix: one, or all of a Markdown file.

    A CSV has commas, semicolons or tabs between cells, and titles in the first non-empty line. A YAML is a list of
    mappings, or has `rows:` with `columns:`, `defaults:` and `ignore:`. A JSON is the same, or all_results.json or
    trainer_state.json of Hugging Face's Trainer.
    """
    text = text.removeprefix(_BYTE_ORDER_MARK)
    ending = PurePath(source).suffix.lower()
    if ending in {".yaml", ".yml"}:
        return [_read_yaml(yaml_nodes(text))]
    if ending == ".jsonl":
        text = f"[{','.join(line for line in text.splitlines() if line.strip())}]"
    if ending in {".json", ".jsonl"}:
        return [_read_json(text)]
    return _read_markdown(text) if ending in {".md", ".markdown"} else [_read_csv(text)]


_BYTE_ORDER_MARK = "\ufeff"
# Many European spreadsheets use semicolons, which titles do not contain.
_DELIMITERS = (",", ";", "\t")
_DECIMAL_COMMA = re.compile(r"\s*\d+,\d+\s*")


def _read_csv(text: str) -> Form:
    # Titles may follow a heading, which may contain commas.
    first = "".join([line for line in text.splitlines() if line.strip()][:2])
    delimiter = max(_DELIMITERS, key=first.count)
    records = [(number, cells) for number, cells in _csv_records(text, delimiter) if any(map(str.strip, cells))]
    # A heading above the table.
    while len(records) > 1 and _is_heading(records[0][1]) and len(records[1][1]) > 1:
        records.pop(0)
    if delimiter == ";":
        _refuse_decimal_commas(records[1:])
    return _of_grid(records)


def _is_heading(cells: Sequence[str]) -> bool:
    texts = [cell.strip() for cell in cells if cell.strip()]
    return len(texts) == 1 and not _is_title(texts[0])


def _refuse_decimal_commas(records: Sequence[tuple[int, list[str]]]) -> None:
    """With semicolons between cells, 1,234 may be a little more than 1 or more than a thousand."""
    for number, cells in records:
        odd = next((cell.strip() for cell in cells if _DECIMAL_COMMA.fullmatch(cell)), None)
        if odd is not None:
            raise TableError(
                (f"{odd!r} is ambiguous (decimal or thousands separator): expected a number with a decimal point"),
                number,
            )


def _of_grid(records: Sequence[tuple[int, list[str]]]) -> Form:
    if not records:
        return Form([])
    number, titles = records[0][0], [cell.strip() for cell in records[0][1]]
    if titles and (titles[0].lower() in WORDS.titles.corners or _is_title(titles[0])):
        first = [cells[0].strip() for _, cells in records[1:]]
        if sum(map(_is_title, first)) > sum(map(_is_title, titles[1:])):
            return _turned(number, titles, records[1:])
        # Row names need no title.
        titles[0] = titles[0] or ("name" if any(first) else "")
    return Form(_grid_lines(titles, records[1:]), [Cell(number, title, "") for title in titles if title])


def _is_title(text: str) -> bool:
    return bool(text) and read_title(text) is not None


def _turned(number: int, names: Sequence[str], records: Sequence[tuple[int, list[str]]]) -> Form:
    """A table with its titles on the left and one column per training."""
    for line, cells in records:
        if len(cells) != len(names):
            raise TableError(f"{len(cells)} cells under {len(names)} titles", line)
    above = names[0] if _is_title(names[0]) else "name"
    titles = [Cell(line, cells[0].strip(), "") for line, cells in records]
    lines = []
    for at, name in enumerate(names[1:], 1):
        settings = settings_of(name) if above == "name" else ()
        cells_above = [Cell(number, *setting) for setting in settings] or [Cell(number, above, name)]
        figures = [Cell(line, cells[0].strip(), cells[at]) for line, cells in records]
        lines.append(Line(number, [*cells_above, *figures]))
    return Form(lines, titles)


def _grid_lines(titles: Sequence[str], records: Sequence[tuple[int, list[str]]]) -> Iterator[Line]:
    for number, cells in records:
        if len(cells) != len(titles):
            raise TableError(f"{len(cells)} cells under {len(titles)} titles", number)
        yield Line(number, list(_grid_cells(number, titles, cells)))


def _grid_cells(number: int, titles: Sequence[str], cells: Sequence[str]) -> Iterator[Cell]:
    for title, cell in zip(titles, cells, strict=True):
        if title:
            yield Cell(number, title, cell)
        elif cell.strip():
            raise TableError("a cell is in a column without a title", number)


def _csv_records(text: str, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    while True:
        number = reader.line_num + 1
        try:
            yield number, next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise TableError(f"it is not CSV: {error}", number) from None


_RULE = re.compile(r"\s*\|?(\s*:?-+:?\s*\|)+(\s*:?-+:?\s*)?\|?\s*|\s*\|\s*:?-+:?\s*\|?\s*")
_BAR = re.compile(r"(?<!\\)\|")
_ESCAPED = re.compile(r"\\([\\`*_{}\[\]()#+\-.!|~<>])")
_LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
_BOLD = re.compile(r"\*\*(.+?)\*\*|`(.+?)`")


def _read_markdown(text: str) -> list[Form]:
    lines = text.splitlines()
    rules = [at for at, line in enumerate(lines) if at and "|" in lines[at - 1] and _RULE.fullmatch(line)]
    if not rules:
        raise TableError(
            "it has no table; expected a line of titles, | gpus | samples/s |, and a line of dashes, | --- | --- |", 1
        )
    return [_of_grid(list(_markdown_records(lines, at))) for at in rules]


def _markdown_records(lines: Sequence[str], rule: int) -> Iterator[tuple[int, list[str]]]:
    titles = _markdown_cells(lines[rule - 1])
    yield rule, titles
    for number, line in enumerate(lines[rule + 1 :], rule + 2):
        if "|" not in line:
            return
        cells = _markdown_cells(line)
        yield number, [*cells, *[""] * (len(titles) - len(cells))]


def _markdown_cells(line: str) -> list[str]:
    line = line.strip()
    line = line.removeprefix("|")
    line = line[:-1] if _BAR.search(line[-1:]) and not line.endswith("\\|") else line
    return [_markdown_text(cell) for cell in _BAR.split(line)]


def _markdown_text(cell: str) -> str:
    cell = _LINK.sub(r"\1", cell.strip())
    cell = _BOLD.sub(lambda match: match[1] or match[2], cell)
    return _ESCAPED.sub(r"\1", cell).strip()


_IN_ROW = ": row "
_ENDED = "train_runtime"


def _read_json(text: str) -> Form:
    try:
        # Text is kept as written: its digits show how a figure was rounded.
        root = json.loads(text, parse_float=str, parse_int=str, parse_constant=str)
    except (ValueError, RecursionError) as error:
        raise TableError(f"it is not JSON: {error}", None) from None
    if isinstance(root, dict) and isinstance(root.get("log_history"), list):
        root = [_trainer_row(root)]
    parts = root if isinstance(root, dict) else {"rows": root}
    defaults = parts.get("defaults", {})
    rows = parts.get("rows", parts.get("data"))
    if rows is None:
        rows = _json_rows(parts)
    if not isinstance(rows, list) or not isinstance(defaults, dict):
        raise TableError("expected a list of rows, or an object with rows, columns and defaults", None)
    titles = [_json_text(title) for title in parts.get("columns", [])]
    lines = [Line(number, _json_row(number, row, titles)) for number, row in enumerate(rows, 1)]
    ignore = [_json_text(title) for title in parts.get("ignore", [])]
    return Form(lines, (), _json_cells(1, defaults), ignore)


def _trainer_row(state: Mapping[str, Any]) -> dict[str, Any]:
    ends = [entry for entry in state["log_history"] if isinstance(entry, dict) and _ENDED in entry]
    if not ends:
        raise TableError(
            f"its training was not finished: no {_ENDED} in log_history", None, "use all_results.json instead"
        )
    row = {key: value for key, value in ends[-1].items() if key not in {"step", "epoch"}}
    return row | {key: state[key] for key in ("global_step", "epoch") if key in state}


def _json_rows(parts: Mapping[str, Any]) -> list[Any]:
    values = list(parts.values())
    if values and all(isinstance(value, list) for value in values):
        if len({len(value) for value in values}) > 1:
            raise TableError("its columns have different lengths", None)
        return [dict(zip(parts, row, strict=True)) for row in zip(*values, strict=True)]
    if values and all(isinstance(value, dict) for value in values):
        return [{"name": name} | row for name, row in parts.items()]
    return [dict(parts)]


def _json_row(number: int, row: Any, titles: Sequence[str]) -> list[Cell]:
    if isinstance(row, dict):
        return _json_cells(number, row)
    if not isinstance(row, list) or len(row) != len(titles):
        raise TableError(f"expected an object, or a list of {len(titles)} cells", number, separator=_IN_ROW)
    return [Cell(number, title, _json_text(value, number), _IN_ROW) for title, value in zip(titles, row, strict=True)]


def _json_cells(number: int, row: Mapping[str, Any]) -> list[Cell]:
    return [Cell(number, title, _json_text(value, number), _IN_ROW) for title, value in row.items()]


def _json_text(value: Any, number: int | None = None) -> str:
    if isinstance(value, (dict, list)):
        raise TableError("expected one word or number, not a list or an object", number, separator=_IN_ROW)
    # Numbers are text already.
    return value if isinstance(value, str) else json.dumps(value)


_NULL = "tag:yaml.org,2002:null"
_KEYS = ("columns", "rows", "defaults", "ignore")


def _read_yaml(root: yaml.Node | None) -> Form:
    parts = _yaml_parts(root)
    titles = [_yaml_text(node) for node in _yaml_items(parts.get("columns"))]
    defaults = _yaml_cells(parts["defaults"]) if "defaults" in parts else []
    ignore = [_yaml_text(node) for node in _yaml_items(parts.get("ignore"))]
    lines = [Line(_yaml_line(node), _yaml_row(node, titles)) for node in _yaml_items(parts.get("rows"))]
    return Form(lines, (), defaults, ignore)


def _yaml_parts(root: yaml.Node | None) -> dict[str, yaml.Node]:
    if isinstance(root, yaml.SequenceNode):
        return {"rows": root}
    if not isinstance(root, yaml.MappingNode):
        raise TableError("expected a list of rows, or rows: beside columns: and defaults:", 1)
    parts = {_yaml_text(key): value for key, value in root.value}
    for key, _ in root.value:
        if key.value not in _KEYS:
            raise TableError(f"unknown key {key.value!r}: expected one of {', '.join(_KEYS)}", _yaml_line(key))
    return parts


def _yaml_row(node: yaml.Node, titles: Sequence[str]) -> list[Cell]:
    if isinstance(node, yaml.MappingNode):
        return _yaml_cells(node)
    cells = _yaml_items(node)
    if len(cells) != len(titles):
        raise TableError(f"{len(cells)} cells in a row of {len(titles)} columns", _yaml_line(node))
    return [Cell(_yaml_line(cell), title, _yaml_text(cell)) for title, cell in zip(titles, cells, strict=True)]


def _yaml_cells(node: yaml.Node) -> list[Cell]:
    if not isinstance(node, yaml.MappingNode):
        raise TableError("expected a mapping of columns to cells", _yaml_line(node))
    # The alias's value has the line of its anchor; the key has its own line.
    return [Cell(_yaml_line(key), _yaml_text(key), _yaml_text(value, _yaml_line(key))) for key, value in node.value]


def _yaml_items(node: yaml.Node | None) -> list[yaml.Node]:
    if node is not None and not isinstance(node, yaml.SequenceNode):
        raise TableError("expected a list", _yaml_line(node))
    return list(node.value) if node is not None else []


def _yaml_text(node: yaml.Node, line: int | None = None) -> str:
    if not isinstance(node, yaml.ScalarNode):
        raise TableError("expected one word or number, not a list or a mapping", line or _yaml_line(node))
    return "null" if node.tag == _NULL else str(node.value)


def _yaml_line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1
