"""What kind of failure it is, and what mends it: by worker, log and signal, and by the run's own figures. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from multinode.core.run.progress import NodeProgress
from multinode.core.run.run import Failure, NodeRun
from multinode.core.run.samples import NicSample, Sample

__all__ = ["WorkerDeath", "classify", "explain_timeout", "find_worker_death", "link_share", "words_of_workers"]


class WorkerDeath(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that ended without a Python exception, as its launcher reports it.

    Attributes:
        rank: global rank; None where the launcher does not say.
        exit_code: None where a signal ended it.
    """

    rank: int | None = None
    exit_code: int | None = None
    signal: str | None = None


class _Kind(msgspec.Struct, frozen=True):
    name: str
    pattern: re.Pattern[str]
    hint: str


def _kind(name: str, pattern: str, hint: str) -> _Kind:
    return _Kind(name, re.compile(pattern, re.IGNORECASE), hint)


_DISK_HINT = "make room on {node}: ssh {node} df -h ~ /tmp /dev/shm"
_FULL_BYTES = 1 << 20

# In this order: a message that speaks of memory and of CUDA is about memory.
_KINDS = (
    _kind(
        "out_of_gpu_memory",
        r"(?:CUDA|HIP|XPU|NPU|MPS backend) out of memory|CUDA (?:driver )?error: out of memory|OutOfMemoryError"
        r"|CU(?:BLAS|DNN)_STATUS_ALLOC_FAILED|Cuda failure (?:\d+ )?'out of memory'",
        "a smaller per_device_train_batch_size with more gradient_accumulation_steps, a shorter cutoff_len, or ZeRO; "
        "see who else is on the GPU: nvidia-smi on {node}",
    ),
    _kind(
        "out_of_memory",
        r"MemoryError\b|Cannot allocate memory|DefaultCPUAllocator: (?:can't|not enough)|std::bad_alloc",
        "fewer data loader workers, a smaller batch, no offload; what is left: ssh {node} free -g; what is allowed: "
        "ssh {node} ulimit -a",
    ),
    _kind(
        "disk_full",
        r"No space left on device|Disk quota exceeded|ENOSPC",
        _DISK_HINT,
    ),
    _kind(
        "version_mismatch",
        r"Mismatched NCCL version|driver version is insufficient|undefined symbol|CUDA error: no kernel image"
        r"|was compiled (?:with|for)|compiled against|requires .{1,60} version|but found .{1,40}==",
        "compare the nodes' versions: multinode check",
    ),
    _kind(
        "missing_module",
        r"ModuleNotFoundError|ImportError|No module named|cannot import name|libcuda\S* : cannot open shared object",
        "install it into the training environment of every node; compare them: multinode check",
    ),
    _kind(
        "missing_file",
        r"FileNotFoundError|No such file or directory|can't open file|is not a local folder|Undefined dataset"
        r"|does not appear to have a file named|Cannot find valid samples",
        "it must stand at the same path on every node; compare them: multinode check JOB",
    ),
    _kind(
        "timeout",
        r"Watchdog caught collective operation timeout|the collective timed out"
        r"|timed out after|Timed out waiting|Socket Timeout"
        r"|(?:DistStoreError|DistNetworkError).*(?:timed out|timeout)|wait timeout",
        "a worker was slow or gone, or a port is blocked: multinode check; while it hangs, --stall says who is behind",
    ),
    _kind(
        "connection",
        r"gloo|NCCL|DistNetworkError|DistBackendError|DistStoreError|TCPStore"
        r"|Connection (?:closed|reset|refused)|Broken pipe|Socket closed|No route to host|address already in use"
        # accelerate's, before it starts anything.
        r"|Tried to launch distributed communication on port",
        "the network between the nodes: multinode check",
    ),
)
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
_SIGNAL_HINTS = {
    "SIGBUS": "a full /dev/shm is the usual cause: ssh {node} df -h /dev/shm",
    "SIGKILL": "somebody on {node} killed it, or the kernel did for lack of memory: ssh {node} dmesg -T | tail",
}
_REPORT = re.compile(
    r"Root Cause \(first observed failure\):.{0,400}?rank\s*:\s*(\d{1,6})\b.{0,200}?exitcode\s*:\s*(-?\d{1,6})",
    re.DOTALL,
)
# Where torchrun begins to speak of a failed worker itself: some forty lines, the report among them.
_TORCHRUN_SPEAKS = re.compile(r"^.*\bfailed \(exitcode: -?\d{1,6}\) local_rank: \d{1,6} \(pid: ", re.MULTILINE)
# What DeepSpeed's launcher says of itself when it starts, and of the first of its workers that fails.
_DEEPSPEED_PLACE = re.compile(r"nnodes=\d{1,6}, num_local_procs=(\d{1,6}), node_rank=(\d{1,6})\b")
_DEEPSPEED_REPORT = re.compile(r"sigkill_handler\] (\[.{0,4000}\]) exits with return code = (-?\d{1,6})$", re.MULTILINE)
_LOCAL_RANK = re.compile(r"'--local_rank=(\d{1,6})'")
# Where only words tell of a process that was killed: a data loader's, a launcher's, Python's or a shell's exit code.
_KILLED = re.compile(
    r"killed by signal: Killed|died with <Signals\.SIGKILL|return code = -9\b|exitcode\s*:\s*-9\b"
    r"|exit code (?:137|247)\b"
)
# What NCCL's watchdog says before it aborts the process.
_WATCHDOG = re.compile(
    r"Watchdog caught collective operation timeout: WorkNCCL\(.{0,200}?OpType=(\w{1,40}),.{0,400}?"
    r"Timeout\(ms\)=(\d{1,15})"
)
_STARVED_HINT = (
    "the kernel killed it: {node}, or the control group that it ran in, has too little memory. Fewer data loader "
    "workers, a smaller batch, no offload; ssh {node} dmesg -T | grep -i oom"
)
_NUMBERS = {1: "SIGHUP", 2: "SIGINT", 4: "SIGILL", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE", 9: "SIGKILL"}
_NUMBERS |= {11: "SIGSEGV", 15: "SIGTERM"}


def find_worker_death(log: str) -> WorkerDeath | None:
    """The worker that torchrun's or DeepSpeed's report in a log names as the first to fail; None without a report."""
    found = _REPORT.search(log)
    if found is not None:
        return _death(int(found[1]), int(found[2]))
    said = _DEEPSPEED_REPORT.search(log)
    return None if said is None else _death(_deepspeed_rank(log, said[1]), int(said[2]))


def words_of_workers(log: str) -> str:
    """What stands in a log before torchrun's own words on a worker that failed; all of it where that is nothing."""
    # The last time: torchrun may have started the workers anew before.
    starts = [found.start() for found in _TORCHRUN_SPEAKS.finditer(log)]
    said = log[: starts[-1]] if starts else ""
    return said if said.strip() else log


def _deepspeed_rank(log: str, command: str) -> int | None:
    """The launcher names the local rank, in the worker's command; where it stands it says at the beginning."""
    place, local = _DEEPSPEED_PLACE.search(log), _LOCAL_RANK.search(command)
    return None if place is None or local is None else int(place[1]) * int(place[2]) + int(local[1])


def _death(rank: int | None, code: int) -> WorkerDeath:
    if code < 0:
        return WorkerDeath(rank=rank, signal=_NUMBERS.get(-code, f"signal {-code}"))
    return WorkerDeath(rank=rank, exit_code=code)


def classify(failure: Failure, run: NodeRun | None = None, log: str = "") -> Failure:
    """The same with its kind, and a hint where it has none; `run` is how the job ended on that node, `log` its log."""
    gave_up = _WATCHDOG.search(log) if failure.signal == "SIGABRT" else None
    if gave_up is not None:
        said = f"the collective timed out: {gave_up[1].lower()} took longer than {int(gave_up[2]) / 1000:g} s"
        failure = msgspec.structs.replace(failure, message=f"{failure.message}: {said}")
    kind, hint = _find(failure, run.oom_kills if run is not None else None)
    if kind is None and run is not None and run.disk_free_bytes is not None and run.disk_free_bytes < _FULL_BYTES:
        # Its own words had no room either.
        kind, hint = "disk_full", _DISK_HINT
    hint = failure.hint or (hint.format(node=failure.node) if hint is not None else None)
    return msgspec.structs.replace(failure, kind=kind, hint=hint)


def _find(failure: Failure, oom_kills: int | None) -> tuple[str | None, str | None]:
    if failure.signal == "SIGKILL" and oom_kills:
        return "out_of_memory", _STARVED_HINT
    # The sentence first: the log may speak of much else.
    for text in (failure.message, failure.log_tail):
        if oom_kills and _KILLED.search(text):
            return "out_of_memory", _STARVED_HINT
        for kind in _KINDS:
            if kind.pattern.search(text):
                return kind.name, kind.hint
        if failure.signal is not None:
            return _SIGNALS.get(failure.signal, "killed"), _SIGNAL_HINTS.get(failure.signal)
    if _KILLED.search(failure.message):
        return "killed", _SIGNAL_HINTS["SIGKILL"]
    return None, None


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
    causes = [*_no_step(nodes), *_full_link(shares)]
    hint = "; or ".join([*causes, *([failure.hint] if failure.hint else [])])
    return msgspec.structs.replace(failure, hint=hint or None)


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
    # A card that was reset counts anew.
    return max(moved) * 8 / took_ns / node.link_gbit_per_s if took_ns >= _LEAST_S * 1e9 and min(moved) >= 0 else None


def _no_step(nodes: Sequence[NodeProgress]) -> Iterable[str]:
    if any(node.step is not None for node in nodes):
        return
    told = next((f" ({node.name}: {node.stage})" for node in nodes if node.stage), "")
    yield (
        f"no worker had finished a step{told}: where one rank tokenises the data or loads the model, the others wait "
        "in a collective; a longer ddp_timeout, or data that is prepared once (tokenized_path), lets them"
    )


def _full_link(shares: Mapping[str, float | None]) -> Iterable[str]:
    name, share = max(
        ((name, share or 0.0) for name, share in shares.items()), key=lambda one: one[1], default=("", 0.0)
    )
    if share >= _FULL_SHARE:
        yield (
            f"the link of {name} was {min(share, 1.0):.0%} in use in the minute before: the collective was under way, "
            "and the link is too slow for it; send less (multinode advise), or set a longer ddp_timeout"
        )
