from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
import typer
from typer.testing import CliRunner

from multinode.cli import bench, report, runs
from multinode.errors import RunFailed
from multinode.records.run import NodeRun, Run
from multinode.records.run_directory import RunDirectory
from tests import make
from tests.bench import made_up_bench as made
from tests.golden import Golden, error_of


def test_wrong_input_is_refused(golden: Golden) -> None:
    lines = (
        *("--size 4k", "--size 9999999999", "--size 0", "--only matmul,disks", "--dtype int8", "--seconds nan"),
        "--local 1 --nodes 2",
    )
    golden.check_errors("refused_bench", {line: error_of(run, "bench", *line.split()) for line in lines})


def run(*args: str) -> str:
    app = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode=None)
    for verb in (bench, runs, report):
        verb.register(app)
    result = CliRunner().invoke(app, list(args), standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return result.stdout


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The id of a bench that found one node slow; the working directory is a new one."""
    monkeypatch.setenv("MULTINODE_RUNS", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)
    parts = (
        made.part(0, made.on_gpu(made.speeds(), made.gpu())),
        made.part(1, made.on_gpu(made.speeds(0.5), made.gpu(sm_clock_mhz=700))),
    )
    found = msgspec.structs.replace(made.report(*parts), run_id="20260105-be")
    directory = make.store(tmp_path / "runs", "20260105-be", bench=found)
    record = make.run(run_id="20260105-be", job="bench matmul", world_size=2, kind="bench", has_parts=True)
    directory.write("run.json", record)
    return record.run_id


def test_a_stored_bench_is_shown_with_its_verdict_and_its_tables(stored: str, golden: Golden) -> None:
    golden.check("show_bench.txt", run("show", stored, "--details"))
    document = json.loads(run("show", stored, "--json"))
    assert document["bench"]["slow"][0]["node"] == "node1"


@pytest.fixture
def broken_off(stored: str, tmp_path: Path) -> str:
    """The same bench, whose controller was killed at its second node; one of its runs lies beside it."""
    whole = RunDirectory(tmp_path / "runs" / stored)
    found = made.report(made.part(0, made.on_gpu(made.speeds(), made.gpu())))
    record = whole.read("run.json", Run)
    assert record is not None
    nodes = tuple(NodeRun(name=f"node{rank}", node_rank=rank) for rank in range(2))
    record = msgspec.structs.replace(record, status="running", nodes=nodes)
    left = ("node1 alone", "node0, node1 together")
    whole.write("bench.json", msgspec.structs.replace(found, run_id=stored, left=left))
    part = make.store(tmp_path / "runs", f"{stored}-alone-0", plan={})
    part.append_log(0, b"the first node's words\n")
    alone = msgspec.structs.replace(
        record, run_id=part.run_id, nodes=nodes[:1], status="succeeded", part_of=stored, has_parts=False
    )
    part.write("run.json", alone)
    whole.write("run.json", record)
    return stored


def test_a_bench_that_was_broken_off_says_where_and_shows_what_it_measured(broken_off: str, golden: Golden) -> None:
    golden.check("show_broken_off.txt", run("show", broken_off))
    document = json.loads(run("show", broken_off, "--json"))
    assert (document["status"], document["bench"]["left"][0]) == ("stopped", "node1 alone")
    assert "stopped" in next(line for line in run("runs").splitlines() if line.startswith(f"{broken_off} "))
    run("report", broken_off, "-o", "b.md")
    golden.check("report_broken_off.md", Path("b.md").read_text())


def test_logs_of_a_bench_are_those_of_its_runs(broken_off: str, golden: Golden) -> None:
    assert run("logs", broken_off) == "the first node's words\n"
    assert run("logs", broken_off, "--node", "node0", "--raw") == "the first node's words\n"
    (log,) = json.loads(run("logs", broken_off, "--json"))["nodes"]
    assert log == {"run_id": f"{broken_off}-alone-0", "name": "node0", "log": "the first node's words\n"}
    golden.check_errors("refused_logs", {"no log of this node": error_of(run, "logs", broken_off, "--node", "node1")})


def test_a_stored_bench_is_reported_with_its_verdict_and_its_tables(stored: str, golden: Golden) -> None:
    run("report", stored, "-o", "b.md")
    golden.check("report_bench.md", Path("b.md").read_text())
    run("report", stored, "-o", "b.html")
    assert "125.0 40%" in Path("b.html").read_text()


@pytest.mark.torch
def test_a_device_that_hangs_ends_its_run(stored: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert stored
    # Nothing is left in the home of whoever runs the tests.
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "sitecustomize.py").write_text(
        "import os, time\nif os.environ.get('LOCAL_RANK'):\n    time.sleep(1000)\n"
    )
    measure = ("bench", "--local", "1", "--only", "matmul", "--seconds", "0.05", "--no-check")
    with pytest.raises(RunFailed):
        run(*measure, "--hang-timeout", "2", "--env", f"PYTHONPATH={tmp_path}")
    (ended,) = [path for path in (tmp_path / "runs").iterdir() if path.name.endswith("-alone-0")]
    failure = json.loads((ended / "run.json").read_text())["first_failure"]
    assert failure["kind"] == "hang"
