"""Runs that continue on their nodes: follow them, stop them, read their logs as they grow. Prints nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from multinode.cluster.cluster import Cluster, Node
from multinode.cluster.hostfile import parse_hostfile
from multinode.cluster.quoting import as_steps
from multinode.errors import ContactLost, MultinodeError, NodeFailed, NodeGone, UsageError
from multinode.launch.context import STOP_FILE, ExecuteOptions, Launched, RunContext, StopOrder, StopRequest
from multinode.launch.launch import follow_run
from multinode.launch.node_runs import ANSWER_S, runs_of_node, stop_on_node
from multinode.launch.session import Stopped, with_status
from multinode.profile.summary import summarise_run
from multinode.records.plan import LaunchPlan
from multinode.records.run import NodeRun, Run, new_run, node_run_id
from multinode.records.run_directory import RunDirectory, list_runs
from multinode.runs.stored_run import StoredRun, launched_runs, load_parts
from multinode.transport.agent import AgentTransport
from multinode.transport.base import Outcomes, gather
from multinode.units import format_count

_WAIT_S = 0.2


class RecordedRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run that can be followed again."""

    run: Run
    plan: LaunchPlan
    cluster: Cluster
    directory: RunDirectory
    whole: RunDirectory | None = None  # for the last attempt of a run with restarts, that run's directory


def find_recorded(runs: Path, run_id: str) -> RecordedRun:
    """A run of this machine, by its id or the beginning of it.

    Raises:
        UsageError: there is none, or nothing of it runs on nodes.
    """
    directory = RunDirectory.open(runs, run_id)
    whole, last = _restarted(directory)
    if whole is not None and last is not None and directory.run_id == whole.run_id:
        directory = last
    run = directory.read_run()
    plan = StoredRun(directory).plan
    hostfile = directory.path / "hostfile.txt"
    if run is None or plan is None or not hostfile.is_file():
        ended = ", and has ended" if run is not None and run.ended_s is not None else ""
        raise UsageError(
            f"run {directory.run_id} consists of other runs{ended}",
            hint=f"what it is: multinode show {directory.run_id}; its runs: multinode runs --all",
        )
    cluster = parse_hostfile(hostfile.read_text(), str(hostfile))
    is_last = last is not None and directory.run_id == last.run_id
    cluster = _in_order(cluster, plan)
    return RecordedRun(run=run, plan=plan, cluster=cluster, directory=directory, whole=whole if is_last else None)


def _restarted(directory: RunDirectory) -> tuple[RunDirectory | None, RunDirectory | None]:
    """Of a run with restarts, or of an attempt, the whole run and its last attempt."""
    run, root = directory.read_run(), directory.path.parent
    whole_id = run.part_of if run is not None and not run.has_parts else directory.run_id
    # Only ours: another user's directory may have the name of a removed run.
    if whole_id not in {path.name for path in list_runs(root)}:
        return None, None
    whole = RunDirectory(root / whole_id)
    whole_run = whole.read_run()
    if whole_run is None or whole_run.kind != "launch" or not whole_run.has_parts:
        return None, None
    attempts = load_parts(root, whole_run)
    last = max(attempts, key=lambda attempt: attempt.run.started_s, default=None)
    return whole, last.directory if last is not None else None


def find_on_nodes(agent: AgentTransport, cluster: Cluster, hostfile: str, runs: Path, run_id: str) -> RecordedRun:
    """A run started by another machine, from its nodes; a directory for it is created here.

    Raises:
        UsageError: no node knows it.
        NodeError, NodeFailed: node 0 could not be asked.
    """
    first = cluster.nodes[0]
    answer = runs_of_node(agent, first, node_run_id(run_id, 0))
    if not answer.runs or answer.plan is None:
        hint = as_steps(f"list its runs: ssh {first.name} ls .multinode/runs", [first])
        raise UsageError(f"{first.name} knows no run {run_id!r}", hint=hint)
    directory = RunDirectory.create(runs, run_id)
    nodes = _in_order(cluster, answer.plan)
    there = answer.runs[0]
    run = new_run(answer.plan, there.created_s)
    run = msgspec.structs.replace(run, run_id=run_id, lease_s=there.lease_s, detached=there.lease_s is None)
    directory.write_cluster(nodes, hostfile)
    directory.write("plan.json", answer.plan)
    directory.write("run.json", run)
    return RecordedRun(run=run, plan=answer.plan, cluster=nodes, directory=directory)


def with_hosts(recorded: RecordedRun, cluster: Cluster) -> RecordedRun:
    """The run, with its nodes from another hostfile."""
    return msgspec.structs.replace(recorded, cluster=_in_order(cluster, recorded.plan))


