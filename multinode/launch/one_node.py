"""Trainings among the stored runs whose speed is known: the newest, and whether one ran on a single node."""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec

from multinode.errors import MultinodeError
from multinode.model.workload import Workload, differing_setting
from multinode.records.invocation import Invocation
from multinode.records.plan import LaunchPlan
from multinode.records.run import VERDICT_FILE, EarlyVerdict, Run
from multinode.records.run_directory import RunDirectory, list_runs

# Newest runs among which one is looked for.
_MOST_RUNS = 200


class _RunSpeed(msgspec.Struct, frozen=True):
    """The field read from a run's summary."""

    samples_per_s: float | None = None


class _MeasuredTraining(msgspec.Struct, frozen=True):
    plan: LaunchPlan
    workload: Workload


def _read_measured(directory: RunDirectory) -> _MeasuredTraining | None:
    """A run whose speed is known."""
    plan = directory.read("plan.json", LaunchPlan)
    speed = directory.read("summary.json", _RunSpeed) if plan is not None else None
    workload = directory.read("workload.json", Workload) if speed is not None and speed.samples_per_s else None
    return _MeasuredTraining(plan, workload) if plan is not None and workload is not None else None


def newest_training(root: Path) -> Invocation | None:
    """The command line of the newest launch below `root` that succeeded and whose speed is known, or None."""
    for path in reversed(list_runs(root)[-_MOST_RUNS:]):
        # A file that cannot be read is another command's matter.
        with contextlib.suppress(MultinodeError):
            directory = RunDirectory(path)
            run = directory.read("run.json", Run)
            if run is None or (run.kind, run.status) != ("launch", "succeeded") or run.command is None:
                continue
            if _read_measured(directory) is not None:
                return run.command
    return None


def lacks_one_node(directory: RunDirectory) -> bool:
    """Whether a run on several nodes has no stored counterpart on one node, which may fit there."""
    several = _read_measured(directory)
    if several is None or len(several.plan.nodes) == 1:
        return False
    verdict = directory.read(VERDICT_FILE, EarlyVerdict)
    if verdict is not None and verdict.memory == "too_small":
        return False
    paths = list_runs(directory.path.parent)[-_MOST_RUNS:]
    return not any(_could_be_single(RunDirectory(path), several) for path in paths)


def _could_be_single(directory: RunDirectory, several: _MeasuredTraining) -> bool:
    """Whether it ran the training of a run on several nodes on one of them."""
    try:
        single = _read_measured(directory)
    except MultinodeError:
        # A file that cannot be read is another command's matter.
        return False
    if single is None or len(single.plan.nodes) > 1 or single.plan.levers.algorithm is not None:
        return False
    names = {place.node for place in several.plan.places}
    return single.plan.nodes[0].place.node in names and not differing_setting(
        single.workload.settings, several.workload.settings
    )
