"""The training of a run on one node: whether it was measured, and the command that measures it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import Any

import msgspec

from multinode.cluster.quoting import hosts_option
from multinode.errors import MultinodeError
from multinode.job.engine_commands import JOB_FILE
from multinode.job.job import override_text
from multinode.job.workload import Workload, differing_setting
from multinode.records.plan import LaunchPlan
from multinode.records.run import VERDICT_FILE, EarlyVerdict
from multinode.records.run_directory import RunDirectory, list_runs
from multinode.secret_values import redact_words

# Newest runs among which one on a single node is looked for.
_MOST_OTHERS = 200


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


def lacks_one_node(directory: RunDirectory) -> bool:
    """Whether a run on several nodes has no stored counterpart on one node, which may fit there."""
    several = _read_measured(directory)
    if several is None or len(several.plan.nodes) == 1:
        return False
    verdict = directory.read(VERDICT_FILE, EarlyVerdict)
    if verdict is not None and verdict.memory == "too_small":
        return False
    paths = list_runs(directory.path.parent)[-_MOST_OTHERS:]
    return not any(_could_be_single(RunDirectory(path), several) for path in paths)


def _could_be_single(directory: RunDirectory, several: _MeasuredTraining) -> bool:
    """Whether it ran the training of a run on several nodes on one of them."""
    try:
        single = _read_measured(directory)
    except MultinodeError:
        # A file that cannot be read is another command's matter.
        return False
    if single is None or len(single.plan.nodes) > 1 or single.plan.changed_algorithm is not None:
        return False
    names = {node.node for node in several.plan.nodes}
    return single.plan.nodes[0].node in names and not differing_setting(
        single.workload.settings, several.workload.settings
    )


# The first line of a YAML by `render_job`.
_CHANGED = re.compile(r"# .* with these keys changed by multinode: (.*)")


class _NodeSlots(msgspec.Struct, frozen=True):
    slots: int | None = None


class _ClusterSlots(msgspec.Struct, frozen=True):
    """The fields read from a run's nodes."""

    nodes: tuple[_NodeSlots, ...] = ()


def contrast_of_launch(directory: RunDirectory) -> str:
    """The command that compares its nodes with one; empty if the launch cannot be reproduced.

    Variables of --env, and edits of the DeepSpeed JSON, are not stored with a launch.
    """
    plan, cluster = directory.read("plan.json", LaunchPlan), directory.read("cluster.json", _ClusterSlots)
    job = _launched_job(plan) if plan is not None else None
    if plan is None or job is None:
        return ""
    slots = cluster.nodes[0].slots if cluster is not None and cluster.nodes else None
    is_asked = len(set(plan.workers)) == 1 and slots not in {None, plan.nproc_per_node}
    workers = ["--workers-per-node", str(plan.nproc_per_node)] if is_asked else []
    compress = ["--grad-compress", plan.grad_compress] if plan.grad_compress is not None else []
    averaging = plan.averaging.options if plan.averaging is not None else ()
    code = ["--copy-code", plan.code.source] if plan.code is not None else []
    words = "".join(f" {shlex.quote(word)}" for word in redact_words([*workers, *compress, *averaging, *code, *job]))
    return f"multinode contrast --nodes 1,{len(plan.nodes)}{hosts_option(directory.read_hosts())}{words}"


def _launched_job(plan: LaunchPlan) -> list[str] | None:
    """The engine, the changes of `--set`, and the job; None if the plan lacks one."""
    first = plan.nodes[0]
    synthetic = plan.job.endswith(", synthetic data)")
    if plan.engine == "accelerate" or first.command.prelude is not None or synthetic:
        return None
    usual = "llamafactory" if plan.config_path else "torchrun"
    engine = ["--engine", plan.engine] if plan.engine != usual else []
    if not plan.config_path:
        argv = first.command.argv
        return [*engine, "--", *argv[argv.index(plan.job) :]] if plan.job in argv else None
    text = next((file.text for file in first.files if file.path == JOB_FILE), "")
    # Of paths that are no part of the copied code, the plan has the whole one.
    own = f"{(first.output_cwd or '~').rstrip('/')}/" if plan.code is not None else ""
    from multinode.strict_yaml import YamlError, parse_yaml

    try:
        return [*engine, *_settings(text, parse_yaml(text), first.run_dir, own), plan.config_path]
    except YamlError:
        return None


def _settings(text: str, config: dict[str, Any], run_dir: str, own: str) -> Iterator[str]:
    """What `--set` changed: less the keys that name what lies in the run's own directory, and less the node's `own`."""
    changed = _CHANGED.match(text)
    for key in changed[1].split(", ") if changed is not None else ():
        value = config.get(key)
        if not str(value).startswith(run_dir):
            yield from (
                "--set",
                override_text(key, value.replace(own, "") if isinstance(value, str) and own else value),
            )
