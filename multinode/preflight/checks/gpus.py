"""GPUs: those that the job is to use are there, alike, and free."""

from __future__ import annotations

from collections.abc import Iterator

from multinode.core.collective_test import CollectiveTest
from multinode.core.finding import Finding, Rule
from multinode.preflight.inspection import Inspection

__all__ = ["check_backend"]

NO_GPU_FOR_NCCL = Rule(
    check="gpus",
    severity="error",
    catches="the nccl backend was asked for on a node without a GPU",
    message="the nccl backend needs a GPU, and there is none ({reason})",
    hint="--backend gloo measures the same network without a GPU",
)


def check_backend(inspection: Inspection) -> Iterator[Finding]:
    """A collective test that asks for NCCL has a GPU on every node."""
    if not isinstance(inspection.job, CollectiveTest) or inspection.job.backend != "nccl":
        return
    for node, found in inspection.known:
        if not found.gpus:
            yield NO_GPU_FOR_NCCL.found(node.name, reason=found.missing.get("gpus", "none listed"))
