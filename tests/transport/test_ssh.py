from __future__ import annotations

import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import paramiko
import psutil
import pytest
from msgspec.structs import replace

from multinode.check.probe import SentFacts
from multinode.cluster.cluster import Node
from multinode.errors import AuthError, ConnectError, ContactLost, HostKeyError, NodeError, ResolveError
from multinode.transport.agent import AgentTransport, load_archive
from multinode.transport.base import Transport, gather
from multinode.transport.fabric_ssh import FabricStream, FabricTransport
from multinode.transport.openssh import OpensshTransport
from tests.golden import Golden, error_of
from tests.warm import free_port

from .conftest import make_transport
from .sshd import Sshd, make_key

DEADLINE_S = 20.0
_TAG = sys.implementation.cache_tag


@pytest.fixture
def node(sshd: Sshd, tmp_path: Path) -> Node:
    return sshd.node(tmp_path)


def refusal(ssh: Transport, node: Node, kind: type[NodeError]) -> NodeError:
    """The error of a node that cannot be reached."""
    with pytest.raises(kind) as caught:
        ssh.run(node, "true", deadline_s=DEADLINE_S)
    assert caught.value.node == node.name
    return caught.value


def test_all_streams_of_a_node_share_one_connection(ssh: Transport, node: Node) -> None:
    streams = [ssh.open(node, 'echo "$SSH_CONNECTION"; cat', deadline_s=DEADLINE_S) for _ in range(3)]
    assert len({stream.read_line(DEADLINE_S) for stream in streams}) == 1
    for stream in streams:
        stream.close()


def test_a_session_too_many_is_refused_and_the_others_live_on(ssh: Transport, node: Node, golden: Golden) -> None:
    streams = [ssh.open(node, "echo here; cat", deadline_s=DEADLINE_S) for _ in range(4)]
    assert [stream.read_line(DEADLINE_S) for stream in streams] == [b"here"] * 4
    golden.check_errors("ssh_max_sessions", {"cat": error_of(ssh.run, node, "cat", deadline_s=DEADLINE_S)})
    streams[0].send(b"alive\n")
    assert streams[0].read_line(DEADLINE_S) == b"alive"
    for stream in streams:
        stream.close()


@pytest.mark.parametrize("breaks", [EOFError(), OSError(), paramiko.SSHException("key exchange timed out")])
@pytest.mark.parametrize("stream", ["recv", "recv_stderr"])
def test_a_connection_that_breaks_while_it_is_read_is_lost(breaks: Exception, stream: str, golden: Golden) -> None:
    # Reading sends, too: it tells the node how much more it may send.
    class Breaks(paramiko.Channel):
        def recv(self, _: int) -> bytes:
            raise breaks

        def recv_stderr_ready(self) -> bool:
            return stream == "recv_stderr"

        def recv_stderr(self, _: int) -> bytes:
            raise breaks

    lost = error_of(FabricStream(Breaks(1), "node1", send_deadline_s=DEADLINE_S).read_line, DEADLINE_S)
    golden.check_errors("ssh_lost", {"while it is read": lost})


def test_a_connection_that_dies_is_lost_and_the_next_command_opens_another(ssh: Transport, node: Node) -> None:
    with pytest.raises(ContactLost):
        ssh.run(node, "kill -9 $PPID; exec sleep 1", deadline_s=DEADLINE_S)
    assert ssh.run(node, "echo again", deadline_s=DEADLINE_S).stdout == b"again\n"


def test_an_unknown_host_key_is_refused_with_the_command_that_accepts_it(
    ssh: Transport, sshd: Sshd, tmp_path: Path, golden: Golden
) -> None:
    node = sshd.node(tmp_path, known_hosts="")
    error = refusal(ssh, node, HostKeyError)
    shown = subprocess.run(
        ["ssh-keygen", "-l", "-f", str(sshd.folder / "host_key.pub")], capture_output=True, text=True, check=True
    )
    fingerprint = {shown.stdout.split()[1]: "FINGERPRINT"}
    golden.check_errors("ssh_unknown_key", {"no line in known_hosts": error}, tmp_path, fingerprint)
    assert (tmp_path / "known_hosts").read_text() == ""


@pytest.mark.parametrize("kind", ["ed25519", "ecdsa"])
def test_a_refused_key_names_the_user_and_what_was_tried(
    ssh: Transport, sshd: Sshd, tmp_path: Path, kind: str, golden: Golden
) -> None:
    make_key(sshd.folder / f"stranger-{tmp_path.name}", kind)
    node = sshd.node(tmp_path, key=f"stranger-{tmp_path.name}")
    error = refusal(ssh, node, AuthError)
    shown = {str(sshd.folder): "KEYS", f"stranger-{tmp_path.name}": "stranger", repr(sshd.user): "USER"}
    client = "openssh" if isinstance(ssh, OpensshTransport) else "fabric"
    golden.check_errors(f"ssh_refused_key_{client}", {"a stranger's key": error}, tmp_path, shown)


def test_a_port_where_nothing_listens_is_refused(ssh: Transport, sshd: Sshd, tmp_path: Path) -> None:
    port = free_port()
    error = refusal(ssh, replace(sshd.node(tmp_path), port=port), ConnectError)
    assert error.message == f"no SSH connection to 127.0.0.1 port {port}: refused"
    assert str(error.ran).endswith(f"-p {port} box true")


@pytest.mark.parametrize("name", ["no-such-node.invalid", "a" * 64])
def test_a_name_that_does_not_resolve_says_so(ssh: Transport, name: str) -> None:
    error = refusal(ssh, Node(name=name, ssh_config="/dev/null"), ResolveError)
    assert repr(name) in error.message


