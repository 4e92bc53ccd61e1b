"""A real Slurm on the lab's nodes: munged and slurmd on each, slurmctld on node 0, from the machine's own packages.

Everything that they write is on the nodes' own disks, and ends with them. Each node offers as many GPUs as slots, which
are other names of /dev/null: a job that asks for some gets their numbers in CUDA_VISIBLE_DEVICES, and nothing that
computes.
"""

from __future__ import annotations

import os
import secrets
import shutil

import msgspec
import psutil

from multinode.errors import MultinodeError, NodeFailed, UsageError
from multinode.lab.cluster import ns_command
from multinode.lab.nodes import REFRESH_SCRIPT
from multinode.lab.state import Lab, LabSpec, NodeFile, node_addresses, node_name, poll, run_all, run_program
from tests.equipment.cgroups import find_top, group_path

_PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "salloc", "sbatch", "scontrol", "setpriv", "unshare")
_INSTALL = "apt-get install slurmctld slurmd slurm-client munge"

_CGROUPS = "/run/slurm-cgroup"
_GPU_FILE = "/dev/mn-gpu"
_READY_S = 60.0

# config_overrides: nodes share the machine's cores, and each may offer all of them.
_SLURM_CONF = """\
ClusterName=lab
SlurmctldHost={controller}({address})
SlurmUser=root
AuthType=auth/munge
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ProctrackType={proctrack}
TaskPlugin=task/affinity
TaskProlog=/etc/slurm/task_prolog
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_min_interval=100000
ReturnToService=2
KillWait=30
GresTypes=gpu
StateSaveLocation=/var/spool/slurmctld
SlurmdSpoolDir=/var/spool/slurmd
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile=/var/log/slurmctld.log
SlurmdLogFile=/var/log/slurmd.log
{nodes}
PartitionName=lab Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:8
"""
_NODE_LINE = "NodeName={name} NodeAddr={address} CPUs={cpus} RealMemory={memory_mib} Gres=gpu:{slots} State=UNKNOWN"
_CGROUP_CONF = f"""\
CgroupPlugin=cgroup/v1
CgroupMountpoint={_CGROUPS}
CgroupAutomount=no
"""
_TASK_PROLOG = f"#!/bin/sh\n. {REFRESH_SCRIPT}\n"
# slurmd's control groups lie below the node's own: all nodes share one kernel, and number their jobs alike.
_START = f"""\
set -e
mkdir -p /run/munge /var/spool/slurmctld /var/spool/slurmd {_CGROUPS}/freezer
chown munge: /etc/munge /etc/munge/munge.key /run/munge /var/log/munge /var/lib/munge
chmod 700 /etc/munge
setpriv --reuid munge --regid munge --clear-groups munged
for gpu in $(seq 0 $(($3 - 1))); do mknod {_GPU_FILE}$gpu c 1 3; done
[ "$1" != 0 ] || slurmctld
if [ -n "$2" ]; then mount -t cgroup -o freezer freezer {_CGROUPS}/freezer; fi
exec slurmd
"""


def with_slurm(spec: LabSpec) -> LabSpec:
    """The same lab, whose nodes have what Slurm needs of configuration, and one key for their munge daemons.

    Raises:
        UsageError: Slurm is not installed here.
    """
    missing = [name for name in _PROGRAMS if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None]
    if missing:
        raise UsageError(f"missing: {', '.join(missing)}", hint=f"install: {_INSTALL}")
    gpus = [f"{_GPU_FILE}{index}" for index in range(spec.slots)]
    files = (
        NodeFile("/etc/munge/munge.key", secrets.token_hex(64), mode=0o400),
        NodeFile("/etc/slurm/slurm.conf", _slurm_conf(spec)),
        NodeFile("/etc/slurm/cgroup.conf", _CGROUP_CONF),
        NodeFile("/etc/slurm/gres.conf", "AutoDetect=off\n" + "".join(f"Name=gpu File={one}\n" for one in gpus)),
        NodeFile("/etc/slurm/task_prolog", _TASK_PROLOG, mode=0o755),
    )
    return msgspec.structs.replace(spec, files=files)


def start_slurm(lab: Lab) -> None:
    """Start Slurm on the nodes of such a lab and wait until all of them are idle.

    Raises:
        MultinodeError, NodeFailed: a daemon does not start, or a node does not become idle.
    """
    freezer = find_top("freezer")
    if freezer is not None:
        for node in lab.nodes:
            group_path(freezer, node.name).mkdir(exist_ok=True)
    own = "yes" if freezer is not None else ""
    wrapped = ["unshare", "--cgroup", "sh", "-c", _START, "sh"] if own else ["sh", "-c", _START, "sh"]
    run_all([[*ns_command(node), *wrapped, str(node.node_rank), own, str(lab.spec.slots)] for node in lab.nodes])
    said = ""
    for _ in poll(_READY_S):
        try:
            said = run_program([*ns_command(lab.nodes[0]), "sinfo", "--noheader", "--Node", "--format=%N %T"])
        except MultinodeError as error:
            said = error.message
        if sorted(said.splitlines()) == sorted(f"{node.name} idle" for node in lab.nodes):
            return
    raise NodeFailed(
        f"Slurm is not ready: {said!r}",
        node=lab.nodes[0].name,
        hint="its logs: multinode lab exec node0 -- tail /var/log/slurmctld.log /var/log/slurmd.log",
    )


def _slurm_conf(spec: LabSpec) -> str:
    cpus = len(os.sched_getaffinity(0)) if spec.cores_per_node is None else spec.cores_per_node
    memory_mib = psutil.virtual_memory().total >> 20
    names = [(node_name(rank), node_addresses(spec, rank).data) for rank in range(spec.node_count)]
    nodes = [
        _NODE_LINE.format(name=name, address=address, cpus=cpus, memory_mib=memory_mib, slots=spec.slots)
        for name, address in names
    ]
    proctrack = "proctrack/cgroup" if find_top("freezer") is not None else "proctrack/linuxproc"
    return _SLURM_CONF.format(controller=names[0][0], address=names[0][1], proctrack=proctrack, nodes="\n".join(nodes))
