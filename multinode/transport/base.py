"""Transport: runs commands on nodes, through SSH, on this machine, or in tests; on all nodes in parallel."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

import msgspec

from multinode.cluster.cluster import Node
from multinode.cluster.quoting import as_steps
from multinode.errors import ContactLost, MultinodeError, UsageError

# A node's answer is read into memory; a longer one is an error of the node.
MAX_ANSWER_BYTES = 64 << 20
_MAX_STDERR_BYTES = 1 << 16


def time_left(end: float, least_s: float = 0.0) -> float:
    """Seconds until `end` on the monotonic clock, at least `least_s`."""
    return max(least_s, end - time.monotonic())


@contextlib.contextmanager
def held(lock: threading.RLock | threading.Semaphore, end: float, late: MultinodeError) -> Iterator[None]:
    """Acquire a lock; raises `late` if that fails by `end` on the monotonic clock."""
    if not lock.acquire(timeout=min(time_left(end), threading.TIMEOUT_MAX)):
        raise late
    try:
        yield
    finally:
        lock.release()


class Completed(msgspec.Struct, frozen=True, kw_only=True):
    """A remote command that has ended."""

    exit_code: int
    stdout: bytes
    stderr: bytes


class Stream(Protocol):
    """A running remote command, with its standard input and output."""

    most_bytes: int = MAX_ANSWER_BYTES  # maximum length of an answer

    def send(self, data: bytes) -> None:
        """Write to its standard input.

        Raises:
            ContactLost: the connection is closed.
        """

    def read_line(self, deadline_s: float) -> bytes | None:
        """The next line of its standard output without the newline; None at the end.

        Raises:
            ContactLost: no line within `deadline_s` seconds, or the connection is closed.
        """

    def finish(self, deadline_s: float) -> Completed:
        """Wait for the end: exit code, the rest of stdout, and stderr.

        Raises:
            ContactLost: it did not end within `deadline_s` seconds.
        """

    def close_stdin(self) -> None:
        """Signal the end of the input."""

    def close(self) -> None:
        """Release it; what runs on the node continues."""


class Transport(Protocol):
    """Runs commands on nodes. All methods may be called from several threads, one thread per node.

    Attributes:
        starts_early: whether an agent may be started before its first verb is known, to hide the time of the login.
    """

    starts_early: bool = True

    @classmethod
    def why_no_detach(cls) -> UsageError | None:
        """Why a run cannot outlive its controller; None if it can."""
        return None

    def run(self, node: Node, command: str, *, stdin: bytes = b"", deadline_s: float) -> Completed:
        """Run a constant command line with `stdin`, and wait for its end."""
        end = time.monotonic() + deadline_s
        stream = self.open(node, command, deadline_s=deadline_s)
        try:
            stream.send(stdin)
            stream.close_stdin()
            return stream.finish(time_left(end))
        finally:
            stream.close()

    def open(self, node: Node, command: str, *, deadline_s: float) -> Stream:
        """Start a command and communicate with it.

        Raises:
            NodeError: the node could not be reached within `deadline_s` seconds.
        """

    def channel(self, verb: str) -> str:  # noqa: ARG002 - for transports that tell verbs apart
        """Name of the channel of an agent verb: verbs with one name may share a channel, one after the other."""
        return ""

    def verifies(self, node: Node) -> bool:  # noqa: ARG002 - for transports whose user may have it switched off
        """Whether the node's identity is verified, so that it may receive a secret."""
        return True

    def close(self) -> None:
        """Close every connection."""


