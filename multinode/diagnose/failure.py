"""first_failure: which node, and which worker on it, went wrong first. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

from msgspec.structs import replace

from multinode.diagnose.evidence import NodeEvidence
from multinode.diagnose.failure_kinds import (
    WorkerDeath,
    classify,
    explains,
    find_worker_death,
    told_by_nccl,
)
from multinode.diagnose.known_errors import find_error
from multinode.diagnose.log_words import LogWord, last_words, rate
from multinode.records.log import clean_log, last_lines
from multinode.records.run import Failure, NodeRun
from multinode.records.samples import ExceptionSample


def first_failure(nodes: Sequence[NodeEvidence], *, stop: str | None = None) -> Failure | None:
    """The first thing that went wrong; None where nothing did.

    Peers of a dead worker fail too, moments later, with an error of their connection: such an error is a consequence
    while there is any other cause. So, in this order: a node that could not start; the earliest exception that is not
    about a connection; a job or supervisor that was killed; a worker that was; a job that failed though none of its
    workers raised anything; the earliest connection error; the earliest exit; a node that was lost. What peers of a
    node that was lost before do then, and what nothing else explains, is a consequence, too.

    On a node the earliest is told by its clock. Between nodes it is told by when it came, as clocks may be wrong by
    hours; where it did not come as it happened, by the clocks, and then what is too near to tell is named beside it.

    `stop` is the command that ends a run without a lease where contact to a node was lost.
    """
    found = _find(nodes)
    losses = [_lost(node, stop) for node in nodes if node.run.state == "lost"]
    lost = min(losses, key=lambda failure: failure.time_s or math.inf, default=None)
    if lost is None or (found is not None and not _follows(found, lost, nodes)):
        return found
    peers = sorted((node for node in nodes if node.run.state != "lost"), key=lambda node: node.run.node_rank)
    told = [failure for node in peers if (failure := _find([node])) is not None and _follows(failure, lost, nodes)]
    return replace(lost, consequences=tuple(f"{failure.node}: {failure.message}" for failure in told))


def _find(nodes: Sequence[NodeEvidence]) -> Failure | None:
    failed = [node for node in nodes if _failed(node.run)]
    found = (
        next((_not_started(node) for node in nodes if node.run.cause == "not_started"), None)
        or _earliest_exception(nodes, connection=False)
        or _earliest_job(node for node in failed if node.run.signal or node.run.cause == "supervisor_lost")
        # TERM is what torchrun sends to the other workers itself. NCCL's watchdog aborts a worker whose peer is gone.
        or _earliest_job(
            node for node in failed if _death_signal(node) not in {None, "SIGTERM"} and not _is_of_peers(node)
        )
        or _earliest_job(node for node in failed if (word := _said_cause(node)) and rate(word.error, word) <= 1)
        or _earliest_job(
            node
            for node in failed
            if not node.exceptions and any(each.exceptions for each in nodes) and not _is_of_peers(node)
        )
        or _earliest_exception(nodes, connection=True)
        or _earliest_job(failed)
    )
    if found is None:
        return None
    node = _of(found, nodes)
    # What a worker raised says all; its log may speak of much else, and so may NCCL of what only follows from it.
    if not node.exceptions:
        return classify(found, node.run, node.read(), node.nccl_warnings)
    about_nccl = any(_is_about_connection(sample) for sample in node.exceptions if sample.rank == found.rank)
    return classify(found, node.run, found.log_tail, node.nccl_warnings if about_nccl else ())


def _of(failure: Failure, nodes: Sequence[NodeEvidence]) -> NodeEvidence:
    return next(node for node in nodes if node.run.node_rank == failure.node_rank)


def _follows(failure: Failure, lost: Failure, nodes: Sequence[NodeEvidence]) -> bool:
    if lost.time_s is None or (failure.time_s is not None and failure.time_s < lost.time_s - _CLOCK_S):
        return False
    if failure.signal == "SIGABRT" and failure.kind != "timeout":
        # A process that lost its peers may abort itself, without a word of its own.
        word = _said_cause(_of(failure, nodes))
        return word is None or word.is_of_peers
    peer = _of(failure, nodes)
    own = peer.run.cause == "not_started" or any(not _is_about_connection(sample) for sample in peer.exceptions)
    return failure.kind in _OF_PEERS and not own


def blame_machine(failure: Failure | None, nodes: Sequence[NodeEvidence]) -> Failure | None:
    """The hardware fault that came before a failure and explains it, as the first failure; else the failure itself."""
    if failure is None:
        return None
    times = [_at(sample.time_s, node) for node in nodes for sample in node.exceptions]
    times += [_ended_at(node) for node in nodes if _failed(node.run)]
    # A run that hung was stopped, and nothing of it failed.
    failed_s = min(times or map(_ended_at, nodes))
    found = [
        (_at(fault.time_s, node), node, fault)
        for node in nodes
        for fault in node.faults
        if explains(fault, failure.kind, failed_s - _at(fault.time_s, node))
    ]
    if not found:
        return failure
    time_s, node, fault = min(found, key=lambda item: item[0])
    return replace(
        failure,
        node=node.run.name,
        node_rank=node.run.node_rank,
        rank=failure.rank if failure.node_rank == node.run.node_rank else None,
        exit_code=node.run.exit_code,
        signal=node.run.signal,
        message=fault.message,
        hint=fault.hint,
        error_id=None,
        cause=None,
        kind="hardware",
        time_s=time_s,
        consequences=(f"{failure.node}: {failure.message}", *failure.consequences),
    )


def _earliest_exception(nodes: Sequence[NodeEvidence], *, connection: bool) -> Failure | None:
    firsts: list[tuple[float, NodeEvidence, ExceptionSample]] = []
    live = all(node.came_live for node in nodes)
    for node in nodes:
        raised = [number for number, one in enumerate(node.exceptions) if _is_about_connection(one) == connection]
        if raised:
            sample = min((node.exceptions[number] for number in raised), key=lambda one: one.time_s)
            heard_s = min(node.exceptions_heard_s[number] for number in raised) if live else _at(sample.time_s, node)
            firsts.append((heard_s, node, sample))
    if not firsts:
        return None
    at_s, node, sample = min(firsts, key=lambda first: first[0])
    failure = replace(_worker_failure(node, sample), time_s=at_s)
    near = [
        f"{other.run.name}: {_worker_failure(other, theirs).message}; it is unknown which failed first: their "
        f"clocks agree only within {_CLOCK_S:.0f} s"
        for other_s, other, theirs in firsts
        if not live and other is not node and other_s - at_s < _CLOCK_S and not connection
        if (theirs.type, theirs.message) != (sample.type, sample.message)
    ]
    return replace(failure, consequences=tuple(near))


def _death_signal(node: NodeEvidence) -> str | None:
    death = find_worker_death(node.read().report)
    return death.signal if death is not None else None


def _said_cause(node: NodeEvidence) -> LogWord | None:
    aborted = node.run.signal is not None or _death_signal(node) is not None
    return None if node.exceptions else node.read().cause(aborted=aborted)


def _is_of_peers(node: NodeEvidence) -> bool:
    word, warning = _said_cause(node), told_by_nccl(node.nccl_warnings)
    return word is not None and word.is_of_peers and (warning is None or warning.is_of_peers)


def _earliest_job(nodes: Iterable[NodeEvidence]) -> Failure | None:
    failed = list(nodes)
    if not failed:
        return None
    live = all(node.came_live and node.ended_heard_s is not None for node in failed)
    return _job_failure(min(failed, key=lambda node: (node.ended_heard_s or 0.0) if live else _ended_at(node)))


# Kinds that may have their cause on another node.
_OF_PEERS = frozenset({None, "connection", "timeout"})
# How well two clocks are brought together.
_CLOCK_S = 1.0


# What torch raises where NCCL, gloo or the rendezvous fails; RuntimeError for gloo, and before torch 2.0 for all.
_OF_COMMUNICATION = frozenset(
    {
        "DistBackendError",
        "DistNetworkError",
        "DistStoreError",
        "RendezvousClosedError",
        "RendezvousConnectionError",
        "RendezvousGracefulExitError",
        "RendezvousTimeoutError",
        "RuntimeError",
        "SignalException",
    }
)


def _is_about_connection(sample: ExceptionSample) -> bool:
    if sample.type.rpartition(".")[2] not in _OF_COMMUNICATION:
        return False
    error = find_error(f"{sample.type}: {sample.message}")
    return error is not None and error.of_peers


def _ended_at(node: NodeEvidence) -> float:
    return _at(node.run.ended_s, node) if node.run.ended_s is not None else math.inf


def _at(time_s: float, node: NodeEvidence) -> float:
    return time_s - (node.clock_offset_s or 0.0)


def _failed(run: NodeRun) -> bool:
    return run.cause in {"exited", "supervisor_lost", "lease_expired"} and (
        run.exit_code != 0 or run.signal is not None
    )


def _failure(node: NodeEvidence, message: str, **fields: Any) -> Failure:
    failure = Failure(
        node=node.run.name,
        node_rank=node.run.node_rank,
        exit_code=node.run.exit_code,
        signal=node.run.signal,
        message=message,
        time_s=node.ended_heard_s
        if node.came_live and node.ended_heard_s is not None
        else _at(node.run.ended_s, node)
        if node.run.ended_s is not None
        else None,
    )
    return replace(failure, **fields)


def _not_started(node: NodeEvidence) -> Failure:
    error = node.error
    message = error.message if error is not None else "the job could not be started"
    hint = error.hint if error is not None else None
    # A prelude that failed has said why.
    return _failure(node, message, hint=hint, log_tail=last_lines(node.log, 20))


# What tells most of NCCL's errors stands in a line of its own.
_LAST_ERROR = re.compile(r"^Last error:\s*\n(.+)$", re.MULTILINE)


def _worker_failure(node: NodeEvidence, sample: ExceptionSample) -> Failure:
    # What a worker says is printed on a terminal: no control characters, and one line for the sentence.
    text = clean_log(f"{sample.type}: {sample.message}").strip()
    last = _LAST_ERROR.search(text)
    said = ": ".join([text.split("\n")[0].rstrip(": "), *([last[1].strip()] if last is not None else [])])
    tail = clean_log(sample.traceback)
    message = f"rank {sample.rank} raised {said}"
    return _failure(node, message, rank=sample.rank, log_tail=tail, time_s=_at(sample.time_s, node))


def _job_failure(node: NodeEvidence) -> Failure:
    causes = {
        "supervisor_lost": "the supervisor on the node was killed, and its job was stopped",
        "lease_expired": "the node heard nothing from the controller until the lease expired, and stopped the job",
    }
    death = find_worker_death(node.read().report) if node.run.cause == "exited" else None
    if death is not None:
        message = f"{'a worker' if death.rank is None else f'rank {death.rank}'} {_how(death)}"
        tail = last_words(node.log, 20)
        return _failure(node, message, rank=death.rank, signal=death.signal, log_tail=tail)
    message = causes.get(node.run.cause or "", f"the job {_how(node.run)}")
    return _failure(node, message, log_tail=last_lines(node.log, 20))


def _how(ended: WorkerDeath | NodeRun) -> str:
    return f"was killed by {ended.signal}" if ended.signal else f"exited with code {ended.exit_code}"


def _lost(node: NodeEvidence, stop: str | None) -> Failure:
    reason = node.error.message if node.error is not None else "no answer"
    if stop is None:
        goes_on = "if it is up, it stops the job when the lease expires"
    else:
        goes_on = f"if it is up, the job continues there until you stop it over SSH: {stop}"
    return _failure(
        node,
        f"contact was lost and not restored: {reason}",
        hint=f"check that it has power and that SSH reaches it; {goes_on}",
        log_tail=last_lines(node.log, 20),
        kind="node_lost",
        time_s=node.run.lost_s,
    )
