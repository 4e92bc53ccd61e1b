"""Recorder: JSON lines from a training worker to its file in the run directory, by a background thread.

It never blocks the training and never raises into it; a full disk loses records and nothing else.
"""

from __future__ import annotations

import atexit
import json
import os
import queue
import sys
import threading
import time
import traceback
from typing import Any, Dict, Optional

_MAX_TRACEBACK = 16384
_FLUSH_DEADLINE_S = 2.0


class Recorder:
    """Writes records of this worker; `rank` is added to each."""

    def __init__(self, folder: str, rank: int) -> None:
        self._path = os.path.join(folder, "rank-%d.jsonl" % rank)
        self._rank = rank
        self._pid = os.getpid()
        self._queue: "queue.SimpleQueue[Optional[Dict[str, Any]]]" = queue.SimpleQueue()
        self._thread: Optional[threading.Thread] = None

    def write(self, kind: str, fields: Dict[str, Any]) -> None:
        """Record one thing that happened."""
        # A fork (a DataLoader's worker) has the queue and not the thread; it has nothing to say either.
        if os.getpid() != self._pid:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._drain, name="multinode-recorder", daemon=True)
            self._thread.start()
            atexit.register(self.flush)
        self._queue.put({"kind": kind, "rank": self._rank, **fields})

    def flush(self) -> None:
        """Write what is queued; called at exit, waits a moment at most."""
        if self._thread is not None and os.getpid() == self._pid:
            self._queue.put(None)
            self._thread.join(_FLUSH_DEADLINE_S)
            self._thread = None

    def _drain(self) -> None:
        while True:
            record = self._queue.get()
            if record is None:
                return
            try:
                line = json.dumps(record).encode() + b"\n"
                descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
                try:
                    os.write(descriptor, line)
                finally:
                    os.close(descriptor)
            except (OSError, ValueError, TypeError):
                continue


def record_exceptions(recorder: Recorder) -> None:
    """Note the exception that ends this worker, then let Python print it as ever."""
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
