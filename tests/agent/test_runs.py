from __future__ import annotations

import json
from pathlib import Path

from .localnode import LocalNode


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