def look_again(recorded: RecordedRun, say: Callable[[str], None] = lambda _: None) -> Launched:
    """The run as it is on disk now; `say` is told of long reading."""
    return _summarise(recorded, recorded.directory.read_run() or recorded.run, say)


def attach(recorded: RecordedRun, context: RunContext, options: ExecuteOptions) -> Launched:
    """Follow a run to its end, from where an earlier controller left it; lease and kind are the run's own."""
    run = recorded.run
    if run.status != "running":
        return _summarise(recorded, run, context.say)
    options = msgspec.structs.replace(
        options,
        lease_s=None if run.detached else run.lease_s,
        kind=run.kind,
        attach=True,
    )
    return follow_run(context.with_part_of(run.part_of), recorded.plan, recorded.cluster, recorded.directory, options)


def stop(recorded: RecordedRun, context: RunContext, grace_s: float) -> Launched:
    """Stop a run on all its nodes and verify that nothing of it is left.

    The nodes decide, and the record follows. If another process follows the run, it records what the nodes say; if it
    restarts the run, it also finds a stop order and starts no other attempt. Otherwise this process follows the run to
    its end. Every node is asked that has not reported the end itself; an unreachable one makes the run lost.
    """
    followed = next((one for one in (recorded.whole, recorded.directory) if one is not None and one.is_locked), None)
    if followed is None:
        request = StopRequest()
        request.ask("stop")
        launched = attach(recorded, context.with_stop(request), ExecuteOptions(grace_s=grace_s))
    else:
        if followed is recorded.whole:
            followed.write(STOP_FILE, StopOrder(grace_s))
        launched = _stop_followed(recorded, followed, context, grace_s)
        if followed is recorded.whole:
            # An attempt may have begun meanwhile.
            recorded = msgspec.structs.replace(recorded, directory=_restarted(followed)[1] or recorded.directory)
    return _stop_left(launched, recorded, context, grace_s)


def has_ended(recorded: RecordedRun) -> bool:
    """Whether every node has reported that nothing of the run is left there."""
    whole = recorded.whole
    if recorded.run.status == "running" or recorded.directory.is_locked or (whole is not None and whole.is_locked):
        return False
    return not any(map(_is_unclear, recorded.run.nodes))


def _is_unclear(node: NodeRun) -> bool:
    return node.state != "ended" or node.cause == "not_started" or bool(node.processes_left)


def _ask_to_stop(
    ranks: Mapping[str, int], recorded: RecordedRun, context: RunContext, grace_s: float
) -> Outcomes[Stopped]:
    def ask(node: Node) -> Stopped:
        run_id = node_run_id(recorded.directory.run_id, ranks[node.name])
        try:
            return stop_on_node(context.agent, node, run_id, grace_s)
        except NodeGone:
            # Slurm has ended everything in its allocation.
            return Stopped(state="ended", cause="unknown", processes_left=0)

    reachable = [node for node in recorded.cluster.nodes if node.name in ranks]
    return gather(reachable, ask, deadline_s=grace_s + 2 * ANSWER_S)


def _stop_followed(recorded: RecordedRun, directory: RunDirectory, context: RunContext, grace_s: float) -> Launched:
    answers = _ask_to_stop({place.node: place.node_rank for place in recorded.plan.places}, recorded, context, grace_s)
    try:
        # It may stop an attempt that has just begun.
        return _wait_ended(recorded, directory, grace_s + ANSWER_S)
    except MultinodeError as error:
        # Stopping the first node ends the run, and with it the batch job: Slurm may then end our step on another node.
        if not any(answer.processes_left for answer in answers.require().values()):
            error.message += "; nothing of it is left on its nodes"
        raise


def _stop_left(launched: Launched, recorded: RecordedRun, context: RunContext, grace_s: float) -> Launched:
    unclear = [node for node in launched.run.nodes if _is_unclear(node)]
    if not unclear:
        return launched
    answers = _ask_to_stop({node.name: node.node_rank for node in unclear}, recorded, context, grace_s)
    for name in (node.name for node in unclear):
        if name in answers.failed:
            context.say(f"{name}: it may still run there: {answers.failed[name].message}")
        elif left := answers.found[name].processes_left:
            context.say(f"{name}: {format_count(left, 'process')} of it still running")
    nodes = tuple(_with_answer(node, answers.found.get(node.name)) for node in launched.run.nodes)
    run = msgspec.structs.replace(launched.run, nodes=nodes)
    if all(node.state == "ended" for node in nodes) and run.status in {"running", "lost"}:
        run = msgspec.structs.replace(run, status="stopped", stop_reason="stop", ended_s=run.ended_s or time.time())
    for directory in dict.fromkeys((launched.directory, recorded.directory)):
        stored = directory.read_run()
        if stored is not None:
            fields = {name: getattr(run, name) for name in ("nodes", "status", "stop_reason", "ended_s")}
            directory.write("run.json", msgspec.structs.replace(stored, **fields))
    return msgspec.structs.replace(launched, run=run)


