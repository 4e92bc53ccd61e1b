from __future__ import annotations

import json
import re

import msgspec
import pytest

from multinode.core.collective_test import CollectiveTest
from multinode.core.command import Command
from multinode.core.engines.collective import collective_command
from multinode.core.engines.llamafactory import llamafactory_command, reads_rank
from multinode.core.engines.place import STRAY_VARIABLES, Place, network_environment
from multinode.core.engines.torchrun import torchrun_command

PLACE = Place(
    node_rank=1,
    nnodes=2,
    nproc=4,
    master_addr="10.0.0.1",
    master_port=29500,
    ifname="ens1f0",
    gpus=(1, 6),
    run_dir="/home/u/.multinode/runs/r.1",
    python="/env/bin/python",
    packages={"llamafactory": "0.9.5"},
)
BARE = msgspec.structs.replace(PLACE, ifname=None, gpus=None, python=None, packages=None)


def test_nccl_gets_the_interface_as_an_exact_match_and_gloo_its_plain_name() -> None:
    env = network_environment(PLACE)
    assert env["NCCL_SOCKET_IFNAME"] == "=ens1f0"
    assert env["GLOO_SOCKET_IFNAME"] == "ens1f0"


def test_what_is_not_known_is_not_set() -> None:
    env = network_environment(BARE)
    assert not {"NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "CUDA_VISIBLE_DEVICES"} & set(env)


@pytest.mark.parametrize("place", [PLACE, BARE])
def test_nothing_left_over_in_a_profile_changes_the_run(place: Place) -> None:
    commands = [
        llamafactory_command(place, {}, None),
        torchrun_command(place, ("train.py",), {}, None),
        collective_command(place, CollectiveTest(sizes_bytes=(8,)), {}),
    ]
    for command in commands:
        removed_or_set = {*command.unset, *command.env}
        assert set(STRAY_VARIABLES) <= removed_or_set
        assert not set(command.unset) & set(command.env)


def test_llamafactory_is_forced_through_torchrun_with_one_worker_too() -> None:
    one = msgspec.structs.replace(PLACE, nproc=1, gpus=(6,))
    env = llamafactory_command(one, {}, None).env
    assert env["FORCE_TORCHRUN"] == "1"
    assert (env["NNODES"], env["NODE_RANK"], env["NPROC_PER_NODE"]) == ("2", "1", "1")
    assert (env["MASTER_ADDR"], env["MASTER_PORT"]) == ("10.0.0.1", "29500")


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("0.8.3", True),
        ("0.9.0", True),
        ("0.9.1", False),
        ("0.9.10", False),
        ("0.9.5.dev0", False),
        ("1.0.0", False),
        (None, True),
        ("main", True),
    ],
)
def test_rank_is_set_for_releases_that_read_it_and_for_unknown_ones(version: str | None, *, expected: bool) -> None:
    assert reads_rank(version) is expected
    packages = {"llamafactory": version} if version is not None else {}
    command = llamafactory_command(msgspec.structs.replace(PLACE, packages=packages), {}, None)
    assert ("RANK" in command.env) is expected
    assert ("RANK" in command.unset) is not expected


def test_llamafactory_reads_the_job_that_travelled_and_finds_its_own_torchrun() -> None:
    command = llamafactory_command(PLACE, {}, "/work")
    assert command.argv == ("llamafactory-cli", "train", "/home/u/.multinode/runs/r.1/job.yaml")
    assert (command.path_first, command.cwd) == ("/env/bin", "/work")
    assert llamafactory_command(BARE, {}, None).path_first is None
    assert llamafactory_command(msgspec.structs.replace(PLACE, python="python3"), {}, None).path_first is None


def test_a_script_keeps_its_arguments_untouched() -> None:
    script = ("train.py", "two words", "$HOME", "--x=;rm", "")
    command = torchrun_command(PLACE, script, {}, "/work")
    assert command.argv[-5:] == script
    assert command.argv[:3] == ("/env/bin/python", "-m", "torch.distributed.run")
    assert torchrun_command(BARE, script, {}, None).argv[0] == "python3"


def test_the_master_port_and_address_are_numbers_of_this_place() -> None:
    argv = torchrun_command(msgspec.structs.replace(PLACE, master_port=1234), ("t.py",), {}, None).argv
    assert "--master-port=1234" in argv
    assert any(re.fullmatch(r"--master-addr=[0-9.]+", word) for word in argv)


def test_a_collective_test_runs_the_archive_with_its_request_as_data() -> None:
    test = CollectiveTest(sizes_bytes=(8, 16), backend="gloo")
    place = msgspec.structs.replace(PLACE, agent="/home/u/.multinode/agent/x.pyz")
    command: Command = collective_command(place, test, {"MINE": "1"})
    assert command.argv[-2:] == ("/home/u/.multinode/agent/x.pyz", "collectives")
    assert command.env["MINE"] == "1"
    assert json.loads(command.env["MULTINODE_REQUEST"])["sizes_bytes"] == [8, 16]
