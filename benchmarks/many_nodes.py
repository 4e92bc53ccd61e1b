"""Launch, follow and stop of a light job on more and more nodes: what it costs the controller.

One worker a node, which records a step a second; the node's NIC is sampled once a second. For each number of nodes: the
time until every worker has recorded a step, the processor time of following them and the controller's peak memory, and
the time until all nodes have verified that nothing is left. Each should grow no faster than the nodes.

Nodes are those of the lab, over SSH, or `--local` ones: agents over the local transport, each in a PID namespace of its
own, so that a look at its processes finds as few as on a machine of its own. As root, with a lab up:

    multinode lab up --nodes 32
    .venv/bin/python benchmarks/many_nodes.py --lab 8,16,32 --local 64,128,256 --follow 20
"""

from __future__ import annotations

import argparse
import json
import resource
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from multinode.check.probe import probe
from multinode.cli.live import live_view
from multinode.cluster.cluster import Cluster, Node
from multinode.cluster.hostfile import render_hostfile
from multinode.job.engines.engine import Engine
from multinode.job.job import ScriptJob
from multinode.lab.state import load_lab
from multinode.launch.context import ExecuteOptions, Launch, RunContext, StopRequest
from multinode.launch.launch import launch
from multinode.records.hostfile import load_hostfile
from multinode.records.progress import RunProgress
from multinode.transport.agent import AgentTransport
from multinode.transport.base import Transport
from multinode.transport.local import LocalStream, LocalTransport
from multinode.transport.openssh import OpensshTransport

# What the instrumentation writes of a step, without torch: hundreds of them would not fit into one machine.
WORKER = """\
import json, os, time
rank, step = int(os.environ["NODE_RANK"]), 0
print("***** Running training *****", flush=True)
path = os.environ["MULTINODE_RUN_DIR"] + f"/samples/rank-{rank}.jsonl"
while True:
    step += 1
    record = {"schema": 1, "kind": "step", "rank": rank, "step": step, "time_s": time.time(),
              "mono_ns": time.monotonic_ns(), "step_time_us": 1e6, "total_steps": 100000, "samples": 8, "tokens": 4096,
              "phases_us": {"data": 1e4, "forward": 3e5, "backward": 5e5, "optimizer": 5e4, "comm": 1e5}}
    with open(path, "a") as file:
        file.write(json.dumps(record) + "\\n")
    time.sleep(1)
"""
GRACE_S = 2.0
# Start-up is over, and the idle network has been looked at.
SETTLE_S = 5.0
DEADLINE_S = 900


class LocalNodes(LocalTransport):
    """This machine as any number of nodes, each with processes of its own."""

    def open(self, node: Node, command: str, *, deadline_s: float) -> LocalStream:
        """Start a command in a PID namespace of its own. See `Transport.open`."""
        alone = f"exec unshare --pid --mount-proc --fork --kill-child sh -c {shlex.quote(command)}"
        return super().open(node, alone, deadline_s=deadline_s)


