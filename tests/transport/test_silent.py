"""A server that accepts and then never answers: whatever is asked ends in a clear error, by its deadline."""

from __future__ import annotations

import contextlib
import functools
import math
import re
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from multinode.check.probe import SentFacts
from multinode.cluster.cluster import Node
from multinode.errors import ConnectError, ContactLost, NodeError
from multinode.transport.agent import AgentTransport
from multinode.transport.base import gather
from multinode.transport.fabric_ssh import FabricStream, FabricTransport
from multinode.transport.openssh import OpensshTransport
from tests.golden import Golden, error_of

from .silent_sshd import silent_sshd

SshTransport = OpensshTransport | FabricTransport

# Far above the deadlines of what is asked here: reached by what waits without one.
HANGS_S = 15.0
CONNECTING = {"accept", "banner", "key exchange", "auth"}
MUCH = bytes(32 << 20)


def ask(
    node: Node,
    operation: Callable[[SshTransport, Node], object],
    *,
    kind: type[OpensshTransport | FabricTransport] = FabricTransport,
    connect_timeout_s: float = 3.0,
    is_connected: bool = True,
) -> NodeError:
    """How an operation ends that must not succeed; over a connection that is open already, its deadline is its own."""
    transport = kind(connect_timeout_s=connect_timeout_s)
    if is_connected:
        transport._connect(node, math.inf)  # noqa: SLF001 - no operation of it does this alone
    outcomes = gather([node], lambda one: operation(transport, one), deadline_s=HANGS_S)
    closed = gather([node], lambda _: transport.close(), deadline_s=HANGS_S)
    assert closed.failed == {}
    error = outcomes.failed[node.name]
    assert isinstance(error, NodeError)
    assert f"within {HANGS_S:.0f} s" not in error.message, "it hangs"
    return error


def run(transport: SshTransport, node: Node) -> object:
    return transport.run(node, "cat", stdin=b"x", deadline_s=0.7)


def run_long(transport: SshTransport, node: Node) -> object:
    return transport.run(node, "cat", deadline_s=HANGS_S)


def send_much(transport: SshTransport, node: Node) -> object:
    return transport.run(node, "cat", stdin=MUCH, deadline_s=0.7)


def read(transport: SshTransport, node: Node) -> object:
    with contextlib.closing(transport.open(node, "cat", deadline_s=5.0)) as stream:
        return stream.read_line(0.3)


def let_go(transport: SshTransport, node: Node) -> None:
    """What is let go of while a message is stuck: nothing waits for the one that sends it."""
    stream = transport.open(node, "cat", deadline_s=1.0)
    try:
        stream.send(MUCH)
    finally:
        stream.close_stdin()
        stream.close()


def call(transport: SshTransport, node: Node) -> object:
    return AgentTransport(transport).call(node, "probe", {"schema": 1}, SentFacts, deadline_s=0.7)


def jump(transport: SshTransport, node: Node) -> object:
    return transport.run(msgspec.structs.replace(node, jump="jump"), "cat", deadline_s=10.0)


FROZEN = "the port accepts connections, but sshd does not answer in time"


@pytest.mark.parametrize("client", [OpensshTransport, FabricTransport])
@pytest.mark.parametrize(
    ("step", "operation", "kind", "words"),
    [
        ("accept", run, ConnectError, FROZEN),
        ("banner", run, ConnectError, FROZEN),
        ("key exchange", run, ConnectError, FROZEN),
        ("auth", run, ConnectError, f"{FROZEN}|did not finish the login in time"),
        ("forward", jump, ConnectError, "timed out"),
        ("channel", run, ContactLost, "in time"),
        ("exec", run, ContactLost, "in time"),
        ("output", run, ContactLost, "no answer in time"),
        ("output", read, ContactLost, "no answer in time"),
        ("input", send_much, ContactLost, "lost while sending|does not read its input"),
        ("input", let_go, ContactLost, "lost while sending|does not read its input"),
        ("exec", call, ContactLost, "in time"),
        ("output", call, ContactLost, "no answer in time"),
    ],
)
def test_a_server_that_falls_silent_keeps_nothing_waiting(  # noqa: PLR0917 - a row of the table, and fixtures
    step: str,
    operation: Callable[[SshTransport, Node], object],
    kind: type[NodeError],
    words: str,
    client: type[OpensshTransport | FabricTransport],
    tmp_path: Path,
) -> None:
    with silent_sshd(step, tmp_path) as server:
        timeout_s = 0.5 if step in CONNECTING else 3.0
        is_connected = step not in {*CONNECTING, "forward"}
        error = ask(server.node(), operation, kind=client, connect_timeout_s=timeout_s, is_connected=is_connected)
    assert isinstance(error, kind)
    assert re.search(words, error.message)
    assert error.node == "box"


def test_a_connection_that_went_silent_is_given_up_for_a_new_one(tmp_path: Path, golden: Golden) -> None:
    with silent_sshd("channel", tmp_path) as server:
        transport, node = OpensshTransport(), server.node()
        for _ in range(2):
            stream = transport.open(node, "cat", deadline_s=HANGS_S)
            golden.check_errors("silent", {"a session": error_of(stream.read_line, 3.5)})
            stream.close()
        transport.close()
        assert server.logins == 2


def test_many_keys_do_not_multiply_the_wait_for_a_silent_server(tmp_path: Path) -> None:
    with silent_sshd("auth", tmp_path) as server:
        node = server.node()
        key = tmp_path / "key"
        keys = "".join(f"  IdentityFile {key}{number}\n" for number in range(40))
        for number in range(40):
            Path(f"{key}{number}").symlink_to(key)
        (tmp_path / "ssh_config").write_text((tmp_path / "ssh_config").read_text() + keys)
        error = ask(node, run, connect_timeout_s=0.5, is_connected=False)
    assert error.message.endswith(FROZEN)


@pytest.mark.parametrize("step", ["accept", "auth"])
def test_what_is_asked_ends_by_its_deadline_while_it_connects_or_another_does(step: str, tmp_path: Path) -> None:
    """However long a connection may take that nobody waits for."""
    with silent_sshd(step, tmp_path) as server:
        node = server.node()
        error = ask(node, run, connect_timeout_s=4 * HANGS_S, is_connected=False)
        assert error.message.endswith(FROZEN)

        def wait_for_another(transport: SshTransport, one: Node) -> object:
            begin = functools.partial(gather, [one], lambda two: run_long(transport, two), deadline_s=HANGS_S)
            threading.Thread(target=begin, daemon=True).start()
            while not (transport._opening if isinstance(transport, FabricTransport) else transport._links):  # noqa: SLF001 - the other one has begun
                time.sleep(0.01)
            return run(transport, one)

        error = ask(node, wait_for_another, connect_timeout_s=4 * HANGS_S, is_connected=False)
        assert "timed out" in error.message


def test_a_socket_that_takes_no_more_bytes_ends_by_the_deadline(tmp_path: Path) -> None:
    """The window of a channel may be wider than what the socket takes: then the writing itself waits."""
    with silent_sshd("input", tmp_path) as server:
        node = server.node()

        def fill(transport: SshTransport, one: Node) -> None:
            stream = transport.open(one, "cat", deadline_s=1.0)
            assert isinstance(stream, FabricStream)
            channel = stream._channel  # noqa: SLF001 - the state of a wide window, which only a peer can bring about
            channel.out_window_size = 1 << 30
            connection = channel.get_transport().sock
            assert isinstance(connection, socket.socket)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 12)
            stream.send(MUCH)

        error = ask(node, fill)
    assert "lost while sending" in error.message
