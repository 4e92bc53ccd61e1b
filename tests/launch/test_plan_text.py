from __future__ import annotations

import os
import subprocess
from pathlib import Path

import msgspec
import pytest

from multinode.cluster.dataplane import Endpoint
from multinode.cluster.quoting import Command
from multinode.findings.finding import Finding
from multinode.records.plan import CodeCopy, LaunchPlan, PlanFile, plan_text
from tests import make
from tests.golden import Golden


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
        notes=(Finding(message="box1 sends to 10.0.0.2 over wlan0"),),
    )


def test_all_that_is_not_a_command_is_a_comment_and_no_secret_is_shown(
    plan: LaunchPlan, tmp_path: Path, golden: Golden
) -> None:
    first, second = plan.nodes
    many = msgspec.structs.replace(first, place=msgspec.structs.replace(first.place, ranks=tuple(range(128))))
    cases = {"plan.sh": plan, "plan_many.sh": msgspec.structs.replace(plan, nodes=(many, second))}
    for name, one in cases.items():
        text = plan_text(one)
        assert "s3cret" not in text
        golden.check(name, text.replace(str(tmp_path), "/work"))


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
