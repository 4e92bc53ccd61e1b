"""Time from the command to the first line of a trivial training script on both nodes of the lab.

Four ways, in turn, so that drift of the machine hits all alike:

    by-hand     ssh to both nodes at once, torchrun typed out, ranks and addresses by hand
    deepspeed   deepspeed --hostfile, its ssh launcher (pdsh)
    no-check    multinode launch --no-check
    default     multinode launch

Run as root, with a lab of two nodes up:

    multinode lab up --nodes 2 --rate 1gbit
    .venv/bin/python benchmarks/launch_latency.py --repeats 10

`deepspeed` needs pdsh; `--ways by-hand,no-check,default` leaves it out.

The script writes the wall clock to a file of its own as its first act; both nodes share this machine's clock.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SCRIPT = """\
import os, time
first = time.time()
name = "{folder}/" + os.environ["RANK"]
with open(name + ".partial", "w") as file:
    file.write(repr(first))
os.rename(name + ".partial", name)
"""
BIN = Path(sys.executable).parent
REPOSITORY = Path(__file__).parent.parent
REMOTE = "/tmp/multinode-latency"  # noqa: S108 - on the lab's own nodes


def main() -> None:
    """Measure and print one JSON document, and a table on stderr."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--ways", default="by-hand,deepspeed,no-check,default", help="which of them, in turn")
    asked = parser.parse_args()
    lab = json.loads(
        subprocess.run([BIN / "multinode", "lab", "status", "--json"], check=True, capture_output=True).stdout
    )
    ways = {name: start for name, start in _ways(lab).items() if name in asked.ways.split(",")}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(asked.repeats + 1):
        for name, start in ways.items():
            taken = _measure(lab, start)
            if repeat > 0:  # the first round warms the caches of all alike
                seconds[name].append(taken)
            sys.stderr.write(f"{name:10} {taken:.2f} s\n")
    print(json.dumps(_summary(seconds), indent=2))


def _summary(seconds: dict[str, list[float]]) -> dict[str, object]:
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "schema": "multinode.launch-latency/1",
        "repeats": min(map(len, seconds.values())),
        "seconds": seconds,
        "median_s": medians,
        "over_by_hand": {name: median / medians["by-hand"] for name, median in medians.items() if "by-hand" in medians},
    }


def _measure(lab: dict[str, Any], start: Callable[[Path], list[list[str]]]) -> float:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        script = folder / "first.py"
        for node in lab["nodes"]:
            _on(lab, node["name"], f"rm -rf {REMOTE}; mkdir -p {REMOTE}")
            _on(lab, node["name"], f"cat > {REMOTE}/first.py", SCRIPT.format(folder=REMOTE))
        commands = start(script)
        environment = _environment(folder, lab)
        began = time.time()
        running = [
            subprocess.Popen(
                argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=REPOSITORY, env=environment
            )
            for argv in commands
        ]
        for process in running:
            if process.wait(120) != 0:
                raise SystemExit(f"failed: {process.args!r}")
        stamps = [_on(lab, node["name"], f"cat {REMOTE}/{rank}") for rank, node in enumerate(lab["nodes"])]
        return max(float(stamp) for stamp in stamps) - began


def _environment(folder: Path, lab: dict[str, Any]) -> dict[str, str]:
    return os.environ | {
        "MULTINODE_RUNS": str(folder / "runs"),
        "PATH": f"{BIN}:{os.environ['PATH']}",
        # deepspeed starts its nodes through pdsh, which is told so where the nodes' names and keys stand.
        "PDSH_SSH_ARGS": f"-F {_ssh_config(lab)} -2 -a -x %h",
        "DS_ACCELERATOR": "cpu",
    }


def _ssh_config(lab: dict[str, Any]) -> str:
    return str(Path(lab["hostfile"]).parent / "ssh_config")


def _ways(lab: dict[str, Any]) -> dict[str, Callable[[Path], list[list[str]]]]:
    config = _ssh_config(lab)
    master = lab["nodes"][0]["addr"]

    def by_hand(_: Path) -> list[list[str]]:
        return [["ssh", "-F", config, node["name"], typed(rank, node)] for rank, node in enumerate(lab["nodes"])]

    def typed(rank: int, node: dict[str, Any]) -> str:
        return (
            f"OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME={node['ifname']} {BIN}/torchrun --nnodes 2 --nproc-per-node 1 "
            f"--node-rank {rank} --master-addr {master} --master-port 29500 {REMOTE}/first.py"
        )

    def deepspeed(script: Path) -> list[list[str]]:
        hostfile = script.parent / "hostfile"
        hostfile.write_text("".join(f"{node['name']} slots=1\n" for node in lab["nodes"]))
        return [
            [
                f"{BIN}/deepspeed", "--hostfile", str(hostfile), "--master_addr", master, "--no_ssh_check",
                "--no_local_rank", f"{REMOTE}/first.py",
            ]
        ]  # fmt: skip

    def launch(*options: str) -> Callable[[Path], list[list[str]]]:
        argv = [str(BIN / "multinode"), "launch", "--hosts", "lab", "--workers-per-node", "1", *options]
        return lambda _: [[*argv, "--", f"{REMOTE}/first.py"]]

    return {"by-hand": by_hand, "deepspeed": deepspeed, "no-check": launch("--no-check"), "default": launch()}


def _on(lab: dict[str, Any], node: str, command: str, stdin: str = "") -> str:
    config = _ssh_config(lab)
    done = subprocess.run(
        ["ssh", "-F", config, node, command], input=stdin, capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout


if __name__ == "__main__":
    main()
