"""Make a Side of a contrast from its runs, with what they cost, and the Contrast of two stored runs. Prints nothing."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from multinode.contrast.figures import SCHEMA, TWO_RUNS, Contrast, Side
from multinode.contrast.judge import compare, require_alike
from multinode.errors import UsageError
from multinode.findings.finding import Finding
from multinode.findings.rule import RuleGroup
from multinode.model.workload import JobSettings, Workload, global_batch
from multinode.profile.bottleneck import UNKNOWN_BOTTLENECK
from multinode.profile.likely_causes import find_disturbances
from multinode.profile.measured import energy_of, with_costs
from multinode.profile.step_split import PART_NAMES, KnownSteps, WorkerSplit
from multinode.profile.summary import StepTimes, Summary
from multinode.records.run_directory import RunDirectory
from multinode.runs.stored_run import StoredRun
from multinode.stats.estimate import Estimate, of_repeats, value_of
from multinode.stats.unknown import Unknown, found, known, or_unknown, reason_of

_PARTS = (*PART_NAMES, "overlap")


def make_side(role: str, runs: Sequence[StoredRun]) -> Side:
    """A side from its repeats: means with 95% confidence intervals, as in `stats.estimate`.

    Args:
        role: as in Side.
        runs: at least one, of the same job on the same nodes, in order.

    Raises:
        UsageError: one is not a training, or has no speed.
    """
    last, summaries = runs[-1], [run.require_summary() for run in runs]
    newest = summaries[-1]
    steps = [_steps_of(summary) for summary in summaries]
    workload, world_size = last.workload or Workload(settings=JobSettings()), sum(last.workers)
    unrecorded = None if last.workload is not None else "the run did not record its settings"
    batch = global_batch(workload.settings, world_size)
    split = _mean_split(summaries)
    exposed_ms = found(lambda: _estimate(summaries, lambda summary: known(summary.comm.exposed_ms)))
    late_ms = {} if isinstance(exposed_ms, Unknown) else _late_ms(summaries)
    energy = [
        energy_of(summary.nodes, summary.steady_steps * (batch or 0), value_of(summary.samples_per_s))
        for summary in summaries
    ]
    cores = {name: count for name, count in zip(last.node_names, last.cores, strict=False) if count}
    side = Side(
        role=role,
        run_ids=tuple(summary.run_id for summary in summaries),
        node_names=last.node_names,
        nodes=len(last.node_names),
        workers_per_node=max(last.workers, default=1),
        world_size=world_size,
        settings=workload.settings if unrecorded is None else Unknown(unrecorded),
        global_batch=or_unknown(batch, unrecorded or "the per-device batch or the accumulation is unknown"),
        versions=workload.versions,
        samples_per_s=_estimate(summaries, lambda summary: known(summary.samples_per_s)),
        step_time_ms=_estimate(summaries, lambda summary: known(summary.step_time_ms).median),
        step_spread=max(steps, key=lambda times: times.cv).spread,
        steady_steps=sum(summary.steady_steps for summary in summaries),
        split=split,
        exposed_ms=exposed_ms,
        exposed_share=found(lambda: known(split).exposed_share),
        exposed_steps=sum((summary.split.steps for summary in summaries), KnownSteps()),
        bytes_per_step=newest.comm.bytes_per_step,
        bottleneck=newest.bottleneck or UNKNOWN_BOTTLENECK.found(None, reason="the run recorded no bottleneck"),
        link_gbit_per_s=or_unknown(last.link_gbit_per_s, _no_link(last)),
        stragglers=tuple(sorted(late_ms, key=lambda node: -late_ms[node])),
        late_ms=exposed_ms if isinstance(exposed_ms, Unknown) else max(late_ms.values(), default=0.0),
        whole=workload.whole,
        dataset_samples=newest.dataset_samples,
        disturbances=find_disturbances([summary.nodes for summary in summaries], cores),
        tokens_per_s=found(lambda: _estimate(summaries, lambda summary: known(summary.tokens_per_s))),
        tgs=found(lambda: _estimate(summaries, lambda summary: known(summary.tgs))),
        power_w=found(lambda: statistics.fmean([known(use.power_w) for use in energy])),
        energy_j_per_sample=found(lambda: statistics.fmean([known(use.j_per_sample) for use in energy])),
        price_per_hour=or_unknown(last.price_per_hour, "some nodes have no price (price= in the hostfile)"),
    )
    return with_costs(side)


def _no_link(run: StoredRun) -> str:
    return "one node uses no link" if len(run.node_names) == 1 else "some NICs do not report their rate"


def _estimate(summaries: Sequence[Summary], figure: Callable[[Summary], Estimate]) -> Estimate:
    estimates = [figure(summary) for summary in summaries]
    return of_repeats([estimate.value for estimate in estimates]) if len(estimates) > 1 else estimates[0]


def _steps_of(summary: Summary) -> StepTimes:
    """Its step times in ms; refuses a run without a speed."""
    steps = summary.step_time_ms
    if isinstance(steps, Unknown) or isinstance(summary.samples_per_s, Unknown):
        reason = reason_of(summary.samples_per_s) or reason_of(steps)
        raise UsageError(
            f"run {summary.run_id} has no samples/s to compare: {reason}",
            hint="train with a supported framework, or run more steps with --steps",
        )
    return steps


def _mean_split(summaries: Sequence[Summary]) -> WorkerSplit | Unknown:
    """Mean of each part that all repeats have; unknown if a repeat has no split."""

    def mean_part(splits: Sequence[WorkerSplit], name: str) -> float:
        return statistics.fmean(known(getattr(split, name)) for split in splits)

    def mean_of_all() -> WorkerSplit:
        splits = [known(summary.split.mean) for summary in summaries]
        parts: dict[str, Any] = {name: found(partial(mean_part, splits, name)) for name in _PARTS}
        return WorkerSplit(rank=-1, step_ms=statistics.fmean(split.step_ms for split in splits), **parts)

    return found(mean_of_all)


def _late_ms(summaries: Sequence[Summary]) -> dict[str, float]:
    """Wait of the others for each straggler, mean of the repeats."""
    late_ms: dict[str, float] = {}
    for straggler in (straggler for summary in summaries for straggler in summary.stragglers):
        late_ms[straggler.node] = late_ms.get(straggler.node, 0.0) + straggler.late_ms / len(summaries)
    return late_ms


CONTRAST_FILE = "contrast.json"


class StoredSchema(msgspec.Struct, frozen=True):
    """The schema of any document."""

    schema: str = ""


def compare_runs(root: Path, first: str, second: str, *, anyway: bool = False) -> Contrast:
    """Compare two stored runs: the first is the baseline, the second the candidate.

    Args:
        root: directory of all runs.
        first: an id, its beginning, or `last`.
        second: an id, its beginning, or `last`.
        anyway: whether to compare runs that did not train the same, with the differences marked.
    """
    runs = [StoredRun.open(root, name) for name in (first, second)]
    baseline, candidate = (make_side(role, [run]) for role, run in zip(("baseline", "candidate"), runs, strict=True))
    require_alike(baseline, candidate, anyway=anyway)
    rules = list(dict.fromkeys(run.require_summary().rule for run in runs))
    jobs = list(dict.fromkeys(run.require_plan().job for run in runs))
    return compare(
        [baseline, candidate],
        mode="compare",
        why=TWO_RUNS.found(None, candidate=runs[1].run_id, baseline=runs[0].run_id),
        job=" against ".join(reversed(jobs)),
        rule="; ".join(rules),
    )


_UNREADABLE = RuleGroup("Contrasts that cannot be shown")
_OTHER_RELEASE = _UNREADABLE.rule(
    "other-release",
    about="a contrast that another release of multinode stored",
    message="This contrast is from another release of multinode ({schema}) and cannot be shown. Measure it again.",
)


def load_contrast(directory: RunDirectory) -> Contrast | Finding | None:
    """A run's contrast, or why it cannot be shown; None if it has none."""
    marked = directory.read(CONTRAST_FILE, StoredSchema)
    if marked is None or marked.schema == SCHEMA:
        return directory.read(CONTRAST_FILE, Contrast)
    return _OTHER_RELEASE.found(None, schema=marked.schema or "no schema")
