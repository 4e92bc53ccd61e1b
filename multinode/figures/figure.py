"""Figure: a value that tables show, defined once: name, title, unit, form, meaning. Row: the values of one item. Pure.

Each subject declares its figures beside its structs. A figure is the typed key of a row: `row[SAMPLES_PER_S]` is an
`Estimate` or `Unknown`. Tables, CSV files, `--where` and `--sort` take names, titles and forms from here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Generic, Literal, TypeVar

import msgspec

from multinode.render.sheet import Column, megabytes, percent, sanitize
from multinode.stats.estimate import Estimate
from multinode.stats.estimate import Form as EstimateForm
from multinode.stats.unknown import UNMEASURED, Unknown
from multinode.units import UNKNOWN, format_duration, format_figure, format_sig, format_size, ms_digits, times

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

Form = Literal[
    "words",
    "number",
    "figure",
    "four_digits",
    "range",
    "interval",
    "ms_range",
    "times_interval",
    "share",
    "percent",
    "times",
    "money",
    "duration",
    "ms",
    "megabytes",
    "size",
    "digits",
    "whole",
    "tenths",
    "hundredths",
    "thousandths",
]
"""How a value is written. `words` and `number` identify a row; all others are measured or predicted.

`range` (of step times `ms_range`) is the interval of an estimate alone, `interval` the estimate with it,
`times_interval` a ratio with it; `share` has one decimal in percent, `percent` none. `size` is bytes in their largest
unit, `digits` has no separators.
"""


def _identity(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else f"{value:g}" if isinstance(value, float) else str(value)


def _money(amount: float) -> str:
    """Two decimals, of small amounts three digits: `1.60`, `0.80`, `0.104`."""
    if amount >= 1 or amount == 0:
        return f"{amount:,.2f}"
    whole, _, decimals = format_sig(amount).partition(".")
    return f"{whole}.{decimals[:2]}{decimals[2:].rstrip('0')}"


_FORMS: dict[Form, Callable[[Any], str]] = {
    **dict.fromkeys(("words", "number"), _identity),
    **dict.fromkeys(("figure", "interval", "range"), format_sig),
    "four_digits": partial(format_figure, digits=4),
    "share": percent,
    "percent": lambda share: percent(share, ".0f"),
    **dict.fromkeys(("times", "times_interval"), times),
    "money": _money,
    "duration": format_duration,
    **dict.fromkeys(("ms", "ms_range"), ms_digits),
    "megabytes": megabytes,
    "size": format_size,
    "digits": str,
    "whole": lambda value: f"{value:,.0f}",
    "tenths": lambda value: f"{value:.1f}",
    "hundredths": lambda value: f"{value:.2f}",
    "thousandths": lambda value: f"{value:.3f}",
}
_WITH_INTERVAL: dict[Form, EstimateForm] = {
    "range": "range",
    "ms_range": "ms_range",
    "interval": "figure",
    "times_interval": "times",
}
MONEY = "{money}"
"""Stands for the currency in a unit."""
_SEPARATORS = re.compile(r"[\s_.:#-]+")


def name_of_title(title: str) -> str:
    """A title as one word: lower case, without spaces and dashes, `/s` as `pers`; other characters stay."""
    return _SEPARATORS.sub("", title.lower().replace("/", " per "))


def plain(value: object) -> Any:
    """A value for sorting, comparing and files: of an estimate its figure; None is unknown."""
    if isinstance(value, Unknown):
        return None
    return value.value if isinstance(value, Estimate) else value


class Row:
    """The values of one item by figure.

    Args:
        item: what the row shows.
        values: its values by the figures' names; None is unknown.
    """

    __slots__ = ("_values", "item")

    def __init__(self, item: Any, values: Mapping[str, Any]) -> None:
        self.item = item
        self._values = values

    def __getitem__(self, figure: Figure[T]) -> T | Unknown:
        """The figure's value, or why it is unknown.

        Raises:
            KeyError: rows of this table have no such figure.
        """
        value: T | Unknown | None = self._values[figure.name]
        return UNMEASURED if value is None else value

    def with_value(self, figure: Figure[T], value: T | Unknown) -> Row:
        """The row with another value of one figure."""
        return Row(self.item, {**self._values, figure.name: value})


class Figure(msgspec.Struct, Generic[T_co], frozen=True):
    """A value that tables show.

    Attributes:
        name: in documents, CSV files, `--where` and `--sort`; with its unit, where `csv` does not say it.
        title: of its column; empty if no table shows it.
        unit: below its title.
        form: how it is written.
        about: what it means, for the reference page.
        phrase: its title in a sentence, if different.
        line: its title where it has a line of its own, if that is not phrase and unit.
        csv: its name in a CSV file, if the name lacks the unit.
        aliases: other names of it, in the same unit, as jobs and frameworks have them.
        only_csv: whether of a table that has it only the CSV file shows it.
        has_range: whether its values are estimates, so that CSV files have both ends.
        cell: what a row shows, if that depends on more than its value.
        alike: two texts of it are the same if this makes them equal.
    """

    name: str
    title: str = ""
    unit: str = ""
    form: Form = "words"
    about: str = ""
    phrase: str = ""
    line: str = ""
    csv: str = ""
    aliases: tuple[str, ...] = ()
    only_csv: bool = False
    has_range: bool = False
    cell: Callable[[Row], str] | None = None
    alike: Callable[[str], str] = str.casefold

    @property
    def is_measured(self) -> bool:
        """Whether it is a result; otherwise it identifies the row."""
        return self.form not in {"words", "number"}

    @property
    def is_words(self) -> bool:
        """Whether it holds text, which is left-aligned and may wrap."""
        return self.form == "words"

    @property
    def words(self) -> str:
        """Its title in a sentence."""
        return self.phrase or self.title

    @property
    def heading(self) -> str:
        """Its title with its unit, for a line of its own."""
        title = self.line or (f"{self.words} ({self.unit})" if self.unit else self.words)
        return self.csv or self.name if self.only_csv else title

    @property
    def column(self) -> Column:
        """The head of its column."""
        title = self.csv or self.name if self.only_csv else self.title
        return Column(sanitize(title), sanitize(self.unit), words=self.is_words, only_csv=self.only_csv)

    @property
    def in_full(self) -> Figure[T_co]:
        """The figure with its title in a sentence as the head of its column."""
        return msgspec.structs.replace(self, title=self.words)

    @property
    def ranged(self) -> Figure[T_co]:
        """The interval of the figure, as a figure beside it."""
        unit = f" ({self.unit})" if self.unit else ""
        form = "ms_range" if self.form == "ms" else "range"
        return msgspec.structs.replace(self, title="range", unit="", line=f"{self.words}, range{unit}", form=form)

    def as_form(self, form: Form) -> Figure[T_co]:
        """The figure in another form."""
        return msgspec.structs.replace(self, form=form)

    def tell(self, row: Row) -> str:
        """What stands in the figure's column of a row; a dash where it is unknown."""
        return self.cell(row) if self.cell is not None else self.text(row[self])

    def text(self, value: object) -> str:
        """A value in words; a dash where it is unknown."""
        if value is None or isinstance(value, Unknown):
            return UNKNOWN
        if isinstance(value, Estimate) and self.form in _WITH_INTERVAL:
            return value.text(_WITH_INTERVAL[self.form])
        return _FORMS[self.form](plain(value))
