"""Runs as their nodes know them: find, stop and remove them. Prints nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from multinode.cluster.cluster import Cluster, Node
from multinode.errors import UsageError
from multinode.launch.context import Launched, RunContext
from multinode.levers.balance import Balance
from multinode.records.plan import LaunchPlan
from multinode.records.run import match_runs, node_run_id, parse_node_run_id
from multinode.records.run_directory import RunDirectory, list_runs
from multinode.records.status import Status
from multinode.runs.stored_run import StoredRun
from multinode.transport.agent import AgentTransport
from multinode.transport.base import Outcomes, gather

ANSWER_S = 30.0
"""How long a node may take to say what it knows of runs."""
_SHOWN = 3


class NodeRunEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A run's directory on a node."""

    run_id: str = ""  # `ID.RANK`
    machine: str | None = None  # the host name of another machine that it belongs to, where nodes share a home
    size_bytes: int = 0
    created_s: float = 0.0
    lease_s: float | None = None


class NodeRuns(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="runs"):
    """Runs of which a node knows."""

    runs: tuple[NodeRunEntry, ...]
    living: tuple[str, ...] = ()  # of which processes live
    plan: LaunchPlan | None = None  # of the run that was asked for, on its node 0

    @property
    def names(self) -> frozenset[str]:
        """Runs with a directory there, and runs with live processes; not those of other machines."""
        return frozenset((*(run.run_id for run in self.runs if run.machine is None), *self.living))


class Stopped(Status, frozen=True, kw_only=True, tag_field="kind", tag="stopped"):
    """The last status of a run that was told to stop."""


def runs_of_node(agent: AgentTransport, node: Node, run_id: str | None = None) -> NodeRuns:
    """The runs of a node, or the one of this name there."""
    return agent.call(node, "runs", {"schema": 1, "run_id": run_id}, NodeRuns, deadline_s=ANSWER_S)


def runs_of_nodes(agent: AgentTransport, cluster: Cluster) -> Outcomes[NodeRuns]:
    """The runs of each node.

    Raises:
        NodeError, NodeFailed: no node could be asked.
    """
    answers = agent.call_all(cluster.nodes, "runs", {"schema": 1, "run_id": None}, NodeRuns, deadline_s=ANSWER_S)
    if not answers.found:
        answers.require()
    return answers


def stop_on_node(
    agent: AgentTransport, node: Node, run_id: str, grace_s: float, *, answer_s: float = ANSWER_S
) -> Status:
    """Stop the run of this name there; its last status, of cause `unknown` if the node has no directory of it."""
    order = {"schema": 1, "run_id": run_id, "grace_s": grace_s}
    return agent.call(node, "stop", order, Stopped, deadline_s=grace_s + answer_s).recorded


class Cleaned(msgspec.Struct, frozen=True, kw_only=True):
    """What was removed from one node."""

    node: str
    removed: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()  # runs that are not over
    # of runs that other machines have there, where nodes share a home directory, the machine's host name
    machines: dict[str, str] = {}
    code_kept: tuple[str, ...] = ()  # copies of code in which a job has written files, so that they stay
    size_bytes: int = 0
    error: str | None = None


class _CleanedNode(msgspec.Struct, frozen=True, tag_field="kind", tag="cleaned"):
    removed: tuple[NodeRunEntry, ...]
    kept: tuple[NodeRunEntry, ...]
    code_bytes: int = 0
    code_kept: tuple[str, ...] = ()


def find_runs(agent: AgentTransport, cluster: Cluster, runs: Path, run_ids: Sequence[str]) -> tuple[str, ...]:
    """The ids of the selected runs, each with the runs named after it, such as attempts.

    `run_ids` are ids, or beginnings of ids, of runs below `runs` or on the nodes; `last` is the newest of this
    machine.
    """
    answers = runs_of_nodes(agent, cluster)
    there = {parse_node_run_id(run.run_id) for node_runs in answers.found.values() for run in node_runs.runs}
    names = sorted(there | {path.name for path in list_runs(runs)})
    matches: list[str] = []
    for begin in run_ids:
        begin_id = RunDirectory.open(runs, begin).run_id if begin == "last" else begin
        matching = match_runs(names, begin_id)
        if len(matching) != 1:
            shown = ", ".join([*matching[:_SHOWN], *(["..."] if len(matching) > _SHOWN else [])])
            raise UsageError(
                f"several runs start with {begin_id!r} ({shown})"
                if matching
                else f"no run starts with {begin_id!r}, here or on the nodes of {cluster.source}",
                hint="list the runs of this machine: multinode runs",
            )
        matches += [name for name in names if _is_part(name, matching[0])]
    return tuple(dict.fromkeys(matches))


