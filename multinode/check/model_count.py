"""Ask a node for the tensors of the job's model, if it is none of the architectures that are known here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from multinode.check.probe import SentFacts
from multinode.cluster.cluster import Cluster
from multinode.cluster.facts import NodeFacts
from multinode.errors import MultinodeError
from multinode.job.job import Job
from multinode.model.model_count import count_question
from multinode.records.benchmark import Benchmark
from multinode.transport.agent import AgentTransport
from multinode.transport.base import Outcomes

# Longer than the node gives an import of torch and transformers from a cold file system.
_DEADLINE_S = 150.0


def with_count(
    agent: AgentTransport,
    cluster: Cluster,
    outcomes: Outcomes[NodeFacts],
    job: Job | Benchmark,
    place: Mapping[str, Any],
) -> Outcomes[NodeFacts]:
    """The facts, with the tensors of the model on the first node that has it: one counts for all.

    Args:
        agent: the agent on the nodes.
        cluster: the nodes.
        outcomes: of their probes.
        job: what builds the model.
        place: the questions of a probe that say where the model is.
    """
    for node in cluster.nodes:
        facts = outcomes.found.get(node.name)
        if facts is None or facts.model_config is None:
            continue
        question = count_question(job, facts.model_config)
        if question is None:
            break
        # Importing torch alone may take longer than a probe.
        request = {"schema": 1, "python": node.python, "workdir": node.workdir, **place, "count": question}
        try:
            counted = agent.call(node, "probe", request, SentFacts, deadline_s=_DEADLINE_S)
        except MultinodeError:
            # Nothing but predictions needs it.
            break
        return outcomes._replace(
            found={**outcomes.found, node.name: msgspec.structs.replace(facts, model=counted.model)}
        )
    return outcomes
