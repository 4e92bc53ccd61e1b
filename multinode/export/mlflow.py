"""MLflow: a run with its metrics, in the file store or on a tracking server, through MLflow's client."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from multinode.export.exporter import Exporter
from multinode.export.figures import StepFigures, Value, summary_values
from multinode.records.run import Run
from multinode.runs.stored_run import StoredRun

_EXPERIMENT = "multinode"
# Limit of the server per request.
_MOST_METRICS = 1000
_DEFAULTS = {
    # MLflow 3.13 and newer write a directory only on request, as here.
    "MLFLOW_ALLOW_FILE_STORE": "true",
    # Give up on an unresponsive server after a minute.
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
}
_STATUS = {"succeeded": "FINISHED", "stopped": "KILLED"}


class MlflowRun(Exporter):
    """One run of the experiment `multinode`, or of $MLFLOW_EXPERIMENT_NAME.

    Args:
        uri: a directory, or a tracking URI: `http://...`, `sqlite:///FILE`.
    """

    def __init__(self, uri: str) -> None:
        self._uri = uri if "://" in uri else Path(uri).absolute().as_uri()
        self._client: Any = None
        self._run_id = ""
        self._last = 0

    def begin(self, run: Run) -> None:
        """Create the run, and the experiment if missing."""
        for name, value in _DEFAULTS.items():
            os.environ.setdefault(name, value)
        from mlflow import MlflowClient  # noqa: PLC0415 - an extra

        self._client = MlflowClient(self._uri)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", _EXPERIMENT)
        existing = self._client.get_experiment_by_name(name)
        experiment = existing.experiment_id if existing is not None else self._client.create_experiment(name)
        made = self._client.create_run(experiment, start_time=int(run.started_s * 1000), run_name=run.run_id)
        self._run_id = made.info.run_id
        about = {
            "job": run.job,
            "engine": run.engine,
            "world_size": run.world_size,
            "nodes": len(run.nodes),
        }
        for key, text in about.items():
            self._client.log_param(self._run_id, key, text)
        self._client.set_tag(self._run_id, "multinode.run_id", run.run_id)

    def steps(self, steps: Sequence[StepFigures]) -> None:
        """One metric per figure."""
        if not steps:
            return
        self._log(
            [(step.time_s, step.step, f"multinode/{value.path}", value) for step in steps for value in step.values]
        )
        self._last = steps[-1].step

    def end(self, ended: StoredRun) -> None:
        """The summary at the last step, and how the run ended, unless it was left running."""
        time_s = ended.run.ended_s or time.time()
        values = summary_values(ended.summary) if ended.summary is not None else []
        self._log([(time_s, self._last, f"multinode/summary/{value.path}", value) for value in values])
        if ended.run.status != "running":
            status = _STATUS.get(ended.run.status, "FAILED")
            self._client.set_terminated(self._run_id, status, end_time=int(time_s * 1000))

    def _log(self, values: Iterable[tuple[float, int, str, Value]]) -> None:
        from mlflow.entities import Metric  # noqa: PLC0415 - an extra

        metrics = [Metric(key, value.value, int(time_s * 1000), step) for time_s, step, key, value in values]
        for first in range(0, len(metrics), _MOST_METRICS):
            self._client.log_batch(self._run_id, metrics=metrics[first : first + _MOST_METRICS])
