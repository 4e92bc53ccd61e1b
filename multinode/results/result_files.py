"""result_files: what verbs leave in a run's directory, and the answer that each of these files is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import PurePath
from typing import Any

import msgspec

from multinode.bench.measure import load_bench
from multinode.bench.screen import show as show_bench
from multinode.contrast.figures import Contrast
from multinode.contrast.screen import show as show_contrast
from multinode.contrast.side import load_contrast
from multinode.contrast.unfinished import load_unfinished
from multinode.contrast.unfinished import show as show_unfinished
from multinode.findings.finding import Finding
from multinode.launch.outcome import show as show_outcome
from multinode.launch.outcome import show_details
from multinode.network.measure import load_scan
from multinode.network.screen import show as show_scan
from multinode.network.tune import load_nccl_tune
from multinode.network.tuning_screen import show as show_nccl_tune
from multinode.records.run_directory import RunDirectory
from multinode.render.sheet import Block, Chart, Charts, Later, NextCommand, Prose, in_detail
from multinode.render.table import WIDE
from multinode.runs.stored_run import StoredRun
from multinode.sweep.measure import load_table
from multinode.sweep.screen import show as show_table
from multinode.tune.request import read_tuning
from multinode.tune.screen import show as show_tuning

_CLOCKS = (
    "Times are in seconds since the end of the run's first step, according to each node's clock. The measured steps "
    "are shaded. Long curves show the minimum and maximum of each interval."
)


class ResultFile(msgspec.Struct, frozen=True):
    """A file that a verb leaves: how it is read, and what is shown of it."""

    name: str
    read: Callable[[RunDirectory], Any]  # None where a run has no such file
    show: Callable[[Any], Iterable[Block]]
    fits: bool = False  # whether `show` takes the width of a terminal too
    is_whole: bool = True  # whether it has figures to compare, or says how far the run is


def _show_contrast(contrast: Contrast | Finding) -> Iterable[Block]:
    return show_contrast(contrast) if isinstance(contrast, Contrast) else (Prose(contrast.message, "strong"),)


RESULT_FILES = (
    ResultFile("tuning.json", read_tuning, show_tuning),
    ResultFile("contrast.json", load_contrast, _show_contrast),
    ResultFile("grid.json", load_unfinished, show_unfinished, is_whole=False),
    ResultFile("sweep.json", load_table, show_table, fits=True),
    ResultFile("bench.json", load_bench, show_bench),
    ResultFile("nccl-test.json", load_scan, show_scan),
    ResultFile("tune.json", load_nccl_tune, show_nccl_tune),
)
"""One for each kind of run that has a result of its own; a launch has its summary."""


def results_of(stored: StoredRun) -> Iterator[tuple[ResultFile, Any]]:
    """The results of a run, decoded; the first one is the verb's own."""
    for file in RESULT_FILES:
        document = stored.result(file.read)
        if document is not None:
            yield file, document


def show_run(stored: StoredRun, directory: PurePath, width: int = WIDE) -> Iterator[Block]:
    """Everything known of a run: its results, how it ended where that is not well, and in detail every table.

    Args:
        stored: the run.
        directory: of the run, as its logs are named.
        width: of the terminal, in characters.
    """
    commands: dict[NextCommand, None] = {}
    for block in _blocks(stored, directory, width):
        if isinstance(block, NextCommand):
            commands[block] = None
        else:
            yield block
    yield from commands


def _blocks(stored: StoredRun, directory: PurePath, width: int) -> Iterator[Block]:
    run, has_results = stored.run, False
    for file, document in results_of(stored):
        blocks = file.show(document, width) if file.fits else file.show(document)  # type: ignore[call-arg]
        # The trials of a tuning are a table too: the first result is the answer.
        yield from in_detail(blocks) if has_results else blocks
        has_results = True
    # Benchmarks train nothing, so figures of a training do not apply.
    summary = stored.summary if run.kind != "nccl-test" else None
    if not has_results or run.status != "succeeded":
        yield from show_outcome(run, summary, directory)
    yield Later(lambda: _samples(stored, has_results=has_results), detail="page")
    yield from show_details(run, summary)


def _samples(stored: StoredRun, *, has_results: bool) -> Iterator[Block]:
    if stored.sampled is not None and any(node.samples for node in stored.sampled.observed.nodes):
        yield Charts(lambda: _step_charts(stored))
    elif not has_results:
        yield Prose("This run has no recorded samples.")


def _step_charts(stored: StoredRun) -> Iterator[Chart]:
    from multinode.profile.charts import loss_chart, split_chart, step_time_chart, timeline

    if stored.sampled is None:
        return
    observed, summary = stored.sampled.observed, stored.summary
    steps = step_time_chart(observed)
    if steps is not None:
        yield Chart(title="step time", figure=steps, name="steps", note=observed.rule)
    split = split_chart(summary.split) if summary is not None else None
    if split is not None and summary is not None:
        bars = -(-len(summary.split.workers) // 8)
        yield Chart(title="where each worker's step goes", figure=split, name="split", rows=bars)
    lanes = timeline(observed)
    if lanes is not None:
        yield Chart(title="machines over time", figure=lanes[0], name="time", rows=lanes[1], note=_CLOCKS)
    loss = loss_chart(observed)
    if loss is not None:
        yield Chart(title="loss", figure=loss, name="loss")
