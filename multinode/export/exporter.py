"""Exporter: what every export does with a run, in order."""

from __future__ import annotations

from collections.abc import Sequence

from multinode.export.figures import StepFigures
from multinode.records.progress import NodeProgress
from multinode.records.run import Run
from multinode.runs.stored_run import StoredRun


class Exporter:
    """Writes a run somewhere. Any method may raise; this ends the export and nothing else."""

    def begin(self, run: Run) -> None:
        """The run exists."""

    def steps(self, steps: Sequence[StepFigures]) -> None:
        """New steps, in ascending order."""

    def now(self, run: Run, nodes: Sequence[NodeProgress]) -> None:
        """The current state of the nodes, every few seconds while the run is running."""

    def end(self, ended: StoredRun) -> None:
        """The run has ended, with its figures; everything is written when this returns."""
