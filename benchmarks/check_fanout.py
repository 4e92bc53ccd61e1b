"""A full check of many nodes against `pdsh true` on the same nodes, in the same run.

Both log in to every node; pdsh runs `true` there, `multinode check --no-bandwidth` probes, lets the nodes call at each
other's ports, and judges. In turn, so that drift of the machine hits both alike. Needs pdsh, and root; with a lab up:

    multinode lab up --nodes 64
    .venv/bin/python benchmarks/check_fanout.py --repeats 5

The controller's peak memory is that of the check's process and its children, from getrusage(2).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

BIN = Path(sys.executable).parent
JOB = "configs/tiny_sft.yaml"


def main() -> None:
    """Measure and print one JSON document; each round on stderr."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    lab = json.loads(
        subprocess.run([BIN / "multinode", "lab", "status", "--json"], check=True, capture_output=True).stdout
    )
    names = [node["name"] for node in lab["nodes"]]
    ways = {"pdsh": _pdsh(lab, names), "check": [str(BIN / "multinode"), "check", "--hosts", "lab", JOB]}
    ways["check"] += ["--no-bandwidth", "--json"]
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(repeats + 1):
        for name, argv in ways.items():
            taken = _measure(name, argv, len(names))
            if repeat > 0:  # the first round warms the caches of both alike
                seconds[name].append(taken)
            sys.stderr.write(f"{name:6} {taken:.2f} s\n")
    medians = {name: statistics.median(taken) for name, taken in seconds.items()}
    memory_mib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    document = {
        "nodes": len(names),
        "seconds": seconds,
        "median_s": medians,
        "check_over_pdsh": medians["check"] / medians["pdsh"],
        "controller_peak_mib": memory_mib,
    }
    print(json.dumps(document, indent=2))


def _pdsh(lab: dict[str, Any], names: list[str]) -> list[str]:
    config = Path(lab["hostfile"]).with_name("ssh_config")
    os.environ["PDSH_SSH_ARGS_APPEND"] = f"-F {config}"
    return ["pdsh", "-R", "ssh", "-w", ",".join(names), "true"]


def _measure(name: str, argv: list[str], count: int) -> float:
    began = time.monotonic()
    ended = subprocess.run(argv, capture_output=True, check=False, timeout=600)
    taken = time.monotonic() - began
    if name == "pdsh" and (ended.returncode != 0 or ended.stderr):
        raise SystemExit(f"pdsh failed: {ended.stderr.decode()[-500:]}")
    if name == "check":
        document = json.loads(ended.stdout)
        if not document["ok"] or sum(node["reached"] for node in document["nodes"]) != count:
            raise SystemExit(f"the check found errors: {json.dumps(document['findings'])[:2000]}")
    return taken


if __name__ == "__main__":
    main()
