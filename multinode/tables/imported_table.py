"""ImportedTable: figures measured elsewhere, as the file has them. make_table reads its cells strictly.

Columns and cells are defined in imported_columns, file formats in imported_forms, and rows
in imported_rows.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from multinode.errors import UsageError
from multinode.predict.published import PublishedLink
from multinode.stats.estimate import Estimate, exactly
from multinode.strict_yaml import YamlError
from multinode.tables.columns import COLUMNS, column_name
from multinode.tables.imported_columns import (
    IMPORTED,
    ImplausibleError,
    ImportedColumn,
    OutOfMemory,
    Value,
    is_number,
    is_percentage,
    is_told,
)
from multinode.tables.imported_forms import HINT, Cell, Form, Line, TableError, read_forms
from multinode.tables.imported_titles import (
    SpeedColumn,
    TitleColumn,
    is_derived,
    named_column,
    nearest_column,
    read_title,
)

_MOST_ROWS = 20_000
_SHOWN = 60
_MOST_TITLES = 4
_LONGEST_LABEL = 200
# Our own tables have both in one column: `2 x 4`, or `8 workers`.
_NODES_AND_WORKERS = re.compile(
    r"nodes\(?[x\u00d7*](workers|gpus?)\)?|[^\W\d_]*\u8282\u70b9\u6570?[x\u00d7*][^\W\d_]*\u5361\u6570?"
)
# Devices with a count: `8 x A100`, `RTX 4090 x 2`, or `2 x 8 x A100` on two nodes.
_DEVICES = re.compile(
    r"(?:(?P<nodes>\d{1,4})\s*[x\u00d7*]\s*)?(?P<before>\d{1,4})\s*[x\u00d7*]\s*(?P<name>\S*[^\W\d].*)"
    r"|(?P<first>.*[^\W\d].*?)\s*[x\u00d7*]\s*(?P<behind>\d{1,4})"
)


class Extras(msgspec.Struct, frozen=True, kw_only=True):
    """The user's statements about a whole table."""

    defaults: dict[str, str] = {}  # cells, as text, by title, for values that a row or the table lacks
    ignore: tuple[str, ...] = ()  # titles of ignored columns
    columns: dict[str, str] = {}  # names of columns by the table's titles
    skip_unknown: bool = False  # whether columns of numbers with unknown titles are ignored
    table: int | None = None  # which table of the file, from 1; None if one of them has results


class ImportedRow(msgspec.Struct, frozen=True, kw_only=True):
    """One row."""

    line: int  # its line in the file, counted from 1
    words: dict[str, str] = {}  # text cells, by the name of their column
    figures: dict[str, Estimate] = {}  # numeric cells in the column's unit, by the name of their column
    labels: dict[str, str] = {}  # cells of text columns with unknown titles, by their title
    out_of: str | None = None  # whose memory ran out, `gpu` or `node`, if the row says so

    @property
    def is_measured(self) -> bool:
        """Whether it has a result of a training, such as a speed or that it ran out of memory."""
        return self.out_of is not None or any(COLUMNS[name].is_measured for name in self.figures)


class ImportedTable(msgspec.Struct, frozen=True, kw_only=True):
    """A table as its file has it, with at least one row."""

    rows: tuple[ImportedRow, ...]
    ignored: tuple[str, ...] = ()  # titles of columns that were not read
    labels: tuple[str, ...] = ()  # titles of text columns that are kept as labels


def parse_table(text: str, source: str, extras: Extras) -> ImportedTable:
    """The rows of a file, whose format follows from its name.

    Args:
        text: of the file.
        source: its path, for messages.
        extras: the user's statements, which take precedence over the file.

    Raises:
        UsageError: `source:line:` and the error.
    """
    try:
        form = _chosen(read_forms(text, source), extras.table)
        return make_table(form, msgspec.structs.replace(extras, ignore=(*extras.ignore, *form.ignore)))
    except YamlError as wrong:
        raise UsageError(wrong.at(source), hint=HINT) from None
    except TableError as wrong:
        place = source if wrong.line is None else f"{source}{wrong.separator}{wrong.line}"
        raise UsageError(f"{place}: {wrong}", hint=wrong.hint) from None


