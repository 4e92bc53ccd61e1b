"""The one error tree. Everything we expect to go wrong is one of these; `cli` alone prints them.

MultinodeError             exit 1   a job, a check or a test failed
|-- UsageError             exit 2   the command line, a hostfile or a configuration is wrong
|   |-- HostfileError               a line of the hostfile
|   `-- JobError                    a training configuration
|-- NodeError              exit 3   a node could not be reached
|   |-- ResolveError                its name does not resolve
|   |-- ConnectError                no route, refused, timed out
|   |-- HostKeyError                its host key is unknown or has changed
|   |-- AuthError                   it refused our keys
|   `-- ContactLost                 it answered, and then no longer
|       `-- NodeGone                its allocation has ended
|-- NodeFailed             exit 1   a node was reached and could not do what was asked
|   `-- AgentFailed                 the agent ran there, and says why
|-- RunFailed              exit 1   a run did not end well
`-- Interrupted            exit 130 the user pressed Ctrl-C
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Self


def printable(text: str) -> str:
    """The text without control characters but line breaks."""
    return text if text.isprintable() else "".join(char if char.isprintable() or char == "\n" else " " for char in text)


def printable_line(text: str) -> str:
    """The text without control characters and line breaks: text of a node must not pass for a line of ours."""
    return printable(text).replace("\n", " ")


class MultinodeError(Exception):
    """Base class of all expected errors. It states what failed, on which node, and how to fix it.

    Args:
        message: what is wrong, one sentence.
        node: the node's name in the hostfile, where one node is concerned.
        ran: what was being run or read, as a person would type it.
        hint: what fixes it: a command, a key of the hostfile, an option; or several texts: words, then commands.
        detail: further lines, such as the end of a log.
    """

    exit_code = 1
    run_id: str | None = None
    """The stored run whose record says how it ended, where there is one."""

    def __init__(
        self,
        message: str,
        *,
        node: str | None = None,
        ran: str | None = None,
        hint: str | Sequence[str] | None = None,
        detail: str = "",
    ) -> None:
        super().__init__(message)
        # A node, or a server that is none, may have said some of it: no control characters for the terminal, and no
        # further line that would look like one of ours.
        self.message = printable_line(message)
        self.node = node
        self.ran = ran
        self.hint_lines = [printable_line(line) for line in ([hint] if isinstance(hint, str) else hint or ())]
        self.detail = printable(detail)

    @property
    def hint(self) -> str | None:
        """The hint as one line; None where there is none."""
        if not self.hint_lines:
            return None
        words, *commands = self.hint_lines
        return " ".join([words, "; ".join(commands)]) if commands else words

    def of_run(self, run_id: str | None) -> Self:
        """The error, with the stored run whose record says how it ended."""
        self.run_id = run_id
        return self

    def __str__(self) -> str:
        return f"{self.node}: {self.message}" if self.node else self.message


class UsageError(MultinodeError):
    """The command line or a configuration is invalid. Nothing was started."""

    exit_code = 2


class HostfileError(UsageError):
    """A hostfile cannot be understood; the message begins with `file:line:`."""


class JobError(UsageError):
    """A training configuration cannot be understood."""


class AlreadyFollowed(UsageError):
    """Another process of this machine follows the run."""


class NodeError(MultinodeError):
    """A node could not be reached."""

    exit_code = 3


class ResolveError(NodeError):
    """The node's name does not resolve to an address."""


class ConnectError(NodeError):
    """No SSH connection: refused, no route, timed out, or dropped in the handshake."""


class HostKeyError(NodeError):
    """The node's host key is unknown, or differs from the one on record."""


class AuthError(NodeError):
    """The node refused every key that was offered."""


OURS_TO_FIX = (UsageError, ResolveError, HostKeyError, AuthError)
"""What keeps us from a node until somebody changes it on this side; seeking the node again would not."""


class ContactLost(NodeError):
    """The connection to a node ended, or went silent past its deadline."""


class NodeGone(ContactLost):
    """The node is no longer ours, and trying again will not bring it back: its allocation has ended."""


class NodeFailed(MultinodeError):
    """A node was reached, but it could not do what was requested."""


class AgentFailed(NodeFailed):
    """The agent ran on the node and says why it could not do what was asked."""


class RunFailed(MultinodeError):
    """A run failed. The message describes its first failure."""


class Interrupted(MultinodeError):
    """The user asked to stop."""

    exit_code = 130
