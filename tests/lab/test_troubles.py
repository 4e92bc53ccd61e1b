"""Troubles of the controller: its disk, its terminal, its signals. The run goes on, and its records come home."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.launching import (
    DEADLINE_S,
    MULTINODE,
    REPOSITORY,
    Command,
    assert_succeeded,
    processes_of,
    wait_for,
)
from tests.lab.supervised import LAUNCH, TRAIN, GoFile, expect_all, lines, read_document, wait_for_more

pytestmark = [pytest.mark.lab, pytest.mark.torch, pytest.mark.long, pytest.mark.usefixtures("lab")]

COUNT = ("--", TRAIN, "--lines")


@pytest.fixture
def small_disk(command: Command) -> Iterator[Path]:
    """The runs are kept on a disk of 2 MiB; `filler` in it fills it."""
    command.runs.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m,mode=700", "small", command.runs], check=True)
    try:
        yield command.runs
    finally:
        subprocess.run(["umount", "--lazy", command.runs], check=True)


def fill(disk: Path) -> Path:
    filler = disk / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 12))
    return filler


def test_a_full_disk_of_the_controller_ends_no_run_and_what_is_missing_is_fetched_at_its_end(
    command: Command, small_disk: Path, go_file: GoFile
) -> None:
    with command.running(*LAUNCH, *COUNT, *go_file.argument) as controller:
        run_id = command.run_id()
        # Of both nodes: the disk is full for what comes after that.
        wait_for(lambda: {0, 3} <= set(lines(command, run_id)))
        filler = fill(small_disk)
        kept = len(lines(command, run_id)[0])
        time.sleep(4.0)
        assert len(lines(command, run_id)[0]) <= kept + 100
        assert len(processes_of(run_id)) > 4
        filler.unlink()
        go_file.end()
        ended = read_document(controller)
    assert_succeeded(ended)
    expect_all(command, run_id)


def test_a_disk_that_is_full_to_the_end_of_the_run_is_told_and_attach_fetches_the_rest(
    command: Command, small_disk: Path, go_file: GoFile
) -> None:
    with command.running(*LAUNCH, *COUNT, *go_file.argument) as controller:
        run_id = command.run_id()
        wait_for(lambda: {0, 3} <= set(lines(command, run_id)))
        filler = fill(small_disk)
        # More than the blocks that the files have already.
        time.sleep(4.0)
        go_file.end()
        said, _ = controller.communicate(timeout=DEADLINE_S)
    assert said.count("No space left on device; it will be fetched when the run has ended") == 1
    assert "the run has succeeded, but this could not be recorded" in said
    assert controller.returncode == 1
    assert processes_of(run_id) == []
    filler.unlink()
    _, attached = command.code_and_document("attach", run_id, "--json")
    assert_succeeded(attached)
    expect_all(command, run_id)


def test_who_reads_a_detached_run_onto_a_full_disk_leaves_it_alone(
    command: Command, small_disk: Path, go_file: GoFile, tmp_path: Path
) -> None:
    elsewhere = Command(tmp_path / "elsewhere")
    _, left = elsewhere.code_and_document(*LAUNCH, "--detach", *COUNT, *go_file.argument)
    run_id = left["run_id"]
    with command.running("attach", run_id, "--hosts", "lab") as reading:
        wait_for(lambda: lines(command, run_id).get(3, []))
        fill(small_disk)
        time.sleep(3.0)
        reading.send_signal(signal.SIGINT)
        said, _ = reading.communicate(timeout=DEADLINE_S)
    assert "No space left on device" in said
    assert len(processes_of(run_id)) > 4
    with elsewhere.running("attach", run_id, "--json") as reading:
        wait_for_more(elsewhere, run_id)
        go_file.end()
        assert_succeeded(read_document(reading))
    expect_all(elsewhere, run_id)


def test_the_logs_of_a_run_are_removed_while_it_is_followed_and_are_fetched_again_at_its_end(
    command: Command, go_file: GoFile
) -> None:
    with command.running(*LAUNCH, *COUNT, *go_file.argument) as controller:
        run_id = command.run_id()
        wait_for(lambda: lines(command, run_id).get(3, []))
        subprocess.run(["rm", "-r", command.runs / run_id / "logs"], check=True)
        time.sleep(2.0)
        go_file.end()
        ended = read_document(controller)
    assert_succeeded(ended)
    expect_all(command, run_id)


def test_attach_of_an_ended_run_fetches_what_could_not_be_stored(command: Command, go_file: GoFile) -> None:
    with command.running(*LAUNCH, *COUNT, *go_file.argument) as controller:
        run_id = command.run_id()
        wait_for(lambda: lines(command, run_id).get(3, []))
        # Even root cannot write into a directory.
        log = command.runs / run_id / "logs" / "node-1.log"
        log.unlink()
        log.mkdir()
        time.sleep(2.0)
        go_file.end()
        assert_succeeded(read_document(controller))
    log.rmdir()
    with command.running("attach", run_id) as attached:
        said, _ = attached.communicate(timeout=DEADLINE_S)
    assert attached.returncode == 0
    assert "of missing records" in said
    expect_all(command, run_id)
    with command.running("attach", run_id) as attached:
        said, _ = attached.communicate(timeout=DEADLINE_S)
    assert "nothing to follow" in said


def test_a_terminal_that_takes_no_output_for_three_leases_ends_no_run(command: Command, go_file: GoFile) -> None:
    ours, theirs = pty.openpty()
    env = os.environ | {"MULTINODE_RUNS": str(command.runs), "TERM": "xterm"}
    words = [word for word in LAUNCH if word != "--json"]
    argv = [*MULTINODE, *words, "--lease", "5", *COUNT, *go_file.argument]
    with subprocess.Popen(argv, cwd=REPOSITORY, env=env, stdin=theirs, stdout=theirs, stderr=theirs) as controller:
        os.close(theirs)
        try:
            run_id = command.run_id()
            wait_for(lambda: lines(command, run_id).get(3, []))
            # Nobody reads what it draws meanwhile.
            time.sleep(15.0)
            assert len(processes_of(run_id)) > 4
            before = len(lines(command, run_id)[0])
            wait_for(lambda: len(lines(command, run_id)[0]) > before)
            go_file.end()
            reader = threading.Thread(target=_read_all, args=(ours,), daemon=True)
            reader.start()
            assert controller.wait(DEADLINE_S) == 0
        finally:
            controller.kill()
            os.close(ours)
    expect_all(command, run_id)


def test_a_controller_under_nohup_outlives_its_terminal_and_one_that_is_suspended_goes_on(
    command: Command, go_file: GoFile
) -> None:
    env = os.environ | {"MULTINODE_RUNS": str(command.runs)}
    argv = ["nohup", *MULTINODE, *LAUNCH, "--lease", "10", *COUNT, *go_file.argument]
    with subprocess.Popen(
        argv,
        cwd=REPOSITORY,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as controller:
        run_id = command.run_id()
        wait_for(lambda: lines(command, run_id).get(3, []))
        controller.send_signal(signal.SIGHUP)
        # For more than half of the lease.
        controller.send_signal(signal.SIGSTOP)
        time.sleep(6.0)
        controller.send_signal(signal.SIGCONT)
        time.sleep(6.0)
        assert len(processes_of(run_id)) > 4
        wait_for_more(command, run_id)
        go_file.end()
        controller.communicate(timeout=DEADLINE_S)
    assert controller.returncode == 0
    expect_all(command, run_id)


def _read_all(fd: int) -> None:
    with contextlib.suppress(OSError):
        while os.read(fd, 1 << 16):
            continue
