"""The channel to the controller: JSON lines on stdin, JSON records on stdout, and the error that ends a verb."""

from __future__ import annotations

import json
import os
import select
import sys
import time
from typing import Any, Optional

Record = dict[str, Any]

SCHEMA = 1
"""Version of the protocol: of requests, and of the agent's first record."""

_READ_BYTES = 1 << 16
_REQUEST_DEADLINE_S = 60.0
# A controller is never busy with something else for this long. If it was suspended, it opens a new connection.
_READER_DEADLINE_S = 120.0
_REQUEST_MAX_BYTES = 64 << 20


class AgentError(Exception):
    """A verb cannot do what was asked; `main` reports it in one record."""

    def __init__(self, message: str, hint: Optional[str] = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class Channel:
    """Standard input and output of a verb. The first record tells the protocol's version and Python's."""

    def __init__(self, umask: int) -> None:
        self.umask = umask  # the caller's umask, for files of the job; the agent's own umask is stricter
        self.closed = False  # whether stdin has ended, which means that the controller is gone
        self._buffer = b""
        # Another program may have left the shared file description non-blocking; records must wait for the reader.
        os.set_blocking(1, True)
        # A shell's start-up files may have printed half a line, which would garble the first record.
        os.write(1, b"\n")
        self.emit({"kind": "agent", "schema": SCHEMA, "python": "%d.%d.%d" % sys.version_info[:3]})

    def emit(self, *records: Record) -> None:
        """Write records, short ones in one piece, so that the reader wakes up once.

        Waits for a slow reader, but not for one that reads nothing for two minutes.

        Raises:
            BrokenPipeError: the reader is gone, or reads nothing.
        """
        # File names that are not UTF-8 contain lone surrogates, which a strict reader refuses.
        lines = (json.dumps(record, ensure_ascii=False).encode("utf-8", "replace") + b"\n" for record in records)
        data = memoryview(b"".join(lines))
        while data:
            if not select.select([], [1], [], _READER_DEADLINE_S)[1]:
                raise BrokenPipeError(f"nothing was read for {_READER_DEADLINE_S:.0f} s")
            # If a pipe is ready, it takes PIPE_BUF bytes; a longer write could block forever.
            data = data[os.write(1, data[: select.PIPE_BUF]) :]

    def first_line(self) -> bytes:
        """Wait for the first line, the request; empty if stdin has ended.

        Raises:
            AgentError: no whole line came in time, or it is too long.
        """
        deadline = time.monotonic() + _REQUEST_DEADLINE_S
        while b"\n" not in self._buffer and not self.closed:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or len(self._buffer) > _REQUEST_MAX_BYTES:
                raise AgentError("no complete request on stdin")
            self._read(left_s)
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def lines(self, timeout_s: float) -> list[bytes]:
        """Whole lines that have arrived, waiting at most `timeout_s` for data; sets `closed` at the end of stdin."""
        if not self.closed and b"\n" not in self._buffer:
            self._read(timeout_s)
        *whole, self._buffer = self._buffer.split(b"\n")
        return whole

    def _read(self, timeout_s: float) -> None:
        if not select.select([0], [], [], timeout_s)[0]:
            return
        try:
            data = os.read(0, _READ_BYTES)
        except OSError:
            # The terminal or socket of stdin broke, which counts as its end.
            data = b""
        self._buffer += data
        self.closed = not data