def _chosen(forms: Sequence[Form], number: int | None) -> Form:
    measured = [form for form in forms if any(_is_result(cell.title) for cell in form.titles)]
    if number is None and (len(forms) == 1 or len(measured) == 1):
        return forms[0] if len(forms) == 1 else measured[0]
    if number is not None and 1 <= number <= len(forms):
        return forms[number - 1]
    tables = "; ".join(f"{at} {_titles_of(form)}" for at, form in enumerate(forms, 1))
    if number is None:
        raise TableError(f"it has {len(forms)} tables: {tables}", None, "read one of them with --table N")
    count = "1 table" if len(forms) == 1 else f"{len(forms)} tables"
    hint = "remove --table" if len(forms) == 1 else f"--table expects 1 to {len(forms)}"
    raise TableError(f"--table {number}: it has {count}: {tables}", None, hint)


def _is_result(title: str) -> bool:
    column = read_title(title)
    return column is not None and (isinstance(column, SpeedColumn) or column.is_measured)


def _titles_of(form: Form) -> str:
    titles = list(form.titles)
    if not titles:
        return "without titles"
    more = ", ..." if len(titles) > _MOST_TITLES else ""
    return f"in line {titles[0].line} ({', '.join(_shown(cell.title) for cell in titles[:_MOST_TITLES])}{more})"


def make_table(form: Form, extras: Extras) -> ImportedTable:
    """The rows of a file.

    Args:
        form: the file, cut into cells.
        extras: the user's statements, which take precedence over the file's defaults.

    Raises:
        TableError: a column is unknown, a cell does not fit its column, a column that the user names is missing, or
            there is no row.
    """
    lines = list(_at_most(form.lines))
    given = [Cell(None, title, text) for title, text in extras.defaults.items()]
    cells = [*form.titles, *form.defaults, *given, *(cell for line in lines for cell in line.cells)]
    skips = extras.skip_unknown or form.has_metrics
    titles = _Titles(cells, extras, skips=skips)
    # Duplicate columns are reported at the line of the titles.
    titles.row(form.titles)
    general = titles.row(form.defaults) | titles.row(given)
    labels = titles.labels_of(form.defaults) | titles.labels_of(given)
    rows = [
        _row(line.number, general | titles.row(line.cells), labels | titles.labels_of(line.cells)) for line in lines
    ]
    if not rows:
        raise TableError("it has no rows", 1)
    if skips and not any(row.is_measured for row in rows):
        skipped = ", ".join(map(_shown, titles.ignored)) or "unknown columns"
        raise TableError(
            f"without {skipped}, the table has no measured column", None, "map one of them: --column 'TITLE=samples/s'"
        )
    return ImportedTable(rows=tuple(rows), ignored=tuple(titles.ignored), labels=tuple(titles.labels))


def _at_most(lines: Sequence[Line] | Iterator[Line]) -> Iterator[Line]:
    for number, line in enumerate(lines):
        if number == _MOST_ROWS:
            raise TableError(f"there are more than {_MOST_ROWS} rows", line.number)
        yield line


def _row(line: int, values: Mapping[str, Value], labels: Mapping[str, str]) -> ImportedRow:
    return ImportedRow(
        line=line,
        labels=dict(labels),
        words={name: value for name, value in values.items() if isinstance(value, str)},
        figures={name: value for name, value in values.items() if isinstance(value, Estimate)},
        out_of=next((value.out_of for value in values.values() if isinstance(value, OutOfMemory)), None),
    )


