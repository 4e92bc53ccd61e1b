"""What the verbs say of runs that are over: of a failure, of a hang that was stopped, and of a stop that comes late."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner, Result

from multinode.cli.main import build_app
from multinode.launch.ending import MOST_LINES
from multinode.records.run import NodeRun, Run, StallRecord
from multinode.records.run_directory import RunDirectory
from multinode.records.status import Status
from tests import make
from tests.launch.test_ending import HUNG, KEY_ERROR, RUN, STALL, failed

WORDS = "stopped by you; the run had hung for 16.0 s: rank 3 on node1 at train.py:24"
NODES = tuple(
    NodeRun(
        name=f"node{rank}",
        node_rank=rank,
        state="ended",
        status=Status(state="ended", cause="stopped", processes_left=0),
    )
    for rank in (0, 1)
)


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MULTINODE_RUNS", raising=False)
    return tmp_path / "runs"


def keep(runs: Path, run: Run) -> RunDirectory:
    """The run, with records that no log is."""
    directory = make.store(
        runs,
        run.run_id,
        run=msgspec.structs.replace(run, nodes=NODES),
        plan=make.plan("node0", "node1", workers=2),
        stall=StallRecord(stalls=run.stalls, nodes=()),
    )
    directory.write_cluster(make.cluster("node0", "node1"), "node0\nnode1\n")
    for rank in (0, 1):
        directory.append_log(rank, b"SignalException: Process 18 got signal: 15\n")
    directory.append_samples(0, "rank-0.jsonl", b'{"kind":"exception","message":"Traceback: CUDA out of memory"}\n')
    return directory


def call(*words: str) -> Result:
    return CliRunner().invoke(build_app(), list(words))


@pytest.mark.parametrize("named", ["last", RUN.run_id, f"runs/{RUN.run_id}"])
def test_explain_of_a_run_says_what_its_record_says(runs: Path, named: str) -> None:
    keep(runs, HUNG)
    shown = call("explain", named)
    assert shown.output.splitlines()[0] == WORDS
    assert shown.output.count("\n") <= MOST_LINES
    found = json.loads(call("explain", named, "--json").output)["first_failure"]
    assert (found["message"], found["kind"], found["rank"]) == (WORDS, "hang", 3)
    assert found["cause"] == STALL.message


def test_explain_of_a_failed_run_names_the_line_and_of_another_reads_its_logs_alone(runs: Path) -> None:
    directory = keep(runs, failed(KEY_ERROR))
    lines = call("explain", "last").output.splitlines()
    assert lines[0] == "error: node0: rank 1 raised KeyError: 'weight_decay'"
    assert lines[2].startswith("Where       your script, train.py:22 (rank 1 on node0): decay = ")
    directory.write("run.json", msgspec.structs.replace(RUN, status="stopped", nodes=NODES))
    found = json.loads(call("explain", str(directory), "--json").output)
    assert {Path(name).name for name in found["files"]} == {"node-0.log", "node-1.log"}


def test_a_stopped_hang_is_in_show_and_runs_and_the_report(runs: Path) -> None:
    keep(runs, HUNG)
    assert call("show", "last").output.splitlines()[0] == WORDS
    assert " ".join(call("show", "last", "--details").output.split()).count("train.py:24 in <module>") == 1
    assert "stopped (hung)" in call("runs").output
    assert json.loads(call("runs", "--json").output)["runs"][0]["hung"]
    call("report", "last", "-o", "page.md")
    assert f"**{WORDS}**" in Path("page.md").read_text()


@pytest.mark.parametrize(("verb", "code"), [("stop", 0), ("attach", 130)])
def test_stop_and_attach_of_a_run_that_is_over_say_so_and_ask_no_node(runs: Path, verb: str, code: int) -> None:
    keep(runs, HUNG)
    done = call(verb, "last")
    assert done.exit_code == code
    begin = f"run {RUN.run_id} has ended at "
    said = next(line for line in done.output.splitlines() if line.startswith(begin))
    assert said.endswith(f"(stopped by you): nothing to {'stop' if verb == 'stop' else 'follow'}")
