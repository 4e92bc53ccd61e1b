"""A contrast that has not been concluded: which sides are measured, and which are missing. Computes no figures."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from multinode.contrast.figures import Side
from multinode.contrast.side import CONTRAST_FILE, make_side
from multinode.launch.ending import RESUME
from multinode.launch.outcome import has_ending
from multinode.profile.measured import EXPOSED, NODES
from multinode.profile.throughput import SAMPLES_PER_S, STEP_TIME
from multinode.records.run_directory import RunDirectory
from multinode.render.sheet import Block, Column, Labels, Prose, Sheet
from multinode.runs.stored_run import StoredRun
from multinode.series.grid import CellRecord, GridRecord
from multinode.series.series import GRID_FILE
from multinode.units import UNKNOWN, format_list, format_placement


class SideState(msgspec.Struct, frozen=True, kw_only=True):
    """A side that was to be measured; `side` is None while none of its runs has succeeded."""

    record: CellRecord
    side: Side | None = None

    @property
    def name(self) -> str:
        """`baseline`, `candidate`, `4-nodes`, as its runs are called."""
        return self.record.cell.label


class UnfinishedContrast(msgspec.Struct, frozen=True, kw_only=True):
    """The sides of a contrast, in the order in which it was to measure them."""

    job: str
    repeats: int  # runs per side
    sides: tuple[SideState, ...]

    @property
    def measured(self) -> tuple[SideState, ...]:
        """Sides with figures."""
        return tuple(state for state in self.sides if state.side is not None)

    @property
    def verdict(self) -> str:
        """What is measured and what is missing: `1 of 2 sides measured; candidate is missing.`."""
        missing = [state.name for state in self.sides if state.side is None]
        short = [state.name for state in self.measured if len(state.record.run_ids) < self.repeats]
        parts = [f"{len(self.measured)} of {len(self.sides)} sides measured"]
        parts += [f"{format_list(missing)} {'is' if len(missing) == 1 else 'are'} missing"] if missing else []
        parts += [f"repeats of {format_list(short)} are missing"] if short else []
        return f"{'; '.join(parts)}."


def load_unfinished(directory: RunDirectory) -> UnfinishedContrast | None:
    """What a contrast without a result has measured; None for any other run.

    One that failed before it measured anything is none either: its failure says more.
    """
    run, record = directory.read_run(), directory.read(GRID_FILE, GridRecord)
    if run is None or record is None or run.kind != "contrast" or (directory.path / CONTRAST_FILE).is_file():
        return None
    unfinished = UnfinishedContrast(
        job=record.command,
        repeats=record.grid.repeats,
        sides=tuple(
            SideState(record=cell, side=_side_of(cell, directory) if cell.run_ids else None) for cell in record.cells
        ),
    )
    return unfinished if unfinished.measured or not has_ending(run) else None


def _side_of(cell: CellRecord, directory: RunDirectory) -> Side | None:
    paths = [directory.path.with_name(run_id) for run_id in cell.run_ids]
    runs = [StoredRun(RunDirectory(path)) for path in paths if (path / "summary.json").is_file()]
    return make_side(cell.cell.label, runs) if runs else None


def show(unfinished: UnfinishedContrast) -> Iterator[Block]:
    """What is measured, and what is missing."""
    yield Prose(unfinished.verdict, "lead")
    yield msgspec.structs.replace(unfinished_sheet(unfinished), title="")
    yield Labels(tuple(_disturbed_rows(unfinished)))
    yield Labels((RESUME,), detail="page")


def unfinished_sheet(unfinished: UnfinishedContrast) -> Sheet:
    """One row per side."""
    several = unfinished.repeats > 1
    return Sheet(
        title="sides",
        columns=(
            Column("side", words=True),
            Column(NODES.title, NODES.unit),
            *((Column("runs"),) if several else ()),
            SAMPLES_PER_S.column,
            STEP_TIME.column,
            Column(f"{EXPOSED.title} comm", EXPOSED.unit),
        ),
        rows=tuple(_row(state, unfinished.repeats if several else None) for state in unfinished.sides),
    )


def _row(state: SideState, repeats: int | None) -> tuple[str, ...]:
    cell, side = state.record.cell, state.side
    workers = None if side is None else side.world_size
    runs = () if repeats is None else (f"{len(state.record.run_ids)} of {repeats}",)
    head = (state.name, format_placement(cell.nodes, cell.workers_per_node, workers), *runs)
    if side is None:
        return (*head, state.record.state, UNKNOWN, UNKNOWN)
    return (*head, side.samples_per_s.text(), side.step_time_ms.text("ms"), EXPOSED.text(side.exposed_ms))


def _disturbed_rows(unfinished: UnfinishedContrast) -> Iterator[tuple[str, str]]:
    measured = [(state.name, state.side) for state in unfinished.measured if state.side is not None]
    texts = [f"{name}, {found.message}" for name, side in measured for found in side.disturbances]
    yield from (("" if number else "Disturbed", text) for number, text in enumerate(texts))
