"""`multinode launch` on the lab, with real sshd and torchrun: one run of each kind, many asserts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from multinode.launch.ending import MOST_LINES
from tests.lab.launching import SCRIPT, Command, assert_no_agents, assert_succeeded, processes_of

pytestmark = [pytest.mark.lab, pytest.mark.torch, pytest.mark.usefixtures("module_lab")]

LAUNCH = ("launch", "--hosts", "lab", "--workers-per-node", "1")


class Done:
    """A run that has ended: its command, its exit code and stderr, and what is stored of it."""

    def __init__(self, runs: Path, *arguments: str) -> None:
        self.command = Command(runs)
        done = self.command.run(*LAUNCH, *arguments)
        self.code, self.stdout, self.stderr = done.returncode, done.stdout, done.stderr
        self.directory = runs / self.command.run_id()
        self.leftovers = processes_of(self.directory.name)
        assert_no_agents()

    def read(self, name: str) -> Any:
        return json.loads((self.directory / name).read_text())


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """A plain script, exported while it is running; the folder of one of the exports is a file."""
    runs = tmp_path_factory.mktemp("script")
    (runs / "file").touch()
    exports = f"tensorboard:{runs}/board,prometheus:{runs}/run.prom,csv:{runs}/file"
    return Done(runs, "--json", "--export", exports, "--", SCRIPT, "--steps", "30")


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """A script of which one worker raises; without --json, as a user sees it."""
    job = (SCRIPT, "--steps", "100000", "--fail-at", "15", "--fail-rank", "1")
    runs = tmp_path_factory.mktemp("failed")
    tell = f"env | grep ^MULTINODE_ > {runs}/told; echo to the log; exit 7"
    return Done(runs, "--on-end", tell, "--", *job)


@pytest.mark.parametrize("name", ["script", "failed"])
def test_nothing_is_left_on_the_nodes(name: str, request: pytest.FixtureRequest) -> None:
    assert request.getfixturevalue(name).leftovers == []


def test_a_plain_script_runs_with_one_worker_a_node(script: Done) -> None:
    document = json.loads(script.stdout)
    assert_succeeded(document)
    assert document["world_size"] == 2
    assert document["summary"]["steps"] == 30
    median_ms = document["summary"]["step_time_ms"]["median"]["value"]
    assert median_ms > 0
    # What DDP is given tells the samples; there are no tokens in them.
    rate = document["summary"]["samples_per_s"]["value"] * median_ms / 1000
    assert rate == pytest.approx(2 * 16, rel=0.5)
    assert document["summary"]["strategy"] == "DDP"
    assert "tokens" in document["summary"]["tokens_per_s"]["reason"]
    assert "step 30 of 30" in (script.directory / "logs" / "node-0.log").read_text()


def test_it_is_exported_while_it_is_running_and_an_export_that_fails_is_told_once(script: Done) -> None:
    runs = script.directory.parent
    shown = script.command.document("show", "last", "--json")
    events = EventAccumulator(str(runs / "board" / script.directory.name), size_guidance={"scalars": 0}).Reload()
    # A plain script does not say when its first step began.
    assert [one.step for one in events.Scalars("multinode/step_time_ms")] == list(range(2, 31))
    (exposed,) = events.Scalars("multinode/summary/comm/exposed_ms")
    assert exposed.value == pytest.approx(shown["summary"]["comm"]["exposed_ms"]["value"], rel=1e-6)
    assert "multinode/nodes/node0/out_gbit_per_s" in events.Tags()["scalars"]
    found = {
        sample.name: sample.value
        for family in text_string_to_metric_families((runs / "run.prom").read_text())
        for sample in family.samples
    }
    assert found["multinode_summary_samples_per_s"] == shown["summary"]["samples_per_s"]["value"]
    warnings = [line for line in script.stderr.splitlines() if line.startswith("warning: ")]
    assert len(warnings) == 1
    assert f"the export to csv:{runs}/file failed: error: " in warnings[0]
    assert script.code == 0


def test_the_run_directory_has_every_noun(script: Done) -> None:
    files = {"hostfile.txt", "cluster.json", "facts.json", "findings.json", "plan.json", "run.json", "summary.json"}
    assert {path.name for path in script.directory.iterdir()} >= files
    assert script.directory.stat().st_mode & 0o077 == 0
    nodes = script.read("plan.json")["nodes"]
    assert [node["place"]["endpoint"]["ifname"] for node in nodes] == ["ens1f0", "ens1f0"]
    assert [node["command"]["env"]["NCCL_SOCKET_IFNAME"] for node in nodes] == ["=ens1f0", "=ens1f0"]
    logs = script.command.document("logs", "last", "--json")
    assert [node["name"] for node in logs["nodes"]] == ["node0", "node1"]
    assert "step 30 of 30" in logs["nodes"][0]["log"]
    shown = script.command.document("show", "last", "--json")
    assert (shown["status"], shown["summary"]["steps"]) == ("succeeded", 30)
    assert '"kind": "nic"' in (script.directory / "samples" / "node-1" / "node.jsonl").read_text()
    assert '"kind": "step"' in (script.directory / "samples" / "node-1" / "rank-1.jsonl").read_text()


def test_the_first_failure_names_node_and_rank_and_the_others_are_stopped(failed: Done) -> None:
    run = failed.read("run.json")
    assert run["status"] == "failed"
    failure = run["first_failure"]
    assert (failure["node"], failure["rank"]) == ("node1", 1)
    assert "RuntimeError: asked to fail at step 15" in failure["message"]
    assert "asked to fail" in failure["log_tail"]


def test_the_command_of_on_end_is_given_the_end_and_does_not_change_it(failed: Done) -> None:
    told = dict(line.split("=", 1) for line in (failed.directory.parent / "told").read_text().splitlines())
    assert (told["MULTINODE_EVENT"], told["MULTINODE_STATUS"]) == ("end", "failed")
    assert (told["MULTINODE_RUN"], told["MULTINODE_DIRECTORY"]) == (failed.directory.name, str(failed.directory))
    assert (told["MULTINODE_FAILED_NODE"], told["MULTINODE_FAILED_RANK"]) == ("node1", "1")
    assert "asked to fail at step 15" in told["MULTINODE_FAILURE"]
    assert (failed.directory / "on-end.log").read_text() == "to the log\n"
    assert "warning: the command of --on-end exited with code 7" in failed.stderr


def test_a_failed_run_exits_1_and_shows_what_happened_and_where(failed: Done) -> None:
    assert failed.code == 1
    screen = failed.stderr[failed.stderr.index("error: ") :].splitlines()
    assert screen[0].startswith("error: node1: rank 1 raised RuntimeError")
    assert screen[2].startswith("Where       your script, ddp_tiny.py:")
    assert "(rank 1 on node1): raise RuntimeError(" in screen[2]
    # And a line of the notice.
    assert len(screen) <= MOST_LINES + 1
