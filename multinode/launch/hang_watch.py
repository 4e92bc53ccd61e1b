"""Detects a hanging run, has its nodes diagnosed, and names the rank that is behind."""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Sequence

import msgspec

from multinode.cluster.cluster import Cluster, Node
from multinode.launch.session import Chunk, Event, Hello, StatusReport
from multinode.records.plan import LaunchPlan
from multinode.records.run import NodeDiagnosis, Stall, StallRecord, node_run_id
from multinode.records.run_directory import RunDirectory
from multinode.transport.agent import AgentTransport, require_kind
from multinode.transport.base import gather

_WORKER_SAMPLES = "samples/rank-"


class StallClock:
    """Time since the last byte of log or record of a worker on any node.

    It starts when the job runs on every node, or with the first line of log. It stops while a node is out of contact,
    which says nothing about the job.
    """

    def __init__(self, node_count: int) -> None:
        self.generation = 0  # grows with every sign of progress
        self._since: float | None = None
        self._running = [False] * node_count
        self._lost = [False] * node_count

    def take(self, event: Event, now: float) -> None:
        """Record a node's message; `now` in seconds of any monotonic clock."""
        message = event.message
        if event.error is not None:
            self._lost[event.node_rank] = True
        elif isinstance(message, Hello):
            if self._lost[event.node_rank]:
                self._lost[event.node_rank] = False
                self._since = now if self._since is not None else None
        elif isinstance(message, Chunk):
            if message.file == "log" or message.file.startswith(_WORKER_SAMPLES):
                self.generation += 1
                self._since = now
        elif isinstance(message, StatusReport):
            self._running[event.node_rank] = message.state == "running"
            if self._since is None and all(self._running):
                self._since = now

    def silent_s(self, now: float) -> float:
        """Seconds without progress; 0 before the job has started and while a node is out of contact."""
        return now - self._since if self._since is not None and not any(self._lost) else 0.0


# The agent's own deadlines add up to a third of it.
_ANSWER_S = 20.0


class _OwnDiagnosis(NodeDiagnosis, frozen=True, kw_only=True, tag_field="kind", tag="diagnosis"):
    """A node's diagnosis of itself, with its own time, and without its place in the run."""

    node: str = ""
    node_rank: int = 0
    ranks: tuple[int, ...] = ()
    time_s: float


def diagnose(agent: AgentTransport, cluster: Cluster, plan: LaunchPlan) -> tuple[NodeDiagnosis, ...]:
    """The diagnosis of each node, in node-rank order; an unreachable one has the reason."""
    places = {place.node: place for place in plan.places}

    def ask(node: Node) -> NodeDiagnosis:
        place = places[node.name]
        request = {"schema": 1, "run_id": node_run_id(plan.run_id, place.node_rank)}
        # Its channel is closed: stalls are rare.
        stream = agent.open(node, "diagnose", request, _OwnDiagnosis, deadline_s=_ANSWER_S)
        stream.close()
        own = require_kind(stream.first, _OwnDiagnosis, node.name)
        known = {"node": place.node, "node_rank": place.node_rank, "ranks": place.ranks, "error": None}
        return NodeDiagnosis(**{**msgspec.structs.asdict(own), **known})

    answers = gather(cluster.nodes, ask, deadline_s=_ANSWER_S)
    return tuple(
        answers.found.get(place.node)
        or NodeDiagnosis(
            node=place.node,
            node_rank=place.node_rank,
            ranks=place.ranks,
            error=answers.failed[place.node].message,
        )
        for place in plan.places
    )


_FILE = "stall.json"
_MOST_KEPT = 20
_LEAVE_S = 25.0


@dataclasses.dataclass(eq=False)
class StallWatch:
    """Watches one run; its methods are called from the loop that follows the run and do not block.

    Args:
        stall_s: how long no node may make progress; None disables it.
        diagnose: asks all nodes; takes seconds, and is called in a thread.
        write_hint: adapts a hint to how these nodes are reached.

    Attributes:
        stalls: all so far, including those of an earlier controller.
        current: the one in progress; None otherwise.
    """

    stall_s: float | None
    node_count: int
    diagnose: Callable[[], Sequence[NodeDiagnosis]]
    directory: RunDirectory
    write_hint: Callable[[str], str] = str

    def __post_init__(self) -> None:
        self._clock = StallClock(self.node_count)
        before = self.directory.read(_FILE, StallRecord)
        self.stalls: tuple[Stall, ...] = before.stalls if before is not None else ()
        self._nodes = before.nodes if before is not None else ()
        self.current: Stall | None = None
        # The progress after which the nodes were last asked: once per standstill.
        self._asked: int | None = None
        self._answers: queue.Queue[Sequence[NodeDiagnosis] | Exception] = queue.Queue()
        self._thread: threading.Thread | None = None

    def take(self, event: Event) -> None:
        """Record a node's message."""
        before = self._clock.generation
        self._clock.take(event, time.monotonic())
        if self._clock.generation != before:
            self.current = None
            if self.stalls and self.stalls[-1].resumed_s is None:
                resumed = msgspec.structs.replace(self.stalls[-1], resumed_s=time.time())
                self._keep((*self.stalls[:-1], resumed))

    def look(self) -> bool:
        """Start a diagnosis when due, and collect its result; returns whether there is a new stall."""
        if self.stall_s is None:
            return False
        has_hang = not self._answers.empty() and self._fold(self._answers.get())
        generation = self._clock.generation
        idle = self._thread is None or not self._thread.is_alive()
        if idle and self._asked != generation and self._clock.silent_s(time.monotonic()) >= self.stall_s:
            self._asked = generation
            self._thread = threading.Thread(target=self._ask, name="diagnose", daemon=True)
            self._thread.start()
        return has_hang

    def close(self) -> None:
        """Wait for a running diagnosis: nothing of ours stays on a node."""
        if self._thread is not None:
            self._thread.join(_LEAVE_S)

    def _ask(self) -> None:
        try:
            self._answers.put(self.diagnose())
        except Exception as error:  # noqa: BLE001 - a defect; raised in the loop, where it is not lost
            self._answers.put(error)

    def _fold(self, answer: Sequence[NodeDiagnosis] | Exception) -> bool:
        if isinstance(answer, Exception):
            raise answer
        if self._asked != self._clock.generation:
            # The run continued meanwhile.
            return False
        from multinode.diagnose.hang import find_hang

        stall = find_hang(answer, time.time(), self._clock.silent_s(time.monotonic()))
        hint = self.write_hint(stall.hint) if stall.hint is not None else None
        self.current = msgspec.structs.replace(stall, hint=hint)
        self._nodes = tuple(answer)
        self._keep((*self.stalls, self.current)[-_MOST_KEPT:])
        return True

    def _keep(self, stalls: tuple[Stall, ...]) -> None:
        self.stalls = stalls
        self.directory.write(_FILE, StallRecord(stalls=stalls, nodes=self._nodes))
