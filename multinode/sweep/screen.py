"""A table of cells for terminal, page, Markdown and CSV: its columns, what was not measured, what is marked.

No figure is made here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from multinode.figures.figure import Figure, Row, plain
from multinode.figures.frame import Frame
from multinode.findings.finding import message_of
from multinode.model.workload import (
    ACCUMULATION,
    DATASET,
    GLOBAL_BATCH,
    LEVERS,
    LORA_RANK,
    METHOD,
    MODEL,
    PACKING,
    PER_DEVICE_BATCH,
    PRECISION,
    RECOMPUTE,
    SEQUENCE_LENGTH,
    STAGE,
    STRATEGY,
)
from multinode.predict.shortfall import shortfall_words
from multinode.profile.measured import COST_PER_MILLION_TOKENS, ENERGY, NODES, PRICE_PER_HOUR, WHOLE_COST, WHOLE_TIME
from multinode.profile.throughput import (
    HARDWARE_TFLOPS,
    HFU,
    MFU,
    MODEL_TFLOPS,
    STEP_TIME,
    STEP_TIME_P95,
    TGS,
    TOKENS_PER_S,
)
from multinode.render.sheet import (
    RANGES,
    Block,
    Chart,
    Charts,
    Column,
    Labels,
    Later,
    NextCommand,
    Prose,
    Sheet,
    Tiles,
    in_detail,
)
from multinode.render.table import WIDE
from multinode.stats.estimate import ratio
from multinode.stats.unknown import Unknown, known, or_none, reason_of, unknown_fields
from multinode.sweep.comparability import currencies, differing, differing_labels, other_job, other_work, untold
from multinode.sweep.figures import (
    BY_NAME,
    CELL_FIGURES,
    DEVICE,
    LABEL,
    MEASURED,
    NETWORK,
    NETWORK_SHARE,
    PARAMETERS,
    PEAK_MEMORY,
    PRICE_PURCHASE,
    RELATIVE,
    SAMPLES_PER_MONEY,
    SOURCE,
    SPEED,
    SPEED_PER_PURCHASE,
    SPEED_RANGE,
    STATES,
    TRAINABLE_PARAMETERS,
    CellRow,
    CellTable,
    cell_row,
    has_figures,
    has_speed,
    state_word,
    value_of,
)
from multinode.sweep.frame import cell_frame, constants, shown_frame
from multinode.units import UNKNOWN, format_count, format_figure, format_list

_MOST_LABELS = 6
_MOST_RIVALS = 3


def lead(table: CellTable) -> str:
    """What a reader who reads one sentence should read."""
    if not table.cells:
        return "No rows."
    measured = [row for row in table.cells if has_figures(row)]
    states = Counter(row.state for row in table.cells)
    others = "".join(f", {states[state]} {state.replace('_', ' ')}" for state in STATES if states[state])
    counted = f"{len(measured)} of {len(table.cells)} cells measured{others}."
    best = _best(table, measured)
    return f"{best}; {counted}" if best else counted


def _best(table: CellTable, measured: Sequence[CellRow]) -> str:
    fast = [row for row in measured if has_speed(row)]
    timed = [row for row in fast or measured if not isinstance(row.tokens_per_s, Unknown)]
    of_length = differing(fast) == ("sequence_length",) and not untold(fast) and len(timed) == len(fast)
    if fast and not of_length:
        best = max(fast, key=lambda row: value_of(row, SPEED))
        work = other_work(fast) or _other_labels(fast)
        though = f", though cells {work}" if work else _as_fast(best, fast)
        speed = f"{SPEED.tell(cell_row(best))} {SPEED.title}"
        return f"The fastest is {best.label} at {speed}{_times(table, best, fast)}{though}"
    if not timed:
        return ""
    best = max(timed, key=lambda row: value_of(row, TOKENS_PER_S))
    work = other_work(timed)
    though = ", among cells with different sequence lengths" if of_length else f", though cells {work}" if work else ""
    return f"The fastest is {best.label} at {TOKENS_PER_S.tell(cell_row(best))} {TOKENS_PER_S.title}{though}"


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
        if column.name == SOURCE.name:
            remarks += [text] if text == "imported" else []
        elif column.name in {PACKING.name, RECOMPUTE.name}:
            remarks += [column.words] if text == "yes" else []
        else:
            is_told = column.name == NODES.name and not any(map(_are_equal_nodes, table.cells))
            remarks.append(text if is_told else f"{column.words} {text}")
    return f"The same in every row: {', '.join(remarks)}." if remarks else ""


def _are_equal_nodes(cell: CellRow) -> bool:
    """Whether its placement is `nodes x workers`, and not one in words."""
    nodes, each, workers = map(or_none, (cell.nodes, cell.workers_per_node, cell.world_size))
    return nodes is not None and (workers is None or workers == nodes * (each or 0))


def cells_sheet(table: CellTable, frame: Frame | None = None) -> Sheet:
    """A row a cell; a row without figures says so in place of its speed.

    Args:
        table: the table.
        frame: `shown_frame` with some of its figures; None has all of them.
    """
    shown = shown_frame(table) if frame is None else frame
    names = {figure.name for figure in shown.figures}
    notes = (
        constants_line(table),
        f"Relative: samples/s relative to {table.baseline}." if RELATIVE.name in names and table.baseline else "",
        RANGES if SPEED_RANGE.name in names else "",
        table.rule,
        *(note.message for note in table.notes),
    )
    return msgspec.structs.replace(shown.sheet(), notes=tuple(note for note in notes if note))


def unmeasured_sheet(table: CellTable) -> Sheet:
    """Cells without figures, by state and reason."""
    rows_of: dict[tuple[str, str], list[str]] = {}
    for row in table.cells:
        if not has_figures(row):
            reason = message_of(row.why) or (reason_of(row.samples_per_s) if row.state == MEASURED else "")
            rows_of.setdefault((state_word(row), reason), []).append(row.label)
    return Sheet(
        title="not measured",
        columns=(Column("state", words=True), Column("cells", words=True), Column("why", words=True)),
        rows=tuple((state, _listed(labels), reason or UNKNOWN) for (state, reason), labels in rows_of.items()),
    )


def marks_sheet(table: CellTable) -> Sheet:
    """What disturbed a row, which of its repeats failed; of an imported one, what contradicts itself or its network."""
    return Sheet(
        title="remarks",
        columns=(Column("cell", words=True), Column("what", words=True)),
        rows=tuple((row.label, mark) for row in table.cells for mark in _marks(row)),
    )


def _marks(row: CellRow) -> tuple[str, ...]:
    failed = (row.why.message,) if row.why is not None and has_figures(row) else ()
    short = (shortfall_words(row.shortfall),) if row.shortfall is not None else ()
    return (*failed, *short, *(found.message for found in (*row.contradictions, *row.disturbances)))


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


_LISTS = ("run_ids", "node_names", "filed_prices")
_FOUND = ("disturbances", "contradictions")


def cell_csv(table: CellTable) -> str:
    """The file's text; what the sweep set stands under `set.` and the key's name."""
    keys = tuple(dict.fromkeys(key for row in table.cells for key in row.varied))

    def more(row: Row) -> Iterator[tuple[str, Any]]:
        cell: CellRow = row.item
        yield "shortfall", shortfall_words(cell.shortfall) if cell.shortfall is not None else None
        yield "repeats", getattr(cell.samples_per_s, "repeats", None)
        for name in _LISTS:
            yield name, "; ".join(getattr(cell, name))
        for name in _FOUND:
            yield name, "; ".join(finding.message for finding in getattr(cell, name))
        for key in keys:
            yield f"set.{key}", cell.varied.get(key)

    return cell_frame(table.cells).only([figure for figure in CELL_FIGURES if figure is not SPEED_RANGE]).csv(more)


def show(table: CellTable, width: int = WIDE, first: str | None = None) -> Iterator[Block]:
    """The sentence and key figures, the table, what is not in it; in detail every column that fits, rules, reasons.

    Args:
        table: the table.
        width: of the terminal, in characters; a page has all columns.
        first: name of a value that a reader wants to see above all others.
    """
    yield Prose(lead(table), "lead")
    if table.cheapest is not None:
        yield Prose(table.cheapest.message, "lead")
    yield Tiles(tuple(_key_figures(table)))
    yield Charts(lambda: _charts(table))
    short = _fitting(_with_interval(shown_frame(table)), min(width, _SHORT_WIDTH), first, _MOST_SHORT_COLUMNS)
    main = _main(table, short, _MOST_SHORT_ROWS, min(width, _SHORT_WIDTH))
    yield msgspec.structs.replace(main, detail="brief")
    yield Labels(tuple(_remarks(table, short)), detail="brief")
    yield Later(lambda: _fitted(table, width, first), detail="screen")
    yield Later(lambda: (cells_sheet(table),), detail="page")
    yield from in_detail((unmeasured_sheet(table), marks_sheet(table), missing_sheet(table)))
    yield NextCommand("Details", f"multinode show {' '.join(table.run_id.split(','))} --details", detail="brief")


def _fitted(table: CellTable, width: int, first: str | None) -> Iterator[Block]:
    whole = shown_frame(table)
    frame = _fitting(whole, width, first)
    yield _main(table, frame, _MOST_ROWS, width)
    notes = (*cells_sheet(table, frame).notes, *_left_out(whole, frame))
    yield from (Prose(note, "note") for note in notes)


def _charts(table: CellTable) -> Iterable[Chart]:
    from multinode.sweep.charts import cell_charts  # noqa: PLC0415 - plotly is an extra

    return cell_charts(table)


# What one looks at first: its name, the figure, and whether the most or the least is the best.
_KEY_FIGURES: tuple[tuple[str, Figure[Any], int], ...] = (
    ("most samples/s", SPEED, 1),
    ("highest tokens/s per worker (TGS)", TGS, 1),
    ("highest MFU", MFU, 1),
    ("lowest memory per worker (GiB)", PEAK_MEMORY, -1),
    ("most samples per unit of money", SAMPLES_PER_MONEY, 1),
    ("cheapest full run", WHOLE_COST, -1),
)


def _key_figures(table: CellTable) -> Iterator[tuple[str, str]]:
    cells = [cell for cell in table.cells if has_figures(cell)]
    # What is paid in two currencies, or for two jobs, has no cheapest.
    unlike: set[str] = set()
    if len(currencies(cells)) > 1:
        unlike = {SAMPLES_PER_MONEY.name, WHOLE_COST.name}
    elif other_job([cell for cell in cells if not isinstance(cell.whole_cost, Unknown)]):
        unlike = {WHOLE_COST.name}
    frame = cell_frame(cells)
    for title, figure, sign in _KEY_FIGURES:
        valued = [
            (value, row)
            for row in frame.rows
            if figure.name not in unlike and (value := plain(row[figure])) is not None
        ]
        if valued:
            _, best = max(valued, key=lambda pair: sign * pair[0])
            yield f"{title}: {best.item.label}", figure.tell(best)


# Figures that come first are kept longest in narrow tables; keys of the job come between the two lists, others last.
_FIRST: tuple[Figure[Any], ...] = (
    *(LABEL, SPEED, RELATIVE, PEAK_MEMORY, NETWORK_SHARE, STEP_TIME, WHOLE_TIME, WHOLE_COST, SAMPLES_PER_MONEY),
    *(TOKENS_PER_S, SPEED_PER_PURCHASE, MFU, METHOD, PER_DEVICE_BATCH, NODES, DEVICE, MODEL, SEQUENCE_LENGTH),
    STRATEGY,
)
_LAST: tuple[Figure[Any], ...] = (
    *(ACCUMULATION, TGS, GLOBAL_BATCH, ENERGY, MODEL_TFLOPS, HFU, PRICE_PER_HOUR, COST_PER_MILLION_TOKENS),
    *(SPEED_RANGE, STEP_TIME_P95, PRICE_PURCHASE, HARDWARE_TFLOPS, SOURCE, *LEVERS, DATASET, PRECISION, PARAMETERS),
    *(TRAINABLE_PARAMETERS, NETWORK, STAGE, PACKING, RECOMPUTE, LORA_RANK),
)
_RANK_OF_KEYS = len(_FIRST)
_RANKS = {figure.name: rank for rank, figure in enumerate(_FIRST)} | {
    figure.name: rank for rank, figure in enumerate(_LAST, start=_RANK_OF_KEYS)
}
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


def _remarks(table: CellTable, shown: Frame) -> Iterator[tuple[str, str]]:
    yield from _few("Not run", [f"{state}: {cells}: {why}" for state, cells, why in unmeasured_sheet(table).rows])
    yield from _few("Remarks", [f"{label}, {remark}" for label, remark in marks_sheet(table).rows])
    left = len(table.cells) - _MOST_SHORT_ROWS
    if left > 0:
        yield "Left out", f"{left:,} more rows: --where, --details or --format csv"
    if table.baseline is not None and any(figure.name == RELATIVE.name for figure in shown.figures):
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
    yield from (f"{_listed(names)} not evaluated: {reason}" for reason, names in labels.items())


def _few(label: str, texts: Sequence[str]) -> Iterator[tuple[str, str]]:
    left = len(texts) - _MOST_NOTES if len(texts) > _MOST_NOTES + 1 else 0
    shown = [*texts[: len(texts) - left], *([f"and {left} more"] if left else [])]
    yield from (("" if number else label, text) for number, text in enumerate(shown))


def _main(table: CellTable, frame: Frame, most: int, width: int) -> Sheet:
    shown = msgspec.structs.replace(frame, rows=frame.rows[:most]).sheet()
    heads = (
        msgspec.structs.replace(head, widest=_most(figure, width) if figure.is_words else 0)
        for head, figure in zip(shown.columns, frame.figures, strict=True)
    )
    return Sheet(title=table.job, columns=tuple(heads), rows=shown.rows)


def _with_interval(frame: Frame) -> Frame:
    """The frame with the interval of repeated runs beside their samples/s, and no column for it."""
    return frame.only(
        [
            msgspec.structs.replace(figure, cell=_speed_interval) if figure.name == SPEED.name else figure
            for figure in frame.figures
            if figure.name != SPEED_RANGE.name
        ]
    )


def _speed_interval(row: Row) -> str:
    speed = or_none(row[SPEED])
    return speed.text() if speed is not None and speed.repeats > 1 else SPEED.tell(row)


def _fitting(frame: Frame, width: int, first: str | None, most: int = 99) -> Frame:
    keys = (figure.name for figure in frame.figures if figure.name not in BY_NAME)
    ranks = dict.fromkeys(keys, _RANK_OF_KEYS) | _RANKS
    return frame.fit(width, ranks | ({first: -1} if first else {}), lambda figure: _most(figure, width), most)


def _most(figure: Figure[Any], width: int) -> int:
    return max(_LEAST_LABEL, int(_LABEL_SHARE * width)) if figure.name == LABEL.name else _WIDEST_WORDS


def _left_out(whole: Frame, shown: Frame) -> Iterator[str]:
    if len(whole.rows) > _MOST_ROWS:
        yield f"The first {_MOST_ROWS} of {len(whole.rows):,} rows: use --where for others, --format csv for all."
    names = {figure.name for figure in shown.figures}
    missing = [figure for figure in whole.figures if figure.name not in names]
    if missing:
        titles = (f"{figure.title} ({figure.unit})" if figure.unit else figure.title for figure in missing)
        yield f"columns hidden (terminal too narrow): {'; '.join(titles)}"
