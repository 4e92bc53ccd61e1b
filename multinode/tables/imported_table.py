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
from multinode.sweep.columns import column_name
from multinode.tables.imported_columns import (
    IMPORTED,
    ImplausibleError,
    ImportedColumn,
    OutOfMemory,
    Value,
)
from multinode.tables.imported_forms import (
    HINT,
    Cell,
    Form,
    Line,
    SpeedColumn,
    TableError,
    Title,
    is_passed_over,
    nearest_columns,
    read_forms,
    read_title,
    settings_of,
)

_MOST_ROWS = 20_000
_SHOWN = 60
_MOST_UNKNOWN = 40
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
    skip_unknown: bool = False  # whether columns with unknown titles are ignored


class ImportedRow(msgspec.Struct, frozen=True, kw_only=True):
    """One row."""

    line: int  # its line in the file, counted from 1
    words: dict[str, str] = {}  # text cells, by the name of their column
    figures: dict[str, Estimate] = {}  # numeric cells, likewise, in the column's unit
    out_of: str | None = None  # whose memory ran out, `gpu` or `node`, if the row says so


class ImportedTable(msgspec.Struct, frozen=True, kw_only=True):
    """A table as its file has it, with at least one row, and the ignored titles."""

    rows: tuple[ImportedRow, ...]
    ignored: tuple[str, ...] = ()


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
        form = _one_form(read_forms(text, source))
        return make_table(form, msgspec.structs.replace(extras, ignore=(*extras.ignore, *form.ignore)))
    except YamlError as wrong:
        raise UsageError(wrong.at(source), hint=HINT) from None
    except TableError as wrong:
        place = source if wrong.line is None else f"{source}{wrong.separator}{wrong.line}"
        raise UsageError(f"{place}: {wrong}", hint=wrong.hint) from None


def _one_form(forms: Sequence[Form]) -> Form:
    if len(forms) == 1:
        return forms[0]
    filled = [form for form in forms if any(_is_figure(cell.title) for cell in form.titles)]
    if len(filled) == 1:
        return filled[0]
    lines = ", ".join(str(form.titles[0].line) for form in filled or forms if form.titles)
    raise TableError(f"it has {len(filled or forms)} tables, in lines {lines}", None, "keep only one in the file")


def _is_figure(title: str) -> bool:
    columns = read_title(title)
    return columns is not None and any(isinstance(c, SpeedColumn) or c.is_measured for c in columns.columns)


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
    titles = _Titles(cells, extras)
    # Duplicate columns are reported at the line of the titles.
    for _ in titles.rows(form.titles):
        pass
    general = titles.row(form.defaults) | titles.row(given)
    rows = [_row(line.number, general | values) for line in lines for values in titles.rows(line.cells)]
    if not rows:
        raise TableError("it has no rows", 1)
    return ImportedTable(rows=tuple(rows), ignored=tuple(titles.ignored))


def _at_most(lines: Sequence[Line] | Iterator[Line]) -> Iterator[Line]:
    for number, line in enumerate(lines):
        if number == _MOST_ROWS:
            raise TableError(f"there are more than {_MOST_ROWS} rows", line.number)
        yield line


def _row(line: int, values: Mapping[str, Value]) -> ImportedRow:
    return ImportedRow(
        line=line,
        words={name: value for name, value in values.items() if isinstance(value, str)},
        figures={name: value for name, value in values.items() if isinstance(value, Estimate)},
        out_of=next((value.out_of for value in values.values() if isinstance(value, OutOfMemory)), None),
    )


