"""Seen models: what each worker said last of the model that it trains. Pure.

A worker tells again what has changed, and so does one that was started anew. How the model is spread over the workers
is `seen_strategy`'s.
"""

from __future__ import annotations

from multinode.analyse.run.observed import Observed
from multinode.core.run.profile_samples import ModelSample

__all__ = ["last_models"]


def last_models(observed: Observed) -> dict[int, ModelSample]:
    """By rank, ascending, the last word of each worker; a node is believed about its own workers alone."""
    told = {model.rank: model for node in observed.nodes for model in node.of(ModelSample) if model.rank in node.ranks}
    return {rank: told[rank] for rank in sorted(told)}
