from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from multinode.cli.main import build_app
from multinode.profile.step_split import KnownSteps
from multinode.records.run_directory import RunDirectory
from tests import make
from tests.contrast.contrasts import CONTRAST, CONTRAST_RUN
from tests.golden import Golden, error_of
from tests.profile.observing import RUN, SUMMARY, store_observed


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with one run in it that was recorded, and one that never got so far; the first is named first."""
    root = tmp_path / "runs"
    monkeypatch.setenv("MULTINODE_RUNS", str(root))
    monkeypatch.chdir(tmp_path)
    store_observed(root, torn=b'{"kind": "torn', summary=SUMMARY)
    make.store(root, "20260103-bb", run=msgspec.structs.replace(RUN, run_id="20260103-bb"))
    return root


def store_contrast(root: Path, contrast: object) -> None:
    make.store(root, CONTRAST_RUN.run_id, run=CONTRAST_RUN, contrast=contrast)


def report(*args: str) -> str:
    result = CliRunner().invoke(build_app(), ["report", *args], catch_exceptions=False, standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return result.stdout


def test_the_page_of_a_run_lies_here_under_its_name(runs: Path, tmp_path: Path) -> None:
    assert report("20260102") == "20260102-aa.html\n"
    page = (tmp_path / "20260102-aa.html").read_text()
    assert "box1 ens1f0" in page
    assert "<b>401.2</b>" in page
    assert runs.is_dir()


def test_the_page_lies_where_it_was_asked_for_and_replaces_an_earlier_one(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "out.html").write_text("old")
    document = json.loads(report("20260102", "20260103", "-o", "out.html", "--json"))
    assert document["schema"] == "multinode.report/2"
    assert (document["path"], document["runs"]) == ("out.html", ["20260102-aa", "20260103-bb"])
    assert document["samples"][0] == str(runs / "20260102-aa" / "samples")
    page = (tmp_path / "out.html").read_text()
    assert page.count('<section class="run"') == 2


def test_markdown_is_printed_or_lies_where_it_was_asked_for(runs: Path, tmp_path: Path) -> None:
    text = report("20260102", "--format", "markdown")
    assert text.startswith("## sft.yaml (LLaMA-Factory sft)\n")
    assert not list(tmp_path.glob("*.html"))
    assert report("20260102", "-o", "out.md") == "out.md\n"
    assert (tmp_path / "out.md").read_text() == text
    document = json.loads(report("20260102", "--format", "markdown", "-o", "out.txt", "--json"))
    assert (document["path"], (tmp_path / "out.txt").read_text()) == ("out.txt", text)
    assert runs.is_dir()


def test_a_contrast_s_page_shows_its_figures(runs: Path, tmp_path: Path) -> None:
    store_contrast(runs, CONTRAST)
    report("20260104")
    assert f'<p class="lead">{CONTRAST.verdict.message}</p>' in (tmp_path / "20260104-cc.html").read_text()
    assert f"**{CONTRAST.verdict.message}**" in report("20260104", "--format", "markdown")


def test_a_contrast_of_another_release_is_said_to_be_one(runs: Path, golden: Golden) -> None:
    store_contrast(runs, {"schema": "multinode.contrast/2", "baseline": 0.12})
    golden.check("report_other_release.md", report("20260104", "--format", "markdown"))


@pytest.mark.usefixtures("runs")
def test_the_same_run_named_twice_is_reported_once(tmp_path: Path) -> None:
    report("20260102", "20260102-aa")
    assert (tmp_path / "20260102-aa.html").read_text().count('<section class="run"') == 1


@pytest.mark.usefixtures("runs")
def test_csv_files_lie_in_a_directory_that_is_made(tmp_path: Path) -> None:
    written = report("20260102", "--format", "csv", "-o", "a/b").split()
    assert written == [
        "a/b/steps.csv",
        "a/b/network.csv",
        "a/b/gpus.csv",
        "a/b/cpu.csv",
        "a/b/collectives.csv",
        "a/b/calls.csv",
    ]
    assert len((tmp_path / "a/b/steps.csv").read_text().splitlines()) == 161
    assert not list(tmp_path.glob("*.html"))


def test_what_cannot_be_done_is_refused(runs: Path, tmp_path: Path, golden: Golden) -> None:
    (tmp_path / "file").write_text("")
    every = ("2027", "-o nowhere/out.html", "-o out.pdf", "--format csv -o file/d", "--format markdown --json")
    refused = {words: error_of(report, *words.split()) for words in every}
    store_contrast(runs, {"schema": CONTRAST.schema, "baseline": 0.12})
    refused["a contrast that is broken"] = error_of(report, "20260104")
    golden.check_errors("refused_report", refused, tmp_path)


@pytest.mark.usefixtures("runs")
def test_show_says_what_holds_a_run_up_and_json_has_the_figures(golden: Golden) -> None:
    runner = CliRunner()
    shown = runner.invoke(build_app(), ["show", "20260102"]).stdout
    golden.check("show.txt", shown)
    golden.check("show_details.txt", runner.invoke(build_app(), ["show", "20260102", "--details"]).stdout)
    document = json.loads(runner.invoke(build_app(), ["show", "20260102", "--json"]).stdout)
    assert (document["run_id"], document["contrast"]) == ("20260102-aa", None)
    assert document["schema"] == "multinode.launch/2"
    assert document["summary"]["comm"]["exposed_ms"]["value"] == 120.5


def test_a_tile_says_of_how_many_steps_exposed_communication_is(runs: Path) -> None:
    split = msgspec.structs.replace(SUMMARY.split, steps=KnownSteps(known=4, measured=25))
    RunDirectory(runs / RUN.run_id).write("summary.json", msgspec.structs.replace(SUMMARY, split=split))
    report("20260102", "--output", str(runs / "page.html"))
    assert f"({split.steps.words})" in (runs / "page.html").read_text()


def test_without_plotly_there_are_no_pages_and_all_else(runs: Path, golden: Golden) -> None:
    program = "import sys; sys.modules['plotly'] = None; from multinode.cli.main import run; run()"

    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", program, *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)

    page = call("report", "20260102")
    assert page.returncode == 1
    golden.check("no_plotly.txt", page.stderr.replace(sys.executable, "PYTHON"))
    assert not list(runs.parent.glob("*.html"))
    assert call("report", "20260102", "--format", "markdown").stdout == report("20260102", "--format", "markdown")
    assert call("show", "20260102", "--details").returncode == 0
