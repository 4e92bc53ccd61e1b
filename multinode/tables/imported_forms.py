"""Cut a foreign table in CSV, TSV, Markdown, aligned text, JSON or YAML into cells; their meaning is unknown here."""

from __future__ import annotations

import csv
import io
import json
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any, NamedTuple

import yaml

from multinode.strict_yaml import yaml_nodes
from multinode.tables.imported_titles import read_title

HINT = (
    "a table needs column names, such as gpu,gpus,batch,samples/s in a CSV, and one row per training run; other "
    "formats are TSV, Markdown, aligned text, JSON and YAML"
)
FORMS = (".csv", ".tsv", ".md", ".markdown", ".txt", ".json", ".jsonl", ".yaml", ".yml")
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
    """A table cut into cells: the titles if they are above the rows, the rows, and its defaults for all rows."""

    lines: Sequence[Line] | Iterator[Line]
    titles: Sequence[Cell] = ()
    defaults: Sequence[Cell] = ()
    ignore: Sequence[str] = ()
    has_metrics: bool = False  # whether it is a file of the Trainer, whose other metrics are left out


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
    """The tables of a file, by its suffix: one, or all of a Markdown or text file.

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
    if ending == ".txt":
        return _read_text(text)
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
    texts = [cell for cell in cells if cell.strip()]
    return len(texts) == 1 and read_title(texts[0]) is None


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
    # Row names need no title.
    if not titles[0] and any(cells[0].strip() for _, cells in records[1:]):
        titles[0] = "name"
    return Form(_grid_lines(titles, records[1:]), [Cell(number, title, "") for title in titles if title])


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
    yield rule, _markdown_cells(lines[rule - 1])
    for number, line in enumerate(lines[rule + 1 :], rule + 2):
        if "|" not in line:
            return
        yield number, _markdown_cells(line)


def _markdown_cells(line: str) -> list[str]:
    return [_markdown_text(cell) for cell in _barred(line)]


def _barred(line: str) -> list[str]:
    line = line.strip()
    line = line.removeprefix("|")
    return _BAR.split(line[:-1] if line.endswith("|") and not line.endswith("\\|") else line)


def _markdown_text(cell: str) -> str:
    cell = _LINK.sub(r"\1", cell.strip())
    cell = _BOLD.sub(lambda match: match[1] or match[2], cell)
    return _ESCAPED.sub(r"\1", cell).strip()


# A line that separates titles from rows, or rows from each other, as psql and tabulate draw it.
_DRAWN = re.compile(r"[\s|+:=-]*[-=]{2}[\s|+:=-]*")
_BOX = str.maketrans("\u2502\u2503\u2551\u2500\u2501\u2550\u253c\u253f\u2501\u256a\u2547", "|||---+++++")
_GAP = re.compile(r" {2,}|\t+")


def _read_text(text: str) -> list[Form]:
    """Tables of aligned text: lines without a blank one between them, with bars, tabs or two blanks between cells."""
    blocks: list[list[tuple[int, str]]] = [[]]
    for number, line in enumerate(text.translate(_BOX).splitlines(), 1):
        if not line.strip():
            blocks.append([])
        elif not _DRAWN.fullmatch(line):
            blocks[-1].append((number, line.expandtabs()))
    tables = [block for block in blocks if len(block) > 1 and len(_cut(block)[0][1]) > 1]
    if not tables:
        raise TableError("it has no table; expected a line of titles, gpus  samples/s, separated by two spaces or |", 1)
    return [_of_grid(_cut(block)) for block in tables]


def _cut(lines: Sequence[tuple[int, str]]) -> list[tuple[int, list[str]]]:
    if "|" in lines[0][1]:
        return [(number, _barred(line)) for number, line in lines]
    cells = [(number, _GAP.split(line.strip())) for number, line in lines]
    if all(len(found) == len(cells[0][1]) for _, found in cells):
        return cells
    return _at_columns(lines, len(cells[0][1])) or cells


def _at_columns(lines: Sequence[tuple[int, str]], count: int) -> list[tuple[int, list[str]]] | None:
    """The cells of aligned lines, of which some are empty; None if these are not the columns of the titles."""
    wide = [(number, _wide(line)) for number, line in lines]
    length = max(len(line) for _, line in wide)
    blank = (all(line[at : at + 1] in {"", " "} for _, line in wide) for at in range(length))
    drawn = "".join(" " if is_blank else "x" for is_blank in blank)
    places = [match.span() for match in re.finditer(r"x(?:x| (?=x))*", drawn)]
    cells = [(number, [line[start:end].replace(_PAD, "").strip() for start, end in places]) for number, line in wide]
    # Row names need no title.
    titles = cells[0][1]
    return cells if sum(map(bool, titles)) == count and all(titles[1:]) else None


_PAD = "\0"


def _wide(line: str) -> str:
    """A line in which each character stands in the column in which a terminal shows it."""
    return "".join(char + _PAD * (unicodedata.east_asian_width(char) in "WF") for char in line)


_IN_ROW = ": row "
_ENDED = "train_runtime"


def _read_json(text: str) -> Form:
    try:
        # Text is kept as written: its digits show how a figure was rounded.
        root = json.loads(text, parse_float=str, parse_int=str, parse_constant=str)
    except (ValueError, RecursionError) as error:
        raise TableError(f"it is not JSON: {error}", None) from None
    if isinstance(root, dict) and isinstance(root.get("log_history"), list):
        root = _trainer_row(root)
    parts = root if isinstance(root, dict) else {"rows": root}
    has_metrics = _ENDED in parts and not isinstance(parts[_ENDED], list)
    defaults = parts.get("defaults", {})
    rows = parts.get("rows", parts.get("data"))
    if rows is None:
        rows = _json_rows(parts)
    if not isinstance(rows, list) or not isinstance(defaults, dict):
        raise TableError("expected a list of rows, or an object with rows, columns and defaults", None)
    titles = [_json_text(title) for title in parts.get("columns", [])]
    lines = [Line(number, _json_row(number, row, titles)) for number, row in enumerate(rows, 1)]
    ignore = [_json_text(title) for title in parts.get("ignore", [])]
    return Form(lines, (), _json_cells(1, defaults), ignore, has_metrics=has_metrics)


def _trainer_row(state: Mapping[str, Any]) -> dict[str, Any]:
    ends = [entry for entry in state["log_history"] if isinstance(entry, dict) and _ENDED in entry]
    if not ends:
        raise TableError(
            f"the training run did not finish: no {_ENDED} in log_history", None, "use all_results.json instead"
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
        expected = f"an object, or a list of {len(titles)} cells" if titles else "an object"
        raise TableError(f"expected {expected}", number, separator=_IN_ROW)
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
