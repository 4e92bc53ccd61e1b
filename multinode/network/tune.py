"""Try NCCL settings on the nodes in interleaved repeats, and measure the best combination again.

NCCL reads its variables at process start, so each measurement is its own run. Prints nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable

import msgspec

from multinode.cluster.facts import common_backend
from multinode.errors import MultinodeError, NodeError, NodeFailed, RunFailed, UsageError
from multinode.findings.finding import message_of
from multinode.launch.context import Launch, RunContext
from multinode.launch.launch import probe_nodes
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
from multinode.records.run_directory import RunDirectory
from multinode.series.grid import (
    REFUSED,
    CellOutcome,
    CellRecord,
    Grid,
    GridCell,
    GridRecord,
    Turn,
    fingerprint,
    in_turns,
)
from multinode.series.series import Resume, Series, status_of, take_up
from multinode.stats.estimate import of_repeats
from multinode.stats.unknown import Unknown, or_none

_FILE = "tune.json"
_KIND = "tune"
# Minimum rounds of the winner.
_LEAST_AGAIN = 5
_LEAST_ROUNDS = 2
# Deadline, so that a setting that hangs does not block the others.
_HANG_S = 120.0
# The default, once before all others, so that the first round is no warm-up.
_FIRST = "first"
_DEFAULTS = frozenset({_FIRST, "default", "default-again"})

Measure = Callable[[Launch, Extent, RunContext], ScanReport]


def measure_once(launch: Launch, extent: Extent, context: RunContext) -> ScanReport:
    """One run of the scan, removed from the nodes afterwards."""
    report, launched = run_scan(launch, extent, context)
    cleanup_nodes(launched, launch.cluster, context)
    return report


def load_nccl_tune(directory: RunDirectory) -> TuneReport | None:
    """What a stored `nccl-test --tune` has measured; None for another run."""
    return directory.read(_FILE, TuneReport)


def nccl_tune(
    launch: Launch, extent: Extent, repeats: int, context: RunContext, measure: Measure = measure_once
) -> TuneReport:
    """Try each setting, interleaved with the default, then the best of each axis together.

    Args:
        launch: its job is a CollectiveTest; variables that its nodes already set stay.
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
    test = launch.job
    if not isinstance(test, CollectiveTest):
        raise UsageError("only collectives can be tuned; this job is not a collective test")
    names = tuple(node.name for node in launch.cluster.nodes)
    facts = {} if test.backend == "gloo" else probe_nodes(launch, context.agent)
    backend = test.backend or common_backend(facts.values())
    if backend != "nccl":
        return TuneReport(run_id="", backend=backend, nodes=names, test=test)
    stall_s = min(launch.execute.stall_s or _HANG_S, _HANG_S)
    launch = msgspec.structs.replace(
        launch,
        job=msgspec.structs.replace(test, backend="nccl"),
        execute=msgspec.structs.replace(launch.execute, kind=_KIND, stall_s=stall_s, on_stall="stop"),
    )
    extent = msgspec.structs.replace(extent, tcp=False, pairs=False, compare=None)
    measured = {"tune": repeats, "like": extent.like}
    record = GridRecord(
        fingerprint=fingerprint({"": launch.job}, launch.cluster.nodes, launch, measured),
        command=f"{describe_benchmark(test)} --tune",
        grid=Grid(nodes=(len(names),), repeats=max(repeats, _LEAST_AGAIN)),
        cells=(CellRecord(cell=GridCell(label=_FIRST, nodes=len(names))),),
        noun="setting",
    )
    directory = take_up(launch, record, context, Resume(anew=extent.fresh))
    versions = sorted(filter(None, (or_none(node_facts.nccl_version) for node_facts in facts.values())))
    report = load_nccl_tune(directory) or TuneReport(
        run_id=directory.run_id,
        backend="nccl",
        nodes=names,
        nccl_version=versions[0] if versions else None,
        repeats=repeats,
        test=test,
        directory=str(directory),
    )
    with directory.lock():
        return _SettingSeries(launch, extent, context, report, measure).tune()


