"""Whether a failed run is restarted, and with which settings. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import msgspec

from multinode.cluster.cluster import Cluster
from multinode.errors import UsageError
from multinode.job.engines.engine import Engine
from multinode.job.job import Job, change_arguments
from multinode.job.launch_options import LaunchOptions
from multinode.job.planning import workers_of_nodes
from multinode.launch.checkpoints import Checkpoint, CheckpointChoice, Layout
from multinode.launch.sharding import (
    layout_of,
    library_of,
    output_dir_of,
    saved_on_each_node,
)
from multinode.records.benchmark import Benchmark
from multinode.records.run import Attempt
from multinode.units import format_count

NO_RESTART = 78
"""Exit code by which a job says that a restart would not help: EX_CONFIG of sysexits.h."""

_OUT_OF_MEMORY = frozenset({"out_of_memory", "out_of_gpu_memory"})
# With full and freeze training it ignores the checkpoint (hparams/parser.py); for a model with a value head and LoRA
# the Trainer does not find the weights, which fix_valuehead_checkpoint has split (_load_from_checkpoint).
_NOT_RESUMED = frozenset({"rm", "ppo"})


class RestartOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How to restart a run.

    Attributes:
        restarts: maximum number of restarts.
        node_wait_s: how long to wait for a node that cannot be reached.
        after_oom: whether to also restart a job that ran out of memory.
        min_nodes: minimum number of nodes to continue with. Default: all nodes.
        scale_batch: whether to continue with a smaller global batch if no number of accumulation steps can keep the
            original size.
        shard_copies: number of other nodes to which each node copies its shards after every save.
    """

    restarts: int
    node_wait_s: float = 600.0
    after_oom: bool = False
    min_nodes: int | None = None
    scale_batch: bool = False
    shard_copies: int = 1


def require_restartable(job: Job | Benchmark, cluster: Cluster, launch: LaunchOptions, options: RestartOptions) -> Job:
    """The job, if it can be restarted as asked for, as far as this is known before a node is asked.

    Raises:
        UsageError: it is a benchmark, or cannot resume from a checkpoint, or not on fewer nodes.
    """
    if isinstance(job, Benchmark):
        raise UsageError("--restarts does not apply to a benchmark", hint="launch it without --restarts")
    reason = why_no_resume(job, launch.engine)
    if reason is not None:
        raise UsageError(f"--restarts: {reason}", hint="launch it without --restarts")
    workers = workers_of_nodes(cluster, {}, launch.workers_per_node)
    reason = why_no_fewer_nodes(job, launch, workers, options)
    if reason is not None:
        raise UsageError(f"--min-nodes {options.min_nodes}: {reason}", hint="launch it without --min-nodes")
    return job


def why_no_resume(job: Job, engine: Engine | None = None) -> str | None:
    """Why a job cannot resume from a checkpoint; None if it can, or resumes itself, as a script does."""
    if not job.takes_checkpoint:
        return None
    config, kind = job.arguments, job.kind
    stage = config.get("stage")
    layout = layout_of(job, engine)
    reasons = (
        (str(stage) in _NOT_RESUMED, f"{kind.title} does not resume stage {stage}"),
        (isinstance(layout, str), str(layout)),
        (config.get("save_only_model"), "save_only_model: true does not save the optimizer state"),
        (config.get("save_strategy") in ("no", False), "save_strategy: no saves no checkpoint"),
        (not isinstance(config.get("output_dir"), str), "the job sets no output_dir"),
    )
    return next((reason for applies, reason in reasons if applies), None)


