"""run_markdown: runs as Markdown for an issue or a wiki, a section each. Charts are the page's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from multinode.bench.screen import bench_lines, bench_sheets
from multinode.cli.reported_run import ReportedRun
from multinode.contrast.screen import contrast_markdown
from multinode.experiment.cell_sheet import cell_markdown
from multinode.launch.outcome import attempt_sheet, failure_notes
from multinode.network.screen import scan_lines
from multinode.profile.summary_sheets import summary_sheets
from multinode.render.sheet import code_markdown, sheet_markdown, text_markdown


def run_markdown(runs: Sequence[ReportedRun]) -> str:
    """Every run under its job's name, most important first."""
    return "\n".join("".join(_parts(one)).rstrip() + "\n" for one in runs)


def _parts(one: ReportedRun) -> Iterator[str]:
    run = one.run
    nodes = ", ".join(node.name for node in run.nodes)
    told = f"run {run.run_id}, {run.status}; {run.extent}: {nodes}"
    yield f"## {text_markdown(run.job)}\n\n{text_markdown(told)}.\n\n"
    if run.first_failure is not None:
        yield f"**{text_markdown(f'{run.first_failure.node}: {run.first_failure.message}')}**\n\n"
        yield "".join(f"- {name}: {text_markdown(text)}\n" for name, text in failure_notes(run.first_failure)) + "\n"
    if one.unread:
        yield f"{text_markdown(one.unread)}\n\n"
    if run.attempts:
        yield sheet_markdown(attempt_sheet(run.attempts))
    if one.contrast is not None:
        yield from contrast_markdown(one.contrast)
    if one.cells is not None:
        yield from cell_markdown(one.cells)
    if one.bench is not None:
        yield code_markdown("\n".join(bench_lines(one.bench))) + "\n"
        yield from (sheet_markdown(sheet) for sheet in bench_sheets(one.bench))
        yield code_markdown("\n".join(one.bench.notes)) + "\n"
    if one.scan is not None:
        yield code_markdown("\n".join(scan_lines(one.scan))) + "\n"
    if one.summary is not None:
        yield from (sheet_markdown(sheet) for sheet in summary_sheets(one.summary))
