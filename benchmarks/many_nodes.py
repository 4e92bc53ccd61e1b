"""Launch, follow and stop of a light job on more and more nodes: what it costs the controller.

The job prints a line a second on every node, so that what is measured is multinode and the logins. For each number of
nodes: the time until the job runs on all of them (launch --detach), processor time and peak memory of following it, and
the time until it is gone from all of them (stop). Each should grow no faster than the nodes. As root, with a lab up:

    multinode lab up --nodes 32
    .venv/bin/python benchmarks/many_nodes.py --nodes 8,16,32 --follow 20
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

BIN = Path(sys.executable).parent
JOB = ["python3", "-I", "-S", "-u", "-c", "import time\nwhile True: print('on', flush=True); time.sleep(1)"]


def main() -> None:
    """Measure and print one JSON document; each round on stderr."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", default="8,16,32", help="how many, from few to many")
    parser.add_argument("--follow", type=float, default=20.0, help="seconds that each run is followed")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as runs:
        rows = [_measure(Path(runs), int(count), arguments.follow) for count in arguments.nodes.split(",")]
    first, last = rows[0], rows[-1]
    growth = {name: last[name] / first[name] for name in first}
    print(json.dumps({"rows": rows, "growth": growth}, indent=2))


def _measure(runs: Path, count: int, follow_s: float) -> dict[str, float]:
    options = ["--hosts", "lab", "--nodes", str(count), "--engine", "exec", "--detach", "--json"]
    began = time.monotonic()
    run = json.loads(_run(runs, "launch", *options, "--", *JOB))
    launch_s = time.monotonic() - began
    follow = _follow(runs, run["run_id"], follow_s)
    began = time.monotonic()
    stopped = json.loads(_run(runs, "stop", run["run_id"], "--grace-period", "2", "--json"))
    stop_s = time.monotonic() - began
    left = sum(node["processes_left"] or 0 for node in stopped["nodes"])
    if stopped["status"] != "stopped" or left:
        raise SystemExit(f"not stopped: {stopped}")
    row = {"nodes": count, "launch_s": launch_s, **follow, "stop_s": stop_s}
    sys.stderr.write(f"{row}\n")
    return row


def _follow(runs: Path, run_id: str, seconds: float) -> dict[str, float]:
    """Processor time as a share of the time, and peak memory, of a controller that follows."""
    process = subprocess.Popen(
        [BIN / "multinode", "attach", run_id],
        env=_environment(runs),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    time.sleep(seconds)
    memory_mib = _status_kib(process.pid, "VmHWM") / 1024
    ticks = sum(map(int, Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]))
    process.send_signal(signal.SIGINT)
    process.wait(60)
    return {"follow_cpu_share": ticks / os.sysconf("SC_CLK_TCK") / seconds, "follow_peak_mib": memory_mib}


def _status_kib(pid: int, name: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def _run(runs: Path, *arguments: str) -> bytes:
    ended: Any = subprocess.run(
        [BIN / "multinode", *arguments], env=_environment(runs), capture_output=True, check=False, timeout=600
    )
    if not ended.stdout:
        raise SystemExit(ended.stderr.decode())
    return bytes(ended.stdout)


def _environment(runs: Path) -> dict[str, str]:
    return os.environ | {"MULTINODE_RUNS": str(runs)}


if __name__ == "__main__":
    main()
