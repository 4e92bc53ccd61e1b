"""wait_for_gpus: before a run is measured, nobody else computes on the GPUs that it will use. Prints nothing."""

from __future__ import annotations

import time

import msgspec

from multinode.check.finding import Finding
from multinode.check.gpus import check_gpus_free
from multinode.check.inspection import Inspection
from multinode.check.probe import Questions, probe
from multinode.cluster.cluster import Cluster
from multinode.cluster.facts import Gpu, NodeFacts
from multinode.launch.context import Prepared, RunContext
from multinode.records.plan import LaunchPlan

# What ended a moment ago needs some seconds to give back its memory; somebody's training does not end for us.
PATIENCE_S = 60.0
_EVERY_S = 2.0


def wait_for_gpus(
    prepared: Prepared, context: RunContext, *, patience_s: float = PATIENCE_S, every_s: float = _EVERY_S
) -> Finding | None:
    """Wait until the GPUs are free, or the user asks to stop; what still holds one then.

    The facts of the launch itself are looked at first, so that free GPUs, and nodes without any, cost no further probe.

    Raises:
        NodeError: a node could not be asked again.
    """
    cluster = prepared.what.cluster
    held = find_holder(cluster, prepared.plan, prepared.facts)
    if held is not None:
        context.say(f"waiting up to {patience_s:.0f} s: {held.node}: {held.message}")
    end = time.monotonic() + patience_s
    while held is not None and time.monotonic() < end and not context.stop.count:
        time.sleep(every_s)
        found = probe(context.agent, cluster, Questions(packages=False)).require()
        held = find_holder(cluster, prepared.plan, {one.node: one for one in found})
    return held


def find_holder(cluster: Cluster, plan: LaunchPlan, facts: dict[str, NodeFacts]) -> Finding | None:
    """The first GPU of the plan that another process holds; None where all are free, or there is none."""
    planned = {node.node: node.gpus for node in plan.nodes}
    nodes = tuple(
        msgspec.structs.replace(node, gpus=planned.get(node.name) or (), slots=None) for node in cluster.nodes
    )
    strangers = {
        name: msgspec.structs.replace(found, gpus=tuple(map(_of_strangers, found.gpus)))
        for name, found in facts.items()
    }
    cluster = msgspec.structs.replace(cluster, nodes=nodes)
    inspection = Inspection(cluster=cluster, facts=strangers, master_port=plan.master_port)
    return next(check_gpus_free(inspection), None)


def _of_strangers(gpu: Gpu) -> Gpu:
    """Nothing of this run is on the GPU yet: another run of ours disturbs it as anybody's would."""
    return msgspec.structs.replace(
        gpu, processes=tuple(msgspec.structs.replace(process, run_id=None) for process in gpu.processes)
    )
