from __future__ import annotations

import pytest

from multinode.cluster.cluster import Node
from multinode.errors import ContactLost
from multinode.transport.base import Completed, Stream, Transport
from multinode.transport.fake import GREETING, FakeTransport

NODE = Node(name="a")


def test_it_is_a_transport_that_answers_with_what_the_handler_gives_and_keeps_what_was_run() -> None:
    fake = FakeTransport(lambda node, _, stdin: Completed(exit_code=3, stdout=stdin, stderr=node.name.encode()))
    transport: Transport = fake
    assert transport.run(NODE, "cat", stdin=b"in", deadline_s=1) == Completed(exit_code=3, stdout=b"in", stderr=b"a")
    assert fake.ran == [("a", "cat", b"in")]


def test_a_stream_reads_the_handlers_lines_and_has_seen_what_was_sent_before() -> None:
    fake = FakeTransport(lambda _node, _command, stdin: [b"one\n", b"two\n", stdin])
    stream: Stream = fake.open(NODE, "cat", deadline_s=1)
    stream.send(b"three\n")
    assert [stream.read_line(1) for _ in range(4)] == [b"one", b"two", b"three", None]
    assert stream.finish(1).exit_code == 0
    assert len(fake.ran) == 1


def test_what_the_handler_raises_is_what_the_network_does() -> None:
    def lose(node: Node, _command: str, _stdin: bytes) -> Completed:
        raise ContactLost("gone", node=node.name)

    fake = FakeTransport(lose)
    with pytest.raises(ContactLost):
        fake.run(NODE, "true", deadline_s=1)
    stream = fake.open(NODE, "true", deadline_s=1)
    stream.send(b"\n")
    with pytest.raises(ContactLost):
        stream.read_line(1)


def test_a_stream_greets_as_an_agent_does_that_waits_for_a_request() -> None:
    stream = FakeTransport(lambda *_: [b"one\n"]).open(NODE, "agent", deadline_s=1)
    assert stream.read_line(1) == GREETING
    stream.send(b"{}\n")
    assert [stream.read_line(1), stream.read_line(1)] == [b"one", None]
