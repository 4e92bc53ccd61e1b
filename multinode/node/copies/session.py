"""The verbs `look` and `copy`: what exists at a path, and this node's part in the chain of a copy.

A node receives from the previous one, keeps each block whose digest is right, and passes it on to the next one. Orders
of the controller come on stdin, and what the source sends if that is the controller's machine; the end of stdin ends
the copy.
"""

from __future__ import annotations

import base64
import collections
import contextlib
import hashlib
import json
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Optional

from ..channel import AgentError, Channel, Record
from ..manifest import BLOCK_BYTES, digest_entries, list_entries, make_manifest, pack_flags, unpack_flags
from . import wire
from .exchange import ask_lacking, compare, pack_digests, receive_blocks, receive_manifest, send_blocks
from .store import CopyTarget, Store
from .tls import Credentials, OpenPort, call
from .wire import PeerError, Pipe, Wire

_TELL_S = 0.25
# Buffers: one is sent or written, one is read or received, and one waits in between.
_BUFFERS = 3
# Pieces of the previous node's that wait, of 128 KiB.
_MOST_PIECES = 64
_CHANNEL = "channel"

_Item = tuple[int, bytes, memoryview, bytearray]


def look(request: Record, channel: Channel) -> None:
    """The verb `look`: emits `looked` with what exists at each path; relative paths start at `cwd`.

    The content of files is not read.
    """
    cwd = request.get("cwd")
    home = os.path.realpath(os.path.expanduser("~"))
    channel.emit({"kind": "looked", "paths": [_look(path, cwd, home) for path in request["paths"]]})


def _look(path: str, cwd: Optional[str], home: str) -> Record:
    expanded = os.path.expanduser(path)
    if cwd is None and not os.path.isabs(expanded):
        return {"path": path, "refused": "the job's directory does not exist"}
    full = os.path.abspath(os.path.join(cwd or "/", expanded))
    look: Record = {"path": path, "full": full, "exists": os.path.exists(full)}
    # A copy of it would include the home directory, with all of its keys.
    if os.path.commonpath([home, os.path.realpath(full)]) == os.path.realpath(full):
        look["refused"] = "it contains the home directory"
    elif look["exists"]:
        try:
            look["files"], look["size_bytes"], look["digest"] = digest_entries(list_entries(0, full))
        except (AgentError, OSError) as error:
            look["reason"] = str(error)
    return look


def run(request: Record, channel: Channel) -> None:
    """Take part in a copy; see the agent protocol."""
    # Directories get the user's own umask. The copy then sets the modes of the source.
    os.umask(channel.umask)
    # Two threads write to the channel if it leads to a neighbour.
    emitting = threading.Lock()

    def emit(*records: Record) -> None:
        with emitting:
            channel.emit(*records)

    session = Session(request, lambda piece: emit({"kind": "data", "data": base64.b64encode(piece).decode()}))
    emit({"kind": "listening", "port": session.port})
    session.start()
    while not channel.closed and not session.has_ended:
        for line in channel.lines(_TELL_S) if session.has_room() else ():
            session.give(json.loads(line))
        emit(*session.report())


class _ClosedError(Exception):
    """The copy was aborted."""


