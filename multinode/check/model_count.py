"""Ask a node for the tensors of the job's model, if it is none of the architectures that are known here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from multinode.cluster.cluster import Cluster, Node
from multinode.cluster.facts import NodeFacts
from multinode.errors import MultinodeError
from multinode.job.job import Job
from multinode.model.model_count import UNCOUNTED, count_question
from multinode.records.benchmark import Benchmark
from multinode.stats.unknown import Entries
from multinode.transport.base import Outcomes

# Longer than the node gives an import of torch and transformers from a cold file system.
_DEADLINE_S = 150.0


def with_count(
    cluster: Cluster,
    outcomes: Outcomes[NodeFacts],
    job: Job | Benchmark,
    ask: Callable[[Node, Mapping[str, Any], float], NodeFacts],
) -> Outcomes[NodeFacts]:
    """The facts, with the tensors of the model on the first node that has it: one counts for all.

    Args:
        cluster: the nodes.
        outcomes: of their probes.
        job: what builds the model.
        ask: sends a node the question, which is to be answered within so many seconds.
    """
    for node in cluster.nodes:
        facts = outcomes.found.get(node.name)
        if facts is None or facts.model_config is None:
            continue
        question = count_question(job, facts.model_config)
        if question is None:
            break
        # Importing torch alone may take longer than a probe.
        try:
            described = ask(node, question, _DEADLINE_S).model
        except MultinodeError as error:
            # Nothing but predictions needs it, and these say why it is missing.
            described = Entries(values={**facts.model_config, UNCOUNTED: error.message})
        return outcomes._replace(found={**outcomes.found, node.name: msgspec.structs.replace(facts, model=described)})
    return outcomes
