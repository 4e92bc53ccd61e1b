"""clean: remove what ended runs left on their nodes. Prints nothing."""

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
