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

from .inspecting import SCRIPT, but, expect, inspection, only, silent

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


@pytest.mark.parametrize(
    ("name", "value", "reader"),
    [
        ("NCCL_SOCKET_IFNAME", "ens1f0", "NCCL"),
        ("NCCL_SOCKET_IFNAME", "=eth", "NCCL"),
        ("GLOO_SOCKET_IFNAME", "eth", "gloo"),
    ],
)
def test_a_name_in_the_hostfile_that_no_interface_has_stops_a_launch(name: str, value: str, reader: str) -> None:
    finding = expect(
        check_all(hostfile(**{name: value}), before_launch=True),
        "error",
        "a",
        f"{name}={value} from the hostfile matches no interface with an address",
        "(lo, eth0, eth1 and eth10)",
        f"{reader} finds no socket interface",
        check="variables",
        hint=f"remove env.{name}=... from the node's line in the hostfile",
    )
    equals = "==" if reader == "NCCL" else "="
    assert f"or write env.{name}{equals}eth0" in str(finding.hint)


def test_the_equals_sign_that_nccl_wants_is_a_part_of_the_name_for_gloo() -> None:
    assert only(check_interface_names(hostfile(GLOO_SOCKET_IFNAME="=eth0"))).severity == "error"
    silent(check_interface_names(hostfile(GLOO_SOCKET_IFNAME="eth0", NCCL_SOCKET_IFNAME="=eth0")))


def test_a_prefix_that_takes_more_than_it_names() -> None:
    elsewhere = hostfile(NCCL_SOCKET_IFNAME="eth1")
    moved = replace(
        elsewhere,
        endpoints=elsewhere.endpoints | {"a": replace(elsewhere.endpoints["a"], addr="192.0.2.1", ifname="eth1")},
    )
    expect(
        check_interface_names(moved),
        "warning",
        "a",
        "NCCL_SOCKET_IFNAME=eth1 from the hostfile matches eth1 and eth10",
        hint="env.NCCL_SOCKET_IFNAME==eth1",
    )
    assert "matches eth0, eth1 and eth10" in only(check_interface_names(hostfile(NCCL_SOCKET_IFNAME="^lo"))).message


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


@pytest.mark.parametrize("name", ["NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"])
def test_a_name_in_the_hostfile_of_another_interface_than_the_data_planes(name: str) -> None:
    finding = only(check_interface_names(hostfile(**{name: "eth10"})))
    assert finding.severity == "warning"
    assert "selects eth10, but the data plane of the node is eth0" in finding.message


@pytest.mark.parametrize(
    ("facts", "source", "file"),
    [
        ({"env": {"NCCL_SOCKET_IFNAME": "ib"}}, "the environment of an SSH session", "~/.bashrc"),
        ({"nccl_files": {CONF: {"NCCL_SOCKET_IFNAME": "ib"}}}, CONF, CONF),
    ],
)
def test_a_preset_that_a_launch_overrides_is_a_note_and_one_that_it_does_not_an_error(
    facts: dict[str, Any], source: str, file: str
) -> None:
    expect(check_interface_names(preset(**facts)), "note", "a", f"NCCL_SOCKET_IFNAME=ib is set in {source}", hint=file)
    finding = only(check_interface_names(unsettled(preset(**facts))))
    assert finding.severity == "error"
    assert f"from {source} matches no interface" in finding.message


def test_a_preset_that_says_what_multinode_sets_is_nothing() -> None:
    same = {"NCCL_SOCKET_IFNAME": "=eth0", "GLOO_SOCKET_IFNAME": "eth0"}
    silent(check_interface_names(preset(env=same)))


def test_the_hostfile_wins_over_the_session_and_the_session_over_files() -> None:
    wrong = {"NCCL_SOCKET_IFNAME": "ib"}
    right = {"NCCL_SOCKET_IFNAME": "=eth0"}
    silent(
        check_interface_names(hostfile(preset(env=wrong), **right)),
        check_interface_names(unsettled(preset(env=right, nccl_files={CONF: wrong}))),
    )
    files = {CONF: right, "/etc/nccl.conf": wrong}
    silent(check_interface_names(unsettled(preset(nccl_files=files))))


