"""NodeSession: one node's part of a run, followed in a thread: start, read records, reconnect, report to a queue.

Knows nothing of the other nodes; what to do about a failure is the business of `execute`.
"""

from __future__ import annotations

import base64
import queue
import threading
import time
from typing import Any

import msgspec

from multinode.core.cluster import Node
from multinode.errors import ContactLost, MultinodeError, NodeError
from multinode.transport.agent import AgentStream, AgentTransport, Record

__all__ = ["Event", "NodeSession", "decode_chunk"]

# The agent says `alive` every second; this long without a word and the connection is taken for dead.
SILENCE_S = 10.0
_START_DEADLINE_S = 30.0
_BACKOFF_S = (0.5, 1.0, 2.0, 4.0)


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Something that a node's session has to say.

    Attributes:
        node_rank: whose.
        record: what the node sent; None for the session's own news.
        error: contact was lost (and is being sought again), or the run could not be started there.
        over: nothing more will come.
    """

    node_rank: int
    record: Record | None = None
    error: MultinodeError | None = None
    over: bool = False


def decode_chunk(record: Record) -> bytes:
    """The bytes that a `chunk` record carries."""
    return base64.b64decode(str(record["data"]))


class NodeSession:
    """Starts a run on one node and follows it until its end.

    Args:
        agent: the way to the node.
        node: the node.
        node_rank: its node rank.
        request: what its supervisor is asked to do.
        events: where records go.
    """

    def __init__(
        self, agent: AgentTransport, node: Node, *, node_rank: int, request: Record, events: queue.Queue[Event]
    ) -> None:
        self._agent = agent
        self._node = node
        self._node_rank = node_rank
        self._request = request
        self._events = events
        self._offsets: dict[str, int] = {}
        self._stream: AgentStream | None = None
        self._wanted: dict[str, Any] | None = None
        self._thread = threading.Thread(target=self._follow, name=f"follow-{node.name}", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def renew_lease(self, lease_s: float) -> None:
        """Tell the node that the controller lives."""
        self._send({"op": "lease", "lease_s": lease_s})

    def stop(self, grace_s: float) -> None:
        """Ask the node to stop the run, now or as soon as it can be reached again."""
        self._wanted = {"op": "stop", "grace_s": grace_s}
        self._send(self._wanted)

    def _send(self, message: Record) -> None:
        stream = self._stream
        if stream is None:
            return
        try:
            stream.send(message)
        except ContactLost:
            self._stream = None

    def _follow(self) -> None:
        try:
            self._read_to_end("supervise", self._request)
        except ContactLost as error:
            self._tell(error=error)
            self._seek_again(error)
        except MultinodeError as error:
            self._tell(error=error, over=True)
        except BaseException as error:
            self._tell(error=MultinodeError(f"a defect in multinode: {error!r}", node=self._node.name), over=True)
            raise

    def _seek_again(self, error: MultinodeError) -> None:
        """Reconnect and go on where the records stopped, until the lease has surely run out."""
        patience_s = 2.0 * float(self._request.get("lease_s") or 0) + SILENCE_S
        end = time.monotonic() + patience_s
        attempt = 0
        while time.monotonic() < end:
            time.sleep(_BACKOFF_S[min(attempt, len(_BACKOFF_S) - 1)])
            attempt += 1
            try:
                request = {"schema": 1, "run_id": self._request["run_id"], "offsets": self._offsets}
                self._read_to_end("follow", request)
            except NodeError as again:
                error = again
            except MultinodeError as failed:
                self._tell(error=failed, over=True)
                return
            else:
                return
        self._tell(error=error, over=True)

    def _read_to_end(self, verb: str, request: Record) -> None:
        stream = self._agent.open(self._node, verb, request, deadline_s=_START_DEADLINE_S)
        try:
            self._stream = stream
            if self._wanted is not None:
                self._send(self._wanted)
            record = stream.first
            while record is not None:
                self._note_offset(record)
                self._tell(record=record, over=record.get("kind") == "end")
                if record.get("kind") == "end":
                    return
                record = stream.read(SILENCE_S)
            raise ContactLost("the connection ended before the run did", node=self._node.name)
        finally:
            self._stream = None
            stream.close()

    def _note_offset(self, record: Record) -> None:
        if record.get("kind") == "chunk":
            size = len(decode_chunk(record))
            self._offsets[str(record["file"])] = int(record["offset"]) + size

    def _tell(self, *, record: Record | None = None, error: MultinodeError | None = None, over: bool = False) -> None:
        self._events.put(Event(node_rank=self._node_rank, record=record, error=error, over=over))