class _SettingSeries(Series):
    """The runs of a tuning: the default, then all settings, then the best together."""

    def __init__(
        self, launch: Launch, extent: Extent, context: RunContext, report: TuneReport, measure: Measure
    ) -> None:
        super().__init__(context, RunDirectory(context.runs / report.run_id))
        self._launch = launch
        self._extent = extent
        self._measure_scan = measure
        self._report = report

    def tune(self) -> TuneReport:
        """All runs that are due; see `nccl_tune`."""
        self._keep()
        try:
            if len(self.record.cells) == 1:
                # Of a first run alone nobody knows what it found.
                (first,) = self.record.cells
                self.keep(msgspec.structs.replace(self.record, cells=(CellRecord(cell=first.cell),)))
                self.run([Turn(cell=0, number=1)])
                self._add("default", self._report.settings)
            count = 1 + len(self._report.settings)
            self._run(range(1, 1 + count), self._report.repeats)
            self._judge()
            env = choose(self._report.settings)
            if env:
                if len(self.record.cells) == 1 + count:
                    self._add("default-again", [TunedSetting(axis="together", env=env)])
                again = range(1 + count, len(self.record.cells))
                self._run(again, max(self._report.repeats, _LEAST_AGAIN))
                (together,) = self._judged([TunedSetting(axis="together", env=env)], again)
                self._report = msgspec.structs.replace(self._report, together=together)
        except BaseException as error:
            if self._report.together is None:
                self._judge()
            with contextlib.suppress(MultinodeError):
                self._keep()
            self.end(status_of(error), error=error)
            raise
        self._keep()
        self.end("succeeded")
        return self._report

    def name(self, cell: CellRecord) -> str:
        """The variables that are set."""
        if cell.cell.label == _FIRST:
            return "the default, once before all others"
        return TunedSetting(axis="", env=cell.cell.settings).text or "the default"

    def report(self, cell: CellRecord, outcome: CellOutcome) -> None:
        """Say what failed."""
        if outcome.state != "measured":
            self.context.say(f"{self.name(cell)}: {message_of(outcome.why)}")

    def measure(self, turn: Turn, run_id: str) -> CellOutcome:
        """Make a run; one with a setting may fail."""
        cell, environment = self.record.cells[turn.cell].cell, self._launch.environment
        environment = msgspec.structs.replace(environment, env=environment.env | cell.settings)
        launch = msgspec.structs.replace(
            self._launch,
            run_id=run_id,
            environment=environment,
            # The first run showed that the nodes reach each other.
            check=self._launch.check and cell.label == _FIRST,
        )
        try:
            scan = self._measure_scan(launch, self._extent, self.context)
            took_us = measured_us(scan)
        except NodeError:
            raise
        except (RunFailed, NodeFailed, ValueError) as error:
            if cell.label not in _DEFAULTS:
                return CellOutcome(state="failed", why=REFUSED.found(None, error=str(error).splitlines()[0]))
            if isinstance(error, ValueError):
                raise RunFailed(f"without any setting: {error}", hint="run multinode nccl-test for details") from error
            raise
        if cell.label == _FIRST:
            self._begin(scan)
        return CellOutcome(state="measured", value=took_us)

    def end_cut_off(self, run_id: str) -> CellOutcome:
        """A scan that was cut off is repeated."""
        super().end_cut_off(run_id)
        return CellOutcome(state="stopped")

    def _begin(self, scan: ScanReport) -> None:
        """The settings to try, by what the first run found."""
        nccl = scan.nccl or NcclPath()
        report = with_mtu(self._report, scan)
        version = report.nccl_version or nccl.version
        settings = candidates(version, over_sockets=nccl.network in {None, "Socket"})
        self._report = msgspec.structs.replace(
            report, world_size=scan.world_size, nccl_version=version, settings=tuple(settings)
        )
        self._keep()

    def _add(self, default: str, settings: Iterable[TunedSetting]) -> None:
        nodes, count = len(self._launch.cluster.nodes), len(self.record.cells)
        cells = [GridCell(label=default, nodes=nodes)]
        cells += [
            GridCell(label=f"setting-{number}", nodes=nodes, settings=dict(setting.env))
            for number, setting in enumerate(settings, count)
        ]
        added = tuple(CellRecord(cell=cell) for cell in cells)
        self.keep(msgspec.structs.replace(self.record, cells=(*self.record.cells, *added)))

    def _run(self, cells: range, repeats: int) -> None:
        # A setting that failed is not tried again.
        self.run(list(in_turns(cells, repeats)), lambda turn: not self.record.cells[turn.cell].failed_runs)

    def _judge(self) -> None:
        cells = range(1, 2 + len(self._report.settings))
        if len(self.record.cells) >= cells.stop:
            default_us = self.record.cells[1].values
            self._report = msgspec.structs.replace(
                self._report,
                default_us=of_repeats(default_us) if len(default_us) > 1 else None,
                settings=self._judged(self._report.settings, cells),
            )

    def _judged(self, settings: Iterable[TunedSetting], cells: range) -> tuple[TunedSetting, ...]:
        """The settings as their runs judge them; the default is the first of these cells."""
        default, *others = (self.record.cells[index] for index in cells)
        judged = []
        for setting, cell in zip(settings, others, strict=True):
            turns = min(len(default.values), len(cell.values))
            if cell.failed_runs or turns < _LEAST_ROUNDS:
                few = "it was measured in fewer than two rounds"
                lacking = Unknown(message_of(cell.why) if cell.failed_runs else few)
                judged.append(msgspec.structs.replace(setting, time_us=lacking, gain=lacking))
            else:
                judged.append(tuned(setting, default.values[:turns], cell.values[:turns]))
        return tuple(judged)

    def _keep(self) -> None:
        self.directory.write(_FILE, self._report)
