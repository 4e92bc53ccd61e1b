"""`launch --restarts` on the lab: a worker fails, everything is stopped, and a second attempt finishes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.lab.launching import Command, assert_no_agents, processes_of

pytestmark = [pytest.mark.lab, pytest.mark.torch, pytest.mark.usefixtures("module_lab")]


def test_a_run_that_fails_once_is_restarted_and_finishes(tmp_path: Path) -> None:
    command = Command(tmp_path / "runs")
    tell = f'echo "$MULTINODE_EVENT $MULTINODE_STATUS" >> {tmp_path}/told'
    options = ("--workers-per-node", "1", "--restarts", "2", "--node-wait", "1m", "--on-end", tell, "--json")
    done = command.run("launch", "--hosts", "lab", *options, "--", "tests/lab/fails_once.py", "--steps", "30")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    run_id = document["run_id"]
    assert (document["status"], document["steps"]) == ("succeeded", 30)
    first, second = document["attempts"]
    assert (first["run_id"], first["status"], first["last_step"]) == (f"{run_id}-1", "failed", 14)
    assert "asked to fail at step 15" in first["first_failure"]["message"]
    assert first["lost_s"] > 0
    assert first["lost_steps"] is None
    assert (second["run_id"], second["status"], second["last_step"]) == (f"{run_id}-2", "succeeded", 30)
    assert second["not_restarted"] is None
    assert "attempt 2 of 3" in done.stderr
    assert sorted((tmp_path / "told").read_text().splitlines()) == ["end succeeded", "restart running"]
    assert processes_of(f"{run_id}-1") == processes_of(f"{run_id}-2") == []
    assert_no_agents()

    shown = " ".join(command.run("show", run_id).stdout.split())
    assert f"{run_id}-1 from the beginning: failed at step 14" in shown
    assert f"{run_id}-2 from the beginning: succeeded at step 30" in shown
    log = command.run("logs", run_id).stdout
    assert "asked to fail" in log
    assert "step 30 of 30" in log
    listed = {run["run_id"]: run["status"] for run in command.document("runs", "--json")["runs"]}
    assert listed == {run_id: "succeeded", f"{run_id}-1": "failed", f"{run_id}-2": "succeeded"}
    # Nothing of an ended run is left to stop; the last attempt is what is meant.
    assert command.document("attach", run_id, "--json")["run_id"] == f"{run_id}-2"
