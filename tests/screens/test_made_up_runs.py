"""Whole screens and pages of stored runs with figures that no lab has: `scripts/test tests/screens --update-golden`."""

from __future__ import annotations

from pathlib import Path

import pytest

from multinode.network.charts import scan_page
from tests.golden import Golden
from tests.network.test_screen import WELL
from tests.screens.made_up_runs import NAMES, store_made_up
from tests.screens.screens import page_text, reported_text, screens_text


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made-up")
    store_made_up(folder / "runs")
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_what_is_shown_of_a_run(folder: Path, golden: Golden, name: str) -> None:
    run_id = f"20260101-{name}"
    golden.check(f"made-up/{name}.txt", screens_text(folder, [f"show {run_id}", f"show {run_id} --details"]))


@pytest.mark.parametrize("name", NAMES)
def test_what_the_page_of_a_run_says(folder: Path, golden: Golden, name: str) -> None:
    golden.check(f"made-up/{name}-page.txt", reported_text(folder, f"20260101-{name}"))


def test_the_list_of_runs(folder: Path, golden: Golden) -> None:
    golden.check("made-up/runs.txt", screens_text(folder, ["runs", "runs --all"]))


@pytest.mark.parametrize("names", [("launch", "failed", "contrast", "scan"), ("sweep", "table")], ids="-".join)
def test_what_the_page_of_several_runs_says(folder: Path, golden: Golden, names: tuple[str, ...]) -> None:
    text = reported_text(folder, *(f"20260101-{name}" for name in names))
    golden.check(f"made-up/{'-'.join(names)}-page.txt", text)


def test_a_run_as_markdown(folder: Path, golden: Golden) -> None:
    commands = [
        f"report 20260101-{name} --format markdown" for name in ("launch", "contrast", "sweep", "bench", "scan")
    ]
    golden.check("made-up/markdown.txt", screens_text(folder, commands))


def test_tables_side_by_side(folder: Path, golden: Golden) -> None:
    commands = [
        "show 20260101-sweep 20260101-table",
        "show 20260101-sweep --sort -samples_per_s --where nodes=1",
        "show 20260101-table --baseline 16 --format csv",
    ]
    golden.check("made-up/tables.txt", screens_text(folder, commands))


def test_what_the_page_of_an_nccl_test_says_that_its_own_verb_writes(golden: Golden) -> None:
    golden.check("made-up/scan-own-page.txt", page_text(scan_page(WELL)))
