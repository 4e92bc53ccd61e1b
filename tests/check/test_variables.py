from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from multinode.check.check import check_all
from multinode.check.rule import CheckFinding, Inspection
from multinode.check.variables import (
    check_agreement,
    check_hidden_gpus,
    check_interface_names,
    check_socket_counts,
    check_stray_variables,
)
from multinode.cluster.cluster import Node
from multinode.cluster.dataplane import Endpoint
from multinode.cluster.facts import Gpu, Interface
from multinode.job.job import JobEnvironment
from multinode.job.launch_options import LaunchOptions
from multinode.records.benchmark import CollectiveTest, Message
from tests import make
from tests.golden import Golden

from .inspecting import SCRIPT, but, check_cases, inspection, only, silent

NICS = tuple(
    Interface(name=name, addresses=(f"{address}/24",), up=True, running=True)
    for name, address in (("lo", "127.0.0.1"), ("eth0", "10.0.0.1"), ("eth1", "192.0.2.1"), ("eth10", "198.51.100.1"))
)
CONF = "/root/.nccl.conf"


def hostfile(before: Inspection | None = None, /, **variables: str) -> Inspection:
    """Two nodes with more NICs than one; a's line of the hostfile has these variables."""
    before = before or but(inspection(), "a", interfaces=NICS)
    first, *rest = before.cluster.nodes
    first = replace(first, env=variables)
    return replace(before, cluster=make.cluster(first, *rest))


def preset(**facts: Any) -> Inspection:
    return but(inspection(), "a", interfaces=NICS, **facts)


def given(before: Inspection | None = None, /, **variables: str) -> Inspection:
    """These variables are given by --env."""
    return replace(before or preset(), options=LaunchOptions(environment=JobEnvironment(env=variables)))


def unsettled(before: Inspection) -> Inspection:
    return replace(before, endpoints={})


def without_gpus(before: Inspection) -> Inspection:
    return but(before, before.facts, gpus=())


def ours(found: Inspection) -> list[CheckFinding]:
    return [one for one in check_all(found) if one.code == "variables"]


def test_nodes_without_presets_and_nodes_that_say_nothing_have_no_findings() -> None:
    assert ours(inspection()) == []
    assert ours(preset(env={"NCCL_DEBUG": "INFO"}, nccl_files={CONF: {"NCCL_DEBUG": "WARN"}})) == []
    assert ours(replace(inspection(), facts={})) == []


def forwarded() -> Inspection:
    """Their values were taken from this machine's environment."""
    secret = given(NCCL_SOCKET_IFNAME="secret", NODE_RANK="secret")
    environment = replace(secret.options.environment, forwarded=("NCCL_SOCKET_IFNAME", "NODE_RANK"))
    return replace(secret, options=LaunchOptions(environment=environment))


def on_eth1(**variables: str) -> Inspection:
    known = hostfile(**variables)
    moved = replace(known.endpoints["a"], addr="192.0.2.1", ifname="eth1")
    return replace(known, endpoints=known.endpoints | {"a": moved})


IB = {"NCCL_SOCKET_IFNAME": "ib"}
SESSION, FILE = preset(env=IB), preset(nccl_files={CONF: IB})


def test_a_variable_that_names_an_interface_is_compared_with_those_of_the_node(golden: Golden) -> None:
    check_cases(
        golden,
        "variables_interface",
        {
            "NCCL, no such interface": check_interface_names(hostfile(NCCL_SOCKET_IFNAME="ens1f0")),
            "NCCL, no interface of just this name": check_interface_names(hostfile(NCCL_SOCKET_IFNAME="=eth")),
            "gloo knows no prefix": check_interface_names(hostfile(GLOO_SOCKET_IFNAME="eth")),
            "gloo knows no =": check_interface_names(hostfile(GLOO_SOCKET_IFNAME="=eth0")),
            "a prefix of two": check_interface_names(on_eth1(NCCL_SOCKET_IFNAME="eth1")),
            "all but loopback": check_interface_names(hostfile(NCCL_SOCKET_IFNAME="^lo")),
            "NCCL, not the data plane": check_interface_names(hostfile(NCCL_SOCKET_IFNAME="eth10")),
            "gloo, not the data plane": check_interface_names(hostfile(GLOO_SOCKET_IFNAME="eth10")),
            "of the session, and a launch overrides it": check_interface_names(SESSION),
            "of the session": check_interface_names(unsettled(SESSION)),
            "of a file, and a launch overrides it": check_interface_names(FILE),
            "of a file": check_interface_names(unsettled(FILE)),
            "of --env": check_interface_names(given(NCCL_SOCKET_IFNAME="ens1f0")),
            "forwarded by --env": ours(forwarded()),
            "NCCL, and the job uses no GPU": check_interface_names(without_gpus(hostfile(NCCL_SOCKET_IFNAME="ens1f0"))),
            "gloo, and the job uses no GPU": check_interface_names(without_gpus(hostfile(GLOO_SOCKET_IFNAME="ens1f0"))),
        },
    )


