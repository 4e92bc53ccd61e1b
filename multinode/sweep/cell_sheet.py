"""A table of cells as sheets, for terminal, page and Markdown: its columns, what was not measured, what is marked.

No figure is made here.
"""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec
from rich.cells import cell_len

from multinode.cluster.accelerators import short_device_name
from multinode.cluster.prices import Prices
from multinode.findings.finding import Finding, distinct
from multinode.predict.shortfall import shortfall_words
from multinode.render.csv_text import harmless
from multinode.render.sheet import (
    RANGES,
    Block,
    Chart,
    Charts,
    Column,
    Command,
    Labels,
    Later,
    Prose,
    Sheet,
    Tiles,
    in_detail,
    percent,
    sanitize,
)
from multinode.render.table import WIDE
from multinode.stats.estimate import ratio
from multinode.stats.unknown import Unknown, known, or_none, reason_of, unknown_fields
from multinode.sweep import table_notes
from multinode.sweep.cell_table import combine, lack_currency, unpriced_devices
from multinode.sweep.cells import (
    MEASURED,
    RANGED,
    VALUES,
    CellRow,
    CellTable,
    currencies,
    differing,
    differing_labels,
    has_figures,
    has_speed,
    other_job,
    other_work,
    untold,
    value_of,
)
from multinode.sweep.columns import BOUGHT_WITH, COLUMNS, MONEY, CellColumn
from multinode.units import (
    UNKNOWN,
    format_count,
    format_duration,
    format_figure,
    format_list,
    format_placement,
    format_rate,
    format_sig,
)

_STATES = ("out_of_memory", "skipped", "failed", "waiting")
# Keys of a job whose value another column has.
_SHOWN_KEYS = {column.keys[0] for column in COLUMNS.values() if column.keys}
_UNTOLD = ("unit", "units")
_LABEL = COLUMNS["label"]


def tell(column: CellColumn, row: CellRow) -> str:
    """What stands in a column of a row."""
    special = _SPECIAL.get(column.name) if column.name not in row.varied else None
    return special(row) if special is not None else _FORMS[column.form](value_of(row, column.name))


def state_word(row: CellRow) -> str:
    """What stands in the place of the figures of a row that has none; whose memory it was is told apart."""
    if row.state == "out_of_memory":
        return "OOM (node)" if row.out_of == "node" else "OOM"
    return row.state if row.state in _STATES else UNKNOWN


def cell_columns(rows: Sequence[CellRow]) -> tuple[CellColumn, ...]:
    """All columns that say something of these rows, in the order in which they stand.

    What is the same on every row is no column; `constants` has it. What no row has is left out.
    """
    fixed = {column.name for column, _ in constants(rows)}
    figures = (column for column in COLUMNS.values() if column.title and column.is_figure)
    titled = (
        msgspec.structs.replace(column, unit=money_unit(column.unit, rows))
        for column in (*_identities(rows), *figures)
        if column.name not in fixed and any(tell(column, row) != UNKNOWN for row in rows)
    )
    return (_LABEL, *titled)


def constants(rows: Sequence[CellRow]) -> tuple[tuple[CellColumn, str], ...]:
    """What is the same on every row, and its text; of a row without figures what is not known differs in nothing."""
    same: list[tuple[CellColumn, str]] = []
    for column in _identities(rows):
        texts = {text for row in rows if (text := tell(column, row)) != UNKNOWN or row.state == MEASURED}
        # Of a method without adapters the rank is not unknown: there is none.
        is_of_all = column.name != "lora_rank" or any(shown.name == "method" for shown, _ in same)
        if len(texts) == 1 and texts != {UNKNOWN} and is_of_all:
            same.append((column, texts.pop()))
    return tuple(same)


def money_unit(unit: str, rows: Sequence[CellRow]) -> str:
    """A unit with the currency of these rows in the place of `{money}`; with `units` where it is not known and one."""
    paid = currencies(rows)
    unit_name, many = (paid[0], paid[0]) if len(paid) == 1 and paid[0] is not None else _UNTOLD
    return unit.replace(f"for 1 {MONEY}", f"for 1 {unit_name}").replace(MONEY, many)


def _identities(rows: Sequence[CellRow]) -> tuple[CellColumn, ...]:
    ours = [column for column in COLUMNS.values() if column.title and not column.is_figure and column is not _LABEL]
    keys = dict.fromkeys(
        key for row in rows for key in row.varied if row.source == "imported" or key not in _SHOWN_KEYS
    )
    return (*ours, *(CellColumn(key, key, rank=18) for key in keys))


