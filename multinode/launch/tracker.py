"""Tracker: progress, outcome and files of a run, from its nodes' records."""

from __future__ import annotations

import contextlib
import copy
import re
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from multinode.diagnose.evidence import FaultWatch, NodeEvidence
from multinode.errors import AgentFailed, ContactLost, MultinodeError, NodeFailed
from multinode.launch.session import Chunk, Event, Gone, Hello, Message, StatusReport, steady_s
from multinode.records.log import next_stage
from multinode.records.plan import LaunchPlan, Place
from multinode.records.progress import NodeProgress, RunProgress, start_progress
from multinode.records.run import Failure, NodeRun
from multinode.records.run_directory import RunDirectory
from multinode.records.samples import ExceptionSample, FlightSample, NcclWarningSample, parse_samples
from multinode.records.status import Status
from multinode.units import format_size

if TYPE_CHECKING:
    from multinode.diagnose.log_words import LogReading

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

    Data that cannot be written, or did not arrive, leaves no gap: what follows is not kept until the node has sent the
    file again from there.

    Args:
        plan: the node's part of the run.
    """

    def __init__(self, directory: RunDirectory, place: Place, limits: KeptLimits) -> None:
        self._directory = directory
        self._place = place
        self._limits = limits
        self._sizes = directory.sizes(place.node_rank)
        # How far each file is stored here, and how far any of it has arrived, in bytes of the node's file.
        self._taken = directory.offsets(place.node_rank)
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
        fresh = data[max(0, come - offset) :]
        if name == _LOG and self._taken.get(_LOG, 0) < self._come[_LOG]:
            self._tail = (self._tail + fresh)[-_TAIL_BYTES:]
        return fresh

    def skip(self, offset: int, size_bytes: int) -> None:
        """This part of the log, from this byte of the node's on, no longer exists: noted in its place."""
        self._come[_LOG] = max(self._come.get(_LOG, 0), offset + size_bytes)
        if offset == self._taken.get(_LOG, 0):
            self._write(_LOG, size_bytes, lambda: self._say_gone(size_bytes))

    def log_tail(self) -> str:
        """The end of the node's log, stored or not."""
        if self._tail:
            return self._tail.decode(errors="replace")
        return self._directory.log_tail(self._place.node_rank, _TAIL_BYTES)

    def reading(self) -> LogReading:
        """What the node's log says about failures; for one that is not stored to its end, only the end."""
        from multinode.diagnose.log_words import LogReading, read_log

        if self._tail:
            return read_log(self._tail, has_failed=True)
        size = self._sizes.get(_LOG, 0)
        if self._reading is None or self._reading[0] != size:
            try:
                with self._directory.log_path(self._place.node_rank).open("rb") as file:
                    self._reading = size, read_log(file, has_failed=True)
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
            size = self._directory.sizes(self._place.node_rank).get(name, 0)
            grown = size - self._sizes.get(name, 0)
            self._taken[name] = size if grown < 0 else self._taken.get(name, 0) + grown
            self._sizes[name] = size
        else:
            self._troubles.pop(name, None)
            self._taken[name] = self._taken.get(name, 0) + length

    def _say_gone(self, size_bytes: int) -> None:
        if self._sizes.get(_LOG, 0) < self._limits.log_bytes:
            text = f"{format_size(size_bytes)} of the log is missing: it exceeded --log-limit, or the job truncated it"
            data = f"\nmultinode: {text}\n".encode()
            self._take_log(data)
            self._directory.note_gap(self._place.node_rank, size_bytes - len(data))

    def _take_log(self, data: bytes) -> None:
        size, most = self._sizes.get(_LOG, 0), self._limits.log_bytes
        kept = data[: max(0, most - size)]
        if len(kept) < len(data):
            self._tail = (self._tail + data)[-_TAIL_BYTES:]
            if size <= most:
                place = f"{self._place.node}:{self._place.run_dir}/{_LOG}"
                text = f"the log is truncated here, at {format_size(most)}; the node's copy: {place}"
                kept += f"\nmultinode: {text}\n".encode()
        if kept:
            self._directory.append_log(self._place.node_rank, kept, size)
            self._sizes[_LOG] = size + len(kept)

    def _take_samples(self, name: str, data: bytes) -> None:
        limits = self._limits
        size = self._sizes.get(name, 0)
        if name not in self._sizes and len(self._sizes) >= limits.sample_files:
            self._note(f"the node has more than {limits.sample_files} sample files")
        elif sum(self._sizes.values()) - self._sizes.get(_LOG, 0) + len(data) > limits.samples_bytes:
            self._note(f"the node sent more than {format_size(limits.samples_bytes)} of samples")
        else:
            self._directory.append_samples(self._place.node_rank, name.removeprefix(_FOLDER), data, size)
            self._sizes[name] = size + len(data)

    def _note(self, reason: str) -> None:
        if not self._is_noted:
            record = {"kind": "note", "message": f"samples are no longer kept: {reason}"}
            with contextlib.suppress(MultinodeError):
                self._directory.append_samples(self._place.node_rank, _OUR_NOTES, msgspec.json.encode(record) + b"\n")
                self._is_noted = True


