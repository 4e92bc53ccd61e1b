"""What the verbs of the command do, as functions of structs: the command and the short calls go through them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

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
    """Probe all nodes, connect each node to every other node, and report problems. Equivalent to `multinode check`.

    A problem on a node is reported as a finding, not raised as an error. If a finding would make a training run fail,
    `report.ok` is False.

    Args:
        cluster: the nodes.
        context: the connections to the nodes.
        job: the training job. If None, the check covers only what every training job requires.
        options: how the job will be launched, and whether to measure the bandwidth between the nodes.
    """
    from multinode.check.check import CheckOptions, check_cluster

    options = msgspec.structs.replace(options or CheckOptions(), runs=context.runs)
    return check_cluster(context.agent, cluster, job, options, context.say)


def copy(
    cluster: Cluster,
    context: RunContext,
    request: CopyRequest,
    observe: Callable[[CopyProgress], None] = lambda _: None,
) -> CopyReport:
    """Copy files and directories from one node to all others. Equivalent to `multinode copy`.

    If a node fails, the copy continues with the others. `report.ok` is True if all nodes have the same files.

    Args:
        cluster: the nodes.
        context: the connections to the nodes.
        request: the paths to copy, and optionally the node to copy them from.
        observe: called with the progress, a few times per second.

    Raises:
        UsageError: no node has the paths, or the nodes have different contents and the request names no source.
        NodeError, NodeFailed: the source failed, or a node has too little disk space. Nothing was written.
        Interrupted: the user stopped the copy. To send the rest, make the same call again.
    """
    from multinode.copy.paths import copy_paths

    return copy_paths(context.agent, cluster, request, observe, say=context.say)


def nccl_test(launch: Launch, context: RunContext, extent: Extent | None = None) -> ScanReport:
    """Measure collectives with PyTorch on the nodes and evaluate the network. Equivalent to `multinode nccl-test`.

    Args:
        launch: the nodes and the test. The `job` is a CollectiveTest. To measure only the network between the nodes,
            set `workers_per_node=1`.
        context: the connections to the nodes.
        extent: what to measure in addition to the collectives. Default: raw TCP from each node to the next.

    Raises:
        RunFailed: the test failed.
        Interrupted: the user stopped the measurement.
        UsageError, NodeError, NodeFailed: same as in `launch`.
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
    """Compare one node with several, and explain which is faster and why. Equivalent to `multinode contrast`.

    Each side of the comparison runs all steps of the job. To run fewer steps, limit the job with `cut_job` first.

    Args:
        launch: the job and all nodes.
        context: the connections to the nodes.
        request: what to compare. Default: one node and all nodes. The slots of node 0 then determine the mode.
        repeats: number of runs per side. The runs of the sides are interleaved.
        fresh: whether to measure everything again. If False, an interrupted contrast with the same request is resumed.

    Raises:
        UsageError: the contrast is not possible with this hostfile or mode.
        RunFailed: a run failed.
        Interrupted: the user stopped the measurement.
        NodeError, NodeFailed: same as in `launch`.
    """
    from multinode.contrast.measure import ContrastRequest
    from multinode.contrast.measure import contrast as measure
    from multinode.series.series import Resume

    return measure(launch, context, request or ContrastRequest(), repeats=repeats, resume=Resume(anew=fresh))


def _of_kind(launch: Launch, kind: str) -> Launch:
    import msgspec

    return msgspec.structs.replace(launch, execute=msgspec.structs.replace(launch.execute, kind=kind))
