"""execute: do what a plan says, on all nodes at once, and follow it until nothing of it is left."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable

from msgspec.structs import replace

from multinode.core.cluster.cluster import Cluster
from multinode.core.run.plan import LaunchPlan
from multinode.core.run.progress import RunProgress
from multinode.core.run.quoting import as_steps
from multinode.core.run.run import SLOWER_THAN_ONE_NODE, Failure, Run, Stall, new_run
from multinode.errors import OURS_TO_FIX, MultinodeError
from multinode.launch.failure import blame_machine, first_failure
from multinode.launch.hang_watch import StallWatch, diagnose
from multinode.launch.request import ExecuteOptions, StopRequest, supervise_requests
from multinode.launch.session import Event, EventQueue, NodeSession
from multinode.launch.tracker import Tracker
from multinode.store.run_directory import RunDirectory
from multinode.transport.agent import AgentTransport

__all__ = ["Execution", "Observer"]

Observer = Callable[[RunProgress], None]

_TICK_S = 0.2
_OBSERVE_EVERY_S = 0.25


@dataclasses.dataclass(eq=False, kw_only=True)
class Execution:
    """One execution of a plan, recorded in `directory`: the sessions, their events, and the reactions to them."""

    plan: LaunchPlan
    cluster: Cluster
    agent: AgentTransport
    directory: RunDirectory
    options: ExecuteOptions
    stop: StopRequest
    observe: Observer

    def __post_init__(self) -> None:
        self._events = EventQueue()
        self._tracker = Tracker(self.plan, self.directory, attach=self.options.attach)
        before = self.directory.read("run.json", Run) if self.options.attach else None
        self._started_s = before.started_s if before else time.time()
        self._started = time.monotonic()
        self._watch = StallWatch(
            stall_s=self.options.stall_s,
            node_count=len(self.plan.nodes),
            diagnose=functools.partial(diagnose, self.agent, self.cluster, self.plan),
            directory=self.directory,
            write_hint=functools.partial(as_steps, nodes=self.cluster.nodes),
        )
        # The stall for which the run was stopped.
        self._hang: Stall | None = None
        # Why a run that goes on cannot be followed from here.
        self._barred: MultinodeError | None = None
        self._stopping = 0
        # When nodes were first asked to stop, and when they are waited for no more.
        self._ordered_s = self._give_up = float("inf")
        self._sessions = [
            NodeSession(
                agent=self.agent,
                node=node,
                node_rank=node_rank,
                request=request,
                events=self._events,
                silence_s=self.options.silence_s,
                have=self.directory.offsets(node_rank) if self.options.attach else None,
            )
            for node_rank, (node, request) in enumerate(
                zip(self.cluster.nodes, supervise_requests(self.plan, self.options), strict=True)
            )
        ]

    def run(self) -> Run:
        """Start, follow, stop, record.

        The run ends when every node has verified that its processes are gone, or can no longer be reached. When one
        node fails, or `stop` asks for it, all are stopped. Returns what happened; a failed run is a result, not an
        exception.

        Raises:
            UsageError, NodeError: a run that goes on cannot be followed before this side is put right; it is left so.
        """
        self._save(self._record("running"))
        for session in self._sessions:
            session.start()
        try:
            self._follow()
        except BaseException:
            # This end can go on no longer (its disk is full, say): the nodes are told rather than left to their leases.
            self._stop_all(self.options.grace_s)
            raise
        finally:
            self._watch.close()
        self.observe(self._progress())
        left = self._may_leave()
        if left:
            for session in self._sessions:
                session.leave()
        run = self._record("running" if left else self._status())
        self._save(run)
        if left and self._barred is not None:
            raise self._barred
        return run

    def _follow(self) -> None:
        observed = time.monotonic()
        while not self._tracker.all_over and time.monotonic() < self._give_up and not self._may_leave():
            # Whatever looks at every node is done once for all that has come.
            for event in self._events.take(_TICK_S):
                self._take(event)
            if not self._stopping and self._watch.look():
                # Shown at once: the run may have resumed before the next look.
                self.observe(self._progress())
            self._react()
            for session in self._sessions:
                session.renew_lease()
            now = time.monotonic()
            if now - observed >= _OBSERVE_EVERY_S:
                observed = now
                self.observe(self._progress())
        if not self._may_leave():
            self._tracker.give_up()

    def _take(self, event: Event) -> None:
        if self._is_barred(event):
            self._barred = event.error
            return
        self._tracker.take(event)
        self._watch.take(event)

    def _is_barred(self, event: Event) -> bool:
        """Whether a node of a run that goes on was never met, and cannot be before this side is put right."""
        unmet = self._tracker.node_runs[event.node_rank].state == "waiting"
        return self.options.attach and not self.stop.count and unmet and isinstance(event.error, OURS_TO_FIX)

    def _may_leave(self) -> bool:
        """Whether the run may go on alone now."""
        if self._stopping or self._tracker.all_over:
            return False
        if self._barred is not None or (self._leaves_on_stop and self.stop.count):
            return True
        return self.options.leave_when_running and self._tracker.all_running

    @property
    def _leaves_on_stop(self) -> bool:
        """Whether a request to stop is the user's, to follow no more; what is slower than one node is stopped."""
        return self.options.leave_on_stop and self.stop.reason != SLOWER_THAN_ONE_NODE

    def _react(self) -> None:
        """Stop all nodes when one fails, the run hangs or the user asks; asking twice cuts the grace period short."""
        asked = 0 if self._leaves_on_stop else self.stop.count
        hangs = self.options.on_stall == "stop" and self._watch.current is not None
        if hangs and not (self._stopping or asked or self._tracker.any_failed):
            self._hang = self._watch.current
        wanted = min(2, max(asked, 1 if self._tracker.any_failed or self._hang else 0))
        if wanted <= self._stopping:
            return
        grace_s = self.options.grace_s if self.stop.grace_s is None else self.stop.grace_s
        grace_s = grace_s if wanted == 1 else 0.0
        self._stopping = wanted
        self._stop_all(grace_s)
        self._tracker.note_stopping()

    def _stop_all(self, grace_s: float) -> None:
        self._ordered_s = min(self._ordered_s, time.time())
        self._give_up = time.monotonic() + grace_s + self.options.verify_s
        for session in self._sessions:
            session.stop(grace_s, end=self._give_up)

    def _progress(self) -> RunProgress:
        return replace(self._tracker.progress, elapsed_s=time.monotonic() - self._started, stall=self._watch.current)

    def _status(self) -> str:
        nodes = self._tracker.node_runs
        if any(node.state == "lost" for node in nodes):
            return "lost"
        if self._hang is not None:
            return "failed"
        others = [node for node in nodes if node.cause != "exited" or node.exit_code != 0 or node.signal is not None]
        if not others:
            return "succeeded"
        # All of them stopped and nobody here asked for it: another controller did.
        stopped = self.stop.count or all(node.cause == "stopped" for node in others) or self._stopped_before()
        return "stopped" if stopped else "failed"

    def _stopped_before(self) -> bool:
        """Whether a node was stopped before we asked any to: what its peers raised then is a consequence."""
        return any(
            node.run.ended_s - (node.clock_offset_s or 0.0) < self._ordered_s
            for node in self._tracker.evidence()
            if node.run.cause == "stopped" and node.run.ended_s is not None
        )

    def _record(self, status: str) -> Run:
        ended = status != "running"
        failure = self._first_failure() if ended and status not in {"succeeded", "stopped"} else None
        return replace(
            new_run(self.plan, self._started_s),
            status=status,
            ended_s=time.time() if ended else None,
            nodes=self._tracker.node_runs,
            first_failure=failure,
            lease_s=self.options.lease_s,
            kind=self.options.kind,
            detached=self.options.lease_s is None,
            stalls=self._watch.stalls,
            stop_reason=self.stop.reason if status == "stopped" else "",
        )

    def _first_failure(self) -> Failure | None:
        evidence = self._tracker.evidence()
        stop = f"multinode stop {self.plan.run_id}" if self.options.lease_s is None else None
        failure = self._hang_failure() or first_failure(evidence, stop=stop)
        failure = failure and blame_machine(self._tracker.explain(failure), evidence)
        if failure is None or failure.hint is None:
            return failure
        return replace(failure, hint=as_steps(failure.hint, self.cluster.nodes))

    def _hang_failure(self) -> Failure | None:
        """A hang for which the run was stopped comes before whatever the stop brought about."""
        hang = self._hang
        if hang is None:
            return None
        return Failure(
            node=hang.node or self.plan.nodes[0].node,
            node_rank=hang.node_rank or 0,
            rank=hang.rank,
            message=hang.message,
            hint=hang.hint,
            log_tail=hang.stack,
            kind="hang",
        )

    def _save(self, run: Run) -> None:
        self.directory.write("run.json", run)
