"""A full check of many nodes against `pdsh true` on the same nodes, in the same run.

Both log in to every node; pdsh runs `true` there, `multinode check --no-bandwidth` probes, lets the nodes call at each
other's ports, and judges. In turn, so that drift of the machine hits both alike; `--beside DIR` takes the checkout of
another release into the turns. Needs pdsh, and root; with a lab up:

    multinode lab up --nodes 64
    .venv/bin/python benchmarks/check_fanout.py --repeats 5

Processor time depends little on what else the machine does: `here` is of the command and the `ssh` below it, `nodes`
of all else here, which are the nodes where nothing else runs in this PID namespace (scripts/isolate). Memory is
the PSS of the command and its `ssh`, summed, at its most in the first round, which is not timed.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

REPOSITORY = Path(__file__).parent.parent
JOB = "configs/tiny_sft.yaml"
CHECK = "import sys; from multinode.cli.main import run; sys.exit(run())"
# linux/prctl.h: masters of ssh that went into the background stay below us.
_SET_CHILD_SUBREAPER = 36
_LOOK_S = 0.2


def main() -> None:
    """Measure and print one JSON document; each round on stderr."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--beside", type=Path, help="the checkout of another release")
    asked = parser.parse_args()
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    program = [sys.executable, "-P", "-c", CHECK]
    status = subprocess.run([*program, "lab", "status", "--json"], check=True, capture_output=True)
    lab = json.loads(status.stdout)
    names = [node["name"] for node in lab["nodes"]]
    check = [*program, "check", "--hosts", "lab", JOB, "--no-bandwidth", "--json"]
    ways: dict[str, tuple[list[str], Path]] = {"pdsh": (_pdsh(lab, names), REPOSITORY), "check": (check, REPOSITORY)}
    if asked.beside is not None:
        ways["beside"] = (check, asked.beside)
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    memory_mib: dict[str, float] = {}
    for repeat in range(asked.repeats + 1):
        for name, (argv, tree) in ways.items():
            # The first round warms the caches of all alike.
            taken, pss_mib = _measure(name, argv, tree, len(names), look=repeat == 0)
            sys.stderr.write(f"{name:6} {taken}\n")
            if repeat > 0:
                rows[name].append(taken)
            else:
                memory_mib[name] = pss_mib
    medians = {name: {what: statistics.median(row[what] for row in of) for what in of[0]} for name, of in rows.items()}
    document = {
        "nodes": len(names),
        "rows": rows,
        "medians": medians,
        "check_over_pdsh": medians["check"]["wall_s"] / medians["pdsh"]["wall_s"],
        "pss_mib": memory_mib,
    }
    print(json.dumps(document, indent=2))


def _pdsh(lab: dict[str, Any], names: list[str]) -> list[str]:
    config = Path(lab["hostfile"]).with_name("ssh_config")
    os.environ["PDSH_SSH_ARGS_APPEND"] = f"-F {config}"
    return ["pdsh", "-R", "ssh", "-w", ",".join(names), "true"]


def _measure(name: str, argv: list[str], tree: Path, count: int, *, look: bool) -> tuple[dict[str, float], float]:
    """Seconds of one run, and the most memory that it held, in MiB, where that is looked at."""
    here_s, nodes_s, began = _children_s(), _others_s(), time.monotonic()
    env = os.environ | {"PYTHONPATH": str(tree)}
    with subprocess.Popen(argv, cwd=REPOSITORY, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        pss = 0.0
        while look and process.poll() is None:
            pss = max(pss, sum(map(_pss, psutil.Process().children(recursive=True))))
            time.sleep(_LOOK_S)
        stdout, stderr = process.communicate(timeout=600)
    wall_s = time.monotonic() - began
    while psutil.Process().children():
        os.wait()
    if name == "pdsh" and (process.returncode != 0 or stderr):
        raise SystemExit(f"pdsh failed: {stderr.decode()[-500:]}")
    if name != "pdsh":
        document = json.loads(stdout)
        if not document["ok"] or sum(node["reached"] for node in document["nodes"]) != count:
            raise SystemExit(f"the check found errors: {json.dumps(document['findings'])[:2000]}")
    taken = {"wall_s": wall_s, "here_cpu_s": _children_s() - here_s, "nodes_cpu_s": _others_s() - nodes_s}
    return taken, pss / (1 << 20)


def _children_s() -> float:
    times = os.times()
    return times.children_user + times.children_system


def _others_s() -> float:
    """Processor seconds of all processes but us and ours, those that have ended below them included."""
    ours = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
    return sum(
        sum(process.info["cpu_times"][:4]) for process in psutil.process_iter(["cpu_times"]) if process.pid not in ours
    )


def _pss(process: psutil.Process) -> float:
    try:
        pss: int = process.memory_full_info().pss
    except psutil.Error:
        return 0.0
    return float(pss)


if __name__ == "__main__":
    main()
