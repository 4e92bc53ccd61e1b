"""The small run of tests/profile/observing.py, as a launch stores it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from multinode.cluster.dataplane import Endpoint
from multinode.cluster.quoting import Command
from multinode.profile.summary import summarise_run
from multinode.records.plan import LaunchPlan, NodePlan, Place, Rendezvous
from multinode.records.run import Run
from multinode.records.run_directory import RunDirectory
from multinode.runs.stored_run import load_run
from tests.profile.observing import RUN, observed

__all__ = ["make_plan", "shown", "store_run"]


def make_plan(run: Run = RUN) -> LaunchPlan:
    """Two workers on each of its nodes."""
    nodes = tuple(
        NodePlan(
            place=Place(
                node=node.name,
                node_rank=node.node_rank,
                ranks=(2 * node.node_rank, 2 * node.node_rank + 1),
                run_dir="/r",
                endpoint=Endpoint(addr=None, ifname="ens1f0", link_gbit_per_s=10.0),
            ),
            command=Command(argv=("true",)),
        )
        for node in run.nodes
    )
    return LaunchPlan(
        rendezvous=Rendezvous(addr="::1", port=1, workers=(2,) * (run.world_size // 2)),
        run_id=run.run_id,
        engine=run.engine,
        job=run.job,
        nodes=nodes,
    )


def store_run(root: Path, run: Run = RUN) -> RunDirectory:
    """Its plan, record and samples, and the summary that they make."""
    directory = RunDirectory.create(root, run.run_id)
    plan = make_plan(run)
    directory.write("plan.json", plan)
    directory.write("run.json", run)
    for node in observed().nodes:
        lines = b"".join(msgspec.json.encode(sample) + b"\n" for sample in node.samples)
        directory.append_samples(node.node_rank, "all.jsonl", lines)
    summarise_run(directory, plan)
    return directory


def shown(directory: RunDirectory) -> dict[str, Any]:
    """What `show --json` prints of it."""
    document: dict[str, Any] = msgspec.to_builtins(load_run(directory.path.parent, directory.run_id).document())
    return document
