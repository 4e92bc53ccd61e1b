"""FakeTransport: a Transport without a network, for tests of multinode and of code that uses it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from multinode.cluster.cluster import Node
from multinode.transport.base import Completed, Stream, Transport

GREETING = b'{"kind": "agent", "schema": 1, "python": "3.9.0"}'
"""The agent's first line."""

Handler = Callable[[Node, str, bytes], "Completed | Iterable[bytes]"]


class FakeTransport(Transport):
    """Answers with `handler(node, command, stdin)`: a Completed, or the lines of a stream; it may raise.

    A stream that is read before anything was sent greets like the agent.
    """

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self.ran: list[tuple[str, str, bytes]] = []  # what was run: (node's name, command, stdin)
        self.streams: list[FakeStream] = []  # what was opened

    def run(self, node: Node, command: str, *, stdin: bytes = b"", deadline_s: float) -> Completed:  # noqa: ARG002 - nothing is waited for
        """Answer at once. See `Transport.run`."""
        self.ran.append((node.name, command, stdin))
        answer = self._handler(node, command, stdin)
        return answer if isinstance(answer, Completed) else Completed(exit_code=0, stdout=b"".join(answer), stderr=b"")

    def open(self, node: Node, command: str, *, deadline_s: float) -> FakeStream:  # noqa: ARG002 - the base class has it
        """A stream that calls the handler when it is first read. See `Transport.open`."""
        self.streams.append(FakeStream(self, node, command))
        return self.streams[-1]

    def close(self) -> None:
        """Nothing is open."""


class FakeStream(Stream):
    """The stream of `FakeTransport.open`."""

    def __init__(self, transport: FakeTransport, node: Node, command: str) -> None:
        self._transport = transport
        self._node = node
        self._command = command
        self._completed: Completed | None = None
        self._lines: list[bytes] | None = None
        self._has_greeted = False
        self.sent = b""  # everything written to it
        self.is_closed = False  # whether it was released

    def send(self, data: bytes) -> None:
        """Keep the text. See `Stream.send`."""
        self.sent += data

    def read_line(self, deadline_s: float) -> bytes | None:  # noqa: ARG002 - nothing is waited for
        """The next line of the handler's answer. See `Stream.read_line`."""
        if self._lines is None and not self.sent and not self._has_greeted:
            self._has_greeted = True
            return GREETING
        if self._lines is None:
            self._completed = self._transport.run(self._node, self._command, stdin=self.sent, deadline_s=0)
            self._lines = self._completed.stdout.splitlines()
            greetings = [index for index, line in enumerate(self._lines) if line.startswith(b'{"kind": "agent"')]
            if self._has_greeted and greetings:
                # From an agent that the handler ran.
                del self._lines[: greetings[0] + 1]
        return self._lines.pop(0) if self._lines else None

    def finish(self, deadline_s: float) -> Completed:
        """The handler's answer. See `Stream.finish`."""
        self.read_line(deadline_s)
        if self._completed is None:
            return Completed(exit_code=0, stdout=b"", stderr=b"")
        return self._completed

    def close_stdin(self) -> None:
        """Nothing waits for it."""

    def close(self) -> None:
        """Record it."""
        self.is_closed = True
