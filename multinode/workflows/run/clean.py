"""clean: remove the directories of runs that have ended from their nodes. Logs and figures at home stay."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from multinode.core.cluster.cluster import Cluster, Node
from multinode.core.run.plan import node_run_id
from multinode.transport.agent import AgentTransport, read_answer
from multinode.transport.outcomes import gather

__all__ = ["Cleaned", "clean"]

_ANSWER_S = 30.0


class Cleaned(msgspec.Struct, frozen=True, kw_only=True):
    """What was removed from one node.

    Attributes:
        removed: run ids, as the node has them.
        kept: those that are not over.
        size_bytes: what was freed.
        error: why it could not be asked.
    """

    node: str
    removed: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    size_bytes: int = 0
    error: str | None = None


class _RunOnNode(msgspec.Struct, frozen=True):
    run_id: str
    size_bytes: int = 0


class _CleanedNode(msgspec.Struct, frozen=True):
    removed: tuple[_RunOnNode, ...]
    kept: tuple[_RunOnNode, ...]


def clean(
    agent: AgentTransport, cluster: Cluster, run_ids: Sequence[str] | None, older_s: float
) -> tuple[Cleaned, ...]:
    """What was removed from each node: these runs, or with None all that began at least `older_s` seconds ago."""
    ranks = range(len(cluster.nodes))
    names = None if run_ids is None else [node_run_id(one, rank) for one in run_ids for rank in ranks]
    request = {"schema": 1, "run_ids": names, "older_s": older_s}

    def ask(node: Node) -> Cleaned:
        answer = read_answer(agent.call(node, "clean", request, deadline_s=_ANSWER_S), _CleanedNode, node.name)
        return Cleaned(
            node=node.name,
            removed=tuple(one.run_id for one in answer.removed),
            kept=tuple(one.run_id for one in answer.kept),
            size_bytes=sum(one.size_bytes for one in answer.removed),
        )

    return tuple(
        one.value if one.error is None else Cleaned(node=one.node.name, error=one.error.message)
        for one in gather(cluster.nodes, ask, deadline_s=2 * _ANSWER_S)
    )