# The first failure is among the first exceptions, and a node has fewer workers.
_MOST_EXCEPTIONS = 200
# Per sample file.
_LAST_MINUTES_BYTES = 1 << 20


class _NodeTrack(NodeEvidence, kw_only=True):
    """One node: what it has reported so far."""

    progress: NodeProgress
    hardware: FaultWatch
    files: KeptFiles
    # Time of the last message, while contact is lost.
    heard_s: float | None = None
    over: bool = False

    def read(self) -> LogReading:
        """The whole kept log, not only its end."""
        return self.files.reading()


class Tracker:
    """Combines the events of all nodes.

    Args:
        limits: how much is kept of each node; beyond that it is still followed.
        attach: whether the run is already in progress.
        observe_log: is called with a node and what its log has gained.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        directory: RunDirectory,
        limits: KeptLimits | None = None,
        *,
        attach: bool = False,
        observe_log: Callable[[NodeRun, bytes], None] = lambda _node, _data: None,
    ) -> None:
        self._directory = directory
        self._attach = attach
        self._observe_log = observe_log
        self._start = start_progress(plan)
        self._tracks: list[_NodeTrack] = []
        for node, place in zip(self._start.nodes, plan.places, strict=True):
            hardware = FaultWatch(node.name)
            run = NodeRun(name=node.name, node_rank=node.node_rank)
            files = KeptFiles(directory, place, limits or KeptLimits())
            track = _NodeTrack(run=run, progress=node, hardware=hardware, files=files, faults=hardware.faults)
            self._tracks.append(track)
            # What an earlier controller received; empty for a new run.
            _take_samples(track, directory.sample_tails(track.run.node_rank))
            _take_log(track, directory.log_tail(track.run.node_rank))

    @property
    def progress(self) -> RunProgress:
        """How far the nodes are."""
        return replace(self._start, nodes=tuple(copy.copy(track.progress) for track in self._tracks))

    @property
    def node_runs(self) -> tuple[NodeRun, ...]:
        """State or outcome of the job on every node."""
        return tuple(track.run for track in self._tracks)

    @property
    def all_over(self) -> bool:
        """Whether no more events will come."""
        return all(track.over for track in self._tracks)

    @property
    def all_running(self) -> bool:
        """Whether the job runs on every node."""
        return all(track.run.state == "running" for track in self._tracks)

    @property
    def any_failed(self) -> bool:
        """Whether the job has failed on a node, or a node is lost, so that the others wait in vain."""
        ended = [track.run for track in self._tracks if track.over or track.run.state == "ended"]
        return any(run.status.failed for run in ended)

    def evidence(self) -> Sequence[NodeEvidence]:
        """What is known about each node, for the search of the first failure."""
        for track in self._tracks:
            track.log = track.files.log_tail()
        return self._tracks

    def explain(self, failure: Failure) -> Failure:
        """The first failure, with what the run's figures say about it."""
        from multinode.diagnose.failure import explain_timeout, link_share

        at_s = failure.time_s if failure.time_s is not None else time.time()
        shares = {
            track.run.name: link_share(
                parse_samples(self._directory.sample_tails(track.run.node_rank, _LAST_MINUTES_BYTES)),
                track.progress,
                at_s + (track.clock_offset_s or 0.0),
            )
            for track in (self._tracks if failure.kind == "timeout" else ())
        }
        return explain_timeout(failure, self.progress.nodes, shares)

    def take(self, event: Event) -> None:
        """Process one event."""
        track = self._tracks[event.node_rank]
        track.over = track.over or event.over
        if event.error is not None:
            track.heard_s = event.heard_s
            self._take_error(track, event.error, over=event.over)
        if event.message is not None:
            self._take_message(track, event.message)

    @property
    def missing_bytes(self) -> int:
        """Bytes of logs and samples that could not be kept here."""
        return sum(track.files.missing_bytes for track in self._tracks)

    @property
    def trouble(self) -> MultinodeError | None:
        """Why something could not be written; None without problems."""
        return next((track.files.trouble for track in self._tracks if track.files.trouble is not None), None)

    def note_stopping(self) -> None:
        """All nodes have been asked to stop."""
        for track in self._tracks:
            if not track.over:
                _set_state(track, "stopping")

    def give_up(self) -> None:
        """Nodes that have not ended by now are lost."""
        for track in self._tracks:
            if not track.over:
                track.error = track.error or ContactLost("it did not confirm that it has stopped", node=track.run.name)
                _set_lost(track)

    def _take_error(self, track: _NodeTrack, error: MultinodeError, *, over: bool) -> None:
        # For a run in progress, and once contact was lost, only the agent can say that the job was never started.
        may_run = (self._attach or track.error is not None) and not isinstance(error, AgentFailed)
        track.error = error
        if not over:
            message = f"contact lost{_since(track)}, the job may be running; reconnecting"
            track.progress.message = message
        elif may_run or isinstance(error, ContactLost) or track.run.state != "waiting":
            _set_lost(track, error.message)
        else:
            status = replace(track.run.status, cause="not_started", ended_s=time.time())
            track.run = replace(track.run, status=status)
            _set_state(track, "ended", error.message)

    def _take_message(self, track: _NodeTrack, message: Message) -> None:
        if isinstance(message, Hello):
            track.clock_offset_s = message.time_s - time.time()
            # What arrives now may have happened while there was no contact.
            track.came_live = track.error is None and not self._attach and track.run.state != "ended"
            track.error = track.heard_s = None
            # Contact may have been lost between the status of its end and the last of its files.
            if track.run.state != "ended":
                _set_state(track, "starting")
        elif isinstance(message, Chunk):
            fresh = track.files.take(message.file, message.offset, message.data)
            if message.file == "log":
                _take_log(track, fresh.decode(errors="replace"))
                if fresh:
                    self._observe_log(track.run, fresh)
            else:
                _take_samples(track, fresh.splitlines())
        elif isinstance(message, Gone):
            track.files.skip(message.offset, message.size_bytes)
        else:
            _take_status(track, message)


