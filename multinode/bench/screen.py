"""What a bench shows: slow devices with causes and fixes, then charts, and tables with best and worst."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from multinode.bench.figures import BEST, WORST, Anomaly, BenchReport
from multinode.bench.sheets import bench_sheets, main_speeds, small_sheet
from multinode.render.sheet import Block, Chart, Charts, Labels, NextCommand, Prose, Tiles


def show(report: BenchReport) -> Iterator[Block]:
    """The verdict, a small table, causes with their fixes; then charts and every table."""
    headline, *others = _findings(report)
    yield Prose(headline[0], "lead", tone="bad" if report.anomalies else "")
    yield Tiles(tuple(_key_figures(report)))
    yield small_sheet(report)
    yield from headline[1]
    for text, causes in others:
        yield Labels((("Also", text),))
        yield from causes
    yield Charts(lambda: _charts(report))
    yield from (msgspec.structs.replace(sheet, detail="full") for sheet in bench_sheets(report))
    yield from (Prose(note.message, "note", detail="full") for note in report.notes)
    yield NextCommand("Details", f"multinode show {report.run_id} --details", detail="brief")


def _charts(report: BenchReport) -> Iterable[Chart]:
    from multinode.bench.charts import bench_charts  # noqa: PLC0415 - plotly is an extra

    return bench_charts(report)


def next_step(report: BenchReport, given: str) -> NextCommand:
    """The next command; `given` are the options as typed."""
    if report.anomalies:
        return NextCommand("Next", f"fix that, then: multinode bench{given}")
    return NextCommand("Next", f"multinode {'nccl-test' if len(report.nodes) > 1 else 'check'}{given}")


_Causes = tuple[Labels, ...]


def _findings(report: BenchReport) -> list[tuple[str, _Causes]]:
    explained: set[str] = set()
    found: list[tuple[str, _Causes]] = [(part.message, ()) for part in report.unmeasured]
    for anomaly in report.anomalies:
        found.append((anomaly.message, tuple(_cause_rows(anomaly, again=anomaly.cause in explained))))
        explained.add(anomaly.cause)
    return [*found, *([(report.outcome.message, ())] if report.outcome is not None else [])]


def _cause_rows(anomaly: Anomaly, *, again: bool) -> Iterator[Labels]:
    """The likely causes; all but the first, and those of a cause that was shown, are details."""
    if not anomaly.causes and not again:
        yield Labels((("Cause", "unknown: no recorded data explains it"),))
    for number, cause in enumerate(anomaly.causes):
        label = "Also likely" if number else "Cause"
        fix = ("Fix", cause.hint or "")
        yield Labels(((label, cause.message), fix), detail="full" if number or again else "always")


def _key_figures(report: BenchReport) -> Iterator[tuple[str, str]]:
    columns, rows = main_speeds(report)
    for column in columns:
        values = sorted(speed.value.value for row in rows for speed in row.by_column[column] if speed)
        value = column.as_form("figure").text
        if len(values) > 1:
            yield f"{column.title}, {BEST.title} ({column.unit})", value(values[-1])
            yield f"{column.title}, {WORST.title} ({column.unit})", value(values[0])
        elif values:
            yield column.heading, value(values[0])
