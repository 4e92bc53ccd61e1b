"""Whether a run that has failed is started again, from where, and what the failure has cost. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from multinode.core.job.job import Job, LlamaFactoryJob, override_job
from multinode.core.run.checkpoint import Checkpoint, CheckpointChoice
from multinode.core.run.run import Attempt
from multinode.units import format_count

__all__ = [
    "NO_RESTART",
    "RestartOptions",
    "Saved",
    "Start",
    "resume_job",
    "says_resume",
    "why_no_resume",
    "why_not_restarted",
]

NO_RESTART = 78
"""Exit code with which a job says that a restart would not help: EX_CONFIG of sysexits.h."""

_OUT_OF_MEMORY = frozenset({"out_of_memory", "out_of_gpu_memory"})


class RestartOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a run is restarted.

    Attributes:
        restarts: how often at the most.
        node_wait_s: how long a node that cannot be reached is waited for.
        after_oom: whether a job that ran out of memory is started again as well.
    """

    restarts: int
    node_wait_s: float = 600.0
    after_oom: bool = False


def why_no_resume(job: Job) -> str | None:
    """Why a job cannot go on from a checkpoint; None where it can, or sees to that itself, as a script does."""
    if not isinstance(job, LlamaFactoryJob):
        return None
    config = job.config
    stage, how = config.get("stage"), config.get("finetuning_type", "lora")
    sharded = next((key for key in ("deepspeed", "fsdp") if config.get(key)), None)
    reasons = (
        (stage == "ppo", "LLaMA-Factory does not resume stage ppo"),
        (stage == "rm" and how in {"full", "freeze"}, f"LLaMA-Factory does not resume stage rm with {how} training"),
        (sharded, f"which checkpoint of {sharded} is complete is not known"),
        (config.get("save_only_model"), "save_only_model: true leaves out the optimizer's state"),
        (config.get("save_strategy") in {"no", False}, "save_strategy: no saves no checkpoint"),
        (not isinstance(config.get("output_dir"), str), "it names no output_dir"),
    )
    return next((reason for applies, reason in reasons if applies), None)


def why_not_restarted(attempts: Sequence[Attempt], options: RestartOptions) -> str | None:
    """Why the last attempt is not followed by another one; None where it is."""
    last, before = attempts[-1], attempts[-2] if len(attempts) > 1 else None
    failure = last.first_failure
    if last.status not in {"failed", "lost"} or failure is None:
        return f"it ended as {last.status}"
    same = before is not None and before.last_step == last.last_step and _cause(before) == _cause(last)
    # A job that has not worked yet is not at fault when its node is lost.
    stepless = failure.kind != "node_lost" and last.last_step <= last.first_step
    oom = failure.kind in _OUT_OF_MEMORY and not options.after_oom
    reasons = (
        (failure.exit_code == NO_RESTART, f"exit code {NO_RESTART} says that a restart would not help"),
        (oom, "it ran out of memory, and would again (--restart-after-oom restarts it all the same)"),
        (stepless, "it failed before its first step"),
        (same, f"it failed twice at step {last.last_step} for the same cause"),
        (len(attempts) > options.restarts, f"all {format_count(options.restarts, 'restart')} are used"),
    )
    return next((reason for applies, reason in reasons if applies), None)


def _cause(attempt: Attempt) -> tuple[object, ...]:
    failure = attempt.first_failure
    return () if failure is None else (failure.kind, failure.error_id, failure.node, failure.rank, failure.message)


class Saved(msgspec.Struct, frozen=True, kw_only=True):
    """The checkpoints of one node.

    Attributes:
        shared: the network file system that they lie on, as the node names its source; None of a local one.
    """

    checkpoints: tuple[Checkpoint, ...]
    shared: str | None = None

    def without(self, earlier: Saved | None) -> Saved:
        """Those that were not there, or have been saved anew, since an earlier look."""
        known = {(one.name, one.saved_ns) for one in earlier.checkpoints} if earlier is not None else set()
        kept = tuple(one for one in self.checkpoints if (one.name, one.saved_ns) not in known)
        return msgspec.structs.replace(self, checkpoints=kept)


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """What an attempt begins with.

    Attributes:
        choice: the checkpoint that it goes on from.
        is_first: whether it is the first attempt, where what the user says of a resume holds.
        has_any: whether there are checkpoints, complete or not.
        nodes: how many.
        shared: whether the nodes share the file system that the checkpoints lie on.
    """

    choice: CheckpointChoice = CheckpointChoice()
    is_first: bool = True
    has_any: bool = False
    nodes: int
    shared: bool = False


def resume_job(job: Job, start: Start) -> Job:
    """The job of an attempt. LLaMA-Factory is always given the checkpoint: it would choose one by its name alone."""
    if not isinstance(job, LlamaFactoryJob):
        return job
    changed: dict[str, object] = {}
    if start.nodes > 1 and not start.shared and "save_on_each_node" not in job.config:
        changed["save_on_each_node"] = True
    if start.is_first and says_resume(job):
        pass
    elif start.choice.name is not None:
        folder = str(job.config["output_dir"]).rstrip("/")
        changed |= {"resume_from_checkpoint": f"{folder}/{start.choice.name}", "overwrite_output_dir": False}
    elif start.has_any or not start.is_first:
        changed |= {"resume_from_checkpoint": None, "overwrite_output_dir": True}
    return override_job(job, changed) if changed else job


def says_resume(job: LlamaFactoryJob) -> bool:
    """Whether the user says where the training begins."""
    return bool(job.config.get("resume_from_checkpoint") or job.config.get("overwrite_output_dir"))
