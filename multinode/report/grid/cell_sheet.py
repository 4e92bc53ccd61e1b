"""A table of cells as sheets, for terminal, page and Markdown: its columns, what was not measured, what is marked.

In a terminal those columns stand that matter most, as many as fit. No figure is made here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from multinode.analyse.grid.cell_rows import KEYS
from multinode.analyse.grid.cells import (
    MEASURED,
    CellRow,
    CellTable,
    currencies,
    differing,
    has_figures,
    has_speed,
    listed,
    other_work,
    untold,
    value_of,
)
from multinode.analyse.stats.spread import Ranged
from multinode.core.cluster.device_name import short_device_name
from multinode.report.render.escaping import sanitize
from multinode.report.render.sheet import UNKNOWN, Column, Sheet, format_sig, percent
from multinode.report.render.table import sheet_table
from multinode.units import format_duration

__all__ = [
    "BOUGHT_WITH",
    "LABEL",
    "CellColumn",
    "cell_columns",
    "cell_text",
    "cells_sheet",
    "cells_terminal",
    "constants",
    "constants_line",
    "lead",
    "marks_sheet",
    "missing_sheet",
    "money_text",
    "money_unit",
    "short_model",
    "state_word",
    "unmeasured_sheet",
]

_STATES = {"skipped": "skipped", "failed": "failed", "waiting": "waiting", "running": "waiting"}
_SHOWN_KEYS = frozenset(key for keys in KEYS.values() for key in keys[:1])
_LAST = 99
# In a unit, in place of the currency.
_PAID = "{money}"
_UNTOLD = ("unit", "units")

BOUGHT_WITH = 10_000
"""Units of money: of what a GPU costs, one buys too little speed to be read."""


class CellColumn(msgspec.Struct, frozen=True, kw_only=True):
    """One column.

    Attributes:
        name: of its value, as a sort names it.
        tell: a row's value as text.
        rank: the least is kept longest where there is little room.
        is_figure: whether it was measured; else it says which cell it is.
    """

    name: str
    title: str
    unit: str = ""
    tell: Callable[[CellRow], str]
    rank: int = _LAST
    is_figure: bool = False
    is_words: bool = False

    @property
    def column(self) -> Column:
        """As a sheet has it: a key of the job and a currency are a stranger's words."""
        return Column(sanitize(self.title), sanitize(self.unit), words=self.is_words)


def state_word(row: CellRow) -> str:
    """What stands in the place of the figures of a row that has none; whose memory it was is told apart."""
    if row.state == "out_of_memory":
        return "OOM (node)" if row.out_of == "node" else "OOM"
    return _STATES.get(row.state, UNKNOWN)


def short_model(model: str) -> str:
    """A model as people call it: of a path its last part; a hub's `owner/name` stays."""
    is_path = model.startswith(("/", ".", "~")) or model.count("/") > 1
    return model.rstrip("/").rpartition("/")[2] or model if is_path else model


def cell_text(value: Any) -> str:
    """A value as a person would write it."""
    if value is None:
        return UNKNOWN
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else f"{value:g}" if isinstance(value, float) else str(value)


def cell_columns(rows: Sequence[CellRow]) -> tuple[CellColumn, ...]:
    """All columns that say something of these rows, in the order in which they stand.

    What is the same on every row is no column; `constants` has it. What no row has is left out.
    """
    told = [column for column in (*_identities(rows), *_FIGURES) if _says_something(column, rows)]
    fixed = {name for name, _ in constants(rows)}
    kept = (column for column in told if column.name not in fixed)
    return (LABEL, *(msgspec.structs.replace(column, unit=money_unit(column.unit, rows)) for column in kept))


def constants(rows: Sequence[CellRow]) -> tuple[tuple[str, str], ...]:
    """Name and text of what is the same on every row; of a row without figures what is not known differs in nothing."""
    found: dict[str, str] = {}
    for column in _identities(rows):
        texts = {column.tell(row) for row in rows if row.state == MEASURED or column.tell(row) != UNKNOWN}
        # Of a method without adapters the rank is not unknown: there is none.
        is_of_all = column.name != "lora_rank" or "method" in found
        if len(texts) == 1 and texts != {UNKNOWN} and is_of_all:
            found[column.name] = texts.pop()
    return tuple(found.items())