def _take_samples(track: _NodeTrack, lines: Iterable[bytes]) -> None:
    samples = list(parse_samples(lines))
    raised = [sample for sample in samples if isinstance(sample, ExceptionSample)]
    raised = raised[: _MOST_EXCEPTIONS - len(track.exceptions)]
    track.exceptions += raised
    track.exceptions_heard_s += [steady_s()] * len(raised)
    flights = [sample for sample in samples if isinstance(sample, FlightSample)]
    track.flights += flights[: _MOST_EXCEPTIONS - len(track.flights)]
    warnings = [sample.message for sample in samples if isinstance(sample, NcclWarningSample)]
    track.nccl_warnings += warnings[: _MOST_EXCEPTIONS - len(track.nccl_warnings)]
    track.hardware.take(samples)
    track.progress.take(samples)


def _take_log(track: _NodeTrack, log: str) -> None:
    if track.progress.step is None:
        track.progress.stage = next_stage(track.progress.stage, log)


def _take_status(track: _NodeTrack, report: StatusReport) -> None:
    status = report.recorded
    track.run = replace(track.run, status=status)
    if status.state == "ended" and track.ended_heard_s is None:
        track.ended_heard_s = steady_s()
    if status.cause == "not_started" and status.message:
        track.error = NodeFailed(status.message, node=track.run.name)
    _set_state(track, report.state, _describe_end(status) if status.state == "ended" else "")


def _describe_end(status: Status) -> str:
    if status.cause == "stopped":
        return "stopped"
    if status.cause in {"lease_expired", "supervisor_lost", "not_started"}:
        return status.cause.replace("_", " ")
    if status.signal is not None:
        return f"killed by {status.signal}"
    return "done" if status.exit_code == 0 else f"exit code {status.exit_code}"


def _set_lost(track: _NodeTrack, reason: str = "") -> None:
    _set_state(track, "lost", f"lost{_since(track)}{': ' if reason else ''}{reason}")
    track.run = replace(track.run, lost_s=track.heard_s)


def _since(track: _NodeTrack) -> str:
    return f" at {time.strftime('%H:%M:%S', time.localtime(track.heard_s))}" if track.heard_s is not None else ""


def _set_state(track: _NodeTrack, state: str, message: str = "") -> None:
    track.run = replace(track.run, state=state)
    track.progress.state, track.progress.message = state, message
