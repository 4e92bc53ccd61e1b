"""Make a Side of a contrast from its runs, with what they cost, and the Contrast of two stored runs. Prints nothing."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

import msgspec

from multinode.contrast.figures import SCHEMA, Contrast, Side, compared_words
from multinode.contrast.judge import compare, require_alike
from multinode.errors import UsageError
from multinode.model.workload import JobSettings, Workload, global_batch
from multinode.profile.bottleneck import Bottleneck
from multinode.profile.likely_causes import find_disturbances
from multinode.profile.measured import energy_of, with_costs
from multinode.profile.step_split import PARTS, KnownSteps, WorkerSplit
from multinode.profile.summary import Summary
from multinode.records.run_directory import RunDirectory
from multinode.runs.stored_run import StoredRun
from multinode.stats.estimate import Estimate, Spread, known_mean, of_repeats, of_scatter

_PARTS = (*PARTS, "overlap")


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
    batch, missing = global_batch(workload.settings, world_size), _unknown_facts(last, newest)

    tokens: dict[str, Estimate | None] = {}
    for name in ("tokens_per_s", "tgs"):
        values: list[float | None] = [getattr(summary, name) for summary in summaries]
        counted = [value for value in values if value is not None]
        tokens[name] = _estimate(counted, summaries, name) if len(counted) == len(values) else None
        if tokens[name] is None:
            reasons = (summary.missing[name] for summary in summaries if name in summary.missing)
            missing[name] = next(reasons, "no worker counted tokens")
    split = _mean_split(summaries)
    exposed_ms: list[float] = []
    late_ms: dict[str, float] = {}
    if split is not None and split.exposed_ms is not None:
        exposed_ms = [
            mean.exposed_ms for summary in summaries if (mean := summary.split.mean) and mean.exposed_ms is not None
        ]
        late_ms = _late_ms(summaries)
    else:
        reasons = (reason for summary in summaries if (reason := summary.split.missing.get("exposed_ms")))
        unknown = ("exposed_ms", "exposed_share", "late_ms", *(("split",) if split is None else ()))
        missing |= dict.fromkeys(unknown, next(reasons, "its steps were not split"))
    energy = [
        energy_of(summary.nodes, summary.steady_steps * (batch or 0), summary.samples_per_s) for summary in summaries
    ]
    power = {
        "power_w": known_mean([use.power_w for use in energy]),
        "energy_j_per_sample": known_mean([use.j_per_sample for use in energy]),
    }
    reason = next((use.reason for use in energy if use.reason), "")
    missing |= {name: reason for name, value in power.items() if value is None and reason}
    cores = {name: count for name, count in zip(last.node_names, last.cores, strict=False) if count}
    disturbances = find_disturbances([summary.nodes for summary in summaries], cores)
    if last.price_per_hour is None:
        missing["price_per_hour"] = "not every node has a price (price= in the hostfile)"
    side = Side(
        role=role,
        run_ids=tuple(summary.run_id for summary in summaries),
        node_names=last.node_names,
        nodes=len(last.node_names),
        workers_per_node=max(last.workers, default=1),
        world_size=world_size,
        settings=last.workload.settings if last.workload is not None else None,
        global_batch=batch,
        versions=workload.versions,
        samples_per_s=_estimate([summary.samples_per_s or 0.0 for summary in summaries], summaries, "samples_per_s"),
        step_time_ms=_estimate([spread.median for spread in steps], summaries, "step_time_ms"),
        step_spread=max(steps, key=lambda spread: spread.cv),
        steady_steps=sum(summary.steady_steps for summary in summaries),
        split=split,
        exposed_ms=_estimate(exposed_ms, summaries, "exposed_ms") if exposed_ms else None,
        exposed_share=split.exposed_ms / split.step_ms if split and split.exposed_ms is not None else None,
        exposed_steps=sum((summary.split.steps for summary in summaries), KnownSteps()),
        bytes_per_step=newest.comm.bytes_per_step,
        bottleneck=newest.bottleneck or Bottleneck(kind="unknown", sentence="bottleneck unknown"),
        link_gbit_per_s=last.link_gbit_per_s,
        stragglers=tuple(sorted(late_ms, key=lambda node: -late_ms[node])),
        late_ms=max(late_ms.values(), default=0.0) if exposed_ms else None,
        whole=workload.whole,
        dataset_samples=newest.dataset_samples,
        disturbed=tuple(disturbances.values()),
        disturbances=tuple(disturbances),
        tokens_per_s=tokens["tokens_per_s"],
        tgs=tokens["tgs"],
        power_w=power["power_w"],
        energy_j_per_sample=power["energy_j_per_sample"],
        price_per_hour=last.price_per_hour,
        missing=missing,
    )
    return with_costs(side)


def _estimate(values: Sequence[float], summaries: Sequence[Summary], name: str) -> Estimate:
    if len(values) > 1:
        return of_repeats(values)
    value, summary = values[0], summaries[0]
    interval = summary.intervals.get(name)
    low, high = interval or of_scatter(value, _steps_of(summary).cv, summary.steady_steps)
    return Estimate(value=value, low=min(low, value), high=max(high, value))


def _steps_of(summary: Summary) -> Spread:
    """Its step times in ms; refuses a run without a speed."""
    steps, rate = summary.step_time_ms, summary.samples_per_s
    if steps is None or rate is None:
        reason = summary.missing.get("samples_per_s", "it recorded no measured step")
        raise UsageError(
            f"run {summary.run_id} has no samples/s to compare: {reason}",
            hint="use a LLaMA-Factory job, or run more steps with --steps",
        )
    return steps


def _mean_split(summaries: Sequence[Summary]) -> WorkerSplit | None:
    """Mean of each part that all repeats have; None if a repeat has no split."""
    splits = [mean for summary in summaries if (mean := summary.split.mean) is not None]
    if len(splits) < len(summaries):
        return None
    return WorkerSplit(
        rank=-1,
        step_ms=statistics.fmean(split.step_ms for split in splits),
        **{name: known_mean(getattr(split, name) for split in splits) for name in _PARTS},
    )


def _late_ms(summaries: Sequence[Summary]) -> dict[str, float]:
    """Wait of the others for each straggler, mean of the repeats."""
    late_ms: dict[str, float] = {}
    for straggler in (straggler for summary in summaries for straggler in summary.stragglers):
        late_ms[straggler.node] = late_ms.get(straggler.node, 0.0) + straggler.late_ms / len(summaries)
    return late_ms


def _unknown_facts(last: StoredRun, newest: Summary) -> dict[str, str]:
    missing: dict[str, str] = {}
    if last.workload is None:
        missing |= dict.fromkeys(("settings", "global_batch"), "the run did not record its settings")
    elif global_batch(last.workload.settings, 1) is None:
        missing["global_batch"] = "the per-device batch or the accumulation is unknown"
    if last.link_gbit_per_s is None:
        alone = "one node uses no link"
        missing["link_gbit_per_s"] = alone if len(last.node_names) == 1 else "not every node's NIC reports its rate"
    if newest.dataset_samples is None:
        missing["dataset_samples"] = newest.missing.get("dataset_samples", "no worker reported it")
    return missing


CONTRAST_FILE = "contrast.json"


class StoredSchema(msgspec.Struct, frozen=True):
    """The schema of any document."""

    schema: str = ""


def compare_runs(root: Path, first: str, second: str, *, anyway: bool = False) -> Contrast:
    """Compare two stored runs: the first is the baseline, the second the candidate.

    Args:
        root: directory of all runs.
        first: an id, its beginning, or `last`.
        second: likewise.
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
        why=compared_words(runs[1].run_id, runs[0].run_id),
        job=" against ".join(reversed(jobs)),
        rule="; ".join(rules),
    )


def load_contrast(directory: RunDirectory) -> tuple[Contrast | None, str]:
    """A run's contrast, if it has one; or why it cannot be shown."""
    marked = directory.read(CONTRAST_FILE, StoredSchema)
    if marked is None or marked.schema == SCHEMA:
        return directory.read(CONTRAST_FILE, Contrast), ""
    schema = marked.schema or "no schema"
    return None, f"This contrast is from another release ({schema}): measure it again to show it."
