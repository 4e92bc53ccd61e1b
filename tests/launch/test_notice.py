from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from multinode.launch.notice import (
    Notice,
    end_notice,
    hang_notice,
    interrupted_notice,
    notice_document,
    notice_environment,
)
from multinode.records.progress import NodeProgress, RunProgress
from multinode.records.run import Failure, Stall
from tests.profile.observing import RUN

FAILURE = Failure(node="node1", node_rank=1, rank=3, message="rank 3 raised OSError", kind="disk_full", log_tail="a\nb")
FAILED = msgspec.structs.replace(RUN, status="failed", started_s=10.0, ended_s=75.0, first_failure=FAILURE)
PROGRESS = RunProgress(
    run_id="r", job="train.py", world_size=2, nodes=(NodeProgress(name="a", node_rank=0, ranks=(0,)),), elapsed_s=12.5
)
STALL = Stall(message="rank 1 is behind", node="b", rank=1, time_s=0.0, silent_s=300.0, stack="long")


def variables(notice: Notice) -> dict[str, str]:
    """Those that say something, without the prefix."""
    return {
        name.removeprefix("MULTINODE_").lower(): value for name, value in notice_environment(notice).items() if value
    }


@pytest.mark.parametrize(
    ("notice", "expected"),
    [
        (
            end_notice(FAILED, Path("/runs/r")),
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
            hang_notice(PROGRESS, STALL, Path("/runs/r")),
            {
                "event": "hang",
                "status": "running",
                "duration_s": "12.5",
                "failed_node": "b",
                "failed_rank": "1",
                "failure": "rank 1 is behind",
                "failure_kind": "hang",
                "text": "run r hangs: no step and no log on any node for 5 min 00 s: rank 1 is behind",
            },
        ),
        (
            interrupted_notice(PROGRESS, "the disk is full", Path("/runs/r")),
            {
                "event": "end",
                "status": "failed",
                "duration_s": "12.5",
                "failure": "the disk is full",
                "text": "run r failed: the controller could not continue: the disk is full",
            },
        ),
    ],
)
def test_a_notice_describes_the_run(notice: Notice, expected: dict[str, str]) -> None:
    nodes = ",".join(notice.nodes)
    whole = {"run": notice.run, "job": notice.job, "nodes": nodes, "world_size": str(notice.world_size)}
    assert variables(notice) == whole | expected | {"directory": "/runs/r"}


def test_what_a_node_said_is_made_harmless_and_a_secret_is_not_sent() -> None:
    hostile = Failure(node="node1", node_rank=1, message="\x1b[31m\0 HF_TOKEN=hf_abcdef\n" + "x" * 5000)
    notice = end_notice(msgspec.structs.replace(FAILED, first_failure=hostile), Path("/runs/r"))
    for text in (notice_document(notice)["failure"], notice_environment(notice)["MULTINODE_FAILURE"]):
        assert text.isprintable()
        assert "hf_abcdef" not in text
        assert len(text) <= 1000
