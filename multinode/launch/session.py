"""NodeSession: one node's part of a run, followed in a thread; its records are parsed here.

Independent of the other nodes; `execute` reacts to failures.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import threading
import time
from collections.abc import Callable
from typing import Annotated, Any, Literal

import msgspec

from multinode.cluster.cluster import Node
from multinode.errors import OURS_TO_FIX, ContactLost, MultinodeError, NodeError, NodeFailed, NodeGone
from multinode.records.status import Status
from multinode.transport.agent import AgentStream, AgentTransport, Record
from multinode.transport.base import time_left

# A lease is renewed after this part of it: three renewals may be lost before it expires.
_RENEWED_AFTER = 1 / 4
# A run without a lease continues without us; how long we try to reach it before it counts as lost.
_DETACHED_S = 300.0
# After a suspension there is no time to lose.
_LEASE_LOOK_S = 1.0


class _Lease:
    """Renews the lease of a run on one node in its own thread, so that nothing else delays it.

    Time is CLOCK_BOOTTIME, as on the node: it includes suspension. `lease_s` None is unlimited, and needs no renewal.
    """

    def __init__(self, node: str, lease_s: float | None, send: Callable[[Record], None]) -> None:
        # Time after the last message when it has certainly expired; without one, how long to seek the node.
        self.over_s = 2.0 * (lease_s or _DETACHED_S)
        self._lease_s = lease_s
        self._send = send
        self._renewed_s = _boot_s()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._keep, name=f"lease-{node}", daemon=True)

    def start(self) -> None:
        """Begin."""
        if self._lease_s is not None:
            self._thread.start()

    def renew(self, *, now: bool = False) -> None:
        """Tell the node that the controller is alive, if due or `now`."""
        if self._lease_s is not None and (now or _boot_s() - self._renewed_s >= self._lease_s * _RENEWED_AFTER):
            self._renewed_s = _boot_s()
            self._send({"op": "lease", "lease_s": self._lease_s})

    def close(self) -> None:
        """Stop sending."""
        self._over.set()

    def _keep(self) -> None:
        while not self._over.wait(min(_LEASE_LOOK_S, (self._lease_s or math.inf) * _RENEWED_AFTER / 2)):
            self.renew()


def _boot_s() -> float:
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="hello"):
    """A channel to the run was opened; `time_s` is the node's wall clock."""

    time_s: float


class Chunk(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="chunk"):
    """A piece of a file of the run directory, base64 in transit; `offset` in bytes."""

    file: Annotated[str, msgspec.Meta(max_length=512)]
    offset: Annotated[int, msgspec.Meta(ge=0)]
    # Four times what an agent sends at once: thousands of them may wait in memory.
    data: Annotated[bytes, msgspec.Meta(max_length=1 << 18)]


class Gone(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="gone"):
    """This part of a file, from `offset` on, no longer exists on the node: nothing is sent in its place."""

    file: Literal["log"]
    offset: Annotated[int, msgspec.Meta(ge=0)]
    size_bytes: Annotated[int, msgspec.Meta(ge=1, le=1 << 62)]


class StatusReport(Status, frozen=True, kw_only=True, tag_field="kind", tag="status"):
    """The node's status has changed."""

    state: Literal["starting", "running", "stopping", "ended"]


class Ended(StatusReport, frozen=True, kw_only=True, tag_field="kind", tag="end"):
    """The last status; nothing follows it."""

    state: Literal["ended"]


class Alive(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="alive"):
    """The node is alive."""


class Note(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="note"):
    """An order that the node could not carry out."""

    message: str


Message = Hello | Chunk | Gone | StatusReport | Ended
FollowedRecord = Message | Alive | Note
"""What a node sends of a run that is followed."""


_BEGAN_S = time.time() - time.monotonic()


def steady_s() -> float:
    """Our wall clock, without later adjustments."""
    return _BEGAN_S + time.monotonic()


