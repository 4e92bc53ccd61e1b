"""logs: selects logs, and follows them as they grow, whatever process on this machine writes them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from multinode.errors import ContactLost, NodeFailed, UsageError
from multinode.launch.attach import Known, attach
from multinode.launch.context import RunContext
from multinode.launch.request import ExecuteOptions
from multinode.launch.runs import PLAN_FILE, StoredRun, load_parts
from multinode.records.plan import LaunchPlan
from multinode.records.run import NodeRun, Run
from multinode.records.run_directory import RunDirectory

_POLL_S = 0.2
_CHUNK_BYTES = 1 << 16
_OPTIONS = ExecuteOptions()


def choose_logs(
    root: Path, stored: StoredRun, node: str | None, rank: int | None
) -> list[tuple[StoredRun, tuple[NodeRun, ...]]]:
    """The selected logs: a run's own, or those of all runs of a bench, sweep, contrast or try.

    `node` and `rank` are as for `choose_nodes`, in each of the runs.

    Raises:
        UsageError: there is no such node or worker, or no log at all, as for an import.
    """
    if (stored.directory.path / PLAN_FILE).is_file():
        return [(stored, choose_nodes(stored, node, rank))]
    run = stored.run
    parts = load_parts(root, run)
    if not parts:
        raise UsageError(
            f"run {run.run_id} has no logs: it is of kind {run.kind} and has no runs",
            hint=f"see multinode show {run.run_id}",
        )
    # Node ranks are those of the whole run: a part has some of its nodes.
    name = choose_nodes(stored, node, None)[0].name if node is not None else None
    able = [(part, choose_nodes(part, None, rank)) for part in parts if rank is None or rank < part.run.world_size]
    named = [(part, tuple(one for one in nodes if name in {None, one.name})) for part, nodes in able]
    chosen = [(part, nodes) for part, nodes in named if nodes]
    if not chosen:
        raise UsageError(f"no run of {run.run_id} has this node and rank", hint=f"see multinode show {run.run_id}")
    return chosen


def choose_nodes(stored: StoredRun, node: str | None, rank: int | None) -> tuple[NodeRun, ...]:
    """All nodes of a run, or one, by name, by node rank, or by the rank of a worker on it.

    Raises:
        UsageError: the run has no such node or worker.
    """
    run = stored.run
    if rank is not None:
        plan = stored.directory.read(PLAN_FILE, LaunchPlan)
        node = next((str(one.node_rank) for one in plan.nodes if rank in one.ranks), None) if plan is not None else None
        if node is None:
            raise UsageError(f"run {run.run_id} has no rank {rank}", hint=f"its ranks are 0 to {run.world_size - 1}")
    chosen = tuple(found for found in run.nodes if node in {None, found.name, str(found.node_rank)})
    if not chosen:
        names = ", ".join(found.name for found in run.nodes)
        raise UsageError(f"run {run.run_id} has no node {node!r}", hint=f"it has: {names}")
    return chosen


def node_logs(stored: StoredRun, nodes: Sequence[NodeRun]) -> Iterator[tuple[str, Iterator[bytes]]]:
    """Name and raw log, in pieces, of each of these nodes."""
    for found in nodes:
        yield found.name, _read(stored.directory.log_path(found.node_rank), 0)


def needs_follower(known: Known) -> bool:
    """Whether the run is in progress and nothing on this machine fetches its logs."""
    return known.run.status == "running" and not known.directory.is_locked


def follow_logs(
    known: Known, ranks: tuple[int, ...], context: RunContext | None, options: ExecuteOptions = _OPTIONS
) -> Iterator[tuple[str, bytes]]:
    """Name of the node, and additions to its log; from the beginning of the logs to the end of the run.

    `context` is for a run that needs a follower, which uses `options` and leaves the run when this ends.
    """
    directory = known.directory
    follower = _LogFollower(known, context, options) if context is not None else None
    places = dict.fromkeys(ranks, 0)
    names = {node.node_rank: node.name for node in known.run.nodes}
    try:
        while True:
            # Asked first: what was written before the end is read after it. Another follower may have been killed: then
            # no more arrives, and nothing records the end.
            comes = directory.is_locked if follower is None else follower.is_alive
            over = not (comes and _goes_on(directory))
            for rank in ranks:
                for data in _read(directory.log_path(rank), places[rank]):
                    places[rank] += len(data)
                    yield names[rank], data
            if over:
                break
            time.sleep(_POLL_S)
    finally:
        if follower is not None:
            follower.leave()
    if follower is not None:
        follower.require_all()


class _LogFollower:
    """Follows the run in a thread, for its files."""

    def __init__(self, known: Known, context: RunContext, options: ExecuteOptions) -> None:
        self._error: BaseException | None = None
        self._stop = context.stop
        self._known = known
        self._context = context
        self._options = msgspec.structs.replace(options, leave_on_stop=True)
        self._thread = threading.Thread(target=self._follow, name="follow-logs", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def leave(self) -> None:
        self._stop.ask("leave")
        self._thread.join(self._options.grace_s + self._options.verify_s)

    def require_all(self) -> None:
        """Check that every node was followed to its end, by the run's record: the thread may still be busy.

        Raises:
            MultinodeError: one was not, or following has failed.
        """
        if self._error is not None:
            raise self._error
        run = self._known.directory.read("run.json", Run)
        failure = run.first_failure if run is not None else None
        if run is None or failure is None:
            return
        if run.status == "lost":
            raise ContactLost(failure.message, node=failure.node, hint=failure.hint)
        if any(node.cause == "not_started" for node in run.nodes):
            raise NodeFailed(failure.message, node=failure.node, hint=failure.hint)

    def _follow(self) -> None:
        try:
            attach(self._known, self._context, self._options)
        except BaseException as error:  # noqa: BLE001 - a defect, too, is raised where the logs are read
            self._error = error


def _goes_on(directory: RunDirectory) -> bool:
    run = directory.read("run.json", Run)
    return run is not None and run.status == "running"


def _read(path: Path, offset: int) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            while data := file.read(_CHUNK_BYTES):
                yield data
    except FileNotFoundError:
        return
