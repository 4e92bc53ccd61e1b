"""Runs as their nodes know them: find, stop and remove them. Prints nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from multinode.cluster.cluster import Cluster, Node
from multinode.errors import UsageError
from multinode.launch.context import Launched, RunContext
from multinode.records.run import match_runs, node_run_id, parse_node_run_id
from multinode.records.run_directory import RunDirectory, list_runs
from multinode.transport.agent import AgentTransport
from multinode.transport.fan_out import gather

_ANSWER_S = 30.0
_SHOWN = 3


class Cleaned(msgspec.Struct, frozen=True, kw_only=True):
    """What was removed from one node."""

    node: str
    removed: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()  # those that are not over
    # of those that other machines have there, where nodes share a home directory, the machine's host name
    machines: dict[str, str] = {}
    code_kept: tuple[str, ...] = ()  # copies of code in which a job has written files, so that they stay
    size_bytes: int = 0
    error: str | None = None


class _RunOnNode(msgspec.Struct, frozen=True):
    run_id: str
    machine: str | None = None
    size_bytes: int = 0


class _RunsOnNode(msgspec.Struct, frozen=True):
    runs: tuple[_RunOnNode, ...]


class _CleanedNode(msgspec.Struct, frozen=True):
    removed: tuple[_RunOnNode, ...]
    kept: tuple[_RunOnNode, ...]
    code_bytes: int = 0
    code_kept: tuple[str, ...] = ()


def find_runs(agent: AgentTransport, cluster: Cluster, runs: Path, asked: Sequence[str]) -> tuple[str, ...]:
    """The ids of the selected runs, each with the runs named after it, such as attempts.

    `asked` are ids, or beginnings of ids, of runs below `runs` or on the nodes; `last` is the newest of this
    machine.
    """

    def ask(node: Node) -> tuple[str, ...]:
        request = {"schema": 1, "run_id": None}
        answer = agent.call(node, "runs", request, _RunsOnNode, deadline_s=_ANSWER_S)
        return tuple(parse_node_run_id(run.run_id) for run in answer.runs)

    answers = gather(cluster.nodes, ask, deadline_s=2 * _ANSWER_S)
    if not answers.values:
        answers.require()
    there = {run_id for ids in answers.values for run_id in ids}
    found: list[str] = []
    for begin in asked:
        named = RunDirectory.open(runs, begin).run_id if begin == "last" else begin
        found += _find(named, sorted(there | {path.name for path in list_runs(runs)}), cluster)
    return tuple(dict.fromkeys(found))


def _find(begin: str, names: Sequence[str], cluster: Cluster) -> Iterable[str]:
    matching = match_runs(names, begin)
    if len(matching) == 1:
        return (name for name in names if name == matching[0] or name.startswith(f"{matching[0]}-"))
    shown = ", ".join([*matching[:_SHOWN], *(["..."] if len(matching) > _SHOWN else [])])
    raise UsageError(
        f"several runs start with {begin!r} ({shown})"
        if matching
        else f"no run starts with {begin!r}, here or on the nodes of {cluster.source}",
        hint="list the runs of this machine: multinode runs",
    )


def clean(
    agent: AgentTransport, cluster: Cluster, run_ids: Sequence[str] | None, older_s: float
) -> tuple[Cleaned, ...]:
    """What was removed from each node: these runs, or for None all that started at least `older_s` seconds ago."""
    ranks = range(len(cluster.nodes))
    names = None if run_ids is None else [node_run_id(run_id, rank) for run_id in run_ids for rank in ranks]
    request = {"schema": 1, "run_ids": names, "code": run_ids, "older_s": older_s}

    def ask(node: Node) -> Cleaned:
        answer = agent.call(node, "clean", request, _CleanedNode, deadline_s=_ANSWER_S)
        return Cleaned(
            node=node.name,
            removed=tuple(run.run_id for run in answer.removed),
            kept=tuple(run.run_id for run in answer.kept),
            machines={run.run_id: run.machine for run in (*answer.removed, *answer.kept) if run.machine is not None},
            code_kept=answer.code_kept,
            size_bytes=sum(run.size_bytes for run in answer.removed) + answer.code_bytes,
        )

    return tuple(
        one.value if one.error is None else Cleaned(node=one.node.name, error=one.error.message)
        for one in gather(cluster.nodes, ask, deadline_s=2 * _ANSWER_S)
    )


def cleanup_nodes(launched: Launched, cluster: Cluster, context: RunContext) -> None:
    """Remove a run's files from its nodes; all results have been fetched."""
    for node in clean(context.agent, cluster, [launched.run.run_id], 0.0):
        if node.error is not None:
            context.say(f"{node.node}: {launched.run.run_id} was not removed there: {node.error}")
        for path in node.code_kept:
            context.say(f"{node.node}: {path} is kept, because the job has written files there")


