from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from multinode.node.rundir import RunDir
from tests.golden import Golden

from .localnode import SLEEPER, LocalNode, wait_until


def found(node: LocalNode, run_id: str, *, env: dict[str, str] | None = None) -> list[dict[str, Any]]:
    """What a probe tells of one run; other tests may have runs of theirs on this machine."""
    code, records = node.call("probe", {"packages": False}, env=env)
    assert code == 0
    return [process for process in records[0]["run_processes"] if process["run_id"] == run_id]


def test_a_run_that_goes_on_is_supervised_and_one_whose_watchers_died_is_not(node: LocalNode) -> None:
    run_id = "probed-1.0"
    node.start(SLEEPER, run_id=run_id)
    (process,) = found(node, run_id)
    job_pid = node.status(run_id)["job_pid"]
    command = Path(f"/proc/{job_pid}/comm").read_text().strip()
    assert process == {"pid": job_pid, "run_id": run_id, "command": command, "supervised": True}
    node.kill_watchers(run_id)
    wait_until(lambda: [one["supervised"] for one in found(node, run_id)] == [False])
    os.kill(process["pid"], signal.SIGKILL)
    wait_until(lambda: found(node, run_id) == [])


def test_a_process_without_a_run_directory_is_left_behind(node: LocalNode) -> None:
    env = {**node.env, "MULTINODE_RUN_ID": "probed-2.0"}
    with subprocess.Popen([sys.executable, "-I", "-S", "-c", "input()"], env=env, stdin=subprocess.PIPE) as process:
        try:
            wait_until(lambda: bool(found(node, "probed-2.0")))
            assert [(one["pid"], one["supervised"]) for one in found(node, "probed-2.0")] == [(process.pid, False)]
        finally:
            process.kill()
    assert found(node, "probed-2.0") == []


def test_the_probe_does_not_count_itself(node: LocalNode) -> None:
    assert found(node, "probed-3.0", env={"MULTINODE_RUN_ID": "probed-3.0"}) == []


def test_a_name_that_merely_begins_so_is_no_run(node: LocalNode) -> None:
    env = {**node.env, "MULTINODE_RUN_ID_OLD": "probed-4.0"}
    with subprocess.Popen([sys.executable, "-I", "-S", "-c", "input()"], env=env, stdin=subprocess.PIPE) as process:
        try:
            assert found(node, "probed-4.0") == []
        finally:
            process.kill()


def test_what_is_no_run_or_broken_ends_neither_listing_nor_cleaning(node: LocalNode) -> None:
    root = node.home / ".multinode" / "runs"
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    broken = {"boot_id": boot_id, "pid": "many"}
    for name in ("lost+found", ".nfs0001", "well.0", "broken.0"):
        (root / name).mkdir(parents=True)
    (root / "broken.0" / "supervisor.json").write_text(json.dumps(broken))
    (root / "broken.0" / "status.json").write_text('{"state": ["running"]}')
    code, (listed,) = node.call("runs", {})
    assert (code, [run["run_id"] for run in listed["runs"]]) == (0, ["well.0", "broken.0"])
    code, (cleaned,) = node.call("clean", {"run_ids": None})
    assert (code, [run["run_id"] for run in cleaned["removed"]]) == (0, ["well.0", "broken.0"])
    assert sorted(path.name for path in root.iterdir()) == [".nfs0001", "lost+found"]


HERE = {
    "hostname": os.uname().nodename,
    "machine_id": "0" * 32,
    "boot_id": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
    "pid_namespace": str(Path("/proc/self/ns/pid").readlink()),
}
ELSEWHERE: dict[str, dict[str, Any]] = {
    "another machine": {"hostname": "gpu-b", "machine_id": "b" * 32, "boot_id": "b", "pid_namespace": "pid:[1]"},
    "another machine without any name that is known": {"boot_id": "b"},
    "a container of this kernel": {**HERE, "hostname": "gpu-b", "pid_namespace": "pid:[1]"},
    "a container of the same name on another machine": {**HERE, "machine_id": None, "boot_id": "b"},
}


def write_run(node: LocalNode, run_id: str, watcher: dict[str, Any], state: str) -> Path:
    """The directory of a run whose processes are not to be seen from here."""
    path = node.run_dir(run_id)
    (path / "samples").mkdir(parents=True)
    for name, record in {"request": {}, "status": {"state": state}, "supervisor": watcher}.items():
        (path / f"{name}.json").write_text(json.dumps(record))
    return path


