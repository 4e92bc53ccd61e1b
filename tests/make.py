"""Makes the structs that many subjects share: clusters, plans, runs, summaries, stored runs.

Each maker fills in what a test does not care about; keyword arguments are fields of the struct.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from multinode.cluster.cluster import Cluster, Node
from multinode.cluster.dataplane import Endpoint
from multinode.cluster.quoting import Command
from multinode.profile.step_split import WorkerSplit
from multinode.profile.summary import StepTimes, Summary
from multinode.records.plan import LaunchPlan, NodePlan, Place, Rendezvous
from multinode.records.run import NodeRun, Run
from multinode.records.run_directory import RunDirectory
from multinode.runs.stored_run import StoredRun
from multinode.stats.estimate import Estimate, exactly
from multinode.stats.unknown import UNMEASURED, Unknown

__all__ = ["cluster", "no_steps", "node_plan", "plan", "run", "split", "store", "stored_run", "summary"]


def cluster(*nodes: str | Node, source: str = "hosts") -> Cluster:
    """A hostfile with these nodes; a name is a line without keys."""
    lines = tuple(Node(name=node) if isinstance(node, str) else node for node in nodes)
    return Cluster(nodes=lines, source=source)


def node_plan(
    name: str = "a",
    node_rank: int = 0,
    *,
    workers: int = 1,
    ranks: tuple[int, ...] | None = None,
    run_dir: str | None = None,
    endpoint: Endpoint | None = None,
    link_gbit_per_s: float | None = None,
    **fields: Any,
) -> NodePlan:
    """What one node does: `true`, on 10.0.0.1 for the first node, 10.0.0.2 for the second.

    Args:
        name: the node.
        node_rank: its rank.
        workers: of each node.
        ranks: the node's, if the nodes before it have other numbers of workers.
        run_dir: on the node.
        endpoint: its address and interface.
        link_gbit_per_s: rate that its NIC reports.
        fields: of NodePlan.
    """
    place = Place(
        node=name,
        node_rank=node_rank,
        ranks=tuple(range(workers * node_rank, workers * (node_rank + 1))) if ranks is None else ranks,
        run_dir=run_dir or f"/r.{node_rank}",
        endpoint=endpoint or Endpoint(addr=f"10.0.0.{node_rank + 1}", ifname="ens1f0", link_gbit_per_s=link_gbit_per_s),
    )
    return NodePlan(**({"place": place, "command": Command(argv=("true",))} | fields))


def plan(
    *nodes: str | NodePlan,
    workers: int | tuple[int, ...] = 1,
    link_gbit_per_s: float | None = None,
    each: Mapping[str, Any] | None = None,
    **fields: Any,
) -> LaunchPlan:
    """A job of torchrun on these nodes, which meet at the first one.

    Args:
        nodes: their names, or what each does.
        workers: of each node that is named.
        link_gbit_per_s: rate that the NICs of named nodes report.
        each: fields of NodePlan, for each named node.
        fields: of LaunchPlan.
    """
    meeting = Rendezvous(
        addr="10.0.0.1", port=29500, workers=(workers,) * len(nodes) if isinstance(workers, int) else workers
    )
    planned = tuple(
        node_plan(node, rank, ranks=meeting.ranks(rank), link_gbit_per_s=link_gbit_per_s, **(each or {}))
        if isinstance(node, str)
        else node
        for rank, node in enumerate(nodes)
    )
    known = msgspec.structs.replace(meeting, workers=tuple(node.place.nproc for node in planned))
    usual: dict[str, Any] = {
        "run_id": "r",
        "engine": "torchrun",
        **({"framework": "llamafactory", "config_path": "job.yaml"} if fields.get("engine") == "llamafactory" else {}),
        "job": "train.py",
        "rendezvous": known,
        "nodes": planned,
    }
    return LaunchPlan(**(usual | fields))


def run(*nodes: str | NodeRun, **fields: Any) -> Run:
    """The record of a run on these nodes that succeeded, with a worker on each.

    Args:
        nodes: their names, or what each reported.
        fields: of Run.
    """
    told = tuple(
        NodeRun(name=node, node_rank=rank) if isinstance(node, str) else node for rank, node in enumerate(nodes)
    )
    usual: dict[str, Any] = {
        "run_id": "r",
        "job": "train.py",
        "engine": "torchrun",
        "status": "succeeded",
        "started_s": 1.0,
        "world_size": len(nodes),
        "nodes": told,
    }
    return Run(**(usual | fields))


def split(step_ms: float, **fields: Any) -> WorkerSplit:
    """The mean step of all workers in ms; `fields` of WorkerSplit are its known parts."""
    return WorkerSplit(**({"rank": -1, "step_ms": step_ms} | fields))


def summary(
    samples_per_s: float | Estimate | Unknown = UNMEASURED,
    step_ms: float | None = None,
    **fields: Any,
) -> Summary:
    """A run of 30 steps, of which the first 5 are warm-up.

    Args:
        samples_per_s: of all workers; a number is exact.
        step_ms: median step time, exactly.
        fields: of Summary.
    """
    usual: dict[str, Any] = {
        "run_id": "r",
        "steps": 30,
        "steady_steps": 25,
        "rule": "the first 5 of 30 steps are excluded as warm-up",
        "samples_per_s": exactly(samples_per_s) if isinstance(samples_per_s, float | int) else samples_per_s,
    }
    if step_ms is not None:
        usual["step_time_ms"] = StepTimes(median=exactly(step_ms), p95=step_ms, cv=0.01)
    return Summary(**(usual | fields))


def no_steps(**fields: Any) -> Summary:
    """A run in which no worker recorded a step."""
    nothing: dict[str, Any] = {"steps": 0, "steady_steps": 0, "rule": ""}
    return summary(Unknown("no worker recorded a step"), **(nothing | fields))


def stored_run(
    record: Run, results: Mapping[Callable[[RunDirectory], Any], Any] | None = None, **parts: Any
) -> StoredRun:
    """A stored run with these parts and no others, without a directory.

    Args:
        record: its run.json.
        results: what verbs have left, by the function that reads it.
        parts: other parts by their names in StoredRun; with `observed`, its samples are its own.
    """
    nowhere = RunDirectory(Path("/nowhere") / record.run_id)
    stored = StoredRun(nowhere).having(run=record, results=dict(results or {}), **parts)
    if "observed" in parts:
        vars(stored).update(sampled=stored)
    return stored


def store(root: Path, run_id: str = "r", **documents: Any) -> RunDirectory:
    """A run directory below `root` with these documents: `run=` is its run.json. None writes none."""
    directory = RunDirectory.create(root, run_id)
    for name, document in documents.items():
        if document is not None:
            directory.write(f"{name}.json", document)
    return directory
