"""Requests of a run: how it is executed, to each node's supervisor, and to stop."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from multinode.records.plan import LaunchPlan, PlanFile, redact_plan
from multinode.records.run import node_run_id
from multinode.secret_values import redact_file


class ExecuteOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a plan is executed.

    Attributes:
        lease_s: how long a node keeps running without contact to the controller; None is unlimited (detached).
        grace_s: time between TERM and KILL in a stop.
        silence_s: how long a node may be silent before its connection is considered dead; it sends every second.
        verify_s: time after a stop and its grace period to verify that nothing is left.
        kind: of the run: `launch`, `nccl-test`, `bench`, `contrast`, `advise`, `sweep` or `tune`.
        attach: follow a run in progress instead of starting one.
        leave_when_running: follow until the job runs on every node, then let it continue alone.
        leave_on_stop: the first request to stop only stops following, unless the run is slower than one node.
        stall_s: how long no node may make progress before the run counts as hanging; None never does.
        on_stall: whether a hanging run is only reported, or also stopped.
        log_limit_bytes: maximum size of the job's log on a node; None is unlimited.
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
    log_limit_bytes: int | None = 2 << 30


# How soon a node sends news. With many nodes each waits a little longer, so that all of them send a few hundred times
# per second: the controller reads each of them in a thread.
_POLL_S = (0.1, 1.0)
_POLLS_PER_S = 128


def supervise_requests(plan: LaunchPlan, options: ExecuteOptions) -> list[dict[str, Any]]:
    """The request for each node, in node-rank order (docs/reference/agent-protocol.md)."""
    common = {
        "schema": 1,
        "lease_s": options.lease_s,
        "grace_s": options.grace_s,
        "log_limit_bytes": options.log_limit_bytes,
        "sample_interval_s": plan.sample_interval_s,
        "instrument": plan.profile,
        # A collective test measures itself: hooks in its calls would be measured, too.
        "failures_only": plan.test is not None,
        "trace": msgspec.to_builtins(plan.trace),
        "detach": False,
        "offsets": {},
        "poll_s": min(max(_POLL_S[0], len(plan.nodes) / _POLLS_PER_S), _POLL_S[1]),
    }
    # The plan is sent to node 0, so that another machine with the hostfile can follow the run.
    plan_file = {"path": "plan.json", "text": msgspec.json.encode(redact_plan(plan)).decode()}
    return [
        common
        | {name: value for name, value in msgspec.to_builtins(node.command).items() if name != "forwarded"}
        | {
            "run_id": node_run_id(plan.run_id, node.node_rank),
            "files": [*map(_file, node.files), *([] if node.node_rank else [plan_file])],
            "sample_ifnames": list(node.ifnames) or ([node.ifname] if node.ifname else []),
            "sample_gpus": list(node.gpus) if node.gpus is not None else None,
        }
        for node in plan.nodes
    ]


def _file(file: PlanFile) -> dict[str, Any]:
    return {"path": file.path, "text": file.text, "in_memory": redact_file(file.text) != file.text}


STOP_FILE = "stop.json"


class StopOrder(msgspec.Struct, frozen=True):
    """Left by another process in the directory of a run with restarts, to end it."""

    grace_s: float


class StopRequest:
    """Counts requests to stop: once is TERM and a grace period, twice is KILL.

    Has only plain fields, because a signal handler must not block.
    """

    def __init__(self) -> None:
        self.count = 0
        # whether a run is followed that reads the count; otherwise the current work is interrupted
        self.is_heard = False
        self.reason = ""
        self.grace_s: float | None = None  # the requested grace period; None is the run's own
        self.lease_s: float | None = None  # of the followed run; None without a lease, or if nothing is followed

    def ask(self, reason: str, grace_s: float | None = None) -> None:
        """Ask once more."""
        self.grace_s = grace_s
        self.count += 1
        self.reason = self.reason or reason

    @contextlib.contextmanager
    def heard(self) -> Iterator[None]:
        """While the count is read a few times per second."""
        before, self.is_heard = self.is_heard, True
        try:
            yield
        finally:
            self.is_heard = before
