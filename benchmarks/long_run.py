"""What `logs`, `show`, `report` and `attach` of a long run take: python benchmarks/long_run.py [--steps 1000000].

Makes a run directory such as a launch leaves, of so many steps, workers per node and nodes, and runs each verb on it in
a process of its own: seconds, those of the processor, and the most memory that it held. A million steps of two nodes of
8 take 6 GB of disk. `--beside DIR` has a checkout of another release take turns.

Then a run that goes on, on two nodes that are this machine, gets as long records, and is attached to anew: how long its
nodes wait for the first renewal of their lease. As root.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from multinode.cluster.cluster import Cluster, Node
from multinode.cluster.dataplane import Endpoint
from multinode.cluster.hostfile import render_hostfile
from multinode.cluster.quoting import Command
from multinode.job.engines.engine import Engine
from multinode.job.job import ScriptJob
from multinode.launch.attach import attach, stop
from multinode.launch.context import ExecuteOptions, Launch, RunContext
from multinode.launch.launch import launch
from multinode.records.plan import LaunchPlan, NodePlan, Place, Rendezvous
from multinode.records.run import NodeRun, Run
from multinode.records.run_directory import RunDirectory
from multinode.records.status import Status
from multinode.runs.stored_run import StoredRun
from multinode.transport.local import LocalTransport

RUN = "20260102-030405-abcd"
STEP_S = 0.25
_DEADLINE_S = 600.0
HERE = Cluster(
    nodes=tuple(Node(name=f"gpu-{rank}", addr="127.0.0.1", ifname="lo", workdir="/") for rank in range(2)),
    source="this machine",
)
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
            place=Place(
                node=name,
                node_rank=node,
                ranks=tuple(range(node * per_node, (node + 1) * per_node)),
                run_dir="/r",
                endpoint=Endpoint(addr=f"192.0.2.{node + 1}", ifname="eth0", link_gbit_per_s=10.0),
            ),
            command=Command(argv=("true",)),
        )
        for node, name in enumerate(names)
    )
    plan = LaunchPlan(
        rendezvous=Rendezvous(addr="192.0.2.1", port=29500, workers=(per_node,) * len(names)),
        run_id=RUN,
        engine="torchrun",
        job="train.py",
        nodes=planned,
    )
    status = Status(state="ended", exit_code=0)
    ended = tuple(NodeRun(name=name, node_rank=node, state="ended", status=status) for node, name in enumerate(names))
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


def measure(directory: RunDirectory, trees: Sequence[Path], *words: str) -> None:
    """Run a verb, by each checkout in turn, and say what it took."""
    for tree in trees:
        environ = dict(os.environ) | {"MULTINODE_RUNS": str(directory.path.parent), "PYTHONPATH": str(tree)}
        began = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, "-m", "multinode", "-q", *words],
            env=environ,
            stdout=subprocess.DEVNULL,
            cwd=directory.path.parent,
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        took_s, cpu_s = time.monotonic() - began, usage.ru_utime + usage.ru_stime
        told = f"{words[0]:8} {took_s:7.1f} s {cpu_s:7.1f} s of a core {usage.ru_maxrss / 1024:7.0f} MiB"
        print(f"{told}  exit {process.returncode}  {tree.name}", flush=True)


def measure_renewal(recorded: RunDirectory, home: Path, trees: Sequence[Path]) -> None:
    """Attach to a run that goes on and has recorded as much, and say when the leases of all its nodes were renewed."""
    context = RunContext(LocalTransport(home), recorded.path.parent)
    started = launch(
        Launch(
            cluster=HERE,
            hostfile=render_hostfile(HERE),
            job=ScriptJob(argv=("sleep", "3600")),
            workers_per_node=1,
            engine=Engine(name="exec"),
            execute=ExecuteOptions(leave_when_running=True),
            check=False,
        ),
        context,
    )
    for rank, node in enumerate(started.plan.nodes):
        there, here = Path(node.place.run_dir), started.directory.path / "samples" / f"node-{rank}"
        here.mkdir(exist_ok=True)
        for path in recorded.sample_files(rank):
            (here / path.name).hardlink_to(path)
            # All of it has come already: what the node has of it is never read.
            with (home / there / "samples" / path.name).open("wb") as file:
                file.truncate(path.stat().st_size)
    for tree in trees:
        leases = [str(home / node.place.run_dir / "lease.json") for node in started.plan.nodes]
        argv = [sys.executable, __file__, "--attach", str(started.directory), str(home), str(time.monotonic()), *leases]
        subprocess.run(argv, env=dict(os.environ) | {"PYTHONPATH": str(tree)}, check=True, timeout=_DEADLINE_S)
        print(f"  by {tree.name}", flush=True)
    stop(StoredRun(started.directory), context, 2.0, HERE)
    context.agent.close()


def attach_until_renewed(run: Path, home: Path, began_s: float, leases: Sequence[Path]) -> None:
    """In a process of its own, which ends with the first renewal of all."""
    before = [path.stat().st_mtime_ns for path in leases]

    def watch() -> None:
        while any(path.stat().st_mtime_ns == mtime for path, mtime in zip(leases, before, strict=True)):
            time.sleep(0.01)
        used = resource.getrusage(resource.RUSAGE_SELF)
        told = f"{time.monotonic() - began_s:7.1f} s {used.ru_utime + used.ru_stime:7.1f} s of a core"
        print(f"renewal  {told} {used.ru_maxrss / 1024:7.0f} MiB", flush=True)
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()
    attach(StoredRun(RunDirectory(run)), RunContext(LocalTransport(home), run.parent), ExecuteOptions(), HERE)


def main() -> None:
    """Make the run and measure each verb."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--ranks", type=int, default=8, help="per node")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--log-mib", type=int, default=256, help="of each node")
    parser.add_argument("--keep", type=Path, help="where to make it, and leave it; one that is there is taken")
    parser.add_argument("--beside", type=Path, action="append", default=[], help="a checkout of another release")
    parser.add_argument("--attach", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.attach:
        run, home, began_s, *leases = options.attach
        attach_until_renewed(Path(run), Path(home), float(began_s), [Path(path) for path in leases])
    trees = [*(path.resolve() for path in options.beside), Path(__file__).resolve().parent.parent]
    with tempfile.TemporaryDirectory() as temporary:
        root = options.keep or Path(temporary)
        began = time.monotonic()
        directory = RunDirectory(root / RUN)
        if not directory.path.exists():
            directory = make_run(root, options.steps, options.ranks, options.nodes, options.log_mib << 20)
        size = sum(path.stat().st_size for path in directory.path.rglob("*") if path.is_file())
        print(f"made {size / 2**30:.1f} GiB in {time.monotonic() - began:.0f} s", flush=True)
        # attach reads what came home, and summarises a run that is over; show is of what it left.
        measure(directory, trees, "attach", RUN)
        measure(directory, trees, "show", RUN)
        measure(directory, trees, "report", RUN, "-o", str(root / "report.html"))
        measure(directory, trees, "logs", RUN)
        with tempfile.TemporaryDirectory() as home:
            measure_renewal(directory, Path(home), trees)


if __name__ == "__main__":
    main()