@pytest.mark.parametrize("known", [hostfile(NCCL_SOCKET_IFNAME="ens1f0"), given(NCCL_SOCKET_IFNAME="ens1f0")])
def test_a_name_that_no_interface_has_stops_a_launch(known: Inspection) -> None:
    first, *_ = check_all(known, before_launch=True)
    assert (first.code, first.severity, first.node) == ("variables", "error", "a")


def test_the_equals_sign_that_nccl_wants_is_a_part_of_the_name_for_gloo() -> None:
    silent(check_interface_names(hostfile(GLOO_SOCKET_IFNAME="eth0", NCCL_SOCKET_IFNAME="=eth0")))


def test_several_nics_that_are_named_exactly_are_meant() -> None:
    silent(check_interface_names(hostfile(NCCL_SOCKET_IFNAME="=eth0,eth1")))


def test_of_several_interfaces_in_the_hostfile_a_preset_may_name_no_other_set() -> None:
    both = Endpoint(addr="10.0.0.1", ifname="eth0", ifnames=("eth0", "eth1"))
    for value, count in (("=eth0,eth1", 0), ("=eth0", 1), ("=eth1", 1), ("eth", 1)):
        found = preset(env={"NCCL_SOCKET_IFNAME": value})
        found = replace(found, endpoints=found.endpoints | {"a": both})
        assert len(list(check_interface_names(found))) == count, value
    # Gloo gets the first alone.
    silent(check_interface_names(replace(preset(env={"GLOO_SOCKET_IFNAME": "eth0"}), endpoints={"a": both})))


def test_a_preset_that_says_what_multinode_sets_is_nothing() -> None:
    same = {"NCCL_SOCKET_IFNAME": "=eth0", "GLOO_SOCKET_IFNAME": "eth0"}
    silent(check_interface_names(preset(env=same)))


def test_env_wins_over_the_hostfile_that_over_the_session_and_the_session_over_files() -> None:
    right = {"NCCL_SOCKET_IFNAME": "=eth0"}
    silent(
        check_interface_names(given(hostfile(NCCL_SOCKET_IFNAME="ens1f0"), **right)),
        check_interface_names(hostfile(SESSION, **right)),
        check_interface_names(unsettled(preset(env=right, nccl_files={CONF: IB}))),
        check_interface_names(unsettled(preset(nccl_files={CONF: right, "/etc/nccl.conf": IB}))),
    )


def test_the_value_of_a_variable_that_was_forwarded_is_not_shown() -> None:
    assert not any("secret" in f"{finding.message} {finding.hint}" for finding in ours(forwarded()))


def test_what_nobody_reads_is_no_finding() -> None:
    silent(check_interface_names(without_gpus(preset(env={"NCCL_SOCKET_IFNAME": "ens1f0"}))))
    gloo = replace(
        hostfile(NCCL_SOCKET_IFNAME="^lo"), job=CollectiveTest(messages=(Message(size_bytes=8),), backend="gloo")
    )
    silent(check_interface_names(gloo))


def ring(*nodes: str) -> Inspection:
    cluster = inspection("abcde")
    for name in nodes:
        cluster = but(cluster, name, env={"NCCL_ALGO": "Ring"})
    return cluster


STRAY = {"RANK": "0", "PET_NNODES": "2", "TORCH_HOME": "/t"}
SOCKETS = {"NCCL_SOCKET_NTHREADS": "16", "NCCL_NSOCKS_PERTHREAD": "8"}