_STOP_ANSWER_S = 30.0


class NodeStop(msgspec.Struct, frozen=True, kw_only=True):
    """What was stopped on one node."""

    node: str
    runs: tuple[str, ...] = ()  # their names there, `ID.RANK`
    processes_left: int = 0  # of them
    error: str | None = None  # why that is unknown


class _RunThere(msgspec.Struct, frozen=True):
    run_id: str
    machine: str | None = None


class _RunsThere(msgspec.Struct, frozen=True):
    runs: tuple[_RunThere, ...]
    living: tuple[str, ...]

    @property
    def names(self) -> frozenset[str]:
        """Runs with a directory there, and runs with live processes; not those of other machines."""
        return frozenset((*(run.run_id for run in self.runs if run.machine is None), *self.living))


class _Stopped(msgspec.Struct, frozen=True):
    processes_left: int


def stop_by_id(agent: AgentTransport, cluster: Cluster, run_id: str, grace_s: float) -> tuple[NodeStop, ...]:
    """Stop a run on all nodes, with the runs named after it, such as attempts.

    `run_id` is an id, or the beginning of one.

    Raises:
        UsageError: no reachable node knows such a run, or several match.
        NodeError, NodeFailed: no node could be asked.
    """

    def look(node: Node) -> frozenset[str]:
        request = {"schema": 1, "run_id": None}
        return agent.call(node, "runs", request, _RunsThere, deadline_s=_STOP_ANSWER_S).names

    looks = gather(cluster.nodes, look, deadline_s=2 * _STOP_ANSWER_S)
    if not looks.values:
        looks.require()
    ids = sorted({parse_node_run_id(name) for names in looks.values for name in names})
    matching = match_runs(ids, run_id)
    if len(matching) != 1:
        said = f"several runs start with {run_id!r} ({', '.join(matching)})" if matching else f"no run {run_id!r}"
        missing = "".join(f"; {error}" for error in looks.errors)
        raise UsageError(
            f"{said} on the nodes of {cluster.source}{missing}", hint="see what runs there: multinode check"
        )
    there = {outcome.node.name: outcome.value for outcome in looks if outcome.error is None}

    def is_meant(name: str) -> bool:
        base = parse_node_run_id(name)
        return base == matching[0] or base.startswith(f"{matching[0]}-")

    def stop(node: Node) -> NodeStop:
        names = tuple(sorted(filter(is_meant, there[node.name])))
        left = 0
        for name in names:
            request = {"schema": 1, "run_id": name, "grace_s": grace_s}
            left += agent.call(node, "stop", request, _Stopped, deadline_s=grace_s + _STOP_ANSWER_S).processes_left
        return NodeStop(node=node.name, runs=names, processes_left=left)

    asked = [node for node in cluster.nodes if node.name in there]
    outcomes = gather(asked, stop, deadline_s=4 * (grace_s + _STOP_ANSWER_S))
    stops = {outcome.node.name: outcome.value for outcome in outcomes if outcome.error is None}
    errors = {outcome.node.name: outcome.error for outcome in looks if outcome.error is not None}
    errors |= {outcome.node.name: outcome.error for outcome in outcomes if outcome.error is not None}
    return tuple(
        stops[node.name] if node.name in stops else NodeStop(node=node.name, error=errors[node.name].message)
        for node in cluster.nodes
    )