def _text(value: Any) -> str:
    if value is None:
        return UNKNOWN
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else f"{value:g}" if isinstance(value, float) else str(value)


def _money(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:,.2f}" if value >= 1 or value == 0 else format_sig(value)


def _duration(seconds: float | None) -> str:
    return UNKNOWN if seconds is None else format_duration(seconds)


def _model(row: CellRow) -> str:
    """A model as people call it: of a path its last part; a hub's `owner/name` stays."""
    model = _text(row.settings.model)
    is_path = model.startswith(("/", ".", "~")) or model.count("/") > 1
    return model.rstrip("/").rpartition("/")[2] or model if is_path else model


def _device(row: CellRow) -> str:
    return UNKNOWN if isinstance(row.device, Unknown) else short_device_name(row.device)


def _places(row: CellRow) -> str:
    nodes, workers = or_none(row.nodes), or_none(row.world_size)
    if nodes is None:
        return UNKNOWN if workers is None else format_count(workers, "worker")
    return format_placement(nodes, or_none(row.workers_per_node), workers)


def _link(row: CellRow) -> str:
    """As people write it, and as an import reads it: `8x400 Gbit/s over RDMA`."""
    if row.network_gbit_per_s is None:
        return UNKNOWN
    nics = row.nics or 1
    times = f"{nics}x" if nics > 1 else ""
    return f"{times}{format_rate(row.network_gbit_per_s / nics)}{' over RDMA' if row.rdma else ''}"


def _in_billions(parameters: float | None) -> str:
    if parameters is None:
        return UNKNOWN
    size, letter = (parameters / 1e9, "B") if parameters >= 1e9 else (parameters / 1e6, "M")  # noqa: PLR2004 - a billion
    return f"{format_sig(size)}{letter}"


def _speed(row: CellRow) -> str:
    return state_word(row) if isinstance(row.samples_per_s, Unknown) else format_sig(row.samples_per_s.value)


def _speed_range(row: CellRow) -> str:
    speed = or_none(row.samples_per_s)
    if speed is None or speed.repeats < 2:  # noqa: PLR2004 - of one run it is no range of repeats
        return UNKNOWN
    return f"{format_sig(speed.low)}-{format_sig(speed.high)}"


def _speed_bought(row: CellRow) -> str:
    speed = or_none(row.samples_per_s_per_purchase)
    return format_sig(speed * BOUGHT_WITH if speed is not None else None)


_FORMS: dict[str, Callable[[Any], str]] = {
    "words": _text,
    "number": _text,
    "figure": format_sig,
    "share": percent,
    "money": _money,
    "duration": _duration,
}
_SPECIAL: dict[str, Callable[[CellRow], str]] = {
    "model": _model,
    "device": _device,
    "nodes": _places,
    "parameters": lambda row: _in_billions(row.parameters),
    "trainable_parameters": lambda row: _in_billions(row.trainable_parameters),
    "network_gbit_per_s": _link,
    "samples_per_s": _speed,
    "samples_per_s_range": _speed_range,
    "samples_per_s_per_purchase": _speed_bought,
}

_MOST_LABELS = 6
_MOST_RIVALS = 3


def lead(table: CellTable) -> str:
    """What a reader who reads one sentence should read."""
    if not table.cells:
        return "No rows."
    measured = [row for row in table.cells if has_figures(row)]
    states = Counter(row.state for row in table.cells)
    others = "".join(f", {states[state]} {state.replace('_', ' ')}" for state in _STATES if states[state])
    counted = f"{len(measured)} of {len(table.cells)} cells measured{others}."
    best = _best(table, measured)
    return f"{best}; {counted}" if best else counted


def _best(table: CellTable, measured: Sequence[CellRow]) -> str:
    fast = [row for row in measured if has_speed(row)]
    timed = [row for row in fast or measured if not isinstance(row.tokens_per_s, Unknown)]
    of_length = differing(fast) == ("sequence_length",) and not untold(fast) and len(timed) == len(fast)
    if fast and not of_length:
        best = max(fast, key=lambda row: value_of(row, "samples_per_s"))
        work = other_work(fast) or _other_labels(fast)
        though = f", though cells {work}" if work else _as_fast(best, fast)
        return f"The fastest is {best.label} with {_speed(best)} samples/s{_times(table, best, fast)}{though}"
    if not timed:
        return ""
    best = max(timed, key=lambda row: value_of(row, "tokens_per_s"))
    work = other_work(timed)
    though = ", among cells with different sequence lengths" if of_length else f", though cells {work}" if work else ""
    return f"The fastest is {best.label} with {tell(COLUMNS['tokens_per_s'], best)} tokens/s{though}"