def test_other_variables_of_nccl_the_launcher_and_python_are_judged(golden: Golden) -> None:
    check_cases(
        golden,
        "variables",
        {
            "one node alone sets it": check_agreement(
                but(inspection("abc"), "b", nccl_files={CONF: {"NCCL_NET": "1"}})
            ),
            "the hostfile sets it for one node alone": check_agreement(hostfile(NCCL_ALGO="Ring")),
            "most set it": check_agreement(ring("b", "d", "e")),
            "more sockets than NCCL makes": check_socket_counts(preset(env=SOCKETS)),
            "ranks in the session of every node": check_stray_variables(but(inspection(), "ab", env=STRAY)),
            "ranks in DeepSpeed's file": check_stray_variables(preset(deepspeed_env={"WORLD_SIZE": "4"})),
            "ranks in the hostfile": check_stray_variables(hostfile(NODE_RANK="0")),
            "ranks in --env": check_stray_variables(given(NODE_RANK="0")),
            "PYTHONHOME in the session": ours(preset(env={"PYTHONHOME": "/opt/python3.8"})),
            "PYTHONHOME in the hostfile": ours(hostfile(PYTHONHOME="/opt/x")),
        },
    )
    silent(ours(preset(env={"PYTHONHOME": ""})), check_stray_variables(replace(hostfile(NODE_RANK="0"), job=SCRIPT)))


@pytest.mark.parametrize("name", ["NCCL_IB_DISABLE", "NCCL_NET", "NCCL_ALGO", "NCCL_PROTO", "NCCL_SOCKET_NTHREADS"])
def test_a_setting_that_one_node_alone_has_is_found(name: str) -> None:
    assert only(check_agreement(but(inspection("abc"), "b", nccl_files={CONF: {name: "1"}}))).node == "b"


def test_settings_that_agree_whatever_their_source_or_that_nobody_reads() -> None:
    same = but(but(inspection(), "a", env={"NCCL_ALGO": "Ring"}), "b", nccl_files={CONF: {"NCCL_ALGO": "Ring"}})
    silent(check_agreement(same))
    odd = but(inspection(), "a", env={"NCCL_ALGO": "Ring"})
    assert only(check_agreement(odd))
    silent(check_agreement(without_gpus(odd)))
    per_node = but(inspection(), "a", env={"NCCL_IB_GID_INDEX": "3", "NCCL_DEBUG": "INFO"})
    silent(check_agreement(per_node))


def test_as_many_sockets_as_nccl_makes() -> None:
    silent(
        check_socket_counts(preset(env=SOCKETS | {"NCCL_NSOCKS_PERTHREAD": "4"})),
        check_socket_counts(preset(env=SOCKETS | {"NCCL_NSOCKS_PERTHREAD": "many"})),
        check_socket_counts(preset(env={"NCCL_SOCKET_NTHREADS": "16"})),
    )


FOUR_GPUS = tuple(Gpu(index=index, name="NVIDIA GeForce RTX 4090") for index in range(4))


def hiding(value: str, *, line: Node | None = None, name: str = "CUDA_VISIBLE_DEVICES", **facts: Any) -> Inspection:
    known = preset(**{"env": {name: value}, "gpus": FOUR_GPUS, **facts})
    return known if line is None else replace(known, cluster=make.cluster(line, "b"))


ASSIGNED = Node(name="a", gpus=(1, 2))


def test_a_preset_that_hides_gpus(golden: Golden) -> None:
    values = ("6", "0,1", "", "-1", "0,-1,1", "GPU-8932f937,GPU-1c2")
    check_cases(
        golden,
        "variables_gpus",
        {f"CUDA_VISIBLE_DEVICES={value}": check_hidden_gpus(hiding(value)) for value in values}
        | {
            "one that the hostfile assigns": check_hidden_gpus(hiding("0,1", line=ASSIGNED)),
            "an NPU that the hostfile assigns": check_hidden_gpus(
                hiding("0,1", line=ASSIGNED, name="ASCEND_RT_VISIBLE_DEVICES", accelerator="npu")
            ),
        },
    )


def test_a_preset_that_hides_no_gpu_that_the_job_uses() -> None:
    for line in (
        Node(name="a", gpus=(0, 1)),
        Node(name="a", slots=2),
        Node(name="a", env={"CUDA_VISIBLE_DEVICES": "3"}),
    ):
        silent(check_hidden_gpus(hiding("0,1", line=line)))
    silent(check_hidden_gpus(hiding("3,2,1,0")), check_hidden_gpus(hiding("0", gpus=())))
