"""The seam between multinode and the network: a Transport runs commands on nodes. SSH and the fake implement it."""

from __future__ import annotations

from typing import Protocol

import msgspec

from multinode.core.cluster.cluster import Node

__all__ = ["Completed", "Stream", "Transport"]


class Completed(msgspec.Struct, frozen=True, kw_only=True):
    """A remote command that ended."""

    exit_code: int
    stdout: bytes
    stderr: bytes


class Stream(Protocol):
    """A remote command that is running, with its standard input and output."""

    def send(self, data: bytes) -> None:
        """Write to its standard input.

        Raises:
            ContactLost: the connection is gone.
        """

    def read_line(self, deadline_s: float) -> bytes | None:
        """The next line of its standard output without the newline; None at the end of it.

        Raises:
            ContactLost: no line within `deadline_s` seconds, or the connection is gone.
        """

    def finish(self, deadline_s: float) -> Completed:
        """Wait for the end: exit code, what was left of stdout, and stderr.

        Raises:
            ContactLost: it did not end within `deadline_s` seconds.
        """

    def close_stdin(self) -> None:
        """Tell it that no more input follows."""

    def close(self) -> None:
        """Let go of it; what runs on the node is not stopped."""


class Transport(Protocol):
    """Runs commands on nodes. All methods may be called from several threads, one node a thread."""

    def run(self, node: Node, command: str, *, stdin: bytes = b"", deadline_s: float) -> Completed:
        """Run a constant command line with `stdin`, and wait for its end.

        Raises:
            NodeError: the node cannot be reached, or did not answer within `deadline_s` seconds.
        """

    def open(self, node: Node, command: str, *, deadline_s: float) -> Stream:
        """Start a command and talk to it.

        Raises:
            NodeError: the node cannot be reached within `deadline_s` seconds.
        """

    def close(self) -> None:
        """Close every connection."""
