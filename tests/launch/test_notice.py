"""Notices: the run as any command prints it, and what happened to it in a sentence and in variables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from multinode.api import document
from multinode.cli.main import build_app
from multinode.launch.notice import (
    Notice,
    end_notice,
    hang_notice,
    interrupted_notice,
    notice_document,
    notice_environment,
    restart_notice,
)
from multinode.records.progress import NodeProgress, RunProgress
from multinode.records.run import Attempt, Failure, Run, Stall
from multinode.runs.document import RunDocument
from multinode.runs.stored_run import StoredRun
from tests import make
from tests.profile.observing import RUN, SUMMARY

FAILURE = Failure(node="node1", node_rank=1, rank=3, message="rank 3 raised OSError", kind="disk_full", log_tail="a\nb")
FAILED = msgspec.structs.replace(RUN, status="failed", started_s=10.0, ended_s=75.0, first_failure=FAILURE)
RUNNING = msgspec.structs.replace(RUN, status="running", started_s=10.0, ended_s=None)
STOPPED = msgspec.structs.replace(RUN, status="stopped", started_s=10.0, ended_s=75.0)
PROGRESS = RunProgress(
    run_id="r", job="train.py", world_size=2, nodes=(NodeProgress(name="a", node_rank=0, ranks=(0,)),), elapsed_s=12.5
)
STALL = Stall(message="rank 1 is behind", node="b", rank=1, time_s=0.0, silent_s=300.0, stack="long")


def told(run: Run) -> RunDocument:
    return RunDocument(**{name: getattr(run, name) for name in Run.__struct_fields__[1:]}, directory="/runs/r")


def variables(notice: Notice) -> dict[str, str]:
    """Those that say something, without the prefix."""
    return {
        name.removeprefix("MULTINODE_").lower(): value for name, value in notice_environment(notice).items() if value
    }


@pytest.mark.parametrize(
    ("notice", "expected"),
    [
        (
            end_notice(told(FAILED)),
            {
                "event": "end",
                "status": "failed",
                "duration_s": "65.0",
                "failed_node": "node1",
                "failed_rank": "3",
                "failure": "rank 3 raised OSError",
                "failure_kind": "disk_full",
                "text": f"run {RUN.run_id} failed after 1 min 05 s ({RUN.job}, {RUN.extent}): "
                "node1: rank 3 raised OSError",
            },
        ),
        (
            hang_notice(told(RUNNING), STALL),
            {
                "event": "hang",
                "status": "running",
                "failed_node": "b",
                "failed_rank": "1",
                "failure": "rank 1 is behind",
                "failure_kind": "hang",
                "text": f"run {RUN.run_id} hangs: no step and no log on any node for 5 min 00 s: rank 1 is behind",
            },
        ),
        (
            restart_notice(told(RUNNING), msgspec.structs.replace(PROGRESS, attempt=2, attempts=3)),
            {"event": "restart", "status": "running", "text": f"run {RUN.run_id} was restarted: attempt 2 of 3"},
        ),
        (
            interrupted_notice(told(RUNNING), "the disk is full"),
            {
                "event": "end",
                "status": "failed",
                "failure": "the disk is full",
                "text": f"run {RUN.run_id} failed: the controller could not continue: the disk is full",
            },
        ),
    ],
)
def test_a_notice_describes_the_run(notice: Notice, expected: dict[str, str]) -> None:
    whole = {
        "run": RUN.run_id,
        "job": RUN.job,
        "directory": "/runs/r",
        "nodes": ",".join(node.name for node in RUN.nodes),
        "world_size": str(RUN.world_size),
    }
    shown = variables(notice)
    duration_s = shown.pop("duration_s")
    assert float(duration_s) > 0
    assert shown == whole | {name: value for name, value in expected.items() if name != "duration_s"}
    assert duration_s == expected.get("duration_s", duration_s)


def test_a_stopped_hang_is_to_blame() -> None:
    shown = variables(end_notice(told(msgspec.structs.replace(STOPPED, stalls=(STALL,)))))
    assert (shown["failed_node"], shown["failure"], shown["failure_kind"]) == ("b", "rank 1 is behind", "hang")


def test_the_run_is_what_show_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = make.store(tmp_path, RUN.run_id, run=STOPPED, summary=SUMMARY)
    monkeypatch.setenv("MULTINODE_RUNS", str(tmp_path))
    sent = notice_document(end_notice(StoredRun(directory).document()))
    shown: dict[str, Any] = msgspec.json.decode(CliRunner().invoke(build_app(), ["show", RUN.run_id, "--json"]).stdout)
    assert sent["run"] == shown == document(StoredRun(directory).document())
    assert sent["run"]["summary"]["steps"] == SUMMARY.steps


def test_logs_and_stacks_are_not_sent() -> None:
    attempt = Attempt(run_id="r-1", status="failed", started_s=1.0, first_failure=FAILURE)
    failed = msgspec.structs.replace(FAILED, attempts=(attempt,), stalls=(STALL,))
    run = notice_document(end_notice(told(failed)))["run"]
    assert (run["first_failure"]["message"], run["first_failure"]["log_tail"]) == (FAILURE.message, "")
    assert (run["attempts"][0]["first_failure"]["log_tail"], run["stalls"][0]["stack"]) == ("", "")


def test_what_a_node_said_is_made_harmless_and_a_secret_is_not_sent() -> None:
    hostile = Failure(node="node1", node_rank=1, message="\x1b[31m\0 HF_TOKEN=hf_abcdef\n" + "x" * 5000)
    notice = end_notice(told(msgspec.structs.replace(FAILED, first_failure=hostile)))
    sent = notice_document(notice)
    for text in (
        sent["text"],
        sent["run"]["first_failure"]["message"],
        notice_environment(notice)["MULTINODE_FAILURE"],
    ):
        assert text.isprintable()
        assert "hf_abcdef" not in text
        assert len(text) <= 1000