class _Titles:
    """The meaning of a table's titles, each read once.

    Raises:
        TableError: a title is unknown and its cells are numbers, or the user names a missing one.
    """

    def __init__(self, cells: Sequence[Cell], extras: Extras, *, skips: bool) -> None:
        self.ignored: dict[str, None] = {}
        self.labels: dict[str, None] = {}
        self._skips = skips
        self._columns: dict[str, TitleColumn] = {}
        self._places: set[str] = set()
        by_title: dict[str, list[Cell]] = {}
        for cell in cells:
            by_title.setdefault(cell.title, []).append(cell)
        present = {column_name(title) for title in by_title}
        ignore, named = ({column_name(title): title for title in titles} for titles in (extras.ignore, extras.columns))
        unknown: list[Cell] = []
        for title, under in by_title.items():
            name = column_name(title)
            if name in ignore:
                self.ignored.setdefault(ignore[name])
            elif name in named:
                self._columns[title] = _in_percent(_named(title, extras.columns[named[name]]), under)
            elif not self._is_known(title, under):
                unknown += self._unknown(title, under)
        if unknown:
            raise _unknown(unknown)
        _require(ignore, present, " to ignore", "--ignore expects a title of the table")
        _require(named, present, "", "--column expects a title of the table: 'TITLE=name'")

    def _is_known(self, title: str, under: Sequence[Cell]) -> bool:
        if _NODES_AND_WORKERS.fullmatch(column_name(title)):
            self._places.add(title)
        elif (column := read_title(title)) is not None:
            self._columns[title] = _in_percent(column, under)
        elif is_derived(title):
            self.ignored.setdefault(title)
        else:
            return False
        return True

    def _unknown(self, title: str, under: Sequence[Cell]) -> Iterator[Cell]:
        """The first cell of an unknown column, unless it is of text, which is a label, or is to be skipped."""
        first = next((cell for cell in under if cell.line is not None), None)
        if first is None:
            yield under[0]
        elif not any(is_number(cell.text) for cell in under):
            self._label(first, is_empty=not any(is_told(cell.text) for cell in under))
        elif self._skips:
            self.ignored.setdefault(title)
        else:
            yield first

    def _label(self, first: Cell, *, is_empty: bool) -> None:
        _require_printable(first.title, first._replace(title="a title"))
        (self.ignored if is_empty else self.labels).setdefault(first.title)

    def row(self, cells: Sequence[Cell]) -> dict[str, Value]:
        """Values by column; an empty cell has none, an explicitly unknown one is None."""
        values: dict[str, Value] = {}
        titles: dict[str, str] = {}
        for cell, column in self._of(cells):
            name = column.column.name
            if name in titles:
                conflict = f"{_shown(titles[name])} and {_shown(cell.title)} mean the same thing"
                raise TableError(conflict, cell.line, "remove one of them, or ignore it with --ignore")
            titles[name] = cell.title
            if cell.text.strip():
                values[name] = _value(cell, column)
        return _with_link(_with_devices(values))

    def labels_of(self, cells: Sequence[Cell]) -> dict[str, str]:
        """The text of each column that is kept as a label, by its title."""
        labels: dict[str, str] = {}
        for cell in cells:
            if cell.title not in self.labels or not is_told(cell.text):
                continue
            if cell.title in labels:
                raise TableError(f"two columns are called {_shown(cell.title)}", cell.line, "rename one")
            text = " ".join(cell.text.split())
            _require_printable(text, cell)
            labels[cell.title] = text[:_LONGEST_LABEL]
        return labels

    def _of(self, cells: Sequence[Cell]) -> Iterator[tuple[Cell, ImportedColumn]]:
        for cell in cells:
            if cell.title in self._columns:
                yield cell, _of_speed(cell, self._columns[cell.title])
            elif cell.title in self._places:
                yield from _nodes_and_workers(cell)


def _require(asked: Mapping[str, str], present: set[str], purpose: str, hint: str) -> None:
    for name, title in asked.items():
        if name not in present:
            raise TableError(f"it has no column {_shown(title)}{purpose}", None, hint)


def _in_percent(column: TitleColumn, cells: Sequence[Cell]) -> TitleColumn:
    """The column, in percent if it is of shares and one of its numbers is above 1."""
    is_bare = isinstance(column, ImportedColumn) and column.column.kind == "share" and column.scale == 1
    if is_bare and isinstance(column, ImportedColumn) and any(is_percentage(cell.text) for cell in cells):
        return column._replace(scale=0.01)
    return column


