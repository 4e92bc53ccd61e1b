"""Runs that continue on their nodes: follow them, stop them, read their logs as they grow. Prints nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from multinode.cluster.cluster import Cluster, Node
from multinode.cluster.quoting import as_steps
from multinode.errors import AlreadyFollowed, ContactLost, MultinodeError, NodeFailed, NodeGone, UsageError
from multinode.launch.context import STOP_FILE, ExecuteOptions, Launched, RunContext, StopOrder, StopRequest
from multinode.launch.launch import follow_run
from multinode.launch.node_runs import ANSWER_S, runs_of_node, stop_on_node
from multinode.profile.summary import summarise_run
from multinode.records.run import NodeRun, Run, new_run, node_run_id
from multinode.records.run_directory import LogReader, RunDirectory, list_runs
from multinode.records.status import Status
from multinode.runs.stored_run import StoredRun, launched_runs, load_parts
from multinode.transport.agent import AgentTransport
from multinode.transport.base import Outcomes, gather

_WAIT_S = 0.2


def find_recorded(runs: Path, run_id: str) -> StoredRun:
    """A run of this machine that can be followed again, by its id or the beginning of it; of restarts the last attempt.

    Raises:
        UsageError: there is none, or nothing of it runs on nodes.
    """
    stored = StoredRun.open(runs, run_id)
    whole, last = _restarted(stored)
    if whole is not None and last is not None and stored.run_id == whole.run_id:
        stored = last
    if stored.plan is None or stored.cluster is None:
        ended = ", and has ended" if stored.run.ended_s is not None else ""
        raise UsageError(
            f"run {stored.run_id} consists of other runs{ended}",
            hint=f"show it: multinode show {stored.run_id}; list its runs: multinode runs --all",
        )
    return stored


def whole_of(stored: StoredRun) -> StoredRun | None:
    """The run with restarts whose last attempt this is; None for any other."""
    whole, last = _restarted(stored)
    return whole if last is not None and last.run_id == stored.run_id else None


def _restarted(stored: StoredRun) -> tuple[StoredRun | None, StoredRun | None]:
    """Of a run with restarts, or of an attempt, the whole run and its last attempt."""
    run, root = stored.run, stored.directory.path.parent
    whole_id = stored.run_id if run.has_parts else run.part_of
    # Only ours: another user's directory may have the name of a removed run.
    if whole_id not in {path.name for path in list_runs(root)}:
        return None, None
    whole = StoredRun(RunDirectory(root / whole_id))
    if whole.run.kind != "launch" or not whole.run.has_parts:
        return None, None
    attempts = load_parts(root, whole.run)
    return whole, max(attempts, key=lambda attempt: attempt.run.started_s, default=None)


def nodes_of(stored: StoredRun, cluster: Cluster | None = None) -> Cluster:
    """The nodes of a run in node-rank order, as it was launched or as another hostfile has them.

    Raises:
        UsageError: the hostfile lacks some of them.
    """
    plan, cluster = stored.require_plan(), cluster or stored.cluster
    nodes = {node.name: node for node in cluster.nodes} if cluster is not None else {}
    missing = [place.node for place in plan.places if place.node not in nodes]
    if missing or cluster is None:
        raise UsageError(
            f"{cluster.source if cluster is not None else stored.directory} does not list {', '.join(missing)}, "
            f"where run {plan.run_id} was started",
            hint="use the hostfile that you launched it with: --hosts",
        )
    return msgspec.structs.replace(cluster, nodes=tuple(nodes[place.node] for place in plan.places))


def find_on_nodes(agent: AgentTransport, cluster: Cluster, hostfile: str, runs: Path, run_id: str) -> StoredRun:
    """A run started by another machine, from its nodes; a directory for it is created here.

    Raises:
        UsageError: no node knows it.
        NodeError, NodeFailed: node 0 could not be asked.
    """
    first = cluster.nodes[0]
    answer = runs_of_node(agent, first, node_run_id(run_id, 0))
    if not answer.runs or answer.plan is None:
        hint = as_steps(f"list its runs: ssh {first.name} ls .multinode/runs", [first])
        raise UsageError(f"{first.name} has no run {run_id!r}", hint=hint)
    directory = RunDirectory.create(runs, run_id)
    directory.write("plan.json", answer.plan)
    stored = StoredRun(directory)
    directory.write_cluster(nodes_of(stored, cluster), hostfile)
    there = answer.runs[0]
    run = new_run(answer.plan, there.created_s)
    run = msgspec.structs.replace(run, run_id=run_id, lease_s=there.lease_s, detached=there.lease_s is None)
    directory.write("run.json", run)
    return stored


def look_again(stored: StoredRun, say: Callable[[str], None] = lambda _: None) -> Launched:
    """The run as it is on disk now; `say` is told of long reading."""
    return _summarise(stored, stored.directory.read_run() or stored.run, say)


def attach(stored: StoredRun, context: RunContext, options: ExecuteOptions, cluster: Cluster | None = None) -> Launched:
    """Follow a run to its end, from where an earlier controller left it; lease and kind are the run's own.

    Of an ended run, what could not be stored here is fetched. `cluster` has its nodes, if not as it was launched.
    """
    run = stored.run
    if run.status != "running":
        if run.missing_bytes and not context.stop.count:
            from multinode.launch.missing_data import fetch_missing

            nodes = nodes_of(stored, cluster)
            with stored.directory.lock(), context.stop.heard():
                run = fetch_missing(stored, run, nodes, context)
        return _summarise(stored, run, context.say)
    options = msgspec.structs.replace(
        options,
        lease_s=None if run.detached else run.lease_s,
        kind=run.kind,
        attach=True,
    )
    nodes = nodes_of(stored, cluster)
    return follow_run(stored, nodes, context.with_part_of(run.part_of), options)


def stop(stored: StoredRun, context: RunContext, grace_s: float, cluster: Cluster | None = None) -> Launched:
    """Stop a run on all its nodes and verify that nothing of it is left.

    The nodes decide, and the record follows. If another process follows the run, it records what the nodes say; if it
    restarts the run, it also finds a stop order and starts no other attempt. Otherwise this process follows the run to
    its end. Every node is asked that has not reported the end itself; an unreachable one makes the run lost. `cluster`
    has its nodes, if not as it was launched.
    """
    nodes = nodes_of(stored, cluster)
    whole = whole_of(stored)
    followed = next((one for one in (whole, stored) if one is not None and one.directory.is_locked), None)
    if followed is None:
        request = StopRequest()
        request.ask("stop")
        try:
            launched = attach(stored, context.with_stop(request), ExecuteOptions(grace_s=grace_s), nodes)
        except AlreadyFollowed:
            # Another stop began at the same time.
            followed = stored
        else:
            return _stop_left(launched, stored, nodes, context, grace_s)
    if followed is whole:
        whole.directory.write(STOP_FILE, StopOrder(grace_s))
    launched = _stop_followed(stored, followed.directory, nodes, context, grace_s)
    # An attempt may have begun meanwhile.
    last = _restarted(whole)[1] if whole is not None else None
    return _stop_left(launched, last or stored, nodes, context, grace_s)


def has_ended(stored: StoredRun) -> bool:
    """Whether every node has reported that nothing of the run is left there."""
    if stored.run.status == "running" or stored.directory.is_locked:
        return False
    whole = whole_of(stored)
    return not (whole is not None and whole.directory.is_locked) and not any(map(_is_unclear, stored.run.nodes))


def _is_unclear(node: NodeRun) -> bool:
    return node.state != "ended" or node.status.cause == "not_started" or bool(node.status.processes_left)


def _ask_to_stop(
    ranks: Mapping[str, int], run_id: str, cluster: Cluster, context: RunContext, grace_s: float
) -> Outcomes[Status]:
    def ask(node: Node) -> Status:
        try:
            return stop_on_node(context.agent, node, node_run_id(run_id, ranks[node.name]), grace_s)
        except NodeGone:
            # Slurm has ended everything in its allocation.
            return Status(cause="unknown", processes_left=0)

    reachable = [node for node in cluster.nodes if node.name in ranks]
    return gather(reachable, ask, deadline_s=grace_s + 2 * ANSWER_S)


def _stop_followed(
    stored: StoredRun, directory: RunDirectory, cluster: Cluster, context: RunContext, grace_s: float
) -> Launched:
    ranks = {place.node: place.node_rank for place in stored.require_plan().places}
    answers = _ask_to_stop(ranks, stored.run_id, cluster, context, grace_s)
    try:
        # It may stop an attempt that has just begun.
        return _wait_ended(stored, directory, grace_s + ANSWER_S)
    except MultinodeError as error:
        # Stopping the first node ends the run, and with it the batch job: Slurm may then end our step on another node.
        if not any(answer.processes_left for answer in answers.require().values()):
            error.message += "; none of its processes are left on its nodes"
        raise


def _stop_left(
    launched: Launched, stored: StoredRun, cluster: Cluster, context: RunContext, grace_s: float
) -> Launched:
    unclear = [node for node in launched.run.nodes if _is_unclear(node)]
    if not unclear:
        return launched
    ranks = {node.name: node.node_rank for node in unclear}
    answers = _ask_to_stop(ranks, stored.run_id, cluster, context, grace_s)
    for name in (node.name for node in unclear):
        if name in answers.failed:
            context.say(f"{name}: the run may still be running there: {answers.failed[name].message}")
        elif left := answers.found[name].processes_left:
            context.say(f"{name}: processes of the run that are still running: {left}")
    nodes = tuple(_with_answer(node, answers.found.get(node.name)) for node in launched.run.nodes)
    run = msgspec.structs.replace(launched.run, nodes=nodes)
    if all(node.state == "ended" for node in nodes) and run.status in {"running", "lost"}:
        run = msgspec.structs.replace(run, status="stopped", stop_reason="stop", ended_s=run.ended_s or time.time())
    for directory in dict.fromkeys((launched.directory, stored.directory)):
        record = directory.read_run()
        if record is not None:
            fields = {name: getattr(run, name) for name in ("nodes", "status", "stop_reason", "ended_s")}
            directory.write("run.json", msgspec.structs.replace(record, **fields))
    return msgspec.structs.replace(launched, run=run)


def _with_answer(node: NodeRun, answer: Status | None) -> NodeRun:
    if answer is None:
        return node
    if answer.cause == "unknown":
        # Without a run directory, its processes were found by their environment.
        answer = Status(state="ended", cause="stopped", ended_s=time.time(), processes_left=answer.processes_left)
    return msgspec.structs.replace(node, state="ended", status=answer)


def _wait_ended(stored: StoredRun, directory: RunDirectory, within_s: float) -> Launched:
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        run = directory.read_run()
        if run is not None and run.status != "running":
            return msgspec.structs.replace(_summarise(stored, run), directory=directory)
        time.sleep(_WAIT_S)
    raise MultinodeError(
        f"run {directory.run_id} was told to stop, but its end was not recorded within {within_s:.0f} s"
    )


def _summarise(stored: StoredRun, run: Run, say: Callable[[str], None] = lambda _: None) -> Launched:
    plan = stored.require_plan()
    return Launched(run=run, summary=summarise_run(stored.directory, plan, say), plan=plan, directory=stored.directory)


_OPTIONS = ExecuteOptions()


def choose_logs(
    root: Path, stored: StoredRun, node: str | None, rank: int | None
) -> list[tuple[StoredRun, tuple[NodeRun, ...]]]:
    """The selected logs: a run's own, or those of all runs of a bench, sweep, contrast or try.

    `node` and `rank` are as for `choose_nodes`, in each of the runs.

    Raises:
        UsageError: there is no such node or worker, or no log at all, as for an import.
    """
    run, parts = stored.run, launched_runs(root, stored)
    if parts == [stored]:
        return [(stored, choose_nodes(stored, node, rank))]
    if not parts:
        raise UsageError(
            f"{run.kind} {run.run_id} has no logs, because it has no runs",
            hint=f"see multinode show {run.run_id}",
        )
    # Node ranks are those of the whole run: a part has some of its nodes.
    name = choose_nodes(stored, node, None)[0].name if node is not None else None
    able = [(part, choose_nodes(part, None, rank)) for part in parts if rank is None or rank < part.run.world_size]
    named = [(part, tuple(node for node in nodes if name in {None, node.name})) for part, nodes in able]
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
        places = stored.plan.places if stored.plan is not None else ()
        node = next((str(place.node_rank) for place in places if rank in place.ranks), None)
        if node is None:
            raise UsageError(f"run {run.run_id} has no rank {rank}", hint=f"its ranks are 0 to {run.world_size - 1}")
    chosen = tuple(run_node for run_node in run.nodes if node in {None, run_node.name, str(run_node.node_rank)})
    if not chosen:
        names = ", ".join(run_node.name for run_node in run.nodes)
        raise UsageError(f"run {run.run_id} has no node {node!r}", hint=f"it has: {names}")
    return chosen


def node_logs(stored: StoredRun, nodes: Sequence[NodeRun]) -> Iterator[tuple[str, Iterator[bytes]]]:
    """Name and raw log, in pieces, of each of these nodes."""
    for run_node in nodes:
        yield run_node.name, LogReader(stored.directory, run_node.node_rank).pieces()


def needs_follower(stored: StoredRun) -> bool:
    """Whether the run is in progress and nothing on this machine fetches its logs."""
    return stored.run.status == "running" and not stored.directory.is_locked


def follow_logs(
    stored: StoredRun, ranks: tuple[int, ...], context: RunContext | None, options: ExecuteOptions = _OPTIONS
) -> Iterator[tuple[str, bytes]]:
    """Name of the node, and additions to its log; from the beginning of the logs to the end of the run.

    `context` is for a run that needs a follower, which uses `options` and leaves the run when this ends.
    """
    directory = stored.directory
    follower = _LogFollower(stored, context, options) if context is not None else None
    logs = {rank: LogReader(directory, rank) for rank in ranks}
    names = {node.node_rank: node.name for node in stored.run.nodes}
    try:
        while True:
            # Asked first: what was written before the end is read after it. Another follower may have been killed: then
            # no more arrives, and nothing records the end.
            comes = directory.is_locked if follower is None else follower.is_alive
            run = directory.read_run() if comes else None
            over = run is None or run.status != "running"
            for rank, log in logs.items():
                for data in log.pieces():
                    yield names[rank], data
            if over:
                break
            time.sleep(_WAIT_S)
    finally:
        if follower is not None:
            follower.leave()
    if follower is not None:
        follower.require_all()


class _LogFollower:
    """Follows the run in a thread, for its files."""

    def __init__(self, stored: StoredRun, context: RunContext, options: ExecuteOptions) -> None:
        self._error: BaseException | None = None
        self._stop = context.stop
        self._stored = stored
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
        run = self._stored.directory.read_run()
        failure = run.first_failure if run is not None else None
        if run is None or failure is None:
            return
        if run.status == "lost":
            raise ContactLost(failure.message, node=failure.node, hint=failure.hint)
        if any(node.status.cause == "not_started" for node in run.nodes):
            raise NodeFailed(failure.message, node=failure.node, hint=failure.hint)

    def _follow(self) -> None:
        try:
            attach(self._stored, self._context, self._options)
        except BaseException as error:  # noqa: BLE001 - a defect, too, is raised where the logs are read
            self._error = error
