"""A training that hangs, on a lab of two nodes: who is behind is said while it hangs, and what is asked for happens."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.lab.launching import DEADLINE_S, Command, assert_no_agents, processes_of, wait_for
from tests.lab.supervised import LAUNCH, TRAIN, GoFile, document_in, worker

pytestmark = [pytest.mark.lab, pytest.mark.torch, pytest.mark.usefixtures("lab")]

STALL_S = 8
OPTIONS = ("--grace-period", "3", "--hang-timeout", str(STALL_S))
# Rank 1 never comes to the third all-reduce.
SLEEPER = """
print("begins", flush=True)
import time, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()

def load_batch(step):
    if rank == 1 and step == 3:
        time.sleep(600)

for step in range(1, 6):
    load_batch(step)
    dist.all_reduce(torch.ones(4) if hasattr(torch, "ones") else 1)
    print("rank", rank, "step", step, flush=True)
"""


def stalls(command: Command) -> list[dict[str, Any]]:
    """Those that stand in the run's directory so far."""
    files = list(command.runs.glob("*/stall.json"))
    found: list[dict[str, Any]] = json.loads(files[0].read_text())["stalls"] if files else []
    return found


def stop_worker(command: Command, run_id: str, rank: int) -> int:
    """Suspend a rank once the training is in full swing; its process id."""
    wait_for(lambda: command.steps(0) > 3 and command.steps(1) > 3)
    pid = worker(run_id, rank)
    os.kill(pid, signal.SIGSTOP)
    return pid


def test_a_stopped_worker_is_named_while_it_hangs_and_the_run_goes_on_when_it_does(
    command: Command, go_file: GoFile
) -> None:
    with command.running(*LAUNCH, *OPTIONS, "--", TRAIN, *go_file.argument) as controller:
        run_id = command.run_id()
        pid = stop_worker(command, run_id, 3)
        (stall,) = wait_for(lambda: stalls(command))
        assert controller.poll() is None
        steps = command.steps(1)
        os.kill(pid, signal.SIGCONT)
        # Long enough for the controller to notice.
        wait_for(lambda: command.steps(1) > steps + 40)
        go_file.end()
        printed, _ = controller.communicate(timeout=DEADLINE_S)
    assert (stall["node"], stall["node_rank"], stall["rank"]) == ("node1", 1, 3)
    assert stall["message"].startswith("rank 3 on node1 is stopped (state T) by SIGSTOP; the other 3 ")
    assert "on node1: kill -CONT " in stall["hint"]
    assert STALL_S <= stall["silent_s"] < STALL_S + 20
    assert "stalled: no new step or log line on any node for" in printed
    assert "the run has resumed" in printed
    document = document_in(printed)
    assert (document["status"], controller.returncode) == ("succeeded", 0)
    (kept,) = document["stalls"]
    assert kept | {"resumed_s": None} == stall
    assert kept["resumed_s"] > stall["time_s"]
    assert not processes_of(run_id)
    assert_no_agents()


def test_a_rank_that_never_comes_to_the_collective_is_named_with_its_line_and_the_run_is_stopped(
    command: Command, shared_dir: Path
) -> None:
    """Where the workers have torch, its flight recorder says more (test_desync.py)."""
    script = shared_dir / "sleeper.py"
    script.write_text(SLEEPER)
    code, document = command.code_and_document(*LAUNCH, *OPTIONS, "--on-hang", "stop", "--", str(script))
    assert not processes_of(document["run_id"])
    assert_no_agents()
    assert (code, document["status"]) == (1, "failed")
    failure = document["first_failure"]
    assert (failure["node"], failure["rank"], failure["kind"]) == ("node0", 1, "hang")
    said = "rank 1 on node0 is in load_batch (sleeper.py:9), idle; the other 3 ranks wait in all_reduce"
    assert failure["message"].startswith(said)
    assert "sleeper.py:9 in load_batch" in failure["log_tail"]
