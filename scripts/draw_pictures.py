"""Draws docs/pictures from the newest stored contrast: its live table and verdict as SVG, its report as PNG.

`scripts/make_pictures` measures it. Measures nothing itself.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
from rich.console import Console
from rich.text import Text

from multinode.cli.contrast import print_contrast
from multinode.contrast.figures import Contrast
from multinode.contrast.side import load_contrast
from multinode.launch.progress_table import ProgressTable
from multinode.records.plan import LaunchPlan
from multinode.records.progress import RunProgress, start_progress
from multinode.records.run import Run
from multinode.records.run_directory import RunDirectory, list_runs, runs_root
from multinode.records.samples import Sample, StepSample, parse_samples
from multinode.results.run_page import load_report, write_answer
from tests.browser.chromium import View, chromium

PICTURES = Path(__file__).parent.parent / "docs" / "pictures"

_JOB = "configs/tiny_sft.yaml"
_COLUMNS = 100
_PAGE_WIDTH, _PAGE_HEIGHT = 1280, 1300
# How far the training of the live table is.
_PART = 0.8


def main() -> None:
    """Write the three pictures and name them."""
    directory, contrast = _newest_contrast()
    PICTURES.mkdir(exist_ok=True)
    # Rich asks the environment how wide the terminal is, and whether it is one.
    os.environ.update(COLUMNS=str(_COLUMNS), FORCE_COLOR="1")

    live = _terminal()
    live.print(ProgressTable(_progress(RunDirectory.open(runs_root(), contrast.candidate.run_ids[0]))))
    _save(live, f"multinode launch --hosts lab {_JOB}", "live")

    verdict = _terminal()
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        print_contrast(contrast, next_command="multinode tune --judge speed --from last --candidates 2 --hosts lab")
    verdict.print(Text.from_ansi(said.getvalue()))
    _save(verdict, f"multinode contrast --hosts lab --repeats {contrast.speedup.repeats} {_JOB}", "verdict")

    _photograph(directory)


def _newest_contrast() -> tuple[RunDirectory, Contrast]:
    for directory in map(RunDirectory, reversed(list_runs(runs_root()))):
        contrast = load_contrast(directory)
        if isinstance(contrast, Contrast):
            return directory, contrast
    raise SystemExit(f"there is no contrast in {runs_root()}: scripts/make_pictures measures one")


def _progress(directory: RunDirectory) -> RunProgress:
    """The run as it was when most of its steps were done, from what its nodes had sent by then."""
    plan, run = directory.read("plan.json", LaunchPlan), directory.read("run.json", Run)
    if plan is None or run is None:
        raise SystemExit(f"{directory} is no run of a training")
    start = start_progress(plan)
    samples = [list(parse_samples(directory.sample_lines(node.node_rank))) for node in start.nodes]
    steps = [one for one in samples[0] if isinstance(one, StepSample)]
    at = steps[int(len(steps) * _PART)]
    for node, told in zip(start.nodes, samples, strict=True):
        node.take(_until(told, at))
        node.state = "running"
    return msgspec.structs.replace(start, elapsed_s=at.time_s - run.started_s)


def _until(samples: list[Sample], at: StepSample) -> Iterator[Sample]:
    for sample in samples:
        if getattr(sample, "step", 0) <= at.step and getattr(sample, "time_s", 0.0) <= at.time_s:
            yield sample


def _terminal() -> Console:
    return Console(record=True, width=_COLUMNS, file=io.StringIO(), force_terminal=True)


def _save(console: Console, command: str, name: str) -> None:
    svg = console.export_svg(title=f"$ {command}", unique_id=name)
    # Rich names fonts on a server; the reader's own monospace does.
    _tell(_write(f"{name}.svg", re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL).encode()))


def _photograph(directory: RunDirectory) -> None:
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "report.html"
        write_answer(load_report(runs_root(), [directory.run_id]), "html", page)
        with chromium(Path(folder)) as browser:
            browser.open(page, View(_PAGE_WIDTH))
            browser.picture(PICTURES / "report.png", _PAGE_HEIGHT)
    _tell(PICTURES / "report.png")


def _write(name: str, data: bytes) -> Path:
    (PICTURES / name).write_bytes(data)
    return PICTURES / name


def _tell(path: Path) -> None:
    print(f"{path.relative_to(Path.cwd())}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