class Watch:
    """Sees when the workers are under way, follows them for a time, and asks for the stop."""

    def __init__(self, stop: StopRequest, follow_s: float) -> None:
        self.stop = stop
        self.row: dict[str, float] = {}
        self._follow_s = follow_s
        self._began = self._looked = time.monotonic()
        self._settled = self._asked = float("inf")
        self._cpu_s = 0.0

    def look(self, progress: RunProgress) -> None:
        """Called as often as the view is."""
        self._looked = now = time.monotonic()
        if not self.row:
            if all(node.step for node in progress.nodes):
                self.row["launch_s"] = now - self._began
                self._settled = now + SETTLE_S
        elif self._cpu_s == 0.0 and now >= self._settled:
            self._settled, self._cpu_s = now, _cpu_s()
        elif self._cpu_s and now >= self._settled + self._follow_s and not self.stop.count:
            share = (_cpu_s() - self._cpu_s) / (now - self._settled)
            self.row["follow_percent_of_a_core"] = 100 * share
            self.row["follow_percent_per_node"] = 100 * share / len(progress.nodes)
            self._asked = now
            self.stop.ask("the end of the benchmark")

    def end(self) -> None:
        """The run is over, and summed up; its last look was when all nodes had verified that nothing is left."""
        self.row["stop_s"] = self._looked - self._asked
        self.row["sum_up_s"] = time.monotonic() - self._looked
        self.row["peak_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    """Measure and print one JSON document; each round on stderr."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--local", default="", help="how many local nodes, from few to many: 64,128,256")
    parser.add_argument("--lab", default="", help="how many nodes of the lab, likewise")
    parser.add_argument("--follow", type=float, default=20.0, help="seconds that each run is followed")
    parser.add_argument("--controller", nargs=2, metavar=("KIND", "COUNT"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.controller:
        print(json.dumps(_measure(asked.controller[0], int(asked.controller[1]), asked.follow)))
        return
    document = {}
    for kind in ("lab", "local"):
        counts = [count for count in getattr(asked, kind).split(",") if count]
        rows = [_measure_alone(kind, count, asked.follow) for count in counts]
        if rows:
            growth = {name: rows[-1][name] / rows[0][name] for name in rows[0]}
            document[kind] = {"rows": rows, "growth": growth}
    print(json.dumps(document, indent=2))


def _measure_alone(kind: str, count: str, follow_s: float) -> dict[str, float]:
    """In a controller of its own: what another round left in memory is not counted."""
    argv = [sys.executable, __file__, "--controller", kind, count, "--follow", str(follow_s)]
    ended = subprocess.run(argv, capture_output=True, check=False, timeout=DEADLINE_S)
    if ended.returncode != 0:
        raise SystemExit(ended.stderr.decode()[-2000:])
    row: dict[str, float] = json.loads(ended.stdout)
    sys.stderr.write(f"{kind} {row}\n")
    return row


def _measure(kind: str, count: int, follow_s: float) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cluster, transport = _lab(count) if kind == "lab" else _local(count, folder)
        stop = StopRequest()
        with live_view() as view:
            watch = Watch(stop, follow_s)

            def observe(progress: RunProgress) -> None:
                view.show(progress)
                watch.look(progress)

            context = RunContext(transport, folder / "runs", stop=stop, observe=observe, say=view.say)
            ended = launch(
                Launch(
                    cluster=cluster,
                    hostfile=render_hostfile(cluster),
                    job=ScriptJob(argv=("python3", "-I", "-S", "-c", WORKER)),
                    workers_per_node=1,
                    engine=Engine(name="exec"),
                    execute=ExecuteOptions(grace_s=GRACE_S, stall_s=None),
                    check=False,
                ),
                context,
            )
            watch.end()
            context.agent.close()
        transport.close()
        left = [node.name for node in ended.run.nodes if node.state != "ended" or node.status.processes_left]
        if ended.run.status != "stopped" or left:
            raise SystemExit(f"{ended.run.status}, not verified on: {', '.join(left)}")
        return {"nodes": count, **watch.row}


def _lab(count: int) -> tuple[Cluster, Transport]:
    lab = load_lab()
    if lab is None:
        raise SystemExit("no lab is up: multinode lab up --nodes 32")
    transport = OpensshTransport()
    return load_hostfile(Path(lab.hostfile))[0].first(count), transport


def _local(count: int, folder: Path) -> tuple[Cluster, Transport]:
    nodes = tuple(Node(name=f"n{rank}", addr="127.0.0.1", ifname="lo", workdir="/") for rank in range(count))
    # One home for all, as on a cluster; the agent exists already, as in every launch but the first.
    agent, cluster = AgentTransport(LocalTransport(folder)), Cluster(nodes=nodes, source="this machine")
    probe(agent, cluster.first(1), packages=False).require()
    agent.close()
    return cluster, LocalNodes(folder)


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
