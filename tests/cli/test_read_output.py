"""`multinode nccl-test --read` as a command: exit codes, standard input, and options that do not belong to it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from multinode.cli.main import build_app
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


def test_the_answer_is_a_page_markdown_or_csv_too(tmp_path: Path) -> None:
    words = ("--read", str(PASTED / "nccl-tests-119.txt"), "--link", "4x200gbit", "--nodes", "3")
    written = {ending: tmp_path / f"answer.{ending}" for ending in ("html", "md", "csv", "json")}
    for path in written.values():
        done = read(*words, "--output", str(path))
        assert done.stdout.startswith("network OK for a link of 800 Gbit/s")
        assert f"answer: {path}" in done.stderr
    markdown = written["md"].read_text()
    assert "**network OK for a link of 800 Gbit/s" in markdown
    assert "| 127 MiB | 2,660 | 50.1 | 95.9 | 96% |" in markdown
    assert read(*words, "--format", "markdown").stdout == markdown
    title = '"all_reduce, 3 nodes with 8 workers each (nccl-tests)"'
    assert f"nccl-test,{title},4,busbw,GB/s,95.9" in written["csv"].read_text().splitlines()
    page = written["html"].read_text()
    assert "collectives: all_reduce, 3 nodes with 8 workers each" in page
    assert "busbw of all_reduce, 127 MiB (GB/s)" in page
    assert json.loads(written["json"].read_text())["schema"] == "multinode.nccl-test-read/2"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--read", "log", "--pairs", "-b", "8"), "-b, --pairs cannot be combined with it"),
        (("--read", "log", "--format", "nccl-tests"), "--format nccl-tests is a form of measurements"),
        (("--read", "log", "--format", "html"), "html needs an output file"),
        (("--link", "100gbit", "--local", "2"), "--link and --rdma describe the output of --read"),
        (("--read", "log", "--link", "fast"), "'fast' is not a link rate"),
        (("--read", "log", "--link", "0x100gbit"), "is not the rate of NICs"),
        (("all_reduce", "all_gather", "--read", "log"), "at most one collective"),
        (("--read", "missing.log"), "missing.log does not exist"),
    ],
)
def test_what_does_not_go_together_is_an_error(words: tuple[str, ...], said: str) -> None:
    done = read(*words)
    assert said in f"{done.exception}{done.output}"
    assert done.exit_code != 0


def test_a_file_of_another_kind_names_what_can_be_read(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("step 3\n")
    assert "no output of nccl-tests, iperf3 or ib_write_bw" in str(read("--read", str(tmp_path / "log")).exception)
