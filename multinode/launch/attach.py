"""attach, stop: runs that continue on their nodes. Prints nothing."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from multinode.cluster.cluster import Cluster, Node
from multinode.cluster.hostfile import parse_hostfile
from multinode.cluster.quoting import as_steps
from multinode.errors import MultinodeError, NodeGone, UsageError
from multinode.launch.context import Launched, RunContext
from multinode.launch.launch import follow_run
from multinode.launch.node_runs import ANSWER_S, NodeEnd, runs_of_node, stop_on_node
from multinode.launch.request import STOP_FILE, ExecuteOptions, StopOrder, StopRequest
from multinode.launch.runs import PLAN_FILE, summarise_run
from multinode.records.plan import LaunchPlan
from multinode.records.run import NodeRun, Run, new_run, node_run_id
from multinode.records.run_directory import RunDirectory, list_runs
from multinode.transport.agent import AgentTransport
from multinode.transport.base import Outcomes, gather
from multinode.units import format_count

_WAIT_S = 0.2


class Known(msgspec.Struct, frozen=True, kw_only=True):
    """A run that can be followed again."""

    run: Run
    plan: LaunchPlan
    cluster: Cluster
    directory: RunDirectory
    whole: RunDirectory | None = None  # for the last attempt of a run with restarts, that run's directory


def find_known(runs: Path, run_id: str) -> Known:
    """A run of this machine, by its id or the beginning of it.

    Raises:
        UsageError: there is none, or nothing of it runs on nodes.
    """
    directory = RunDirectory.open(runs, run_id)
    whole, last = _restarted(directory)
    if whole is not None and last is not None and directory.run_id == whole.run_id:
        directory = last
    run = directory.read("run.json", Run)
    plan = directory.read(PLAN_FILE, LaunchPlan)
    hostfile = directory.path / "hostfile.txt"
    if run is None or plan is None or not hostfile.is_file():
        raise UsageError(f"run {directory.run_id} has no nodes", hint="it consists of other runs: multinode runs")
    cluster = parse_hostfile(hostfile.read_text(), str(hostfile))
    is_last = last is not None and directory.run_id == last.run_id
    cluster = _in_order(cluster, plan)
    return Known(run=run, plan=plan, cluster=cluster, directory=directory, whole=whole if is_last else None)


def _restarted(directory: RunDirectory) -> tuple[RunDirectory | None, RunDirectory | None]:
    # Only ours: another user's directory may have the name of a removed run.
    ours = {path.name: path for path in list_runs(directory.path.parent)}
    for run_id in (directory.run_id, re.sub(r"-\d+$", "", directory.run_id)):
        whole = RunDirectory(directory.path.with_name(run_id))
        run = whole.read("run.json", Run) if run_id in ours else None
        if run is not None and run.kind == "launch" and not (whole.path / PLAN_FILE).is_file():
            number = re.compile(re.escape(run_id) + r"-(\d+)")
            attempts = [(int(found[1]), path) for name, path in ours.items() if (found := number.fullmatch(name))]
            return whole, RunDirectory(max(attempts)[1]) if attempts else None
    return None, None


def find_on_nodes(agent: AgentTransport, cluster: Cluster, hostfile: str, runs: Path, run_id: str) -> Known:
    """A run started by another machine, from its nodes; a directory for it is created here.

    Raises:
        UsageError: no node knows it.
        NodeError, NodeFailed: node 0 could not be asked.
    """
    first = cluster.nodes[0]
    found = runs_of_node(agent, first, node_run_id(run_id, 0))
    if not found.runs or found.plan is None:
        hint = as_steps(f"list its runs: ssh {first.name} ls .multinode/runs", [first])
        raise UsageError(f"{first.name} knows no run {run_id!r}", hint=hint)
    directory = RunDirectory.create(runs, run_id)
    nodes = _in_order(cluster, found.plan)
    there = found.runs[0]
    run = new_run(found.plan, there.created_s)
    run = msgspec.structs.replace(run, run_id=run_id, lease_s=there.lease_s, detached=there.lease_s is None)
    directory.write_cluster(nodes, hostfile)
    directory.write("plan.json", found.plan)
    directory.write("run.json", run)
    return Known(run=run, plan=found.plan, cluster=nodes, directory=directory)


def with_hosts(known: Known, cluster: Cluster) -> Known:
    """The run, with its nodes from another hostfile."""
    return msgspec.structs.replace(known, cluster=_in_order(cluster, known.plan))


def look_again(known: Known) -> Launched:
    """The run as it is on disk now."""
    return _summarise(known, known.directory.read("run.json", Run) or known.run)


def attach(known: Known, context: RunContext, options: ExecuteOptions) -> Launched:
    """Follow a run to its end, from where an earlier controller left it; lease and kind are the run's own."""
    run = known.run
    if run.status != "running":
        return _summarise(known, run, context.say)
    options = msgspec.structs.replace(
        options,
        lease_s=None if run.detached else run.lease_s,
        kind=run.kind,
        attach=True,
    )
    return follow_run(context, known.plan, known.cluster, known.directory, options)


