from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from multinode.cli.main import build_app
from tests.screens.made_up_runs import NAMES, store_made_up


@pytest.mark.parametrize("name", NAMES)
def test_show_writes_the_answer_of_every_kind_of_run_in_every_form(made_up: Path, name: str) -> None:
    run_id = f"20260101-{name}"
    beginnings: dict[str, tuple[str, ...]] = {
        "html": ("<!DOCTYPE html>",),
        "md": ("## ",),
        "csv": ("run,table,row,figure,unit,value\n", "label,source,"),
        "json": ("{",),
        "txt": ("",),
    }
    for ending, beginning in beginnings.items():
        path = made_up / f"{name}.{ending}"
        result = CliRunner().invoke(build_app(), ["show", run_id, "-o", str(path)], catch_exceptions=False)
        assert (result.exit_code, result.stdout) == (0, f"{path}\n")
        text = path.read_text()
        assert text.startswith(beginning)
        assert text.count("\n") > 2
        # Only what is verbatim keeps its lines: no page shows a terminal's screen.
        assert "Details     " not in text


@pytest.mark.parametrize("name", NAMES)
def test_each_chart_of_a_page_has_a_name_of_its_own(made_up: Path, name: str) -> None:
    path = made_up / "page.html"
    CliRunner().invoke(build_app(), ["report", f"20260101-{name}", "-o", str(path)], catch_exceptions=False)
    names = re.findall(r'<div id="(run-1-[^"]+)"', path.read_text())
    assert len(names) == len(set(names))
    assert names or name == "lost", "a run that was lost at once has no samples"


@pytest.fixture
def made_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MULTINODE_RUNS", str(tmp_path / "runs"))
    store_made_up(tmp_path / "runs")
    return tmp_path


def test_csv_has_a_line_a_figure_of_what_is_shown_and_calculates_nothing(made_up: Path) -> None:
    path = made_up / "bench.csv"
    CliRunner().invoke(build_app(), ["show", "20260101-bench", "-o", str(path)], catch_exceptions=False)
    rows = list(csv.DictReader(path.read_text().splitlines()))
    values = {(row["table"], row["row"], row["figure"], row["unit"]): row["value"] for row in rows}
    assert (values["memory", "1", "node", ""], values["memory", "1", "copy", "GB/s"]) == ("node0", "1,700 83%")
    assert {row["run"] for row in rows} == {"20260101-bench"}
    assert not any(value.startswith(("=", "+", "-", "@")) for row in rows for value in row.values())


def test_show_of_several_runs_has_each_below_the_other(made_up: Path) -> None:
    shown = CliRunner().invoke(build_app(), ["show", "20260101-bench", "20260101-scan"], catch_exceptions=False).stdout
    assert shown.index("node1 is slow") < shown.index("network OK")
    assert made_up.is_dir()