class Session:
    """State that the threads of a copy share: one receives, one writes, one reads ahead, one sends.

    Whoever starts it gives it orders and takes its reports: the verb, or the controller if its machine is the source.

    Args:
        request: see the agent protocol.
        carry: sends bytes to the neighbour that is reached through the controller.
    """

    def __init__(self, request: Record, carry: Callable[[memoryview], None]) -> None:
        self._carry = carry
        self._paths: list[str] = request["paths"]
        self._addr: str = request["addr"]
        self._delete = bool(request.get("delete"))
        # The part of the time in which it sends.
        self._share = float(request.get("share", 1.0))
        self._credentials = Credentials(request["certificate"], request["key"], request["token"])
        self._is_source = bool(request["source"])
        self._listener = None if self._is_source else OpenPort(self._addr)
        self.port = self._listener.port if self._listener is not None else None
        self._began_s = time.process_time()
        self._told = 0.0
        self.has_ended = False  # whether the last record is reported
        # Guards all fields below.
        self._changed = threading.Condition()
        self._store: Optional[Store] = None
        self._digests: Optional[bytes] = None
        # The neighbours in the chain: an address, or the channel to the controller.
        self._previous: Any = None
        self._next: Any = None
        # Bytes that came over the channel; an empty piece is their end.
        self._pieces: collections.deque[bytes] = collections.deque()
        self._to_hash: Optional[bytes] = None
        self._may_go = False
        self._is_closed = False
        self._has_kept = False
        self._working = {"receiver", "sender"}
        self._hashed_bytes = self._moved_bytes = 0
        self._records: list[Record] = []

    def start(self) -> None:
        """Begin; it goes on until everything is copied, something failed, or it is closed."""
        if self._is_source:
            self._start("receiver", "here", self._lead)
        else:
            self._start("receiver", "upstream", self._receive)
        self._start("sender", "downstream", self._send)

    def has_room(self) -> bool:
        """Whether another order may be given; waits a moment for it."""
        with self._changed:
            return self._changed.wait_for(lambda: len(self._pieces) < _MOST_PIECES, _TELL_S)

    def give(self, order: Record) -> None:
        """An order of the controller, or bytes from a neighbour."""
        with self._changed:
            if "data" in order:
                self._pieces.append(base64.b64decode(order["data"]))
            if "next" in order:
                self._previous = order.get("previous")
                self._next = order["next"] or {}
            if "hash" in order:
                self._to_hash = base64.b64decode(order["hash"])
            self._may_go = self._may_go or "go" in order
            self._changed.notify_all()

    def report(self, wait_s: float = 0.0) -> list[Record]:
        """What is new, and four times a second how far it is; waits for that at most `wait_s`."""
        with self._changed:
            self._changed.wait_for(lambda: self._records or self._is_over(), wait_s)
            records, self._records = self._records, []
            now = time.monotonic()
            if not records and not self._is_over() and now - self._told < _TELL_S:
                return []
            self._told = now
            progress = {"kind": "progress", "hashed_bytes": self._hashed_bytes, "moved_bytes": self._moved_bytes}
            if not self._is_over():
                return [progress, *records]
            self.has_ended = True
            return [progress, *records, {"kind": "ended", "cpu_s": time.process_time() - self._began_s}]

    def close(self) -> None:
        """End it."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _is_over(self) -> bool:
        return self._is_closed or not self._working

    def _start(self, name: str, peer: str, work: Callable[[], None]) -> None:
        """Run `work` in a thread; a failure is recorded as one of this node, or of `peer`."""

        def guarded() -> None:
            trouble: Optional[Record] = None
            try:
                work()
            except PeerError as error:
                trouble = {"where": peer, "message": str(error)}
            except (AgentError, OSError, ValueError) as error:
                hint = error.hint if isinstance(error, AgentError) else None
                trouble = {"where": "here", "message": str(error), "hint": hint}
            except _ClosedError:
                pass
            with self._changed:
                if trouble is not None:
                    self._records.append({"kind": "trouble", **trouble})
                    # A node that cannot send continues to receive.
                    goes_on = trouble["where"] == "downstream" and not self._is_source
                    self._is_closed = self._is_closed or not goes_on
                self._working.discard(name)
                self._changed.notify_all()

        threading.Thread(target=guarded, name=name, daemon=True).start()

    def _tell(self, record: Record) -> None:
        with self._changed:
            self._records.append(record)

    def _await(self, ready: Callable[[], bool], pinged: Optional[Wire] = None) -> None:
        """Wait until `ready` is true; `pinged` gets pings meanwhile."""
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: ready() or self._is_closed, wire.PING_S):
                    if not ready():
                        raise _ClosedError
                    return
            if pinged is not None:
                pinged.ping()

    def _pipe(self) -> Wire:
        """The channel as the wire to a neighbour."""

        def receive() -> bytes:
            with self._changed:
                # The controller watches both ends: who is silent is not waited for.
                self._changed.wait_for(lambda: self._pieces or self._is_closed)
                if not self._pieces:
                    raise _ClosedError
                self._changed.notify_all()
                return self._pieces.popleft()

        return Wire(Pipe(self._carry, receive))

    def _hashed(self, size_bytes: int) -> None:
        with self._changed:
            self._hashed_bytes += size_bytes

    def _lead(self) -> None:
        """Work of the source: list the files, then hash the blocks that other nodes may have."""
        store = Store(make_manifest(self._paths), self._paths)
        with self._changed:
            self._store = store
            self._changed.notify_all()
        self._await(lambda: self._to_hash is not None)
        flags = unpack_flags(self._to_hash or b"", store.manifest.block_count)
        digests = store.hash(flags, self._hashed)
        store.digests[:] = digests
        with self._changed:
            self._digests = pack_digests(flags, digests)
            self._changed.notify_all()

    def _receive(self) -> None:
        """Work of any other node: compare, receive, and put the files in place."""
        if self._listener is None:
            return
        self._await(lambda: self._next is not None)
        if self._previous == _CHANNEL:
            self._listener.close()
            upstream = self._pipe()
        else:
            upstream = self._listener.accept(self._credentials)
        manifest = receive_manifest(upstream)
        target = CopyTarget(manifest, self._paths)
        candidates = target.find_candidates()
        with self._changed:
            self._store = target
            self._changed.notify_all()
        self._tell({"kind": "candidates", "blocks": base64.b64encode(pack_flags(candidates)).decode()})
        own = target.hash(candidates, self._hashed)
        digests = compare(upstream, target, own)
        with self._changed:
            self._digests = digests
            self._changed.notify_all()
        missing = sum(manifest.place(block)[2] for block, has in enumerate(target.has) if not has)
        self._tell({"kind": "need", "receive_bytes": missing, "places": target.needs()})
        self._keep_all(upstream, target)
        target.finish(delete=self._delete)
        self._tell({"kind": "copied", "digest": target.whole_digest(), "extra": target.extra})
        # The copy is complete here, even if the previous node is gone.
        with contextlib.suppress(PeerError):
            upstream.send(wire.COPIED)
        upstream.close()

    def _keep_all(self, upstream: Wire, target: CopyTarget) -> None:
        """Receive blocks; another thread writes each while the next one arrives."""
        empty: queue.Queue[bytearray] = queue.Queue()
        full: queue.Queue[Optional[_Item]] = queue.Queue()
        for _ in range(_BUFFERS):
            empty.put(bytearray(BLOCK_BYTES))

        def keep() -> None:
            self._await(lambda: self._may_go)
            if not target.is_whole():
                target.prepare()
            while (item := full.get()) is not None:
                block, digest, view, buffer = item
                target.write(block, digest, view)
                empty.put(buffer)
                with self._changed:
                    self._moved_bytes += len(view)
                    self._changed.notify_all()
            with self._changed:
                self._has_kept = True
                self._changed.notify_all()

        self._start("keeper", "here", keep)
        for item in receive_blocks(upstream, target, lambda: self._take(empty, upstream)):
            full.put(item)
        full.put(None)
        self._await(lambda: self._has_kept)
        if not all(target.has):
            raise PeerError("it did not send all of its data")

    def _take(self, queued: queue.Queue[Any], peer: Wire) -> Any:
        """Wait for the next item of a queue; the peer gets pings meanwhile."""
        while not self._is_closed:
            with contextlib.suppress(queue.Empty):
                return queued.get(timeout=wire.PING_S)
            peer.ping()
        raise _ClosedError

    def _send(self) -> None:
        """Send the next node the blocks that it lacks."""
        self._await(lambda: self._next is not None)
        if not self._next:
            return
        if self._next == _CHANNEL:
            downstream = self._pipe()
        else:
            downstream = call(self._next["addr"], self._next["port"], self._addr, self._credentials)
        self._await(lambda: self._store is not None, downstream)
        store = self._store
        if store is None:
            return
        downstream.send(wire.MANIFEST, store.manifest.data)
        self._await(lambda: self._digests is not None, downstream)
        downstream.send(wire.DIGESTS, self._digests or b"")
        lacking = ask_lacking(downstream, store.manifest.block_count)
        self._await(lambda: self._may_go, downstream)
        empty: queue.Queue[bytearray] = queue.Queue()
        full: queue.Queue[Optional[_Item]] = queue.Queue()
        for _ in range(_BUFFERS):
            empty.put(bytearray(BLOCK_BYTES))
        self._start("reader", "here", lambda: self._read_ahead(store, lacking, empty, full))
        send_blocks(downstream, self._sent(full, empty, downstream))
        downstream.close()
        if self._is_source:
            self._tell({"kind": "copied", "digest": store.whole_digest(), "extra": 0})

    def _sent(
        self, full: queue.Queue[Optional[_Item]], empty: queue.Queue[bytearray], downstream: Wire
    ) -> Iterator[tuple[int, bytes, memoryview]]:
        """The blocks to send, as they are read; the buffer of each is free once the next one is asked for."""
        while (item := self._take(full, downstream)) is not None:
            block, digest, view, buffer = item
            began = time.monotonic()
            yield block, digest, view
            empty.put(buffer)
            self._pause((time.monotonic() - began) * (1 / self._share - 1), downstream)
            if self._is_source:
                with self._changed:
                    self._moved_bytes += len(view)

    def _pause(self, pause_s: float, peer: Wire) -> None:
        """Leave the link to others; the peer gets pings meanwhile."""
        end = time.monotonic() + pause_s
        while (left_s := end - time.monotonic()) > 0 and not self._is_closed:
            time.sleep(min(left_s, wire.PING_S))
            peer.ping()

    def _read_ahead(
        self,
        store: Store,
        lacking: list[int],
        empty: queue.Queue[bytearray],
        full: queue.Queue[Optional[_Item]],
    ) -> None:
        """Read the blocks that the next node lacks, each as soon as it is here, while the previous one is sent."""
        for block in lacking:
            self._await(lambda block=block: bool(store.has[block]))  # type: ignore[misc]
            buffer = empty.get()
            view = store.read(block, memoryview(buffer))
            if self._is_source:
                store.digest(block)[:] = hashlib.sha256(view).digest()
            full.put((block, bytes(store.digest(block)), view, buffer))
        full.put(None)
