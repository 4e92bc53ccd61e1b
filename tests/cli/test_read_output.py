"""`multinode nccl-test --read` as a command: exit codes, standard input, and options that do not belong to it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from multinode.cli.main import build_app
from tests.golden import Golden
from tests.network.test_read_scan import PASTED


def read(*words: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(build_app(), ["nccl-test", *words], input=stdin)


@pytest.mark.parametrize(
    ("name", "words", "code"),
    [
        ("nccl-tests-119", ("--link", "4x200gbit", "--nodes", "3"), 0),
        # A slow network is a verdict; wrong values and tests that ran apart are failures.
        ("iperf-55", ("--link", "100gbit"), 0),
        ("nccl-tests-131", (), 1),
        ("nccl-tests-294", (), 1),
        ("nccl-tests-119", ("--min-busbw", "90"), 0),
        ("nccl-tests-119", ("--min-busbw", "99"), 1),
    ],
)
def test_the_exit_code_says_whether_there_was_a_result(name: str, words: tuple[str, ...], code: int) -> None:
    done = read("--read", str(PASTED / f"{name}.txt"), *words)
    assert done.exit_code == code, done.output


def test_a_pipe_is_read_and_the_document_has_every_figure() -> None:
    done = read("--read", "-", "--link", "4x200gbit", "--json", stdin=(PASTED / "nccl-tests-119.txt").read_text())
    document = json.loads(done.stdout)
    assert document["schema"] == "multinode.nccl-test-read/2"
    (scan,) = document["scans"]
    assert (scan["link_gbit_per_s"], scan["verdict"]["code"], len(scan["rows"])) == (800, "ok", 4)
    assert scan["layout"]["nodes"] == 3


def test_the_answer_is_a_page_markdown_or_csv_too(tmp_path: Path, golden: Golden) -> None:
    words = ("--read", str(PASTED / "nccl-tests-119.txt"), "--link", "4x200gbit", "--nodes", "3")
    written = {ending: tmp_path / f"answer.{ending}" for ending in ("html", "md", "csv", "json")}
    for path in written.values():
        done = read(*words, "--output", str(path))
        assert done.stdout.startswith("network OK for a link of 800 Gbit/s")
        assert f"answer: {path}" in done.stderr
    markdown = written["md"].read_text()
    golden.check("read.md", markdown)
    assert read(*words, "--format", "markdown").stdout == markdown
    title = '"all_reduce, 3 nodes with 8 workers each (nccl-tests)"'
    assert f"nccl-test,{title},4,busbw,GB/s,95.9" in written["csv"].read_text().splitlines()
    page = written["html"].read_text()
    assert "<td>95.9</td>" in page
    assert json.loads(written["json"].read_text())["schema"] == "multinode.nccl-test-read/2"


def test_what_does_not_go_together_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: Golden) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other").write_text("step 3\n")
    lines = (
        *("--read log --pairs -b 8", "--read log --format nccl-tests", "--read log --format html"),
        *("--link 100gbit --local 2", "--read log --link fast", "--read log --link 0x100gbit"),
        *("all_reduce all_gather --read log", "--read missing.log", "--read other"),
    )
    golden.check_errors("refused_read", {line: read(*line.split()).exception for line in lines})