def why_no_fewer_nodes(job: Job, launch: LaunchOptions, workers: Sequence[int], options: RestartOptions) -> str | None:
    """Why a job with so many workers on each node could not go on without some; None where it could, or is not to."""
    least, nodes = options.min_nodes, len(workers)
    if least is None:
        return None
    sharded, layout = library_of(job, launch.engine), layout_of(job, launch.engine)
    reshards = isinstance(layout, Layout) and layout.reshards
    keeps = any(kept_accumulation(job, sum(workers), fewer) is not None for fewer in _on_fewer_nodes(workers, least))
    reasons = (
        (least > nodes, f"there are only {format_count(nodes, 'node')}"),
        (sharded and not reshards, f"a {sharded} checkpoint can only be loaded by the same number of workers"),
        *((True, lever.why_no_fewer_nodes) for lever in launch.levers if lever.why_no_fewer_nodes is not None),
        (
            least < nodes and not keeps and not options.scale_batch,
            f"fewer nodes cannot keep the global batch of {nodes} nodes (--scale-batch allows a smaller batch)",
        ),
    )
    return next((reason for applies, reason in reasons if applies), None)


def _on_fewer_nodes(workers: Sequence[int], least: int) -> set[int]:
    """How many workers there can be on some of these nodes, at least so many of them."""
    of_nodes: list[set[int]] = [{0}, *(set() for _ in workers)]
    for count in workers:
        for nodes in reversed(range(len(workers))):
            of_nodes[nodes + 1] |= {total + count for total in of_nodes[nodes]}
    return set().union(*of_nodes[least:-1])


def kept_accumulation(job: Job, first_workers: int, workers: int) -> int | None:
    """Accumulation steps that keep the global batch with so many workers; None where no whole number of them does.

    For a script: how many of its own batches make up one of the first attempt's.
    """
    steps, rest = divmod(job.accumulation(first_workers) * first_workers, workers)
    return None if rest else steps


def why_not_restarted(attempts: Sequence[Attempt], options: RestartOptions) -> str | None:
    """Why no attempt follows the last one; None if one does."""
    last, before = attempts[-1], attempts[-2] if len(attempts) > 1 else None
    failure = last.first_failure
    if last.status not in {"failed", "lost"} or failure is None:
        return f"it ended with status {last.status}"
    same = before is not None and before.last_step == last.last_step and _cause(before) == _cause(last)
    # A job that has not worked yet is not to blame for a lost node.
    stepless = failure.kind != "node_lost" and last.last_step <= last.first_step
    oom = failure.kind in _OUT_OF_MEMORY and not options.after_oom
    reasons = (
        (failure.exit_code == NO_RESTART, f"exit code {NO_RESTART} means that a restart would not help"),
        (oom, "it ran out of memory and would do so again (--restart-after-oom restarts it anyway)"),
        (stepless, "it failed before its first step"),
        (same, f"it failed twice at step {last.last_step} with the same cause"),
        (len(attempts) > options.restarts, f"the limit of {format_count(options.restarts, 'restart')} is reached"),
    )
    return next((reason for applies, reason in reasons if applies), None)


def _cause(attempt: Attempt) -> tuple[object, ...]:
    failure = attempt.first_failure
    return () if failure is None else (failure.kind, failure.error_id, failure.node, failure.rank, failure.message)


class Saved(msgspec.Struct, frozen=True, kw_only=True):
    """The checkpoints of one node."""

    checkpoints: tuple[Checkpoint, ...]
    folder: str = ""  # where they lie, absolute
    shared: str | None = None  # source of their network file system, as the node names it; None for a local one

    def without(self, earlier: Saved | None) -> Saved:
        """Checkpoints that are new or newly written since an earlier look."""
        earlier_keys = (
            {(checkpoint.name, checkpoint.saved_ns) for checkpoint in earlier.checkpoints}
            if earlier is not None
            else set()
        )
        kept = tuple(
            checkpoint for checkpoint in self.checkpoints if (checkpoint.name, checkpoint.saved_ns) not in earlier_keys
        )
        return msgspec.structs.replace(self, checkpoints=kept)


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """How an attempt starts."""

    choice: CheckpointChoice = CheckpointChoice()  # the checkpoint to resume from
    is_first: bool = True  # whether it is the first attempt, for which the user's own resume setting holds
    has_any: bool = False  # whether there are checkpoints, complete or not
    nodes: int  # how many
    workers: int = 1  # on all of them; `first_workers` those of the first attempt
    first_workers: int = 1
    shared: bool = False  # whether the nodes share the file system that the checkpoints lie on

    def accumulation(self, job: Job) -> int | None:
        """Gradient accumulation that keeps the global batch size of the first attempt; see `kept_accumulation`."""
        return kept_accumulation(job, self.first_workers, self.workers)


