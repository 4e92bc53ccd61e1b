"""Weights & Biases: a run in its offline format, for `wandb sync`, or online if the user asks for it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from multinode.export.exporter import Exporter
from multinode.export.figures import StepFigures, summary_values
from multinode.records.run import Run
from multinode.runs.stored_run import StoredRun


class WandbRun(Exporter):
    """A run in DIR/wandb, of the project `multinode` or $WANDB_PROJECT; $WANDB_MODE=online sends it at once."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._run: Any = None

    def begin(self, run: Run) -> None:
        """Start it; nothing about this machine is recorded."""
        import wandb  # noqa: PLC0415 - an extra

        self._directory.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "multinode"),
            name=run.run_id,
            dir=str(self._directory),
            mode="online" if os.environ.get("WANDB_MODE") == "online" else "offline",
            config={"job": run.job, "engine": run.engine, "world_size": run.world_size, "nodes": len(run.nodes)},
            settings=wandb.Settings(
                console="off",
                disable_code=True,
                disable_git=True,
                save_code=False,
                silent=True,
                x_disable_machine_info=True,
                x_disable_meta=True,
                x_disable_stats=True,
            ),
        )

    def steps(self, steps: Sequence[StepFigures]) -> None:
        """One row per step."""
        for step in steps:
            values = {f"multinode/{value.path}": value.value for value in step.values}
            self._run.log(values | {"_timestamp": step.time_s}, step=step.step)

    def end(self, ended: StoredRun) -> None:
        """The figures in the run's summary."""
        for value in summary_values(ended.summary) if ended.summary is not None else ():
            self._run.summary[f"multinode/summary/{value.path}"] = value.value
        self._run.summary["multinode/status"] = ended.run.status
        self._run.finish(exit_code=0 if ended.run.status == "succeeded" else 1)
