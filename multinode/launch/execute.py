"""execute: run a plan on all nodes at once, and follow it until nothing of it is left."""

from __future__ import annotations

import functools
import logging
import secrets
import time
from collections.abc import Callable
from typing import TypeVar

from msgspec.structs import replace

from multinode.cluster.cluster import Cluster
from multinode.cluster.quoting import as_steps
from multinode.errors import OURS_TO_FIX, MultinodeError
from multinode.launch.context import ExecuteOptions, RunContext, supervise_requests
from multinode.launch.hang_watch import StallWatch, diagnose
from multinode.launch.session import Event, EventQueue, NodeSession, StatusReport
from multinode.launch.tracker import Tracker
from multinode.records.run import SLOWER_THAN_ONE_NODE, Failure, NodeRun, Run, Stall, new_run
from multinode.runs.stored_run import StoredRun

T = TypeVar("T")

_LOG = logging.getLogger(__name__)
_TICK_S = 0.2
_OBSERVE_EVERY_S = 0.25
_MOST_TROUBLES = 20
_ENDED = {"succeeded": "succeeded", "failed": "failed", "stopped": "been stopped", "lost": "been lost"}


class Execution:
    """One execution of the plan of a run, recorded in its directory: the sessions, their events, and the reactions.

    Args:
        stored: the run.
        cluster: its nodes.
        context: how they are reached, and who is told.
        options: how the run is followed and stopped.
    """

    def __init__(self, stored: StoredRun, cluster: Cluster, context: RunContext, options: ExecuteOptions) -> None:
        self.plan, self.directory = stored.require_plan(), stored.directory
        self.cluster, self.options = cluster, options
        self.context, self.stop = context, context.stop
        self._events = EventQueue()
        self._tracker = Tracker(self.plan, self.directory, attach=self.options.attach, observe_log=self._show_log)
        before = self.directory.read_run() if self.options.attach else None
        self._started_s = before.started_s if before else time.time()
        self._started = time.monotonic()
        self._watch = StallWatch(
            # A server is silent while nobody asks it.
            stall_s=None if any(node.serves for node in self.plan.nodes) else self.options.stall_s,
            node_count=len(self.plan.nodes),
            diagnose=functools.partial(diagnose, context.agent, self.cluster, self.plan),
            directory=self.directory,
            write_hint=functools.partial(as_steps, nodes=self.cluster.nodes),
        )
        # The stall for which the run was stopped.
        self._hang: Stall | None = None
        # Why a run that continues cannot be followed from here.
        self._barred: MultinodeError | None = None
        self._stopping = 0
        # Returned in the status of a node that our order stopped.
        self._order = secrets.token_hex(8)
        self._grace_s = self.options.grace_s
        # Whether a node was stopped by a signal before we asked any.
        self._stopped_unasked = False
        # Nodes that are being stopped, by anyone.
        self._ending: set[int] = set()
        # When to stop waiting for nodes.
        self._give_up = float("inf")
        self._troubles: tuple[str, ...] = ()
        # Whether something could not be stored, which is told once.
        self._is_short = False
        self._requests = supervise_requests(self.plan, self.options)
        self._sessions = [
            self._session(rank, self.directory.offsets(rank) if self.options.attach else None)
            for rank in range(len(self.plan.nodes))
        ]

    def run(self) -> Run:
        """Start, follow, stop, record.

        The run ends when every node has verified that its processes are gone, or is unreachable. If one node fails,
        or `stop` asks for it, all are stopped. Returns the outcome; a failed run is a result, not an exception.

        Raises:
            UsageError, NodeError: this side cannot follow the run until a problem is fixed; the run continues.
        """
        if not self.options.attach:
            self._save(self._record("running"))
        self.stop.lease_s = self.options.lease_s
        for session in self._sessions:
            session.start()
        try:
            self._follow()
        except BaseException:
            self._abandon()
            raise
        finally:
            self.stop.lease_s = None
            self._watch.close()
        self._show()
        left = self._may_leave()
        if left:
            for session in self._sessions:
                session.leave()
        run = self._record("running" if left else self._status())
        if not left:
            self._survive(self._restore)
        try:
            self._save(run)
        except MultinodeError as error:
            if not left:
                raise MultinodeError(
                    f"the run has {_ENDED.get(run.status, 'ended')}, but this could not be recorded: {error.message}",
                    hint=f"free disk space, then: multinode attach {run.run_id}",
                ) from error
        if left and self._barred is not None:
            raise self._barred
        return run

    def _session(self, node_rank: int, have: dict[str, int] | None) -> NodeSession:
        return NodeSession(
            agent=self.context.agent,
            node=self.cluster.nodes[node_rank],
            node_rank=node_rank,
            request=self._requests[node_rank],
            events=self._events,
            silence_s=self.options.silence_s,
            have=have,
        )

    def _abandon(self) -> None:
        for session in self._sessions:
            if self._only_reads or self._leaves_on_stop:
                session.leave()
            else:
                session.stop(self.options.grace_s, end=time.monotonic(), order=self._order)

    def _follow(self) -> None:
        observed = time.monotonic()
        while time.monotonic() < self._give_up and not self._may_leave():
            if self._tracker.all_over:
                return
            # Work over all nodes is done once per batch of events.
            for event in self._events.take(_TICK_S):
                self._survive(functools.partial(self._take, event))
            if not self._stopping:
                self._survive(self._look_for_a_stall)
            self._react()
            self._survive(self._tell_what_is_missing)
            now = time.monotonic()
            if now - observed >= _OBSERVE_EVERY_S:
                observed = now
                self._show()
        if not self._may_leave():
            self._tracker.give_up()

    def _survive(self, step: Callable[[], T]) -> T | None:
        """An error in this part of following a run costs a view or a record, never the run."""
        try:
            return step()
        except MultinodeError as error:
            self._tell(str(error))
        except Exception as error:  # noqa: BLE001 - no defect of ours is worth a training
            _LOG.debug("a defect", exc_info=error)
            self._tell(f"a bug in multinode: {error!r}")
        return None

    def _tell(self, trouble: str) -> None:
        sentence = f"{trouble}; the run continues"
        if sentence not in self._troubles:
            self._troubles = (*self._troubles, sentence)[-_MOST_TROUBLES:]

    def _show(self) -> None:
        self._survive(
            lambda: self.context.observe(
                replace(
                    self._tracker.progress,
                    elapsed_s=time.monotonic() - self._started,
                    stall=self._watch.current,
                    troubles=self._troubles,
                )
            )
        )

    def _show_log(self, node: NodeRun, data: bytes) -> None:
        # What a launcher says when the user stops it would bury what the job said; the log has it. Of a node that is
        # stopped because another one failed, the last words may be the job's own.
        if not (self.stop.count and node.node_rank in self._ending):
            self.context.observe_log(node, data)

    def _look_for_a_stall(self) -> None:
        if self._watch.look():
            # Shown at once: the run may have resumed before the next look.
            self._show()

    def _tell_what_is_missing(self) -> None:
        if not self._is_short and (self._tracker.trouble is not None or self._tracker.missing_bytes):
            self._is_short = True
            what = self._tracker.trouble or "some data from the nodes could not be stored in time"
            self._tell(
                f"{what}; it will be fetched when the run has ended, or with: multinode attach {self.plan.run_id}"
            )

    def _restore(self) -> None:
        self.directory.restore()
        if self.directory.read_run() is None:
            self.directory.write("plan.json", self.plan)

    def _take(self, event: Event) -> None:
        if self._is_barred(event):
            self._barred = event.error
            return
        status = event.message
        if isinstance(status, StatusReport):
            if status.state == "stopping" or status.cause == "stopped":
                self._ending.add(event.node_rank)
            if status.cause == "stopped" and not (status.stopped_by or self._stopping):
                self._stopped_unasked = True
        self._tracker.take(event)
        # What a job says while it is stopped is no progress.
        if not (self._stopping or self._ending):
            self._watch.take(event)

    def _is_barred(self, event: Event) -> bool:
        unmet = self._tracker.node_runs[event.node_rank].state == "waiting"
        return self.options.attach and not self.stop.count and unmet and isinstance(event.error, OURS_TO_FIX)

    def _may_leave(self) -> bool:
        if self._stopping or self._tracker.all_over:
            return False
        if self._barred is not None or (self._leaves_on_stop and self.stop.count):
            return True
        return self.options.leave_when_running and self._tracker.all_running

    @property
    def _only_reads(self) -> bool:
        return self.options.attach and self.options.lease_s is None

    @property
    def _leaves_on_stop(self) -> bool:
        return self.options.leave_on_stop and self.stop.reason != SLOWER_THAN_ONE_NODE

    def _react(self) -> None:
        """Stop all nodes if one fails, the run hangs or the user asks; asking twice shortens the grace period."""
        stops = 0 if self._leaves_on_stop else self.stop.count
        failed = self._tracker.any_failed and not self._only_reads
        hangs = self.options.on_stall == "stop" and self._watch.current is not None
        if hangs and not (self._stopping or stops or failed):
            self._hang = self._watch.current
        wanted = min(2, max(stops, 1 if failed or self._hang else 0))
        if wanted <= self._stopping:
            return
        grace_s = self.options.grace_s if self.stop.grace_s is None else self.stop.grace_s
        grace_s = grace_s if wanted == 1 else 0.0
        self._stopping = wanted
        self._grace_s = grace_s
        self._give_up = time.monotonic() + grace_s + self.options.verify_s
        for session in self._sessions:
            session.stop(grace_s, end=self._give_up, order=self._order)
        self._tracker.note_stopping()

    def _status(self) -> str:
        nodes = self._tracker.node_runs
        if any(node.state == "lost" for node in nodes):
            return "lost"
        if self._hang is not None:
            return "failed"
        others = [node for node in nodes if node.status.cause != "exited" or node.status.failed]
        if not others:
            return "succeeded"
        # One was stopped, not by us: its peers' exceptions are consequences.
        return "stopped" if self.stop.count or self._by_another or self._stopped_unasked else "failed"

    @property
    def _by_another(self) -> bool:
        return any(node.status.stopped_by not in {None, self._order} for node in self._tracker.node_runs)

    def _record(self, status: str) -> Run:
        ended = status != "running"
        failure: Failure | None = None
        if ended and status not in {"succeeded", "stopped"}:
            failure = self._survive(self._first_failure)
        return replace(
            new_run(self.plan, self._started_s, self.context.part_of),
            status=status,
            ended_s=time.time() if ended else None,
            missing_bytes=self._tracker.missing_bytes,
            nodes=self._tracker.node_runs,
            first_failure=failure,
            lease_s=self.options.lease_s,
            kind=self.options.kind,
            detached=self.options.lease_s is None,
            stalls=self._watch.stalls,
            stop_reason=(self.stop.reason or ("stop" if self._by_another else "")) if status == "stopped" else "",
        )

    def _first_failure(self) -> Failure | None:

        from multinode.diagnose.failure import blame_machine, first_failure

        evidence = self._tracker.evidence()
        stop = f"multinode stop {self.plan.run_id}" if self.options.lease_s is None else None
        failure = self._hang_failure() or first_failure(evidence, stop=stop)
        failure = failure and blame_machine(self._tracker.explain(failure), evidence)
        if failure is None or failure.hint is None:
            return failure
        return replace(failure, hint=as_steps(failure.hint, self.cluster.nodes))

    def _hang_failure(self) -> Failure | None:
        """A hang that stopped the run takes precedence over failures caused by the stop."""
        hang = self._hang
        if hang is None:
            return None
        return Failure(
            node=hang.node or self.plan.nodes[0].place.node,
            node_rank=hang.node_rank or 0,
            rank=hang.rank,
            message=hang.message,
            hint=hang.hint,
            log_tail=hang.stack,
            kind="hang",
        )

    def _save(self, run: Run) -> None:
        self.directory.write("run.json", run)