class BufferedStream(Stream):
    """Base of streams that read their output in chunks.

    Args:
        node: the node's name, for messages.
        send_deadline_s: how long the command may leave input unread.
    """

    def __init__(self, node: str, *, send_deadline_s: float) -> None:
        self._node = node
        self._send_deadline_s = send_deadline_s
        self._pending = bytearray()
        self._stderr = bytearray()
        self._sending = threading.Lock()
        self._reading = threading.Lock()

    def read_line(self, deadline_s: float) -> bytes | None:
        """The next line of its output; None at the end. See `Stream.read_line`."""
        end = time.monotonic() + deadline_s
        searched = 0
        with self._reading:
            while (newline := self._pending.find(b"\n", searched)) < 0:
                searched = len(self._pending)
                if not self._read_more(end):
                    return self._take() or None
            line = bytes(self._pending[:newline])
            del self._pending[: newline + 1]
            return line

    def finish(self, deadline_s: float) -> Completed:
        """Wait for the end. See `Stream.finish`."""
        end = time.monotonic() + deadline_s
        with self._reading:
            while self._read_more(end):
                pass
            exit_code = self._wait(end)
            return Completed(exit_code=exit_code, stdout=self._take(), stderr=bytes(self._stderr))

    @abstractmethod
    def _receive(self, end: float) -> bool:
        """Read once into `_pending`; False at the end of the output. Reads stderr, too."""

    @abstractmethod
    def _wait(self, end: float) -> int:
        """The command's exit code, once its output has ended."""

    def _keep_stderr(self, data: bytes) -> None:
        self._stderr += data[: _MAX_STDERR_BYTES - len(self._stderr)]

    def _read_more(self, end: float) -> bool:
        if len(self._pending) > self.most_bytes:
            raise ContactLost("its answer is too long", node=self._node)
        return self._receive(end)

    def _take(self) -> bytes:
        taken = bytes(self._pending)
        self._pending.clear()
        return taken


T = TypeVar("T")

DEFAULT_FAN_OUT = 16
"""The controller's CPU limits handshakes: on two cores more of them in parallel only make each slower."""
_fan_out = DEFAULT_FAN_OUT


def fan_out() -> int:
    """Nodes contacted, and logins in progress, at the same time."""
    return _fan_out


def set_fan_out(most: int) -> None:
    """Set the number of nodes contacted at the same time, for this process."""
    global _fan_out  # noqa: PLW0603 - one bound for one process: whoever asks shares its processors
    _fan_out = most


class Outcomes(NamedTuple, Generic[T]):
    """What each node answered, or why it did not, by the node's name and in the order in which they were given."""

    found: dict[str, T]
    failed: dict[str, MultinodeError]

    def require(self) -> dict[str, T]:
        """The answers, if all nodes have given one.

        Raises:
            MultinodeError: the first node's error, if any; the others are in its detail.
        """
        errors = list(self.failed.values())
        if not errors:
            return self.found
        first = errors[0]
        if len(errors) > 1 and not first.detail:
            first.detail = "\n".join(f"also {error}" for error in errors[1:])
        raise first


def gather(nodes: Sequence[Node], ask: Callable[[Node], T], *, deadline_s: float) -> Outcomes[T]:
    """Ask every node in parallel, and wait at most `deadline_s` seconds for each.

    `ask` runs in a daemon thread per node, at most `fan_out()` at a time. A thread that exceeds the deadline is
    abandoned, and its node has failed with ContactLost.

    Raises:
        Exception: what `ask` raised, unless it is a MultinodeError; it is a bug, not an answer.
    """
    # An answer in a tuple, as it may be an error, too.
    answers: queue.Queue[tuple[str, tuple[T] | BaseException]] = queue.Queue()
    most = fan_out()
    places = threading.Semaphore(most)

    def answer(node: Node) -> None:
        with places:
            try:
                answers.put((node.name, (ask(node),)))
            except BaseException as error:  # noqa: BLE001 - carried to the caller's thread
                answers.put((node.name, error))

    for node in nodes:
        threading.Thread(target=answer, args=(node,), name=f"ask-{node.name}", daemon=True).start()
    # As many rounds as needed with this number of threads.
    deadline_s *= max(1, -(-len(nodes) // most))
    found: dict[str, T] = {}
    failed: dict[str, MultinodeError] = {}
    end = time.monotonic() + deadline_s
    while len(found) + len(failed) < len(nodes):
        try:
            name, answered = answers.get(timeout=time_left(end))
        except queue.Empty:
            break
        if isinstance(answered, tuple):
            found[name] = answered[0]
        elif isinstance(answered, MultinodeError):
            answered.node = answered.node or name
            failed[name] = answered
        else:
            raise answered
    for node in nodes:
        if node.name not in found and node.name not in failed:
            hint = as_steps(f"see whether it is up: ssh {node.name} true", [node])
            failed[node.name] = ContactLost(f"no answer within {deadline_s:.0f} s", node=node.name, hint=hint)
    names = [node.name for node in nodes]
    return Outcomes(
        {name: found[name] for name in names if name in found},
        {name: failed[name] for name in names if name in failed},
    )
