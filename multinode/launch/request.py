"""What a node's supervisor is asked to do: one plan for one node, as the agent reads it."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from multinode.core.run.plan import LaunchPlan, NodePlan, PlanFile, node_run_id
from multinode.core.run.redaction import redact_plan
from multinode.core.text.secret_values import redact_file

__all__ = ["ExecuteOptions", "supervise_request"]


class ExecuteOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a plan is executed.

    Attributes:
        lease_s: how long a node goes on without word from the controller; None is without end (detached).
        grace_s: how long a stop waits between TERM and KILL.
        silence_s: how long a node may be silent before its connection is taken for dead; it speaks every second.
        verify_s: how long a node has, after a stop and its grace period, to verify that nothing is left.
        kind: what the run is for: `launch`, `nccl-test`, `bench`, `contrast`, `advise` or `sweep`.
        attach: the run goes on already: follow it rather than start it.
        leave_when_running: follow until the job runs on every node, then let it go on alone.
        leave_on_stop: the first request to stop ends the following and not the run.
        stall_s: how long no node may get on before the run is said to hang; None never says so.
        on_stall: whether a run that hangs is only reported or stopped, too.
    """

    lease_s: float | None = 120.0
    grace_s: float = 10.0
    silence_s: float = 10.0
    verify_s: float = 20.0
    kind: str = "launch"
    attach: bool = False
    leave_when_running: bool = False
    leave_on_stop: bool = False
    stall_s: float | None = 300.0
    on_stall: Literal["report", "stop"] = "report"


def supervise_request(plan: LaunchPlan, node: NodePlan, options: ExecuteOptions) -> dict[str, Any]:
    """The request for one node (docs/reference/agent-protocol.md)."""
    command = node.command
    return {
        "schema": 1,
        "run_id": node_run_id(plan.run_id, node.node_rank),
        "argv": list(command.argv),
        "env": command.env,
        "unset": list(command.unset),
        "cwd": command.cwd,
        "path_first": command.path_first,
        "prelude": command.prelude,
        # The plan travels too, so that another machine with the hostfile can take the run up.
        "files": [*(_file(file) for file in node.files), _plan_file(plan)],
        "lease_s": options.lease_s,
        "grace_s": options.grace_s,
        "sample_ifnames": [node.ifname] if node.ifname else [],
        "sample_interval_s": plan.sample_interval_s,
        "sample_gpus": list(node.gpus) if node.gpus is not None else None,
        "instrument": plan.profile,
        # A collective test measures itself: what is hooked into its calls would be measured with them.
        "failures_only": plan.test is not None,
        "trace": msgspec.to_builtins(plan.trace),
        "detach": False,
        "offsets": {},
    }


def _file(file: PlanFile) -> dict[str, Any]:
    return {"path": file.path, "text": file.text, "in_memory": redact_file(file.text) != file.text}


def _plan_file(plan: LaunchPlan) -> dict[str, str]:
    return {"path": "plan.json", "text": msgspec.json.encode(redact_plan(plan)).decode()}
