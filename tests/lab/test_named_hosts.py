"""Which nodes a command takes that is given no hostfile or a name, and what `init` writes of the lab's nodes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from multinode.lab.nodes import SSH_CONFIG
from multinode.lab.state import DATA_IFNAME, Lab

from .launching import DEADLINE_S, MULTINODE

pytestmark = [pytest.mark.lab]


def run(folder: Path, *arguments: str, config: Path | None = None) -> subprocess.CompletedProcess[str]:
    environ = os.environ | ({"XDG_CONFIG_HOME": str(config)} if config is not None else {})
    command = [*MULTINODE, *arguments]
    return subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )


def test_a_lab_is_taken_unnamed_only_where_it_was_started(lab: Lab, shared_dir: Path) -> None:
    begun = run(Path(lab.directory), "check")
    assert "(the lab that was started in this directory)" in begun.stderr.splitlines()[0]
    refused = run(shared_dir, "check")
    assert refused.returncode == 2
    assert "no hosts are given: use --hosts, or --hosts lab for the lab that runs here" in refused.stderr
    assert run(shared_dir, "check", "--hosts", "lab").returncode == 0


@pytest.mark.usefixtures("lab")
def test_init_prints_or_writes_the_training_network_and_a_run_keeps_its_named_nodes(shared_dir: Path) -> None:
    nodes = f"node[0-1] ssh_config={SSH_CONFIG}"
    printed = run(shared_dir, "init", nodes, "--python", sys.executable)
    assert printed.stdout.count(f"ifname={DATA_IFNAME}") == 2
    assert printed.stdout.count(f"python={sys.executable}") == 2
    assert not list(shared_dir.iterdir())
    written = run(shared_dir, "init", nodes, "-o", "h.txt")
    assert written.stdout == ""
    (shared_dir / "multinode.toml").write_text(f'[hosts]\nlab2 = "{shared_dir}/h.txt"\n')
    work = shared_dir / "work"
    work.mkdir()
    job = ("--engine", "exec", "--no-check", "--json", "--", "true")
    launched = json.loads(run(work, "launch", "--hosts", "@lab2", *job, config=shared_dir).stdout)
    (shared_dir / "h.txt").unlink()
    (shared_dir / "multinode.toml").unlink()
    shown = json.loads(run(work, "show", launched["run_id"], "--json").stdout)
    assert [node["name"] for node in shown["nodes"]] == ["node0", "node1"]
