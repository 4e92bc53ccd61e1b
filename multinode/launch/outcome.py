"""The outcome of runs: a screen with what happened first, and the next command."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import PurePath
from typing import Any

from multinode.cluster.quoting import hosts_option
from multinode.figures.figure import Figure
from multinode.profile.step_split import INSIDE, PARTS
from multinode.profile.summary import Summary, unused_gpus
from multinode.profile.throughput import MFU, MODEL_TFLOPS, SAMPLES_PER_S, STEP_TIME, TGS
from multinode.records.run import SLOWER_THAN_ONE_NODE, Run
from multinode.render.sheet import (
    Block,
    Column,
    Labels,
    Later,
    NextCommand,
    Prose,
    Sheet,
    Tiles,
    Tone,
    in_detail,
    percent,
)
from multinode.stats.estimate import PLUS_MINUS, exactly
from multinode.stats.unknown import Unknown, or_none
from multinode.units import UNKNOWN, format_count, format_duration, format_figure


def show(run: Run, summary: Summary | None, directory: PurePath) -> Iterator[Block]:
    """The verdict, time of a step, slow nodes, and what to do; of a failed run what happened, with figures in detail.

    Args:
        run: that ended, or goes on.
        summary: what was measured; None if it ended too early.
        directory: of the run, as its logs are named.
    """
    summary = summary or Summary(run_id=run.run_id, steps=0, steady_steps=0, rule="")
    if has_ending(run):
        from multinode.launch.ending import show_ending

        steps = f", {format_count(summary.steps, 'step')}" if summary.steps else ""
        yield show_ending(run, f"{run.job}: {_how_it_ended(run)}{steps}", directory)
    yield from in_detail(_figures(run, summary)) if has_ending(run) else _figures(run, summary)
    yield NextCommand("Details", f"multinode show {run.run_id} --details", detail="brief")


def show_details(run: Run, summary: Summary | None) -> Iterator[Block]:
    """How the run and each of its attempts and nodes ended, and every table of what was measured."""
    from multinode.launch.ending import attempt_sheet, run_labels
    from multinode.profile.summary_sheets import summary_sheets

    yield run_labels(run)
    yield attempt_sheet(run.attempts)
    yield from in_detail(summary_sheets(summary) if summary is not None else ())


def _figures(run: Run, summary: Summary) -> Iterator[Block]:
    yield Prose(run_verdict(run, summary), "lead", tone=_tone(run, summary))
    yield Later(lambda: [Tiles(tuple(key_figures(summary)))], detail="page")
    yield step_sheet(summary)
    rows = [("Run", f"{run.run_id}, {run.job}")]
    if summary.steps:
        rows.append(("Steps", f"{summary.steady_steps} of {summary.steps} measured; {summary.rule}"))
    yield Labels((*rows, *_attempt_rows(run), *_cause_rows(summary)))


def key_figures(summary: Summary) -> Iterator[tuple[str, str]]:
    """The main figures that are known, each a name with its unit and a value."""
    from multinode.profile.measured import EXPOSED_SHARE
    from multinode.profile.nics import BUSIEST_LINK

    used, step_times = or_none(summary.utilisation), or_none(summary.step_time_ms)
    shares = [share for node in summary.nodes for nic in node.nics if (share := or_none(nic.share)) is not None]
    figures: tuple[tuple[Figure[Any], object], ...] = (
        (STEP_TIME, step_times.median if step_times else None),
        (SAMPLES_PER_S, summary.samples_per_s),
        (TGS, summary.tgs),
        (EXPOSED_SHARE, summary.comm.exposed_share),
        (BUSIEST_LINK, max(shares, default=None)),
        (MFU, used.mfu if used else None),
        (MODEL_TFLOPS, used.model_tflops if used else None),
    )
    for figure, value in figures:
        if (text := figure.text(value)) != UNKNOWN:
            known_steps = summary.split.steps.words if figure is EXPOSED_SHARE else ""
            yield figure.heading, f"{text} ({known_steps})" if known_steps else text


def _tone(run: Run, summary: Summary) -> Tone:
    if run.status != "succeeded":
        return "" if run.status == "running" else "bad"
    kind = summary.bottleneck.kind if summary.bottleneck is not None else "unknown"
    return "good" if kind == "compute" else "bad" if kind == "no_communication" else "doubtful"


_MEANS = (
    f"{PLUS_MINUS}: 95% confidence interval; step time is the median; its parts are means, so they add up to the mean "
    "step time"
)


def step_sheet(summary: Summary) -> Sheet:
    """Speed and step split, with confidence intervals."""
    rows = []
    rate, times, mean = or_none(summary.samples_per_s), or_none(summary.step_time_ms), or_none(summary.split.mean)
    if rate is not None:
        rows.append((SAMPLES_PER_S.title, rate.text(), ""))
    if times is not None:
        rows.append((STEP_TIME.heading, times.median.text("ms"), ""))
        for part in PARTS:
            part_ms = or_none(getattr(mean, part.name, None))
            if mean is not None and part_ms is not None and mean.step_ms > 0:
                exposed = or_none(summary.comm.exposed_ms) if part.name == "exposed_ms" else None
                figures = (exposed or exactly(part_ms)).text("ms")
                rows.append((f"  {part.title}", figures, percent(part_ms / mean.step_ms, ".0f")))
                if part.name == "exposed_ms" and mean.local_ms:
                    inside = percent(mean.local_ms / mean.step_ms, ".0f")
                    rows.append((f"  {INSIDE}", exactly(mean.local_ms).text("ms"), inside))
    first, last = or_none(summary.first_loss), or_none(summary.last_loss)
    if first is not None and last is not None:
        rows.append(("loss, first and last", f"{format_figure(first)}, {format_figure(last)}", ""))
    columns = (Column("", words=True), Column("measured"), Column("of the step"))
    has_parts = mean is not None and times is not None
    known = summary.split.steps.words if has_parts else ""
    return Sheet(
        title="",
        columns=columns,
        rows=tuple(rows),
        notes=(f"exposed communication: {known}",) if known else (),
        legend=(_MEANS,) if has_parts else (),
    )


_STOP_REASONS = {SLOWER_THAN_ONE_NODE: " because one node is faster"}


def has_ending(run: Run) -> bool:
    """Whether the screen of a run says what happened in place of its figures."""
    return run.first_failure is not None or run.hang is not None


def run_verdict(run: Run, summary: Summary) -> str:
    """One line: the outcome, the speed, and what limits it."""
    rate = summary.samples_per_s
    speed = "" if isinstance(rate, Unknown) else f": {rate.text()} samples/s"
    limit = _limit(summary)
    return _how_it_ended(run, speed) + (f"; {limit}" if limit else "")


def _how_it_ended(run: Run, speed: str = "") -> str:
    took = f" after {format_duration(run.ended_s - run.started_s)}" if run.ended_s is not None else ""
    words = [f"{run.outcome}{took}{_STOP_REASONS.get(run.stop_reason, '')}{speed}", run.extent]
    lost = [attempt for attempt in run.attempts if attempt.lost_s is not None]
    if lost:
        lost_steps = [attempt.lost_steps for attempt in lost if attempt.lost_steps is not None]
        steps = f"{format_count(sum(lost_steps), 'step')} and " if lost_steps else ""
        lost_s = format_duration(sum(attempt.lost_s or 0.0 for attempt in lost))
        words.append(f"{format_count(len(lost), 'restart')} ({steps}{lost_s} lost)")
    return ", ".join(words)


def _attempt_rows(run: Run) -> Iterator[tuple[str, str]]:
    if run.attempts:
        from multinode.launch.ending import attempt_words

        yield from ((f"Attempt {number}", attempt_words(attempt)) for number, attempt in enumerate(run.attempts, 1))


def next_step(
    run: Run, summary: Summary | None, *, hosts: str = "", contrast: str = "", one_node: str = ""
) -> NextCommand | None:
    """The next command; None if there is none.

    Args:
        run: that ended, or goes on.
        summary: what was measured.
        hosts: its `--hosts` argument; empty if the nodes came from elsewhere.
        contrast: the command that compares its nodes with one; empty if that is done, or cannot be.
        one_node: the command that starts it on one node; empty if nobody typed one.
    """
    if run.stop_reason == SLOWER_THAN_ONE_NODE:
        return NextCommand("Next", one_node or "the same job on one node")
    if run.first_failure is not None:
        return NextCommand("Next", f"multinode logs {run.run_id} --node {shlex.quote(run.first_failure.node)}")
    kind = summary.bottleneck.kind if summary is not None and summary.bottleneck is not None else None
    if run.status != "succeeded" or kind == "no_communication":
        return None
    if kind == "straggler":
        return NextCommand("Next", f"multinode bench{hosts_option(hosts)}")
    following = contrast or (f"multinode advise {run.run_id}" if kind == "network" else "")
    return NextCommand("Next", following) if following else None


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
        "launch": f"launch-bound: for {share}, the GPU waits while the host launches kernels or does other work",
        "compute": f"compute-bound: {share} is compute" if bottleneck.share is not None else "no bottleneck found",
        "no_communication": "no gradient synchronization detected: each worker trains its own model",
    }.get(bottleneck.kind, "")


def _cause_rows(summary: Summary) -> Iterator[tuple[str, str]]:
    bottleneck = summary.bottleneck
    if (unused := unused_gpus(summary)) is not None:
        yield "GPUs", unused
    if bottleneck is not None and (
        bottleneck.kind == "no_communication" or (bottleneck.kind == "straggler" and not summary.stragglers)
    ):
        yield "Cause", bottleneck.message
    for late in summary.stragglers:
        yield "Straggler", "; ".join([late.message, *(cause.message for cause in late.causes[:1])])
        if late.hint:
            yield "Fix", late.hint
