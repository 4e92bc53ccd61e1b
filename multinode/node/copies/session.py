"""The verbs `look`, `copy` and `relay`: what exists at a path, and this node's part in the chain of a copy.

A node receives from the previous one, keeps each block whose digest is right, and passes it on to the next one. Orders
of the controller come on stdin; the end of stdin ends the copy.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import queue
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any, Optional

from ..channel import AgentError, Channel, Record
from ..manifest import (
    BLOCK_BYTES,
    DIGEST_BYTES,
    Manifest,
    digest_entries,
    list_entries,
    make_manifest,
    pack_flags,
    unpack_flags,
)
from . import wire
from .store import CopyTarget, Store
from .wire import Credentials, OpenPort, PeerError, Wire, call

_TELL_S = 0.25
_MOST_MANIFEST_BYTES = 256 << 20
_BLOCK_HEAD = struct.Struct(f">Q{DIGEST_BYTES}s")
# Buffers: one is sent or written, one is read or received, and one waits in between.
_BUFFERS = 3
_RELAY_BYTES = 1 << 17
_STDIN = 0
_MS_PER_S = 1000

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
        return {"path": path, "refused": "the directory of the job is not there"}
    full = os.path.abspath(os.path.join(cwd or "/", expanded))
    look: Record = {"path": path, "full": full, "exists": os.path.exists(full)}
    # A copy of it would include the home directory, with all of its keys.
    if os.path.commonpath([home, os.path.realpath(full)]) == os.path.realpath(full):
        look["refused"] = "it holds the home directory"
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
    _Session(request, channel).serve()


class _ClosedError(Exception):
    """The copy was aborted."""


class _Session:
    """State that the threads of a copy share.

    One receives, one writes, one reads ahead, one sends, and the main thread talks to the controller.
    """

    def __init__(self, request: Record, channel: Channel) -> None:
        self._channel = channel
        self._paths: list[str] = request["paths"]
        self._addr: str = request["addr"]
        self._delete = bool(request.get("delete"))
        self._credentials = Credentials(request["certificate"], request["key"], request["token"])
        # The source has no listener.
        self._listener = None if request["source"] else OpenPort(self._addr)
        # Guards all fields below.
        self._changed = threading.Condition()
        self._store: Optional[Store] = None
        self._digests: Optional[bytes] = None
        self._next: Optional[Record] = None
        self._to_hash: Optional[bytes] = None
        self._may_go = False
        self._is_closed = False
        self._has_kept = False
        self._working: set[str] = set()
        self._hashed_bytes = self._moved_bytes = 0
        self._records: list[Record] = []

    def serve(self) -> None:
        """Serve until everything is copied, something failed, or stdin ends."""
        self._channel.emit({"kind": "listening", "port": self._listener.port if self._listener is not None else None})
        self._working = {"receiver", "sender"}
        if self._listener is None:
            self._start("receiver", "here", self._lead)
        else:
            self._start("receiver", "upstream", self._receive)
        self._start("sender", "downstream", self._send)
        while not self._channel.closed:
            lines = self._channel.lines(_TELL_S)
            with self._changed:
                for line in lines:
                    self._take_order(json.loads(line))
                records, self._records = self._records, []
                moved = {"hashed_bytes": self._hashed_bytes, "moved_bytes": self._moved_bytes}
                is_over = self._is_closed or not self._working
            self._channel.emit({"kind": "progress", **moved}, *records)
            if is_over:
                self._channel.emit({"kind": "ended", "cpu_s": time.process_time()})
                return

    def _take_order(self, order: Record) -> None:
        if "next" in order:
            self._next = order["next"] or {}
        if "hash" in order:
            self._to_hash = base64.b64decode(order["hash"])
        self._may_go = self._may_go or "go" in order
        self._changed.notify_all()

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
                    goes_on = trouble["where"] == "downstream" and self._listener is not None
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
        own = b"".join(store.digest(block) for block, flag in enumerate(flags) if flag)
        with self._changed:
            self._digests = pack_flags(flags) + own
            self._changed.notify_all()

    def _receive(self) -> None:
        """Work of any other node: compare, receive, and put the files in place."""
        if self._listener is None:
            return
        upstream = self._listener.accept(self._credentials)
        manifest = Manifest(upstream.read(wire.MANIFEST, most_bytes=_MOST_MANIFEST_BYTES))
        target = CopyTarget(manifest, self._paths)
        candidates = target.find_candidates()
        with self._changed:
            self._store = target
            self._changed.notify_all()
        self._tell({"kind": "candidates", "blocks": base64.b64encode(pack_flags(candidates)).decode()})
        own = target.hash(candidates, self._hashed)
        flag_bytes = len(pack_flags(candidates))
        digests = upstream.read(wire.DIGESTS, most_bytes=flag_bytes + len(own))
        flags = unpack_flags(digests[:flag_bytes], manifest.block_count)
        if len(digests) != flag_bytes + DIGEST_BYTES * sum(flags):
            raise AgentError("refused: more or fewer digests than blocks")
        target.compare(own, flags, digests[flag_bytes:])
        with self._changed:
            self._digests = digests
            self._changed.notify_all()
        missing = sum(manifest.place(block)[2] for block, has in enumerate(target.has) if not has)
        self._tell({"kind": "need", "receive_bytes": missing, "places": target.needs()})
        upstream.send(wire.HAVE, pack_flags(target.has))
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
        head = bytearray(_BLOCK_HEAD.size)
        while True:
            kind, size_bytes = upstream.receive(wire.BLOCK, wire.DONE, most_bytes=len(head) + BLOCK_BYTES)
            if kind == wire.DONE:
                break
            if size_bytes < len(head):
                raise PeerError("it sent half a block")
            upstream.read_into(memoryview(head))
            block, digest = _BLOCK_HEAD.unpack(head)
            buffer = self._take(empty, upstream)
            view = memoryview(buffer)[: size_bytes - len(head)]
            upstream.read_into(view)
            full.put((block, digest, view, buffer))
        full.put(None)
        self._await(lambda: self._has_kept)
        if not all(target.has):
            raise PeerError("it sent less than it has")

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
        downstream = call(self._next["addr"], self._next["port"], self._addr, self._credentials)
        self._await(lambda: self._store is not None, downstream)
        store = self._store
        if store is None:
            return
        count = store.manifest.block_count
        downstream.send(wire.MANIFEST, store.manifest.data)
        self._await(lambda: self._digests is not None, downstream)
        downstream.send(wire.DIGESTS, self._digests or b"")
        downstream.await_frame()
        have = unpack_flags(downstream.read(wire.HAVE, most_bytes=count // 8 + 1), count)
        self._await(lambda: self._may_go, downstream)
        empty: queue.Queue[bytearray] = queue.Queue()
        full: queue.Queue[Optional[_Item]] = queue.Queue()
        for _ in range(_BUFFERS):
            empty.put(bytearray(BLOCK_BYTES))
        self._start("reader", "here", lambda: self._read_ahead(store, have, empty, full))
        while (item := self._take(full, downstream)) is not None:
            block, digest, view, buffer = item
            downstream.send(wire.BLOCK, _BLOCK_HEAD.pack(block, digest), view)
            empty.put(buffer)
            if self._listener is None:
                with self._changed:
                    self._moved_bytes += len(view)
        downstream.send(wire.DONE)
        downstream.await_frame()
        downstream.receive(wire.COPIED, most_bytes=0)
        downstream.close()
        if self._listener is None:
            self._tell({"kind": "copied", "digest": store.whole_digest(), "extra": 0})

    def _read_ahead(
        self,
        store: Store,
        have: bytearray,
        empty: queue.Queue[bytearray],
        full: queue.Queue[Optional[_Item]],
    ) -> None:
        """Read the blocks that the next node lacks, each as soon as it is here, while the previous one is sent."""
        for block in (block for block, has in enumerate(have) if not has):
            self._await(lambda block=block: bool(store.has[block]))  # type: ignore[misc]
            buffer = empty.get()
            view = store.read(block, memoryview(buffer))
            if self._listener is None:
                store.digest(block)[:] = hashlib.sha256(view).digest()
            full.put((block, bytes(store.digest(block)), view, buffer))
        full.put(None)


def relay(request: Record, channel: Channel) -> None:
    """The verb `relay`: carries bytes between the controller and a port of this node, without looking at them.

    Raises:
        AgentError: the port cannot be reached.
    """
    try:
        sock = socket.create_connection((request["addr"], request["port"]), wire.IDLE_S)
    except OSError as error:
        raise AgentError(f"{request['addr']} port {request['port']}: {error.strerror or error}") from error
    channel.emit({"kind": "data"})
    ready = select.poll()
    for source in (_STDIN, sock.fileno()):
        ready.register(source, select.POLLIN)
    with contextlib.suppress(OSError):
        while not channel.closed:
            events = dict(ready.poll(wire.PING_S * _MS_PER_S))
            data = sock.recv(_RELAY_BYTES) if sock.fileno() in events else b""
            if sock.fileno() in events and not data:
                return
            if data or not events:
                channel.emit({"kind": "data", "data": base64.b64encode(data).decode()})
            for line in channel.lines(0) if _STDIN in events else ():
                sock.sendall(base64.b64decode(json.loads(line)["data"]))
