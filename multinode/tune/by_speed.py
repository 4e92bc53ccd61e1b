"""try_advice: short runs of an unchanged training and with the best or picked changes, predicted beside measured.

What is advised is `advise`'s. Whatever was measured before a failure or a stop is kept. Prints nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path

import msgspec

from multinode.errors import Interrupted, MultinodeError, UsageError
from multinode.job.deepspeed import edit_deepspeed, fit_batch, parse_deepspeed_edits
from multinode.job.job import LlamaFactoryJob, describe_job, override_job, parse_overrides
from multinode.job.job_files import Change
from multinode.job.planning import with_workers
from multinode.launch.context import Launch, Launched, RunContext
from multinode.launch.launch import (
    benchmark_mode,
    launch,
    require_success,
    same_threads,
)
from multinode.launch.node_runs import cleanup_nodes
from multinode.levers.levers import NONE
from multinode.model.workload import JobSettings, read_settings
from multinode.predict.advice import Advice, Recommendations, Tried
from multinode.predict.run_selection import CONTRAST
from multinode.records.benchmark import Benchmark, describe_benchmark
from multinode.records.run_directory import RunDirectory
from multinode.series.grid import CellOutcome, CellRecord, Grid, GridCell, GridRecord, Turn, fingerprint, in_turns
from multinode.series.series import Resume, Series, status_of, take_up
from multinode.stats.unknown import Unknown
from multinode.traffic.algorithms import Layout

_FILE = "advice.json"
_TODAY = "today"
_ROUNDS = 3


class Trials(msgspec.Struct, frozen=True, kw_only=True):
    """Which advice is tried, and how often."""

    count: int = 1  # the best so many of what a machine can change
    repeats: int = 1  # runs of each; every second time in the opposite order, so that drift hits all alike
    # only advice whose name has one of these in it, two changes at once only by a `+`; empty is all
    picks: tuple[str, ...] = ()
    fresh: bool = False  # whether to measure everything again if a trial of the same command was interrupted


class AdviceTrial(msgspec.Struct, frozen=True, kw_only=True):
    """Advice that was tried."""

    recommendations: Recommendations  # with what was measured
    directory: Path  # where it lies; its runs lie beside it


def _run_once(unchanged: Launch, context: RunContext) -> Launched:
    launched = launch(unchanged, context)
    if launched.run.status == "succeeded":
        cleanup_nodes(launched, unchanged.cluster, context)
    return launched


def try_advice(
    launch: Launch,
    context: RunContext,
    recommendations: Recommendations,
    trials: Trials,
    run: Callable[[Launch, RunContext], Launched] = _run_once,
) -> AdviceTrial:
    """Run the unchanged training and with each change in turn, and compare the gains with those predicted.

    A change that fails has its reason, and the others go on. The job's own output is left alone.

    Args:
        launch: the unchanged job, cut to a few steps.
        context: the nodes.
        recommendations: what was advised.
        trials: what of it is tried.
        run: makes a run.

    Raises:
        UsageError: nothing of what was advised can be tried, or the job is not the one that was measured.
        MultinodeError: the unchanged training fails; what was measured before is kept.
        Interrupted: the user stopped it; what was measured before is kept.
    """
    _require_measured(launch, recommendations.settings)
    chosen = _chosen(recommendations, trials)
    today = recommendations.today
    workers = [today.workers_per_node, *(advice.outlook.workers_per_node for advice in chosen)]
    launch = benchmark_mode(same_threads(launch, workers, context, "in every run"))
    launch = msgspec.structs.replace(launch, execute=msgspec.structs.replace(launch.execute, kind="advise"))
    recommendations = msgspec.structs.replace(recommendations, hosts=launch.cluster.hosts or recommendations.hosts)
    names = [advice.name for advice in chosen]
    cells = [GridCell(label=_TODAY, nodes=today.nodes, workers_per_node=today.workers_per_node)]
    cells += [
        GridCell(label=str(number), settings={"change": advice.name}, nodes=advice.outlook.nodes)
        for number, advice in enumerate(chosen, 1)
    ]
    measured = {"advise": names, "changes": [advice.change for advice in chosen], "repeats": trials.repeats}
    record = GridRecord(
        fingerprint=fingerprint({"": launch.job}, launch.cluster.nodes, launch, measured),
        command=describe_job(launch.job) if not isinstance(launch.job, Benchmark) else describe_benchmark(launch.job),
        grid=Grid(nodes=tuple(sorted({cell.nodes for cell in cells})), repeats=trials.repeats),
        cells=tuple(CellRecord(cell=cell) for cell in cells),
        noun="change",
    )
    directory = take_up(launch, record, context, Resume(anew=trials.fresh))
    with directory.lock():
        series = _ChangeSeries(launch, context, directory, recommendations, run)
        try:
            series.run(list(in_turns(range(len(cells)), trials.repeats)))
        except BaseException as error:
            series.end(status_of(error), error=error)
            raise
        series.end("succeeded")
    return AdviceTrial(recommendations=series.tried(), directory=directory.path)


def changed_launch(launch: Launch, change: Change, today: Layout) -> Launch:
    """The launch with a change made, as its options would make it, on as many nodes and workers as it runs on today.

    Raises:
        UsageError: it cannot be created with this job or on these nodes.
    """
    cluster, job = launch.cluster, launch.job
    nodes = change.nodes or today.nodes
    if nodes > len(cluster.nodes):
        raise UsageError(f"{nodes} nodes are requested; the hostfile has {len(cluster.nodes)}")
    workers_per_node = change.workers_per_node or launch.workers_per_node
    workers = (workers_per_node,) * nodes if workers_per_node else today.on(nodes).counts
    cluster, launch = with_workers(cluster.first(nodes), launch, workers)
    if isinstance(job, LlamaFactoryJob):
        job = _whole_rounds(fit_batch(changed_job(job, change), sum(workers)), change)
    elif change.overrides or change.deepspeed:
        raise UsageError(
            "only settings of a LLaMA-Factory YAML can be changed",
            hint="give it: multinode tune --from RUN train.yaml",
        )
    # On one node the gradients pass no network.
    kept = launch.levers.beside(change.levers) if nodes != 1 else NONE
    return msgspec.structs.replace(launch, cluster=cluster, job=job, levers=kept.joined(change.levers))


def _whole_rounds(job: LlamaFactoryJob, change: Change) -> LlamaFactoryJob:
    steps, rounds = job.config.get("max_steps"), change.levers.round_steps
    least = _ROUNDS * rounds if rounds > 1 else 0
    if type(steps) is not int or not 0 < steps < least:
        return job
    return override_job(job, parse_overrides((f"max_steps={least}",)))


def changed_job(job: LlamaFactoryJob, change: Change) -> LlamaFactoryJob:
    """The job with the settings of a change.

    Raises:
        UsageError: it has no DeepSpeed JSON that could be edited.
        JobError: an edit is wrong.
    """
    changed = override_job(job, parse_overrides(change.overrides))
    if changed.config.get("deepspeed") is None:
        return msgspec.structs.replace(changed, deepspeed_text=None, deepspeed_diff=None)
    if not change.deepspeed:
        return changed
    if changed.deepspeed_text is None:
        raise UsageError(f"{job.config_path} names no editable DeepSpeed JSON")
    text = edit_deepspeed(changed.deepspeed_text, parse_deepspeed_edits(change.deepspeed))
    return msgspec.structs.replace(changed, deepspeed_text=text)


def _require_measured(launch: Launch, measured: JobSettings) -> None:
    if isinstance(launch.job, Benchmark):
        return
    settings, levers = read_settings(launch.job), launch.levers
    names = [name for name in JobSettings.__struct_fields__ if name != "levers"]
    pairs = {name.replace("_", " "): (getattr(settings, name), getattr(measured, name)) for name in names}
    pairs = {name: both for name, both in pairs.items() if None not in both}
    # A lever that is not used is known.
    pairs |= levers.compared(measured.levers)
    differing = [
        f"{name} is {ours!r}, but {theirs!r} was measured" for name, (ours, theirs) in pairs.items() if ours != theirs
    ]
    if differing:
        raise UsageError(
            f"this is not the measured job: {'; '.join(differing)}",
            hint=f"without a JOB the stored job is used; or measure this one first: {CONTRAST}",
        )


class _ChangeSeries(Series):
    """The runs of the unchanged job and of each change."""

    def __init__(
        self,
        launch: Launch,
        context: RunContext,
        directory: RunDirectory,
        recommendations: Recommendations,
        run: Callable[[Launch, RunContext], Launched],
    ) -> None:
        super().__init__(context, directory)
        self._launch = launch
        self._recommendations = recommendations
        by_name = {advice.name: advice for advice in recommendations.advice}
        self._chosen = [by_name[cell.cell.settings["change"]] for cell in self.record.cells[1:]]
        self._run = run

    def name(self, cell: CellRecord) -> str:
        """The change."""
        return str(cell.cell.settings.get("change", "unchanged"))

    def measure(self, turn: Turn, run_id: str) -> CellOutcome:
        """Make a run; that of a change may fail."""
        change = (self._chosen[turn.cell - 1].change if turn.cell else None) or Change()
        try:
            changed = changed_launch(self._launch, change, self._recommendations.today.layout)
            launched = self._run(msgspec.structs.replace(changed, run_id=run_id), self.context)
            require_success(launched, self.context)
        except Interrupted:
            raise
        except MultinodeError as error:
            if not turn.cell:
                raise
            return CellOutcome(state="failed", reason=str(error))
        rate = launched.summary.samples_per_s
        if isinstance(rate, Unknown):
            return CellOutcome(state="failed", reason=rate.reason)
        return CellOutcome(state="measured", value=rate.value)

    def has_changed(self) -> None:
        """Store what is known so far."""
        self.directory.write(_FILE, self.tried())

    def tried(self) -> Recommendations:
        """The recommendations with what was measured."""
        today, *others = self.record.cells
        base = statistics.median(today.values) if today.values else None
        tried = {
            advice.name: _tried(advice, cell, base)
            for advice, cell in zip(self._chosen, others, strict=True)
            if cell.attempts
        }
        advice = tuple(
            msgspec.structs.replace(advice, tried=tried.get(advice.name, advice.tried))
            for advice in self._recommendations.advice
        )
        rate = Tried(run_id=today.last_run, samples_per_s=base, reason=today.reason if base is None else "")
        return msgspec.structs.replace(self._recommendations, advice=advice, today_tried=rate)


def _chosen(recommendations: Recommendations, trials: Trials) -> tuple[Advice, ...]:
    able = [
        candidate
        for candidate in recommendations.advice
        if candidate.change is not None and candidate.fits is not False
    ]
    picked = [
        candidate
        for candidate in able
        if not trials.picks or any(_is_picked(candidate.name, pick) for pick in trials.picks)
    ]
    if not picked:
        names = ", ".join(repr(candidate.name) for candidate in able) or "none"
        large = [repr(candidate.name) for candidate in recommendations.advice if candidate.fits is False]
        note = f"; too large for the GPUs: {', '.join(large)}" if large else ""
        raise UsageError("none of the advised changes can be tried", hint=f"available: {names}{note}")
    return tuple(picked[: trials.count])


def _is_picked(name: str, pick: str) -> bool:
    """Two changes at once are meant only where a `+` says so."""
    return pick in name and ("+" in pick or "+" not in name)


def _tried(advice: Advice, cell: CellRecord, base: float | None) -> Tried:
    if not cell.values:
        return Tried(run_id=cell.last_run, reason=cell.reason)
    rate = statistics.median(cell.values)
    if base is None:
        return Tried(run_id=cell.last_run, samples_per_s=rate, reason="the unchanged training reported no samples/s")
    gain = rate / base
    return Tried(
        run_id=cell.last_run,
        samples_per_s=rate,
        gain=gain,
        error=advice.gain.value / gain - 1,
        is_covered=advice.gain.low <= gain <= advice.gain.high,
        # Of several repeats, some may have failed.
        reason=cell.reason,
    )
