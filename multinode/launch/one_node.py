"""Trainings among the stored runs whose speed is known: the newest, and whether one ran on a single node."""

from __future__ import annotations

import contextlib
from pathlib import Path

from multinode.errors import MultinodeError
from multinode.model.workload import differing_setting
from multinode.records.invocation import Invocation
from multinode.records.run_directory import RunDirectory, list_runs
from multinode.runs.stored_run import StoredRun
from multinode.stats.estimate import value_of

# Newest runs among which one is looked for.
_MOST_RUNS = 200


def _is_measured(stored: StoredRun) -> bool:
    """Whether its speed and its training are known."""
    return bool(stored.plan and stored.summary and value_of(stored.summary.samples_per_s) and stored.workload)


def newest_training(root: Path) -> Invocation | None:
    """The command line of the newest launch below `root` that succeeded and whose speed is known, or None."""
    for path in reversed(list_runs(root)[-_MOST_RUNS:]):
        # A file that cannot be read is another command's matter.
        with contextlib.suppress(MultinodeError):
            stored = StoredRun(RunDirectory(path))
            if (stored.run.kind, stored.run.status) != ("launch", "succeeded") or stored.command is None:
                continue
            if _is_measured(stored):
                return stored.command
    return None


def lacks_one_node(directory: RunDirectory) -> bool:
    """Whether a run on several nodes has no stored counterpart on one node, which may fit there."""
    several = StoredRun(directory)
    if not _is_measured(several) or len(several.require_plan().nodes) == 1:
        return False
    if several.verdict is not None and several.verdict.memory == "too_small":
        return False
    paths = list_runs(directory.path.parent)[-_MOST_RUNS:]
    return not any(_could_be_single(StoredRun(RunDirectory(path)), several) for path in paths)


def _could_be_single(single: StoredRun, several: StoredRun) -> bool:
    """Whether it ran the training of a run on several nodes on one of them."""
    try:
        if not _is_measured(single) or single.workload is None or several.workload is None:
            return False
        places, names = single.require_plan().places, {place.node for place in several.require_plan().places}
    except MultinodeError:
        # A file that cannot be read is another command's matter.
        return False
    if len(places) > 1 or places[0].node not in names or single.levers.algorithm is not None:
        return False
    return not differing_setting(single.workload.settings, several.workload.settings)
