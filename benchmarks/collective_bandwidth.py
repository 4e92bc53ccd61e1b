"""busbw of all-reduce at 64 MiB between two lab nodes, against what iperf3 gets between the same interfaces.

Both in turn, in one run, medians of the repeats. iperf3 from Debian's package of that name; run as root with a lab up:

    multinode lab up --nodes 2 --rate 1gbit
    .venv/bin/python benchmarks/collective_bandwidth.py --repeats 5
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

MULTINODE = [sys.executable, "-m", "multinode"]
SIZE = "64M"


def main() -> None:
    """Measure and print one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    nodes = json.loads(_run([*MULTINODE, "lab", "status", "--json"]))["nodes"]
    busbw, goodput = [], []
    for _ in range(repeats):
        goodput.append(_iperf3(nodes))
        busbw.append(_all_reduce())
        sys.stderr.write(f"iperf3 {goodput[-1]:.4f} GB/s   all-reduce {busbw[-1]:.4f} GB/s\n")
    document = {
        "schema": "multinode.collective-bandwidth/1",
        "rate": nodes[0]["rate"],
        "size": SIZE,
        "busbw_gb_per_s": busbw,
        "iperf3_gb_per_s": goodput,
        "ratio_of_medians": statistics.median(busbw) / statistics.median(goodput),
    }
    print(json.dumps(document, indent=2))


def _iperf3(nodes: list[dict[str, Any]]) -> float:
    """Goodput of one TCP stream of three seconds from node 0 to node 1, as the receiver counts it, in GB/s."""
    server, client = nodes[1], nodes[0]
    with subprocess.Popen(
        [*MULTINODE, "lab", "exec", server["name"], "--", "iperf3", "-s", "-1", "--forceflush", "-B", server["addr"]],
        stdout=subprocess.PIPE,
        text=True,
    ) as listening:
        assert listening.stdout is not None
        while "listening" not in listening.stdout.readline():
            pass
        command = ["iperf3", "-c", server["addr"], "-t", "3", "-O", "1", "-J"]
        report = json.loads(_run([*MULTINODE, "lab", "exec", client["name"], "--", *command]))
        listening.wait(60)
    return float(report["end"]["sum_received"]["bits_per_second"]) / 8e9


def _all_reduce() -> float:
    with tempfile.TemporaryDirectory() as runs:
        sweep = ["nccl-test", "--hosts", "lab", "-b", SIZE, "-e", SIZE, "-n", "8", "--json"]
        document = json.loads(_run(["env", f"MULTINODE_RUNS={runs}", *MULTINODE, *sweep]))
    return float(document["rows"][-1]["busbw_gb_per_s"])


def _run(argv: list[str]) -> str:
    repository = Path(__file__).parent.parent
    done = subprocess.run(argv, check=True, capture_output=True, text=True, timeout=300, cwd=repository)
    return done.stdout


if __name__ == "__main__":
    main()