def money_unit(unit: str, rows: Sequence[CellRow]) -> str:
    """A unit with the currency of these rows in the place of `{money}`; with `units` where it is not known and one."""
    found = currencies(rows)
    one, many = (found[0], found[0]) if len(found) == 1 and found[0] is not None else _UNTOLD
    return unit.replace(f"for 1 {_PAID}", f"for 1 {one}").replace(_PAID, many)


def _says_something(column: CellColumn, rows: Sequence[CellRow]) -> bool:
    return any(column.tell(row) != UNKNOWN for row in rows)


def _identities(rows: Sequence[CellRow]) -> tuple[CellColumn, ...]:
    keys = dict.fromkeys(key for row in rows for key in row.varied if key not in _SHOWN_KEYS)
    return (*_IDENTITIES, *(_identity(key, key, rank=18) for key in keys))


def _identity(name: str, title: str, unit: str = "", *, rank: int, words: bool = True) -> CellColumn:
    return CellColumn(
        name=name, title=title, unit=unit, tell=lambda row: cell_text(value_of(row, name)), rank=rank, is_words=words
    )


def _figure(
    name: str, title: str, unit: str = "", *, rank: int, tell: Callable[[float | None], str] = format_sig
) -> CellColumn:
    return CellColumn(
        name=name, title=title, unit=unit, tell=lambda row: tell(value_of(row, name)), rank=rank, is_figure=True
    )


def _duration(seconds: float | None) -> str:
    return UNKNOWN if seconds is None else format_duration(seconds)


def _share(share: float | None) -> str:
    return percent(share)


def money_text(value: float | None) -> str:
    """Two digits behind the point where they say enough."""
    return UNKNOWN if value is None else f"{value:,.2f}" if value >= 1 or value == 0 else format_sig(value)


def _of_many(value: float | None) -> str:
    return format_sig(value * BOUGHT_WITH if value is not None else None)


def _places(row: CellRow) -> str:
    if row.nodes is None:
        return UNKNOWN if row.world_size is None else f"{row.world_size} worker{'s' if row.world_size > 1 else ''}"
    return f"{row.nodes} x {'?' if row.workers_per_node is None else row.workers_per_node}"


def _device(row: CellRow) -> str:
    return UNKNOWN if row.device is None else short_device_name(row.device)


def _model(row: CellRow) -> str:
    return UNKNOWN if row.settings.model is None else short_model(row.settings.model)


def _speed(row: CellRow) -> str:
    return format_sig(row.samples_per_s.value) if row.samples_per_s is not None else state_word(row)


def _speed_range(row: CellRow) -> str:
    speed = row.samples_per_s
    if speed is None or speed.repeats < 2:  # noqa: PLR2004 - a spread has two ends
        return UNKNOWN
    return f"{format_sig(speed.low)} to {format_sig(speed.high)}"


