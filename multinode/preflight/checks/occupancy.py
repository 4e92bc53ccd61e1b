"""Occupancy: who else uses what the job is to use: other processes on its GPUs, and remains of our own runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from multinode.core.check.finding import Finding, Rule
from multinode.core.cluster.facts import Gpu, GpuProcess, NodeFacts, RunProcess
from multinode.preflight.checks.gpus import used_gpus
from multinode.preflight.grouping import group_findings
from multinode.preflight.inspection import Inspection

__all__ = ["check_gpus_free", "check_leftovers"]

GPU_HELD = Rule(
    check="gpus",
    severity="warning",
    catches="another process is on a GPU that the job would use",
    message="GPU {index} is in use by {who}, with {used} of its {total} of memory: the job would share it, and every "
    "step of all nodes waits for the slowest",
    hint="on {node}: nvidia-smi; wait for it, or choose other cards in the hostfile: gpus=",
)
GPU_FULL = Rule(
    check="gpus",
    severity="error",
    catches="a GPU that the job would use has hardly any memory left",
    message="GPU {index} is full: {used} of its {total} are taken by {who}, and the job would run out of memory there",
    hint="on {node}: nvidia-smi; wait for it, or choose other cards in the hostfile: gpus=",
)
LEFTOVER = Rule(
    check="leftovers",
    severity="warning",
    catches="processes of an earlier run that nobody looks after any more",
    message="{count} of run {run} left behind ({commands}), without a supervisor: what they take of cores, memory "
    "and ports the job will lack",
    hint="on {node}: kill -9 {pids!s}",
)
LEFTOVER_ON_GPU = Rule(
    check="leftovers",
    severity="error",
    catches="processes of an earlier run that still hold a GPU which the job would use",
    message="{count} of run {run} left behind ({commands}), without a supervisor, on GPU {gpus}: the job would find "
    "too little memory there, or share the card",
    hint="on {node}: kill -9 {pids!s}",
)
RUN_GOES_ON = Rule(
    check="leftovers",
    severity="note",
    catches="another run of ours is going on",
    message="run {run} goes on ({nodes}): it shares cores, memory and network with the job",
    hint="wait for its end, or stop it on all its nodes: multinode stop {run} (from another machine than the one that "
    "launched it: --hosts HOSTFILE)",
)
RUN_ON_GPU = Rule(
    check="leftovers",
    severity="warning",
    catches="another run of ours is going on, on GPUs that the job would use",
    message="run {run} goes on here and holds GPU {gpus}: the job would share it",
    hint="wait for its end, choose other cards in the hostfile (gpus=), or stop it on all its nodes: multinode stop "
    "{run} (from another machine than the one that launched it: --hosts HOSTFILE)",
)

# A desktop holds so much of a card at times, and a CUDA context alone takes more.
_LITTLE_MIB = 256.0
_FULL = 0.9
# What is taken without a process to be seen for it: a container hides them. The driver keeps less for itself.
_UNSEEN = 0.1
_SHOWN = 4


def check_gpus_free(inspection: Inspection) -> Iterator[Finding]:
    """The GPUs of the job have room, and nobody else computes on them."""
    for node, found in inspection.known:
        for gpu in used_gpus(inspection, node, found):
            ours = [process for process in gpu.processes if process.run_id is not None]
            others = [process for process in gpu.processes if process.run_id is None and _matters(process)]
            rule = _judge(gpu, ours=bool(ours), others=bool(others))
            if rule is not None:
                yield rule.found(
                    node.name,
                    index=gpu.index,
                    who=_listed(map(_describe, others)) or "processes that cannot be seen from here",
                    used=_gib(gpu.memory_used_mib),
                    total=_gib(gpu.memory_total_mib),
                )


def check_leftovers(inspection: Inspection) -> Iterator[Finding]:
    """No process of an earlier run is left, and no other run is going on."""
    going_on = []
    for node, found in inspection.known:
        for run, processes in _by_run(found).items():
            pids = {process.pid for process in processes}
            gpus = [
                str(gpu.index)
                for gpu in used_gpus(inspection, node, found)
                if any(holder.pid in pids for holder in gpu.processes)
            ]
            rule = _rule(processes, on_gpu=bool(gpus))
            if rule is RUN_GOES_ON:
                going_on.append((node.name, {"run": run}))
            else:
                yield rule.found(node.name, run=run, gpus=" and ".join(gpus), **_speak_of(processes))
    yield from group_findings(RUN_GOES_ON, going_on)


def _judge(gpu: Gpu, *, ours: bool, others: bool) -> Rule | None:
    share = None
    if gpu.memory_used_mib is not None and gpu.memory_total_mib:
        share = gpu.memory_used_mib / gpu.memory_total_mib
    # What our own runs hold is told as a leftover.
    if share is not None and share >= _FULL and (others or not ours):
        return GPU_FULL
    unseen = share is not None and share >= _UNSEEN and not gpu.processes
    return GPU_HELD if others or unseen else None


def _matters(process: GpuProcess) -> bool:
    return process.memory_mib is None or process.memory_mib >= _LITTLE_MIB


def _by_run(found: NodeFacts) -> dict[str, list[RunProcess]]:
    runs: dict[str, list[RunProcess]] = {}
    for process in found.run_processes:
        # What a run is called on a node has the node rank behind a dot.
        run, _, rank = process.run_id.rpartition(".")
        runs.setdefault(run if run and rank.isdigit() else process.run_id, []).append(process)
    return runs


def _rule(processes: Iterable[RunProcess], *, on_gpu: bool) -> Rule:
    if all(process.supervised for process in processes):
        return RUN_ON_GPU if on_gpu else RUN_GOES_ON
    return LEFTOVER_ON_GPU if on_gpu else LEFTOVER


def _speak_of(processes: list[RunProcess]) -> dict[str, str]:
    return {
        "count": "1 process" if len(processes) == 1 else f"{len(processes)} processes",
        "commands": _listed(dict.fromkeys(process.command or "a process" for process in processes)),
        "pids": " ".join(str(process.pid) for process in processes),
    }


def _describe(process: GpuProcess) -> str:
    parts = [f"pid {process.pid}"]
    if process.user is not None:
        parts.append(f"user {process.user}")
    if process.memory_mib is not None:
        parts.append(_gib(process.memory_mib))
    return f"{process.command or 'a process'} ({', '.join(parts)})"


def _listed(names: Iterable[str]) -> str:
    each = list(names)
    more = f" and {len(each) - _SHOWN} more" if len(each) > _SHOWN else ""
    return ", ".join(each[:_SHOWN]) + more


def _gib(memory_mib: float | None) -> str:
    return "an unknown part" if memory_mib is None else f"{memory_mib / 1024:.1f} GiB"
