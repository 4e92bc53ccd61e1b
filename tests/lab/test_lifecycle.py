"""Runs that go on without their controller, and come back without a gap or a doubled line."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from multinode.lab.state import Lab
from tests.lab.launching import DEADLINE_S, Command, assert_succeeded, kill, processes_of, wait_for
from tests.lab.supervised import LAUNCH, LINE, TRAIN, GoFile, expect_all, lines, read_document, wait_for_more

pytestmark = [pytest.mark.lab, pytest.mark.torch, pytest.mark.usefixtures("lab")]

COUNT = ("--", TRAIN, "--lines")


def detached(command: Command, *job: str) -> str:
    """The id of a run that goes on without a controller."""
    code, left = command.code_and_document(*LAUNCH, "--detach", *COUNT, *job)
    assert (code, left["status"]) == (0, "running")
    run_id: str = left["run_id"]
    return run_id


def attach_to_the_end(command: Command, run_id: str, go_file: GoFile, *options: str) -> dict[str, Any]:
    """Follow until more has come home, have the run end, and see that all of it came home."""
    with command.running("attach", run_id, *options, "--json") as watching:
        wait_for_more(command, run_id)
        go_file.end()
        ended = read_document(watching)
    assert_succeeded(ended)
    assert watching.returncode == 0
    expect_all(command, run_id)
    return ended


def test_a_detached_run_is_followed_left_and_followed_to_its_end_from_another_machine_that_fetches_its_files(
    command: Command, go_file: GoFile, tmp_path: Path
) -> None:
    run_id = detached(command, *go_file.argument, "--output", "out")
    with command.running("attach", run_id) as watching:
        wait_for(lambda: lines(command, run_id).get(0, []))
        watching.send_signal(signal.SIGINT)
        said, _ = watching.communicate(timeout=DEADLINE_S)
    assert (watching.returncode, "still running" in said) == (0, True)
    assert len(processes_of(run_id)) > 4
    elsewhere = Command(tmp_path / "elsewhere")
    ended = attach_to_the_end(elsewhere, run_id, go_file, "--hosts", "lab", "--fetch", "out")
    fetched = Path(ended["directory"]) / "fetched" / "out" / "rank-0.txt"
    assert fetched.read_text() == "weights\n" * 1000
    missing = elsewhere.run("attach", "no-such-run", "--hosts", "lab")
    assert (missing.returncode, "has no run" in missing.stderr) == (2, True)
    code, here = command.code_and_document("attach", run_id, "--json")
    assert_succeeded(here)
    assert code == 0
    assert expect_all(command, run_id) == expect_all(elsewhere, run_id)


def test_a_controller_that_was_killed_is_replaced_within_the_lease(command: Command, go_file: GoFile) -> None:
    with command.running(*LAUNCH, "--lease", "60", *COUNT, *go_file.argument) as controller:
        run_id = command.run_id()
        wait_for(lambda: lines(command, run_id).get(3, []))
        kill(controller.pid)
        controller.wait(DEADLINE_S)
    attach_to_the_end(command, run_id, go_file)


def test_whoever_takes_up_a_run_with_a_lease_from_another_machine_renews_it(
    command: Command, go_file: GoFile, tmp_path: Path
) -> None:
    lease_s = 15.0
    with command.running(*LAUNCH, "--lease", str(lease_s), *COUNT, *go_file.argument) as controller:
        run_id = command.run_id()
        wait_for(lambda: lines(command, run_id).get(3, []))
        kill(controller.pid)
        controller.wait(DEADLINE_S)
    killed_s = time.monotonic()
    elsewhere = Command(tmp_path / "elsewhere")
    with elsewhere.running("attach", run_id, "--hosts", "lab", "--json") as watching:
        # Without a word the nodes would have ended it.
        wait_for(lambda: time.monotonic() - killed_s > 1.5 * lease_s)
        wait_for_more(elsewhere, run_id)
        go_file.end()
        assert_succeeded(read_document(watching))
    expect_all(elsewhere, run_id)


def test_logs_are_followed_to_the_end_and_a_second_attach_watches(command: Command, go_file: GoFile) -> None:
    with command.running(*LAUNCH, *COUNT, *go_file.argument) as controller:
        run_id = command.run_id()
        fetching = command.run("attach", run_id, "--fetch", "out")
        assert (fetching.returncode, "another multinode process is following" in fetching.stderr) == (2, True)
        logs = ("logs", "-f", run_id, "--rank", "2")
        with command.running(*logs) as following, command.running("attach", run_id, "--json") as watching:
            wait_for_more(command, run_id)
            go_file.end()
            followed, _ = following.communicate(timeout=DEADLINE_S)
            assert_succeeded(read_document(watching))
        assert controller.wait(DEADLINE_S) == 0
    found = LINE.findall(followed.encode())
    count = expect_all(command, run_id)
    assert [int(number) for rank, number in found if rank == b"2"] == list(range(count))
    assert {rank for rank, _ in found} == {b"2", b"3"}, "node1 has ranks 2 and 3, and a log for both"


def test_two_launches_at_once_on_the_same_nodes_both_run_to_their_end(
    command: Command, go_file: GoFile, tmp_path: Path
) -> None:
    commands = command, Command(tmp_path / "beside")
    job = *LAUNCH, "--check", *COUNT, *go_file.argument
    with commands[0].running(*job) as first, commands[1].running(*job) as second:
        for one in commands:
            run_id = one.run_id()
            wait_for(lambda one=one, run_id=run_id: set(lines(one, run_id)) == {0, 1, 2, 3})  # type: ignore[misc]
        go_file.end()
        for one, controller in zip(commands, (first, second), strict=True):
            ended = read_document(controller)
            assert_succeeded(ended)
            expect_all(one, ended["run_id"])
    plans = [json.loads((one.runs / one.run_id() / "plan.json").read_text()) for one in commands]
    ports = {plan["rendezvous"]["port"] for plan in plans}
    assert len(ports) == 2
    assert ports <= set(range(20000, 30000))


def test_stop_from_another_terminal_ends_an_attached_run(command: Command) -> None:
    with command.running(*LAUNCH, *COUNT) as controller:
        run_id = command.run_id()
        wait_for(lambda: lines(command, run_id).get(0, []))
        code, ended = command.code_and_document("stop", run_id, "--grace-period", "2", "--json")
        assert (code, ended["status"]) == (0, "stopped")
        assert controller.wait(DEADLINE_S) == 130
    assert not processes_of(run_id)


def test_of_two_runs_that_do_not_disturb_each_other_clean_removes_what_ended_and_stop_ends_the_other(
    command: Command, lab: Lab
) -> None:
    goes_on = detached(command)
    code, second = command.code_and_document(*LAUNCH, *COUNT, "--steps", "20")
    assert_succeeded(second)
    ended = second["run_id"]
    assert code == 0
    assert expect_all(command, ended) == 20
    code, cleaned = command.code_and_document("clean", ended, goes_on, "--hosts", "lab", "--json")
    assert code == 0
    for rank, node in enumerate(cleaned["nodes"]):
        assert (node["removed"], node["kept"]) == ([f"{ended}.{rank}"], [f"{goes_on}.{rank}"])
        assert node["size_bytes"] > 0
    assert len(cleaned["nodes"]) == len(lab.nodes)
    assert processes_of(goes_on)
    code, stopped = command.code_and_document("stop", goes_on, "--grace-period", "2", "--json")
    assert (code, stopped["status"]) == (0, "stopped")
    assert not processes_of(goes_on)
    again = command.document("stop", goes_on, "--json")
    assert again["status"] == "stopped"
