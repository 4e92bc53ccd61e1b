"""Tunings on the controller's disk: candidates from stored runs, and their results. Reads disk."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from multinode.errors import MultinodeError
from multinode.experiment.grid import CellRecord
from multinode.experiment.shortlist import Candidate, LeftOut, candidate_of, make_shortlist
from multinode.experiment.trial import Trial, TrialRun, read_losses
from multinode.job.job import DEFAULT_SEED, Job
from multinode.job.workload import Settings, global_batch, read_settings
from multinode.launch.runs import observe_run
from multinode.predict.advice import rank_options
from multinode.predict.advise import training_today
from multinode.predict.request import read_record
from multinode.predict.run_selection import Record
from multinode.records.run import Run
from multinode.records.run_directory import RunDirectory, list_runs
from multinode.traffic.algorithms import Layout

_UNFIT = re.compile(r"[^a-z0-9]+")
_LONGEST_LABEL = 40


def list_candidates(
    root: Path, names: Sequence[str], *, steps: int, most: int
) -> tuple[tuple[Candidate, ...], tuple[LeftOut, ...]]:
    """Predicted candidates, best first, and the changes left out.

    Args:
        root: directory of all runs.
        names: of the unchanged training, and of one node if it could be measured.
        steps: of a run of the unchanged training.
        most: maximum number of candidates.
    """
    found = make_shortlist(rank_options(training_today(root, names)), steps=steps, most=most)
    labels = _labels([one.advice.name for one in found.chosen])
    chosen = tuple(map(candidate_of, found.chosen, labels))
    return chosen, found.left_out


def trial_of(root: Path, candidate: Candidate, cell: CellRecord | None) -> Trial:
    """A candidate with its measured runs; without a cell it was not started."""
    if cell is None:
        return Trial(candidate=candidate, state="waiting")
    runs = (_trial_run(RunDirectory(root / run_id)) for run_id in cell.run_ids)
    return Trial(
        candidate=candidate,
        state=cell.state,
        reason=cell.reason,
        runs=tuple(run for run in runs if run is not None),
    )


def find_runs_alike(root: Path, job: Job, layout: Layout) -> dict[int, Record]:
    """The newest stored runs of this very training, by their number of nodes: one, and all of these."""
    found: dict[int, Record] = {}
    settings = read_settings(job)
    for path in reversed(list_runs(root)):
        try:
            record = read_record(RunDirectory(path))
        except MultinodeError:
            # From another release; use another run.
            continue
        if record is None or not record.is_training or not _is_alike(record.settings, settings):
            continue
        if record.layout in {layout, layout.on(1)}:
            found.setdefault(record.layout.nodes, record)
    return found


def run_s(root: Path, run_id: str) -> float | None:
    """Wall time of a stored run; None if unknown."""
    run = RunDirectory(root / run_id).read("run.json", Run)
    return run.ended_s - run.started_s if run is not None and run.ended_s is not None else None


def _is_alike(ours: Settings, theirs: Settings) -> bool:
    pairs = ((getattr(ours, name), getattr(theirs, name)) for name in Settings.__struct_fields__)
    return all(one == other or None in {one, other} for one, other in pairs)


def _trial_run(directory: RunDirectory) -> TrialRun | None:
    record = read_record(directory)
    if record is None or record.job is None or not record.samples_per_s:
        return None
    config = record.job.config
    batch, seed, rate = (
        global_batch(record.settings, record.layout.workers),
        config.get("seed"),
        config.get("learning_rate"),
    )
    if batch is None:
        return None
    return TrialRun(
        run_id=directory.run_id,
        seed=seed if type(seed) is int else DEFAULT_SEED,
        learning_rate=rate if type(rate) is float else None,
        samples_per_s=record.samples_per_s,
        losses=read_losses(observe_run(directory, record.plan), batch),
    )


def _labels(names: Sequence[str]) -> Iterator[str]:
    taken: set[str] = set()
    for name in names:
        label = _UNFIT.sub("-", name.lower()).strip("-")[:_LONGEST_LABEL].strip("-")
        label = label if label not in taken else f"{label}-{len(taken)}"
        taken.add(label)
        yield label
