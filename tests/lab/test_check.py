"""`multinode check` on the lab: clean when all is well; each fault gives one error that is gone when it is mended."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from multinode.lab.cluster import Lab, ns_command
from multinode.lab.processes import kill_process
from tests.lab.launching import DEADLINE_S, REPOSITORY, Command, agents, listener, wait_for

pytestmark = [pytest.mark.lab, pytest.mark.timeout(180)]

JOB = "configs/tiny_sft.yaml"


@pytest.fixture
def command(tmp_path: Path) -> Command:
    make_tiny = [sys.executable, "scripts/make_tiny.py"]
    subprocess.run(make_tiny, cwd=REPOSITORY, check=True, capture_output=True, timeout=DEADLINE_S)
    return Command(tmp_path / "runs")


def check(command: Command) -> tuple[int, dict[str, Any]]:
    code, document = command.code_and_document("check", "--hosts", "lab", JOB, "--json")
    assert document["schema"] == "multinode.check/1"
    assert not agents()
    return code, document


def run_on(lab: Lab, node_rank: int, *argv: str) -> None:
    subprocess.run([*ns_command(lab.nodes[node_rank]), *argv], check=True, timeout=DEADLINE_S, capture_output=True)


def only_error(document: dict[str, Any]) -> dict[str, Any]:
    (error,) = (finding for finding in document["findings"] if finding["severity"] == "error")
    assert document["ok"] is False
    assert isinstance(error, dict)
    return error


def test_a_healthy_lab_is_clean(lab: Lab, command: Command) -> None:
    code, document = check(command)
    assert (code, document["ok"]) == (0, True)
    assert [one for one in document["findings"] if one["severity"] != "note"] == []
    assert [(node["name"], node["addr"], node["ifname"]) for node in document["nodes"]] == [
        (node.name, node.addr, "ens1f0") for node in lab.nodes
    ]
    assert all({"torch", "llamafactory", "deepspeed"} <= set(node["packages"]) for node in document["nodes"])


def test_a_stopped_sshd(lab: Lab, command: Command) -> None:
    kill_process(lab.nodes[1].sshd)
    try:
        code, document = check(command)
    finally:
        run_on(lab, 1, "/usr/sbin/sshd")
    error = only_error(document)
    assert code == 3
    assert (error["node"], error["check"]) == ("node1", "ssh")
    assert "refused" in error["message"]
    assert "sshd" in error["hint"]
    assert [node["reached"] for node in document["nodes"]] == [True, False]
    assert wait_for(lambda: check(command)[1]["ok"])


def test_a_missing_model_directory(lab: Lab, command: Command) -> None:
    model = f"{REPOSITORY}/assets/tiny/model"
    run_on(lab, 1, "mv", model, f"{model}.away")
    try:
        code, document = check(command)
    finally:
        run_on(lab, 1, "mv", f"{model}.away", model)
    error = only_error(document)
    assert code == 1
    assert (error["node"], error["check"]) == ("node1", "paths")
    assert "assets/tiny/model" in error["message"]
    assert "rsync" in error["hint"]
    assert check(command)[1]["ok"]


def test_master_port_in_use(lab: Lab, command: Command) -> None:
    with listener(lab.nodes[0], 29500):
        code, document = check(command)
    error = only_error(document)
    assert code == 1
    assert (error["node"], error["check"]) == ("node0", "master-port")
    assert "29500" in error["message"]
    assert "--master-port" in error["hint"]
    assert check(command)[1]["ok"]
