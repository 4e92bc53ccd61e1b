"""KeptFiles: a node's log and samples as they arrive, up to a limit per node on this machine's disk."""

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
# The controller's own remarks on a node, beside the node's samples.
_OUR_NOTES = "controller.jsonl"
_TAIL_BYTES = 1 << 16


class KeptLimits(msgspec.Struct, frozen=True, kw_only=True):
    """How much is kept of one node in one run: weeks of a training with one step per second and worker."""

    log_bytes: int = 2 << 30
    samples_bytes: int = 16 << 30
    sample_files: int = 1000


class KeptFiles:
    """Appends what arrives from one node to the run's files; what exceeds a limit is dropped and noted.

    Data that cannot be written, or did not arrive, leaves no gap: what follows is not kept until the node has sent
        the
    file again from there.

    Args:
        plan: the node's part of the run.
    """

    def __init__(self, directory: RunDirectory, plan: NodePlan, limits: KeptLimits) -> None:
        self._directory = directory
        self._plan = plan
        self._limits = limits
        self._sizes = directory.sizes(plan.node_rank)
        # How far each file is stored here, and how far any of it has arrived, in bytes of the node's file.
        self._taken = directory.offsets(plan.node_rank)
        self._come = dict(self._taken)
        self._is_noted = f"{_FOLDER}{_OUR_NOTES}" in self._sizes
        # The end of a log that is not stored to its end.
        self._tail = b""
        # By the size of the log that was read.
        self._reading: tuple[int, LogReading] | None = None
        # By the file that could not be written.
        self._troubles: dict[str, MultinodeError] = {}

    @property
    def offsets(self) -> dict[str, int]:
        """How far each file is stored: the node should send from there."""
        return dict(self._taken)

    @property
    def trouble(self) -> MultinodeError | None:
        """Why something could not be written; None without problems."""
        return next(iter(self._troubles.values()), None)

    @property
    def missing_bytes(self) -> int:
        """Bytes that have arrived, or passed, and are not stored."""
        return sum(max(0, come - self._taken.get(name, 0)) for name, come in self._come.items())

    def take(self, name: str, offset: int, data: bytes) -> bytes:
        """A piece of the log, or of a sample file in whole lines; `name` and `offset` are the node's.

        Returns:
            The part of it that is new.
        """
        if not _NAME.fullmatch(name):
            self._note(f"{name[:100]!r} is not the name of a samples file")
            return b""
        come = self._come.get(name, 0)
        self._come[name] = max(come, offset + len(data))
        taken = self._taken.get(name, 0)
        if offset <= taken < offset + len(data):
            self._keep(name, data[taken - offset :])
        return data[max(0, come - offset) :]

    def skip(self, offset: int, size_bytes: int) -> None:
        """This part of the log, from this byte of the node's on, no longer exists: noted in its place."""
        self._come[_LOG] = max(self._come.get(_LOG, 0), offset + size_bytes)
        if offset == self._taken.get(_LOG, 0):
            self._write(_LOG, size_bytes, lambda: self._say_gone(size_bytes))

    def log_tail(self) -> str:
        """The end of the node's log, stored or not."""
        if self._tail:
            return self._tail.decode(errors="replace")
        return self._directory.log_tail(self._plan.node_rank, _TAIL_BYTES)

    def reading(self) -> LogReading:
        """What the node's log says about failures; for one that is not stored to its end, only the end."""
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
        try:
            write()
        except MultinodeError as error:
            self._troubles[name] = error
            # A part may have been written, or someone has removed it.
            size = self._directory.sizes(self._plan.node_rank).get(name, 0)
            grown = size - self._sizes.get(name, 0)
            self._taken[name] = size if grown < 0 else self._taken.get(name, 0) + grown
            self._sizes[name] = size
        else:
            self._troubles.pop(name, None)
            self._taken[name] = self._taken.get(name, 0) + length

    def _say_gone(self, size_bytes: int) -> None:
        if self._sizes.get(_LOG, 0) < self._limits.log_bytes:
            said = f"{format_size(size_bytes)} of the log are missing: it exceeded --log-limit, or the job truncated it"
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
                said = f"the log is truncated here, at {format_size(most)}; the node's copy: {place}"
                kept += f"\nmultinode: {said}\n".encode()
        if kept:
            self._directory.append_log(self._plan.node_rank, kept, size)
            self._sizes[_LOG] = size + len(kept)

    def _take_samples(self, name: str, data: bytes) -> None:
        limits = self._limits
        size = self._sizes.get(name, 0)
        if name not in self._sizes and len(self._sizes) >= limits.sample_files:
            self._note(f"the node has more than {limits.sample_files} sample files")
        elif sum(self._sizes.values()) - self._sizes.get(_LOG, 0) + len(data) > limits.samples_bytes:
            self._note(f"the node sent more than {format_size(limits.samples_bytes)} of samples")
        else:
            self._directory.append_samples(self._plan.node_rank, name.removeprefix(_FOLDER), data, size)
            self._sizes[name] = size + len(data)

    def _note(self, reason: str) -> None:
        if not self._is_noted:
            record = {"kind": "note", "message": f"samples are no longer kept: {reason}"}
            with contextlib.suppress(MultinodeError):
                self._directory.append_samples(self._plan.node_rank, _OUR_NOTES, msgspec.json.encode(record) + b"\n")
                self._is_noted = True
