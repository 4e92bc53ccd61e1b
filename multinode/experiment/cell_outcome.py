"""Outcome of a cell: what a run that ended says about it, out of memory included. Pure."""

from __future__ import annotations

import msgspec

from multinode.records.run import Failure, NodeRun, Run

_OUT_OF_MEMORY = {"out_of_gpu_memory": "gpu", "out_of_memory": "node"}
# What the others see when the kernel kills one of them, its data loader or its launcher.
_OF_KILLED_PEERS = frozenset({"killed", "connection", "timeout", "crashed"})


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The end of one run of a cell."""

    state: str  # `measured`, `out_of_memory`, `failed`, or `stopped`: it was given up and says nothing
    out_of: str | None = None  # whose memory did not suffice: `gpu` or `node`
    reason: str = ""  # of all but `measured`, a sentence
    failure: Failure | None = None  # the run's first
    unreachable: bool = False  # a node could not be reached, or was lost
    held: bool = False  # somebody else computes on a GPU; like a node that is lost, it says nothing about the cell


def judge_run(run: Run, *, in_time: bool, lacks: str | None) -> Outcome:
    """What a run that has ended says about its cell.

    Args:
        run: what happened.
        in_time: whether it was stopped because its time was over, and so ended as it should.
        lacks: why it has no figures; None where it has.
    """
    if run.status == "succeeded" or (run.status == "stopped" and in_time):
        if lacks is None:
            return Outcome(state="measured")
        return Outcome(state="failed", reason=f"{lacks}: use more --minutes" if in_time else lacks)
    if run.status in {"stopped", "running"}:
        return Outcome(state="stopped", reason="it was stopped")
    failure = run.first_failure
    kind = failure.kind if failure is not None else None
    killed = _killed_by_kernel(run)
    if killed is not None and _may_be_killed(failure):
        reason = f"{killed.name}: the kernel killed {_processes(killed)} because memory ran out"
        return Outcome(state="out_of_memory", out_of="node", reason=reason, failure=failure)
    if kind in _OUT_OF_MEMORY and failure is not None:
        return Outcome(state="out_of_memory", out_of=_OUT_OF_MEMORY[kind], reason=_sentence(failure), failure=failure)
    reason = _sentence(failure) if failure is not None else f"the run ended as {run.status}"
    return Outcome(
        state="failed", reason=reason, failure=failure, unreachable=run.status == "lost", held=kind == "gpu_held"
    )


def _killed_by_kernel(run: Run) -> NodeRun | None:
    return next((node for node in run.nodes if node.oom_kills), None)


def _may_be_killed(failure: Failure | None) -> bool:
    """Whether a kill by the kernel can have caused it: an exception that tells another cause has that cause.

    The kernel's count may be of the whole machine, where others run out of memory, too.
    """
    if failure is None or failure.kind in _OF_KILLED_PEERS or failure.signal == "SIGKILL":
        return True
    return failure.kind is None and failure.signal is not None


def _processes(node: NodeRun) -> str:
    return "a process" if node.oom_kills == 1 else f"{node.oom_kills} processes"


def _sentence(failure: Failure) -> str:
    first = failure.message.strip().splitlines()
    return f"{failure.node}: {first[0] if first else 'it failed'}"
