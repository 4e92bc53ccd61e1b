"""KeptFiles: a node's log and samples as they come home, up to what one node may take of this machine's disk."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable

import msgspec

from multinode.diagnose.log_words import LogReading, read_log
from multinode.errors import MultinodeError
from multinode.records.plan import NodePlan
from multinode.records.run_directory import RunDirectory
from multinode.units import format_size

_LOG = "log"
_FOLDER = "samples/"
_NAME = re.compile(r"log|samples/[A-Za-z0-9][A-Za-z0-9._-]{0,99}\.jsonl")
# What the controller itself has to say of a node, beside the node's own samples.
_OUR_NOTES = "controller.jsonl"
_TAIL_BYTES = 1 << 16


class KeptLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The most that is kept of one node in one run: weeks of a training whose every worker makes a step a second."""

    log_bytes: int = 2 << 30
    samples_bytes: int = 16 << 30
    sample_files: int = 1000


class KeptFiles:
    """What comes from one node, appended to the run's files; what goes beyond a limit is left out, and that is noted.

    What cannot be written now, or did not come, leaves no gap: nothing behind it is kept either, until the node has
    sent the file anew from where it ends here.

    Args:
        plan: the node's part of the run.
    """

    def __init__(self, directory: RunDirectory, plan: NodePlan, limits: KeptLimits) -> None:
        self._directory = directory
        self._plan = plan
        self._limits = limits
        self._sizes = directory.sizes(plan.node_rank)
        # How far each file has been taken here, and how far anything of it has come, in bytes of the node's file.
        self._taken = directory.offsets(plan.node_rank)
        self._come = dict(self._taken)
        self._is_noted = f"{_FOLDER}{_OUR_NOTES}" in self._sizes
        # The end of a log that is not kept to its end.
        self._tail = b""
        # By the size of the log that was read.
        self._reading: tuple[int, LogReading] | None = None
        # By the file that could not be written last.
        self._troubles: dict[str, MultinodeError] = {}

    @property
    def offsets(self) -> dict[str, int]:
        """How far each file has been taken: from there on it is wanted of the node."""
        return dict(self._taken)

    @property
    def trouble(self) -> MultinodeError | None:
        """Why something could not be written; None where all was."""
        return next(iter(self._troubles.values()), None)

    @property
    def missing_bytes(self) -> int:
        """What has come, or has passed by, and is not kept."""
        return sum(max(0, come - self._taken.get(name, 0)) for name, come in self._come.items())

    def take(self, name: str, offset: int, data: bytes) -> bytes:
        """A piece of the log, or of a file of samples in whole lines; `name` and `offset` are as on the node.

        Returns:
            What of it has not come before.
        """
        if not _NAME.fullmatch(name):
            self._note(f"{name[:100]!r} is not the name of a file of samples")
            return b""
        come = self._come.get(name, 0)
        self._come[name] = max(come, offset + len(data))
        taken = self._taken.get(name, 0)
        if offset <= taken < offset + len(data):
            self._keep(name, data[taken - offset :])
        return data[max(0, come - offset) :]

    def skip(self, offset: int, size_bytes: int) -> None:
        """So much of the log, from this byte of the node's on, is there no more: that is said in its place."""
        self._come[_LOG] = max(self._come.get(_LOG, 0), offset + size_bytes)
        if offset == self._taken.get(_LOG, 0):
            self._write(_LOG, size_bytes, lambda: self._say_gone(size_bytes))

    def log_tail(self) -> str:
        """The last words of the node's log, kept or not."""
        if self._tail:
            return self._tail.decode(errors="replace")
        return self._directory.log_tail(self._plan.node_rank, _TAIL_BYTES)

    def reading(self) -> LogReading:
        """What the node's log says of failures: all of it, or of one that is not kept to its end the end."""
        if self._tail:
            return read_log(self._tail)
        size = self._sizes.get(_LOG, 0)
        if self._reading is None or self._reading[0] != size:
            try:
                with self._directory.log_path(self._plan.node_rank).open("rb") as file:
                    self._reading = size, read_log(file)
            except OSError:
                return LogReading()
        return self._reading[1]

    def _keep(self, name: str, data: bytes) -> None:
        self._write(name, len(data), lambda: self._take_log(data) if name == _LOG else self._take_samples(name, data))

    def _write(self, name: str, length: int, write: Callable[[], None]) -> None:
        """Take so many bytes of the node's file, where what is to be written of them can be."""
        try:
            write()
        except MultinodeError as error:
            self._troubles[name] = error
            # A part of it may have been written; or somebody has removed what was.
            size = self._directory.sizes(self._plan.node_rank).get(name, 0)
            grown = size - self._sizes.get(name, 0)
            self._taken[name] = size if grown < 0 else self._taken.get(name, 0) + grown
            self._sizes[name] = size
        else:
            self._troubles.pop(name, None)
            self._taken[name] = self._taken.get(name, 0) + length

    def _say_gone(self, size_bytes: int) -> None:
        if self._sizes.get(_LOG, 0) < self._limits.log_bytes:
            said = f"{format_size(size_bytes)} of the log are gone: it grew beyond --log-limit, or the job emptied it"
            data = f"\nmultinode: {said}\n".encode()
            self._take_log(data)
            self._directory.note_gap(self._plan.node_rank, size_bytes - len(data))

    def _take_log(self, data: bytes) -> None:
        size, most = self._sizes.get(_LOG, 0), self._limits.log_bytes
        kept = data[: max(0, most - size)]
        if len(kept) < len(data):
            self._tail = (self._tail + data)[-_TAIL_BYTES:]
            if size <= most:
                place = f"{self._plan.node}:{self._plan.run_dir}/{_LOG}"
                said = f"the log is cut off here, at {format_size(most)}; what the node keeps of it: {place}"
                kept += f"\nmultinode: {said}\n".encode()
        if kept:
            self._directory.append_log(self._plan.node_rank, kept, size)
            self._sizes[_LOG] = size + len(kept)

    def _take_samples(self, name: str, data: bytes) -> None:
        limits = self._limits
        size = self._sizes.get(name, 0)
        if name not in self._sizes and len(self._sizes) >= limits.sample_files:
            self._note(f"the node has more than {limits.sample_files} files of samples")
        elif sum(self._sizes.values()) - self._sizes.get(_LOG, 0) + len(data) > limits.samples_bytes:
            self._note(f"the node sent more than {format_size(limits.samples_bytes)} of samples")
        else:
            self._directory.append_samples(self._plan.node_rank, name.removeprefix(_FOLDER), data, size)
            self._sizes[name] = size + len(data)

    def _note(self, reason: str) -> None:
        """Once: it is read like what a node itself notes."""
        if not self._is_noted:
            record = {"kind": "note", "message": f"samples are not kept any more: {reason}"}
            with contextlib.suppress(MultinodeError):
                self._directory.append_samples(self._plan.node_rank, _OUR_NOTES, msgspec.json.encode(record) + b"\n")
                self._is_noted = True
