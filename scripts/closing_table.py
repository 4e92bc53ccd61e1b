"""Ends the demo: one node against two at each link that was measured, the verdicts, and one table of all.

Reads the runs that the demo stored; measures nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence

from multinode.cli.contrast import print_contrast
from multinode.cli.output import print_table
from multinode.contrast.figures import Contrast, Side
from multinode.contrast.judge import compare
from multinode.contrast.measure import with_outlook
from multinode.contrast.side import make_side
from multinode.findings.finding import Finding
from multinode.predict.screen import link_words
from multinode.records.run_directory import runs_root
from multinode.render.sheet import percent
from multinode.render.table import make_table
from multinode.runs.stored_run import StoredRun, load_runs
from multinode.stats.estimate import Estimate
from multinode.stats.unknown import Unknown, or_none, reason_of
from multinode.units import format_rate


def main() -> None:
    """Print a verdict per link, then the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--since", type=float, default=0.0, metavar="SECONDS", help="leave out what ran before")
    since = parser.parse_args().since
    contrasts = _contrasts(list(_trainings(since)))
    for link, contrast in contrasts.items():
        print(f"\ndemo: one node, or two with {format_rate(link)} between them?")
        print_contrast(contrast)
    _print_table(contrasts)


def _trainings(since: float) -> Iterator[StoredRun]:
    for stored in load_runs(runs_root()):
        run = stored.run
        if (run.kind, run.status) == ("launch", "succeeded") and run.started_s >= since:
            yield stored


def _contrasts(runs: Sequence[StoredRun]) -> Mapping[float, Contrast]:
    """One node against two, by the rate of the link between the two, the fastest first."""
    one = [run for run in runs if len(run.node_names) == 1]
    links = sorted({run.link_gbit_per_s for run in runs if run.link_gbit_per_s is not None}, reverse=True)
    return {link: _contrast(one, [run for run in runs if run.link_gbit_per_s == link]) for link in links}


def _contrast(one: Sequence[StoredRun], two: Sequence[StoredRun]) -> Contrast:
    compared = compare(
        [make_side("baseline", one), make_side("candidate", two)],
        mode="same-workers",
        why=Finding(message="the same two workers, interleaved"),
        job="the demo's training",
        rule=two[-1].require_summary().rule,
    )
    return with_outlook(compared, runs_root())


def _print_table(contrasts: Mapping[float, Contrast]) -> None:
    baseline = next(iter(contrasts.values())).baseline
    table = make_table(
        caption=f"\N{PLUS-MINUS SIGN}: 95% confidence interval over {baseline.samples_per_s.repeats} repeats",
    )
    for name in ("", "samples/s", "exposed\ncomm", "against 1 node"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    table.add_row("1 node", *_figures(baseline), "-")
    for link, contrast in contrasts.items():
        table.add_row(f"2 nodes, {format_rate(link)}", *_figures(contrast.candidate), _against(contrast.speedup))
    print("\nThe same training with the same two workers, on one node and on two")
    print_table(table)
    print(f"\n{_break_even(next(iter(contrasts.values())))}")


def _figures(side: Side) -> Iterator[str]:
    yield side.samples_per_s.text()
    yield percent(or_none(side.exposed_share), ".0f")


def _against(speedup: Estimate) -> str:
    """How many times faster, or slower, with the interval; both where the interval holds 1."""
    if speedup.low <= 1 <= speedup.high:
        return f"inconclusive ({speedup.text('times_range')})"
    return speedup.text("faster")


def _break_even(contrast: Contrast) -> str:
    """The link from which on a full second node pays."""
    forecast = contrast.forecast
    if isinstance(forecast, Unknown) or forecast.break_even is None:
        return f"Break-even unknown: {reason_of(forecast)}"
    found = forecast.break_even
    needed = found.full_beats_one or found.beats_one
    workers = found.one_node_workers
    return f"Break-even: {link_words(needed)}, predicted, with {workers} workers on each node"


if __name__ == "__main__":
    main()