_START_DEADLINE_S = 30.0
_BACKOFF_S = (0.5, 1.0, 2.0, 4.0)
# How soon a session notices that it is over.
_LOOK_S = 0.2
# How long a piece of a file waits for space.
_PATIENCE_S = 2.0


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """An event of a node's session."""

    node_rank: int
    message: Message | None = None
    # contact was lost (and is being restored), or the run could not be started there
    error: MultinodeError | None = None
    over: bool = False
    # with an error: the last message from the node, or the first attempt to contact it, on our wall clock
    heard_s: float | None = None


class EventQueue:
    """Events of the sessions, until they are taken. Pieces of files wait for the next look; others end the wait.

    With hundreds of nodes, waking up for each piece would take all the time. Waiting pieces of files are limited in
    memory; other events always have space.
    """

    def __init__(self, most_bytes: int = 64 << 20) -> None:
        self._most_bytes = most_bytes
        self._events: collections.deque[Event] = collections.deque()
        self._waiting_bytes = 0
        self._room = threading.Condition()
        self._pressing = threading.Event()

    def put(self, event: Event, timeout_s: float) -> bool:
        """Add an event; False for a piece of a file that found no space in time."""
        piece = event.message if isinstance(event.message, Chunk) and not event.over else None
        with self._room:
            if piece is not None:
                if not self._room.wait_for(self._has_room, timeout_s):
                    return False
                self._waiting_bytes += len(piece.data)
            self._events.append(event)
            if piece is None or not self._has_room():
                self._pressing.set()
        return True

    def take(self, timeout_s: float) -> list[Event]:
        """All events, once one is urgent or the time has passed."""
        self._pressing.wait(timeout_s)
        with self._room:
            self._pressing.clear()
            events = list(self._events)
            self._events.clear()
            self._waiting_bytes = 0
            self._room.notify_all()
        return events

    def _has_room(self) -> bool:
        return self._waiting_bytes < self._most_bytes


