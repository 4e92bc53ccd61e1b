"""try_advice: short runs of an unchanged training and with the best changes, predicted beside measured.

What is advised is `advise`'s. Whatever was measured before a failure or a stop is kept. Prints nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from multinode.errors import Interrupted, MultinodeError, UsageError
from multinode.job.deepspeed import edit_deepspeed, fit_batch, parse_deepspeed_edits
from multinode.job.job import LlamaFactoryJob, override_job, parse_overrides
from multinode.job.job_files import Change
from multinode.job.planning import with_workers
from multinode.job.workload import Settings, read_settings
from multinode.launch.context import Launch, Launched, RunContext
from multinode.launch.launch import (
    benchmark_mode,
    create_parent,
    launch,
    require_success,
    same_threads,
)
from multinode.launch.node_runs import cleanup_nodes
from multinode.predict.advice import Advice, Recommendations, Tried
from multinode.predict.run_selection import CONTRAST
from multinode.records.benchmark import Benchmark
from multinode.records.run import Run, make_run_id
from multinode.records.run_directory import RunDirectory
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


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """Advice that was tried."""

    recommendations: Recommendations  # with what was measured
    directory: Path  # where it lies; its runs lie beside it


class _Measured(msgspec.Struct, kw_only=True):
    """All runs of one setting so far."""

    run_id: str | None = None
    samples_per_s: list[float] = []
    reason: str = ""


def _run_once(what: Launch, context: RunContext) -> Launched:
    launched = launch(what, context)
    if launched.run.status == "succeeded":
        cleanup_nodes(launched, what.cluster, context)
    return launched


def try_advice(
    what: Launch,
    context: RunContext,
    recommendations: Recommendations,
    trials: Trials,
    run: Callable[[Launch, RunContext], Launched] = _run_once,
) -> Attempt:
    """Run the unchanged training and with each change in turn, and compare the gains with those predicted.

    A change that fails has its reason, and the others go on. The job's own output is left alone.

    Args:
        what: the unchanged job, cut to a few steps.
        context: the nodes.
        recommendations: what was advised.
        trials: what of it is tried.
        run: makes a run.

    Raises:
        UsageError: nothing of what was advised can be tried, or the job is not the one that was measured.
        MultinodeError: the unchanged training fails; what was measured before is kept.
        Interrupted: the user stopped it; the hint says where everything is that was measured.
    """
    _require_measured(what, recommendations.settings)
    chosen = _chosen(recommendations, trials)
    workers = [recommendations.today.workers_per_node, *(one.outlook.workers_per_node for one in chosen)]
    what = msgspec.structs.replace(what, run_id=what.run_id or make_run_id())
    what = benchmark_mode(same_threads(what, workers, context, "in every run"))
    hosts = what.cluster.hosts or recommendations.hosts
    series = _Series(what, context, msgspec.structs.replace(recommendations, hosts=hosts), run)
    order = list(_order(chosen, trials.repeats))
    try:
        for number, (turn, advice) in enumerate(order, 1):
            context.say(f"[{number}/{len(order)}] {advice.name if advice is not None else 'unchanged'}")
            series.measure(advice, chosen, turn if trials.repeats > 1 else None)
    except Interrupted as stopped:
        kept = series.keep("stopped")
        if kept is None:
            raise
        raise Interrupted(stopped.message, hint=f"earlier measurements are in {kept.directory}") from None
    except MultinodeError:
        kept = series.keep("failed")
        if kept is not None:
            context.say(f"earlier measurements are in {kept.directory}")
        raise
    kept = series.keep("succeeded")
    if kept is None:
        raise UsageError("nothing was measured", hint="give a number of repeats above zero")
    return kept


def changed_launch(what: Launch, change: Change, today: Layout) -> Launch:
    """The launch with a change made, as its options would make it, on as many nodes and workers as it runs on today.

    Raises:
        UsageError: it cannot be created with this job or on these nodes.
    """
    cluster, job = what.cluster, what.job
    nodes = change.nodes or today.nodes
    if nodes > len(cluster.nodes):
        raise UsageError(f"{nodes} nodes are requested; the hostfile has {len(cluster.nodes)}")
    asked = change.workers_per_node or what.options.workers_per_node
    workers = (asked,) * nodes if asked else today.on(nodes).counts
    cluster, options = with_workers(cluster.first(nodes), what.options, workers)
    if isinstance(job, LlamaFactoryJob):
        job = _whole_rounds(fit_batch(changed_job(job, change), sum(workers)), change)
    elif change.overrides or change.deepspeed:
        raise UsageError(
            "only settings of a LLaMA-Factory YAML can be changed",
            hint="give it: multinode tune --from RUN train.yaml",
        )
    # On one node the gradients pass no network.
    compress = options.grad_compress if nodes != 1 else None
    options = msgspec.structs.replace(
        options,
        grad_compress=None if change.averaging is not None else change.grad_compress or compress,
        averaging=change.averaging,
        balance=change.balance,
    )
    return msgspec.structs.replace(what, cluster=cluster, job=job, options=options)


def _whole_rounds(job: LlamaFactoryJob, change: Change) -> LlamaFactoryJob:
    steps, least = job.config.get("max_steps"), _ROUNDS * change.averaging.every if change.averaging is not None else 0
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


def _require_measured(what: Launch, measured: Settings) -> None:
    if isinstance(what.job, Benchmark):
        return
    asked = msgspec.structs.replace(read_settings(what.job), grad_compress=what.options.grad_compress)
    pairs = {name: (getattr(asked, name), getattr(measured, name)) for name in Settings.__struct_fields__}
    # Gradients that are compressed as nothing are sent as they are.
    differing = [
        f"{name.replace('_', ' ')} is {ours!r}, but {theirs!r} was measured"
        for name, (ours, theirs) in pairs.items()
        if ours != theirs and (name == "grad_compress" or None not in {ours, theirs})
    ]
    if differing:
        raise UsageError(
            f"this is not the measured job: {'; '.join(differing)}",
            hint=f"without a JOB the stored job is used; or measure this one first: {CONTRAST}",
        )


class _Series:
    """Runs one after the other, and what they gave so far."""

    def __init__(
        self,
        what: Launch,
        context: RunContext,
        recommendations: Recommendations,
        run: Callable[[Launch, RunContext], Launched],
    ) -> None:
        self._what = what
        self._context = context
        self._recommendations = recommendations
        self._run = run
        self._measured: dict[str, _Measured] = {}
        self._directory: RunDirectory | None = None
        self._first: Run | None = None

    def measure(self, advice: Advice | None, chosen: tuple[Advice, ...], turn: int | None) -> None:
        """One run, of the unchanged job where there is no advice."""
        name, label = (_TODAY, _TODAY) if advice is None else (advice.name, str(chosen.index(advice) + 1))
        found = self._measured.setdefault(name, _Measured())
        found.run_id = f"{self._what.run_id}-{label}" + (f"-{turn}" if turn is not None else "")
        try:
            change = advice.change if advice is not None else None
            changed = changed_launch(self._what, change or Change(), self._recommendations.today.layout)
            launched = self._run(msgspec.structs.replace(changed, run_id=found.run_id), self._context)
            require_success(launched, self._context)
        except Interrupted:
            raise
        except MultinodeError as error:
            if advice is None:
                raise
            found.reason = str(error)
        else:
            self._add(found, launched)
        self.keep("running")

    def keep(self, status: str) -> Attempt | None:
        """Write what is known so far, as a run of its own so that it is listed; None where nothing was measured."""
        if self._first is None:
            return None
        directory = self._directory = self._directory or create_parent(self._context.runs, self._what)
        recommendations = self._with_tried()
        directory.write(_FILE, recommendations)
        directory.write("run.json", msgspec.structs.replace(self._first, status=status))
        return Attempt(recommendations=recommendations, directory=directory.path)

    def _add(self, found: _Measured, launched: Launched) -> None:
        if launched.summary.samples_per_s is None:
            found.reason = launched.summary.missing.get("samples_per_s", "it recorded no steady step")
        else:
            found.samples_per_s.append(launched.summary.samples_per_s)
        if self._first is None:
            self._first = msgspec.structs.replace(launched.run, run_id=str(self._what.run_id), kind="advise")
        else:
            self._first = msgspec.structs.replace(self._first, ended_s=launched.run.ended_s)

    def _with_tried(self) -> Recommendations:
        today = self._measured[_TODAY]
        base = statistics.median(today.samples_per_s) if today.samples_per_s else None
        advice = tuple(
            msgspec.structs.replace(one, tried=_tried(one, self._measured[one.name], base))
            if one.name in self._measured
            else one
            for one in self._recommendations.advice
        )
        rate = Tried(run_id=today.run_id, samples_per_s=base, reason=today.reason if base is None else "")
        return msgspec.structs.replace(self._recommendations, advice=advice, today_tried=rate)


def _chosen(recommendations: Recommendations, trials: Trials) -> tuple[Advice, ...]:
    able = [one for one in recommendations.advice if one.change is not None and one.fits is not False]
    picked = [one for one in able if not trials.picks or any(_is_picked(one.name, pick) for pick in trials.picks)]
    if not picked:
        names = ", ".join(repr(one.name) for one in able) or "none"
        large = [repr(one.name) for one in recommendations.advice if one.fits is False]
        told = f"; too large for the GPUs: {', '.join(large)}" if large else ""
        raise UsageError("none of the advised changes can be tried", hint=f"available: {names}{told}")
    return tuple(picked[: trials.count])


def _is_picked(name: str, pick: str) -> bool:
    """Two changes at once are meant only where a `+` says so."""
    return pick in name and ("+" in pick or "+" not in name)


def _order(chosen: tuple[Advice, ...], repeats: int) -> Iterator[tuple[int, Advice | None]]:
    for turn in range(1, repeats + 1):
        all_of_them = (None, *chosen)
        for one in all_of_them if turn % 2 else all_of_them[::-1]:
            yield turn, one


def _tried(advice: Advice, found: _Measured, base: float | None) -> Tried:
    if not found.samples_per_s:
        return Tried(run_id=found.run_id, reason=found.reason)
    rate = statistics.median(found.samples_per_s)
    if base is None:
        return Tried(run_id=found.run_id, samples_per_s=rate, reason="the unchanged training reported no samples/s")
    gain = rate / base
    low, high = advice.interval
    return Tried(
        run_id=found.run_id,
        samples_per_s=rate,
        gain=gain,
        error=advice.gain / gain - 1,
        is_covered=low <= gain <= high,
        # Of several repeats, some may have failed.
        reason=found.reason,
    )
