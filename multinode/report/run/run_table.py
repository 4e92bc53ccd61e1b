"""Stored runs as tables."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

from rich.table import Table
from rich.text import Text

from multinode.analyse.steps.summary import Summary
from multinode.core.run.run import Run
from multinode.report.render.foreign_text import sanitize
from multinode.report.render.table import make_table
from multinode.units import format_duration

__all__ = ["run_table", "runs_document", "runs_table"]


class _Stored(Protocol):
    @property
    def run(self) -> Run: ...
    @property
    def summary(self) -> Summary | None: ...


def runs_table(runs: Sequence[_Stored]) -> Table:
    """A row a run."""
    table = make_table()
    for name in ("run", "kind", "state", "started", "took"):
        table.add_column(name, no_wrap=True)
    for name in ("nodes", "workers", "samples/s"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("job")
    for stored in runs:
        run = stored.run
        speed = stored.summary.samples_per_s if stored.summary else None
        table.add_row(
            run.run_id,
            run.kind,
            run.status,
            time.strftime("%Y-%m-%d %H:%M", time.localtime(run.started_s)),
            format_duration(run.ended_s - run.started_s) if run.ended_s is not None else "-",
            str(len(run.nodes)),
            str(run.world_size),
            "-" if speed is None else f"{speed:.1f}",
            Text(sanitize(run.job)),
        )
    return table


def runs_document(runs: Sequence[_Stored]) -> dict[str, Any]:
    """What `runs --json` prints."""
    return {
        "schema": "multinode.runs/1",
        "runs": [
            {
                "run_id": stored.run.run_id,
                "kind": stored.run.kind,
                "status": stored.run.status,
                "job": stored.run.job,
                "nodes": [node.name for node in stored.run.nodes],
                "world_size": stored.run.world_size,
                "started_s": stored.run.started_s,
                "ended_s": stored.run.ended_s,
                "samples_per_s": stored.summary.samples_per_s if stored.summary else None,
            }
            for stored in runs
        ],
    }


def run_table(run: Run) -> Table:
    """How one run ended: a row a fact. Its figures are `summary_table`'s."""
    table = make_table(header=False)
    table.add_column("what", no_wrap=True)
    table.add_column("value")
    table.add_row("run", run.run_id)
    table.add_row("job", Text(sanitize(run.job)))
    table.add_row("state", run.status)
    failure = run.first_failure
    if failure is not None:
        table.add_row("first failure", Text(sanitize(f"{failure.node}: {failure.message}")))
        if failure.time_s is not None:
            at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(failure.time_s))
            table.add_row(
                "failed at", f"{at}, {format_duration(max(0.0, failure.time_s - run.started_s))} after the start"
            )
        for consequence in failure.consequences:
            table.add_row("consequence", Text(sanitize(consequence)))
    for node in run.nodes:
        ended = node.signal or (f"exit code {node.exit_code}" if node.exit_code is not None else node.state)
        table.add_row(f"node {node.node_rank}", Text(sanitize(f"{node.name}: {ended}")))
    return table
