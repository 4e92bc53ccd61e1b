"""contrast: the same job on one node and on all, measured one after the other, compared. Prints nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from multinode.analyse.contrast import Contrast, Side, Terms, compare, make_side
from multinode.core.cluster import Cluster
from multinode.core.planning import workers_per_node
from multinode.core.redaction import redact_cluster
from multinode.core.run import Run
from multinode.core.sides import plan_sides
from multinode.store.run_directory import RunDirectory
from multinode.workflows.launch import Launch, Launched, Outside, launch, make_run_id, require_success

__all__ = ["Contrasted", "contrast"]


class Contrasted(msgspec.Struct, frozen=True, kw_only=True):
    """A contrast that was measured.

    Attributes:
        contrast: its figures.
        directory: where it lies; the two runs lie beside it.
    """

    contrast: Contrast
    directory: Path


def contrast(
    what: Launch, outside: Outside, *, mode: str | None = None, baseline_gpus: tuple[int, ...] | None = None
) -> Contrasted:
    """Measure one node, then all, and compare.

    Raises:
        UsageError: the hostfile or the mode does not allow it.
        RunFailed: one of the two runs did not end well; its directory has everything.
        Interrupted: the user stopped it.
    """
    sides = plan_sides(what.cluster, _slots(what.cluster), mode, baseline_gpus)
    run_id = what.run_id or make_run_id()
    outside.say(f"{sides.mode}: {sides.why}")
    outside.say(f"baseline: {_workers(sides.baseline_workers)} on {sides.baseline.nodes[0].name}")
    baseline = _measure(what, outside, sides.baseline, sides.baseline_workers, f"{run_id}-baseline")
    outside.say(f"candidate: {_workers(sides.candidate_workers)} on each of {len(sides.candidate.nodes)} nodes")
    candidate = _measure(what, outside, sides.candidate, sides.candidate_workers, f"{run_id}-candidate")
    terms = Terms(mode=sides.mode, why=sides.why, job=candidate.plan.job, rule=candidate.summary.rule)
    compared = compare(_side(baseline, sides.baseline_workers), _side(candidate, sides.candidate_workers), terms)
    return Contrasted(contrast=compared, directory=_keep(what, outside, run_id, compared, (baseline, candidate)))


def _workers(count: int) -> str:
    return "1 worker" if count == 1 else f"{count} workers"


def _slots(cluster: Cluster) -> Sequence[int]:
    """Workers that each node can have, as the hostfile has it."""
    return [workers_per_node(msgspec.structs.replace(cluster, nodes=(node,)), {}, None) for node in cluster.nodes]


def _measure(what: Launch, outside: Outside, cluster: Cluster, workers: int, run_id: str) -> Launched:
    options = msgspec.structs.replace(what.options, workers_per_node=workers)
    side = msgspec.structs.replace(what, cluster=cluster, options=options, run_id=run_id)
    launched = launch(side, outside)
    require_success(launched, outside)
    return launched


def _side(launched: Launched, workers: int) -> Side:
    return make_side(launched.summary, nodes=len(launched.plan.nodes), workers_per_node=workers)


def _keep(what: Launch, outside: Outside, run_id: str, compared: Contrast, runs: tuple[Launched, Launched]) -> Path:
    """Store the contrast as a run of its own, so that it is listed with the others."""
    directory = RunDirectory.create(outside.runs, run_id)
    first, last = (launched.run for launched in runs)
    directory.write_bytes("hostfile.txt", what.hostfile.encode())
    directory.write("cluster.json", redact_cluster(what.cluster))
    directory.write("contrast.json", compared)
    directory.write(
        "run.json",
        Run(
            run_id=run_id,
            job=compared.job,
            engine=last.engine,
            status="succeeded",
            started_s=first.started_s,
            ended_s=last.ended_s,
            world_size=last.world_size,
            nodes=last.nodes,
            kind="contrast",
        ),
    )
    return directory.path
