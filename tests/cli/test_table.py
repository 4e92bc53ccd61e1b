from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from multinode.cli import contrast, report, runs
from multinode.records.run_directory import RunDirectory
from multinode.runs.listing import run_row, runs_table
from multinode.runs.stored_run import load_runs
from multinode.sweep.measure import build_table
from tests.golden import Golden, error_of
from tests.sweep.cells import PUBLISHED, SWEEP_RUN
from tests.sweep.stored_sweep import store_sweep

SWEEP_ID, IMPORT_ID = SWEEP_RUN.run_id, PUBLISHED.run_id


def app() -> typer.Typer:
    built = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode=None)
    for verb in (contrast, report, runs):
        verb.register(built)
    return built


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory; a sweep and an import are stored."""
    stored = tmp_path / "runs"
    monkeypatch.setenv("MULTINODE_RUNS", str(stored))
    monkeypatch.chdir(tmp_path)
    build_table(store_sweep(stored), stored)
    directory = RunDirectory.create(stored, IMPORT_ID)
    imported = msgspec.structs.replace(
        SWEEP_RUN, run_id=IMPORT_ID, kind="import", has_parts=False, nodes=(), world_size=0
    )
    directory.write("run.json", imported)
    directory.write("sweep.json", PUBLISHED)
    return tmp_path


def run(*args: str) -> str:
    result = CliRunner().invoke(app(), list(args), catch_exceptions=False, standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return result.stdout


def cells(*args: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(run("show", *args, "--json"))["cells"]
    return found


@pytest.mark.usefixtures("root")
def test_a_sweep_s_table_is_shown_and_json_is_the_document() -> None:
    text = run("show", SWEEP_ID)
    assert "1x2-lora-batch1" in text
    assert "OOM" in text
    document = json.loads(run("show", SWEEP_ID, "--format", "json"))
    assert document["schema"] == "multinode.sweep/3"
    assert [one["label"] for one in document["cells"]][3] == "1x2-full-batch2"


@pytest.mark.usefixtures("root")
def test_it_is_sorted_filtered_and_relative_to_what_was_asked_for() -> None:
    speeds = [
        one["samples_per_s"]["value"] for one in cells(SWEEP_ID, "--sort", "-samples_per_s", "--where", "nodes>=1")[:3]
    ]
    assert speeds == sorted(speeds, reverse=True)
    rows = cells(SWEEP_ID, "--where", "nodes=1", "--where", "state=measured", "--baseline", "2x2-lora-batch2")
    assert [one["label"] for one in rows] == ["1x2-lora-batch1", "1x2-lora-batch2"]
    assert all(one["relative"]["value"] < 1 for one in rows)


def test_prices_of_a_file_and_a_deadline_name_the_cheapest(root: Path) -> None:
    (root / "prices.yaml").write_text("currency: EUR\ndevices:\n  RTX 4090: {hourly: 0.4, purchase: 1700}\n")
    asked = ("show", SWEEP_ID, "--prices", "prices.yaml", "--deadline", "8h")
    document = json.loads(run(*asked, "--json"))
    assert document["cheapest"]["deadline_s"] == 8 * 3600
    assert document["cheapest"]["label"] in {one["label"] for one in document["cells"]}
    assert document["cheapest"]["message"] in " ".join(run(*asked).split())


def test_every_form_is_printed_or_written_where_it_was_asked_for(root: Path) -> None:
    markdown = run("show", SWEEP_ID, "--format", "markdown")
    assert "| 1x2-full-batch2 |" in markdown
    assert len(list(csv.DictReader(io.StringIO(run("show", SWEEP_ID, "--format", "csv"))))) == 4
    for name, beginning in {
        "t.md": "## sft.yaml",
        "t.csv": "label,source",
        "t.html": "<!DOCTYPE html>",
        "t.txt": "The fastest is",
        "t.json": "{",
    }.items():
        assert run("show", SWEEP_ID, "-o", name) == f"{name}\n"
        assert (root / name).read_text().startswith(beginning)
    assert run("show", SWEEP_ID, "--format", "csv", "-o", "t.txt") == "t.txt\n"
    assert (root / "t.txt").read_text().startswith("label,")
    assert json.loads(run("show", SWEEP_ID, "-o", "t.html", "--json"))["run_id"] == SWEEP_ID


def test_what_cannot_be_shown_is_refused(root: Path, golden: Golden) -> None:
    lines = (
        *(f"{SWEEP_ID} --format html", f"{SWEEP_ID} --format csv --json", f"{SWEEP_ID} -o nowhere/t.md"),
        *(f"{SWEEP_ID} -o t.xlsx", f"--where nodes= {SWEEP_ID}", f"{SWEEP_ID} --deadline soon"),
        *(f"{SWEEP_ID} --prices gone.yaml", f"{SWEEP_ID}-1x2-lora-batch1-1 --sort nodes"),
    )
    golden.check_errors("refused_show", {line: error_of(run, "show", *line.split()) for line in lines}, root)


@pytest.mark.usefixtures("root")
def test_show_begins_with_the_table_of_a_sweep_or_an_import() -> None:
    shown = run("show", SWEEP_ID)
    assert shown.startswith("The fastest is 2x2-lora-batch2")
    document = json.loads(run("show", SWEEP_ID, "--json"))
    assert document["sweep"]["schema"] == "multinode.sweep/3"
    assert "QLoRA paged" in run("show", IMPORT_ID)
    kinds = {one["run_id"]: one["kind"] for one in json.loads(run("runs", "--json"))["runs"]}
    assert (kinds[SWEEP_ID], kinds[IMPORT_ID]) == ("sweep", "import")


@pytest.mark.usefixtures("root")
def test_several_are_one_table_and_two_are_compared_as_one() -> None:
    document = json.loads(run("show", SWEEP_ID, IMPORT_ID, "--json"))
    assert document["run_id"].split(",") == [SWEEP_ID, IMPORT_ID]
    assert run("compare", SWEEP_ID, IMPORT_ID) == run("show", SWEEP_ID, IMPORT_ID)


def test_a_report_has_one_table_s_page_or_several_tables_in_one(root: Path) -> None:
    run("report", SWEEP_ID)
    alone = (root / f"{SWEEP_ID}.html").read_text().split("<body>")[1]
    assert "<h2>samples/s by cell</h2>" in alone
    run("report", SWEEP_ID, IMPORT_ID, "-o", "both.html")
    both = (root / "both.html").read_text().split("<body>")[1]
    assert both.count('<section class="run"') == 1
    assert f"22 cells of {SWEEP_ID} and {IMPORT_ID}" in both
    assert "| 1x2-lora-batch1 |" in run("report", SWEEP_ID, IMPORT_ID, "--format", "markdown")


def test_a_report_of_a_table_beside_a_run_has_a_section_each(root: Path) -> None:
    run("report", SWEEP_ID, f"{SWEEP_ID}-1x2-lora-batch1-1", "-o", "both.html")
    assert (root / "both.html").read_text().count('<section class="run"') == 2


def test_a_report_s_csv_files_are_cells_samples_or_both(root: Path) -> None:
    assert run("report", SWEEP_ID, IMPORT_ID, "--format", "csv", "-o", "a").split() == ["a/cells.csv"]
    assert len((root / "a/cells.csv").read_text().splitlines()) == 23
    written = run("report", SWEEP_ID, f"{SWEEP_ID}-1x2-lora-batch1-1", "--format", "csv", "-o", "b").split()
    assert {"b/cells.csv", "b/steps.csv"} <= set(written)


@pytest.mark.usefixtures("root")
def test_runs_lists_a_sweep_as_one_line_of_at_most_100_columns() -> None:
    cells = [f"{SWEEP_ID}-1x2-lora-batch1", f"{SWEEP_ID}-2x2-lora-batch1"]
    for name in cells:
        directory = RunDirectory.create(Path("runs"), name)
        part = msgspec.structs.replace(
            SWEEP_RUN, run_id=name, job="configs/two_boxes_lora.yaml", part_of=SWEEP_ID, has_parts=False
        )
        directory.write("run.json", part)
    listed = run("runs").splitlines()
    assert [line.split()[0] for line in listed[3:]] == sorted([SWEEP_ID, IMPORT_ID])
    assert {line.split()[0] for line in run("runs", "--all").splitlines()[3:]} >= {SWEEP_ID, *cells}
    assert {one["run_id"] for one in json.loads(run("runs", "--json"))["runs"]} >= {SWEEP_ID, *cells}
    console = Console(width=100, file=io.StringIO())
    with console.capture() as captured:
        console.print(runs_table(rows := [run_row(stored) for stored in load_runs(Path("runs"))]))
    assert len(captured.get().splitlines()) == 3 + len(rows)