LABEL = CellColumn(name="label", title="cell", tell=lambda row: row.label, rank=0, is_words=True)
_IDENTITIES = (
    _identity("source", "source", rank=40),
    CellColumn(name="model", title="model", tell=_model, rank=15, is_words=True),
    _identity("dataset", "data set", rank=60),
    CellColumn(name="device", title="device", tell=_device, rank=14, is_words=True),
    CellColumn(name="nodes", title="nodes", unit="x workers", tell=_places, rank=13),
    _identity("method", "method", rank=11),
    _identity("lora_rank", "LoRA rank", rank=70, words=False),
    _identity("stage", "stage", rank=65),
    _identity("strategy", "strategy", rank=17),
    _identity("precision", "precision", rank=61),
    _identity("sequence_length", "sequence", "tokens", rank=16, words=False),
    _identity("packing", "packing", rank=66),
    _identity("recompute", "recomputed", rank=67),
    _identity("grad_compress", "gradients sent", rank=46),
    _identity("per_device_batch", "batch", rank=12, words=False),
    _identity("accumulation", "accumulation", rank=18, words=False),
    _identity("global_batch", "global batch", rank=20, words=False),
)
_FIGURES = (
    CellColumn(name="samples_per_s", title="samples/s", tell=_speed, rank=1, is_figure=True),
    CellColumn(name="samples_per_s_range", title="from, to", tell=_speed_range, rank=33, is_figure=True),
    _figure("relative", "relative", rank=2),
    _figure("tokens_per_s", "tokens/s", rank=9),
    _figure("tgs", "TGS", "tokens/s", rank=19),
    _figure("model_tflops", "TFLOP/s", "a worker", rank=22),
    _figure("mfu", "MFU", rank=10, tell=_share),
    _figure("hardware_tflops", "hardware", "TFLOP/s", rank=36),
    _figure("hfu", "HFU", rank=23, tell=_share),
    _figure("step_time_ms", "step", "ms", rank=5),
    _figure("step_time_p95_ms", "step, p95", "ms", rank=34),
    _figure("network_share", "network", "of step", rank=4, tell=_share),
    _figure("peak_memory_gib", "memory", "GiB", rank=3),
    _figure("whole_s", "whole job", rank=6, tell=_duration),
    _figure("energy_j_per_sample", "energy", "J a sample", rank=21),
    _figure("price_per_hour", "price", f"{_PAID} an hour", rank=31, tell=money_text),
    _figure("whole_cost", "job costs", _PAID, rank=7, tell=money_text),
    _figure("samples_per_money", "samples", f"for 1 {_PAID}", rank=8),
    _figure("cost_per_million_tokens", "1M tokens cost", _PAID, rank=32, tell=money_text),
    _figure("price_purchase", "price", f"{_PAID} to buy", rank=35, tell=money_text),
    _figure("samples_per_s_per_purchase", "samples/s", f"for {BOUGHT_WITH:,} {_PAID}", rank=9, tell=_of_many),
)


# Between two columns: padding, and the box's own.
_GAP = 2
_LEAST_LABEL = 12
_LABEL_SHARE = 0.35
_WIDEST_WORDS = 24
_MOST_LABELS = 6
_MOST_RIVALS = 3
# More nobody reads in a terminal; laying them out takes seconds.
_MOST_ROWS = 500
# In words, by the names of the columns.
_NAMES = {
    "dataset": "data set",
    "nodes": "nodes x workers",
    "sequence_length": "sequence length",
    "per_device_batch": "batch",
    "global_batch": "global batch",
    "lora_rank": "LoRA rank",
    "recompute": "recomputed",
    "grad_compress": "gradients sent as",
}
_COUNTED = {"out_of_memory": "out of memory", "skipped": "skipped", "failed": "failed", "waiting": "waiting"}


def lead(table: CellTable) -> str:
    """What a reader who reads one sentence should read."""
    if not table.cells:
        return "No rows."
    measured = [row for row in table.cells if has_figures(row)]
    states = Counter(row.state for row in table.cells)
    others = "".join(f", {states[state]} {words}" for state, words in _COUNTED.items() if states[state])
    counted = f"{len(measured)} of {len(table.cells)} cells measured{others}."
    fast = [row for row in measured if has_speed(row)]
    best = _best(table, fast) if fast else _most_tokens(measured)
    return f"{best}; {counted}" if best else counted


def _best(table: CellTable, fast: Sequence[CellRow]) -> str:
    """Who is the fastest, by tokens where samples differ in length alone."""
    if differing(fast) == ("sequence_length",) and not untold(fast):
        by_tokens = [(row.tokens_per_s.value, row.label) for row in fast if row.tokens_per_s is not None]
        if len(by_tokens) == len(fast):
            value, label = max(by_tokens)
            return f"Fastest is {label} with {format_sig(value)} tokens/s, of cells that differ in sequence length"
    best = max(fast, key=lambda row: row.samples_per_s.value if row.samples_per_s is not None else 0.0)
    speed = format_sig(best.samples_per_s.value) if best.samples_per_s is not None else UNKNOWN
    work = other_work(fast)
    though = f", though cells {work}" if work else _as_fast(best, fast)
    return f"Fastest is {best.label} with {speed} samples/s{_times(table, best)}{though}"


