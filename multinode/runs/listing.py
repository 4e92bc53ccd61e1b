"""RunRow: a stored run in one line; what `runs` lists."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from rich.table import Table
from rich.text import Text

from multinode.records.run import RunStatus
from multinode.render.sheet import sanitize
from multinode.render.table import BAD, DOUBTFUL, GOOD, make_table
from multinode.runs.stored_run import StoredRun
from multinode.stats.estimate import value_of
from multinode.stats.unknown import or_none
from multinode.units import format_duration, format_placement, format_sig

_STATUS_STYLES = {"succeeded": GOOD, "running": "bold", "stopped": DOUBTFUL}


class RunRow(msgspec.Struct, frozen=True, kw_only=True):
    """One run; `multinode show RUN --json` prints all of it, and why a figure is unknown."""

    run_id: str
    kind: str  # as in `run.json`
    job: str
    status: RunStatus
    hung: bool  # whether it was stopped because it hung
    stop_reason: str  # as in `run.json`
    started_s: float
    ended_s: float | None
    nodes: tuple[str, ...]  # names, in node-rank order
    world_size: int  # workers on all nodes
    part_of: str | None  # the id of the run that it is a part of
    has_parts: bool  # whether it consists of other runs
    samples_per_s: float | None
    step_time_ms: float | None  # median
    exposed_share: float | None  # exposed communication, as a part of a step
    directory: str


class RunsDocument(msgspec.Struct, frozen=True, kw_only=True):
    """The document of `runs --json`."""

    schema: str = "multinode.runs/2"
    runs: tuple[RunRow, ...]


def run_row(stored: StoredRun) -> RunRow:
    """A run as one line."""
    run, summary = stored.run, stored.summary
    steps = or_none(summary.step_time_ms) if summary is not None else None
    return RunRow(
        run_id=run.run_id,
        kind=run.kind,
        job=run.job,
        status=run.status,
        hung=run.hang is not None,
        stop_reason=run.stop_reason,
        started_s=run.started_s,
        ended_s=run.ended_s,
        nodes=tuple(node.name for node in run.nodes),
        world_size=run.world_size,
        part_of=run.part_of,
        has_parts=run.has_parts,
        samples_per_s=value_of(summary.samples_per_s) if summary is not None else None,
        step_time_ms=steps.median.value if steps is not None else None,
        exposed_share=summary.comm.exposed_share if summary is not None else None,
        directory=str(stored.directory),
    )


def runs_table(rows: Sequence[RunRow]) -> Table:
    """One line per run; its id begins with the time of its start, and its job is cut at the width."""
    table = make_table()
    for name in ("run", "kind", "state", "took"):
        table.add_column(name, no_wrap=True, overflow="fold")
    for name in ("nodes x\nworkers", "samples\n/s"):
        table.add_column(name, justify="right", no_wrap=True, overflow="fold")
    table.add_column("job", no_wrap=True)
    for row in rows:
        nodes = len(row.nodes)
        table.add_row(
            row.run_id,
            row.kind,
            Text(_state_words(row), style=_STATUS_STYLES.get(row.status, BAD)),
            format_duration(row.ended_s - row.started_s) if row.ended_s is not None else "-",
            format_placement(nodes, row.world_size // max(1, nodes), row.world_size),
            format_sig(row.samples_per_s),
            Text(sanitize(row.job), no_wrap=True, overflow="ellipsis"),
        )
    return table


def _state_words(row: RunRow) -> str:
    if row.hung:
        return f"{row.status} (hung)"
    return "ok" if row.status == "succeeded" else row.status