def _as_fast(best: CellRow, fast: Sequence[CellRow]) -> str:
    alike = [row.label for row in fast if row is not best and _may_reach(row, best)]
    if not alike:
        return ""
    named = format_list(alike, _MOST_RIVALS, "more")
    return f", though {named} may be as fast"


def _may_reach(row: CellRow, best: CellRow) -> bool:
    return ratio(known(best.samples_per_s), known(row.samples_per_s)).low <= 1


def _other_labels(rows: Sequence[CellRow]) -> str:
    names = differing_labels(rows)
    return f"differ in {format_list(names, _MOST_RIVALS, 'more')}" if names else ""


def _times(table: CellTable, best: CellRow, fast: Sequence[CellRow]) -> str:
    baseline = next((row for row in table.cells if row.label == table.baseline), best)
    if best.relative is None or table.baseline in {None, best.label} or other_work([best, baseline]):
        return ""
    if any(best.varied.get(name) != baseline.varied.get(name) for name in differing_labels(fast)):
        return ""
    return f", {format_figure(best.relative.value)} times as fast as {table.baseline}"


def constants_line(table: CellTable) -> str:
    """What is the same on every row, and therefore no column; empty where nothing is."""
    remarks = []
    for column, text in constants(table.cells):
        if column.name == "source":
            remarks += [text] if text == "imported" else []
        elif column.name in {"packing", "recompute"}:
            remarks += [column.words] if text == "yes" else []
        else:
            remarks.append(text if column.name == "nodes" and " x " not in text else f"{column.words} {text}")
    return f"The same in every row: {', '.join(remarks)}." if remarks else ""


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
        f"Relative: samples/s relative to {table.baseline}." if relative else "",
        RANGES if any(column.name == "samples_per_s_range" for column in shown) else "",
        table.rule,
        *(note.message for note in table.notes),
    )
    return Sheet(
        title=table.job,
        columns=tuple(_heading(column) for column in shown),
        rows=tuple(tuple(tell(column, row) for column in shown) for row in table.cells),
        notes=tuple(note for note in notes if note),
    )


def _heading(column: CellColumn) -> Column:
    return Column(sanitize(column.title), sanitize(column.unit), words=column.is_words)


def unmeasured_sheet(table: CellTable) -> Sheet:
    """Cells without figures, by state and reason."""
    rows_of: dict[tuple[str, str], list[str]] = {}
    for row in table.cells:
        if not has_figures(row):
            reason = row.reason or (reason_of(row.samples_per_s) if row.state == MEASURED else "")
            rows_of.setdefault((state_word(row), reason), []).append(row.label)
    return Sheet(
        title="not measured",
        columns=(Column("state", words=True), Column("cells", words=True), Column("why", words=True)),
        rows=tuple((state, _listed(labels), reason or UNKNOWN) for (state, reason), labels in rows_of.items()),
    )


def marks_sheet(table: CellTable) -> Sheet:
    """What disturbed a row, which of its repeats failed; of an imported one, what contradicts itself or its network."""
    return Sheet(
        title="marked",
        columns=(Column("cell", words=True), Column("what", words=True)),
        rows=tuple((row.label, mark) for row in table.cells for mark in _marks(row)),
    )


def _marks(row: CellRow) -> tuple[str, ...]:
    failed = (row.reason,) if row.reason and has_figures(row) else ()
    short = (shortfall_words(row.shortfall),) if row.shortfall is not None else ()
    return (*failed, *short, *row.contradictions, *row.disturbances)


def missing_sheet(table: CellTable) -> Sheet:
    """Figures of measured rows that are not known, and why."""
    measured = [row for row in table.cells if has_figures(row)]
    alike: dict[tuple[str, str], list[str]] = {}
    for row in measured:
        names: dict[str, list[str]] = {}
        for name, unknown in unknown_fields(row).items():
            names.setdefault(unknown.reason, []).append(name)
        for reason, lacking in names.items():
            alike.setdefault((", ".join(lacking), reason), []).append(row.label)
    return Sheet(
        title="missing",
        columns=(Column("figures", words=True), Column("of", words=True), Column("why", words=True)),
        rows=tuple(
            (figures, "all" if len(labels) == len(measured) else _listed(labels), reason)
            for (figures, reason), labels in alike.items()
        ),
    )


