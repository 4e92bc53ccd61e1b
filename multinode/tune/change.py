"""The launch of a changed training."""

from __future__ import annotations

import msgspec

from multinode.errors import UsageError
from multinode.job.deepspeed import fit_batch
from multinode.job.job import TrainingJob, change_arguments
from multinode.job.job_files import Change, changed_job
from multinode.job.planning import with_workers
from multinode.launch.context import Launch
from multinode.levers.averaging import ROUNDS
from multinode.levers.levers import NONE
from multinode.traffic.algorithms import Layout


def changed_launch(launch: Launch, change: Change, today: Layout) -> Launch:
    """The launch with a change made, as its options would make it, on as many nodes and workers as it runs on today.

    Raises:
        UsageError: it cannot be created with this job or on these nodes.
    """
    cluster, job = launch.cluster, launch.job
    nodes = change.nodes or today.nodes
    if nodes > len(cluster.nodes):
        raise UsageError(f"{nodes} nodes are requested, but the hostfile has {len(cluster.nodes)}")
    workers_per_node = change.workers_per_node or launch.workers_per_node
    workers = (workers_per_node,) * nodes if workers_per_node else today.on(nodes).counts
    cluster, launch = with_workers(cluster.first(nodes), launch, workers)
    if job.training is not None:
        job = _whole_rounds(fit_batch(changed_job(job.training, change), sum(workers)), change)
    elif change.overrides or change.deepspeed or change.env:
        raise UsageError(
            "multinode cannot change the settings of a script",
            hint="name a YAML job: multinode tune --judge speed --from RUN train.yaml",
        )
    # On one node the gradients pass no network.
    kept = launch.levers.beside(change.levers) if nodes != 1 else NONE
    given = launch.environment
    environment = msgspec.structs.replace(given, env={**given.env, **change.env}) if change.env else given
    levers = kept.joined(change.levers)
    return msgspec.structs.replace(launch, cluster=cluster, job=job, environment=environment, levers=levers)


def _whole_rounds(job: TrainingJob, change: Change) -> TrainingJob:
    steps, rounds = job.arguments.get("max_steps"), change.levers.round_steps
    least = ROUNDS * rounds if rounds > 1 else 0
    if type(steps) is not int or not 0 < steps < least:
        return job
    return change_arguments(job, {"max_steps": least})
