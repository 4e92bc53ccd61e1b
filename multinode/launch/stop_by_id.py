"""stop_by_id: ends a run without a record on this machine, from what the nodes know. Prints nothing."""

from __future__ import annotations

import msgspec

from multinode.cluster.cluster import Cluster, Node
from multinode.errors import UsageError
from multinode.records.run import match_runs, parse_node_run_id
from multinode.transport.agent import AgentTransport
from multinode.transport.fan_out import gather

_ANSWER_S = 30.0


class NodeStop(msgspec.Struct, frozen=True, kw_only=True):
    """What was stopped on one node."""

    node: str
    runs: tuple[str, ...] = ()  # their names there, `ID.RANK`
    processes_left: int = 0  # of them
    error: str | None = None  # why that is unknown


class _RunOnNode(msgspec.Struct, frozen=True):
    run_id: str
    machine: str | None = None


class _RunsOnNode(msgspec.Struct, frozen=True):
    runs: tuple[_RunOnNode, ...]
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
        return agent.call(node, "runs", request, _RunsOnNode, deadline_s=_ANSWER_S).names

    looks = gather(cluster.nodes, look, deadline_s=2 * _ANSWER_S)
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
            left += agent.call(node, "stop", request, _Stopped, deadline_s=grace_s + _ANSWER_S).processes_left
        return NodeStop(node=node.name, runs=names, processes_left=left)

    asked = [node for node in cluster.nodes if node.name in there]
    outcomes = gather(asked, stop, deadline_s=4 * (grace_s + _ANSWER_S))
    stops = {outcome.node.name: outcome.value for outcome in outcomes if outcome.error is None}
    errors = {outcome.node.name: outcome.error for outcome in looks if outcome.error is not None}
    errors |= {outcome.node.name: outcome.error for outcome in outcomes if outcome.error is not None}
    return tuple(
        stops[node.name] if node.name in stops else NodeStop(node=node.name, error=errors[node.name].message)
        for node in cluster.nodes
    )