def _named(title: str, name: str) -> TitleColumn:
    try:
        column = named_column(title, name)
    except ValueError as error:
        raise TableError(f"--column {title}={name}: {error}", None, "name the figure that its unit measures") from None
    if column is None:
        near = nearest_column(name)
        words = f"--column {title}={name}: there is no column {_shown(name)}"
        raise TableError(words + (f" (nearest: {near})" if near else ""), None, f"the columns are: {_all_names()}")
    return column


def _of_speed(cell: Cell, column: TitleColumn) -> ImportedColumn:
    if isinstance(column, ImportedColumn):
        return column
    if not cell.text.strip():
        return IMPORTED["samples_per_s"]
    try:
        return column.column(cell.text)
    except ValueError:
        wrong = f"{cell.title}: {_shown(cell.text.strip())}: expected {column.expected}"
        raise TableError(wrong, cell.line, _other_way(cell), cell.separator) from None


def _with_devices(values: dict[str, Value]) -> dict[str, Value]:
    match = _DEVICES.fullmatch(str(values.get("device", "")))
    if match is None:
        return values
    count = match["before"] or match["behind"]
    names = ("nodes", "workers_per_node") if match["nodes"] else ("world_size",)
    numbers = dict(zip(names, filter(None, (match["nodes"], count)), strict=True))
    fixed = {name: exactly(int(number)) for name, number in numbers.items() if int(number)}
    return fixed | values | {"device": match["name"] or match["first"]}


def _with_link(values: dict[str, Value]) -> dict[str, Value]:
    """With the rate of a link, its NICs and whether it is RDMA, each as a value; those of their own columns count."""
    link = values.get("network_gbit_per_s")
    if not isinstance(link, PublishedLink):
        return values
    figures = {"network_gbit_per_s": link.gbit_per_s, "nics": link.nics}
    told: dict[str, Value] = {name: exactly(value) for name, value in figures.items() if value is not None}
    if link.rdma is not None:
        told["rdma"] = "yes" if link.rdma else "no"
    return told | {name: value for name, value in values.items() if value is not link}


def _nodes_and_workers(cell: Cell) -> Iterator[tuple[Cell, ImportedColumn]]:
    numbers = re.findall(r"\d+", cell.text)
    names = ("nodes", "workers_per_node") if len(numbers) > 1 else ("world_size",)
    for name, number in zip(names, numbers, strict=False):
        yield cell._replace(text=number), IMPORTED[name]


def _unknown(cells: Sequence[Cell]) -> TableError:
    titles = [_shown(cell.title) + _nearest(cell.title) for cell in cells]
    number = "unknown column" if len(titles) == 1 else f"{len(titles)} unknown columns:"
    title = cells[0].title[:_SHOWN]
    return TableError(
        f"{number} {', '.join(titles)}",
        cells[0].line,
        f"to map it: --column {title + '=NAME'!r}; to ignore it: --ignore {title!r}; to ignore all: --skip-unknown; "
        f"names: {_all_names()}",
        cells[0].separator,
    )


def _nearest(title: str) -> str:
    near = nearest_column(title)
    return f" (nearest: {near})" if near else ""


def _all_names() -> str:
    return ", ".join(dict.fromkeys(column.written for column in IMPORTED.values()))


def _value(cell: Cell, column: ImportedColumn) -> Value:
    text = cell.text.strip()
    _require_printable(text, cell)
    try:
        return column.value(text)
    except ImplausibleError as error:
        wrong = f"{cell.title}: {_shown(text)}: {error}"
    except ValueError:
        source = f"{cell.title}: {_shown(text)}" if cell.line is not None else f"--default {cell.title}={text[:_SHOWN]}"
        wrong = f"{source}: expected {column.expected}"
    raise TableError(wrong, cell.line, _other_way(cell) if cell.line is not None else HINT, cell.separator)


def _other_way(cell: Cell) -> str:
    title = cell.title[:_SHOWN]
    return f"to map it to another column: --column {title + '=NAME'!r}; to ignore it: --ignore {title!r}"


def _require_printable(text: str, cell: Cell) -> None:
    odd = next((char for char in text if not char.isprintable() and unicodedata.category(char) != "Zs"), None)
    if odd is not None:
        raise TableError(f"{cell.title}: invalid character U+{ord(odd):04X}", cell.line, separator=cell.separator)


def _shown(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...")
