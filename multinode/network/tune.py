"""Try NCCL settings on the nodes in interleaved repeats, and measure the best combination again.

NCCL reads its variables at process start, so each measurement is its own run. Prints nothing.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence

import msgspec

from multinode.cluster.facts import common_backend
from multinode.errors import Interrupted, MultinodeError, NodeError, NodeFailed, RunFailed, UsageError
from multinode.launch.context import Launch, RunContext
from multinode.launch.launch import create_parent, probe_nodes
from multinode.launch.node_runs import cleanup_nodes
from multinode.network.measure import Extent, run_scan
from multinode.network.nccl_tuning import (
    TunedSetting,
    TuneReport,
    candidates,
    choose,
    measured_us,
    tuned,
    with_mtu,
)
from multinode.network.nic_path import NcclPath
from multinode.network.size_scan import ScanReport
from multinode.records.benchmark import CollectiveTest, describe_benchmark
from multinode.records.run import NodeRun, Run
from multinode.records.run_directory import RunDirectory
from multinode.stats.estimate import of_repeats
from multinode.units import format_duration

_FILE = "tune.json"
_KIND = "tune"
# Minimum rounds of the winner.
_LEAST_AGAIN = 5
# Deadline, so that a setting that hangs does not block the others.
_HANG_S = 120.0

Measure = Callable[[Launch, Extent, RunContext], ScanReport]


def measure_once(what: Launch, extent: Extent, context: RunContext) -> ScanReport:
    """One run of the scan, removed from the nodes afterwards."""
    report, launched = run_scan(what, extent, context)
    cleanup_nodes(launched, what.cluster, context)
    return report


def nccl_tune(
    what: Launch, extent: Extent, repeats: int, context: RunContext, measure: Measure = measure_once
) -> TuneReport:
    """Try each setting, interleaved with the default, then the best of each axis together.

    Args:
        what: its job is a CollectiveTest; variables that its nodes already set stay.
        extent: whose messages; without pairs, raw TCP and a comparison.
        repeats: rounds, at least two.
        context: the network and the like.
        measure: makes one run.

    Raises:
        UsageError: it is another job, or a node cannot run it.
        RunFailed: the default could not be measured.
        NodeError: a node is unreachable.
        Interrupted: the user stopped it; results are kept.
    """
    test = what.job
    if not isinstance(test, CollectiveTest):
        raise UsageError("only collectives can be tuned; this is another job")
    names = tuple(node.name for node in what.cluster.nodes)
    facts = {} if test.backend == "gloo" else probe_nodes(what, context.agent)
    backend = test.backend or common_backend(facts.values())
    if backend != "nccl":
        return TuneReport(run_id="", backend=backend, nodes=names, test=test)
    directory = create_parent(context.runs, what)
    stall_s = min(what.execute.stall_s or _HANG_S, _HANG_S)
    what = msgspec.structs.replace(
        what,
        run_id=directory.run_id,
        job=msgspec.structs.replace(test, backend="nccl"),
        execute=msgspec.structs.replace(what.execute, kind=_KIND, stall_s=stall_s, on_stall="stop"),
    )
    versions = sorted(found.nccl_version for found in facts.values() if found.nccl_version is not None)
    report = TuneReport(
        run_id=directory.run_id,
        backend="nccl",
        nodes=names,
        nccl_version=versions[0] if versions else None,
        repeats=repeats,
        test=test,
        directory=str(directory),
    )
    with directory.lock():
        return _Series(
            what, msgspec.structs.replace(extent, tcp=False, pairs=False, compare=None), context, measure
        ).run(report, directory)


class _Series:
    """The runs in sequence."""

    def __init__(self, what: Launch, extent: Extent, context: RunContext, measure: Measure) -> None:
        self._what = what
        self._extent = extent
        self._context = context
        self._measure = measure
        self._started_s = time.time()
        self._number = 0
        self._took_s: list[float] = []
        # Reasons of failed settings, which are not tried again.
        self._failed: dict[str, str] = {}
        # By round, for the default and each setting tried with it.
        self._tried: list[tuple[TunedSetting, list[float]]] = []

    def run(self, report: TuneReport, directory: RunDirectory) -> TuneReport:
        """All runs; see `nccl_tune`."""
        self._keep(directory, report, "running")
        try:
            first = self._scan({}, "the default, once before all others", 0)
            nccl = first.nccl or NcclPath()
            report = msgspec.structs.replace(
                with_mtu(report, first), world_size=first.world_size, nccl_version=report.nccl_version or nccl.version
            )
            self._try(candidates(report.nccl_version, over_sockets=nccl.network in {None, "Socket"}), report.repeats)
            report = self._so_far(report)
            self._keep(directory, report, "running")
            env = choose(report.settings)
            if env:
                self._try([TunedSetting(axis="together", env=env)], max(report.repeats, _LEAST_AGAIN))
                report = msgspec.structs.replace(report, together=self._so_far(report).settings[0])
        except BaseException as error:
            report = report if report.settings else self._so_far(report)
            # With a full disk nothing can be stored, but the reason is still reported.
            with contextlib.suppress(MultinodeError):
                self._keep(directory, report, "stopped" if isinstance(error, Interrupted) else "failed")
            raise
        self._keep(directory, report, "succeeded")
        return report

    def _try(self, settings: Sequence[TunedSetting], repeats: int) -> None:
        self._tried = [(one, []) for one in (TunedSetting(axis="default", env={}), *settings)]
        left = repeats * len(self._tried)
        for turn in range(repeats):
            for setting, times_us in self._tried if turn % 2 == 0 else reversed(self._tried):
                if setting.text not in self._failed:
                    times_us.extend(self._time(setting, left))
                left -= 1

    def _so_far(self, report: TuneReport) -> TuneReport:
        if not self._tried:
            return report
        (_, default_us), *settings = self._tried
        judged = []
        for setting, own_us in settings:
            turns = min(len(default_us), len(own_us))
            reason = self._failed.get(setting.text, "" if turns > 1 else "it was not measured in two rounds")
            judged.append(
                msgspec.structs.replace(setting, reason=reason)
                if reason
                else tuned(setting, default_us[:turns], own_us[:turns])
            )
        default = of_repeats(default_us) if len(default_us) > 1 else None
        return msgspec.structs.replace(report, default_us=default, settings=tuple(judged))

    def _time(self, setting: TunedSetting, left: int) -> list[float]:
        try:
            return [measured_us(self._scan(setting.env, setting.text or "the default", left))]
        except NodeError:
            raise
        except (RunFailed, NodeFailed, ValueError) as error:
            if not setting.env and not isinstance(error, ValueError):
                raise
            if not setting.env:
                raise RunFailed(f"without any setting: {error}", hint="run multinode nccl-test for details") from error
            self._failed[setting.text] = str(error).splitlines()[0]
            self._context.say(f"{setting.text}: {self._failed[setting.text]}")
            return []

    def _scan(self, env: dict[str, str], title: str, left: int) -> ScanReport:
        if self._context.stop.count:
            raise Interrupted("interrupted", hint=f"results so far: multinode show {self._what.run_id}")
        about = f", about {format_duration(left * sum(self._took_s) / len(self._took_s))} left" if self._took_s else ""
        self._context.say(f"{title}{about}")
        self._number += 1
        options, run_id = self._what.options, f"{self._what.run_id}-{self._number}"
        environment = msgspec.structs.replace(options.environment, env=options.environment.env | env)
        what = msgspec.structs.replace(
            self._what,
            run_id=run_id,
            options=msgspec.structs.replace(options, environment=environment),
            # The first run showed that the nodes reach each other.
            check=self._what.check and self._number == 1,
        )
        began = time.monotonic()
        report = self._measure(what, self._extent, self._context)
        self._took_s.append(time.monotonic() - began)
        return report

    def _keep(self, directory: RunDirectory, report: TuneReport, status: str) -> None:
        run = Run(
            run_id=report.run_id,
            job=f"{describe_benchmark(report.test)} --tune",
            engine="torchrun",
            status=status,
            started_s=self._started_s,
            ended_s=None if status == "running" else time.time(),
            world_size=report.world_size,
            nodes=tuple(NodeRun(name=name, node_rank=rank) for rank, name in enumerate(report.nodes)),
            kind=_KIND,
        )
        directory.write(_FILE, report)
        directory.write("run.json", run)
