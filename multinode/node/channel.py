"""The channel to the controller: JSON lines in on stdin, JSON records out on stdout, and the error a verb ends with."""

from __future__ import annotations

import json
import os
import select
import sys
import time
from typing import Any, Optional

Record = dict[str, Any]

SCHEMA = 1
"""Of requests and of what we greet with."""

_READ_BYTES = 1 << 16
_REQUEST_DEADLINE_S = 60.0
# Longer than a controller is busy with something else. One that is frozen comes back to a new connection.
_READER_DEADLINE_S = 120.0
_REQUEST_MAX_BYTES = 64 << 20


class AgentError(Exception):
    """A verb cannot do what was asked; expected, and told in one record."""

    def __init__(self, message: str, hint: Optional[str] = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class Channel:
    """Standard input and output of a verb. It begins with a record that greets, on a line of its own."""

    def __init__(self, umask: int) -> None:
        self.umask = umask  # the caller's umask, for files of the job; ours is stricter
        self.closed = False  # whether stdin has ended, so that the controller is gone
        self._buffer = b""
        # A program before us may have left the shared description non-blocking; records must wait for the reader.
        os.set_blocking(1, True)
        # What a shell's start-up files printed before us may end in the middle of a line, or look like a record.
        os.write(1, b"\n")
        self.emit({"kind": "agent", "schema": SCHEMA, "python": "%d.%d.%d" % sys.version_info[:3]})

    def emit(self, *records: Record) -> None:
        """Write records, as one piece where they are short: a reader then wakes up once.

        Waits for a slow reader, but not for one that reads nothing at all.

        Raises:
            BrokenPipeError: nobody reads any more.
        """
        # Names that are not UTF-8 carry lone surrogates, which a strict reader refuses.
        lines = (json.dumps(record, ensure_ascii=False).encode("utf-8", "replace") + b"\n" for record in records)
        data = memoryview(b"".join(lines))
        while data:
            if not select.select([], [1], [], _READER_DEADLINE_S)[1]:
                raise BrokenPipeError(f"nothing was read for {_READER_DEADLINE_S:.0f} s")
            # What is ready takes so many bytes at least; a longer write could wait for ever.
            data = data[os.write(1, data[: select.PIPE_BUF]) :]

    def first_line(self) -> bytes:
        """The request.

        Raises:
            AgentError: it did not come, or not in time.
        """
        deadline = time.monotonic() + _REQUEST_DEADLINE_S
        while b"\n" not in self._buffer and not self.closed:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or len(self._buffer) > _REQUEST_MAX_BYTES:
                raise AgentError("no request on stdin, or one without an end")
            self._read(left_s)
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def lines(self, timeout_s: float) -> list[bytes]:
        """Further whole lines, waiting at most `timeout_s` for the first; sets `closed` at the end of stdin."""
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
            # The terminal or socket behind stdin broke: as good as its end.
            data = b""
        self._buffer += data
        self.closed = not data
