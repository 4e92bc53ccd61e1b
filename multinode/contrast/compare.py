"""The Contrast of two stored runs. Reads disk; prints nothing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from multinode.cluster.cluster import Cluster, Node
from multinode.cluster.facts import NodeFacts
from multinode.contrast.figures import Contrast, compared_words
from multinode.contrast.judge import compare, require_alike
from multinode.contrast.side import SideRun, make_side
from multinode.errors import UsageError
from multinode.job.workload import Workload
from multinode.profile.summary import Summary
from multinode.records.plan import LaunchPlan
from multinode.records.run_directory import RunDirectory

_CONTRAST = "contrast.json"
_SCHEMA = "multinode.contrast/2"


class StoredSchema(msgspec.Struct, frozen=True):
    """The schema of any document."""

    schema: str = ""


def compare_runs(root: Path, first: str, second: str, *, anyway: bool = False) -> Contrast:
    """Compare two stored runs: the first is the baseline, the second the candidate.

    Args:
        root: directory of all runs.
        first: an id, its beginning, or `last`.
        second: likewise.
        anyway: whether to compare runs that did not train the same, with the differences marked.
    """
    directories = [RunDirectory.open(root, name) for name in (first, second)]
    runs = [load_side_run(directory) for directory in directories]
    baseline, candidate = (make_side(role, [run]) for role, run in zip(("baseline", "candidate"), runs, strict=True))
    require_alike(baseline, candidate, anyway=anyway)
    rules = list(dict.fromkeys(run.summary.rule for run in runs))
    jobs = list(dict.fromkeys(_job(directory) for directory in directories))
    return compare(
        [baseline, candidate],
        mode="compare",
        why=compared_words(directories[1].run_id, directories[0].run_id),
        job=" against ".join(reversed(jobs)),
        rule="; ".join(rules),
    )


def load_side_run(directory: RunDirectory) -> SideRun:
    """A measured run with all inputs of a side.

    Raises:
        UsageError: it is not a training, or ended too early.
    """
    plan, summary = directory.read("plan.json", LaunchPlan), directory.read("summary.json", Summary)
    if plan is None or summary is None:
        raise UsageError(
            f"run {directory.run_id} has no training figures",
            hint="name runs of launch, or the two sides of a contrast; list them: multinode runs",
        )
    cluster = directory.read("cluster.json", Cluster)
    nodes = {node.name: node for node in cluster.nodes} if cluster is not None else {}
    cores = _cores(directory, nodes)
    links = [node.link_gbit_per_s for node in plan.nodes]
    known = [link for link in links if link is not None]
    return SideRun(
        summary=summary,
        node_names=tuple(node.node for node in plan.nodes),
        workers=plan.workers,
        workload=directory.read("workload.json", Workload),
        prices=tuple(nodes[node.node].hourly(len(node.ranks)) if node.node in nodes else None for node in plan.nodes),
        cores=tuple(cores.get(node.node) for node in plan.nodes),
        link_gbit_per_s=min(known) if len(known) == len(links) > 1 else None,
    )


def load_contrast(directory: RunDirectory) -> tuple[Contrast | None, str]:
    """A run's contrast, if it has one; or why it cannot be shown."""
    marked = directory.read(_CONTRAST, StoredSchema)
    if marked is None or marked.schema == _SCHEMA:
        return directory.read(_CONTRAST, Contrast), ""
    told = marked.schema or "no schema"
    return None, f"This contrast is from another release ({told}): measure it again to show it."


def _cores(directory: RunDirectory, nodes: Mapping[str, Node]) -> Mapping[str, int | None]:
    """Nodes of a lab share one machine, so the work of another node is not foreign load there."""
    facts = directory.read("facts.json", list[NodeFacts]) or []
    return {one.node: one.cores for one in facts if one.node in nodes and not nodes[one.node].is_virtual}


def _job(directory: RunDirectory) -> str:
    plan = directory.read("plan.json", LaunchPlan)
    return plan.job if plan is not None else directory.run_id
