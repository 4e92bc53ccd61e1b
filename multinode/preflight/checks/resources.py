"""Resources: what a machine has to offer is enough for the job: memory, /dev/shm, disk, limits of the login."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from multinode.analyse.job.model_size import parse_model
from multinode.core.check.finding import Finding, Rule
from multinode.core.job.deepspeed import parse_deepspeed
from multinode.core.job.job import LlamaFactoryJob, ScriptJob
from multinode.preflight.checks.gpus import used_gpus, worker_count
from multinode.preflight.grouping import group_findings
from multinode.preflight.inspection import Inspection

__all__ = ["check_disk", "check_limits", "check_memory_limit", "check_offload", "check_shared_memory"]

SMALL_SHM = Rule(
    check="machine",
    severity="warning",
    catches="too small a /dev/shm, as docker makes it: data loader workers and NCCL die of a bus error",
    message="no more than {total} fit into /dev/shm of {nodes}, and {users} share data there: a worker may die with "
    "`Bus error` or `No space left on device`",
    hint="docker: start the container with --shm-size=16g (or --ipc=host); else on {nodes!s}: "
    "sudo mount -o remount,size=16G /dev/shm",
)
FULL_SHM = Rule(
    check="machine",
    severity="warning",
    catches="a /dev/shm full of what dead processes left there",
    message="{free} are left of {total} in /dev/shm of {nodes}, and {users} share data there: a worker may die with "
    "`Bus error`",
    hint="on {nodes!s}, see what lies there and remove what is nobody's any more: ls -lat /dev/shm",
)
DISK_FULL = Rule(
    check="machine",
    severity="error",
    catches="no space left where a run keeps its log and samples",
    message="{free} are left on the disk of the home directory, where a run keeps its log: the run would fail at once",
    hint="make room on {node}; see what takes it: du -xh --max-depth=2 ~ | sort -h | tail",
)
DISK_LOW = Rule(
    check="machine",
    severity="warning",
    catches="less than 1 GiB left where a run keeps its log and samples",
    message="{free} are left on the disk of the home directory, where a run keeps its log: a checkpoint beside it may "
    "not fit",
    hint="make room on {node}; see what takes it: du -xh --max-depth=2 ~ | sort -h | tail",
)
OFFLOAD_TOO_LARGE = Rule(
    check="machine",
    severity="warning",
    catches="DeepSpeed offload to a node without the memory for it",
    message="the DeepSpeed JSON offloads {what} to the CPU: for {billions} billion parameters ({source}) on "
    "{count} nodes that is about {need} GiB on each, and {nodes} may use {there} GiB: the kernel would kill a worker "
    "(exit code -9)",
    hint="remove {keys!s} from the DeepSpeed JSON, use finetuning_type: lora, or train on more nodes",
)
MEMORY_LIMITED = Rule(
    check="machine",
    severity="note",
    catches="a container or login session that may use only a part of the machine's memory",
    message="{nodes} may use {limit} of the machine's {total} GiB of memory: beyond that the kernel kills a worker "
    "(exit code -9), whatever `free` says",
    hint="docker: --memory; systemd: systemctl set-property user-$UID.slice MemoryMax=infinity",
)
FEW_OPEN_FILES = Rule(
    check="machine",
    severity="warning",
    catches="a limit on open files that a training reaches",
    message="on {nodes} a process may open {limit} files: sockets to every other worker and data loaders reach that "
    "(`Too many open files`)",
    hint="on {nodes!s}, as root, and then log in anew: {raise_files!s}",
)
LOW_OPEN_FILES = Rule(
    check="machine",
    severity="note",
    catches="a limit on open files that a large training may reach",
    message="on {nodes} a process may open {limit} files: many data loader workers or a large cluster may reach that "
    "(`Too many open files`)",
    hint="on {nodes!s}, as root, and then log in anew: {raise_files!s}",
)
FEW_PROCESSES = Rule(
    check="machine",
    severity="warning",
    catches="a limit on processes and threads that a training reaches",
    message="on {nodes} user {user} may have {limit} processes and threads: each worker has dozens "
    "(`Resource temporarily unavailable`)",
    hint="on {nodes!s}, as root, and then log in anew: "
    "printf '* soft nproc unlimited\\n' > /etc/security/limits.d/multinode-nproc.conf",
)

# What was found: the rule that speaks of it, the node, the values that the rule names.
_Case = tuple[Rule, str, dict[str, str]]

_GIB = 1 << 30
_MIB_PER_GIB = 1024
_SMALL_SHM_GIB = 1.0
# What docker gives a container that asks for nothing.
_DOCKER_SHM_GIB = 64 / _MIB_PER_GIB
_LOW_DISK_GIB = 1.0
_NO_DISK_GIB = 50 / _MIB_PER_GIB
_FEW_FILES, _LOW_FILES = 1024, 4096
_RAISE_FILES = "printf '* - nofile 65536\\n' > /etc/security/limits.d/multinode-nofile.conf"
_FEW_PROCESSES = 1024
_ALL = 0.95
# Bytes for each parameter, the least of what DeepSpeed's own estimate takes (estimate_zero2_model_states_mem_needs,
# estimate_zero3_model_states_mem_needs): fp32 weights, two moments and gradients; and half-precision weights.
_OPTIMIZER_BYTES = 16
_PARAM_BYTES = 2
_BILLIONS = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)[bB](?![A-Za-z0-9])")


def check_shared_memory(inspection: Inspection) -> Iterator[Finding]:
    """Shared memory has room for what workers put there."""
    cases: list[_Case] = []
    for node, found in inspection.known:
        total, free = found.shm_total_gib, found.shm_free_gib
        users = _shm_users(inspection, on_gpus=len(used_gpus(inspection, node, found)) > 1)
        if users is None and isinstance(inspection.job, ScriptJob) and total is not None and total <= _DOCKER_SHM_GIB:
            users = "data loader workers, if the script has any,"
        if users is None or total is None:
            continue
        values = {"total": _size(total), "users": users}
        if total < _SMALL_SHM_GIB:
            cases.append((SMALL_SHM, node.name, values))
        elif free is not None and free < _DOCKER_SHM_GIB:
            cases.append((FULL_SHM, node.name, {**values, "free": _size(free)}))
    yield from _grouped(cases)


def check_disk(inspection: Inspection) -> Iterator[Finding]:
    """There is room for a run's log and samples."""
    for node, found in inspection.known:
        free = found.disk_free_gib
        if free is not None and free < _LOW_DISK_GIB:
            yield (DISK_FULL if free < _NO_DISK_GIB else DISK_LOW).found(node.name, free=_size(free))


