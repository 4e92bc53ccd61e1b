"""multinode from Python: each verb as one call, and what it is made of: functions of structs.

What goes wrong is raised as a MultinodeError, with the node, what was run and a hint. Names are stable: within a major
version functions and fields are added, and none is renamed or removed.

    from multinode import api

    launched = api.run_launch("hosts.txt", ["train.py", "--lr", "1e-4"], nodes=2)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from multinode.api.calls import read_nccl_test, run_check, run_contrast, run_launch, run_nccl_test, sweep, tune
    from multinode.api.launches import launch, load_job, plan, read_code
    from multinode.api.result import Result
    from multinode.api.stored import advise, document, load_run, predict, predict_from_benchmarks, report
    from multinode.api.verbs import check, contrast, copy, nccl_test
    from multinode.check.check import CheckOptions, CheckReport
    from multinode.check.rule import CheckFinding
    from multinode.cluster.cluster import Cluster, Node
    from multinode.contrast.figures import Contrast
    from multinode.contrast.measure import Contrasted, ContrastRequest, cut_job
    from multinode.copy.chain import CopyProgress
    from multinode.copy.paths import CopyReport, CopyRequest
    from multinode.errors import Interrupted, MultinodeError, NodeError, NodeFailed, RunFailed, UsageError
    from multinode.findings.finding import Finding
    from multinode.job.code_tree import CodeTree
    from multinode.job.engines.engine import Engine
    from multinode.job.job import Job, JobEnvironment, ScriptJob, TrainingJob
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
    from multinode.launch.restart import RestartOptions
    from multinode.levers.axes import LeverAxes
    from multinode.levers.levers import Levers
    from multinode.network.measure import Extent, scan_messages, scan_sizes
    from multinode.network.nccl_tuning import TuneReport
    from multinode.network.size_scan import ScanReport
    from multinode.predict.advice import Recommendations
    from multinode.predict.forecast import Forecast, ForecastRequest
    from multinode.profile.summary import Summary
    from multinode.records.benchmark import CollectiveTest, Message
    from multinode.records.plan import LaunchPlan, Observation, TraceWindow
    from multinode.records.run import Run
    from multinode.results.run_page import Report
    from multinode.runs.stored_run import StoredRun
    from multinode.sweep.figures import CellTable
    from multinode.traffic.step_calls import Strategy
    from multinode.tune.measure import Tuned

__all__ = [
    "CellTable",
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
    "LeverAxes",
    "Levers",
    "Message",
    "MultinodeError",
    "Node",
    "NodeError",
    "NodeFailed",
    "Nodes",
    "Observation",
    "Recommendations",
    "Report",
    "RestartOptions",
    "Result",
    "Run",
    "RunContext",
    "RunFailed",
    "ScanReport",
    "ScriptJob",
    "StoredRun",
    "Strategy",
    "Summary",
    "TraceWindow",
    "TrainingJob",
    "TuneReport",
    "Tuned",
    "UsageError",
    "advise",
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
    "read_nccl_test",
    "report",
    "run_check",
    "run_contrast",
    "run_launch",
    "run_nccl_test",
    "scan_messages",
    "scan_sizes",
    "sweep",
    "tune",
    "with_synthetic",
]

# Where the names are defined that are not defined here. Each is imported when it is used: a verb needs few of them.
_FROM = {
    "api.calls": ("read_nccl_test", "run_check", "run_contrast", "run_launch", "run_nccl_test", "sweep", "tune"),
    "api.result": ("Result",),
    "api.stored": ("advise", "document", "load_run", "predict", "predict_from_benchmarks", "report"),
    "api.launches": ("launch", "load_job", "plan", "read_code"),
    "api.verbs": ("check", "contrast", "copy", "nccl_test"),
    "traffic.step_calls": ("Strategy",),
    "contrast.figures": ("Contrast",),
    "network.size_scan": ("ScanReport",),
    "predict.forecast": ("Forecast", "ForecastRequest"),
    "predict.advice": ("Recommendations",),
    "sweep.figures": ("CellTable",),
    "tune.measure": ("Tuned",),
    "network.nccl_tuning": ("TuneReport",),
    "results.run_page": ("Report",),
    "profile.summary": ("Summary",),
    "check.rule": ("CheckFinding",),
    "findings.finding": ("Finding",),
    "cluster.cluster": ("Cluster", "Node"),
    "job.job": ("Job", "JobEnvironment", "TrainingJob", "ScriptJob"),
    "records.benchmark": ("CollectiveTest", "Message"),
    "job.code_tree": ("CodeTree",),
    "job.engines.engine": ("Engine",),
    "records.plan": ("LaunchPlan", "Observation", "TraceWindow"),
    "job.launch_options": ("LaunchOptions",),
    "levers.axes": ("LeverAxes",),
    "levers.levers": ("Levers",),
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
    "copy.chain": ("CopyProgress",),
    "copy.paths": ("CopyReport", "CopyRequest"),
    "runs.stored_run": ("StoredRun",),
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
