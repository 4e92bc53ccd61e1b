"""What a connection is made of, before it is opened. Opening one is tested in test_ssh.py."""

from __future__ import annotations

from pathlib import Path

import fabric
import msgspec
import pytest

from multinode.cluster.cluster import Node
from multinode.transport.fabric_ssh import make_connection
from tests.golden import Golden, error_of

from .sshd import make_key


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home directory without SSH settings of whoever runs the tests."""
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def connect(home: Path, config: str, node: Node | None = None) -> fabric.Connection:
    """The connection to `node`, by default a bare `box`, under this SSH configuration."""
    path = home / "ssh_config"
    path.write_text(config)
    node = msgspec.structs.replace(node or Node(name="box"), ssh_config=str(path))
    return make_connection(node, connect_timeout_s=7.5)


def test_the_ssh_configuration_gives_address_user_and_port(home: Path) -> None:
    connection = connect(home, "Host box\n HostName 10.0.0.7\n User alice\n Port 2200\n")
    assert (connection.host, connection.user, connection.port) == ("10.0.0.7", "alice", 2200)
    assert connection.connect_timeout == 8


def test_the_hostfile_wins_over_the_ssh_configuration(home: Path) -> None:
    connection = connect(home, "Host box\n User alice\n Port 2200\n", Node(name="box", user="bob", port=2201))
    assert (connection.user, connection.port) == ("bob", 2201)


def test_identity_files_that_do_not_exist_are_passed_over(home: Path) -> None:
    make_key(home / "there")
    connection = connect(home, f"Host box\n IdentityFile {home}/gone\n IdentityFile {home}/there\n")
    assert connection.connect_kwargs["key_filename"] == [f"{home}/there"]
    assert connection.connect_kwargs.get("look_for_keys", True)


def test_a_key_of_the_hostfile_is_the_only_one(home: Path) -> None:
    make_key(home / "mine")
    make_key(home / "other")
    connection = connect(home, f"Host box\n IdentityFile {home}/other\n", Node(name="box", key="~/mine"))
    assert connection.connect_kwargs["key_filename"] == [f"{home}/mine"]
    assert connection.connect_kwargs["look_for_keys"] is False


def test_jump_hosts_get_the_same_deadlines_and_the_same_strictness(home: Path) -> None:
    config = "Host box\n ProxyJump alice@gate:2200\nHost gate\n HostName 10.0.0.1\n"
    gateway = connect(home, config).gateway
    assert (gateway.host, gateway.user, gateway.port, gateway.connect_timeout) == ("10.0.0.1", "alice", 2200, 8)
    assert gateway.connect_kwargs["banner_timeout"] == 7.5
    own = connect(home, config, Node(name="box", jump="bob@other"))
    assert (own.gateway.host, own.gateway.user) == ("other", "bob")
    policies = {type(each.client._policy).__name__ for each in (gateway, own, own.gateway)}  # noqa: SLF001 - paramiko tells it in no other way
    assert policies == {"_RejectUnknown"}


def test_settings_that_cannot_be_understood_are_the_users_to_mend(home: Path, golden: Golden) -> None:
    (home / "known").write_text("box ssh-ed25519 !!!!x\n")
    (home / "marked").write_text("@revoked box ssh-ed25519 AAAA\n")
    configs = {
        "no setting": "nonsense",
        "a port that is not a number": "Host box\n Port many\n",
        "an open quote": 'Host box\n UserKnownHostsFile "a b\n',
        "a known_hosts with a broken key": f"Host box\n UserKnownHostsFile {home}/known\n",
        "a known_hosts with @revoked": f"Host box\n UserKnownHostsFile {home}/marked\n",
    }
    errors = {case: error_of(connect, home, config) for case, config in configs.items()}
    errors["a jump host that is not an address"] = error_of(connect, home, "", Node(name="box", jump="gate:many"))
    gone = Node(name="box", ssh_config=f"{home}/gone")
    errors["no configuration"] = error_of(make_connection, gone, connect_timeout_s=1)
    golden.check_errors("fabric_settings", errors, home)
