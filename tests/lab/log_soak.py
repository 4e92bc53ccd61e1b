"""A soak of the log limit: a detached run prints past `--log-limit` while contact is cut every minute.

Every line has to be accounted for: it came home once and in order, or a notice at its place says how many bytes are
missing. As root, in a lab of its own:

    scripts/isolate .venv/bin/python -m tests.lab.log_soak --minutes 30
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from multinode.lab.cluster import down_lab
from multinode.lab.state import MANAGEMENT_IFNAME, Lab
from tests.equipment.faults import LinkDown, clear_faults, make_fault
from tests.lab.conftest import SHARED, stand_lab
from tests.lab.launching import MULTINODE, REPOSITORY, processes_of

_LIMIT = "1M"
_LINE_BYTES, _LINES_PER_S = 100, 1000
_START_S, _END_S = 120.0, 600.0
# Longer than what the limit holds is printed in, and shorter.
_CUTS_S = (25.0, 5.0)
_CHATTER = f"""
import sys, time
began, count, seconds = time.monotonic(), 0, float(sys.argv[1])
while time.monotonic() - began < seconds:
    text = "".join(f"line {{count + each:010d}} ".ljust({_LINE_BYTES - 1}, ".") + "\\n" for each in range(50))
    sys.stdout.write(text)
    sys.stdout.flush()
    count += 50
    time.sleep(max(0.0, began + count / {_LINES_PER_S} - time.monotonic()))
print(f"the end after {{count}} lines")
"""
_WHOLE = re.compile(rf"^line (\d{{10}}) \.{{{_LINE_BYTES - 17}}}$", re.MULTILINE)
_GONE = re.compile(r"\nmultinode: .* of the log is missing: .*\n")
_END = re.compile(r"^the end after (\d+) lines$", re.MULTILINE)


class Account(NamedTuple):
    """What became of the lines of a node."""

    printed: int
    home: int
    gaps: int
    missing_bytes: int


def account_of(log: str, gaps: Sequence[int]) -> Account:
    """What became of the lines in a log.

    Args:
        log: as it is stored.
        gaps: beside it, for each of its notices how many bytes the notice is shorter than what it stands for.

    Raises:
        AssertionError: a line is missing without a notice of as many bytes, came twice, or out of order.
    """
    # A notice begins with a line break of its own.
    pieces = _GONE.split(log)
    notices = [len(notice) for notice in _GONE.findall(log)]
    assert len(notices) == len(gaps), f"{len(notices)} notices, {len(gaps)} gaps"
    gone = [notice + gap for notice, gap in zip(notices, gaps, strict=True)]
    position, home, last = 0, 0, -1
    for piece, missing in zip(pieces, [*gone, 0], strict=True):
        # Lines are of one length, so a byte's place tells which line it belongs to.
        for found in _WHOLE.finditer(piece):
            number = int(found[1])
            assert number > last, f"line {number} after line {last}"
            assert position + found.start() == number * _LINE_BYTES, f"line {number} is not at its place"
            home, last = home + 1, number
        position += len(piece) + missing
    end = _END.search(pieces[-1])
    assert end is not None, "the log has no end"
    assert position == int(end[1]) * _LINE_BYTES + len(end[0]) + 1, f"{position} bytes of {end[1]} lines"
    return Account(int(end[1]), home, len(gone), sum(gone))


def soak(lab: Lab, home: Path, minutes: float, period_s: float = 60.0) -> dict[str, Any]:
    """Follow one run while contact is cut; returns what became of its lines."""
    seconds = minutes * 60
    env = os.environ | {"MULTINODE_RUNS": str(home)}
    options: dict[str, Any] = {"cwd": REPOSITORY, "env": env, "stdin": subprocess.DEVNULL}

    def call(*words: str, deadline_s: float) -> dict[str, Any]:
        done = subprocess.run(
            [*MULTINODE, words[0], "--json", *words[1:]],
            capture_output=True,
            text=True,
            check=False,
            timeout=deadline_s,
            **options,
        )
        document: dict[str, Any] = json.loads(done.stdout)
        return document

    job = ("--engine", "exec", "--", "python3", "-c", _CHATTER, str(seconds))
    where = ("--hosts", "lab", "--no-check", "--log-limit", _LIMIT, "--detach")
    run_id = call("launch", *where, *job, deadline_s=_START_S)["run_id"]
    follower, cuts, end = None, 0, time.monotonic() + seconds
    try:
        while time.monotonic() < end:
            if follower is None or follower.poll() is not None:
                quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
                follower = subprocess.Popen([*MULTINODE, "attach", run_id], **options, **quiet)
            time.sleep(min(period_s, max(0.0, end - time.monotonic())))
            for node in lab.nodes:
                make_fault(lab, LinkDown(node=node.name, ifname=MANAGEMENT_IFNAME))
            time.sleep(_CUTS_S[cuts % len(_CUTS_S)])
            clear_faults(lab)
            cuts += 1
    finally:
        clear_faults(lab)
        if follower is not None:
            follower.kill()
            follower.wait()
    ended = call("attach", run_id, deadline_s=_END_S)
    assert ended["status"] == "succeeded", ended
    assert not processes_of(run_id)
    accounts = []
    for path in sorted((home / run_id / "logs").glob("*.log")):
        gaps = path.with_suffix(".gaps")
        told = [int(line) for line in gaps.read_text().splitlines()] if gaps.exists() else []
        accounts.append(account_of(path.read_text(), told)._asdict())
    assert len(accounts) == len(lab.nodes)
    return {"minutes": minutes, "cuts": cuts, "nodes": accounts}


def main() -> None:
    """Soak, and print what became of the lines."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    asked = parser.parse_args()
    lab = stand_lab(SHARED)
    try:
        with tempfile.TemporaryDirectory() as folder:
            seen = soak(lab, Path(folder), asked.minutes)
    finally:
        down_lab()
    sys.stdout.write(json.dumps(seen) + "\n")


if __name__ == "__main__":
    main()
