"""The outcome of runs: the document of `launch --json`, a screen with the verdict first, tables, the next command."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator

import msgspec
from rich.table import Table
from rich.text import Text

from multinode.cluster.quoting import hosts_option
from multinode.errors import MultinodeError
from multinode.job.workload import Workload, differing_setting
from multinode.profile.bottleneck import Bottleneck
from multinode.profile.figures import Straggler
from multinode.profile.step_split import INSIDE, PARTS
from multinode.profile.summary import Summary, unused_gpus
from multinode.records.plan import CodeCopy, LaunchPlan
from multinode.records.run import (
    SLOWER_THAN_ONE_NODE,
    VERDICT_FILE,
    Attempt,
    EarlyVerdict,
    Failure,
    NodeRun,
    Run,
    Stall,
)
from multinode.records.run_directory import RunDirectory, list_runs
from multinode.render.sheet import PLUS_MINUS, Column, Sheet, percent, plus_minus, sanitize
from multinode.render.table import Part, footer, labelled, make_table, paragraph, sheet_table
from multinode.stats.estimate import Estimate, Spread
from multinode.units import format_count, format_duration


class LaunchDocument(msgspec.Struct, frozen=True, kw_only=True):
    """The document of `launch --json`; `Summary` explains the figures."""

    schema: str = "multinode.launch/1"
    run_id: str
    status: str
    job: str
    engine: str
    world_size: int
    nodes: tuple[NodeRun, ...]
    first_failure: Failure | None
    samples_per_s: float | None
    step_time_ms: Spread | None
    steps: int
    steady_steps: int
    rule: str
    trainer_samples_per_s: float | None
    all_steps_samples_per_s: float | None
    first_loss: float | None
    last_loss: float | None
    strategy: str
    bottleneck: Bottleneck | None
    stragglers: tuple[Straggler, ...]
    missing: dict[str, str]
    duration_s: float | None
    stalls: tuple[Stall, ...]
    attempts: tuple[Attempt, ...]
    stop_reason: str
    early_verdict: EarlyVerdict | None
    code: CodeCopy | None
    directory: str


_FIELDS = {name for name in LaunchDocument.__struct_fields__ if name != "schema"}
_OF_RUN = _FIELDS & {*Run.__struct_fields__}
_OF_SUMMARY = _FIELDS & {*Summary.__struct_fields__} - _OF_RUN


def launch_document(
    run: Run,
    summary: Summary,
    directory: str,
    early_verdict: EarlyVerdict | None = None,
    code: CodeCopy | None = None,
) -> LaunchDocument:
    """The document."""
    return LaunchDocument(
        **{name: getattr(run, name) for name in _OF_RUN},
        **{name: getattr(summary, name) for name in _OF_SUMMARY},
        duration_s=run.ended_s - run.started_s if run.ended_s is not None else None,
        early_verdict=early_verdict,
        code=code,
        directory=directory,
    )


def run_parts(run: Run, summary: Summary | None, *, failure: bool = True, details: bool = False) -> Iterator[Part]:
    """The screen of a run: verdict, time of a step, slow nodes, and what to do.

    `failure` includes the first failure, unless it has been printed; `details` says whether details follow.
    """
    summary = summary or Summary(run_id=run.run_id, steps=0, steady_steps=0, rule="")
    yield paragraph(run_verdict(run, summary), style="bold")
    sheet = step_sheet(summary)
    if sheet.rows:
        yield ""
        yield sheet_table(sheet)
    rows = [("Run", f"{run.run_id}, {run.job}")]
    if summary.steps:
        rows.append(("Steps", f"{summary.steady_steps} of {summary.steps} measured; {summary.rule}"))
    rows += [(f"Attempt {number}", _attempt_words(attempt)) for number, attempt in enumerate(run.attempts, 1)]
    rows += [*(_failure_rows(run) if failure else ()), *_cause_rows(summary)]
    yield ""
    yield labelled(rows)
    if not details:
        yield footer("Details", f"multinode show {run.run_id} --details")


_MEANS = (
    f"{PLUS_MINUS}: 95% confidence interval; step time is the median; its parts are means, so they add up to the mean "
    "step time"
)


def step_sheet(summary: Summary) -> Sheet:
    """Speed and step split, with confidence intervals."""
    rows = []
    if summary.samples_per_s is not None:
        rows.append(("samples/s", measured(summary, "samples_per_s", summary.samples_per_s), ""))
    mean = summary.split.mean
    if summary.step_time_ms is not None:
        rows.append(("step time (ms)", measured(summary, "step_time_ms", summary.step_time_ms.median), ""))
        for field, name in PARTS.items():
            part_ms = getattr(mean, field, None)
            if mean is not None and part_ms is not None and mean.step_ms > 0:
                figures = measured(summary, field, part_ms)
                rows.append((f"  {name}", figures, percent(part_ms / mean.step_ms, ".0f")))
                if field == "exposed_ms" and mean.local_ms:
                    inside = percent(mean.local_ms / mean.step_ms, ".0f")
                    rows.append((f"  {INSIDE}", measured(summary, "local_ms", mean.local_ms), inside))
    if summary.first_loss is not None and summary.last_loss is not None:
        rows.append(("loss, first and last", f"{summary.first_loss:.3g}, {summary.last_loss:.3g}", ""))
    columns = (Column("", words=True), Column("measured"), Column("of the step"))
    known = summary.split.steps.words
    notes = (_MEANS, *([f"exposed communication: {known}"] if known else []))
    has_parts = mean is not None and summary.step_time_ms is not None
    return Sheet(title="", columns=columns, rows=tuple(rows), notes=notes if has_parts else ())


def measured(summary: Summary, name: str, value: float) -> str:
    """A figure of the summary with its confidence interval, if it has one."""
    low, high = summary.intervals.get(name, (value, value))
    return plus_minus(Estimate(value=value, low=low, high=high))


_STOP_REASONS = {SLOWER_THAN_ONE_NODE: " because one node is faster"}


def run_verdict(run: Run, summary: Summary) -> str:
    """One line: the outcome, the speed, and what limits it."""
    took = f" after {format_duration(run.ended_s - run.started_s)}" if run.ended_s is not None else ""
    words = [f"{run.status}{took}{_STOP_REASONS.get(run.stop_reason, '')}"]
    if summary.samples_per_s is not None:
        words[0] += f": {measured(summary, 'samples_per_s', summary.samples_per_s)} samples/s"
    words.append(run.extent)
    lost = [attempt for attempt in run.attempts if attempt.lost_s is not None]
    if lost:
        lost_steps = [attempt.lost_steps for attempt in lost if attempt.lost_steps is not None]
        steps = f"{format_count(sum(lost_steps), 'step')} and " if lost_steps else ""
        lost_s = format_duration(sum(attempt.lost_s or 0.0 for attempt in lost))
        words.append(f"{format_count(len(lost), 'restart')} ({steps}{lost_s} lost)")
    limit = _limit(summary)
    return ", ".join(words) + (f"; {limit}" if limit else "")


def next_step(
    run: Run, summary: Summary | None, *, hosts: str = "", contrast: str = "", one_node: str = ""
) -> str | None:
    """The next command; None if there is none.

    Args:
        run: that ended, or goes on.
        summary: what was measured.
        hosts: its `--hosts` argument; empty if the nodes came from elsewhere.
        contrast: the command that compares its nodes with one; empty if that is done, or cannot be.
        one_node: the command that starts it on one node; empty if nobody typed one.
    """
    if run.stop_reason == SLOWER_THAN_ONE_NODE:
        return footer("Next", one_node or "the same training on one node")
    if run.first_failure is not None:
        return footer("Next", f"multinode logs {run.run_id} --node {shlex.quote(run.first_failure.node)}")
    kind = summary.bottleneck.kind if summary is not None and summary.bottleneck is not None else None
    if run.status != "succeeded" or kind == "no_communication":
        return None
    if kind == "straggler":
        return footer("Next", f"multinode bench{hosts_option(hosts)}")
    following = contrast or (f"multinode advise {run.run_id}" if kind == "network" else "")
    return footer("Next", following) if following else None


def _limit(summary: Summary) -> str:
    bottleneck = summary.bottleneck
    if bottleneck is None:
        return ""
    share = f"{bottleneck.share:.0%} of a step" if bottleneck.share is not None else "most of a step"
    known = f" ({summary.split.steps.words})" if summary.split.steps.words else ""
    worst = max(summary.stragglers, key=lambda straggler: straggler.late_ms, default=None)
    return {
        "network": f"network-bound: {share} is exposed communication{known}",
        "local": f"{share} is exposed communication between the workers of a node{known}",
        "straggler": f"{share} is waiting for {worst.node if worst else 'slower workers'}",
        "data": f"input-bound: {share} is waiting for data",
        "host": f"host-bound: {share} is neither compute nor communication nor data",
        "launch": f"launch-bound: in {share} the GPU waits for the host's kernels, or the host does something else",
        "compute": f"compute-bound: {share} is compute" if bottleneck.share is not None else "no bottleneck found",
        "no_communication": "no gradient synchronization detected: each worker trains a model of its own",
    }.get(bottleneck.kind, "")


def _failure_rows(run: Run) -> Iterator[tuple[str, str]]:
    failure = run.first_failure
    if failure is None:
        return
    at = ""
    if failure.time_s is not None:
        at = f" ({format_duration(max(0.0, failure.time_s - run.started_s))} after the start)"
    yield "Failure", f"{failure.node}: {failure.message}{at}"
    yield from (("", consequence) for consequence in failure.consequences)
    names = {"cause": "Cause", "hint": "Fix"}
    yield from ((names[name], text) for name, text in failure_notes(failure))


def _cause_rows(summary: Summary) -> Iterator[tuple[str, str]]:
    bottleneck = summary.bottleneck
    if (unused := unused_gpus(summary)) is not None:
        yield "GPUs", unused
    if bottleneck is not None and (
        bottleneck.kind == "no_communication" or (bottleneck.kind == "straggler" and not summary.stragglers)
    ):
        yield "Cause", bottleneck.sentence
    for late in summary.stragglers:
        cause = f"; {late.evidence[0]}" if late.evidence else ""
        cost = late.cost or f"{late.node}: the others wait {late.late_ms:.1f} ms per step ({percent(late.share)})"
        yield "Straggler", f"{cost}{cause}"
        if late.hint:
            yield "Fix", late.hint


def failure_notes(failure: Failure) -> tuple[tuple[str, str], ...]:
    """Cause and fix of a failure."""
    return tuple((name, text) for name, text in (("cause", failure.cause), ("hint", failure.hint)) if text)


def run_table(run: Run) -> Table:
    """How one run ended: one row per fact. Its figures are in `summary_sheets`."""
    table = make_table(header=False)
    table.add_column("what", no_wrap=True)
    table.add_column("value")
    table.add_row("run", run.run_id)
    table.add_row("job", Text(sanitize(run.job)))
    table.add_row("state", run.status)
    failure = run.first_failure
    if failure is not None:
        table.add_row("first failure", Text(sanitize(f"{failure.node}: {failure.message}")))
        if failure.time_s is not None:
            at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(failure.time_s))
            table.add_row(
                "failed at", f"{at}, {format_duration(max(0.0, failure.time_s - run.started_s))} after the start"
            )
        for consequence in failure.consequences:
            table.add_row("consequence", Text(sanitize(consequence)))
        for name, text in failure_notes(failure):
            table.add_row(name, Text(sanitize(text)))
    for number, attempt in enumerate(run.attempts, 1):
        table.add_row(f"attempt {number}", Text(sanitize(_attempt_words(attempt))))
    for node in run.nodes:
        ended = node.signal or (f"exit code {node.exit_code}" if node.exit_code is not None else node.state)
        table.add_row(f"node {node.node_rank}", Text(sanitize(f"{node.name}: {ended}")))
    return table


def _attempt_words(attempt: Attempt) -> str:
    begin = f"from {attempt.checkpoint}" if attempt.checkpoint is not None else "from the beginning"
    words = [f"{attempt.run_id} {begin}: {attempt.status} at step {attempt.last_step}"]
    if attempt.left_out:
        batch = f", global batch {attempt.global_batch}" if attempt.global_batch is not None else ""
        words[0] += f" without {', '.join(attempt.left_out)} ({format_count(attempt.world_size, 'worker')}{batch})"
    if attempt.first_failure is not None:
        words.append(f"{attempt.first_failure.node}: {attempt.first_failure.message}")
    words += [f"{name} is not complete: {gap}" for name, gap in attempt.skipped.items()]
    if attempt.lost_s is not None:
        steps = f"{format_count(attempt.lost_steps, 'step')} and " if attempt.lost_steps is not None else ""
        words.append(f"lost {steps}{format_duration(attempt.lost_s)}")
    if attempt.not_restarted is not None:
        words.append(f"not restarted: {attempt.not_restarted}")
    return "; ".join(words)


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
