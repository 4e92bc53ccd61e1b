"""What kind of failure it is, and what fixes it: by worker, log, signal, the run's figures, and faults of hardware."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import msgspec
from msgspec.structs import replace

from multinode.diagnose.evidence import MachineFault
from multinode.diagnose.known_errors import KnownError, find_error, known_errors
from multinode.diagnose.log_words import LogReading, LogWord, last_words, rate, read_log
from multinode.records.progress import NodeProgress
from multinode.records.run import Failure, NodeRun
from multinode.records.samples import NicSample, Sample
from multinode.units import signal_name


class WorkerDeath(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that ended without a Python exception, as its launcher reports it."""

    rank: int | None = None  # global rank; None where the launcher does not say
    exit_code: int | None = None  # None where a signal ended it
    signal: str | None = None


_FULL_BYTES = 1 << 20
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
_REPORT = re.compile(
    r"Root Cause \(first observed failure\):.{0,400}?rank\s*:\s*(\d{1,6})\b.{0,200}?exitcode\s*:\s*(-?\d{1,6})",
    re.DOTALL,
)
# What DeepSpeed's launcher says of itself when it starts, and of the first of its workers that fails.
_DEEPSPEED_PLACE = re.compile(r"nnodes=\d{1,6}, num_local_procs=(\d{1,6}), node_rank=(\d{1,6})\b")
_DEEPSPEED_REPORT = re.compile(r"sigkill_handler\] (\[.{0,4000}\]) exits with return code = (-?\d{1,6})$", re.MULTILINE)
# Open MPI's of the first process that a signal ended.
_MPI_REPORT = re.compile(r"mpirun noticed that process rank (\d{1,6}) with PID .{0,200}? exited on signal (\d{1,3})")
# torchrun's of a worker, where its report is not there; accelerate's of the process that it waits for; Slurm's of the
# first task that fails. None says which global rank that is.
_TORCHRUN_LINE = re.compile(r"failed \(exitcode: (-?\d{1,6})\) local_rank: \d{1,6} \(pid: ")
_ACCELERATE_REPORT = re.compile(r"CalledProcessError: Command .{0,4000} died with <Signals\.\w{1,16}: (\d{1,3})>")
_SLURM_REPORT = re.compile(
    r"srun: error: [\w.-]{1,64}: tasks? [\d,\[\]-]{1,200}: "
    r"(?:Exited with exit code (?P<code>\d{1,6})|(?P<signal>Killed|Segmentation fault|Aborted|Bus error"
    r"|Illegal instruction|Floating point exception)\b)"
)
_SLURM_SIGNALS = {
    "Killed": 9,
    "Segmentation fault": 11,
    "Aborted": 6,
    "Bus error": 7,
    "Illegal instruction": 4,
    "Floating point exception": 8,
}
_LOCAL_RANK = re.compile(r"'--local_rank=(\d{1,6})'")
# What NCCL's watchdog says before it aborts the process.
_WATCHDOG = re.compile(
    r"Watchdog caught collective operation timeout: WorkNCCL\(.{0,200}?OpType=(\w{1,40}),.{0,400}?"
    r"Timeout\(ms\)=(\d{1,15})"
)


def find_worker_death(log: str) -> WorkerDeath | None:
    """The worker that a launcher's report names as the first to fail; None without a report."""
    found = _REPORT.search(log)
    if found is not None:
        return _death(int(found[1]), int(found[2]))
    killed = _MPI_REPORT.search(log)
    if killed is not None:
        return _death(int(killed[1]), -int(killed[2]))
    said = _DEEPSPEED_REPORT.search(log)
    if said is not None:
        place, local = _DEEPSPEED_PLACE.search(log), _LOCAL_RANK.search(said[1])
        rank = None if place is None or local is None else int(place[1]) * int(place[2]) + int(local[1])
        return _death(rank, int(said[2]))
    # The last time: torchrun may have started the workers anew before.
    codes = [int(code) for code in _TORCHRUN_LINE.findall(log)][-1:]
    codes += [-int(number) for number in _ACCELERATE_REPORT.findall(log)]
    task = _SLURM_REPORT.search(log)
    if task is not None:
        codes.append(int(task["code"]) if task["code"] else -_SLURM_SIGNALS[task["signal"]])
    return _death(None, codes[0]) if codes else None


