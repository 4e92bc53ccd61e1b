"""Recorder: writes a training worker's JSON lines to its file in the run directory, in a background thread.

It never blocks the training, and never raises into it. A full disk only loses records, and is reported once.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import queue
import sys
import threading
import time
import traceback
from typing import Any, Dict, List, Optional, Set, Union

from ..node.files import open_lines, write_lines

SCHEMA = 1
_MAX_TRACEBACK = 16384
_FLUSH_DEADLINE_S = 2.0
# If the disk hangs, the worker continues to train, and its queue must not grow without bound.
_MOST_QUEUED = 10_000
_MOST_AT_ONCE = 256

# An item is a record, or an event to set after all records before it have been written.
_Item = Union[Dict[str, Any], threading.Event]


class Recorder:
    """Writes records of this worker; `rank` is added to each.

    Args:
        folder: the run directory's `samples`, which may not exist yet.
        most_queued: limit of the queue; records beyond it are dropped, and counted in a note.
    """

    def __init__(self, folder: str, rank: int, most_queued: int = _MOST_QUEUED) -> None:
        self._file = _Lines(os.path.join(folder, "rank-%d.jsonl" % rank))
        self._rank = rank
        self._pid = os.getpid()
        self._queue: "queue.SimpleQueue[_Item]" = queue.SimpleQueue()
        self._most_queued = most_queued
        self._dropped = 0
        self._thread: Optional[threading.Thread] = None

    def write(self, kind: str, fields: Dict[str, Any]) -> None:
        """Queue one record."""
        # A fork, such as a DataLoader's worker, has no writer thread, and nothing to record.
        if os.getpid() != self._pid:
            return
        if self._queue.qsize() >= self._most_queued:
            self._dropped += 1
            return
        if self._dropped:
            message = "%d records were dropped: they came faster than they could be written" % self._dropped
            self._dropped = 0
            self._put("note", {"message": message})
        self._put(kind, fields)

    def flush(self) -> None:
        """Wait until the queue is written, at most two seconds; called at exit."""
        if self._thread is not None and os.getpid() == self._pid:
            written = threading.Event()
            self._queue.put(written)
            written.wait(_FLUSH_DEADLINE_S)

    def _put(self, kind: str, fields: Dict[str, Any]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._drain, name="multinode-recorder", daemon=True)
            self._thread.start()
            atexit.register(self.flush)
        self._queue.put({"schema": SCHEMA, "kind": kind, "rank": self._rank, **fields})

    def _drain(self) -> None:
        while True:
            items: List[_Item] = [self._queue.get()]
            while len(items) < _MOST_AT_ONCE and not self._queue.empty():
                items.append(self._queue.get())
            self._file.append([item for item in items if isinstance(item, dict)])
            for item in items:
                if isinstance(item, threading.Event):
                    item.set()


class _Lines:
    """Appends whole lines to a file. Records that cannot be written are lost, which is reported once."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._descriptor: Optional[int] = None
        self._told: Set[str] = set()

    def append(self, records: List[Dict[str, Any]]) -> None:
        data = b"".join(map(self._encode, records))
        if not data:
            return
        try:
            if self._descriptor is None:
                self._descriptor = open_lines(self._path)
            write_lines(self._descriptor, data)
        except OSError as error:
            self._tell("records are lost, %s cannot be written: %s" % (self._path, error.strerror))
            self._close()

    def _encode(self, record: Dict[str, Any]) -> bytes:
        try:
            return json.dumps(record, allow_nan=False).encode() + b"\n"
        except Exception as error:  # noqa: BLE001 - values are a stranger's; one record is lost and not the thread
            self._tell("a %s record is lost: %r" % (record["kind"], error))
            return b""

    def _tell(self, message: str) -> None:
        if message not in self._told:
            self._told.add(message)
            # stderr may be closed.
            with contextlib.suppress(Exception):
                sys.stderr.write("multinode: %s\n" % message)

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(descriptor)


def record_exceptions(recorder: Recorder) -> None:
    """Record the exception that ends this worker, then let Python print it as usual."""
    before = sys.excepthook

    def hook(kind: Any, value: Any, trace: Any) -> None:
        try:
            text = "".join(traceback.format_exception(kind, value, trace))[-_MAX_TRACEBACK:]
            fields = {"time_s": time.time(), "type": kind.__name__, "message": str(value)[:2000], "traceback": text}
            recorder.write("exception", fields)
            recorder.flush()
        except Exception:  # noqa: BLE001, S110 - the user's own exception must reach the user
            pass
        before(kind, value, trace)

    sys.excepthook = hook