def test_a_port_that_answers_as_no_sshd_does_is_given_up(sshd: Sshd, tmp_path: Path) -> None:
    transport = FabricTransport(connect_timeout_s=0.5)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        began = time.monotonic()
        error = refusal(transport, replace(sshd.node(tmp_path), port=listener.getsockname()[1]), ConnectError)
    assert error.message.endswith("the port accepts connections, but sshd does not answer in time")
    assert time.monotonic() - began < DEADLINE_S / 2


def test_what_a_server_says_that_is_no_sshd_does_nothing_to_a_terminal(sshd: Sshd, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def greet() -> None:
            with listener.accept()[0] as caller:
                caller.sendall(b"SSH-\x1b[2J-evil\r\n")
                caller.recv(1024)

        thread = threading.Thread(target=greet)
        thread.start()
        node = replace(sshd.node(tmp_path), port=listener.getsockname()[1])
        error = refusal(FabricTransport(connect_timeout_s=DEADLINE_S), node, ConnectError)
        thread.join(DEADLINE_S)
    assert "[2J" in error.message
    assert error.message.isprintable()


def test_a_jump_host_is_gone_through(ssh: Transport, sshd: Sshd, tmp_path: Path) -> None:
    by_config = sshd.node(tmp_path, settings="Host box\n  ProxyJump jump\n")
    source, target = (
        ssh.run(by_config, "echo $SSH_CLIENT; echo $SSH_CONNECTION", deadline_s=DEADLINE_S).stdout.decode().splitlines()
    )
    assert source.split()[2] == target.split()[3] == str(sshd.port)


def test_a_jump_host_of_the_hostfile_is_verified_too(ssh: Transport, sshd: Sshd, tmp_path: Path) -> None:
    node = replace(sshd.node(tmp_path), jump=f"{sshd.user}@localhost:{sshd.port}")
    assert re.match(r"its jump host \S*localhost\S*: its host key is unknown", refusal(ssh, node, HostKeyError).message)


def test_the_agent_is_sent_once_then_reused_in_a_home_that_only_its_owner_reads(
    ssh: Transport, sshd: Sshd, node: Node
) -> None:
    agent = AgentTransport(ssh)
    path = sshd.home / load_archive().path
    path.unlink(missing_ok=True)
    request = {"schema": 1, "packages": False}
    assert agent.call(node, "probe", request, SentFacts, deadline_s=DEADLINE_S).home == str(sshd.home)
    assert path.read_bytes() == load_archive().data
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o700, 0o700)
    stamp = path.stat().st_mtime_ns
    agent.call(node, "probe", request, SentFacts, deadline_s=DEADLINE_S)
    assert path.stat().st_mtime_ns == stamp
    agent.close()
    # Beside it there is at most its compiled copy.
    assert {entry.name for entry in path.parent.glob("*.pyz")} <= {path.name, f"{path.stem}.{_TAG}.pyz"}


def test_a_bashrc_that_prints_disturbs_nothing(ssh: Transport, sshd: Sshd, node: Node) -> None:
    bashrc = sshd.home / ".bashrc"
    bashrc.write_text("echo 'Welcome!'; echo 'to stderr' >&2; echo\n")
    try:
        agent = AgentTransport(ssh)
        record = agent.call(node, "probe", {"schema": 1, "packages": False}, SentFacts, deadline_s=DEADLINE_S)
        agent.close()
        noisy = ssh.run(node, "echo in", deadline_s=DEADLINE_S).stdout
    finally:
        bashrc.unlink()
    assert record.home == str(sshd.home)
    assert noisy == b"Welcome!\n\nin\n"  # the shell of this test does read it


def test_logins_that_pass_one_jump_host_stay_below_what_its_sshd_takes(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gate:
        config = tmp_path / "ssh_config"
        config.write_text(f"Host gate\n  HostName 127.0.0.1\n  Port {gate.getsockname()[1]}\n")
        nodes = [Node(name=f"127.0.0.{host}", jump="gate", ssh_config=str(config)) for host in range(1, 13)]
        ssh = FabricTransport(connect_timeout_s=DEADLINE_S)
        asking = threading.Thread(
            target=gather,
            args=(nodes, lambda node: ssh.run(node, "true", deadline_s=DEADLINE_S)),
            kwargs={"deadline_s": DEADLINE_S},
        )
        asking.start()
        gate.settimeout(DEADLINE_S)
        logins = [gate.accept()[0] for _ in range(8)]
        # A ninth one waits until one of them is over.
        gate.settimeout(0.5)
        with pytest.raises(TimeoutError):
            gate.accept()
        logins.pop().close()
        gate.settimeout(DEADLINE_S)
        logins.append(gate.accept()[0])
    for login in logins:
        login.close()
    asking.join()
    ssh.close()


@pytest.mark.parametrize("client", ["openssh", "fabric"])
def test_a_connection_that_is_still_being_opened_does_not_outlive_the_transport(
    client: str, sshd: Sshd, tmp_path: Path, golden: Golden
) -> None:
    def logins() -> set[object]:
        found = psutil.net_connections("tcp")
        return {one.laddr for one in found if one.raddr and one.raddr.port == sshd.port and one.status == "ESTABLISHED"}

    def ask(node: Node) -> object:
        return ssh.run(node, "true", deadline_s=DEADLINE_S)

    before = logins()
    ssh = make_transport(client)
    node = sshd.node(tmp_path)
    asking = threading.Thread(target=gather, args=([node], ask), kwargs={"deadline_s": DEADLINE_S})
    asking.start()
    ssh.close()
    asking.join()
    end = time.monotonic() + DEADLINE_S
    while not logins() <= before:
        assert time.monotonic() < end, "a connection is left"
        time.sleep(0.05)
    closed = error_of(ssh.run, node, "true", deadline_s=DEADLINE_S)
    golden.check_errors("ssh_closed", {"a command after the end": closed})
