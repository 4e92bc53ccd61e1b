"""What `logs`, `show`, `report` and `attach` of a long run take: python benchmarks/long_run.py [--steps 1000000].

Makes a run directory such as a launch leaves, of so many steps, workers per node and nodes, and runs each verb on it in
a process of its own: seconds, and the most memory that it held. A million steps of two nodes of 8 take 8 GB of disk.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from multinode.core.cluster.cluster import Cluster, Node
from multinode.core.run.plan import LaunchPlan, NodePlan
from multinode.core.run.quoting import Command
from multinode.core.run.run import NodeRun, Run
from multinode.store.run_directory import RunDirectory

RUN = "20260102-030405-abcd"
STEP_S = 0.25
_STEP = (
    '{"schema": 1, "kind": "step", "rank": %d, "time_s": %.4f, "mono_ns": %d, "step_time_us": %.3f, "phases_us": '
    '{"forward": 70372.704, "backward": %.3f, "optimizer": 3291.905, "comm": 5213.079}, '
    '"core_wait_us": {"host": 241.424, "backward": 2843.89}, '
    '"traffic": 0, "micro_steps": 1, "samples": 16, "tokens": 8192, "step": %d}\n'
)
_HEAD = (
    '{"schema": 1, "kind": "worker", "rank": %d, "begun_mono_ns": 1, "local_rank": %d, "world_size": %d, '
    '"time_s": 0.0, "source": "optimizer", "versions": {"torch": "2.13.0"}}\n'
    '{"schema": 1, "kind": "traffic", "rank": %d, "traffic": 0, "calls": [{"op": "all_reduce", "group": "0", '
    '"size_bytes": 1185796, "count": 1, "source": "ddp"}]}\n'
)


def make_run(root: Path, steps: int, per_node: int, nodes: int, log_bytes: int) -> RunDirectory:
    """The run directory of a training that went well; step times vary by a tenth, in a way that all workers share."""
    directory = RunDirectory.create(root, RUN)
    world = per_node * nodes
    names = [f"gpu-{node}" for node in range(nodes)]
    planned = tuple(
        NodePlan(
            node=name, node_rank=node, ranks=tuple(range(node * per_node, (node + 1) * per_node)),
            addr=f"192.0.2.{node + 1}", ifname="eth0", link_gbit_per_s=10.0, run_dir="/r",
            command=Command(argv=("true",)),
        )
        for node, name in enumerate(names)
    )  # fmt: skip
    plan = LaunchPlan(
        run_id=RUN, engine="torchrun", job="train.py", master_addr="192.0.2.1", master_port=29500,
        nproc_per_node=per_node, world_size=world, nodes=planned,
    )  # fmt: skip
    ended = tuple(NodeRun(name=name, node_rank=node, state="ended", exit_code=0) for node, name in enumerate(names))
    run = Run(
        run_id=RUN, job="train.py", engine="torchrun", status="succeeded", started_s=0.0, ended_s=steps * STEP_S,
        world_size=world, nodes=ended,
    )  # fmt: skip
    cluster = Cluster(nodes=tuple(Node(name=name, slots=per_node) for name in names), source="hosts.txt")
    directory.write_cluster(cluster, "".join(f"{name} slots={per_node}\n" for name in names))
    directory.write("plan.json", plan)
    for rank in range(world):
        folder = directory.path / "samples" / f"node-{rank // per_node}"
        folder.mkdir(mode=0o700, exist_ok=True)
        with (folder / f"rank-{rank}.jsonl").open("w") as file:
            file.write(_HEAD % (rank, rank % per_node, world, rank))
            for step in range(1, steps + 1):
                took_us = STEP_S * 1e6 * (1 + (step * 7919 % 2001 - 1000) / 10_000)
                at = step * STEP_S
                file.write(_STEP % (rank, at, at * 1e9, took_us, took_us - 8e4, step))
    line = b"{'loss': 1.2345, 'grad_norm': 0.123, 'learning_rate': 2e-05, 'epoch': 0.123}\n"
    for node in range(nodes):
        with directory.log_path(node).open("wb") as file:
            for _ in range(log_bytes // (len(line) << 10)):
                file.write(line * 1024)
    directory.write("run.json", run)
    return directory


def measure(directory: RunDirectory, *words: str) -> None:
    """Run a verb, and say what it took."""
    environ = dict(os.environ) | {"MULTINODE_RUNS": str(directory.path.parent)}
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "multinode", "-q", *words],
        env=environ,
        stdout=subprocess.DEVNULL,
        cwd=directory.path.parent,
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    name = " ".join(words[:1])
    print(
        f"{name:8} {time.monotonic() - began:7.1f} s {usage.ru_maxrss / 1024:7.0f} MiB  exit {process.returncode}",
        flush=True,
    )


def main() -> None:
    """Make the run and measure each verb."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--ranks", type=int, default=8, help="per node")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--log-mib", type=int, default=256, help="of each node")
    parser.add_argument("--keep", type=Path, help="where to make it, and leave it")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        root = options.keep or Path(temporary)
        began = time.monotonic()
        directory = make_run(root, options.steps, options.ranks, options.nodes, options.log_mib << 20)
        size = sum(path.stat().st_size for path in directory.path.rglob("*") if path.is_file())
        print(f"made {size / 2**30:.1f} GiB in {time.monotonic() - began:.0f} s", flush=True)
        # attach reads what came home, and summarises a run that is over; show is of what it left.
        measure(directory, "attach", RUN)
        measure(directory, "show", RUN)
        measure(directory, "report", RUN, "-o", str(root / "report.html"))
        measure(directory, "logs", RUN)


if __name__ == "__main__":
    main()
