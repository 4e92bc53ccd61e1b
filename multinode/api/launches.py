"""A launch from structs: its job and its code, its plan, and its run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from multinode.job.code_tree import CodeTree
    from multinode.job.job import TrainingJob
    from multinode.launch.context import Launch, Launched, RunContext
    from multinode.launch.restart import RestartOptions
    from multinode.records.plan import LaunchPlan


def load_job(path: str | Path, overrides: Sequence[str] = (), deepspeed: Sequence[str] = ()) -> TrainingJob:
    """Load a LLaMA-Factory YAML file and the DeepSpeed JSON file that it names.

    For a script, use `ScriptJob(argv=("train.py",))` instead.

    Args:
        path: path of the YAML file.
        overrides: keys to override, such as `max_steps=50`.
        deepspeed: keys of the DeepSpeed JSON to override for this run only, such as `zero_optimization.stage=3`.

    Raises:
        UsageError: a file cannot be read or is invalid, or `deepspeed` is given but the job has no DeepSpeed JSON.
    """
    from multinode.job.deepspeed import parse_deepspeed_edits
    from multinode.job.job_files import load_job as load

    return load(Path(path), tuple(overrides), parse_deepspeed_edits(deepspeed))


def read_code(directory: str | Path) -> CodeTree:
    """Read the files of a directory, except those that git ignores. `Launch(code=...)` copies them to every node.

    The job then runs in the copy, as with `multinode launch --copy-code`.

    Raises:
        UsageError: there are no files or too many, the files are too large, or git failed.
    """
    from multinode.job.code_tree import read_code as read
    from multinode.records.run_directory import runs_root

    return read(Path(directory), Path.cwd(), without=[runs_root()])


def plan(launch: Launch, restarts: RestartOptions | None = None) -> LaunchPlan:
    """Plan the command of every node from the hostfile alone. Equivalent to `multinode launch --dry-run`.

    This function does not contact the nodes. Values that only a probe of the nodes can find are marked as assumed.

    Args:
        launch: the job, the nodes, and how to run it.
        restarts: same as in `launch`.

    Raises:
        UsageError: the launch is invalid. `connect` or `launch` would reject it before contacting a node.
    """
    from multinode.launch.offline import plan_offline

    return plan_offline(launch, restarts)


def launch(launch: Launch, context: RunContext, restarts: RestartOptions | None = None) -> Launched:
    """Run a job to completion on all nodes and summarize the measurements. Equivalent to `multinode launch`.

    A failed run does not raise an error. See `launched.run.status` and `launched.run.first_failure`. To stop the run on
    every node, call `context.stop.ask("why")` in another thread.

    Args:
        launch: the job, the nodes, and how to run it.
        context: the connections to the nodes.
        restarts: how to restart a failed run from its last checkpoint. If None, a failed run is not restarted.

    Raises:
        UsageError: the job cannot run on these nodes, or it cannot resume from a checkpoint.
        NodeError: a node could not be reached. Nothing was started.
        NodeFailed: a check found a problem that would break the run. Nothing was started.
    """
    if restarts is not None:
        from multinode.launch.restarts import launch_with_restarts

        return launch_with_restarts(launch, context, restarts)
    from multinode.launch.launch import launch as launch_once

    return launch_once(launch, context)