def stop(known: Known, context: RunContext, grace_s: float) -> Launched:
    """Stop a run on all its nodes and verify that nothing of it is left.

    If another process follows it, that process records the end; this one waits for it. A process that restarts the
    run finds a stop order: it stops the attempt and starts no other. Whatever is recorded, every node is asked that has
    not reported the end itself; an unreachable one makes the run lost.
    """
    if known.whole is not None and known.whole.is_locked:
        known.whole.write(STOP_FILE, StopOrder(grace_s))
        # That process stops the current attempt; if it fails to, we do.
        with contextlib.suppress(MultinodeError):
            launched = _wait_ended(known, known.whole, grace_s + 2 * ANSWER_S)
            last = _restarted(known.whole)[1] or known.directory
            return _stop_left(launched, msgspec.structs.replace(known, directory=last), context, grace_s)
        return _stop_followed(known, known.whole, context, grace_s)
    request = StopRequest()
    request.ask("stop")
    try:
        launched = attach(known, context.with_stop(request), ExecuteOptions(grace_s=grace_s))
    except UsageError:
        if not known.directory.is_locked:
            raise
        launched = _stop_followed(known, known.directory, context, grace_s)
    return _stop_left(launched, known, context, grace_s)


def _ask_to_stop(ranks: Mapping[str, int], known: Known, context: RunContext, grace_s: float) -> Outcomes[NodeEnd]:
    def ask(node: Node) -> NodeEnd:
        run_id = node_run_id(known.directory.run_id, ranks[node.name])
        try:
            return stop_on_node(context.agent, node, run_id, grace_s)
        except NodeGone:
            # Slurm has ended everything in its allocation.
            return NodeEnd(cause="unknown", processes_left=0)

    asked = [node for node in known.cluster.nodes if node.name in ranks]
    return gather(asked, ask, deadline_s=grace_s + 2 * ANSWER_S)


def _stop_followed(known: Known, directory: RunDirectory, context: RunContext, grace_s: float) -> Launched:
    answers = _ask_to_stop({node.node: node.node_rank for node in known.plan.nodes}, known, context, grace_s)
    try:
        return _wait_ended(known, directory, ANSWER_S)
    except MultinodeError as error:
        # Stopping the first node ends the run, and with it the batch job: Slurm may then end our step on another node.
        if not any(answer.processes_left for answer in answers.require()):
            error.message += "; nothing of it is left on its nodes"
        raise


def _stop_left(launched: Launched, known: Known, context: RunContext, grace_s: float) -> Launched:
    unclear = [
        node
        for node in launched.run.nodes
        if node.state != "ended" or node.cause == "not_started" or node.processes_left
    ]
    if not unclear:
        return launched
    outcomes = _ask_to_stop({node.name: node.node_rank for node in unclear}, known, context, grace_s)
    for outcome in outcomes:
        if outcome.error is not None:
            context.say(f"{outcome.node.name}: it may still run there: {outcome.error.message}")
        elif outcome.value.processes_left:
            context.say(
                f"{outcome.node.name}: {format_count(outcome.value.processes_left, 'process')} of it still running"
            )
    answers = {outcome.node.name: outcome.value for outcome in outcomes if outcome.error is None}
    nodes = tuple(_with_answer(node, answers.get(node.name)) for node in launched.run.nodes)
    run = msgspec.structs.replace(launched.run, nodes=nodes)
    if all(node.state == "ended" for node in nodes) and run.status in {"running", "lost"}:
        run = msgspec.structs.replace(run, status="stopped", stop_reason="stop", ended_s=run.ended_s or time.time())
    for directory in dict.fromkeys((launched.directory, known.directory)):
        _record_end(directory, run)
    return msgspec.structs.replace(launched, run=run)


def _record_end(directory: RunDirectory, run: Run) -> None:
    recorded = directory.read("run.json", Run)
    if recorded is not None:
        fields = {name: getattr(run, name) for name in ("nodes", "status", "stop_reason", "ended_s")}
        directory.write("run.json", msgspec.structs.replace(recorded, **fields))


def _with_answer(node: NodeRun, answer: NodeEnd | None) -> NodeRun:
    if answer is None:
        return node
    if answer.cause == "unknown":
        # Without a run directory, its processes were found by their environment.
        answer = NodeEnd(cause="stopped", ended_s=time.time(), processes_left=answer.processes_left)
    return msgspec.structs.replace(node, state="ended", **msgspec.structs.asdict(answer))


def _wait_ended(known: Known, directory: RunDirectory, within_s: float) -> Launched:
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        run = directory.read("run.json", Run)
        if run is not None and run.status != "running":
            return msgspec.structs.replace(_summarise(known, run), directory=directory)
        time.sleep(_WAIT_S)
    raise MultinodeError(
        f"run {directory.run_id} was told to stop, but its end was not recorded within {within_s:.0f} s"
    )


def _summarise(known: Known, run: Run, say: Callable[[str], None] = lambda _: None) -> Launched:
    summary = summarise_run(known.directory, known.plan, say)
    return Launched(run=run, summary=summary, plan=known.plan, directory=known.directory)


def _in_order(cluster: Cluster, plan: LaunchPlan) -> Cluster:
    """The nodes of the plan, in its order."""
    nodes = {node.name: node for node in cluster.nodes}
    missing = [node.node for node in plan.nodes if node.node not in nodes]
    if missing:
        raise UsageError(
            f"{cluster.source} does not list {', '.join(missing)}, where run {plan.run_id} is",
            hint="name the hostfile that you launched it with: --hosts",
        )
    return msgspec.structs.replace(cluster, nodes=tuple(nodes[node.node] for node in plan.nodes))
