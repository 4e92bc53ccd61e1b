"""What is of OpenSSH's transport alone: its masters, its directory, and one login at a jump host."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from multinode.cluster.cluster import Node
from multinode.transport import openssh
from multinode.transport.base import gather
from multinode.transport.openssh import OpensshTransport
from tests.golden import Golden, error_of

from .sshd import Sshd, started

DEADLINE_S = 20.0
# A controller that asks, says so, and is killed. Its masters go sooner than by default, for the test's sake.
CONTROLLER = """
import sys, time
from multinode.cluster.cluster import Node
from multinode.transport import openssh
openssh._PERSIST_S = 4
transport = openssh.OpensshTransport()
stream = transport.open(Node(name="box", ssh_config=sys.argv[1]), "echo here; cat", deadline_s=20)
print(stream.read_line(20).decode(), flush=True)
time.sleep(60)
"""


def processes(config: str | None) -> list[int]:
    """Those that were started with this SSH configuration."""
    found = []
    for process in psutil.process_iter():
        try:
            if config in process.cmdline() and process.name() == "ssh":
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


def wait_for_processes(config: str | None, number: int) -> None:
    """Until there are so many: one that has just begun has no command line for a moment."""
    end = time.monotonic() + DEADLINE_S
    while len(found := processes(config)) != number:
        assert time.monotonic() < end, f"{len(found)} processes, not {number}"
        time.sleep(0.1)


def wait_until_gone(config: str | None) -> None:
    wait_for_processes(config, 0)


def test_nothing_of_it_is_left_when_it_is_closed(sshd: Sshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run")
    node = sshd.node(tmp_path)
    transport = OpensshTransport()
    stream = transport.open(node, "cat", deadline_s=DEADLINE_S)
    (directory,) = {entry for entry in Path("/run").glob("mn-*") if (entry / "0.log").exists()}
    assert directory.stat().st_mode & 0o777 == 0o700
    wait_for_processes(node.ssh_config, 2)
    transport.close()
    stream.close()
    wait_until_gone(node.ssh_config)
    assert not directory.exists()


def test_a_master_that_stands_still_keeps_nobody_from_closing(
    sshd: Sshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openssh, "_END_S", 0.5)
    node = sshd.node(tmp_path)
    transport = OpensshTransport()
    assert transport.run(node, "echo in", deadline_s=DEADLINE_S).stdout == b"in\n"
    wait_for_processes(node.ssh_config, 1)
    (master,) = processes(node.ssh_config)
    os.kill(master, signal.SIGSTOP)
    try:
        closed = gather([node], lambda _: transport.close(), deadline_s=DEADLINE_S)
    finally:
        os.kill(master, signal.SIGKILL)
    assert closed.failed == {}
    wait_until_gone(node.ssh_config)


def test_a_master_ends_by_itself_when_its_controller_was_killed(sshd: Sshd, tmp_path: Path) -> None:
    node = sshd.node(tmp_path)
    command = [sys.executable, "-c", CONTROLLER, str(node.ssh_config)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as controller:
        assert controller.stdout is not None
        assert controller.stdout.readline() == "here\n"
        wait_for_processes(node.ssh_config, 2)
        os.kill(controller.pid, signal.SIGKILL)
    wait_until_gone(node.ssh_config)


def test_many_nodes_behind_a_jump_host_make_one_login_there(sshd: Sshd, tmp_path: Path) -> None:
    (tmp_path / "gate").mkdir()
    gate = Sshd(tmp_path / "gate", sshd.port + 1)
    config = sshd.node(tmp_path).ssh_config
    nodes = [Node(name=f"box{number}", ssh_config=config) for number in range(6)]
    path = Path(str(config))
    text = path.read_text().replace("Host box jump", "Host box*\n  ProxyJump gate")
    lines = [f"HostName 127.0.0.1\nPort {gate.port}\nUser {gate.user}", f"IdentityFile {gate.folder / 'user_key'}"]
    path.write_text("\n".join([text, "Host gate", *lines, f"UserKnownHostsFile {tmp_path / 'known_hosts'}\n"]))
    with (tmp_path / "known_hosts").open("a") as known:
        known.write(gate.known_hosts_line)
    transport = OpensshTransport()
    with started(gate):
        asked = gather(nodes, lambda node: transport.run(node, "echo in", deadline_s=DEADLINE_S), deadline_s=DEADLINE_S)
        assert [one.stdout for one in asked.require().values()] == [b"in\n"] * len(nodes)
        transport.close()
    assert (gate.folder / "sshd.log").read_text().count("Accepted publickey") == 1


def test_sockets_never_lie_in_the_home_directory_and_their_paths_are_short(
    sshd: Sshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, deep = tmp_path / "home", tmp_path / ("d" * 90)
    for folder in (home, home / "tmp", deep):
        folder.mkdir()
    monkeypatch.setenv("HOME", str(home))
    node = sshd.node(tmp_path)
    for place in (home / "tmp", deep):
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(place))
        transport = OpensshTransport()
        assert transport.run(node, "echo in", deadline_s=DEADLINE_S).stdout == b"in\n"
        assert list(place.iterdir()) == []
        transport.close()


def test_a_configuration_that_ssh_refuses_is_told_in_its_words(tmp_path: Path, golden: Golden) -> None:
    config = tmp_path / "config"
    config.write_text("Nosuch yes\n")
    node = Node(name="box", ssh_config=str(config))
    refused = error_of(OpensshTransport().open, node, "true", deadline_s=DEADLINE_S)
    golden.check_errors("openssh_settings", {"no setting": refused}, tmp_path)


def test_an_exit_code_of_255_is_the_commands_own_while_the_connection_is_there(sshd: Sshd, tmp_path: Path) -> None:
    transport = OpensshTransport()
    assert transport.run(sshd.node(tmp_path), "exit 255", deadline_s=DEADLINE_S).exit_code == 255
    transport.close()


def test_a_node_whose_host_key_is_compared_with_none_is_not_verified(sshd: Sshd, tmp_path: Path) -> None:
    transport = OpensshTransport()
    node = sshd.node(tmp_path)
    assert transport.verifies(node)
    open_one = sshd.node(tmp_path, known_hosts="", settings="StrictHostKeyChecking no")
    assert not OpensshTransport().verifies(open_one)
