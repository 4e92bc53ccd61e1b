"""first_failure: which node, and which worker on it, went wrong first, and what kind of failure it is. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from multinode.diagnose.evidence import MachineFault, NodeEvidence
from multinode.diagnose.known_errors import KnownError, find_error, known_errors
from multinode.diagnose.launcher_report import WorkerDeath, find_worker_death
from multinode.diagnose.log_line import source_line
from multinode.diagnose.log_word import LogWord
from multinode.diagnose.log_words import LogReading, last_words, read_log, spoken_words
from multinode.diagnose.meaning import MOST_CODE, exit_meaning, signal_of_code, timed_out_collective
from multinode.diagnose.standing import Standing, entry_standing, word_standing
from multinode.records.log import clean_log, last_lines
from multinode.records.progress import NodeProgress
from multinode.records.run import Failure
from multinode.records.samples import ExceptionSample, NicSample, Sample
from multinode.records.status import Status

__all__ = [
    "WorkerDeath",
    "blame_machine",
    "classify",
    "explain_timeout",
    "explains",
    "find_worker_death",
    "first_failure",
    "link_share",
    "signal_error",
    "told_by_nccl",
]

_FULL_BYTES = 1 << 20
_LEASE_HINT = "check if this machine slept or lost its network; with --lease, nodes wait longer, with --detach forever"
# Of a log: its last lines that are looked at, and the most of a line in a sentence.
_LAST_WORDS = 20
_MOST_CHARS = 300
_WARN = "NCCL WARN "
_SIGNALS = {
    "SIGKILL": "killed",
    "SIGTERM": "killed",
    "SIGINT": "killed",
    "SIGHUP": "killed",
    "SIGSEGV": "crashed",
    "SIGBUS": "crashed",
    "SIGABRT": "crashed",
    "SIGILL": "crashed",
    "SIGFPE": "crashed",
}
# Signals that say as much as a message would.
_SIGNAL_ERRORS = {"SIGBUS": "bus-error", "SIGKILL": "killed"}


def classify(
    failure: Failure, status: Status | None = None, log: str | LogReading = "", nccl_warnings: Sequence[str] = ()
) -> Failure:
    """Set the kind of a failure, and the catalogue's hint if it has none of its own.

    `status` is how the job ended on that node, `log` its log, `nccl_warnings` are those of NCCL's own log.
    """
    reading = log if isinstance(log, LogReading) else read_log(log or failure.log_tail, has_failed=True)
    kind, error, text = _find_kind(failure, status.oom_kills if status is not None else None, reading)
    if failure.signal is None and not isinstance(log, LogReading):
        # The sentence of an exception on record has it.
        text = None
    warning = told_by_nccl(nccl_warnings)
    if warning is not None and _says_more(warning.error, error):
        kind, error, text = warning.error.kind if warning.error else None, warning.error, warning.text[:_MOST_CHARS]
    elif nccl_warnings and error is not None and error.project == "NCCL" and error.is_general:
        text = nccl_warnings[-1].partition(_WARN)[2][:_MOST_CHARS]
    if nccl_warnings and (warning is not None or text):
        failure = replace(failure, log_tail="\n".join([failure.log_tail, *nccl_warnings[-_LAST_WORDS:]]).lstrip("\n"))
    free_bytes = status.disk_free_bytes if status is not None else None
    if kind is None and free_bytes is not None and free_bytes < _FULL_BYTES:
        # Its own words had no room either.
        kind, error = "disk_full", known_errors()["disk-full"]
    failure = replace(failure, kind=kind, message=f"{failure.message}: {text}" if text else failure.message)
    if failure.hint:
        return failure
    if error is None:
        meaning = exit_meaning(failure.exit_code, failure.signal) if text is None else None
        return replace(failure, cause=meaning.cause, hint=meaning.hint) if meaning is not None else failure
    return replace(failure, error_id=error.id, cause=error.cause, hint=error.fix_on(failure.node))


def _says_more(one: KnownError | None, other: KnownError | None) -> bool:
    if one is None or other is None:
        return other is None and one is not None
    return entry_standing(one) < entry_standing(other)


def told_by_nccl(warnings: Sequence[str]) -> LogWord | None:
    """The warning of NCCL that names a cause best; None where the catalogue knows none of them."""
    return read_log("\n".join(warning.partition(_WARN)[2] for warning in warnings), has_failed=True).cause()


def _find_kind(
    failure: Failure, oom_kills: int | None, reading: LogReading
) -> tuple[str | None, KnownError | None, str | None]:
    starved, killed = known_errors()["oom-killer"], known_errors()["killed"]
    if failure.signal == "SIGKILL" and oom_kills:
        return starved.kind, starved, None
    # The sentence first: the log may speak of much else.
    error, text = find_error(failure.message), None
    crashed = _SIGNALS.get(failure.signal or "") == "crashed"
    if failure.signal is None or crashed:
        word = reading.cause(rank=failure.rank, aborted=crashed)
        if word is not None and _is_after_signal(word, failure):
            word = None
        spoken = word.error if word is not None else None
        if word is None and not crashed:
            exited = reading.death is not None and reading.death.exit_code is not None
            spoken = find_error(spoken_words(failure.log_tail, _LAST_WORDS, of_launcher=not exited))
        if _says_more(spoken, error):
            error = spoken
        if word is not None and word.error == error and (crashed or word.is_exception):
            text = _sentence(word)
    if oom_kills and error == killed:
        error = starved
    if error is not None:
        return error.kind, error, text
    if failure.signal is not None:
        return _SIGNALS.get(failure.signal, "killed"), signal_error(failure.signal), text
    return None, None, text


def _is_after_signal(word: LogWord, failure: Failure) -> bool:
    """Whether a line stands behind a signal in the order of evidence; a process that loses its peers aborts itself."""
    is_others = failure.rank is not None and word.rank not in {None, failure.rank} and not word.collective
    return word.is_of_peers and failure.signal not in {None, "SIGTERM"} and (is_others or failure.signal != "SIGABRT")


def signal_error(signal: str | None) -> KnownError | None:
    """The entry of a signal that says as much as a message would."""
    return known_errors().get(_SIGNAL_ERRORS.get(signal or "", ""))


def _sentence(word: LogWord) -> str:
    return timed_out_collective(word.text) or word.said[:_MOST_CHARS]


# Headers and pauses take their part of a link that is full.
_FULL_SHARE = 0.8
_LOOKED_AT_S = 60.0
_LEAST_S = 3.0


def explain_timeout(failure: Failure, nodes: Sequence[NodeProgress], shares: Mapping[str, float | None]) -> Failure:
    """A timeout with the causes that the figures tell of before its hint; any other failure as it is.

    `shares` says of each node's link how much was in use before, as `link_share` has it.
    """
    if failure.kind != "timeout":
        return failure
    hints = [failure.hint] if failure.hint else []
    name, share = max(
        ((name, share or 0.0) for name, share in shares.items()), key=lambda entry: entry[1], default=("", 0.0)
    )
    if share >= _FULL_SHARE:
        used = f"the link of {name} was {min(share, 1.0):.0%} utilized in the minute before"
        slow = "so it is too slow for the collective"
        hints.insert(0, f"{used}, {slow}: send less (multinode advise), or set a longer ddp_timeout")
    if all(node.step is None for node in nodes):
        stage = next((f" ({node.name}: {node.stage})" for node in nodes if node.stage), "")
        wait = "while one rank tokenizes the data or loads the model, the others wait in a collective"
        way = "set a longer ddp_timeout, or prepare the data once (tokenized_path)"
        hints.insert(0, f"no worker had finished a step{stage}: {wait}; {way}")
    return replace(failure, hint="; or ".join(hints) or None)


def link_share(samples: Iterable[Sample], node: NodeProgress, end_s: float) -> float | None:
    """How much of its link a node used in the minute before `end_s` on its own clock, in the busier direction."""
    if not node.link_gbit_per_s:
        return None
    seen = [
        sample
        for sample in samples
        if isinstance(sample, NicSample)
        and sample.ifname == node.ifname
        and end_s - _LOOKED_AT_S <= sample.time_s <= end_s
    ]
    if not seen:
        return None
    first, last = (choose(seen, key=lambda sample: sample.mono_ns) for choose in (min, max))
    took_ns = last.mono_ns - first.mono_ns
    moved = (last.rx_bytes - first.rx_bytes, last.tx_bytes - first.tx_bytes)
    # A NIC that was reset counts anew.
    return max(moved) * 8 / took_ns / node.link_gbit_per_s if took_ns >= _LEAST_S * 1e9 and min(moved) >= 0 else None


# torch waits up to 30 minutes for a collective: a fault that came longer ago has been survived. One that came a moment
# after the failure was only read later.
_BEFORE_S, _AFTER_S = 2400.0, 3.0
# Failures that each kind of fault can explain; what the job says of its own software or settings stands for itself.
_EXPLAINS: dict[str, set[str | None]] = {
    "gpu": {None, "crashed", "killed", "timeout", "connection", "hang"},
    "memory": {None, "crashed", "killed", "timeout", "connection", "hang"},
    "link": {"timeout", "connection", "hang"},
    "disk": {None, "crashed", "missing_file", "disk_full"},
}


def explains(fault: MachineFault, failure_kind: str | None, before_s: float) -> bool:
    """Whether a fault can be the cause of a failure of this kind; `before_s` is how long it came before."""
    return failure_kind in _EXPLAINS[fault.code] and -_AFTER_S <= before_s <= _BEFORE_S


def first_failure(nodes: Sequence[NodeEvidence], *, stop: str | None = None) -> Failure | None:
    """The first thing that went wrong; None where nothing did.

    Peers of a dead worker fail too, moments later, with an error of their connection: such an error is a consequence
    while there is any other cause. The order is that of `Standing`; a node that was lost comes last. What peers of a
    node that was lost before do then, and what nothing else explains, is a consequence, too.

    On a node the earliest is told by its clock. Between nodes it is told by when it came, as clocks may be wrong by
    hours; where it did not come as it happened, by the clocks, and then what is too near to tell is named beside it.

    `stop` is the command that ends a run without a lease where contact to a node was lost.
    """
    causes = _find(nodes)
    if causes is not None and any(node.flights for node in nodes):
        from multinode.diagnose.ended_desync import find_ended_desync

        causes = find_ended_desync(causes, nodes) or causes
    losses = [_lost(node, stop) for node in nodes if node.run.state == "lost"]
    lost = min(losses, key=lambda failure: failure.time_s or math.inf, default=None)
    if lost is None or (causes is not None and not _follows(causes, lost, nodes)):
        return causes
    peers = sorted((node for node in nodes if node.run.state != "lost"), key=lambda node: node.run.node_rank)
    followers = [failure for node in peers if (failure := _find([node])) is not None and _follows(failure, lost, nodes)]
    return replace(lost, consequences=tuple(f"{failure.node}: {failure.message}" for failure in followers))


def _find(nodes: Sequence[NodeEvidence]) -> Failure | None:
    standings = [(standing, node) for node in nodes if (standing := _standing(node, nodes)) is not None]
    if not standings:
        return None
    first = min(standing for standing, _ in standings)
    at = [node for standing, node in standings if standing is first]
    if first is Standing.NOT_STARTED:
        failure: Failure | None = _not_started(at[0])
    elif first in {Standing.RAISED, Standing.PEER}:
        failure = _earliest_exception(nodes, connection=first is Standing.PEER) or _earliest_job(at)
    else:
        failure = _earliest_job(at)
    silent = failure if first is Standing.SILENT_EXIT else None
    if failure is None:
        return None
    node = _of(failure, nodes)
    if failure is silent:
        # All that its log speaks of came after it; a full disk may be why it said nothing.
        told = classify(replace(failure, log_tail=""), node.run.status, LogReading())
        if told.kind is None:
            return replace(failure, cause=_EXITED, hint=_LOOK_FOR_EXITS)
        return replace(told, log_tail=failure.log_tail)
    # What a worker raised says all; its log may speak of much else, and so may NCCL of what only follows from it.
    if not node.exceptions:
        return classify(failure, node.run.status, node.read(), node.nccl_warnings)
    about_nccl = any(_is_about_connection(sample) for sample in node.exceptions if sample.rank == failure.rank)
    return classify(failure, node.run.status, failure.log_tail, node.nccl_warnings if about_nccl else ())


def _standing(node: NodeEvidence, nodes: Sequence[NodeEvidence]) -> Standing | None:
    """How a node stands in the order of evidence; None where nothing failed there."""
    if node.run.status.cause == "not_started":
        return Standing.NOT_STARTED
    if not all(map(_is_about_connection, node.exceptions)):
        return Standing.RAISED
    if _failed(node.run.status) and (standing := _job_standing(node, nodes)) is not None:
        return standing
    if node.exceptions:
        return Standing.PEER
    return Standing.EXIT_CODE if _failed(node.run.status) else None


def _job_standing(node: NodeEvidence, nodes: Sequence[NodeEvidence]) -> Standing | None:
    word, signal = _said_cause(node), _death_signal(node)
    said = word_standing(word) if word is not None else Standing.EXIT_CODE
    # TERM is what torchrun sends to the other workers itself. NCCL's watchdog aborts a worker whose peer is gone.
    is_killed = signal not in {None, "SIGTERM"} and (signal != "SIGABRT" or not _is_of_peers(node))
    if node.run.status.signal or node.run.status.cause == "supervisor_lost" or is_killed:
        return Standing.SIGNAL
    if said <= Standing.GENERAL:
        # Between nodes, the earliest of these counts.
        return Standing.GENERAL if said is Standing.GENERAL else Standing.OWN_WORDS
    if not node.exceptions and any(each.exceptions for each in nodes) and not _is_of_peers(node):
        return Standing.UNRECORDED
    return Standing.SILENT_EXIT if _exited_silently(node) else None


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
    own = peer.run.status.cause == "not_started" or any(not _is_about_connection(sample) for sample in peer.exceptions)
    return failure.kind in _OF_PEERS and not own


def blame_machine(failure: Failure | None, nodes: Sequence[NodeEvidence]) -> Failure | None:
    """The hardware fault that came before a failure and explains it, as the first failure; else the failure itself."""
    if failure is None:
        return None
    times = [_at(sample.time_s, node) for node in nodes for sample in node.exceptions]
    times += [_ended_at(node) for node in nodes if _failed(node.run.status)]
    # A run that hung was stopped, and nothing of it failed.
    failed_s = min(times or map(_ended_at, nodes))
    faults = [
        (_at(fault.time_s, node), node, fault)
        for node in nodes
        for fault in node.faults
        if explains(fault, failure.kind, failed_s - _at(fault.time_s, node))
    ]
    if not faults:
        return failure
    time_s, node, fault = min(faults, key=lambda item: item[0])
    return replace(
        failure,
        node=node.run.name,
        node_rank=node.run.node_rank,
        rank=failure.rank if failure.node_rank == node.run.node_rank else None,
        exit_code=node.run.status.exit_code,
        signal=node.run.status.signal,
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
        raised = [
            number for number, exception in enumerate(node.exceptions) if _is_about_connection(exception) == connection
        ]
        if raised:
            sample = min((node.exceptions[number] for number in raised), key=lambda failure: failure.time_s)
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
    death = node.read().death
    return death.signal or signal_of_code(death.exit_code) if death is not None else None


def _said_cause(node: NodeEvidence) -> LogWord | None:
    aborted = node.run.status.signal is not None or _death_signal(node) is not None
    return None if node.exceptions else node.read().cause(aborted=aborted)


def _is_of_peers(node: NodeEvidence) -> bool:
    word, warning, death = _said_cause(node), told_by_nccl(node.nccl_warnings), node.read().death
    if word is not None and death is not None and death.rank is not None and word.rank not in {None, death.rank}:
        # It follows from the end of that worker.
        return False
    return word is not None and word.is_of_peers and (warning is None or warning.is_of_peers)


_EXITED = (
    "The worker exited on its own without raising an exception; the others then waited for it or lost their connection."
)
_LOOK_FOR_EXITS = "look for sys.exit and os._exit in the script, and read what the worker printed last"


def _exited_silently(node: NodeEvidence) -> bool:
    """Whether the worker that ended first on a node exited without a word, and others spoke of lost peers."""
    death = node.read().death
    if death is None or death.rank is None or not 0 < (death.exit_code or 0) <= MOST_CODE:
        return False
    words = [word for word in node.read().words if word_standing(word) < Standing.NOISE]
    spoke = any(map(_is_about_connection, node.exceptions)) or any(
        word.is_of_peers and word.rank is not None for word in words
    )
    # A word that names no rank may be its own, unless it only says that a peer is gone.
    said: set[int | None] = {sample.rank for sample in node.exceptions}
    said |= {word.rank for word in words if word.rank is not None or not (word.is_of_peers or word.is_launchers)}
    return spoke and death.rank not in said and None not in said


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
    return _at(node.run.status.ended_s, node) if node.run.status.ended_s is not None else math.inf


def _at(time_s: float, node: NodeEvidence) -> float:
    return time_s - (node.clock_offset_s or 0.0)


def _failed(status: Status) -> bool:
    return status.cause in {"exited", "supervisor_lost", "lease_expired"} and status.failed


def _failure(node: NodeEvidence, message: str, **fields: Any) -> Failure:
    failure = Failure(
        node=node.run.name,
        node_rank=node.run.node_rank,
        exit_code=node.run.status.exit_code,
        signal=node.run.status.signal,
        message=message,
        time_s=node.ended_heard_s
        if node.came_live and node.ended_heard_s is not None
        else _at(node.run.status.ended_s, node)
        if node.run.status.ended_s is not None
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
# How torch raises an exception of another process, such as a data loader's: ExceptionWrapper of torch/_utils.py.
_ORIGINAL = re.compile(r"^Original Traceback .*\n(?:\s.*\n)*(\S.*)", re.MULTILINE)


def _worker_failure(node: NodeEvidence, sample: ExceptionSample) -> Failure:
    # What a worker says is printed on a terminal: no control characters, and one line for the sentence.
    text = clean_log(f"{sample.type}: {sample.message}").strip()
    last = _LAST_ERROR.search(text)
    tail = clean_log(sample.traceback)
    original = _ORIGINAL.search(tail)
    told = original[1] if original is not None else text.split("\n")[0]
    source = source_line(sample.traceback.split("\n")) if not sample.message.strip() else None
    more = [last[1].strip()] if last is not None else [clean_log(source)] if source is not None else []
    sentence = ": ".join([told.rstrip(": "), *more])
    message = f"rank {sample.rank} raised {sentence}"
    # A signal that ended its launcher came after it.
    return _failure(node, message, rank=sample.rank, signal=None, log_tail=tail, time_s=_at(sample.time_s, node))


def _job_failure(node: NodeEvidence) -> Failure:
    causes = {
        "supervisor_lost": "the supervisor on the node was killed, and its job was stopped",
        "lease_expired": "the node heard nothing from the controller until the lease expired, and stopped the job",
    }
    death = node.read().death if node.run.status.cause == "exited" else None
    if death is not None:
        message = f"{'a worker' if death.rank is None else f'rank {death.rank}'} {_how(death)}"
        tail = last_words(node.log, 20)
        return _failure(node, message, rank=death.rank, signal=death.signal, log_tail=tail)
    message = causes.get(node.run.status.cause or "", f"the job {_how(node.run.status)}")
    # Otherwise the signal by which the node stopped the job would explain it.
    hint = _LEASE_HINT if node.run.status.cause == "lease_expired" else None
    return _failure(node, message, hint=hint, log_tail=last_lines(node.log, 20))


def _how(ended: WorkerDeath | Status) -> str:
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
        hint=f"check that it is powered on and reachable over SSH; {goes_on}",
        log_tail=last_lines(node.log, 20),
        kind="node_lost",
        time_s=node.run.lost_s,
    )
