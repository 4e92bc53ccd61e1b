"""Compute anew what follows from the records of recorded.tar.xz: summaries, verdicts and tables, with their texts.

    .venv/bin/python -m tests.screens.renew_runs

Records stay as they are: samples, logs, plans, facts, and how each run ended. Runs without samples keep their summary.
"""

from __future__ import annotations

import functools
import io
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path

import msgspec

from multinode.bench.judge import summarise_bench
from multinode.bench.nodes import BenchPart
from multinode.cluster.quoting import as_steps
from multinode.contrast.judge import compare
from multinode.contrast.measure import ContrastRequest, plan_sides, with_outlook
from multinode.contrast.side import CONTRAST_FILE, load_contrast, make_side
from multinode.network.measure import load_scan
from multinode.network.size_scan import read_ring, summarise_scan
from multinode.predict import early_verdict
from multinode.profile.summary import summarise_run
from multinode.records.benchmark import DeviceTest
from multinode.records.run import VERDICT_FILE
from multinode.records.run_directory import RunDirectory
from multinode.records.samples import Sample, parse_samples
from multinode.runs.stored_run import StoredRun
from multinode.series.grid import GridRecord
from multinode.series.series import GRID_FILE
from multinode.sweep.sweep import TABLE_FILE, build_table
from multinode.tables.imported_rows import import_table
from multinode.tune.judge import judge as judge_tuning
from multinode.tune.request import TUNING_FILE, read_tuning, trial_of
from tests.screens.record_runs import ARCHIVE

_BENCH, _PARTS, _SCAN = "bench.json", "parts.json", "nccl-test.json"


def renew(runs: Path) -> None:
    """Write the results of all runs anew, oldest run first: a summary compares itself with earlier runs."""
    stored = sorted((StoredRun(RunDirectory(path)) for path in runs.iterdir()), key=lambda run: run.run.started_s)
    for run in stored:
        if run.plan is not None and any(_samples(run).values()):
            summarise_run(run.directory, run.plan)
    for run in stored:
        _renew_scan(run)
    for run in stored:
        _renew_verdict(run)
        _renew_bench(run)
        _renew_table(run, runs)
        _renew_tuning(run, runs)
        _renew_contrast(run, runs)


def _samples(run: StoredRun) -> Mapping[int, list[Sample]]:
    places = run.plan.places if run.plan is not None else ()
    return {place.node_rank: list(parse_samples(run.directory.sample_lines(place.node_rank))) for place in places}


def _renew_scan(run: StoredRun) -> None:
    report = load_scan(run.directory)
    if report is None:
        return
    plan, samples = run.require_plan(), _samples(run)
    tcp = msgspec.structs.replace(read_ring(plan, samples), pairs=report.tcp.pairs)
    run.directory.write(_SCAN, summarise_scan(plan, run.facts, tcp, samples, report.directory))


def _renew_verdict(run: StoredRun) -> None:
    if (run.directory.path / VERDICT_FILE).is_file() and any(_samples(run).values()):
        run.directory.write(VERDICT_FILE, early_verdict.judge(run.directory).verdict)


def _renew_bench(run: StoredRun) -> None:
    parts = run.directory.read(_PARTS, list[BenchPart])
    if parts is None or run.cluster is None:
        return
    root, test = run.directory.path.parent, None
    for number, part in enumerate(parts):
        measured = StoredRun(RunDirectory(root / (part.run_id or "")))
        test = measured.require_plan().test
        samples = tuple(parse_samples(measured.directory.sample_lines(0)))
        if not samples:
            return
        parts[number] = msgspec.structs.replace(part, facts=measured.facts.get(part.node), samples=samples)
    assert isinstance(test, DeviceTest)
    hint = functools.partial(as_steps, nodes=run.cluster.nodes)
    run.directory.write(_BENCH, summarise_bench(run.run_id, parts, test, hint))


def _renew_table(run: StoredRun, runs: Path) -> None:
    if not (run.directory.path / TABLE_FILE).is_file():
        return
    table = next(run.directory.path.glob("imported.*"), None)
    if table is None:
        build_table(run.directory, runs)
        return
    with tempfile.TemporaryDirectory() as place:
        imported = import_table(Path(place), table, name=run.run.job)
    run.directory.write(TABLE_FILE, msgspec.structs.replace(imported.table, run_id=run.run_id))


def _renew_tuning(run: StoredRun, runs: Path) -> None:
    tuning, record = read_tuning(run.directory), run.directory.read(GRID_FILE, GridRecord)
    if tuning is None or record is None:
        return
    cells = {cell.cell.label: cell for cell in record.cells}
    rows = [row.candidate for row in tuning.rows]
    trials = [trial_of(runs, candidate, cells.get(candidate.label), tuning.judged_by) for candidate in rows]
    run.directory.write(TUNING_FILE, judge_tuning(tuning, trials))


def _renew_contrast(run: StoredRun, runs: Path) -> None:
    record = run.directory.read(GRID_FILE, GridRecord)
    if load_contrast(run.directory) is None or record is None or run.cluster is None:
        return
    planned = plan_sides(run.cluster, [node.slots or 1 for node in run.cluster.nodes], ContrastRequest())
    measured = [[StoredRun(RunDirectory(runs / run_id)) for run_id in cell.run_ids] for cell in record.cells]
    sides = [make_side(side.role, of_side) for side, of_side in zip(planned.sides, measured, strict=True)]
    rule = measured[1][-1].require_summary().rule
    after = compare(sides, mode=planned.mode, why=planned.why, job=run.run.job, rule=rule)
    run.directory.write(CONTRAST_FILE, after)
    run.directory.write(CONTRAST_FILE, with_outlook(after, runs))


def main() -> None:
    """Unpack the archive, renew the results, and pack it again with the same names and times."""
    with tempfile.TemporaryDirectory() as place:
        runs = Path(place) / "runs"
        with tarfile.open(ARCHIVE) as archive:
            archive.extractall(runs, filter="data")
            members = archive.getmembers()
        renew(runs)
        with tarfile.open(ARCHIVE, "w:xz", preset=9) as archive:
            for info in members:
                data = (runs / info.name).read_bytes()
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))


if __name__ == "__main__":
    main()
