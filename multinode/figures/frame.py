"""Frame: rows under figures; selected, sorted, compared, fitted to a width, as a sheet or a CSV file. Pure."""

from __future__ import annotations

import csv
import difflib
import io
import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from rich.cells import cell_len

from multinode.errors import UsageError
from multinode.figures.figure import Figure, Row, name_of_title, plain
from multinode.findings.finding import Finding
from multinode.render.csv_text import harmless
from multinode.render.sheet import Column, Detail, Sheet, sanitize
from multinode.stats.estimate import Estimate, ratio
from multinode.stats.unknown import Unknown
from multinode.units import UNKNOWN, format_list

_CONDITION = re.compile(r"(?P<name>[^=!<>]+)(?P<sign>!=|<=|>=|=|<|>)(?P<value>.*)", re.DOTALL)
_ORDER: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    ">": operator.gt,
    "<=": operator.le,
    ">=": operator.ge,
}
_TRUTHS = {"yes": True, "true": True, "no": False, "false": False}
_EXAMPLES = "for example method=lora, nodes>=2, state!=failed"
_MOST_SUGGESTED = 3
# Between two columns: padding, and the box's own.
_GAP = 2

_Condition = Callable[[Row], bool]


class Frame(msgspec.Struct, frozen=True, kw_only=True):
    """Rows under figures.

    Attributes:
        rows: in order.
        figures: of every row, in the order of their columns; those without a title only in CSV files and conditions.
        notes: below the table.
        title: above it.
    """

    rows: tuple[Row, ...]
    figures: tuple[Figure[Any], ...]
    notes: tuple[Finding, ...] = ()
    title: str = ""

    def figure(self, name: str) -> Figure[Any]:
        """A figure by its name, title or alias.

        Raises:
            UsageError: there is none, or several.
        """
        named = self._names
        found = named.get(name) or {name_of_title(known): figure for known, figure in named.items()}.get(
            name_of_title(name) if name[:1].isalnum() else name
        )
        if found is None:
            near = format_list(self._nearest(name), conjunction="or")
            raise UsageError(
                f"the table has no column {name!r}" + (f": did you mean {near}?" if near else ""),
                hint=f"its columns are: {', '.join(figure.name for figure in self.figures)}",
            )
        return found

    @property
    def names(self) -> tuple[str, ...]:
        """All names that `figure` accepts."""
        return tuple(self._names)

    @property
    def _names(self) -> Mapping[str, Figure[Any]]:
        """Figures by name, alias and title; a title that fits two, such as `price`, names neither."""
        own = {figure.name: figure for figure in self.figures}
        called: dict[str, dict[str, Figure[Any]]] = {}
        for figure in self.figures:
            for name in {*figure.aliases, name_of_title(figure.title)} - {""}:
                called.setdefault(name, {})[figure.name] = figure
        return own | {
            name: next(iter(figures.values()))
            for name, figures in called.items()
            if len(figures) == 1 and name not in own
        }

    def _nearest(self, name: str) -> list[str]:
        title = name_of_title(name)
        called = {name_of_title(known): figure.name for known, figure in self._names.items()}
        begun = [figure.name for figure in self.figures if title and name_of_title(figure.name).startswith(title)]
        near = (called[known] for known in difflib.get_close_matches(title, called, n=2 * _MOST_SUGGESTED))
        return list(dict.fromkeys((*begun, *near)))[:_MOST_SUGGESTED]

    def where(self, *conditions: str) -> Frame:
        """The rows that meet all conditions, such as `method=lora` and `nodes>=2`.

        Raises:
            UsageError: a condition is wrong, or names no figure.
        """
        meets = [self._condition(text) for text in conditions]
        return msgspec.structs.replace(self, rows=tuple(row for row in self.rows if all(test(row) for test in meets)))

    def sort(self, by: str) -> Frame:
        """The rows by a figure, the least first, with `-` before its name the greatest; unknown values last.

        Raises:
            UsageError: there is no such figure.
        """
        figure = self.figure(by.removeprefix("-"))
        valued = [(value, row) for row in self.rows if (value := plain(row[figure])) is not None]
        if any(not isinstance(value, (int, float)) for value, _ in valued):
            valued = [(str(value).casefold(), row) for value, row in valued]
        valued.sort(key=lambda pair: pair[0], reverse=by.startswith("-"))
        unknown = (row for row in self.rows if plain(row[figure]) is None)
        return msgspec.structs.replace(self, rows=(*(row for _, row in valued), *unknown))

    def over(self, baseline: Row | Frame | None, of: Figure[Estimate], into: Figure[Estimate]) -> Frame:
        """The rows with one figure over that of a baseline, with the interval of the ratio.

        Args:
            baseline: a row; or a frame with the same figures, whose row with the same identity is that of each row.
                None, or a row without the figure, leaves the ratio unknown.
            of: a positive figure.
            into: what the ratio is called.
        """
        rows = baseline.by_identity if isinstance(baseline, Frame) else {}
        bases = (rows.get(self.identity(row)) if isinstance(baseline, Frame) else baseline for row in self.rows)
        over = (row.with_value(into, _over(row, base, of)) for row, base in zip(self.rows, bases, strict=True))
        return msgspec.structs.replace(self, rows=tuple(over))

    def identity(self, row: Row) -> tuple[object, ...]:
        """The values that identify a row: of all figures that are no results."""
        return tuple(plain(row[figure]) for figure in self.figures if not figure.is_measured)

    @property
    def by_identity(self) -> dict[tuple[object, ...], Row]:
        """The rows by what identifies them; of several alike the first."""
        rows: dict[tuple[object, ...], Row] = {}
        for row in self.rows:
            rows.setdefault(self.identity(row), row)
        return rows

    def only(self, figures: Sequence[Figure[Any]]) -> Frame:
        """The frame with these figures."""
        return msgspec.structs.replace(self, figures=tuple(figures))

    @property
    def told(self) -> Frame:
        """The frame without figures that no row has."""
        return self.only([figure for figure in self.figures if any(figure.tell(row) != UNKNOWN for row in self.rows)])

    def varying(self, constants: Sequence[Figure[Any]] | None = None) -> Frame:
        """The frame without figures that no row has, or that are the same in every row.

        Args:
            constants: what is the same, if that is known otherwise; the measured figures always stay.
        """
        if constants is None:
            constants = [figure for figure in self.figures if not figure.is_measured and self._is_constant(figure)]
        fixed = {figure.name for figure in constants}
        return self.only([figure for figure in self.told.figures if figure.name not in fixed])

    def _is_constant(self, figure: Figure[Any]) -> bool:
        return len({figure.tell(row) for row in self.rows}) == 1

    def fit(self, width: int, ranks: Mapping[str, int], widest: Callable[[Figure[Any]], int], most: int = 99) -> Frame:
        """The frame with the figures that fit a width; the first always stays.

        Args:
            width: in characters.
            ranks: of the figures by name; those with a lower rank are kept longer.
            widest: the width at which a column of text wraps.
            most: columns.
        """
        kept: set[str] = set()
        left = width
        first, *others = self.figures
        for figure in (first, *sorted(others, key=lambda figure: ranks.get(figure.name, 99))):
            needed = self._width(figure, widest) + (_GAP if kept else 0)
            if not kept or (needed <= left and len(kept) < most):
                kept.add(figure.name)
                left -= needed
        return self.only([figure for figure in self.figures if figure.name in kept])

    def _width(self, figure: Figure[Any], widest: Callable[[Figure[Any]], int]) -> int:
        head = max(len(figure.title), len(figure.unit) + 2 if figure.unit else 0)
        cells = max((cell_len(sanitize(figure.tell(row))) for row in self.rows), default=0)
        return max(head, min(cells, widest(figure)) if figure.is_words else cells)

    def sheet(
        self,
        *,
        across: bool = False,
        heads: Sequence[Column] = (),
        notes: Sequence[str] = (),
        detail: Detail = "always",
    ) -> Sheet:
        """The frame as a table.

        Args:
            across: with a row for each figure and a column for each row.
            heads: of the columns, the first one included, if `across`.
            notes: above its own.
            detail: where it is shown.
        """
        if across:
            lines = [(each.heading, *map(each.tell, self.rows)) for each in self.figures if each.heading]
            columns, rows = tuple(heads), tuple(line for line in lines if set(line[1:]) != {UNKNOWN})
        else:
            columns = tuple(figure.column for figure in self.figures)
            rows = tuple(tuple(figure.tell(row) for figure in self.figures) for row in self.rows)
        texts = (*notes, *(note.message for note in self.notes))
        hidden = frozenset(each.heading for each in self.figures if across and each.only_csv)
        return Sheet(title=self.title, columns=columns, rows=rows, notes=texts, csv_rows=hidden, detail=detail)

    def csv(self, more: Callable[[Row], Iterator[tuple[str, Any]]] = lambda _: iter(())) -> str:
        """The frame as a CSV file, values of estimates with the ends of their intervals.

        Args:
            more: further cells of a row, each a name and a value.
        """
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        for number, row in enumerate(self.rows):
            cells = [*self._cells(row), *more(row)]
            if not number:
                writer.writerow([harmless(name) for name, _ in cells])
            writer.writerow([harmless(_written(value)) for _, value in cells])
        if not self.rows:
            writer.writerow([figure.csv or figure.name for figure in self.figures])
        return text.getvalue()

    def _cells(self, row: Row) -> Iterator[tuple[str, Any]]:
        for figure in self.figures:
            name, value = figure.csv or figure.name, row[figure]
            yield name, plain(value)
            if figure.has_range:
                for end in ("low", "high"):
                    yield f"{name}_{end}", getattr(value, end, None)

    def _condition(self, text: str) -> _Condition:
        match = _CONDITION.fullmatch(text)
        if match is None:
            raise UsageError(f"{text!r} is not a condition", hint=_EXAMPLES)
        name, sign, wanted = match["name"].strip(), match["sign"], match["value"].strip()
        figure = self.figure(name)
        if not wanted:
            raise UsageError(f"{text!r} has no value to compare with", hint=_EXAMPLES)
        if sign in {"=", "!="}:
            return lambda row: _is(figure, plain(row[figure]), wanted) == (sign == "=")
        bound = _number(wanted)
        if bound is None:
            raise UsageError(f"{text!r}: {wanted!r} is not a number, but {sign} compares numbers", hint=_EXAMPLES)
        return lambda row: isinstance(value := plain(row[figure]), (int, float)) and _ORDER[sign](value, bound)