class _Titles:
    """The meaning of a table's titles, each read once.

    Raises:
        TableError: a title is unknown, or the user names a missing one.
    """

    def __init__(self, cells: Sequence[Cell], extras: Extras) -> None:
        self.ignored: dict[str, None] = {}
        self._titles: dict[str, Title | None] = {}
        ignore = {column_name(title): title for title in extras.ignore}
        named = {column_name(title): (title, name) for title, name in extras.columns.items()}
        unknown: list[Cell] = []
        first = {cell.title: cell for cell in reversed(cells)}
        absent = dict.fromkeys((*ignore, *named))
        for title in dict.fromkeys(cell.title for cell in cells):
            name = column_name(title)
            absent.pop(name, None)
            if name in ignore:
                self._ignore(title, ignore[name])
            elif name in named:
                self._titles[title] = _named(title, named[name][1])
            elif (columns := read_title(title)) is not None or _NODES_AND_WORKERS.fullmatch(name):
                self._titles[title] = columns
            elif is_passed_over(title) or (extras.skip_unknown and first[title].line is not None):
                self._ignore(title, title)
            else:
                unknown.append(first[title])
        if unknown:
            raise _unknown(unknown)
        for name in absent:
            if name in ignore:
                raise TableError(
                    f"it has no column {_shown(ignore[name])} to ignore", None, "--ignore expects a title of the table"
                )
            raise TableError(
                f"it has no column {_shown(named[name][0])}",
                None,
                ("--column expects a title of the table: 'TITLE=name'"),
            )

    def _ignore(self, title: str, reason: str) -> None:
        self._titles[title] = None
        self.ignored[reason] = None

    def row(self, cells: Sequence[Cell]) -> dict[str, Value]:
        """Values by column; an empty cell has none, an explicitly unknown one is None."""
        return next(self.rows(cells))

    def rows(self, cells: Sequence[Cell]) -> Iterator[dict[str, Value]]:
        """The values of each training in a row: several if titles distinguish them."""
        general: list[Cell] = []
        special: dict[tuple[tuple[str, str], ...], list[Cell]] = {}
        for cell in cells:
            title = self._titles[cell.title]
            (special.setdefault(title.settings, []) if title and title.settings else general).append(cell)
        if not special:
            yield self._values(general)
        for settings, figures in special.items():
            if any(cell.text.strip() for cell in figures) or not any(cell.text.strip() for cell in cells):
                setting_cells = [Cell(figures[0].line, name, text) for name, text in settings]
                yield self._values([*general, *setting_cells, *figures])

    def _values(self, cells: Sequence[Cell]) -> dict[str, Value]:
        values: dict[str, Value] = {}
        titles: dict[str, str] = {}
        for cell, column in self._columns(cells):
            name = column.column.name
            if name in titles:
                conflict = f"{_shown(titles[name])} and {_shown(cell.title)} mean the same"
                raise TableError(conflict, cell.line, "keep one, or ignore the other with --ignore")
            titles[name] = cell.title
            if cell.text.strip():
                values[name] = _value(cell, column)
        return _with_link(_with_devices(values))

    def _columns(self, cells: Sequence[Cell]) -> Iterator[tuple[Cell, ImportedColumn]]:
        for cell in cells:
            title = self._titles.get(cell.title, read_title(cell.title))
            if _NODES_AND_WORKERS.fullmatch(column_name(cell.title)):
                yield from _nodes_and_workers(cell)
            elif title is not None:
                for part, column in zip(_parts(cell, len(title.columns)), title.columns, strict=True):
                    yield part, _of_speed(part, column)


def _named(title: str, name: str) -> Title:
    columns = read_title(name)
    if columns is None:
        near = " or ".join(nearest_columns(name))
        words = f"--column {title}={name}: there is no column {_shown(name)}"
        raise TableError(words + (f": did you mean {near}?" if near else ""), None, f"the columns are: {_all_names()}")
    own = read_title(title)
    return Title(columns.columns, own.settings if own is not None else settings_of(title))


def _of_speed(cell: Cell, column: ImportedColumn | SpeedColumn) -> ImportedColumn:
    if isinstance(column, ImportedColumn):
        return column
    if not cell.text.strip():
        return IMPORTED["samples_per_s"]
    try:
        return column.column(cell.text)
    except ValueError:
        raise TableError(f"{cell.title}: {_shown(cell.text.strip())}: expected {column.expected}", cell.line) from None


def _parts(cell: Cell, count: int) -> list[Cell]:
    if count == 1:
        return [cell]
    for separator in ("|", " / ", "/"):
        texts = cell.text.split(separator)
        if len(texts) == count:
            return [cell._replace(text=text) for text in texts]
    if any(char.isdigit() for char in cell.text):
        raise TableError(
            f"{cell.title}: {_shown(cell.text.strip())}: expected {count} figures with | between them", cell.line
        )
    return [cell] * count


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
    titles = [_shown(cell.title) + _suggestion(cell.title) for cell in cells]
    if len(titles) == 1:
        near = " or ".join(nearest_columns(cells[0].title))
        message = f"unknown column {_shown(cells[0].title)}" + (f": did you mean {near}?" if near else "")
    else:
        more = f" and {len(titles) - _MOST_UNKNOWN} more" if len(titles) > _MOST_UNKNOWN else ""
        message = f"{len(titles)} unknown columns: {', '.join(titles[:_MOST_UNKNOWN])}{more}"
    title = cells[0].title[:_SHOWN]
    wide = next((cell.title for cell in cells if settings_of(cell.title)), None)
    way = f"--column {wide + '=samples/s'!r} names the figures below {wide!r}; " if wide else ""
    return TableError(
        message,
        cells[0].line,
        f"{way}--column {title + '=NAME'!r} maps it, --ignore {title!r} ignores it, --skip-unknown ignores all; "
        f"names: {_all_names()}",
        cells[0].separator,
    )


def _suggestion(title: str) -> str:
    near = " or ".join(nearest_columns(title)[:2])
    return f" (did you mean {near}?)" if near else ""


def _all_names() -> str:
    return ", ".join(dict.fromkeys(column.written for column in IMPORTED.values()))


def _value(cell: Cell, column: ImportedColumn) -> Value:
    text = cell.text.strip()
    odd = next((char for char in text if not char.isprintable() and unicodedata.category(char) != "Zs"), None)
    if odd is not None:
        raise TableError(f"{cell.title}: invalid character U+{ord(odd):04X}", cell.line, separator=cell.separator)
    try:
        return column.value(text)
    except ImplausibleError as error:
        raise TableError(f"{cell.title}: {_shown(text)}: {error}", cell.line, separator=cell.separator) from None
    except ValueError:
        source = f"{cell.title}: {_shown(text)}" if cell.line is not None else f"--default {cell.title}={text[:_SHOWN]}"
        raise TableError(f"{source}: expected {column.expected}", cell.line, separator=cell.separator) from None


def _shown(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...")
