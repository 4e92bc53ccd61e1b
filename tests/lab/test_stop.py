"""stop ends a run whatever was recorded of it: lost, recorded by another machine, or known to no file at all."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from multinode.lab.cluster import ns_command
from multinode.lab.state import Lab
from tests.equipment.faults import Fault, NodeState, clear_faults
from tests.lab.launching import Command, processes_of, wait_for
from tests.lab.supervised import LAUNCH, read_document

pytestmark = [pytest.mark.lab]

ENDLESS = ("--engine", "exec", "--", "sh", "-c", "while :; do sleep 1; done")
HURRY = ("--grace-period", "1")


def detach(command: Command) -> str:
    """A run on both nodes that nobody follows."""
    code, left = command.code_and_document(*LAUNCH, "--detach", *ENDLESS)
    assert (code, left["status"]) == (0, "running")
    return str(left["run_id"])


def in_node(lab: Lab, node_rank: int, script: str) -> None:
    subprocess.run([*ns_command(lab.nodes[node_rank]), "sh", "-c", script], check=True)


def test_what_check_says_of_a_run_that_is_recorded_as_lost_ends_it(command: Command) -> None:
    run_id = detach(command)
    place = command.runs / run_id / "run.json"
    run = json.loads(place.read_text())
    nodes = [{**node, "state": "lost"} for node in run["nodes"]]
    place.write_text(json.dumps({**run, "status": "lost", "nodes": nodes}))
    end_by_check(command, run_id)


def end_by_check(command: Command, run_id: str) -> None:
    """Do what check says of what goes on on the nodes."""
    checked = json.loads(command.run("check", "--hosts", "lab", "--json").stdout)
    (finding,) = (found for found in checked["findings"] if found["check"] == "leftovers")
    fix = finding["hint"].splitlines()[-1]
    assert fix == f"multinode stop {run_id}"
    ended = command.run(*shlex.split(fix)[1:], *HURRY)
    assert ended.returncode == 0, ended.stderr
    assert not processes_of(run_id)
    assert command.document("show", run_id, "--json")["status"] == "stopped"


@pytest.mark.thorough
def test_a_run_that_was_lost_when_a_node_was_frozen_is_stopped_by_what_check_says_once_it_is_back(
    lab: Lab, command: Command, fault: Callable[[Fault], None]
) -> None:
    run_id = detach(command)
    fault(NodeState(node="node1", how="freeze"))
    code, lost = command.code_and_document("stop", run_id, *HURRY, "--json")
    assert (code, lost["status"]) == (3, "lost")
    hint = lost["first_failure"]["hint"]
    assert "lease" not in hint
    assert f"multinode stop {run_id}" in hint
    assert not processes_of(run_id, 0)
    clear_faults(lab)
    assert processes_of(run_id, 1)
    end_by_check(command, run_id)


@pytest.mark.usefixtures("lab")
def test_two_stops_at_once_end_a_run_and_a_third_is_content(command: Command) -> None:
    run_id = detach(command)
    stop = ("stop", run_id, *HURRY, "--json")
    with command.running(*stop) as first, command.running(*stop) as second:
        for process in (first, second):
            assert read_document(process)["status"] == "stopped"
            assert process.returncode == 0
    assert not processes_of(run_id)
    assert command.document(*stop)["status"] == "stopped"


@pytest.mark.parametrize("gone", ["all", "node1"])
def test_a_run_whose_directories_are_gone_is_found_by_its_processes(
    lab: Lab, command: Command, tmp_path: Path, gone: str
) -> None:
    run_id = detach(command)
    for node in lab.nodes if gone == "all" else lab.nodes[1:]:
        in_node(lab, node.node_rank, f"rm -r /root/.multinode/runs/{run_id}.{node.node_rank}")
    # Of this machine's own run, and with a hostfile alone, as from a machine that has never seen it.
    elsewhere = Command(tmp_path / "elsewhere") if gone == "all" else command
    hosts = ("--hosts", "lab") if gone == "all" else ()
    ended = elsewhere.run("stop", run_id, *hosts, *HURRY)
    assert ended.returncode == 0, ended.stderr
    wait_for(lambda: not processes_of(run_id))
    again = elsewhere.run("stop", "nosuchrun", "--hosts", "lab")
    assert (again.returncode, "no run 'nosuchrun'" in again.stderr) == (2, True)


@pytest.mark.thorough
def test_a_run_is_stopped_from_another_machine_though_node_0_does_not_answer(
    lab: Lab, command: Command, tmp_path: Path, fault: Callable[[Fault], None]
) -> None:
    run_id = detach(command)
    elsewhere = Command(tmp_path / "elsewhere")
    fault(NodeState(node="node0", how="freeze"))
    code, stopped = elsewhere.code_and_document("stop", run_id, "--hosts", "lab", *HURRY, "--json")
    assert code == 3
    assert [(bool(node["error"]), node["runs"]) for node in stopped["nodes"]] == [(True, []), (False, [f"{run_id}.1"])]
    assert not processes_of(run_id, 1)
    clear_faults(lab)
    ended = elsewhere.document("stop", run_id, "--hosts", "lab", *HURRY, "--json")
    assert ended["status"] == "stopped"
    assert not processes_of(run_id)
    # This machine's own record, with a hostfile.
    assert command.document("stop", run_id, "--hosts", "lab", *HURRY, "--json")["status"] == "stopped"


def test_watchers_that_were_suspended_hear_the_order(lab: Lab, command: Command) -> None:
    run_id = detach(command)
    watcher = f"/root/.multinode/runs/{run_id}.0/supervisor.json"
    program = (
        "import json,sys,os,signal; [os.kill(json.load(open(sys.argv[1]))[k], signal.SIGSTOP) for k in sys.argv[2:]]"
    )
    in_node(lab, 0, f"python3 -c {shlex.quote(program)} {watcher} sentinel_pid pid")
    assert command.document("stop", run_id, *HURRY, "--json")["status"] == "stopped"
    assert not processes_of(run_id)
