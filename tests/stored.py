"""A StoredRun of made-up parts, which lies nowhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from multinode.records.run import Run
from multinode.records.run_directory import RunDirectory
from multinode.runs.stored_run import StoredRun

__all__ = ["made_run"]


def made_run(run: Run, results: Mapping[Callable[[RunDirectory], Any], Any] | None = None, **parts: Any) -> StoredRun:
    """A run with these parts and no others.

    Args:
        run: its record.
        results: what verbs have left, by the function that reads it.
        parts: other parts by their names in StoredRun; with `observed`, its samples are its own.
    """
    nowhere = RunDirectory(Path("/nowhere") / run.run_id)
    stored = StoredRun(nowhere).having(run=run, results=dict(results or {}), **parts)
    if "observed" in parts:
        vars(stored).update(sampled=stored)
    return stored
