"""The tables of a contrast, for terminal, page and Markdown: sides, settings, nodes. No figures are computed here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from multinode.contrast.figures import Contrast, Side
from multinode.contrast.slowdown_attribution import is_noticeable
from multinode.render.sheet import RANGES, Column, Sheet, figure, megabytes, percent
from multinode.stats.estimate import PLUS_MINUS, Estimate
from multinode.stats.unknown import Unknown, or_none, unknown_fields
from multinode.units import UNKNOWN, format_count, format_duration, format_placement, format_sig

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
    workers = [f"{side.world_size}" for side in sides]
    noticed = [field for field in _WHERE_NOTICED if any(_is_noticed(side, field) for side in sides)]
    has_other = any(
        is_noticeable(_other_ms(side, noticed) or 0, side.split.step_ms)
        for side in sides
        if not isinstance(side.split, Unknown)
    )
    rows: list[_Row] = [("workers", tuple(workers))] if len(set(workers)) > 1 else []
    rows += [
        _row(sides, "samples/s", lambda side: side.samples_per_s.text()),
        _row(sides, "step time (ms)", lambda side: side.step_time_ms.text()),
        _row(sides, "  compute", lambda side: _part(side, "compute_ms")),
        _row(sides, "  exposed comm", lambda side: _part(side, "exposed_ms")),
        *(
            (f"  {name}", tuple(_part(side, field) for side in sides))
            for field, name in _WHERE_NOTICED.items()
            if field in noticed
        ),
        *([_row(sides, "  other", lambda side: format_sig(_other_ms(side, noticed)))] if has_other else []),
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
        return side.exposed_ms.text()
    return format_sig(or_none(getattr(side.split, field, None)))


def _ratio_row(contrast: Contrast, sides: Sequence[Side]) -> _Row:
    if contrast.mode == "compare":
        return "speed-up", _speedups(sides, Estimate.text)
    is_same = len({side.world_size for side in sides}) == 1
    return "speed against 1 node" if is_same and sides[0].nodes == 1 else "scaling efficiency", tuple(
        UNKNOWN
        if side.role == "baseline"
        else (side.speedup * (100 * side.efficiency / side.speedup.value)).text("percent")
        for side in sides
    )


def _speedups(sides: Sequence[Side], cell: Callable[[Estimate], str]) -> tuple[str, ...]:
    return tuple(UNKNOWN if side.role == "baseline" else cell(side.speedup) for side in sides)


def side_sheet(contrast: Contrast, sides: Sequence[Side], *, costs: bool = True) -> Sheet:
    """One column per side, one row per figure that a side has; differing settings are marked.

    Args:
        contrast: its figures.
        sides: some of its `measured`.
        costs: whether to include the rows of `cost_sheet`.
    """
    settings = [marked_cells(name, cells) for name, cells in _asked_rows(sides) if tells(cells)]
    results = [*_found_rows(contrast, sides), *(_cost_rows(sides) if costs else ())]
    return Sheet(
        title="side by side",
        columns=_side_columns(contrast, sides),
        rows=(*settings, *((name, *cells) for name, cells in results if tells(cells))),
        notes=_notes(contrast, marked=is_marked(settings)),
    )


def cost_sheet(contrast: Contrast) -> Sheet:
    """Time and cost of the full run, and energy per sample; empty if unknown."""
    sides = contrast.measured
    rows = tuple((name, *cells) for name, cells in _cost_rows(sides) if tells(cells))
    return Sheet(title="time, cost and energy", columns=_side_columns(contrast, sides), rows=rows)


def marked_cells(name: str, cells: tuple[str, ...]) -> tuple[str, ...]:
    """A row of settings, marked if the sides differ."""
    return (f"{name} {_MARK}" if len(set(cells)) > 1 else name, *cells)


def is_marked(rows: Sequence[tuple[str, ...]]) -> bool:
    """Whether a row is marked."""
    return any(row[0].endswith(f" {_MARK}") for row in rows)


def tells(cells: Sequence[str]) -> bool:
    """Whether any cell is known."""
    return set(cells) != {UNKNOWN}


def _asked_rows(sides: Sequence[Side]) -> Iterator[_Row]:
    yield _row(sides, "global batch (samples)", lambda side: _whole(or_none(side.global_batch)))
    for label, name in (
        ("per-device batch", "per_device_batch"),
        ("accumulation", "accumulation"),
        ("sequence length (tokens)", "sequence_length"),
    ):
        yield label, tuple(_whole(getattr(side.settings, name, None)) for side in sides)


def _found_rows(contrast: Contrast, sides: Sequence[Side]) -> Iterator[_Row]:
    yield _row(sides, "samples/s", lambda side: format_sig(side.samples_per_s.value))
    yield _row(sides, "samples/s, range", lambda side: side.samples_per_s.text("range"))
    yield _row(sides, "tokens/s", lambda side: _value(or_none(side.tokens_per_s)))
    yield _row(sides, "TGS (tokens/s per worker)", lambda side: _value(or_none(side.tgs)))
    yield _row(sides, "step time (ms)", lambda side: format_sig(side.step_time_ms.value))
    yield _row(sides, "step time, range (ms)", lambda side: side.step_time_ms.text("range"))
    yield _row(sides, "step time, p95 (ms)", lambda side: format_sig(side.step_spread.p95))
    yield _row(sides, "exposed communication (ms)", lambda side: _value(or_none(side.exposed_ms)))
    yield _row(sides, "exposed, share of the step", lambda side: percent(or_none(side.exposed_share)))
    yield _row(sides, "collective payload per step (MB)", lambda side: megabytes(or_none(side.bytes_per_step.calls)))
    yield _row(sides, "NIC traffic per step (MB)", lambda side: megabytes(or_none(side.bytes_per_step.nic)))
    yield "speed-up", _speedups(sides, lambda speedup: format_sig(speedup.value))
    yield "speed-up, range", _speedups(sides, partial(Estimate.text, form="range"))
    shares = (None if side.role == "baseline" else side.efficiency for side in sides)
    yield f"efficiency ({contrast.scaling})", tuple(percent(share, ".0f") for share in shares)
    yield _row(sides, "measured steps", lambda side: f"{side.steady_steps:,}")


def _cost_rows(sides: Sequence[Side]) -> Iterator[_Row]:
    yield _row(sides, "power of the GPUs (W)", lambda side: figure(or_none(side.power_w), ",.0f"))
    yield _row(sides, "energy per sample (J)", lambda side: format_sig(or_none(side.energy_j_per_sample)))
    yield _row(sides, "price per hour", lambda side: figure(or_none(side.price_per_hour), ",.2f"))
    yield _row(sides, "full run (estimated)", _whole_time)
    yield _row(sides, "full run cost (estimated)", lambda side: figure(or_none(side.whole_cost), ",.2f"))
    yield _row(sides, "cost per million tokens", lambda side: format_sig(or_none(side.cost_per_million_tokens)))


def _notes(contrast: Contrast, *, marked: bool) -> tuple[str, ...]:
    known = _from_steps(contrast, contrast.measured)
    notes = [f"{contrast.mode}: {contrast.why}" if contrast.why else contrast.mode, contrast.rule, *known, RANGES]
    return tuple(note for note in (*notes, DIFFERS if marked else "") if note)


def _side_columns(contrast: Contrast, sides: Sequence[Side]) -> tuple[Column, ...]:
    heads = (Column(side_head(contrast, side), nodes_and_workers(side)) for side in sides)
    return (Column("", "nodes x workers", words=True), *heads)


def _row(sides: Sequence[Side], name: str, cell: _Told) -> _Row:
    return name, tuple(cell(side) for side in sides)


def _whole_time(side: Side) -> str:
    return UNKNOWN if isinstance(side.whole_s, Unknown) else format_duration(side.whole_s.value)


def _whole(value: int | None) -> str:
    return figure(value, ",d")


def _value(measured: Estimate | None) -> str:
    return format_sig(measured.value if measured is not None else None)


# Settings that the table of figures already has.
_SHOWN = frozenset({"per_device_batch", "accumulation", "sequence_length"})


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
    alone = contrast.alone
    unequal = len({side.world_size for side in alone}) > 1
    return Sheet(
        title="each node alone",
        columns=(
            Column("node", words=True),
            Column("samples/s"),
            Column("range"),
            Column("step time", "ms"),
            Column("of the fastest", "per worker" if unequal else ""),
        ),
        rows=tuple(
            (
                side.node_names[0],
                format_sig(side.samples_per_s.value),
                side.samples_per_s.text("range"),
                format_sig(side.step_time_ms.value),
                percent(side.relative, ".0f"),
            )
            for side in alone
        ),
    )


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
    if contrast.forecast is None and contrast.forecast_reason:
        figures.setdefault(contrast.forecast_reason, []).append("forecast")
    return Sheet(
        title="missing",
        columns=(Column("figure", words=True), Column("why", words=True)),
        rows=tuple((", ".join(names), reason) for reason, names in figures.items()),
    )


def _setting(value: object) -> str:
    if value is None:
        return UNKNOWN
    return ("no", "yes")[value] if isinstance(value, bool) else str(value)
