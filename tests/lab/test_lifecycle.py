"""Runs that go on without their controller, and come back without a gap or a doubled line."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from multinode.lab.cluster import Lab
from tests.lab.launching import DEADLINE_S, Command, agents, assert_succeeded, kill, processes_of, wait_for

pytestmark = [pytest.mark.lab, pytest.mark.torch, pytest.mark.timeout(300), pytest.mark.usefixtures("lab")]

# Each line in one write, so that workers of a node do not break each other's.
COUNTING = """\
import os, sys, time
import torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
for line in range(int(sys.argv[1])):
    os.write(1, f"rank {rank} line {line} end\\n".encode())
    time.sleep(float(sys.argv[2]))
dist.barrier()
os.makedirs("out", exist_ok=True)
open(f"out/rank-{rank}.txt", "w").write("weights\\n" * 1000)
dist.destroy_process_group()
"""
LINE = re.compile(rb"rank (\d+) line (\d+) end\n")
LAUNCH = ("launch", "--hosts", "lab", "--json")


@pytest.fixture
def script(shared_dir: Path) -> str:
    path = shared_dir / "counting.py"
    path.write_text(COUNTING)
    return str(path)


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Command]:
    running = Command(tmp_path / "runs")
    yield running
    for path in running.runs.glob("*/run.json"):
        running.run("stop", path.parent.name, "--grace", "1")
        assert wait_for(lambda path=path: not processes_of(path.parent.name))  # type: ignore[misc]  # a default binds it
    assert wait_for(lambda: not agents())


def lines(command: Command, run_id: str) -> dict[int, list[int]]:
    """Numbers of the lines that came home, by rank, in their order."""
    found: dict[int, list[int]] = {}
    for path in sorted((command.runs / run_id / "logs").iterdir()):
        for rank, number in LINE.findall(path.read_bytes()):
            found.setdefault(int(rank), []).append(int(number))
    return found


def expect_all(command: Command, run_id: str, count: int) -> None:
    assert lines(command, run_id) == {rank: list(range(count)) for rank in range(4)}


def test_a_detached_run_is_followed_left_and_followed_again(command: Command, script: str) -> None:
    code, left = command.code_and_document(*LAUNCH, "--detach", "--", script, "200", "0.05")
    assert (code, left["status"]) == (0, "running")
    run_id = left["run_id"]
    with command.running("attach", run_id) as watching:
        wait_for(lambda: lines(command, run_id).get(0, []))
        watching.send_signal(signal.SIGINT)
        said, _ = watching.communicate(timeout=DEADLINE_S)
    assert (watching.returncode, "goes on" in said) == (0, True)
    assert len(processes_of(run_id)) > 4
    code, ended = command.code_and_document("attach", run_id, "--json")
    assert_succeeded(ended)
    assert code == 0
    expect_all(command, run_id, 200)


def test_a_controller_that_was_killed_is_replaced_within_the_lease(command: Command, script: str) -> None:
    with command.running(*LAUNCH, "--lease", "60", "--", script, "200", "0.05") as controller:
        run_id = command.run_id()
        wait_for(lambda: lines(command, run_id).get(3, []))
        kill(controller.pid)
        controller.wait(DEADLINE_S)
    code, ended = command.code_and_document("attach", run_id, "--json")
    assert_succeeded(ended)
    assert code == 0
    expect_all(command, run_id, 200)


def test_another_machine_with_the_hostfile_takes_a_run_up_and_fetches_its_files(
    command: Command, script: str, tmp_path: Path
) -> None:
    run_id = command.document(*LAUNCH, "--detach", "--", script, "40", "0.05")["run_id"]
    elsewhere = Command(tmp_path / "elsewhere")
    code, ended = elsewhere.code_and_document("attach", run_id, "--hosts", "lab", "--fetch", "out", "--json")
    assert_succeeded(ended)
    assert code == 0
    expect_all(elsewhere, run_id, 40)
    fetched = Path(ended["directory"]) / "fetched" / "out" / "rank-0.txt"
    assert fetched.read_text() == "weights\n" * 1000
    missing = elsewhere.run("attach", "no-such-run", "--hosts", "lab")
    assert (missing.returncode, "knows no run" in missing.stderr) == (2, True)


def test_logs_are_followed_to_the_end_and_a_second_follower_is_told_so(command: Command, script: str) -> None:
    with command.running(*LAUNCH, "--", script, "100", "0.05") as controller:
        run_id = command.run_id()
        second = command.run("attach", run_id)
        assert (second.returncode, "followed by another multinode already" in second.stderr) == (2, True)
        followed = command.run("logs", "-f", run_id, "--rank", "2")
        assert controller.wait(DEADLINE_S) == 0
    found = LINE.findall(followed.stdout.encode())
    assert [int(number) for rank, number in found if rank == b"2"] == list(range(100))
    assert {rank for rank, _ in found} == {b"2", b"3"}, "node1 has ranks 2 and 3, and a log for both"


def test_a_detached_run_is_stopped_and_two_runs_do_not_disturb_each_other(command: Command, script: str) -> None:
    first = command.document(*LAUNCH, "--detach", "--", script, "100000", "0.05")["run_id"]
    port = ("--master-port", "29600")
    code, second = command.code_and_document(*LAUNCH, *port, "--", script, "20", "0.05")
    assert_succeeded(second)
    assert code == 0
    expect_all(command, second["run_id"], 20)
    code, ended = command.code_and_document("stop", first, "--grace", "2", "--json")
    assert (code, ended["status"]) == (0, "stopped")
    assert not processes_of(first)
    again = command.document("stop", first, "--json")
    assert again["status"] == "stopped"


def test_stop_from_another_terminal_ends_an_attached_run(command: Command, script: str) -> None:
    with command.running(*LAUNCH, "--", script, "100000", "0.05") as controller:
        run_id = command.run_id()
        wait_for(lambda: lines(command, run_id).get(0, []))
        code, ended = command.code_and_document("stop", run_id, "--grace", "2", "--json")
        assert (code, ended["status"]) == (0, "stopped")
        assert controller.wait(DEADLINE_S) == 130
    assert not processes_of(run_id)


def test_clean_removes_what_ended_and_keeps_what_runs(command: Command, script: str, lab: Lab) -> None:
    ended = command.document(*LAUNCH, "--", script, "2", "0.05")["run_id"]
    goes_on = command.document(*LAUNCH, "--detach", "--", script, "100000", "0.05")["run_id"]
    code, cleaned = command.code_and_document("clean", ended, goes_on, "--hosts", "lab", "--json")
    assert code == 0
    for rank, node in enumerate(cleaned["nodes"]):
        assert (node["removed"], node["kept"]) == ([f"{ended}.{rank}"], [f"{goes_on}.{rank}"])
        assert node["size_bytes"] > 0
    assert len(cleaned["nodes"]) == len(lab.nodes)
    assert processes_of(goes_on)