def _listed(labels: Sequence[str]) -> str:
    more = [f"and {len(labels) - _MOST_LABELS} more"] if len(labels) > _MOST_LABELS + 1 else []
    shown = [*labels[:_MOST_LABELS], *more] if more else labels
    return ("; " if any("," in name for name in shown) else ", ").join(shown)


_LISTS = ("run_ids", "node_names", "filed_prices", "disturbances", "contradictions")


def cell_csv(table: CellTable) -> str:
    """The file's text; what the sweep set stands under `set.` and the key's name."""
    keys = tuple(dict.fromkeys(key for row in table.cells for key in row.varied))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for number, row in enumerate(table.cells):
        cells = list(_cells(row, keys))
        if not number:
            writer.writerow([harmless(name) for name, _ in cells])
        writer.writerow([harmless(_written(value)) for _, value in cells])
    if not table.cells:
        writer.writerow(map(_name, VALUES))
    return text.getvalue()


def _cells(row: CellRow, keys: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    for name in VALUES:
        yield _name(name), value_of(row, name)
        if name in RANGED:
            measured = getattr(row, name)
            for end in ("low", "high"):
                yield f"{_name(name)}_{end}", getattr(measured, end, None)
    yield "shortfall", shortfall_words(row.shortfall) if row.shortfall is not None else None
    yield "repeats", getattr(row.samples_per_s, "repeats", None)
    for name in _LISTS:
        yield name, "; ".join(getattr(row, name))
    for key in keys:
        yield f"set.{key}", row.varied.get(key)


def _name(value: str) -> str:
    return COLUMNS[value].csv or value


def _written(value: Any) -> object:
    if value is None or isinstance(value, (str, int, float)):
        return value
    return msgspec.json.encode(value).decode()


def show(table: CellTable, width: int = WIDE, first: str | None = None) -> Iterator[Block]:
    """The sentence and key figures, the table, what is not in it; in detail every column that fits, rules, reasons.

    Args:
        table: the table.
        width: of the terminal, in characters; a page has all columns.
        first: name of a value that a reader wants to see above all others.
    """
    yield Prose(lead(table), "lead")
    if table.cheapest is not None:
        yield Prose(table.cheapest.sentence, "lead")
    yield Tiles(tuple(_key_figures(table)))
    yield Charts(lambda: _charts(table))
    short = _fitting(table.cells, min(width, _SHORT_WIDTH), first, _short, _MOST_SHORT_COLUMNS)
    main = _main(table, short, _MOST_SHORT_ROWS, _short, min(width, _SHORT_WIDTH))
    yield msgspec.structs.replace(main, detail="brief")
    yield Labels(tuple(_remarks(table, short)), detail="brief")
    yield Later(lambda: _fitted(table, width, first), detail="screen")
    yield Later(lambda: (cells_sheet(table),), detail="page")
    yield from in_detail((unmeasured_sheet(table), marks_sheet(table), missing_sheet(table)))
    yield Command("Details", f"multinode show {' '.join(table.run_id.split(','))} --details", detail="brief")


def _fitted(table: CellTable, width: int, first: str | None) -> Iterator[Block]:
    columns = _fitting(table.cells, width, first, tell)
    yield _main(table, columns, _MOST_ROWS, tell, width)
    notes = (*cells_sheet(table, columns).notes, *_left_out(table.cells, columns))
    yield from (Prose(note, "note") for note in notes)


def _charts(table: CellTable) -> Iterable[Chart]:
    from multinode.sweep.cell_page import cell_charts  # noqa: PLC0415 - plotly is an extra

    return cell_charts(table)


def with_notes(table: CellTable) -> CellTable:
    """The table with what its rows give occasion to say behind its own notes."""
    return msgspec.structs.replace(table, notes=distinct((*_own_notes(table), *_from_rows(table.cells))))


def combined(tables: Sequence[CellTable]) -> CellTable:
    """Several tables below each other in one, with the notes that all of its rows give occasion to."""
    own = [msgspec.structs.replace(table, notes=tuple(_own_notes(table))) for table in tables]
    return with_notes(combine(own))


def _own_notes(table: CellTable) -> list[Finding]:
    return [note for note in table.notes if not table_notes.FROM_ROWS.has(note)]


def _from_rows(rows: Sequence[CellRow]) -> Iterator[Finding]:
    if any(or_none(row.global_batch) is not None or row.settings.per_device_batch is not None for row in rows):
        yield table_notes.BATCH_TERMS.found(None)
    fast = [row for row in rows if has_speed(row)]
    work = other_work(fast)
    if work:
        yield table_notes.OTHER_WORK.found(None, work=work, so=_so(fast))
    if any(row.source == "imported" for row in rows):
        yield table_notes.IMPORTED.found(None)
    few = [row for row in rows if not isinstance(row.network_share, Unknown) and row.exposed_steps.words]
    if few:
        least = min(few, key=lambda row: row.exposed_steps.known / row.exposed_steps.measured)
        yield table_notes.FEW_EXPOSED.found(
            None, rows=format_count(len(few), "row"), label=least.label, steps=least.exposed_steps.words
        )
    paid = [currency or "an unknown currency" for currency in currencies(rows)]
    if len(paid) > 1:
        yield table_notes.CURRENCIES.found(None, currencies=format_list(paid))


def _so(rows: Sequence[CellRow]) -> str:
    names = differing(rows)
    if not names:
        return "a sample may be different work in each, so samples/s may not be comparable"
    tokens = "compare tokens/s" if names == ("sequence_length",) else "samples/s are not comparable"
    return f"a sample is different work in each, so {tokens}"


def with_price_notes(shown: CellTable, before: CellTable, prices: Prices | None) -> CellTable:
    """The table with what is to be noted of its prices; notes of an earlier file give way to those of this one.

    Args:
        shown: with the prices, and the rows that are left of it.
        before: all of its rows as they were before they got this file's prices.
        prices: the file; None leaves the prices at what the rows have.
    """
    notes = [note for note in shown.notes if note.code != table_notes.UNPRICED.code]
    if prices is not None:
        notes = [note for note in notes if note.code != table_notes.FILED_PRICES.code]
        if any(row.filed_prices for row in shown.cells):
            about = ", ".join(part for part in (prices.date, prices.source) if part)
            origin = f" ({about})" if about else ""
            notes.append(table_notes.FILED_PRICES.found(None, currency=prices.currency, origin=origin))
        if shown.cells and lack_currency(before.cells):
            notes.append(table_notes.ASSUMED_CURRENCY.found(None, currency=prices.currency))
    unpriced = unpriced_devices(shown.cells, prices) if prices is not None or len(notes) < len(shown.notes) else ()
    if unpriced:
        notes.append(table_notes.UNPRICED.found(None, devices=", ".join(unpriced)))
    return msgspec.structs.replace(shown, notes=distinct(notes))


# What one looks at first: its name, the value of a row, and whether the most or the least is the best.
_KEY_FIGURES = (
    ("most samples/s", "samples_per_s", 1),
    ("highest tokens/s per worker (TGS)", "tgs", 1),
    ("highest MFU", "mfu", 1),
    ("lowest memory per worker (GiB)", "peak_memory_gib", -1),
    ("most samples per unit of money", "samples_per_money", 1),
    ("cheapest full run", "whole_cost", -1),
)


def _key_figures(table: CellTable) -> Iterator[tuple[str, str]]:
    rows = [row for row in table.cells if has_figures(row)]
    # What is paid in two currencies, or for two jobs, has no cheapest.
    unlike = set()
    if len(currencies(rows)) > 1:
        unlike = {"samples_per_money", "whole_cost"}
    elif other_job([row for row in rows if not isinstance(row.whole_cost, Unknown)]):
        unlike = {"whole_cost"}
    for title, name, sign in _KEY_FIGURES:
        valued = [(value, row) for row in rows if name not in unlike and (value := value_of(row, name)) is not None]
        if valued:
            _, row = max(valued, key=lambda pair: sign * pair[0])
            yield f"{title}: {row.label}", tell(COLUMNS[name], row)


_SHORT_WIDTH = 100
_MOST_SHORT_COLUMNS = 8
_MOST_SHORT_ROWS = 40
_MOST_NOTES = 4
# Between two columns: padding, and the box's own.
_GAP = 2
_LEAST_LABEL = 12
_LABEL_SHARE = 0.42
_WIDEST_WORDS = 24
# More nobody reads in a terminal; laying them out takes seconds.
_MOST_ROWS = 500

_Text = Callable[[CellColumn, CellRow], str]


def _remarks(table: CellTable, shown: Sequence[CellColumn]) -> Iterator[tuple[str, str]]:
    yield from _few("Not run", [f"{state}: {cells}: {why}" for state, cells, why in unmeasured_sheet(table).rows])
    yield from _few("Remarks", [f"{label}, {remark}" for label, remark in marks_sheet(table).rows])
    left = len(table.cells) - _MOST_SHORT_ROWS
    if left > 0:
        yield "Left out", f"{left:,} more rows: --where, --details or --format csv"
    if table.baseline is not None and any(column.name == "relative" for column in shown):
        yield "Relative", f"samples/s relative to {table.baseline}"
    yield from _few("Network", list(_unjudged(table.cells)))
    yield from (("Cells", meaning) for meaning in _meaning_of_labels(table.cells))
    # Of rows that are shown they are in the details.
    yield from () if table.cells else _few("Notes", [note.message for note in table.notes])


def _meaning_of_labels(rows: Sequence[CellRow]) -> Iterator[str]:
    """What `2x4` at the beginning of labels means, by the example of the last cell."""
    for row in reversed(rows[:_MOST_SHORT_ROWS]):
        nodes, workers = or_none(row.nodes), or_none(row.workers_per_node)
        placed = f"{nodes}x{workers}"
        if row.label == placed or row.label.startswith(f"{placed}-"):
            each = " on each" if nodes != 1 else ""
            words = f"{format_count(nodes or 0, 'node')}, {format_count(workers or 0, 'worker')}{each}"
            yield f"{placed}: {words}"
            return


def _unjudged(rows: Sequence[CellRow]) -> Iterator[str]:
    """Rows whose speed could not be judged by their link, by what that needs."""
    labels: dict[str, list[str]] = {}
    for row in rows:
        if row.unjudged is not None:
            labels.setdefault(row.unjudged.reason, []).append(row.label)
    yield from (f"{_listed(names)} not judged: {reason}" for reason, names in labels.items())


def _few(label: str, texts: Sequence[str]) -> Iterator[tuple[str, str]]:
    left = len(texts) - _MOST_NOTES if len(texts) > _MOST_NOTES + 1 else 0
    shown = [*texts[: len(texts) - left], *([f"and {left} more"] if left else [])]
    yield from (("" if number else label, text) for number, text in enumerate(shown))


def _main(table: CellTable, columns: Sequence[CellColumn], most: int, text: _Text, width: int) -> Sheet:
    whole = cells_sheet(table, columns)
    heads = (
        msgspec.structs.replace(head, widest=_most(column, width) if column.is_words else 0)
        for head, column in zip(whole.columns, columns, strict=True)
    )
    rows = tuple(tuple(text(column, row) for column in columns) for row in table.cells[:most])
    return Sheet(title=whole.title, columns=tuple(heads), rows=rows)


def _short(column: CellColumn, row: CellRow) -> str:
    """The text of `tell`; samples/s of repeated runs has its interval."""
    speed = or_none(row.samples_per_s)
    if column.name == "samples_per_s" and speed is not None and speed.repeats > 1:
        return speed.text()
    return tell(column, row)


def _fitting(
    rows: Sequence[CellRow], width: int, first: str | None, text: _Text, most: int | None = None
) -> tuple[CellColumn, ...]:
    # Without the details an interval stands beside its figure.
    columns = [column for column in cell_columns(rows) if most is None or column.name != "samples_per_s_range"]
    left = width - _width(_LABEL, rows, width, text)
    kept = {_LABEL.name}
    for column in sorted(columns[1:], key=lambda column: (column.name != first, column.rank)):
        needed = _width(column, rows, width, text) + _GAP
        if needed <= left and (most is None or len(kept) < most):
            kept.add(column.name)
            left -= needed
    return tuple(column for column in columns if column.name in kept)


def _width(column: CellColumn, rows: Sequence[CellRow], width: int, text: _Text) -> int:
    head = max(len(column.title), len(column.unit) + 2 if column.unit else 0)
    cells = max((cell_len(sanitize(text(column, row))) for row in rows), default=0)
    return max(head, min(cells, _most(column, width)) if column.is_words else cells)


def _most(column: CellColumn, width: int) -> int:
    return max(_LEAST_LABEL, int(_LABEL_SHARE * width)) if column is _LABEL else _WIDEST_WORDS


def _left_out(rows: Sequence[CellRow], shown: Sequence[CellColumn]) -> Iterator[str]:
    if len(rows) > _MOST_ROWS:
        yield f"The first {_MOST_ROWS} of {len(rows):,} rows: use --where for others, --format csv for all."
    names = {column.name for column in shown}
    missing = [column for column in cell_columns(rows) if column.name not in names]
    if missing:
        titles = (f"{column.title} ({column.unit})" if column.unit else column.title for column in missing)
        yield f"columns hidden (terminal too narrow): {'; '.join(titles)}"
