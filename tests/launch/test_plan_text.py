from __future__ import annotations

import os
import subprocess
from pathlib import Path

import msgspec
import pytest

from multinode.cluster.dataplane import Endpoint
from multinode.cluster.quoting import Command
from multinode.records.plan import CodeCopy, LaunchPlan, PlanFile, plan_text
from tests import make


@pytest.fixture
def plan(tmp_path: Path) -> LaunchPlan:
    env = {"PLAIN": "1", "ODD": "two words; $(touch injected) 'and' \"more\"", "HF_TOKEN": "s3cret"}
    command = Command(
        argv=("sh", "-c", """env; printf '[%s]' "$@"; echo""", "sh", "a b", "*"),
        env=env,
        unset=("RANK", "PET_*"),
        path_first="/env/bin",
        cwd=str(tmp_path),
    )
    return make.plan(
        make.node_plan(
            "box1",
            workers=2,
            run_dir="~/.multinode/runs/r.0",
            command=command,
            files=(PlanFile(path="job.yaml", text="secret: no"),),
        ),
        make.node_plan(
            "box2",
            1,
            workers=2,
            run_dir="~/.multinode/runs/r.1",
            endpoint=Endpoint(addr="box2", ifname=None),
            command=command,
            assumed=("python: the first python3 on PATH",),
        ),
        code=CodeCopy(source="/home/me/a\ntouch injected", digest="f" * 64, files=1005, size_bytes=3 << 20),
        notes=("box1 sends to 10.0.0.2 over wlan0",),
    )


def test_all_that_is_not_a_command_is_a_comment_and_everything_is_said(plan: LaunchPlan) -> None:
    text = plan_text(plan)
    for line in (
        "# train.py: 4 workers, 2 on each of 2 nodes",
        "# rendezvous at 10.0.0.1:29500",
        "# copied to every node first: 1005 files, 3 MiB of /home/me/a touch injected (digest ffffffffffffffff)",
        "# note: box1 sends to 10.0.0.2 over wlan0",
        "# --- box1: node rank 0, ranks 0, 1, 10.0.0.1 on ens1f0",
        "# --- box2: node rank 1, ranks 2, 3, box2 on unknown",
        "# sent first: ~/.multinode/runs/r.0/job.yaml",
        "# assumed: python: the first python3 on PATH",
    ):
        assert line in text.splitlines()
    assert "s3cret" not in text


def test_many_ranks_are_a_range(plan: LaunchPlan) -> None:
    place = msgspec.structs.replace(plan.nodes[0].place, ranks=tuple(range(128)))
    many = msgspec.structs.replace(plan.nodes[0], place=place)
    text = plan_text(msgspec.structs.replace(plan, nodes=(many,)))
    assert "# --- box1: node rank 0, ranks 0-127, 10.0.0.1 on ens1f0" in text.splitlines()


@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_a_shell_runs_the_text_as_it_stands(plan: LaunchPlan, tmp_path: Path, shell: str) -> None:
    environ = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "RANK": "9"}
    done = subprocess.run([shell], input=plan_text(plan), env=environ, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert "ODD=two words; $(touch injected) 'and' \"more\"" in lines
    assert not [line for line in lines if line.startswith("RANK=")]
    assert f"PATH=/env/bin:{os.environ['PATH']}" in lines
    assert lines.count("[a b][*]") == 2
    assert not (tmp_path / "injected").exists()