def test_what_env_gives_wins_over_the_hostfile_and_stops_a_launch_as_well() -> None:
    finding, other = check_all(given(NCCL_SOCKET_IFNAME="ens1f0"), before_launch=True)
    assert (finding.severity, finding.node, other.node) == ("error", "a", "b")
    assert "NCCL_SOCKET_IFNAME=ens1f0 from --env matches no interface with an address" in finding.message
    assert "remove --env NCCL_SOCKET_IFNAME, and multinode sets it" in str(finding.hint)
    assert "or write --env NCCL_SOCKET_IFNAME==eth0" in str(finding.hint)
    right = given(hostfile(NCCL_SOCKET_IFNAME="ens1f0"), NCCL_SOCKET_IFNAME="=eth0")
    silent(check_interface_names(right))
    ranks = only(check_stray_variables(given(NODE_RANK="0")))
    assert (ranks.node, ranks.hint) == (None, "remove NODE_RANK from --env")


def test_the_value_of_a_variable_that_was_forwarded_is_not_shown() -> None:
    forwarded = given(NCCL_SOCKET_IFNAME="secret", NODE_RANK="secret")
    environment = replace(forwarded.options.environment, forwarded=("NCCL_SOCKET_IFNAME", "NODE_RANK"))
    found = ours(replace(forwarded, options=LaunchOptions(environment=environment)))
    assert sorted(finding.severity for finding in found) == ["error", "error", "warning"]
    assert not any("secret" in f"{finding.message} {finding.hint}" for finding in found)


def test_without_gpus_nccl_is_not_read_and_gloo_is() -> None:
    finding = only(check_interface_names(without_gpus(hostfile(NCCL_SOCKET_IFNAME="ens1f0"))))
    assert finding.severity == "warning"
    assert "a job without GPUs ignores it" in finding.message
    silent(check_interface_names(without_gpus(preset(env={"NCCL_SOCKET_IFNAME": "ens1f0"}))))
    assert only(check_interface_names(without_gpus(hostfile(GLOO_SOCKET_IFNAME="ens1f0")))).severity == "error"
    gloo = replace(
        hostfile(NCCL_SOCKET_IFNAME="^lo"), job=CollectiveTest(messages=(Message(size_bytes=8),), backend="gloo")
    )
    silent(check_interface_names(gloo))


@pytest.mark.parametrize("name", ["NCCL_IB_DISABLE", "NCCL_NET", "NCCL_ALGO", "NCCL_PROTO", "NCCL_SOCKET_NTHREADS"])
def test_a_setting_that_one_node_alone_has_is_found_with_its_place(name: str) -> None:
    expect(
        check_agreement(but(inspection("abc"), "b", nccl_files={CONF: {name: "1"}})),
        "warning",
        "b",
        f"{name} is 1 on b and not set on a",
        hint=f"grep -n {name} {CONF}",
    )


def test_the_many_are_right_and_those_that_differ_alike_are_one_finding() -> None:
    cluster = inspection("abcde")
    for name in "bde":
        cluster = but(cluster, name, env={"NCCL_ALGO": "Ring"})
    finding = only(check_agreement(cluster))
    assert finding.node is None
    assert "NCCL_ALGO is not set on a and c and Ring on b" in finding.message


def test_settings_that_agree_whatever_their_source_or_that_nobody_reads() -> None:
    same = but(but(inspection(), "a", env={"NCCL_ALGO": "Ring"}), "b", nccl_files={CONF: {"NCCL_ALGO": "Ring"}})
    silent(check_agreement(same))
    odd = but(inspection(), "a", env={"NCCL_ALGO": "Ring"})
    assert only(check_agreement(odd))
    silent(check_agreement(without_gpus(odd)))
    per_node = but(inspection(), "a", env={"NCCL_IB_GID_INDEX": "3", "NCCL_DEBUG": "INFO"})
    silent(check_agreement(per_node))


def test_more_sockets_than_nccl_makes() -> None:
    env = {"NCCL_SOCKET_NTHREADS": "16", "NCCL_NSOCKS_PERTHREAD": "8"}
    expect(check_socket_counts(preset(env=env)), "warning", "a", "is 128 on a", "lowers the second to 4")
    silent(
        check_socket_counts(preset(env=env | {"NCCL_NSOCKS_PERTHREAD": "4"})),
        check_socket_counts(preset(env=env | {"NCCL_NSOCKS_PERTHREAD": "many"})),
        check_socket_counts(preset(env={"NCCL_SOCKET_NTHREADS": "16"})),
    )


