"""A training that hangs, on a lab of two nodes: who is behind is said while it hangs, and what is asked for happens."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.lab.launching import DEADLINE_S, SCRIPT, Command, agents, command_line, processes_of, wait_for

pytestmark = [pytest.mark.lab, pytest.mark.torch, pytest.mark.timeout(300), pytest.mark.usefixtures("lab")]

LAUNCH = ("launch", "--hosts", "lab", "--workers-per-node", "2", "--grace", "3", "--json", "--stall", "20")
# Rank 1 never comes to the third all-reduce.
SLEEPER = """
import os, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()

def load_batch(step):
    if rank == 1 and step == 3:
        time.sleep(600)

for step in range(1, 6):
    load_batch(step)
    dist.all_reduce(torch.ones(4))
    print("rank", rank, "step", step, flush=True)
"""


@pytest.fixture
def command(tmp_path: Path) -> Command:
    return Command(tmp_path / "runs")


def worker(run_id: str, rank: int) -> int:
    """The process of a rank."""
    wanted = {f"RANK={rank}", f"LOCAL_RANK={rank % 2}"}
    (pid,) = (
        pid
        for pid in processes_of(run_id)
        if wanted <= set(Path(f"/proc/{pid}/environ").read_text().split("\0")) and SCRIPT in command_line(pid)
    )
    return pid


def stalls(command: Command) -> list[dict[str, Any]]:
    """Those that stand in the run's directory so far."""
    files = list(command.runs.glob("*/stall.json"))
    found: list[dict[str, Any]] = json.loads(files[0].read_text())["stalls"] if files else []
    return found


def test_a_stopped_worker_is_named_while_it_hangs_and_the_run_goes_on_when_it_does(command: Command) -> None:
    with command.running(*LAUNCH, "--", SCRIPT, "--steps", "300") as controller:
        run_id = command.run_id()
        wait_for(lambda: command.steps(0) > 3 and command.steps(1) > 3)
        pid = worker(run_id, 3)
        os.kill(pid, signal.SIGSTOP)
        (stall,) = wait_for(lambda: stalls(command), deadline_s=30)
        assert controller.poll() is None
        os.kill(pid, signal.SIGCONT)
        printed, _ = controller.communicate(timeout=DEADLINE_S)
    assert (stall["node"], stall["node_rank"], stall["rank"]) == ("node1", 1, 3)
    assert stall["message"].startswith("rank 3 on node1 is stopped (state T): somebody sent it SIGSTOP; the other 3 ")
    assert "on node1: kill -CONT " in stall["hint"]
    assert 20 <= stall["silent_s"] < 40
    assert "stalled: no step and no log on any node for" in printed
    assert "the run gets on again" in printed
    document = json.loads(printed[printed.index("{\n") :])
    assert (document["status"], controller.returncode) == ("succeeded", 0)
    assert document["stalls"] == [stall]
    assert not processes_of(run_id)
    assert not agents()


def test_a_run_that_hangs_is_stopped_where_that_was_asked_for(command: Command) -> None:
    with command.running(*LAUNCH, "--on-stall", "stop", "--", SCRIPT, "--steps", "1000000") as controller:
        run_id = command.run_id()
        wait_for(lambda: command.steps(0) > 3 and command.steps(1) > 3)
        os.kill(worker(run_id, 2), signal.SIGSTOP)
        printed, _ = controller.communicate(timeout=DEADLINE_S)
    assert not processes_of(run_id)
    assert not agents()
    document = json.loads(printed[printed.index("{\n") :])
    assert (document["status"], controller.returncode) == ("failed", 1)
    failure = document["first_failure"]
    assert (failure["node"], failure["rank"], failure["kind"]) == ("node1", 2, "hang")
    assert failure["message"].startswith("rank 2 on node1 is stopped (state T)")
    assert "kill -CONT" in failure["hint"]


def test_a_rank_that_never_comes_to_the_collective_is_named_with_the_line_where_it_stands(
    command: Command, shared_dir: Path
) -> None:
    script = shared_dir / "sleeper.py"
    script.write_text(SLEEPER)
    code, document = command.code_and_document(*LAUNCH, "--on-stall", "stop", "--", str(script))
    assert (code, document["status"]) == (1, "failed")
    failure = document["first_failure"]
    assert (failure["node"], failure["rank"]) == ("node0", 1)
    assert failure["message"].startswith("rank 1 on node0 is in load_batch (sleeper.py:8), idle")
    assert failure["message"].endswith("; the other 3 ranks wait in all_reduce")
    assert "sleeper.py:8 in load_batch" in failure["log_tail"]
