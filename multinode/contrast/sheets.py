"""The tables of a contrast, for terminal, page and Markdown: sides, settings, nodes. No figures are computed here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from multinode.contrast.figures import (
    NODE,
    OF_THE_FASTEST,
    POWER,
    STEADY_STEPS,
    Contrast,
    Side,
    side_row,
)
from multinode.contrast.slowdown_attribution import is_noticeable
from multinode.figures.figure import Figure
from multinode.figures.frame import Frame
from multinode.model.workload import ACCUMULATION, GLOBAL_BATCH, PER_DEVICE_BATCH, SEQUENCE_LENGTH
from multinode.profile.measured import (
    COST_PER_MILLION_TOKENS,
    EFFICIENCY,
    ENERGY,
    EXPOSED,
    EXPOSED_SHARE,
    NODES,
    PRICE_PER_HOUR,
    SPEEDS,
    SPEEDUP,
    WHOLE_COST,
    WHOLE_TIME,
    WORLD_SIZE,
)
from multinode.profile.step_bytes import NIC_TRAFFIC, PAYLOAD
from multinode.profile.throughput import SAMPLES_PER_S, STEP_TIME, STEP_TIME_P95
from multinode.render.sheet import RANGES, Column, Sheet
from multinode.stats.estimate import PLUS_MINUS
from multinode.stats.unknown import Unknown, or_none, unknown_fields
from multinode.units import UNKNOWN, format_count, format_placement

# Mark of settings that differ between the sides.
_MARK = "!"
DIFFERS = f"{_MARK} differs between the sides"

_Row = tuple[str, tuple[str, ...]]
_Told = Callable[[Side], str]


def side_head(contrast: Contrast, side: Side) -> str:
    """Its column head: `1 node`, `2 nodes`; for two stored runs their ids."""
    return side.run_ids[-1] if contrast.mode == "compare" else format_count(side.nodes, "node")


def nodes_and_workers(side: Side) -> str:
    """Nodes x workers on each; of unequal nodes all workers."""
    return format_placement(side.nodes, side.workers_per_node, side.world_size)


def small_sheet(contrast: Contrast, sides: Sequence[Side]) -> Sheet:
    """The deciding figures, one column per side: speed, step split, efficiency, with uncertainty.

    Args:
        contrast: its figures.
        sides: some of its `measured`.
    """
    table = [side_row(side) for side in sides]
    workers = [WORLD_SIZE.tell(row) for row in table]
    noticed = [field for field in _WHERE_NOTICED if any(_is_noticed(side, field) for side in sides)]
    has_other = any(
        is_noticeable(_other_ms(side, noticed) or 0, side.split.step_ms)
        for side in sides
        if not isinstance(side.split, Unknown)
    )
    rows: list[_Row] = [(WORLD_SIZE.heading, tuple(workers))] if len(set(workers)) > 1 else []
    rows += [
        (SAMPLES_PER_S.heading, tuple(map(SAMPLES_PER_S.as_form("interval").tell, table))),
        _row(sides, STEP_TIME.heading, lambda side: side.step_time_ms.text("ms")),
        _row(sides, "  compute", lambda side: _part(side, "compute_ms")),
        _row(sides, f"  {EXPOSED.title} comm", lambda side: _part(side, "exposed_ms")),
        *(
            (f"  {name}", tuple(_part(side, field) for side in sides))
            for field, name in _WHERE_NOTICED.items()
            if field in noticed
        ),
        *([_row(sides, "  other", lambda side: STEP_TIME.text(_other_ms(side, noticed)))] if has_other else []),
        _ratio_row(contrast, sides),
    ]
    return Sheet(
        title="summary",
        columns=(Column("", words=True), *(Column(side_head(contrast, side)) for side in sides)),
        rows=tuple((name, *cells) for name, cells in rows if tells(cells)),
        notes=tuple(_from_steps(contrast, sides)),
        legend=(_repeats(sides),),
    )


def _from_steps(contrast: Contrast, sides: Sequence[Side]) -> Iterator[str]:
    for side in sides:
        if not isinstance(side.exposed_share, Unknown) and side.exposed_steps.words:
            yield f"exposed communication on {side_head(contrast, side)}: {side.exposed_steps.words}"


def _repeats(sides: Sequence[Side]) -> str:
    least = min(len(side.run_ids) for side in sides)
    over = f"{least} repeats" if least > 1 else "the steps"
    return f"{PLUS_MINUS}: 95% confidence interval over {over}"


# Parts of a step that have a row if noticeable.
_WHERE_NOTICED = {"wait_ms": "straggler wait", "data_ms": "data wait", "host_ms": "other host"}


def _is_noticed(side: Side, field: str) -> bool:
    part_ms = or_none(getattr(side.split, field, None))
    return not isinstance(side.split, Unknown) and part_ms is not None and is_noticeable(part_ms, side.split.step_ms)


def _other_ms(side: Side, noticed: Sequence[str]) -> float | None:
    split = or_none(side.split)
    parts: list[float | None] = [
        or_none(getattr(split, field, None)) for field in ("compute_ms", "exposed_ms", *noticed)
    ]
    known_parts = [part for part in parts if part is not None]
    return max(0.0, split.step_ms - sum(known_parts)) if split is not None and len(known_parts) == len(parts) else None


def _part(side: Side, field: str) -> str:
    if field == "exposed_ms" and not isinstance(side.exposed_ms, Unknown) and side.exposed_ms.value > 0:
        return side.exposed_ms.text("ms")
    return STEP_TIME.text(getattr(side.split, field, None))


def _ratio_row(contrast: Contrast, sides: Sequence[Side]) -> _Row:
    if contrast.mode == "compare":
        return SPEEDUP.title, tuple(map(SPEEDUP.as_form("interval").tell, map(side_row, sides)))
    is_same = len({side.world_size for side in sides}) == 1
    return "speed against 1 node" if is_same and sides[0].nodes == 1 else "scaling efficiency", tuple(
        UNKNOWN
        if side.role == "baseline"
        else (side.speedup * (100 * side.efficiency / side.speedup.value)).text("percent")
        for side in sides
    )


def side_sheet(contrast: Contrast, sides: Sequence[Side], *, costs: bool = True) -> Sheet:
    """One column per side, one row per figure that a side has; differing settings are marked.

    Args:
        contrast: its figures.
        sides: some of its `measured`.
        costs: whether to include the rows of `cost_sheet`.
    """
    asked = _across(contrast, sides, _ASKED)
    settings = [row if row[0] in asked.csv_rows else marked_cells(row[0], row[1:]) for row in asked.rows]
    notes = _notes(contrast, marked=is_marked(asked.shown.rows))
    results = _across(contrast, sides, (*_FOUND_OF_SPEED, *_found(contrast), *(_COSTS if costs else ())), notes=notes)
    return msgspec.structs.replace(
        results, title="side by side", rows=(*settings, *results.rows), csv_rows=asked.csv_rows | results.csv_rows
    )


def _across(
    contrast: Contrast, sides: Sequence[Side], figures: Sequence[Figure[Any]], notes: Sequence[str] = ()
) -> Sheet:
    frame = Frame(rows=tuple(map(side_row, sides)), figures=tuple(figures))
    return frame.sheet(across=True, heads=_side_columns(contrast, sides), notes=notes)


def cost_sheet(contrast: Contrast) -> Sheet:
    """Time and cost of the full run, and energy per sample; empty if unknown."""
    return msgspec.structs.replace(_across(contrast, contrast.measured, _COSTS), title="time, cost and energy")


def marked_cells(name: str, cells: tuple[str, ...]) -> tuple[str, ...]:
    """A row of settings, marked if the sides differ."""
    return (f"{name} {_MARK}" if _differ(cells) else name, *cells)


def is_marked(rows: Sequence[tuple[str, ...]]) -> bool:
    """Whether a row is marked."""
    return any(_differ(cells) for _, *cells in rows)


def _differ(cells: Sequence[str]) -> bool:
    return len(set(cells)) > 1


def tells(cells: Sequence[str]) -> bool:
    """Whether any cell is known."""
    return set(cells) != {UNKNOWN}


_ASKED: tuple[Figure[Any], ...] = (GLOBAL_BATCH, PER_DEVICE_BATCH, ACCUMULATION, SEQUENCE_LENGTH)
_FOUND_OF_SPEED: tuple[Figure[Any], ...] = (
    *(SAMPLES_PER_S, SAMPLES_PER_S.ranged, *SPEEDS, STEP_TIME, STEP_TIME.ranged, STEP_TIME_P95, EXPOSED),
    *(EXPOSED_SHARE, PAYLOAD, NIC_TRAFFIC, SPEEDUP, SPEEDUP.ranged),
)
_COSTS: tuple[Figure[Any], ...] = (*(POWER, ENERGY, PRICE_PER_HOUR, WHOLE_TIME, WHOLE_COST, COST_PER_MILLION_TOKENS),)


def _found(contrast: Contrast) -> tuple[Figure[Any], ...]:
    return efficiency_of(contrast), STEADY_STEPS


def efficiency_of(contrast: Contrast) -> Figure[float]:
    """The efficiency, named by its kind."""
    return msgspec.structs.replace(EFFICIENCY, title=f"{EFFICIENCY.title} ({contrast.scaling})")


def _notes(contrast: Contrast, *, marked: bool) -> tuple[str, ...]:
    known = _from_steps(contrast, contrast.measured)
    notes = [f"{contrast.mode}: {contrast.why.message}", contrast.rule, *known, RANGES]
    return tuple(note for note in (*notes, DIFFERS if marked else "") if note)


def _side_columns(contrast: Contrast, sides: Sequence[Side]) -> tuple[Column, ...]:
    heads = (Column(side_head(contrast, side), nodes_and_workers(side)) for side in sides)
    return (Column("", NODES.words, words=True), *heads)


def _row(sides: Sequence[Side], name: str, cell: _Told) -> _Row:
    return name, tuple(cell(side) for side in sides)


# Settings that the table of figures already has.
_SHOWN = frozenset(figure.name for figure in _ASKED)


def settings_sheet(contrast: Contrast) -> Sheet:
    """Runs, nodes, settings and versions of the sides, differing ones marked."""
    sides = contrast.measured
    settings = [{} if isinstance(side.settings, Unknown) else side.settings.by_name for side in sides]
    names = dict.fromkeys(name for shown in settings for name in shown if name not in _SHOWN)
    packages = dict.fromkeys(package for side in sides for package in side.versions)
    compared = [(name.replace("_", " "), tuple(_setting(shown.get(name)) for shown in settings)) for name in names]
    compared += [(package, tuple(side.versions.get(package, UNKNOWN) for side in sides)) for package in packages]
    rows = [marked_cells(name, cells) for name, cells in compared if tells(cells)]
    own = [
        ("nodes", *(", ".join(side.node_names) for side in sides)),
        ("runs", *(", ".join(side.run_ids) for side in sides)),
    ]
    return Sheet(
        title="settings and versions",
        columns=(Column("", words=True), *(Column(side_head(contrast, side), words=True) for side in sides)),
        rows=(*rows, *own),
        notes=(DIFFERS,) if is_marked(rows) else (),
    )


def each_node_sheet(contrast: Contrast) -> Sheet:
    """Every node alone."""
    unequal = len({side.world_size for side in contrast.alone}) > 1
    share = msgspec.structs.replace(OF_THE_FASTEST, unit="per worker" if unequal else "")
    return Frame(
        title="each node alone",
        rows=tuple(map(side_row, contrast.alone)),
        figures=(NODE, SAMPLES_PER_S, SAMPLES_PER_S.ranged, STEP_TIME.in_full, share),
    ).sheet()


def missing_sheet(contrast: Contrast) -> Sheet:
    """Missing figures, by reason, with the sides that lack them."""
    sides = contrast.measured
    lacking: dict[tuple[str, str], list[str]] = {}
    for side in sides:
        for name, unknown in unknown_fields(side).items():
            lacking.setdefault((name, unknown.reason), []).append(side_head(contrast, side))
    figures: dict[str, list[str]] = {}
    for (name, reason), named in lacking.items():
        figures.setdefault(reason, []).append(name if len(named) == len(sides) else f"{name} ({', '.join(named)})")
    for name, unknown in unknown_fields(contrast).items():
        figures.setdefault(unknown.reason, []).append(name)
    return Sheet(
        title="missing",
        columns=(Column("figure", words=True), Column("why", words=True)),
        rows=tuple((", ".join(names), reason) for reason, names in figures.items()),
    )


def _setting(value: object) -> str:
    if value is None:
        return UNKNOWN
    return ("no", "yes")[value] if isinstance(value, bool) else str(value)
