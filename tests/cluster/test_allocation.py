from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multinode.cluster.allocation import (
    MPI_HOSTFILE,
    Allocation,
    allocation_hostfile,
    expand_node_list,
    parse_gpu_nodes,
    parse_job,
    parse_node_addresses,
    scheduled_hostfile,
)
from multinode.cluster.cluster import Node
from multinode.cluster.hostfile import parse_hostfile
from multinode.errors import UsageError
from tests.golden import Golden, error_of

# Of Slurm 22.05.8, shortened.
JOB = """\
JobId=7 JobName=interactive
   UserId=root(0) GroupId=root(0) MCS_label=N/A
   JobState=RUNNING Reason=None Dependency=(null)
   NodeList=node[0-2]
   BatchHost=node0
   NumNodes=3 NumCPUs=3 NumTasks=3 CPUs/Task=1 ReqB:S:C:T=0:0:*:*
   TRES=cpu=3,node=3,billing=3,gres/gpu=5
     Nodes=node[0-1] CPU_IDs=0 Mem=0 GRES=gpu:a100:2(IDX:0-1),shard:0(IDX:)
     Nodes=node2 CPU_IDs=0 Mem=0 GRES=gpu:1(IDX:3)
     Nodes=node3 CPU_IDs=0 Mem=0 GRES=
   WorkDir=/root
"""
NODES = """\
NodeName=node0 Arch=x86_64 CoresPerSocket=1 NodeAddr=10.213.1.1 NodeHostName=node0 Gres=gpu:a100:2(S:0) Version=22.05.8
NodeName=node1 Arch=x86_64 CoresPerSocket=1 NodeAddr=node1.cluster NodeHostName=node1 Gres=fpga:1,gpu:8 Version=22.05.8
NodeName=node2 Arch=x86_64 CoresPerSocket=1 NodeAddr=2001:db8::2 NodeHostName=node2 Gres=(null) Version=22.05.8
NodeName=node3 Arch=x86_64 NodeAddr=node3.cluster NodeHostName=node3 Gres=gpu:8 Version=22.05.8
"""
ENVIRONMENT = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[0-2]", "SLURM_TASKS_PER_NODE": "16(x3)"}
ALLOCATION = parse_job(JOB)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("node1", ["node1"]),
        ("gpu[08-10]", ["gpu08", "gpu09", "gpu10"]),
        ("gpu[1,3-4],login,r[1-2]c[1-2]", ["gpu1", "gpu3", "gpu4", "login", "r1c1", "r1c2", "r2c1", "r2c2"]),
        ("", []),
    ],
)
def test_a_node_list_is_its_names(text: str, names: list[str]) -> None:
    assert expand_node_list(text) == names


def test_a_job_is_its_state_and_what_it_has_on_each_node() -> None:
    expected = {"node0": "gpu:a100:2", "node1": "gpu:a100:2", "node2": "gpu:1"}
    assert Allocation(state="RUNNING", node_list="node[0-2]", resources=expected) == ALLOCATION
    assert ALLOCATION.holds_nodes
    assert not parse_job(JOB.replace("RUNNING", "CANCELLED")).holds_nodes


def test_only_an_address_is_an_address() -> None:
    assert parse_node_addresses(NODES) == {"node0": "10.213.1.1", "node2": "2001:db8::2"}


def test_a_node_whose_gpus_slurm_gives_out_is_known() -> None:
    assert parse_gpu_nodes(NODES) == {"node0", "node1", "node3"}


def test_the_hostfile_of_an_allocation_reads_back_the_same() -> None:
    cluster, text = allocation_hostfile(7, ENVIRONMENT, ALLOCATION, parse_node_addresses(NODES))
    assert [(node.name, node.addr, node.slurm_job) for node in cluster.nodes] == [
        ("node0", "10.213.1.1", 7),
        ("node1", None, 7),
        ("node2", "2001:db8::2", 7),
    ]
    assert parse_hostfile(text).nodes == cluster.nodes
    assert cluster.source == "Slurm job 7"


@pytest.mark.parametrize(
    ("environment", "resources", "slots"),
    [
        # Without a word of the user Slurm computes tasks from processors.
        ({}, {}, [None, None, None]),
        ({"SLURM_NTASKS_PER_NODE": "16"}, {}, [16, 16, 16]),
        ({"SLURM_NTASKS": "5", "SLURM_TASKS_PER_NODE": "2(x2),1"}, {}, [2, 2, 1]),
        # What the node itself says of its GPUs counts.
        ({"SLURM_NTASKS": "3", "SLURM_TASKS_PER_NODE": "1(x3)"}, {"node1": "gpu:8"}, [1, None, 1]),
    ],
)
def test_slots_are_the_tasks_that_were_asked_for_where_no_gpus_are(
    environment: dict[str, str], resources: dict[str, str], slots: list[int | None]
) -> None:
    allocation = Allocation(state="RUNNING", resources=resources)
    cluster, _ = allocation_hostfile(7, ENVIRONMENT | environment, allocation, {})
    assert [node.slots for node in cluster.nodes] == slots


