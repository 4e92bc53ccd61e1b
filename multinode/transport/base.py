"""Transport: runs commands on nodes, through SSH, on this machine, or in tests; on all nodes in parallel."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

import msgspec

from multinode.cluster.cluster import Node
from multinode.cluster.quoting import as_steps
from multinode.errors import ContactLost, MultinodeError

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
    """Runs commands on nodes. All methods may be called from several threads, one thread per node."""

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


class Outcome(Generic[T]):
    """The answer of one node: a value or an error."""

    def __init__(self, node: Node, *, value: T | None = None, error: MultinodeError | None = None) -> None:
        self.node = node
        self.error = error  # why there is no value; None if there is one
        self._value = value

    @property
    def value(self) -> T:
        """The node's answer.

        Raises:
            MultinodeError: it answered with an error.
        """
        if self.error is not None:
            raise self.error
        return self._value  # type: ignore[return-value]  # a value is there whenever there is no error


class Outcomes(tuple[Outcome[T], ...]):
    """The answers of all nodes, in the order given."""

    __slots__ = ()

    @property
    def errors(self) -> tuple[MultinodeError, ...]:
        """The errors among them."""
        return tuple(outcome.error for outcome in self if outcome.error is not None)

    @property
    def values(self) -> tuple[T, ...]:
        """The values among them."""
        return tuple(outcome.value for outcome in self if outcome.error is None)

    def require(self) -> tuple[T, ...]:
        """All values.

        Raises:
            MultinodeError: the first node's error, if any; the others are in its detail.
        """
        errors = self.errors
        if errors:
            first = errors[0]
            if len(errors) > 1 and not first.detail:
                first.detail = "\n".join(f"also {error}" for error in errors[1:])
            raise first
        return self.values


def gather(nodes: Sequence[Node], ask: Callable[[Node], T], *, deadline_s: float) -> Outcomes[T]:
    """Ask every node in parallel, and wait at most `deadline_s` seconds for each.

    `ask` runs in a daemon thread per node, at most `fan_out()` at a time; a thread that exceeds the deadline is
    abandoned and its node answers with ContactLost. Only MultinodeErrors become outcomes.

    Raises:
        Exception: whatever else `ask` raised; it is a bug, not an answer.
    """
    answers: queue.Queue[tuple[int, Outcome[T] | BaseException]] = queue.Queue()
    most = fan_out()
    places = threading.Semaphore(most)

    def answer(index: int, node: Node) -> None:
        with places:
            try:
                answers.put((index, Outcome(node, value=ask(node))))
            except MultinodeError as error:
                error.node = error.node or node.name
                answers.put((index, Outcome(node, error=error)))
            except BaseException as error:  # noqa: BLE001 - carried to the caller's thread and raised there
                answers.put((index, error))

    for index, node in enumerate(nodes):
        threading.Thread(target=answer, args=(index, node), name=f"ask-{node.name}", daemon=True).start()
    # As many rounds as needed with this number of threads.
    deadline_s *= max(1, -(-len(nodes) // most))
    outcomes: dict[int, Outcome[T]] = {}
    end = time.monotonic() + deadline_s
    while len(outcomes) < len(nodes):
        try:
            index, outcome = answers.get(timeout=time_left(end))
        except queue.Empty:
            break
        if isinstance(outcome, BaseException):
            raise outcome
        outcomes[index] = outcome
    for index, node in enumerate(nodes):
        if index not in outcomes:
            hint = as_steps(f"see whether it is up: ssh {node.name} true", [node])
            silence = ContactLost(f"no answer within {deadline_s:.0f} s", node=node.name, hint=hint)
            outcomes[index] = Outcome(node, error=silence)
    return Outcomes(outcomes[index] for index in range(len(nodes)))
