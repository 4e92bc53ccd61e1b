"""first_failure: which node, and which worker on it, went wrong first. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from multinode.core.log import last_lines
from multinode.core.run import Failure, NodeRun
from multinode.core.samples import ExceptionSample
from multinode.errors import MultinodeError

__all__ = ["Evidence", "first_failure"]


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a node when a run has ended.

    Attributes:
        run: how the job ended there.
        exceptions: of its workers, as they recorded them themselves.
        clock_offset_s: the node's clock minus the controller's; None is unknown.
        error: why it could not be reached or started.
        log: the end of its log.
    """

    run: NodeRun
    exceptions: Sequence[ExceptionSample] = ()
    clock_offset_s: float | None = None
    error: MultinodeError | None = None
    log: str = ""


def first_failure(nodes: Sequence[Evidence]) -> Failure | None:
    """The first thing that went wrong, by time on the controller's clock; None where nothing did.

    A worker's own exception comes before a job's exit: the peers of a dead worker fail too, and later. A node that
    could not start the job comes before all.
    """
    never_started = [node for node in nodes if node.run.cause == "not_started"]
    if never_started:
        return _not_started(never_started[0])
    raised = [(_at(sample.time_s, node), node, sample) for node in nodes for sample in node.exceptions]
    if raised:
        _, node, sample = min(raised, key=lambda item: item[0])
        return _worker_failure(node, sample)
    failed = [node for node in nodes if _failed(node.run)]
    if failed:
        return _job_failure(min(failed, key=lambda node: _at(node.run.ended_s or float("inf"), node)))
    lost = [node for node in nodes if node.run.state == "lost"]
    return _lost(lost[0]) if lost else None


def _at(time_s: float, node: Evidence) -> float:
    return time_s - (node.clock_offset_s or 0.0)


def _failed(run: NodeRun) -> bool:
    return run.cause in {"exited", "supervisor_lost", "lease_expired"} and (
        run.exit_code != 0 or run.signal is not None
    )


def _failure(node: Evidence, message: str, fields: Mapping[str, object]) -> Failure:
    return msgspec.convert(
        {
            "node": node.run.name,
            "node_rank": node.run.node_rank,
            "exit_code": node.run.exit_code,
            "signal": node.run.signal,
            "message": message,
            **fields,
        },
        Failure,
    )


def _not_started(node: Evidence) -> Failure:
    error = node.error
    message = error.message if error is not None else "the job could not be started"
    return _failure(node, message, {"hint": error.hint if error is not None else None})


def _worker_failure(node: Evidence, sample: ExceptionSample) -> Failure:
    message = f"rank {sample.rank} raised {sample.type}: {sample.message}".rstrip(": ")
    return _failure(node, message, {"rank": sample.rank, "log_tail": sample.traceback})


def _job_failure(node: Evidence) -> Failure:
    causes = {
        "supervisor_lost": "the supervisor on the node was killed, and its job was stopped",
        "lease_expired": "the node had no word from the controller for the length of the lease, and stopped the job",
    }
    how = f"was ended by {node.run.signal}" if node.run.signal else f"ended with exit code {node.run.exit_code}"
    message = causes.get(node.run.cause or "", f"the job {how}")
    return _failure(node, message, {"log_tail": last_lines(node.log, 20)})


def _lost(node: Evidence) -> Failure:
    reason = node.error.message if node.error is not None else "no answer"
    return _failure(
        node,
        f"contact was lost and not regained: {reason}",
        {
            "hint": "the node stops the job by itself when the lease runs out",
            "log_tail": last_lines(node.log, 20),
        },
    )