def check_memory_limit(inspection: Inspection) -> Iterator[Finding]:
    """Nothing limits the memory unseen."""
    cases: list[_Case] = []
    for node, found in inspection.known:
        total, limit = found.memory_total_gib, found.memory_limit_gib
        if total is not None and limit is not None and limit < _ALL * total:
            cases.append((MEMORY_LIMITED, node.name, {"limit": f"{limit:.3g}", "total": f"{total:.3g}"}))
    yield from _grouped(cases)


def check_offload(inspection: Inspection) -> Iterator[Finding]:
    """What DeepSpeed offloads fits into memory."""
    parts, count = _offloaded_parts(inspection.job), len(inspection.cluster.nodes)
    cases: list[_Case] = []
    for node, found in inspection.known if parts else ():
        counted = _count_parameters(inspection.job, found.model)
        if counted is None or found.memory_total_gib is None:
            continue
        parameters, source = counted
        usable = min(found.memory_total_gib, found.memory_limit_gib or found.memory_total_gib)
        need = parameters * sum(size for _, _, size in parts) / count / _GIB
        if need > usable:
            values = {
                "what": " and ".join(what for what, _, _ in parts),
                "keys": " and ".join(key for _, key, _ in parts),
                "billions": f"{parameters / 1e9:.3g}",
                "source": source,
                "count": str(count),
                "need": f"{need:.0f}",
                "there": f"{usable:.0f}",
            }
            cases.append((OFFLOAD_TOO_LARGE, node.name, values))
    yield from _grouped(cases)


def check_limits(inspection: Inspection) -> Iterator[Finding]:
    """The limits that a job inherits from its login let it work."""
    cases: list[_Case] = []
    for node, found in inspection.known:
        files, processes = found.limits.get("open_files"), found.limits.get("processes")
        if files is not None and files < _LOW_FILES:
            rule = FEW_OPEN_FILES if files < _FEW_FILES else LOW_OPEN_FILES
            cases.append((rule, node.name, {"limit": str(files), "raise_files": _RAISE_FILES}))
        # The kernel does not hold root to it.
        if processes is not None and processes < _FEW_PROCESSES and found.user not in {None, "root"}:
            cases.append((FEW_PROCESSES, node.name, {"limit": str(processes), "user": str(found.user)}))
    yield from _grouped(cases)


def _grouped(cases: list[_Case]) -> Iterator[Finding]:
    """Machines are bought and set up alike: what many have in common is said once."""
    for rule in dict.fromkeys(rule for rule, _, _ in cases):
        yield from group_findings(rule, [(node, values) for its, node, values in cases if its is rule])


def _shm_users(inspection: Inspection, *, on_gpus: bool) -> str | None:
    """Who needs /dev/shm for this job; None is nobody that we know of."""
    if isinstance(inspection.job, LlamaFactoryJob):
        loaders = inspection.job.config.get("dataloader_num_workers")
        if type(loaders) is int and loaders > 0:
            return f"{loaders} data loader workers of each training worker"
    workers = worker_count(inspection)
    return f"NCCL's {workers} workers" if on_gpus and workers is not None and workers > 1 else None


def _offloaded_parts(job: object) -> list[tuple[str, str, int]]:
    """What the job offloads to the CPU: in a word, by its key in the DeepSpeed JSON, bytes for each parameter."""
    deepspeed = parse_deepspeed(job.deepspeed_text or "") if isinstance(job, LlamaFactoryJob) else None
    parts = []
    if isinstance(job, LlamaFactoryJob) and deepspeed is not None:
        # Of LoRA the optimizer is small.
        if deepspeed.offload_optimizer == "cpu" and job.config.get("finetuning_type") == "full":
            parts.append(("optimizer", "offload_optimizer", _OPTIMIZER_BYTES))
        if deepspeed.offload_parameters == "cpu":
            parts.append(("parameters", "offload_param", _PARAM_BYTES))
    return parts


def _count_parameters(job: object, model: dict[str, Any] | None) -> tuple[float, str] | None:
    """Parameters of the model and how they are known: by its config.json, or by its name (`...-8B`)."""
    shape = parse_model(model or {})
    if shape is not None:
        return float(shape.parameters), "by its config.json"
    name = str(job.config.get("model_name_or_path", "")) if isinstance(job, LlamaFactoryJob) else ""
    match = _BILLIONS.search(name.rstrip("/").rpartition("/")[2])
    return None if match is None else (float(match[1]) * 1e9, "by its name")


def _size(gib: float) -> str:
    return f"{gib:.1f} GiB" if gib >= 1 else f"{gib * _MIB_PER_GIB:.0f} MiB"