@dataclasses.dataclass(eq=False)
class NodeSession:
    """Starts a run on one node and follows it until its end.

    Reading and lease renewal continue regardless of what happens to the data: pieces of files without space are
    dropped, and can be fetched again later.

    Args:
        silence_s: how long the node may be silent before the connection is considered dead.
        have: bytes of each file received earlier; None starts the run, anything else follows one in progress.
    """

    agent: AgentTransport
    node: Node
    node_rank: int
    request: Record
    events: EventQueue
    silence_s: float
    have: dict[str, int] | None = None

    def __post_init__(self) -> None:
        self._offsets: dict[str, int] = dict(self.have or {})
        self._left = False
        self._end = math.inf
        self._heard_s = steady_s()
        self._lease = _Lease(self.node.name, self.request.get("lease_s"), self._send)
        self._leaves_out = False
        self._stream: AgentStream[FollowedRecord] | None = None
        self._wanted: dict[str, Any] | None = None
        self._thread = threading.Thread(target=self._follow, name=f"follow-{self.node.name}", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._heard_s = steady_s()
        self._thread.start()
        self._lease.start()

    def stop(self, grace_s: float, *, end: float, order: str) -> None:
        """Ask the node to stop the run, now or as soon as it is reachable again.

        At `end` on the monotonic clock the session is over. `order` is returned in the status of a node that it
        stopped.
        """
        self._end = end
        self._wanted = {"op": "stop", "grace_s": grace_s, "order": order}
        self._send(self._wanted)

    def leave(self) -> None:
        """Stop following; the run continues."""
        self._left = True
        self._lease.close()
        stream = self._stream
        if stream is not None:
            stream.close_stdin()

    def _send(self, message: Record) -> None:
        stream = self._stream
        if stream is None:
            return
        try:
            stream.send(message)
        except ContactLost:
            # The reader reaches the end of the stream and reconnects: a channel that only listens would let the lease
            # expire.
            stream.close()

    def _follow(self) -> None:
        try:
            self._start_and_read()
        except MultinodeError as error:
            self._tell(error=error, over=True)
        except BaseException as error:
            self._tell(error=MultinodeError(f"a bug in multinode: {error!r}", node=self.node.name), over=True)
            raise
        finally:
            self._lease.close()

    def _start_and_read(self) -> None:
        """Start the run and read to its end; after lost contact, reconnect and continue."""
        try:
            self._read_or_lose(self._open("supervise", self.request) if self.have is None else self._follow_again())
        except NodeGone:
            raise
        except NodeError as error:
            # A run that was certainly not started is not looked for; one in progress is, unless that is pointless.
            if not isinstance(error, ContactLost) and (self.have is None or isinstance(error, OURS_TO_FIX)):
                raise
            lost = error
        else:
            return
        while True:
            stream = self._seek_again(lost)
            try:
                self._read_or_lose(stream)
            except ContactLost as error:
                lost = error
            else:
                return

    def _read_or_lose(self, stream: AgentStream[FollowedRecord]) -> None:
        """Read to the end; errors on this side only lead to another attempt."""
        try:
            self._read_to_end(stream)
        except MultinodeError:
            raise
        except Exception as error:
            raise ContactLost(f"a bug in multinode: {error!r}", node=self.node.name) from error

    def _follow_again(self) -> AgentStream[FollowedRecord]:
        kept = {name: self.request[name] for name in ("run_id", "poll_s")}
        return self._open("follow", {"schema": 1, "offsets": self._offsets, **kept})

    def _open(self, verb: str, request: Record) -> AgentStream[FollowedRecord]:
        left_s = time_left(self._end, _LOOK_S)
        deadline_s = min(_START_DEADLINE_S, left_s)
        return self.agent.open(self.node, verb, request, FollowedRecord, deadline_s=deadline_s)  # type: ignore[arg-type]  # a union is no type

    def _seek_again(self, lost: NodeError) -> AgentStream[FollowedRecord]:
        """Reconnect."""
        self._tell(error=lost)
        end = time.monotonic() + self._lease.over_s + self.silence_s
        for wait_s in itertools.chain(_BACKOFF_S, itertools.repeat(_BACKOFF_S[-1])):
            due = time.monotonic() + wait_s
            while time.monotonic() < due and not self._over:
                time.sleep(min(_LOOK_S, max(0.0, due - time.monotonic())))
            if time.monotonic() >= end or self._over:
                break
            try:
                return self._follow_again()
            except NodeGone:
                raise
            except NodeError as error:
                lost = error
        raise lost

    def _read_to_end(self, stream: AgentStream[FollowedRecord]) -> None:
        try:
            self._stream = stream
            # What was asked for, or became due, while there was no contact.
            self._lease.renew(now=True)
            if self._wanted is not None:
                self._send(self._wanted)
            if self._left:
                stream.close_stdin()
            record = stream.first
            while record is not None:
                self._heard_s = steady_s()
                if isinstance(record, Chunk):
                    self._note_offset(record, len(record.data))
                elif isinstance(record, Gone):
                    self._note_offset(record, record.size_bytes)
                if not isinstance(record, (Alive, Note)):
                    self._tell(message=record, over=isinstance(record, Ended))
                if isinstance(record, Ended):
                    return
                record = self._read(stream)
            raise ContactLost("the connection ended before the run did", node=self.node.name)
        finally:
            self._stream = None
            stream.close()

    def _read(self, stream: AgentStream[FollowedRecord]) -> FollowedRecord | None:
        left_s = self._end - time.monotonic()
        if left_s <= 0:
            raise ContactLost("it did not confirm that it has stopped", node=self.node.name)
        return stream.read(min(self.silence_s, max(_LOOK_S, left_s)))

    @property
    def _over(self) -> bool:
        return self._left or time.monotonic() >= self._end

    def _note_offset(self, piece: Chunk | Gone, length: int) -> None:
        expected = self._offsets.get(piece.file, 0)
        if piece.offset != expected:
            raise NodeFailed(
                (f"it sent {piece.file} from byte {piece.offset} instead of {expected}"), node=self.node.name
            )
        self._offsets[piece.file] = expected + length

    def _tell(self, *, message: Message | None = None, error: MultinodeError | None = None, over: bool = False) -> None:
        heard_s = self._heard_s if error is not None else None
        event = Event(node_rank=self.node_rank, message=message, error=error, over=over, heard_s=heard_s)
        # Waiting for space with every piece would stop reading, and a node that is not read does not listen.
        if not self._left:
            self._leaves_out = not self.events.put(event, 0.0 if self._leaves_out else _PATIENCE_S)
