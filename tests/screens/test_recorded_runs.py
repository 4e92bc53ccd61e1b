"""What each verb makes of runs that an earlier commit recorded on two lab nodes, as screens, pages and figures.

`scripts/test tests/screens --update-golden` writes what it is now. The runs are those of record_runs.py.
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import msgspec
import pytest

from multinode.profile.summary import summarise_run
from multinode.records.plan import LaunchPlan
from multinode.records.run_directory import RunDirectory
from tests.golden import Golden
from tests.screens.record_runs import ARCHIVE, RECORDINGS
from tests.screens.screens import WIDTHS, document_of, reported_text, screens_text

RUNS = {one.name: f"20260101-{one.name}" for one in RECORDINGS}
ONE, TWO, SCAN = RUNS["one"], RUNS["two"], RUNS["nccltest"]
# Digits of a figure that do not depend on the machine's mathematics library.
_DIGITS = 9
_WIDTH = 140

SCREENS = {
    "runs": ("runs", "runs --all"),
    "compare": (
        f"compare {ONE} {TWO}",
        f"compare {ONE} {TWO} --details",
        f"compare {TWO} {RUNS['script']} --force",
        f"compare {RUNS['contrast']} {RUNS['contrastfailed']}",
        f"compare {RUNS['sweep']} {RUNS['sweepstopped']}",
        f"compare {RUNS['tune']} {RUNS['tunefrom']}",
        f"compare {SCAN} {RUNS['nccltestfailed']}",
        f"compare {RUNS['bench']} {RUNS['benchstopped']}",
        f"compare {SCAN} {RUNS['bench']}",
    ),
    "predict": (
        f"predict {ONE} {TWO} {SCAN} --details",
        f"predict {ONE} {TWO} {SCAN} --link 10 --nodes 4 --batch 4 --accumulation 2 --strategy zero2",
        f"predict {ONE} {TWO} {SCAN} --link 0.1 --average local:16 --grad-compress none,fp16",
    ),
    "advise": (
        f"advise {ONE} {TWO} {SCAN}",
        f"advise {RUNS['contrast']} --details",
        f"advise {RUNS['contrast']} --link 10gbit",
        f"advise {RUNS['script']}",
    ),
    "tables": (
        f"show {RUNS['sweep']} {RUNS['import']}",
        f"show {RUNS['sweep']} --sort -samples_per_s --where nodes=2",
        f"show {RUNS['sweep']} --format csv",
    ),
}
DOCUMENTS = {
    "runs": "runs",
    "compare": f"compare {ONE} {TWO}",
    "predict": f"predict {ONE} {TWO} {SCAN} --link 0.1,1,10 --nodes 2,4",
    "advise": f"advise {ONE} {TWO} {SCAN}",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the recorded runs in `runs`."""
    folder = tmp_path_factory.mktemp("recorded")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder / "runs", filter="data")
    return folder


def test_every_run_is_there(folder: Path) -> None:
    names = {path.name for path in (folder / "runs").iterdir()}
    assert names >= set(RUNS.values())
    assert all(name.startswith(tuple(RUNS.values())) for name in names)


@pytest.mark.parametrize("name", RUNS)
def test_what_is_shown_of_a_run(folder: Path, golden: Golden, name: str) -> None:
    golden.check(f"recorded/{name}.txt", screens_text(folder, [f"show {RUNS[name]}", f"show {RUNS[name]} --details"]))


@pytest.mark.parametrize("name", RUNS)
def test_what_the_page_of_a_run_says(folder: Path, golden: Golden, name: str) -> None:
    golden.check(f"recorded/{name}-page.txt", reported_text(folder, RUNS[name]))


@pytest.mark.parametrize("name", SCREENS)
def test_a_screen(folder: Path, golden: Golden, name: str) -> None:
    # A forecast takes a second, and those of made-up runs are shown at every width.
    widths = WIDTHS[:1] if name in {"predict", "advise"} else WIDTHS
    golden.check(f"recorded/{name}.txt", screens_text(folder, SCREENS[name], widths))


@pytest.mark.parametrize("name", DOCUMENTS)
def test_figures_of_a_document(folder: Path, golden: Golden, name: str) -> None:
    golden.check(f"recorded/{name}.json", figures(document_of(folder, DOCUMENTS[name])))


@pytest.mark.parametrize("name", RUNS)
def test_figures_of_a_stored_run(folder: Path, golden: Golden, name: str) -> None:
    golden.check(f"recorded/{name}.json", figures(document_of(folder, f"show {RUNS[name]}")))


def test_the_summaries_follow_from_the_samples(folder: Path, golden: Golden) -> None:
    """They are computed anew, oldest run first."""
    found = {}
    for name in ("one", "two", "script", "failed", "stopped"):
        directory = RunDirectory.open(folder / "runs", RUNS[name])
        plan = directory.read("plan.json", LaunchPlan)
        assert plan is not None
        stored = (directory.path / "summary.json").read_bytes()
        found[name] = msgspec.to_builtins(summarise_run(directory, plan))
        directory.write_bytes("summary.json", stored)
    golden.check("recorded/summaries.json", figures(found))


def test_what_is_predicted_from_each_run(folder: Path, golden: Golden) -> None:
    commands = [f"predict {run_id} --link 1,10" for run_id in RUNS.values()]
    golden.check("recorded/predict-each.txt", screens_text(folder, commands, WIDTHS[:1]))


def test_the_figures_that_are_exported(folder: Path, golden: Golden) -> None:
    texts = []
    for name, run_id in RUNS.items():
        texts.append(screens_text(folder, [f"export {run_id} prometheus:out.prom csv:tables"], WIDTHS[:1]))
        path = folder / "out.prom"
        if path.exists():
            texts += [path.read_text()] if name in {"two", "contrast", "failed"} else []
            path.unlink()
        for table in sorted((folder / "tables").glob("*/*")):
            lines = table.read_text().splitlines()
            texts.append(f"{table.relative_to(folder)}: {len(lines)} lines\n{lines[0]}\n{lines[-1]}\n")
            table.unlink()
    golden.check("recorded/export.txt", "\n".join(texts))


def figures(value: Any, indent: str = "") -> str:
    """A document as JSON with its numbers rounded; what fits a line is on one."""
    line = _line(value)
    if len(indent) + len(line) <= _WIDTH or not isinstance(value, dict | list):
        return line + ("" if indent else "\n")
    if isinstance(value, dict):
        parts = [f"{_line(name)}: {figures(part, indent + ' ')}" for name, part in value.items()]
    else:
        parts = [figures(part, indent + " ") for part in value]
    begin, end = "{}" if isinstance(value, dict) else "[]"
    inner = f",\n{indent} ".join(parts)
    return f"{begin}\n{indent} {inner}\n{indent}{end}" + ("" if indent else "\n")


def _line(value: Any) -> str:
    return json.dumps(_rounded(value), ensure_ascii=False)


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}")
    if isinstance(value, dict):
        return {name: _rounded(one) for name, one in value.items()}
    return [_rounded(one) for one in value] if isinstance(value, list) else value
