"""Fan-out: asks all nodes in parallel, within bounds; one value or error per node, in node-rank order."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from multinode.cluster.cluster import Node
from multinode.cluster.quoting import as_steps
from multinode.errors import ContactLost, MultinodeError
from multinode.transport.base import time_left

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
    found: dict[int, Outcome[T]] = {}
    end = time.monotonic() + deadline_s
    while len(found) < len(nodes):
        try:
            index, outcome = answers.get(timeout=time_left(end))
        except queue.Empty:
            break
        if isinstance(outcome, BaseException):
            raise outcome
        found[index] = outcome
    for index, node in enumerate(nodes):
        if index not in found:
            hint = as_steps(f"see whether it is up: ssh {node.name} true", [node])
            silence = ContactLost(f"no answer within {deadline_s:.0f} s", node=node.name, hint=hint)
            found[index] = Outcome(node, error=silence)
    return Outcomes(found[index] for index in range(len(nodes)))
