"""plan_offline: the plan of a dry run, which refuses what the launch refuses before it asks a node."""

from __future__ import annotations

from typing import TYPE_CHECKING

from multinode.job.planning import plan_launch
from multinode.launch.context import Launch, require_connectable
from multinode.records.plan import LaunchPlan
from multinode.records.run import make_run_id

if TYPE_CHECKING:
    from multinode.launch.restart import RestartOptions


def plan_offline(launch: Launch, restarts: RestartOptions | None = None) -> LaunchPlan:
    """The plan from the hostfile alone; what a probe would have found is marked as assumed.

    Raises:
        UsageError: what `connect`, `launch` and `launch_with_restarts` refuse before they ask a node.
    """
    require_connectable(launch.cluster)
    if restarts is not None:
        from multinode.launch.restart import require_restartable

        require_restartable(launch.job, launch.cluster, launch, restarts)
    return plan_launch(launch.cluster, launch.job, {}, launch.run_id or make_run_id(), launch)