def _death(rank: int | None, code: int) -> WorkerDeath:
    if code < 0:
        return WorkerDeath(rank=rank, signal=signal_name(-code))
    return WorkerDeath(rank=rank, exit_code=code)


def classify(
    failure: Failure, run: NodeRun | None = None, log: str | LogReading = "", nccl_warnings: Sequence[str] = ()
) -> Failure:
    """The same with its kind, and what the catalogue says of it where it has no hint of its own.

    `run` is how the job ended on that node, `log` its log, `nccl_warnings` are those of NCCL's own log.
    """
    reading = log if isinstance(log, LogReading) else read_log(log or failure.log_tail)
    kind, error, said = _find(failure, run.oom_kills if run is not None else None, reading)
    if failure.signal is None and not isinstance(log, LogReading):
        # The sentence of an exception on record has it.
        said = None
    warning = told_by_nccl(nccl_warnings)
    if warning is not None and (error is None or rate(warning.error, warning) < rate(error)):
        kind, error, said = warning.error.kind if warning.error else None, warning.error, warning.text[:_MOST_CHARS]
    elif nccl_warnings and error is not None and error.project == "NCCL" and error.is_general:
        said = nccl_warnings[-1].partition(_WARN)[2][:_MOST_CHARS]
    if nccl_warnings and (warning is not None or said):
        failure = replace(failure, log_tail="\n".join([failure.log_tail, *nccl_warnings[-_LAST_WORDS:]]).lstrip("\n"))
    if kind is None and run is not None and run.disk_free_bytes is not None and run.disk_free_bytes < _FULL_BYTES:
        # Its own words had no room either.
        kind, error = "disk_full", known_errors()["disk-full"]
    failure = replace(failure, kind=kind, message=f"{failure.message}: {said}" if said else failure.message)
    if error is None or failure.hint:
        return failure
    return replace(failure, error_id=error.id, cause=error.cause, hint=error.fix.replace("{node}", failure.node))


def told_by_nccl(warnings: Sequence[str]) -> LogWord | None:
    """The warning of NCCL that names a cause best; None where the catalogue knows none of them."""
    return read_log("\n".join(warning.partition(_WARN)[2] for warning in warnings)).cause()


def _find(
    failure: Failure, oom_kills: int | None, reading: LogReading
) -> tuple[str | None, KnownError | None, str | None]:
    starved, killed = known_errors()["oom-killer"], known_errors()["killed"]
    if failure.signal == "SIGKILL" and oom_kills:
        return starved.kind, starved, None
    # The sentence first: the log may speak of much else.
    error, said = find_error(failure.message), None
    crashed = _SIGNALS.get(failure.signal or "") == "crashed"
    if failure.signal is None or crashed:
        word = reading.cause(rank=failure.rank, aborted=crashed)
        spoken = word.error if word is not None else None
        if word is None and not crashed:
            spoken = find_error(last_words(failure.log_tail, _LAST_WORDS))
        if error is None or (spoken is not None and rate(spoken) < rate(error)):
            error = spoken
        if word is not None and word.error == error and (crashed or word.is_exception):
            said = _sentence(word)
    if oom_kills and error == killed:
        error = starved
    if error is not None:
        return error.kind, error, said
    if failure.signal is not None:
        told = known_errors().get(_SIGNAL_ERRORS.get(failure.signal, ""))
        return _SIGNALS.get(failure.signal, "killed"), told, said
    return None, None, said


def _sentence(word: LogWord) -> str:
    gave_up = _WATCHDOG.search(word.text)
    if gave_up is not None:
        return f"the collective timed out: {gave_up[1].lower()} took longer than {int(gave_up[2]) / 1000:g} s"
    return word.text[:_MOST_CHARS]


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
        ((name, share or 0.0) for name, share in shares.items()), key=lambda one: one[1], default=("", 0.0)
    )
    if share >= _FULL_SHARE:
        used = f"the link of {name} was {min(share, 1.0):.0%} in use in the minute before"
        slow = "the collective was running, and the link is too slow for it"
        hints.insert(0, f"{used}: {slow}; send less (multinode advise), or set a longer ddp_timeout")
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