def clean(node: LocalNode) -> tuple[list[str], list[str], dict[str, str | None]]:
    """What was removed, what was kept, and the machine of each."""
    code, (cleaned,) = node.call("clean", {"run_ids": None})
    assert code == 0
    runs = [*cleaned["removed"], *cleaned["kept"]]
    return (
        [run["run_id"] for run in cleaned["removed"]],
        [run["run_id"] for run in cleaned["kept"]],
        {run["run_id"]: run["machine"] for run in runs},
    )


@pytest.mark.parametrize("place", ELSEWHERE)
def test_a_run_of_another_machine_is_over_only_when_its_status_says_so(
    node: LocalNode, place: str, golden: Golden
) -> None:
    watcher = {**ELSEWHERE[place], "pid": 2, "start_ticks": 1}
    write_run(node, "theirs-1.0", watcher, "running")
    write_run(node, "theirs-2.0", watcher, "ended")
    assert clean(node)[:2] == (["theirs-2.0"], ["theirs-1.0"])
    assert clean(node)[2] == {"theirs-1.0": watcher.get("hostname", "unknown")}
    said = node.error("follow", {"run_id": "theirs-1.0", "offsets": {}})
    golden.check(f"runs_of_{place.replace(' ', '_')}.txt", said.replace(HERE["hostname"], "HERE") + "\n")
    assert node.status("theirs-1.0") == {"state": "running"}


def test_a_run_of_this_machine_before_it_was_booted_anew_is_over(node: LocalNode) -> None:
    node.start(SLEEPER)
    ours = node.watcher()
    write_run(node, "before-1.0", {**ours, "boot_id": "b"}, "running")
    # A container without an id of its own cannot say so.
    is_over = ours["machine_id"] is not None
    assert clean(node)[:2] == ((["before-1.0"], ["r"]) if is_over else ([], ["r", "before-1.0"]))
    node.stop()


def test_a_container_of_this_name_on_this_kernel_is_another_one_while_its_watchers_live(
    node: LocalNode, golden: Golden
) -> None:
    node.start(SLEEPER)
    place = node.run_dir() / "supervisor.json"
    ours = place.read_text()
    # As another container with the same name sees it: not in its own /proc.
    place.write_text(json.dumps({**json.loads(ours), "pid_namespace": "pid:[1]"}))
    assert clean(node)[:2] == ([], ["r"])
    said = node.error("follow", {"run_id": "r", "offsets": {}}).replace(HERE["hostname"], "HERE")
    golden.check("runs_of_this_name.txt", said + "\n")
    place.write_text(ours)
    node.kill_watchers()
    place.write_text(json.dumps({**json.loads(ours), "pid_namespace": "pid:[1]"}))
    assert node.stop()["cause"] == "supervisor_lost"
    assert clean(node)[:2] == (["r"], [])


def test_a_run_that_another_machine_is_starting_is_not_judged_by_the_clock_of_its_files(node: LocalNode) -> None:
    path = write_run(node, "theirs-1.0", {**ELSEWHERE["another machine"], "created_boot_s": 1.0}, "starting")
    os.utime(path / "request.json", (0, 0))
    assert clean(node)[:2] == ([], ["theirs-1.0"])


def test_what_runs_for_a_week_is_told_to_be_of_this_machine(node: LocalNode) -> None:
    node.start(SLEEPER)
    os.utime(node.run_dir() / "request.json", (0, 0))
    assert clean(node) == ([], ["r"], {"r": None})
    node.stop()
    assert clean(node) == (["r"], [], {"r": None})


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setenv("HOME", str(tmp_path))
    found = RunDir("r")
    Path(found.path).mkdir(parents=True)
    return found


def test_what_is_written_is_read_and_nothing_else_remains(run: RunDir) -> None:
    run.write("status.json", {"state": "running"})
    assert run.read("status.json") == {"state": "running"}
    assert [path.name for path in Path(run.path).iterdir()] == ["status.json"]


@pytest.mark.parametrize("text", [b"", b"{", b"[1]", b"\xff"])
def test_what_cannot_be_read_right_now_is_none(run: RunDir, text: bytes) -> None:
    (Path(run.path) / "status.json").write_bytes(text)
    assert run.read("status.json") is None


def test_without_room_for_a_new_file_the_old_one_is_overwritten(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    run.write("status.json", {"state": "running", "message": "x" * 300})
    # A directory in the place of the temporary file: it cannot be made, as on a full disk.
    monkeypatch.setattr(os, "urandom", bytes)
    for name in ("status", "other"):
        (Path(run.path) / f".{name}.json.{'00' * 8}.partial").mkdir()
    run.write("status.json", {"state": "ended"})
    assert run.read("status.json") == {"state": "ended"}
    with pytest.raises(FileExistsError):
        run.write("other.json", {})
