"""KeptFiles: a node's log and samples as they come home, up to what one node may take of this machine's disk."""

from __future__ import annotations

import msgspec

from multinode.core.run.plan import NodePlan
from multinode.launch.log_words import LogReading, read_log
from multinode.store.run_directory import RunDirectory
from multinode.units import format_size

__all__ = ["KeptFiles", "KeptLimits"]

_LOG = "log"
_FOLDER = "samples/"
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

    Args:
        plan: the node's part of the run.
    """

    def __init__(self, directory: RunDirectory, plan: NodePlan, limits: KeptLimits) -> None:
        self._directory = directory
        self._plan = plan
        self._limits = limits
        self._sizes = directory.sizes(plan.node_rank)
        self._is_noted = f"{_FOLDER}{_OUR_NOTES}" in self._sizes
        # The end of a log that is not kept to its end.
        self._tail = b""
        # By the size of the log that was read.
        self._reading: tuple[int, LogReading] | None = None

    def take(self, name: str, data: bytes) -> None:
        """A piece of the log, or of a file of samples in whole lines; `name` is as on the node.

        Raises:
            MultinodeError: it cannot be written, or has the name of no such file.
        """
        if name == _LOG:
            self._take_log(data)
        else:
            self._take_samples(name, data)

    def skip(self, size_bytes: int) -> None:
        """So much of the log is on the node no more: it is said in its place.

        Raises:
            MultinodeError: it cannot be written.
        """
        if self._sizes.get(_LOG, 0) < self._limits.log_bytes:
            said = f"{format_size(size_bytes)} of the log are gone: it grew beyond --log-limit, or the job emptied it"
            data = f"\nmultinode: {said}\n".encode()
            self._directory.note_gap(self._plan.node_rank, size_bytes - len(data))
            self._take_log(data)

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
            except FileNotFoundError:
                return LogReading()
        return self._reading[1]

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
            self._directory.append_log(self._plan.node_rank, kept)
            self._sizes[_LOG] = size + len(kept)

    def _take_samples(self, name: str, data: bytes) -> None:
        limits = self._limits
        is_new = name not in self._sizes
        if is_new and len(self._sizes) >= limits.sample_files:
            self._note(f"the node has more than {limits.sample_files} files of samples")
        elif sum(self._sizes.values()) - self._sizes.get(_LOG, 0) + len(data) > limits.samples_bytes:
            self._note(f"the node sent more than {format_size(limits.samples_bytes)} of samples")
        else:
            self._directory.append_samples(self._plan.node_rank, name.removeprefix(_FOLDER), data)
            self._sizes[name] = self._sizes.get(name, 0) + len(data)

    def _note(self, reason: str) -> None:
        """Once: it is read like what a node itself notes."""
        if not self._is_noted:
            self._is_noted = True
            record = {"kind": "note", "message": f"samples are not kept any more: {reason}"}
            self._directory.append_samples(self._plan.node_rank, _OUR_NOTES, msgspec.json.encode(record) + b"\n")
