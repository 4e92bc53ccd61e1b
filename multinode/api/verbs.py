"""What the verbs of the command do, as functions of structs: the command and the short calls go through them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from multinode.check.check import CheckOptions, CheckReport
    from multinode.cluster.cluster import Cluster
    from multinode.contrast.measure import Contrasted, ContrastRequest
    from multinode.copy.chain import CopyProgress
    from multinode.copy.paths import CopyReport, CopyRequest
    from multinode.job.job import Job
    from multinode.launch.context import Launch, RunContext
    from multinode.network.measure import Extent
    from multinode.network.size_scan import ScanReport


def check(
    cluster: Cluster, context: RunContext, job: Job | None = None, options: CheckOptions | None = None
) -> CheckReport:
    """Ask every node, connect all with each other, and say what would break a training, as `multinode check`.

    What a node does wrong is a finding, not an error; `report.ok` says whether any would break a training.

    Args:
        cluster: the nodes.
        context: the connections to them.
        job: what is to be trained; None checks what any training needs.
        options: how it is to be launched, and whether the nodes stream to each other.
    """
    from multinode.check.check import CheckOptions, check_cluster

    return check_cluster(context.agent, cluster, job, options or CheckOptions(), context.say)


def copy(
    cluster: Cluster,
    context: RunContext,
    request: CopyRequest,
    observe: Callable[[CopyProgress], None] = lambda _: None,
) -> CopyReport:
    """Make files and directories equal on all nodes, from the one that has them, as `multinode copy`.

    A node that fails is left out and the others get theirs; `report.ok` says whether all are equal.

    Args:
        cluster: the nodes.
        context: the connections to them.
        request: the paths, and who has them.
        observe: is shown the progress, a few times per second.

    Raises:
        UsageError: nobody has the paths, or nodes have different ones and none was named.
        NodeError, NodeFailed: the source failed, or a node has no room, and nothing was written.
        Interrupted: it was broken off; the same copy sends the rest.
    """
    from multinode.copy.paths import copy_paths

    return copy_paths(context.agent, cluster, request, observe, say=context.say)


def nccl_test(launch: Launch, context: RunContext, extent: Extent | None = None) -> ScanReport:
    """Measure collectives over the nodes with their own torch, and judge the network, as `multinode nccl-test`.

    Args:
        launch: its job is a CollectiveTest; `workers_per_node=1` measures the network between the nodes.
        context: the connections to the nodes.
        extent: what is measured beside the collectives; None is raw TCP between neighbours.

    Raises:
        RunFailed: it did not end well.
        Interrupted: it was stopped.
        UsageError, NodeError, NodeFailed: as `launch`.
    """
    from multinode.network.measure import Extent
    from multinode.network.measure import nccl_test as measure

    return measure(_of_kind(launch, "nccl-test"), extent or Extent(), context)


def contrast(
    launch: Launch,
    context: RunContext,
    request: ContrastRequest | None = None,
    *,
    repeats: int = 1,
    fresh: bool = False,
) -> Contrasted:
    """Run a job on one node and on many, and say which is faster, by how much and why, as `multinode contrast`.

    Every side trains as many steps as the job has: `cut_job` leaves those that a comparison needs.

    Args:
        launch: the job and all nodes.
        context: the connections to the nodes.
        request: which sides; None is one node against all, with what node 0's slots allow.
        repeats: how often each side is measured, in turns.
        fresh: measures everything again; otherwise an interrupted contrast of the same request goes on.

    Raises:
        UsageError: the hostfile or the mode does not allow it.
        RunFailed: a run did not end well.
        Interrupted: it was stopped.
        NodeError, NodeFailed: as `launch`.
    """
    from multinode.contrast.measure import ContrastRequest
    from multinode.contrast.measure import contrast as measure
    from multinode.series.series import Resume

    return measure(launch, context, request or ContrastRequest(), repeats=repeats, resume=Resume(anew=fresh))


def _of_kind(launch: Launch, kind: str) -> Launch:
    import msgspec

    return msgspec.structs.replace(launch, execute=msgspec.structs.replace(launch.execute, kind=kind))