def _with_answer(node: NodeRun, answer: Stopped | None) -> NodeRun:
    if answer is None:
        return node
    if answer.cause == "unknown":
        # Without a run directory, its processes were found by their environment.
        answer = msgspec.structs.replace(answer, cause="stopped", ended_s=time.time())
    return with_status(node, answer)


def _wait_ended(recorded: RecordedRun, directory: RunDirectory, within_s: float) -> Launched:
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        run = directory.read_run()
        if run is not None and run.status != "running":
            return msgspec.structs.replace(_summarise(recorded, run), directory=directory)
        time.sleep(_WAIT_S)
    raise MultinodeError(
        f"run {directory.run_id} was told to stop, but its end was not recorded within {within_s:.0f} s"
    )


def _summarise(recorded: RecordedRun, run: Run, say: Callable[[str], None] = lambda _: None) -> Launched:
    summary = summarise_run(recorded.directory, recorded.plan, say)
    return Launched(run=run, summary=summary, plan=recorded.plan, directory=recorded.directory)


def _in_order(cluster: Cluster, plan: LaunchPlan) -> Cluster:
    """The nodes of the plan, in its order."""
    nodes = {node.name: node for node in cluster.nodes}
    missing = [place.node for place in plan.places if place.node not in nodes]
    if missing:
        raise UsageError(
            f"{cluster.source} does not list {', '.join(missing)}, where run {plan.run_id} is",
            hint="name the hostfile that you launched it with: --hosts",
        )
    return msgspec.structs.replace(cluster, nodes=tuple(nodes[node.place.node] for node in plan.nodes))


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
    run, parts = stored.run, launched_runs(root, stored)
    if parts == [stored]:
        return [(stored, choose_nodes(stored, node, rank))]
    if not parts:
        raise UsageError(
            f"run {run.run_id} has no logs: it is of kind {run.kind} and has no runs",
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
        yield run_node.name, _read(stored.directory.log_path(run_node.node_rank), 0)


def needs_follower(recorded: RecordedRun) -> bool:
    """Whether the run is in progress and nothing on this machine fetches its logs."""
    return recorded.run.status == "running" and not recorded.directory.is_locked


def follow_logs(
    recorded: RecordedRun, ranks: tuple[int, ...], context: RunContext | None, options: ExecuteOptions = _OPTIONS
) -> Iterator[tuple[str, bytes]]:
    """Name of the node, and additions to its log; from the beginning of the logs to the end of the run.

    `context` is for a run that needs a follower, which uses `options` and leaves the run when this ends.
    """
    directory = recorded.directory
    follower = _LogFollower(recorded, context, options) if context is not None else None
    places = dict.fromkeys(ranks, 0)
    names = {node.node_rank: node.name for node in recorded.run.nodes}
    try:
        while True:
            # Asked first: what was written before the end is read after it. Another follower may have been killed: then
            # no more arrives, and nothing records the end.
            comes = directory.is_locked if follower is None else follower.is_alive
            run = directory.read_run() if comes else None
            over = run is None or run.status != "running"
            for rank in ranks:
                for data in _read(directory.log_path(rank), places[rank]):
                    places[rank] += len(data)
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

    def __init__(self, recorded: RecordedRun, context: RunContext, options: ExecuteOptions) -> None:
        self._error: BaseException | None = None
        self._stop = context.stop
        self._recorded = recorded
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
        run = self._recorded.directory.read_run()
        failure = run.first_failure if run is not None else None
        if run is None or failure is None:
            return
        if run.status == "lost":
            raise ContactLost(failure.message, node=failure.node, hint=failure.hint)
        if any(node.cause == "not_started" for node in run.nodes):
            raise NodeFailed(failure.message, node=failure.node, hint=failure.hint)

    def _follow(self) -> None:
        try:
            attach(self._recorded, self._context, self._options)
        except BaseException as error:  # noqa: BLE001 - a defect, too, is raised where the logs are read
            self._error = error


def _read(path: Path, offset: int) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            while data := file.read(_CHUNK_BYTES):
                yield data
    except FileNotFoundError:
        return