def _most_tokens(measured: Sequence[CellRow]) -> str:
    """Who is the fastest where no row tells samples/s; empty where none tells tokens/s either."""
    by_tokens = [(row.tokens_per_s.value, row) for row in measured if row.tokens_per_s is not None]
    if not by_tokens:
        return ""
    value, best = max(by_tokens, key=lambda one: one[0])
    work = other_work([row for _, row in by_tokens])
    return f"Fastest is {best.label} with {format_sig(value)} tokens/s" + (f", though cells {work}" if work else "")


def _as_fast(best: CellRow, fast: Sequence[CellRow]) -> str:
    """Whose speed cannot be told from the best one's, by the repeats of both."""
    alike = [row.label for row in fast if row is not best and _overlap(row.samples_per_s, best.samples_per_s)]
    if not alike:
        return ""
    named = (
        alike if len(alike) <= _MOST_RIVALS else [*alike[: _MOST_RIVALS - 1], f"{len(alike) - _MOST_RIVALS + 1} more"]
    )
    return f", though {listed(named)} {'is' if len(alike) == 1 else 'are'} as fast within the scatter"


def _overlap(one: Ranged | None, best: Ranged | None) -> bool:
    return one is not None and best is not None and one.high > best.low


def _times(table: CellTable, best: CellRow) -> str:
    """How fast it is beside the baseline, where the two do the same work."""
    baseline = next((row for row in table.cells if row.label == table.baseline), best)
    if best.relative is None or table.baseline in {None, best.label} or other_work([best, baseline]):
        return ""
    return f", {format_sig(best.relative.value)} times {table.baseline}"


def constants_line(table: CellTable) -> str:
    """What is the same on every row, and therefore no column; empty where nothing is."""
    told = []
    for name, text in constants(table.cells):
        if name == "nodes" and " x " not in text:
            told.append(text)
        elif name in {"packing", "recompute"}:
            told += [_NAMES.get(name, name)] if text == "yes" else []
        elif name != "source":
            told.append(f"{_NAMES.get(name, name)} {text}")
        elif text == "imported":
            told.append(text)
    return f"On every row: {', '.join(told)}." if told else ""


def cells_sheet(table: CellTable, columns: Sequence[CellColumn] | None = None) -> Sheet:
    """A row a cell; a row without figures says so in place of its speed.

    Args:
        table: the table.
        columns: some of `cell_columns`; None takes all.
    """
    shown = cell_columns(table.cells) if columns is None else columns
    relative = any(column.name == "relative" for column in shown) and table.baseline is not None
    notes = (
        constants_line(table),
        f"Relative: samples/s over those of {table.baseline}." if relative else "",
        table.rule,
        *table.notes,
    )
    return Sheet(
        title=table.job,
        columns=tuple(column.column for column in shown),
        rows=tuple(tuple(column.tell(row) for column in shown) for row in table.cells),
        notes=tuple(note for note in notes if note),
    )