@pytest.mark.parametrize(
    "environment",
    [
        {"SLURM_JOB_NODELIST": ""},
        {"SLURM_JOB_NODELIST": "node[0-"},
        {"SLURM_JOB_NODELIST": "node0,-oProxyCommand=x"},
        {"SLURM_NTASKS": "3", "SLURM_TASKS_PER_NODE": "1"},
        {"SLURM_NTASKS": "3", "SLURM_TASKS_PER_NODE": "many"},
        {"SLURM_NTASKS": "6000", "SLURM_TASKS_PER_NODE": "2000(x3)"},
    ],
)
def test_an_environment_that_is_none_is_an_error(environment: dict[str, str]) -> None:
    with pytest.raises(UsageError):
        allocation_hostfile(7, ENVIRONMENT | environment, Allocation(state="RUNNING"), {})


@given(st.text(max_size=200))
def test_any_text_is_understood_or_refused(text: str) -> None:
    parse_node_addresses(text)
    for read in (expand_node_list, parse_job):
        try:
            read(text)
        except ValueError:
            continue


# The names in these as mpi-operator and Kubeflow's Trainer write them; a line of OAR's is a core, of PBS's a rank.
MPI = "pi-worker-0.pi.ns.svc slots=2\npi-worker-1.pi.ns.svc slots=2\n"
MPICH = "pi-worker-0.pi.ns.svc:2\n"
FILES = {"/pbs": "n1\nn1\nn2\nn2\n", "/oar": "g-1.site\ng-1.site\ng-2.site\n", "~/.ssh/sky-cluster-key": "secret"}
KEY = "~/.ssh/sky-cluster-key"


def scheduled(environ: dict[str, str], files: dict[str, str]) -> tuple[str, tuple[Node, ...]] | None:
    found = scheduled_hostfile(environ, files.__contains__, files.__getitem__)
    if found is None:
        return None
    scheduler, cluster, text = found
    assert parse_hostfile(text).nodes == cluster.nodes
    return scheduler, cluster.nodes


@pytest.mark.parametrize(
    ("environ", "files", "scheduler", "nodes"),
    [
        (
            {"DSTACK_NODES_IPS": "10.128.0.47\n10.128.0.48", "DSTACK_GPUS_PER_NODE": "8"},
            {},
            "dstack",
            [Node(name="10.128.0.47", slots=8), Node(name="10.128.0.48", slots=8)],
        ),
        ({"DSTACK_NODES_IPS": "fd00::2", "DSTACK_GPUS_PER_NODE": "0"}, {}, "dstack", [Node(name="fd00::2")]),
        (
            {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2\n", "SKYPILOT_NUM_GPUS_PER_NODE": "4"},
            FILES,
            "SkyPilot",
            [Node(name=f"10.0.0.{n}", slots=4, key=KEY) for n in (1, 2)],
        ),
        ({"SKYPILOT_NODE_IPS": "10.0.0.1"}, {}, "SkyPilot", [Node(name="10.0.0.1")]),
        (
            {},
            {MPI_HOSTFILE: MPI},
            "Kubeflow",
            [Node(name=f"pi-worker-{n}.pi.ns.svc", slots=2, port=2222) for n in (0, 1)],
        ),
        ({}, {MPI_HOSTFILE: MPICH}, "Kubeflow", [Node(name="pi-worker-0.pi.ns.svc", slots=2, port=2222)]),
        ({"PBS_NODEFILE": "/pbs"}, FILES, "PBS", [Node(name="n1", slots=2), Node(name="n2", slots=2)]),
        ({"OAR_NODEFILE": "/oar"}, FILES, "OAR", [Node(name="g-1.site"), Node(name="g-2.site")]),
        ({"OAR_NODE_FILE": "/oar"}, FILES, "OAR", [Node(name="g-1.site"), Node(name="g-2.site")]),
    ],
)
def test_what_a_scheduler_gave_is_a_hostfile(
    environ: dict[str, str], files: dict[str, str], scheduler: str, nodes: list[Node]
) -> None:
    assert scheduled(environ, files) == (scheduler, tuple(nodes))


def test_without_a_scheduler_there_is_none() -> None:
    assert scheduled({"DSTACK_NODES_IPS": "", "PBS_NODEFILE": ""}, {}) is None


def test_what_cannot_be_understood_of_a_scheduler_names_its_variable(golden: Golden) -> None:
    cases = {
        "no name": {"DSTACK_NODES_IPS": "10.0.0.1\n-oProxyCommand=x"},
        "a pattern": {"SKYPILOT_NODE_IPS": "node[1-3]"},
        "twice": {"DSTACK_NODES_IPS": "10.0.0.1\n10.0.0.1"},
        "no file": {"PBS_NODEFILE": "/gone"},
        "the file of another": {"OAR_NODEFILE": "/pbs-of-another"},
    }
    golden.check_errors("schedulers", {case: error_of(scheduled, told, FILES) for case, told in cases.items()})
