"""All-reduce of 64 MiB over the lab's nodes as nccl-test measures it, against a plain torch loop and iperf3.

All three in turn, in one run, medians of the repeats; then a sweep, and how well its curve predicts sizes held back.
iperf3 from Debian's package of that name; run as root with a lab up:

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

from command import MULTINODE, run

from multinode.predict.network_model import held_back_errors
from multinode.traffic.algorithms import bus_factor
from multinode.traffic.step_calls import fit_curve

PLAIN = Path(__file__).parent / "plain_all_reduce.py"
SIZE_BYTES = 64 << 20
MIB = 1 << 20


def main() -> None:
    """Measure and print one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--iters", type=int, default=8)
    asked = parser.parse_args()
    nodes = json.loads(run([MULTINODE, "lab", "status", "--json"]))["nodes"]
    ours, plain, goodput = [], [], []
    for _ in range(asked.repeats):
        goodput.append(_iperf3(nodes))
        plain.append(_plain(nodes, asked.iters))
        ours.append(_nccl_test("-b", "64M", "-e", "64M", "-n", str(asked.iters))["rows"][-1]["busbw_gb_per_s"])
        sys.stderr.write(f"iperf3 {goodput[-1]:.4f}  plain loop {plain[-1]:.4f}  nccl-test {ours[-1]:.4f} GB/s\n")
    sweep = _nccl_test("-b", "64K", "-e", "64M", "-f", "2", "-n", str(asked.iters))
    points = [(row["size_bytes"], row["time_us"]["value"]) for row in sweep["rows"]]
    errors = held_back_errors(fit_curve(points), MIB)
    document = {
        "schema": "multinode.collective-bandwidth/2",
        "nodes": len(nodes),
        "rate": nodes[0]["rate"],
        "size_bytes": SIZE_BYTES,
        "busbw_gb_per_s": ours,
        "plain_busbw_gb_per_s": plain,
        "iperf3_gb_per_s": goodput,
        "of_plain": statistics.median(ours) / statistics.median(plain),
        "of_iperf3": statistics.median(ours) / statistics.median(goodput),
        "held_back_errors": errors,
        "held_back_median_error": statistics.median(map(abs, errors.values())) if errors else None,
    }
    print(json.dumps(document, indent=2))


def _iperf3(nodes: list[dict[str, Any]]) -> float:
    """Goodput of one TCP stream of three seconds from node 0 to node 1, as the receiver counts it, in GB/s."""
    server, client = nodes[1], nodes[0]
    with subprocess.Popen(
        [*_inside(server), "iperf3", "-s", "-1", "--forceflush", "-B", server["addr"]],
        stdout=subprocess.PIPE,
        text=True,
    ) as listening:
        assert listening.stdout is not None
        while "listening" not in listening.stdout.readline():
            pass
        report = json.loads(run([*_inside(client), "iperf3", "-c", server["addr"], "-t", "3", "-O", "1", "-J"]))
        listening.wait(60)
    return float(report["end"]["sum_received"]["bits_per_second"]) / 8e9


def _plain(nodes: list[dict[str, Any]], iters: int) -> float:
    """A plain loop under torchrun, typed on every node as a person would: its busbw in GB/s."""
    environment = ["env", "GLOO_SOCKET_IFNAME=ens1f0", "OMP_NUM_THREADS=1"]
    launcher = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={len(nodes)}", "--nproc-per-node=1"]
    where = [f"--master-addr={nodes[0]['addr']}", "--master-port=29555"]
    loop = [str(PLAIN), str(SIZE_BYTES), str(iters)]
    processes = [
        subprocess.Popen(
            [*_inside(node), *environment, *launcher, f"--node-rank={rank}", *where, *loop],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for rank, node in enumerate(nodes)
    ]
    outputs = [process.communicate(timeout=600)[0] for process in processes]
    return SIZE_BYTES / float(outputs[0]) / 1000 * bus_factor("all_reduce", len(nodes))


def _nccl_test(*options: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as runs:
        command = [MULTINODE, "nccl-test", "--hosts", "lab", *options, "--json"]
        document: dict[str, Any] = json.loads(run(command, {"MULTINODE_RUNS": runs}))
    return document


def _inside(node: dict[str, Any]) -> list[str]:
    return [MULTINODE, "lab", "exec", node["name"], "--"]


if __name__ == "__main__":
    main()