def unmeasured_sheet(table: CellTable) -> Sheet:
    """Cells without figures, by state and reason."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in table.cells:
        if not has_figures(row):
            reason = row.reason or row.missing.get("samples_per_s", "")
            found.setdefault((state_word(row), reason), []).append(row.label)
    return Sheet(
        title="not measured",
        columns=(Column("state", words=True), Column("cells", words=True), Column("why", words=True)),
        rows=tuple((state, _listed(labels), reason or UNKNOWN) for (state, reason), labels in found.items()),
    )


def marks_sheet(table: CellTable) -> Sheet:
    """What disturbed a row, which of its repeats failed, and what of an imported one does not fit together."""
    return Sheet(
        title="marked",
        columns=(Column("cell", words=True), Column("what", words=True)),
        rows=tuple((row.label, mark) for row in table.cells for mark in _marks(row)),
    )


def _marks(row: CellRow) -> tuple[str, ...]:
    failed = (row.reason,) if row.reason and has_figures(row) else ()
    return (*failed, *row.contradictions, *row.disturbances)


def missing_sheet(table: CellTable) -> Sheet:
    """Figures of measured rows that are not known, and why."""
    measured = [row for row in table.cells if has_figures(row)]
    lacking: dict[tuple[str, str], list[str]] = {}
    for row in measured:
        for name, reason in row.missing.items():
            lacking.setdefault((reason, row.label), []).append(name)
    alike: dict[tuple[str, str], list[str]] = {}
    for (reason, label), names in lacking.items():
        alike.setdefault((", ".join(names), reason), []).append(label)
    return Sheet(
        title="missing",
        columns=(Column("figures", words=True), Column("of", words=True), Column("why", words=True)),
        rows=tuple(
            (names, "all" if len(labels) == len(measured) else _listed(labels), reason)
            for (names, reason), labels in alike.items()
        ),
    )


def _listed(labels: Sequence[str]) -> str:
    """Labels may have commas in them; of many the first few."""
    more = [f"and {len(labels) - _MOST_LABELS} more"] if len(labels) > _MOST_LABELS + 1 else []
    shown = [*labels[:_MOST_LABELS], *more] if more else labels
    return ("; " if any("," in one for one in shown) else ", ").join(shown)


def cells_terminal(table: CellTable, width: int, first: str | None = None) -> Table:
    """The table in a terminal of so many columns, with what stands around it.

    Args:
        table: the table.
        width: in characters.
        first: name of a value that a reader wants to see above all others.
    """
    columns = _fitting(table.cells, width, first)
    sheet = cells_sheet(table, columns)
    main = sheet_table(Sheet(title=sheet.title, columns=sheet.columns, rows=sheet.rows[:_MOST_ROWS]))
    for drawn, column in zip(main.columns, columns, strict=True):
        drawn.max_width = _most(column, width) if column.is_words else None
        # A key of the job is no markup.
        drawn.header = Text(str(drawn.header))
    grid = Table.grid()
    grid.add_row(Text(sanitize(lead(table))))
    if table.cheapest is not None:
        grid.add_row(Text(sanitize(table.cheapest.sentence)))
    grid.add_row("")
    if table.cells:
        grid.add_row(main)
    for note in (*sheet.notes, *_left_out(table.cells, columns)):
        grid.add_row(Text(sanitize(note), style="dim"))
    for below in (unmeasured_sheet(table), marks_sheet(table)):
        if below.rows:
            grid.add_row("")
            grid.add_row(sheet_table(below))
    return grid


def _fitting(rows: Sequence[CellRow], width: int, first: str | None) -> tuple[CellColumn, ...]:
    """The columns that matter most, as many as fit, in the order in which they stand; the label always."""
    columns = cell_columns(rows)
    left = width - _width(LABEL, rows, width)
    kept = {LABEL.name}
    for column in sorted(columns[1:], key=lambda column: (column.name != first, column.rank)):
        needed = _width(column, rows, width) + _GAP
        if needed <= left:
            kept.add(column.name)
            left -= needed
    return tuple(column for column in columns if column.name in kept)


def _width(column: CellColumn, rows: Sequence[CellRow], width: int) -> int:
    head = max(len(column.title), len(column.unit) + 2 if column.unit else 0)
    cells = max((cell_len(sanitize(column.tell(row))) for row in rows), default=0)
    return max(head, min(cells, _most(column, width)) if column.is_words else cells)


def _most(column: CellColumn, width: int) -> int:
    """What a column of words may take; longer words are folded."""
    return max(_LEAST_LABEL, int(_LABEL_SHARE * width)) if column is LABEL else _WIDEST_WORDS


def _left_out(rows: Sequence[CellRow], shown: Sequence[CellColumn]) -> Iterator[str]:
    """What a wider terminal, a page or a CSV file has besides."""
    if len(rows) > _MOST_ROWS:
        yield f"The first {_MOST_ROWS} of {len(rows):,} rows: --where shows others, --format csv all of them."
    names = {column.name for column in shown}
    missing = [column for column in cell_columns(rows) if column.name not in names]
    if missing:
        told = (f"{column.title} ({column.unit})" if column.unit else column.title for column in missing)
        yield f"For want of room not shown: {'; '.join(told)}."
