"""The verb `follow`: streams a run's log, samples and status as they grow, and takes lease and stop orders meanwhile.

The run does not depend on it. Only if supervisor and sentinel are both dead does the follower end the run.
"""

from __future__ import annotations

import binascii
import json
import os
import time
from typing import Optional

from ..channel import AgentError, Channel, Record
from ..processes import Family
from ..rundir import RunDir, is_samples_name, open_run
from .job_log import LogReader, Piece, open_own
from .status import has_ended, is_lost, other_machine, read_status, renew_lease
from .stop import Recovery, order_stop

_POLL_S = 0.1
_ALIVE_S = 0.9
_CHUNK_BYTES = 1 << 16


def run(request: Record, channel: Channel) -> None:
    """Follow a run until its end, or until stdin closes.

    Raises:
        AgentError: there is no such run, or it runs on another machine.
    """
    run_dir = open_run(request["run_id"])
    machine = other_machine(run_dir)
    if machine is not None and not has_ended(read_status(run_dir)):
        raise AgentError(
            f"run {run_dir.run_id} was started on {machine}; {os.uname().nodename} has only the directory of the run "
            "and cannot see its processes",
            hint="name that machine as the node; if it no longer exists: rm -r " + run_dir.path,
        )
    Follower(run_dir, request, channel).follow()


def say_hello(run_dir: RunDir, channel: Channel) -> None:
    """Emit `hello`, the first record of a run's channel."""
    channel.emit(
        {
            "kind": "hello",
            "schema": 1,
            "run_id": run_dir.run_id,
            "run_dir": run_dir.path,
            "supervisor_pid": (run_dir.read("supervisor.json") or {}).get("pid"),
            "hostname": os.uname().nodename,
            "time_s": time.time(),
        }
    )


class Follower:
    """Sends a run's files and status to one reader.

    Args:
        request: `offsets`, the bytes of each file that the reader has already, by name relative to the run directory;
            `poll_s`, seconds between looks at the files.
    """

    def __init__(self, run_dir: RunDir, request: Record, channel: Channel) -> None:
        self._run = run_dir
        self._offsets: dict[str, int] = request.get("offsets", {})
        self._poll_s = float(request.get("poll_s", _POLL_S))
        self._channel = channel
        self._log = LogReader(run_dir, self._offsets.get("log", 0))
        self._samples: dict[str, SamplesReader] = {}
        self._status: Optional[Record] = None
        self._recovery: Optional[Recovery] = None
        self._alive_due = self._said = 0.0

    def follow(self) -> None:
        """Follow until the run has ended and everything is sent, or the reader is gone."""
        say_hello(self._run, self._channel)
        while not self._channel.closed:
            # The status is read before the files: everything written before the end is then sent before `end`.
            ended = self._tell_status()
            sent = self._send_chunks(final=ended)
            if ended and not sent:
                self._emit({**(self._status or {}), "kind": "end"})
                return
            self._tell_alive()
            # After a full chunk there may be more to send, so do not wait.
            for line in self._channel.lines(0 if ended or sent == _CHUNK_BYTES else self._poll_s):
                self._obey(line)

    def _tell_status(self) -> bool:
        status = self._recovery.status.copy() if self._recovery else read_status(self._run)
        if status is not None and status != self._status:
            self._status = status
            self._emit({**status, "kind": "status"})
        return has_ended(self._status)

    def _send_chunks(self, *, final: bool) -> int:
        """Send the next piece of every file; returns the length of the longest piece in bytes."""
        log = self._log.read(_CHUNK_BYTES)
        if log.gone_bytes:
            self._emit({"kind": "gone", "file": "log", "offset": log.offset, "size_bytes": log.gone_bytes})
        self._find_samples()
        pieces = {"log": log, **{name: reader.read(final=final) for name, reader in self._samples.items()}}
        chunks = [
            {
                "kind": "chunk",
                "file": name,
                "offset": piece.offset,
                "data": binascii.b2a_base64(piece.data, newline=False).decode(),
            }
            for name, piece in pieces.items()
            if piece.data
        ]
        if chunks:
            self._emit(*chunks)
        return max(_CHUNK_BYTES if log.gone_bytes else 0, *(len(piece.data) for piece in pieces.values()))

    def _emit(self, *records: Record) -> None:
        self._said = time.monotonic()
        self._channel.emit(*records)

    def _find_samples(self) -> None:
        try:
            names = sorted(os.listdir(self._run.samples))
        except OSError:
            names = []
        for name in names:
            path = f"samples/{name}"
            if path not in self._samples and is_samples_name(name):
                self._samples[path] = SamplesReader(os.path.join(self._run.path, path), self._offsets.get(path, 0))

    def _obey(self, line: bytes) -> None:
        try:
            order = json.loads(line)
        except ValueError:
            return
        if not isinstance(order, dict):
            return
        if order.get("op") == "lease":
            try:
                renew_lease(self._run, order["lease_s"])
            except OSError as error:
                self._emit({"kind": "note", "message": f"the lease could not be renewed: {error}"})
        elif order.get("op") == "stop":
            order_stop(self._run, order["grace_s"], order.get("order"))
            # Somebody now waits for the end, so look often.
            self._poll_s = min(self._poll_s, _POLL_S)
            if self._recovery is not None:
                self._recovery.shorten(order["grace_s"])

    def _tell_alive(self) -> None:
        if self._recovery is not None:
            self._recovery.step()
        now = time.monotonic()
        if now < self._alive_due:
            return
        self._alive_due = now + _ALIVE_S
        # For a reader with a long poll interval, any record shows that we live: `alive` only fills silences.
        if self._poll_s <= _POLL_S or now - self._said >= _ALIVE_S:
            self._emit({"kind": "alive", "time_s": time.time()})
        if self._recovery is None and is_lost(self._run):
            family = Family(self._run.run_id)
            self._recovery = Recovery(self._run, family, "supervisor and sentinel are both dead")


class SamplesReader:
    """Reads a samples file, from the offset that the reader has already: whole records, and never a gap.

    Nothing of it is given back while the run lasts, so it has no index, as the log has.
    """

    def __init__(self, path: str, offset: int) -> None:
        self._path = path
        self._offset = offset
        self._searched = offset
        self._line_end = offset

    def read(self, *, final: bool) -> Piece:
        """The next piece, empty if there is nothing to send yet.

        It ends at a newline, so that no record is sent in part, unless it is longer than a chunk or `final` is
        set.
        """
        offset = self._offset
        try:
            if os.lstat(self._path).st_size <= offset:
                return Piece(offset)
            # The job may have replaced it by a link to a file outside the run.
            with open(open_own(self._path, os.O_RDONLY), "rb", buffering=0) as file:
                limit = _CHUNK_BYTES
                if not final:
                    self._search_line_end(file.fileno())
                    limit = min(limit, self._line_end - offset)
                data = os.pread(file.fileno(), limit, offset)
        except OSError:
            return Piece(offset)
        self._offset += len(data)
        return Piece(offset, data)

    def _search_line_end(self, fd: int) -> None:
        # Each byte is searched once, and only one block is in memory.
        while True:
            block = os.pread(fd, _CHUNK_BYTES, self._searched)
            newline = block.rfind(b"\n")
            if newline >= 0:
                self._line_end = self._searched + newline + 1
            self._searched += len(block)
            if len(block) < _CHUNK_BYTES:
                return
