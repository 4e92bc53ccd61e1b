from __future__ import annotations

import json
import os
import pwd
from pathlib import Path

import pytest

from multinode.node.facts.software import (
    parse_deepspeed_env,
    parse_nccl_file,
    read_deepspeed_env,
    read_nccl_files,
    select_variables,
)
from multinode.secret_values import is_secret

from .localnode import LocalNode

# The format is that of the page "Environment Variables" of NCCL's user guide.
NCCL_CONF = """# set by hand
NCCL_SOCKET_IFNAME==ens1f0
NCCL_DEBUG=WARN
NCCL_DEBUG=INFO
 NCCL_ALGO=Ring
no value here
WANDB_API_KEY=never
NCCL_MY_TOKEN=never
HOME=/nowhere"""


def test_variables_that_change_a_run_are_sent_and_secrets_are_not() -> None:
    matter = {"RANK": "0", "PET_NNODES": "2", "NCCL_DEBUG": "INFO", "MASTER_ADDR": "x", "TORCH_HOME": "/t"}
    matter |= {"LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0", "NNODES": "2", "NPROC_PER_NODE": "8"}
    others = {"RANKING": "1", "HOME": "/root", "NCCL_SECRET_KEY": "s", "TORCH_TOKEN": "t", "WANDB_API_KEY": "k"}
    assert select_variables({**matter, **others}) == matter


# Every word by which the controller knows a secret.
@pytest.mark.parametrize(
    "name",
    [
        *("TOKEN", "HF_TOKEN", "API_TOKENS", "hub_tokens", "SECRET", "PASSWORD", "PASSPHRASE", "CREDENTIALS", "APIKEY"),
        *("ACCESS_KEY", "PRIVATE_KEY", "AUTHORIZATION", "WEBHOOK_URL", "DB_PWD"),
    ],
)
def test_what_the_controller_takes_for_a_secret_never_leaves_the_node(name: str) -> None:
    assert is_secret(f"NCCL_{name}")
    assert select_variables({f"NCCL_{name}": "x"}) == {}


def test_what_a_node_sends_is_bounded() -> None:
    many = {f"NCCL_{number}": "x" * 5000 for number in range(1000)}
    sent = select_variables(many)
    assert len(sent) == 256
    assert len(sent["NCCL_0"]) == 1023


def test_a_file_is_read_as_nccl_reads_it() -> None:
    values = parse_nccl_file(NCCL_CONF)
    assert values["NCCL_SOCKET_IFNAME"] == "=ens1f0"
    assert values["NCCL_DEBUG"] == "WARN"
    # A blank before the name makes it another name, and NCCL never finds it.
    assert "NCCL_ALGO" not in values


def test_nccl_reads_the_users_file_first_and_then_that_of_the_system(tmp_path: Path) -> None:
    system = tmp_path / "nccl.conf"
    system.write_text("NCCL_ALGO=Tree\n")
    assert read_nccl_files({}, str(tmp_path), str(system)) == {str(system): {"NCCL_ALGO": "Tree"}}
    own = tmp_path / ".nccl.conf"
    own.write_text(NCCL_CONF)
    found = read_nccl_files({}, str(tmp_path), str(system))
    assert list(found) == [str(own), str(system)]
    assert found[str(own)] == {"NCCL_SOCKET_IFNAME": "=ens1f0", "NCCL_DEBUG": "WARN"}


def test_the_environment_names_another_file_in_place_of_the_users(tmp_path: Path) -> None:
    (tmp_path / ".nccl.conf").write_text("NCCL_ALGO=Ring\n")
    other = tmp_path / "other.conf"
    other.write_text("NCCL_PROTO=Simple\n")
    absent = str(tmp_path / "absent")
    assert read_nccl_files({"NCCL_CONF_FILE": str(other)}, str(tmp_path), absent) == {
        str(other): {"NCCL_PROTO": "Simple"}
    }
    assert list(read_nccl_files({"NCCL_CONF_FILE": ""}, str(tmp_path), absent)) == [str(tmp_path / ".nccl.conf")]


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert read_nccl_files({"NCCL_CONF_FILE": str(pipe)}, str(tmp_path), str(tmp_path)) == {}
    assert read_deepspeed_env(str(tmp_path)) == {}


def test_the_file_of_deepspeed() -> None:
    assert parse_deepspeed_env("NCCL_IB_DISABLE=1\nRANK = 0\n\nexport\nRANK=1\n") == {
        "NCCL_IB_DISABLE": "1",
        "RANK": "1",
    }


def test_a_probe_sends_them_all(node: LocalNode) -> None:
    (node.home / ".deepspeed_env").write_text("WORLD_SIZE=4\nHF_TOKEN=never\n")
    conf = node.home / "conf"
    conf.write_text(NCCL_CONF)
    env = {"NCCL_CONF_FILE": str(conf), "RANK": "3", "HF_TOKEN": "never"}
    code, records = node.call("probe", {"packages": False}, env=env)
    assert code == 0
    (facts,) = records
    assert facts["nccl_files"][str(conf)] == {"NCCL_SOCKET_IFNAME": "=ens1f0", "NCCL_DEBUG": "WARN"}
    assert facts["deepspeed_env"] == {"WORLD_SIZE": "4"}
    assert facts["env"] == {"NCCL_CONF_FILE": str(conf), "RANK": "3"}
    assert "never" not in json.dumps(records)


def test_the_users_file_lies_where_the_system_has_the_users_home(node: LocalNode) -> None:
    (node.home / ".nccl.conf").write_text("NCCL_ALGO=Ring\n")
    _, records = node.call("probe", {"packages": False})
    home = pwd.getpwuid(os.getuid()).pw_dir
    assert set(records[0]["nccl_files"]) <= {f"{home}/.nccl.conf", "/etc/nccl.conf"}
