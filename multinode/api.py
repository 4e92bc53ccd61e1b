"""multinode from Python: what the verbs of the command do, as functions of structs; the command itself calls them.

Nothing is printed. What goes wrong is raised as a MultinodeError, with the node, what was run and a hint. What this
module names is stable: within a major version functions and fields are added, and none is renamed or removed.

    from multinode import api

    nodes = api.load_nodes("hosts.txt")
    with api.connect(nodes.cluster, say=print) as context:
        report = api.check(nodes.cluster, context)
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from multinode.check.check import CheckOptions, CheckReport
    from multinode.check.rule import CheckFinding
    from multinode.cluster.cluster import Cluster, Node
    from multinode.contrast.figures import Contrast
    from multinode.contrast.measure import Contrasted, ContrastRequest, cut_job
    from multinode.errors import Interrupted, MultinodeError, NodeError, NodeFailed, RunFailed, UsageError
    from multinode.job.code_tree import CodeTree
    from multinode.job.engines.engine import Engine
    from multinode.job.job import Job, JobEnvironment, LlamaFactoryJob, ScriptJob
    from multinode.job.launch_options import LaunchOptions
    from multinode.job.synthetic import with_synthetic
    from multinode.launch.context import (
        ExecuteOptions,
        Launch,
        Launched,
        Nodes,
        RunContext,
        connect,
        load_nodes,
        local_nodes,
        parse_nodes,
    )
    from multinode.launch.copy_chain import CopyProgress
    from multinode.launch.copy_paths import CopyReport, CopyRequest
    from multinode.launch.node_runs import StoredRun
    from multinode.launch.restart import RestartOptions
    from multinode.network.measure import Extent, scan_messages, scan_sizes
    from multinode.network.size_scan import ScanReport
    from multinode.predict.forecast import Forecast, ForecastRequest
    from multinode.profile.summary import Summary
    from multinode.records.benchmark import CollectiveTest, Message
    from multinode.records.finding import Finding
    from multinode.records.plan import LaunchPlan
    from multinode.records.run import Run
    from multinode.traffic.step_calls import Strategy

__all__ = [
    "CheckFinding",
    "CheckOptions",
    "CheckReport",
    "Cluster",
    "CodeTree",
    "CollectiveTest",
    "Contrast",
    "ContrastRequest",
    "Contrasted",
    "CopyProgress",
    "CopyReport",
    "CopyRequest",
    "Engine",
    "ExecuteOptions",
    "Extent",
    "Finding",
    "Forecast",
    "ForecastRequest",
    "Interrupted",
    "Job",
    "JobEnvironment",
    "Launch",
    "LaunchOptions",
    "LaunchPlan",
    "Launched",
    "LlamaFactoryJob",
    "Message",
    "MultinodeError",
    "Node",
    "NodeError",
    "NodeFailed",
    "Nodes",
    "RestartOptions",
    "Run",
    "RunContext",
    "RunFailed",
    "ScanReport",
    "ScriptJob",
    "StoredRun",
    "Strategy",
    "Summary",
    "UsageError",
    "check",
    "connect",
    "contrast",
    "copy",
    "cut_job",
    "document",
    "launch",
    "load_job",
    "load_nodes",
    "load_run",
    "local_nodes",
    "nccl_test",
    "parse_nodes",
    "plan",
    "predict",
    "predict_from_benchmarks",
    "read_code",
    "scan_messages",
    "scan_sizes",
    "with_synthetic",
]

# Where the names are defined that are not defined here. Each is imported when it is used: a verb needs few of them.
_FROM = {
    "traffic.step_calls": ("Strategy",),
    "contrast.figures": ("Contrast",),
    "network.size_scan": ("ScanReport",),
    "predict.forecast": ("Forecast", "ForecastRequest"),
    "profile.summary": ("Summary",),
    "check.rule": ("CheckFinding",),
    "records.finding": ("Finding",),
    "cluster.cluster": ("Cluster", "Node"),
    "job.job": ("Job", "JobEnvironment", "LlamaFactoryJob", "ScriptJob"),
    "records.benchmark": ("CollectiveTest", "Message"),
    "job.code_tree": ("CodeTree",),
    "job.engines.engine": ("Engine",),
    "records.plan": ("LaunchPlan",),
    "job.launch_options": ("LaunchOptions",),
    "launch.restart": ("RestartOptions",),
    "records.run": ("Run",),
    "job.synthetic": ("with_synthetic",),
    "errors": ("Interrupted", "MultinodeError", "NodeError", "NodeFailed", "RunFailed", "UsageError"),
    "check.check": ("CheckOptions", "CheckReport"),
    "contrast.measure": ("Contrasted", "ContrastRequest", "cut_job"),
    "network.measure": ("Extent", "scan_messages", "scan_sizes"),
    "launch.context": (
        *("ExecuteOptions", "Launch", "Launched", "Nodes", "RunContext"),
        *("connect", "load_nodes", "local_nodes", "parse_nodes"),
    ),
    "launch.copy_chain": ("CopyProgress",),
    "launch.copy_paths": ("CopyReport", "CopyRequest"),
    "launch.node_runs": ("StoredRun",),
}
_MODULES = {name: f"multinode.{module}" for module, names in _FROM.items() for name in names}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """A name of another module (PEP 562)."""
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(importlib.import_module(_MODULES[name]), name)
        return value

    def __dir__() -> list[str]:
        return __all__


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
    """The files of a directory that git does not ignore: `LaunchOptions(code=...)` copies them to every node.

    The job runs in the copy, as with `multinode launch --copy-code`.

    Raises:
        UsageError: there are none, or too many or too large; or git cannot be asked.
    """
    from multinode.job.code_tree import read_code as read
    from multinode.records.run_directory import runs_root

    return read(Path(directory), Path.cwd(), without=[runs_root()])


def check(
    cluster: Cluster, context: RunContext, job: Job | None = None, options: CheckOptions | None = None
) -> CheckReport:
    """Ask every node, connect all with each other, and say what would break a training, as `multinode check`.

    What a node does wrong is a finding, not an error; `report.ok` says whether any would break a training.

    Args:
        cluster: the nodes.
        context: the connections to them.
        job: what is to be trained; None checks what any training needs.
        options: how it is to be launched, and whether the nodes stream to each other.
    """
    from multinode.check.check import CheckOptions, check_cluster

    return check_cluster(context.agent, cluster, job, options or CheckOptions(), context.say)


def copy(
    cluster: Cluster,
    context: RunContext,
    request: CopyRequest,
    observe: Callable[[CopyProgress], None] = lambda _: None,
) -> CopyReport:
    """Make files and directories equal on all nodes, from the one that has them, as `multinode copy`.

    A node that fails is left out and the others get theirs; `report.ok` says whether all are equal.

    Args:
        cluster: the nodes.
        context: the connections to them.
        request: the paths, and who has them.
        observe: is shown the progress, a few times per second.

    Raises:
        UsageError: nobody has the paths, or nodes have different ones and none was named.
        NodeError, NodeFailed: the source failed, or a node has no room, and nothing was written.
        Interrupted: it was broken off; the same copy sends the rest.
    """
    from multinode.launch.copy_paths import copy_paths

    return copy_paths(context, cluster, request, observe)


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


def nccl_test(launch: Launch, context: RunContext, extent: Extent | None = None) -> ScanReport:
    """Measure collectives over the nodes with their own torch, and judge the network, as `multinode nccl-test`.

    Args:
        launch: its job is a CollectiveTest; `LaunchOptions(workers_per_node=1)` measures the network between the nodes.
        context: the connections to the nodes.
        extent: what is measured beside the collectives; None is raw TCP between neighbours.

    Raises:
        RunFailed: it did not end well.
        Interrupted: it was stopped.
        UsageError, NodeError, NodeFailed: as `launch`.
    """
    from multinode.network.measure import Extent
    from multinode.network.measure import nccl_test as measure

    return measure(_of_kind(launch, "nccl-test"), extent or Extent(), context)


def contrast(
    launch: Launch,
    context: RunContext,
    request: ContrastRequest | None = None,
    *,
    repeats: int = 1,
    fresh: bool = False,
) -> Contrasted:
    """Run a job on one node and on many, and say which is faster, by how much and why, as `multinode contrast`.

    Every side trains as many steps as the job has: `cut_job` leaves those that a comparison needs.

    Args:
        launch: the job and all nodes.
        context: the connections to the nodes.
        request: which sides; None is one node against all, with what node 0's slots allow.
        repeats: how often each side is measured, in turns.
        fresh: measures everything again; otherwise an interrupted contrast of the same request goes on.

    Raises:
        UsageError: the hostfile or the mode does not allow it.
        RunFailed: a run did not end well.
        Interrupted: it was stopped.
        NodeError, NodeFailed: as `launch`.
    """
    from multinode.contrast.measure import ContrastRequest
    from multinode.contrast.measure import contrast as measure
    from multinode.launch.series import Resume

    return measure(launch, context, request or ContrastRequest(), repeats=repeats, resume=Resume(anew=fresh))


def predict(names: Sequence[str], request: ForecastRequest | None = None, *, runs: Path | None = None) -> Forecast:
    """Predict other networks, nodes and settings from stored runs, as `multinode predict`.

    Args:
        names: of runs of one training, and of an nccl-test: ids, their beginnings, or `last`; a contrast has its own.
        request: what is predicted; None is the usual links for what was measured.
        runs: the directory of all runs; None is $MULTINODE_RUNS, else `runs` in the working directory.

    Raises:
        UsageError: there is no such run, they say too little, or what is asked for cannot be.
    """
    from multinode.predict.request import forecast_runs
    from multinode.records.run_directory import runs_root

    return forecast_runs(runs or runs_root(), names, request)


def predict_from_benchmarks(path: str | Path, request: ForecastRequest | None = None) -> Forecast:
    """Likewise from a file of published figures, as `multinode predict --benchmarks`.

    Raises:
        UsageError: the file is not what it should be, or what is asked for cannot be.
    """
    from multinode.predict.request import forecast_benchmarks

    return forecast_benchmarks(Path(path), request)


def load_run(name: str = "last", *, runs: Path | None = None) -> StoredRun:
    """A run read back, as `multinode show`: its record, its figures, and the directory that has all the rest.

    Args:
        name: its id, the beginning of it, or `last`.
        runs: the directory of all runs; None is $MULTINODE_RUNS, else `runs` in the working directory.

    Raises:
        UsageError: there is no such run.
    """
    from multinode.launch.node_runs import load_run as load
    from multinode.records.run_directory import runs_root

    return load(runs or runs_root(), name)


def document(result: object) -> Any:
    """A result as the command prints it with `--json`: dicts, lists, text and numbers, without secrets."""
    import msgspec

    from multinode.decoding import decode_json
    from multinode.secret_values import redact

    result_document = getattr(result, "document", None)
    return redact(decode_json(msgspec.json.encode(result if result_document is None else result_document()), object))


def _of_kind(launch: Launch, kind: str) -> Launch:
    import msgspec

    return msgspec.structs.replace(launch, execute=msgspec.structs.replace(launch.execute, kind=kind))
