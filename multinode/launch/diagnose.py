"""diagnose: ask every node of a run that hangs what its processes are doing."""

from __future__ import annotations

import msgspec

from multinode.core.cluster.cluster import Cluster, Node
from multinode.core.run.plan import LaunchPlan, NodePlan, node_run_id
from multinode.core.run.stall import FlightRecord, LastStep, NodeDiagnosis, ProcessDiagnosis
from multinode.transport.agent import AgentTransport, read_answer
from multinode.transport.outcomes import gather

__all__ = ["diagnose"]

# The agent's own deadlines add up to a third of it.
_ANSWER_S = 20.0


class _Answer(msgspec.Struct, frozen=True):
    time_s: float
    processes: tuple[ProcessDiagnosis, ...] = ()
    last_steps: tuple[LastStep, ...] = ()
    ras: str | None = None
    ras_missing: str | None = None
    flight_records: tuple[FlightRecord, ...] = ()


def diagnose(agent: AgentTransport, cluster: Cluster, plan: LaunchPlan) -> tuple[NodeDiagnosis, ...]:
    """What each node said, in node-rank order; one that could not be asked says why."""
    plans = {node_plan.node: node_plan for node_plan in plan.nodes}

    def ask(node: Node) -> NodeDiagnosis:
        return _ask(agent, node, plans[node.name], plan.run_id)

    outcomes = gather(cluster.nodes, ask, deadline_s=_ANSWER_S)
    return tuple(
        outcome.value if outcome.error is None else _silent(plans[outcome.node.name], outcome.error.message)
        for outcome in outcomes
    )


def _ask(agent: AgentTransport, node: Node, plan: NodePlan, run_id: str) -> NodeDiagnosis:
    request = {"schema": 1, "run_id": node_run_id(run_id, plan.node_rank)}
    # Its channel is not kept: stalls are far apart.
    stream = agent.open(node, "diagnose", request, deadline_s=_ANSWER_S)
    stream.close()
    answer = read_answer(stream.first, _Answer, node.name, "diagnosis")
    fields = {name: getattr(answer, name) for name in answer.__struct_fields__}
    return NodeDiagnosis(node=plan.node, node_rank=plan.node_rank, ranks=plan.ranks, **fields)


def _silent(plan: NodePlan, error: str) -> NodeDiagnosis:
    return NodeDiagnosis(node=plan.node, node_rank=plan.node_rank, ranks=plan.ranks, error=error)
