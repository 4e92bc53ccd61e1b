"""A launch from structs: its job and its code, its plan, and its run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from multinode.job.code_tree import CodeTree
    from multinode.job.job import LlamaFactoryJob
    from multinode.launch.context import Launch, Launched, RunContext
    from multinode.launch.restart import RestartOptions
    from multinode.records.plan import LaunchPlan


def load_job(path: str | Path, overrides: Sequence[str] = (), deepspeed: Sequence[str] = ()) -> LlamaFactoryJob:
    """A LLaMA-Factory YAML, and the DeepSpeed JSON that it names. A script is `ScriptJob(argv=("train.py", "--lr=1"))`.

    Args:
        path: the YAML.
        overrides: keys of it that are replaced: `max_steps=50`.
        deepspeed: keys of the DeepSpeed JSON that are replaced for this run alone: `zero_optimization.stage=3`.

    Raises:
        UsageError: a file cannot be read or is wrong, or there is no JSON to edit.
    """
    from multinode.job.deepspeed import parse_deepspeed_edits
    from multinode.job.job_files import load_job as load

    return load(Path(path), tuple(overrides), parse_deepspeed_edits(deepspeed))


def read_code(directory: str | Path) -> CodeTree:
    """The files of a directory that git does not ignore: `Launch(code=...)` copies them to every node.

    The job runs in the copy, as with `multinode launch --copy-code`.

    Raises:
        UsageError: there are none, or too many or too large; or git cannot be asked.
    """
    from multinode.job.code_tree import read_code as read
    from multinode.records.run_directory import runs_root

    return read(Path(directory), Path.cwd(), without=[runs_root()])


def plan(launch: Launch, restarts: RestartOptions | None = None) -> LaunchPlan:
    """The command and place of every node as far as the hostfile gives them, as `multinode launch --dry-run`.

    No node is asked: what a probe would have said is marked as assumed.

    Args:
        launch: the job, the nodes, and how it is run.
        restarts: as for `launch`.

    Raises:
        UsageError: what `connect` and `launch` refuse before they ask a node.
    """
    from multinode.launch.offline import plan_offline

    return plan_offline(launch, restarts)


def launch(launch: Launch, context: RunContext, restarts: RestartOptions | None = None) -> Launched:
    """Run a job on all nodes to its end, and sum up what was measured, as `multinode launch`.

    A run that fails is a result: `launched.run.status`, `launched.run.first_failure`. Another thread stops the run on
    every node with `context.stop.ask("why")`.

    Args:
        launch: the job, the nodes, and how it is run.
        context: the connections to the nodes.
        restarts: whether and how often a run that fails starts again from its last checkpoint; None is never.

    Raises:
        UsageError: the job cannot be laid out over these nodes, or cannot go on from a checkpoint.
        NodeError: a node could not be reached.
        NodeFailed: a check found what would break the run. Nothing was started, as with the other two.
    """
    if restarts is not None:
        from multinode.launch.restarts import launch_with_restarts

        return launch_with_restarts(launch, context, restarts)
    from multinode.launch.launch import launch as launch_once

    return launch_once(launch, context)