def resume_job(job: Job, start: Start) -> Job:
    """The job of an attempt. A framework always gets the checkpoint: it would choose one by name only."""
    given = job.arguments
    changed = {key: value for key, value in job.kind.for_restarts.items() if given.get(key) != value}
    if start.nodes > 1 and not start.shared and job.takes_checkpoint:
        job = saved_on_each_node(job)
    if not job.takes_checkpoint or (start.is_first and says_resume(job)):
        pass
    elif start.choice.name is not None:
        folder = str(job.arguments["output_dir"]).rstrip("/")
        changed |= {"resume_from_checkpoint": f"{folder}/{start.choice.name}", "overwrite_output_dir": False}
    elif start.has_any or not start.is_first:
        changed |= {"resume_from_checkpoint": None, "overwrite_output_dir": True}
    accumulation = start.accumulation(job)
    if accumulation is not None and accumulation != job.accumulation(start.workers):
        changed["gradient_accumulation_steps"] = accumulation
    if accumulation is None and start.choice.max_steps is not None:
        # Epochs of a smaller batch have more steps, and the checkpoint's schedule is in steps.
        changed["max_steps"] = start.choice.max_steps
    return change_arguments(job, changed) if changed else job


def script_variables(job: Job, start: Start) -> dict[str, str]:
    """What tells the hooks of a job with the Trainer where it saves, and the checkpoint that it resumes from."""
    output = output_dir_of(job)
    if job.takes_checkpoint or output is None:
        return {}
    variables: dict[str, str] = {}
    if start.nodes > 1 and not start.shared and "save_on_each_node" not in job.trainer_options:
        variables["MULTINODE_SAVE_ON_EACH_NODE"] = "1"
    if start.choice.name is not None:
        variables["MULTINODE_CHECKPOINT"] = f"{output.rstrip('/')}/{start.choice.name}"
    return variables


def says_resume(job: Job) -> bool:
    """Whether the job itself says where the training starts, as a script always does in its first attempt."""
    if not job.takes_checkpoint:
        return True
    return bool(job.arguments.get("resume_from_checkpoint") or job.arguments.get("overwrite_output_dir"))


def global_batch(job: Job, world_size: int) -> int | None:
    """Samples per optimizer step; None if unknown, as for a script."""
    batch = job.settings.per_device_train_batch_size
    return batch * job.accumulation(world_size) * world_size if batch is not None else None


def batch_words(before: Job, after: Job, start: Start) -> str | None:
    """What becomes of the batch, the learning rate and the schedule on fewer nodes; None where there are as many.

    `before` is the job of the first attempt, `after` that of the one that begins with `start`.
    """
    part = Fraction(start.workers, start.first_workers)
    if part == 1:
        return None
    kept = start.accumulation(before)
    if before.training is None:
        share = f"{part} of the original" if kept is None else "as before"
        return f"MULTINODE_ACCUMULATION={kept or 1}: the global batch is then {share}"
    first = global_batch(before, start.first_workers)
    rate = before.arguments.get("learning_rate", before.settings.learning_rate)
    if kept is not None:
        before_steps = before.accumulation(start.first_workers)
        return f"global batch {first} as before: gradient_accumulation_steps {kept} instead of {before_steps}"
    steps = start.choice.max_steps if start.choice.name is not None else None
    schedule = f"the schedule keeps {steps} steps" if steps is not None else "the schedule stays as in the YAML"
    batch = f"global batch {global_batch(after, start.workers)} instead of {first}"
    share = f"a step has {part} of the samples"
    return f"{batch}: learning_rate stays at {rate} and {schedule}; {share}"