def _over(row: Row, baseline: Row | None, of: Figure[Estimate]) -> Estimate | Unknown:
    if baseline is None:
        return Unknown("there is no baseline")
    value, base = row[of], baseline[of]
    if isinstance(value, Unknown) or isinstance(base, Unknown):
        return value if isinstance(value, Unknown) else base
    if row is baseline:
        # Over itself it is 1, however much its repeats scatter.
        return Estimate(value=1.0, low=1.0, high=1.0, repeats=value.repeats)
    return ratio(value, base) if min(value.low, base.low) > 0 else Unknown("one of the two values is not positive")


def _is(figure: Figure[Any], value: object, wanted: str) -> bool:
    """Whether it is what a person wrote: numbers as numbers, words in either case.

    What a row does not have is nothing in particular, and equals nothing.
    """
    if value is None:
        return False
    if isinstance(value, bool):
        return value is _TRUTHS.get(wanted.casefold())
    if isinstance(value, (int, float)):
        number = _number(wanted)
        return number is not None and math.isclose(value, number, rel_tol=1e-9)
    text = str(value)
    return text.casefold() == wanted.casefold() or figure.alike(text) == figure.alike(wanted)


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _written(value: Any) -> object:
    if value is None or isinstance(value, (str, int, float)):
        return value
    return msgspec.json.encode(value).decode()
