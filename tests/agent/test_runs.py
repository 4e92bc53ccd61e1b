from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from .localnode import SLEEPER, LocalNode, wait_until


def found(node: LocalNode, run_id: str, *, env: dict[str, str] | None = None) -> list[dict[str, Any]]:
    """What a probe tells of one run; other tests may have runs of theirs on this machine."""
    code, records = node.call("probe", {"packages": False}, env=env)
    assert code == 0
    assert "run_processes" not in records[0]["missing"]
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
