"""What every transport that runs commands promises: over SSH, and on this machine."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from multinode.cluster.cluster import Node, local_cluster
from multinode.transport.base import Completed, Stream, Transport
from multinode.transport.local import LocalTransport
from multinode.transport.openssh import OpensshTransport
from tests.golden import Golden, error_of

from .conftest import make_transport

DEADLINE_S = 20.0


class Box:
    """A node that is reached."""

    def __init__(self, transport: Transport, node: Node) -> None:
        self.transport = transport
        self.node = node

    def run(self, command: str, stdin: bytes = b"", deadline_s: float = DEADLINE_S) -> Completed:
        return self.transport.run(self.node, command, stdin=stdin, deadline_s=deadline_s)

    def open(self, command: str) -> Stream:
        return self.transport.open(self.node, command, deadline_s=DEADLINE_S)


@pytest.fixture(params=["openssh", "fabric", "local"])
def box(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Box]:
    if request.param == "local":
        yield Box(LocalTransport(tmp_path), local_cluster(1, sys.executable).nodes[0])
        return
    sshd: Any = request.getfixturevalue("sshd")
    transport = make_transport(request.param)
    yield Box(transport, sshd.node(tmp_path))
    transport.close()


def test_a_command_gets_its_stdin_and_gives_stdout_stderr_and_exit_code(box: Box) -> None:
    done = box.run("cat; echo oops >&2; exit 7", stdin=b"a\0b\xff\nc")
    assert (done.exit_code, done.stdout, done.stderr) == (7, b"a\0b\xff\nc", b"oops\n")


def test_what_stands_in_stdin_is_never_run(box: Box, tmp_path: Path) -> None:
    marker = tmp_path / "injected"
    evil = f"$(touch {marker}); `touch {marker}`\n'; touch {marker} #\n\"; touch {marker}\n".encode()
    assert box.run("cat", stdin=evil).stdout == evil
    assert not marker.exists()


def test_much_goes_both_ways(box: Box) -> None:
    data = bytes(8 << 20)
    assert box.run("wc -c", stdin=data).stdout == b"%d\n" % len(data)
    assert box.run(f"head -c {len(data)} /dev/zero").stdout == data


def test_a_flood_on_stderr_blocks_nothing_and_is_cut(box: Box) -> None:
    done = box.run("head -c 8000000 /dev/zero >&2; echo done")
    assert (done.exit_code, done.stdout, len(done.stderr)) == (0, b"done\n", 1 << 16)


def test_a_stream_talks_line_by_line_both_ways(box: Box) -> None:
    stream = box.open('while read -r line; do echo "got $line"; done; printf last; exit 3')
    for word in (b"one", b"two", b"three"):
        stream.send(word + b"\n")
        assert stream.read_line(DEADLINE_S) == b"got " + word
    stream.send(b"four\nfive\n")
    assert [stream.read_line(DEADLINE_S) for _ in range(2)] == [b"got four", b"got five"]
    stream.close_stdin()
    assert [stream.read_line(DEADLINE_S) for _ in range(2)] == [b"last", None]
    assert stream.finish(DEADLINE_S).exit_code == 3
    stream.close()


def test_no_command_keeps_a_deadline_waiting(box: Box, golden: Golden) -> None:
    box.run("true")
    began = time.monotonic()
    errors = {
        "a command that does nothing": error_of(box.run, "exec sleep 60", deadline_s=0.7),
        "one that has closed its output": error_of(box.run, "exec sleep 5 >&- 2>&-", deadline_s=1.5),
    }
    stream = box.open("exec cat")
    errors["a line that does not come"] = error_of(stream.read_line, 0.3)
    stream.close()
    # OpenSSH's client keeps its output open until the command ends.
    client = "openssh" if isinstance(box.transport, OpensshTransport) else "others"
    golden.check_errors(f"streams_late_{client}", errors, shown={box.node.name: "NODE"})
    assert time.monotonic() - began < DEADLINE_S


def test_what_is_sent_to_a_command_that_has_ended_is_no_lost_contact(box: Box) -> None:
    stream = box.open("echo bye; exit 4")
    assert [stream.read_line(DEADLINE_S) for _ in range(2)] == [b"bye", None]
    stream.send(b"x" * 1000)
    assert stream.finish(DEADLINE_S).exit_code == 4
    stream.close()
    stream.close()
