"""Forecast from stored runs or published figures. Reads disk; prints nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from multinode.errors import MultinodeError, UsageError
from multinode.job.job import TrainingJob
from multinode.predict.evidence import Evidence, gather
from multinode.predict.forecast import Forecast, ForecastRequest, make_forecast, refuse_unusable
from multinode.predict.published_benchmarks import PublishedBenchmarks, evidence_of_benchmarks
from multinode.predict.run_selection import Record
from multinode.records.files import load_yaml
from multinode.records.invocation import Invocation
from multinode.records.run_directory import RunDirectory, list_runs
from multinode.runs.stored_run import StoredRun

_BENCHMARKS_HINT = "start from configs/figures/two_boxes_lora.yaml, which multinode init --example writes"

# Number of newest stored runs to read in addition to the named ones.
_MOST_OTHERS = 200


class _Side(msgspec.Struct, frozen=True):
    """The fields read from a contrast's side."""

    run_ids: tuple[str, ...] = ()


class _Contrast(msgspec.Struct, frozen=True):
    """The fields read from a contrast."""

    baseline: _Side = _Side()
    candidate: _Side = _Side()


class _Tuning(msgspec.Struct, frozen=True):
    """The fields read from a tuning."""

    sources: tuple[str, ...] = ()
    rows: tuple[_Side, ...] = ()


def forecast_runs(root: Path, names: Sequence[str], request: ForecastRequest | None = None) -> Forecast:
    """Predict from stored runs.

    Args:
        root: directory of all runs.
        names: of runs, as for `evidence_of`.
        request: what to predict; None means the common links for the measured training.
    """
    request = request or ForecastRequest()
    refuse_unusable(request)
    evidence = evidence_of(root, names, request.link_measured, request.stream)
    command = command_of(root, names, evidence.subject.job)
    return msgspec.structs.replace(make_forecast(evidence, request), command=command)


def forecast_benchmarks(path: Path, request: ForecastRequest | None = None) -> Forecast:
    """Predict from a file of published figures.

    Raises:
        UsageError: the file is invalid, or a requested value is impossible.
    """
    benchmarks = load_published_benchmarks(path)
    try:
        request = request or ForecastRequest()
        refuse_unusable(request)
        return make_forecast(evidence_of_benchmarks(benchmarks, request.stream), request)
    except UsageError as error:
        raise UsageError(f"{path}: {error.message}", hint=error.hint) from None


def evidence_of(
    root: Path, names: Sequence[str], link_measured: float | None = None, stream: float | None = None
) -> Evidence:
    """The evidence of stored runs.

    Args:
        root: directory of all runs.
        names: ids, their beginnings, or `last`; a contrast stands for its runs.
        link_measured: link rate in Gbit/s, if their NICs did not report it.
        stream: measured TCP rate in Gbit/s.

    Raises:
        UsageError: a run does not exist, or the runs are not enough.
        MultinodeError: a file of a named one cannot be read.
    """
    named = dict.fromkeys(run.path for name in names for run in runs_of(RunDirectory.open(root, name)))
    stored = list_runs(root)
    order = {path: place for place, path in enumerate(stored)}
    records = [read_record(RunDirectory(path)) for path in sorted(named, key=lambda path: order.get(path, -1))]
    trainings = [record for record in records if record is not None]
    if not trainings:
        raise UsageError(
            f"nothing can be predicted from {', '.join(names) or 'no run'}: no training run or nccl-test is stored "
            "there",
            hint="list them: multinode runs",
        )
    others = [path for path in stored[-_MOST_OTHERS:] if path not in named]
    return gather(trainings, list(_read_others(others)), link_measured, stream)


def command_of(root: Path, names: Sequence[str], job: TrainingJob | None) -> Invocation | None:
    """The command line that started one of these runs, else the launch of their `job`; None if neither is known."""
    opened = [RunDirectory.open(root, name) for name in names]
    stored = (run.command for run in (directory.read_run() for directory in opened) if run is not None)
    if (typed := next(filter(None, stored), None)) is not None or job is None:
        return typed
    # A YAML is kept with its runs, whoever started them.
    named = {run.path for directory in opened for run in runs_of(directory)}
    newest = next((path for path in reversed(list_runs(root)) if path in named), None)
    hosts = RunDirectory(newest).read_hosts() if newest is not None else ""
    return Invocation(verb="launch", options=(("--hosts", hosts),) if hosts else (), job=(job.config_path,))


def runs_of(directory: RunDirectory) -> list[RunDirectory]:
    """The runs of a contrast, in order; those that a tuning predicts from; any other run itself.

    Raises:
        UsageError: none of them is stored.
        MultinodeError: the contrast or tuning cannot be read.
    """
    contrast = directory.read("contrast.json", _Contrast)
    tuning = directory.read("tuning.json", _Tuning) if contrast is None else None
    if contrast is not None:
        noun, names = "contrast", [name for side in (contrast.baseline, contrast.candidate) for name in side.run_ids]
    elif tuning is not None:
        # The unchanged job, and one node alone.
        noun, names = "tuning", [*(tuning.sources or (name for row in tuning.rows[:2] for name in row.run_ids[:1]))]
    else:
        return [directory]
    # A name from a file must not be a path.
    paths = [directory.path.parent / name for name in names if name and name == Path(name).name]
    directories = [RunDirectory(path) for path in paths if (path / "run.json").is_file()]
    if not directories:
        raise UsageError(f"the runs of {noun} {directory.run_id} are not stored", hint="list them: multinode runs")
    return directories


def read_record(directory: RunDirectory) -> Record | None:
    """A run for predictions; None if it launched nothing.

    Raises:
        MultinodeError: a part of it cannot be read.
    """
    if StoredRun(directory).plan is None:
        return None
    record = Record(directory)
    _ = record.plan, record.summary, record.workload, record.model, record.sweep
    return record


def _read_others(paths: Sequence[Path]) -> Iterator[Record]:
    for path in paths:
        try:
            record = read_record(RunDirectory(path))
        except MultinodeError:
            # Predictions that do not need it should not fail.
            continue
        if record is not None:
            yield record


def load_published_benchmarks(path: Path) -> PublishedBenchmarks:
    """The figures of a file."""
    return load_yaml(path, "the figures file", PublishedBenchmarks, _BENCHMARKS_HINT)
