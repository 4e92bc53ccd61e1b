from __future__ import annotations

import pytest

from multinode.cluster.hostfile import parse_hostfile
from multinode.job.job import JobEnvironment, ScriptJob
from multinode.job.launch_options import LaunchOptions
from multinode.job.planning import plan_launch
from multinode.job.shell_variables import unused_variables

HOSTS = "a addr=10.0.0.1 ifname=eth0 gpus=6,7\nb addr=10.0.0.2 ifname=eth0 gpus=6,7\n"
JOB = ScriptJob(argv=("train.py",))


def unused(environ: dict[str, str], env: dict[str, str] | None = None, hosts: str = HOSTS) -> list[str]:
    options = LaunchOptions(environment=JobEnvironment(env=env or {}), master_port=29500)
    return unused_variables(environ, plan_launch(parse_hostfile(hosts), JOB, {}, "20260102-030405-abcd", options))


@pytest.mark.parametrize(
    ("name", "value", "way"),
    [
        ("CUDA_VISIBLE_DEVICES", "0,1", "gpus=0,1 in the hostfile"),
        ("NCCL_SOCKET_IFNAME", "=eth1", "ifname=eth1 in the hostfile"),
        ("GLOO_SOCKET_IFNAME", "eth1", "ifname=eth1 in the hostfile"),
        ("MASTER_PORT", "29501", "--master-port 29501"),
        ("NPROC_PER_NODE", "4", "--workers-per-node 4"),
        ("NNODES", "4", "--nodes 4"),
        ("NCCL_IB_DISABLE", "1", "--env NCCL_IB_DISABLE"),
        ("OMP_NUM_THREADS", "4", "--env OMP_NUM_THREADS"),
    ],
)
def test_a_variable_that_would_change_the_run_is_named_with_its_option(name: str, value: str, way: str) -> None:
    assert unused({name: value}) == [f"{name}={value} ({way})"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        # What the run uses anyway.
        ("CUDA_VISIBLE_DEVICES", "6,7"),
        ("NCCL_SOCKET_IFNAME", "eth0"),
        ("MASTER_PORT", "29500"),
        ("NPROC_PER_NODE", "2"),
        ("NCCL_DEBUG", "INFO"),
        # Where something is on this machine, what is no setting, and nothing.
        ("CUDA_HOME", "/usr/local/cuda"),
        ("NCCL_VERSION", "2.27"),
        ("TORCH_HOME", "/cache"),
        ("PATH", "/bin"),
        ("LANG", "C"),
        ("NCCL_IB_DISABLE", ""),
    ],
)
def test_a_variable_that_would_change_nothing_is_not_named(name: str, value: str) -> None:
    assert unused({name: value}) == []


def test_a_variable_that_is_given_is_not_named() -> None:
    assert unused({"NCCL_IB_DISABLE": "1"}, {"NCCL_IB_DISABLE": "1"}) == []
    assert unused({"NCCL_IB_DISABLE": "1"}, {"NCCL_IB_DISABLE": "0"}) != []
    assert unused({"NCCL_IB_DISABLE": "1"}, hosts=HOSTS.replace("gpus", "env.NCCL_IB_DISABLE=1 gpus")) == []
