"""One GPU as two nodes: two NCCL ranks that take themselves for two hosts and exchange everything over sockets on `lo`.

NCCL refuses two ranks on one GPU only where both the host's hash and the GPU are the same (init.cc); NCCL_HOSTID is
what it hashes (misc/utils.cc). The kernels of both ranks are time-sliced: this shows that things work and that figures
reconcile, never how fast a GPU is. Needs torch and this package; no root, no LLaMA-Factory.
"""

from __future__ import annotations

import socket
import sys
from pathlib import Path

from msgspec.structs import replace

from multinode.cluster.cluster import Cluster, Node
from multinode.job.job import Job
from multinode.launch.context import ExecuteOptions, Launch
from multinode.levers.levers import NONE, Levers
from multinode.records.benchmark import Benchmark
from multinode.records.plan import Observation, TraceWindow
from multinode.transport.agent import load_archive
from tests import make

# A trace of five steps.
TRACED = Observation(trace=TraceWindow(steps=5))
TRAIN = Path(__file__).with_name("train.py")
# Over sockets, whatever else the machine has; few channels, as two ranks share the GPU's multiprocessors.
NCCL = {"NCCL_NET": "Socket", "NCCL_IB_DISABLE": "1", "NCCL_MNNVL_ENABLE": "0", "NCCL_MAX_NCHANNELS": "2"}


def cluster(count: int = 2) -> Cluster:
    """This machine as so many nodes that share its first GPU."""
    nodes = (
        Node(
            name=f"gpu{rank}",
            gpus=(0,),
            slots=1,
            addr="127.0.0.1",
            ifname="lo",
            python=sys.executable,
            env={"NCCL_HOSTID": f"multinode-{rank}", "OMP_NUM_THREADS": "1", **NCCL},
        )
        for rank in range(count)
    )
    return make.cluster(*nodes)


def launch_of(
    job: Job | Benchmark,
    *,
    nodes: int = 2,
    execute: ExecuteOptions | None = None,
    run_id: str | None = None,
    observation: Observation | None = None,
    levers: Levers = NONE,
) -> Launch:
    """A launch of a job on the nodes. Checks are left out: two nodes on one machine are what they are there to find."""
    return Launch(
        cluster=cluster(nodes),
        hostfile="",
        job=job,
        agent=load_archive().path,
        master_port=_free_port(),
        observation=replace(observation or Observation(), sample_interval_s=0.5),
        levers=levers,
        execute=execute or ExecuteOptions(lease_s=60.0),
        check=False,
        run_id=run_id,
    )


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