def test_stray_variables_are_a_note_with_the_files_to_look_in() -> None:
    stray = {"RANK": "0", "PET_NNODES": "2", "TORCH_HOME": "/t"}
    both = but(inspection(), "ab", env=stray)
    expect(
        check_stray_variables(both),
        "note",
        None,
        "the environment of an SSH session on a and b sets PET_NNODES and RANK, which",
        hint="grep -nE 'PET_NNODES|RANK' ~/.bashrc ~/.profile",
    )
    finding = only(check_stray_variables(preset(deepspeed_env={"WORLD_SIZE": "4"})))
    assert "~/.deepspeed_env on a sets WORLD_SIZE" in finding.message
    assert "-nE WORLD_SIZE ~/.deepspeed_env" in str(finding.hint)


def test_what_the_hostfile_sets_in_place_of_the_launcher() -> None:
    expect(
        check_stray_variables(hostfile(NODE_RANK="0")),
        "warning",
        "a",
        "NODE_RANK=0 from the hostfile replaces the value",
    )
    script = replace(hostfile(NODE_RANK="0"), job=SCRIPT)
    silent(check_stray_variables(script))


FOUR_GPUS = tuple(Gpu(index=index, name="NVIDIA GeForce RTX 4090") for index in range(4))


@pytest.mark.parametrize(
    ("value", "visible"), [("6", 1), ("0,1", 2), ("", 0), ("-1", 0), ("0,-1,1", 1), ("GPU-8932f937,GPU-1c2", 2)]
)
def test_a_preset_that_hides_gpus(value: str, visible: int) -> None:
    expect(
        check_hidden_gpus(preset(env={"CUDA_VISIBLE_DEVICES": value}, gpus=FOUR_GPUS)),
        "warning",
        "a",
        f"leaves the job {visible} of 4 GPUs",
        hint="set slots= in the hostfile",
    )


def test_a_gpu_that_the_nodes_own_environment_hides_is_not_used() -> None:
    cluster = make.cluster(Node(name="a", gpus=(1, 2)), "b")
    npus = preset(env={"ASCEND_RT_VISIBLE_DEVICES": "0,1"}, gpus=FOUR_GPUS, accelerator="npu")
    other = only(check_hidden_gpus(replace(npus, cluster=cluster)))
    assert "which ASCEND_RT_VISIBLE_DEVICES=0,1" in other.message
    hidden = preset(env={"CUDA_VISIBLE_DEVICES": "0,1"}, gpus=FOUR_GPUS)
    expect(
        check_hidden_gpus(replace(hidden, cluster=cluster)),
        "error",
        "a",
        "assigns it GPU 2, which CUDA_VISIBLE_DEVICES=0,1",
        hint="gpus= from 0,1;",
    )


def test_a_preset_that_hides_no_gpu_that_the_job_uses() -> None:
    hidden = preset(env={"CUDA_VISIBLE_DEVICES": "0,1"}, gpus=FOUR_GPUS)
    for line in (
        Node(name="a", gpus=(0, 1)),
        Node(name="a", slots=2),
        Node(name="a", env={"CUDA_VISIBLE_DEVICES": "3"}),
    ):
        cluster = make.cluster(line, "b")
        silent(check_hidden_gpus(replace(hidden, cluster=cluster)))
    silent(
        check_hidden_gpus(preset(env={"CUDA_VISIBLE_DEVICES": "3,2,1,0"}, gpus=FOUR_GPUS)),
        check_hidden_gpus(preset(env={"CUDA_VISIBLE_DEVICES": "0"}, gpus=())),
    )


def test_a_python_home_is_told_with_its_place() -> None:
    finding = only(ours(preset(env={"PYTHONHOME": "/opt/python3.8"})))
    assert finding.severity == "warning"
    assert "PYTHONHOME=/opt/python3.8" in finding.message
    assert "/env/bin/python load its standard library from there" in finding.message
    assert finding.hint == (
        "find and remove it on a:\ngrep -n PYTHONHOME ~/.bashrc ~/.profile ~/.ssh/environment /etc/environment"
    )
    assert only(ours(hostfile(PYTHONHOME="/opt/x"))).hint == "remove it from the hostfile"
    silent(ours(preset(env={"PYTHONHOME": ""})))