def _is_part(run_id: str, whole: str) -> bool:
    """Whether it is the run, or one named after it, such as an attempt."""
    return run_id == whole or run_id.startswith(f"{whole}-")


def clean(
    agent: AgentTransport, cluster: Cluster, run_ids: Sequence[str] | None, older_s: float
) -> tuple[Cleaned, ...]:
    """What was removed from each node: these runs, or for None all that started at least `older_s` seconds ago."""
    ranks = range(len(cluster.nodes))
    names = None if run_ids is None else [node_run_id(run_id, rank) for run_id in run_ids for rank in ranks]
    request = {"schema": 1, "run_ids": names, "code": run_ids, "older_s": older_s}

    answers = agent.call_all(cluster.nodes, "clean", request, _CleanedNode, deadline_s=ANSWER_S)
    cleaned = {name: _cleaned(name, answer) for name, answer in answers.found.items()}
    cleaned |= {name: Cleaned(node=name, error=error.message) for name, error in answers.failed.items()}
    return tuple(cleaned[node.name] for node in cluster.nodes)


def _cleaned(node: str, answer: _CleanedNode) -> Cleaned:
    return Cleaned(
        node=node,
        removed=tuple(run.run_id for run in answer.removed),
        kept=tuple(run.run_id for run in answer.kept),
        machines={run.run_id: run.machine for run in (*answer.removed, *answer.kept) if run.machine is not None},
        code_kept=answer.code_kept,
        size_bytes=sum(run.size_bytes for run in answer.removed) + answer.code_bytes,
    )


def cleanup_nodes(launched: Launched, cluster: Cluster, context: RunContext) -> None:
    """Remove a run's files from its nodes; all results have been fetched."""
    for node in clean(context.agent, cluster, [launched.run.run_id], 0.0):
        if node.error is not None:
            context.say(f"{node.node}: {launched.run.run_id} was not removed there: {node.error}")
        for path in node.code_kept:
            context.say(f"{node.node}: {path} is kept, because the job has written files there")


class NodeStop(msgspec.Struct, frozen=True, kw_only=True):
    """What was stopped on one node."""

    node: str
    runs: tuple[str, ...] = ()  # their names there, `ID.RANK`
    processes_left: int = 0  # of them
    error: str | None = None  # why that is unknown


def stop_by_id(agent: AgentTransport, cluster: Cluster, run_id: str, grace_s: float) -> tuple[NodeStop, ...]:
    """Stop a run on all nodes, with the runs named after it, such as attempts.

    `run_id` is an id, or the beginning of one.

    Raises:
        UsageError: no reachable node knows such a run, or several match.
        NodeError, NodeFailed: no node could be asked.
    """
    looks = runs_of_nodes(agent, cluster)
    ids = sorted({parse_node_run_id(name) for runs in looks.found.values() for name in runs.names})
    matching = match_runs(ids, run_id)
    if len(matching) != 1:
        problem = f"several runs start with {run_id!r} ({', '.join(matching)})" if matching else f"no run {run_id!r}"
        missing = "".join(f"; {error}" for error in looks.failed.values())
        raise UsageError(
            f"{problem} on the nodes of {cluster.source}{missing}", hint="see what runs there: multinode check"
        )

    def stop(node: Node) -> NodeStop:
        names = tuple(
            sorted(name for name in looks.found[node.name].names if _is_part(parse_node_run_id(name), matching[0]))
        )
        left = sum(stop_on_node(agent, node, name, grace_s).processes_left or 0 for name in names)
        return NodeStop(node=node.name, runs=names, processes_left=left)

    holders = [node for node in cluster.nodes if node.name in looks.found]
    stops = gather(holders, stop, deadline_s=4 * (grace_s + ANSWER_S))
    failed = looks.failed | stops.failed
    return tuple(
        stops.found.get(node.name) or NodeStop(node=node.name, error=failed[node.name].message)
        for node in cluster.nodes
    )


def load_balance(root: Path, name: str) -> Balance:
    """The speeds that a stored run has measured, for `--balance`.

    Raises:
        UsageError: there is no such run, or it does not tell how fast its nodes are.
    """
    directory = RunDirectory.open(root, name)
    summary = StoredRun(directory).summary
    if summary is None or summary.balance is None:
        raise UsageError(
            f"--balance {name}: run {directory.run_id} does not show how fast its nodes are",
            hint="use a run on several nodes for which multinode show lists stragglers, or --balance NODE=SPEED,...",
        )
    return msgspec.structs.replace(summary.balance.balance, run_id=directory.run_id)
