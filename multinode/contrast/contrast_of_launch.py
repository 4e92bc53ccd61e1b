"""contrast_of_launch: a stored launch -> the contrast with one node that follows it. Reads disk; prints nothing."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

import msgspec

from multinode.cluster.quoting import hosts_option
from multinode.job.engine_commands import JOB_FILE
from multinode.job.job import override_text
from multinode.records.plan import LaunchPlan
from multinode.records.run_directory import RunDirectory
from multinode.secret_values import redact_words
from multinode.strict_yaml import YamlError, parse_yaml

# As `render_job` begins a YAML that it writes anew.
_CHANGED = re.compile(r"# .* with these keys changed by multinode: (.*)")


class _Node(msgspec.Struct, frozen=True):
    slots: int | None = None


class _Cluster(msgspec.Struct, frozen=True):
    """What is read of a run's nodes here."""

    nodes: tuple[_Node, ...] = ()


def contrast_of_launch(directory: RunDirectory) -> str:
    """The command that compares its nodes with one; empty where what is stored does not tell how it was launched.

    Variables that were given with --env, and edits of the DeepSpeed JSON, are not known of a stored launch.

    Raises:
        MultinodeError: a file of it cannot be read.
    """
    plan, cluster = directory.read("plan.json", LaunchPlan), directory.read("cluster.json", _Cluster)
    job = _job(plan) if plan is not None else None
    if plan is None or job is None:
        return ""
    slots = cluster.nodes[0].slots if cluster is not None and cluster.nodes else None
    is_asked = len(set(plan.workers)) == 1 and slots not in {None, plan.nproc_per_node}
    workers = ["--workers-per-node", str(plan.nproc_per_node)] if is_asked else []
    compress = ["--grad-compress", plan.grad_compress] if plan.grad_compress is not None else []
    averaging = plan.averaging.options if plan.averaging is not None else ()
    words = "".join(f" {shlex.quote(word)}" for word in redact_words([*workers, *compress, *averaging, *job]))
    return f"multinode contrast --nodes 1,{len(plan.nodes)}{hosts_option(directory.read_hosts())}{words}"


def _job(plan: LaunchPlan) -> list[str] | None:
    """The engine, what `--set` changed, and the job; None where the plan does not tell all of them."""
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
    try:
        return [*engine, *_settings(text, first.run_dir), plan.config_path]
    except YamlError:
        return None


def _settings(text: str, run_dir: str) -> Iterator[str]:
    """What `--set` changed: less the keys that name what lies in the run's own directory."""
    changed, config = _CHANGED.match(text), parse_yaml(text)
    for key in changed[1].split(", ") if changed is not None else ():
        value = config.get(key)
        if not str(value).startswith(run_dir):
            yield from ("--set", override_text(key, value))
