"""Whether a failed run is restarted, from which checkpoint, and the cost of the failure. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Annotated

import msgspec
from msgspec import Meta

from multinode.cluster.cluster import Cluster
from multinode.errors import UsageError
from multinode.job.engines.engine import Engine, choose_engine
from multinode.job.job import Job, LlamaFactoryJob, override_job
from multinode.job.launch_options import LaunchOptions
from multinode.job.planning import workers_of_nodes
from multinode.job.restrictions import gradient_sender
from multinode.records.benchmark import Benchmark
from multinode.records.run import Attempt
from multinode.units import format_count

_STATE = "trainer_state.json"
# Written by torch.save beside the weights. Without both, the Trainer silently starts with a new optimizer
# (Trainer._load_optimizer_and_scheduler).
_NEEDED = ("optimizer.pt", "scheduler.pt")
_WEIGHTS = (
    "model.safetensors",
    "adapter_model.safetensors",
    "pytorch_model.bin",
    "adapter_model.bin",
)
_INDEX = ".index.json"


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint as one node sees it."""

    name: Annotated[str, Meta(pattern=r"^checkpoint-[0-9]{1,15}$")]  # of its directory, `checkpoint-20`
    step: Annotated[int, Meta(ge=0)] | None = None  # from trainer_state.json; None if unreadable
    max_steps: Annotated[int, Meta(ge=1)] | None = None  # of the whole training, likewise
    files: dict[str, str | None] = {}  # by name, what is wrong with the file, or None
    shards: tuple[str, ...] = ()  # of the weights, as listed in their index
    saved_ns: int | None = None  # modification time of trainer_state.json, on the node's clock; None if missing

    @property
    def number(self) -> int:
        """The step in its name."""
        return int(self.name.partition("-")[2])


class CheckpointChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The checkpoint to resume from."""

    name: str | None = None  # None if none is complete, and the training starts from scratch
    step: int = 0  # 0 without a checkpoint
    max_steps: int | None = None  # of the whole training, from the checkpoint; None if unknown
    skipped: dict[str, str] = {}  # newer, incomplete ones, each with the reason


def choose_checkpoint(
    seen: Mapping[str, tuple[Checkpoint, ...]], ranks: Mapping[str, tuple[int, ...]], *, same_ranks: bool = True
) -> CheckpointChoice:
    """The newest that is complete on every node.

    `seen` is by node; nodes with a shared file system see the same. `ranks` are the workers that each will have;
    `same_ranks` whether these saved it: others cannot restore random states, and need none.
    """
    by_name = {node: {checkpoint.name: checkpoint for checkpoint in checkpoints} for node, checkpoints in seen.items()}
    every = {checkpoint.name: checkpoint.number for checkpoints in seen.values() for checkpoint in checkpoints}
    skipped: dict[str, str] = {}
    world_size = sum(map(len, ranks.values()))
    for name in sorted(every, key=lambda name: every[name], reverse=True):
        candidates = {node: by_name.get(node, {}).get(name) for node in ranks}
        gaps = ((node, find_gap(candidates[node], ranks[node], world_size, same_ranks=same_ranks)) for node in ranks)
        gap = next((f"{node}: {gap}" for node, gap in gaps if gap is not None), None)
        if gap is None:
            max_steps = next(
                (checkpoint.max_steps for checkpoint in candidates.values() if checkpoint is not None), None
            )
            return CheckpointChoice(name=name, step=every[name], max_steps=max_steps, skipped=skipped)
        skipped[name] = gap
    return CheckpointChoice(skipped=skipped)


def find_gap(
    checkpoint: Checkpoint | None, ranks: tuple[int, ...], world_size: int, *, same_ranks: bool = True
) -> str | None:
    """The first file that a node lacks to resume from a checkpoint; None if it is complete."""
    if checkpoint is None:
        return "it is missing"
    files = checkpoint.files
    damaged = next((f"{name}: {problem}" for name, problem in sorted(files.items()) if problem is not None), None)
    if damaged is not None:
        return damaged
    # The Trainer adds the process number to the name only with several processes.
    states = [f"rng_state_{rank}.pth" for rank in ranks] if world_size > 1 else ["rng_state.pth"]
    states = states if same_ranks else []
    missing = [name for name in (_STATE, *_NEEDED, *checkpoint.shards, *states) if name not in files]
    if missing:
        return f"{missing[0]} is missing"
    if checkpoint.step != checkpoint.number:
        return f"{_STATE} is of step {checkpoint.step}"
    whole = any(name in files for name in _WEIGHTS)
    sharded = checkpoint.shards and any(f"{name}{_INDEX}" in files for name in _WEIGHTS)
    return None if whole or sharded else "its weights are missing"


NO_RESTART = 78
"""Exit code by which a job says that a restart would not help: EX_CONFIG of sysexits.h."""

_OUT_OF_MEMORY = frozenset({"out_of_memory", "out_of_gpu_memory"})
# With full and freeze training it ignores the checkpoint (hparams/parser.py); for a model with a value head and LoRA
# the Trainer does not find the weights, which fix_valuehead_checkpoint has split (_load_from_checkpoint).
_NOT_RESUMED = frozenset({"rm", "ppo"})


class RestartOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a run is restarted.

    Attributes:
        restarts: maximum number.
        node_wait_s: how long to wait for an unreachable node.
        after_oom: whether to restart a job that ran out of memory, too.
        min_nodes: minimum number of nodes to continue with; None is all of them.
        scale_batch: whether to continue with a smaller global batch if no accumulation keeps it.
    """

    restarts: int
    node_wait_s: float = 600.0
    after_oom: bool = False
    min_nodes: int | None = None
    scale_batch: bool = False


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
    if not isinstance(job, LlamaFactoryJob):
        return None
    config = job.config
    stage = config.get("stage")
    sharded = _sharding(job, engine)
    reasons = (
        (stage in _NOT_RESUMED, f"LLaMA-Factory does not resume stage {stage}"),
        (sharded, f"it is unknown which {sharded} checkpoint is complete"),
        (config.get("save_only_model"), "save_only_model: true does not save the optimizer state"),
        (config.get("save_strategy") in {"no", False}, "save_strategy: no saves no checkpoint"),
        (not isinstance(config.get("output_dir"), str), "it has no output_dir"),
    )
    return next((reason for applies, reason in reasons if applies), None)


def why_no_fewer_nodes(job: Job, launch: LaunchOptions, workers: Sequence[int], options: RestartOptions) -> str | None:
    """Why a job with so many workers on each node could not go on without some; None where it could, or is not to."""
    least, nodes = options.min_nodes, len(workers)
    if least is None:
        return None
    sharded = _sharding(job, launch.engine)
    keeps = any(kept_accumulation(job, sum(workers), fewer) is not None for fewer in _on_fewer_nodes(workers, least))
    reasons = (
        (least > nodes, f"there are only {format_count(nodes, 'node')}"),
        (sharded, f"a {sharded} checkpoint fits only one number of workers"),
        *((True, lever.why_no_fewer_nodes) for lever in launch.levers if lever.why_no_fewer_nodes is not None),
        (
            least < nodes and not keeps and not options.scale_batch,
            f"no accumulation keeps the global batch of {nodes} nodes on fewer nodes (--scale-batch lets it shrink)",
        ),
    )
    return next((reason for applies, reason in reasons if applies), None)


def _sharding(job: Job, engine: Engine | None) -> str | None:
    engine = engine or choose_engine(job)
    return gradient_sender(job, engine) or engine.kind.sharded_by


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
    steps, rest = divmod(_accumulation(job) * first_workers, workers)
    return None if rest else steps


def why_not_restarted(attempts: Sequence[Attempt], options: RestartOptions) -> str | None:
    """Why no attempt follows the last one; None if one does."""
    last, before = attempts[-1], attempts[-2] if len(attempts) > 1 else None
    failure = last.first_failure
    if last.status not in {"failed", "lost"} or failure is None:
        return f"it ended as {last.status}"
    same = before is not None and before.last_step == last.last_step and _cause(before) == _cause(last)
    # A job that has not worked yet is not to blame for a lost node.
    stepless = failure.kind != "node_lost" and last.last_step <= last.first_step
    oom = failure.kind in _OUT_OF_MEMORY and not options.after_oom
    reasons = (
        (failure.exit_code == NO_RESTART, f"exit code {NO_RESTART} means that a restart would not help"),
        (oom, "it ran out of memory and would do so again (--restart-after-oom restarts it anyway)"),
        (stepless, "it failed before its first step"),
        (same, f"it failed twice at step {last.last_step} with the same cause"),
        (len(attempts) > options.restarts, f"all {format_count(options.restarts, 'restart')} are used"),
    )
    return next((reason for applies, reason in reasons if applies), None)


def _cause(attempt: Attempt) -> tuple[object, ...]:
    failure = attempt.first_failure
    return () if failure is None else (failure.kind, failure.error_id, failure.node, failure.rank, failure.message)


class Saved(msgspec.Struct, frozen=True, kw_only=True):
    """The checkpoints of one node."""

    checkpoints: tuple[Checkpoint, ...]
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
    """The job of an attempt. LLaMA-Factory always gets the checkpoint: it would choose one by name only."""
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
    accumulation = start.accumulation(job)
    if accumulation is not None and accumulation != _accumulation(job):
        changed["gradient_accumulation_steps"] = accumulation
    if accumulation is None and start.choice.max_steps is not None:
        # Epochs of a smaller batch have more steps, and the checkpoint's schedule is in steps.
        changed["max_steps"] = start.choice.max_steps
    return override_job(job, changed) if changed else job


def says_resume(job: LlamaFactoryJob) -> bool:
    """Whether the user sets where the training starts."""
    return bool(job.config.get("resume_from_checkpoint") or job.config.get("overwrite_output_dir"))


def global_batch(job: Job, world_size: int) -> int | None:
    """Samples per optimizer step; None if unknown, as for a script."""
    if not isinstance(job, LlamaFactoryJob):
        return None
    batch = job.settings.per_device_train_batch_size
    return batch * _accumulation(job) * world_size if batch is not None else None


def batch_words(before: Job, after: Job, start: Start) -> str | None:
    """What becomes of the batch, the learning rate and the schedule on fewer nodes; None where there are as many.

    `before` is the job of the first attempt, `after` that of the one that begins with `start`.
    """
    part = Fraction(start.workers, start.first_workers)
    if part == 1:
        return None
    kept = start.accumulation(before)
    if not isinstance(before, LlamaFactoryJob):
        share = f"{part} of the original" if kept is None else "as before"
        return f"MULTINODE_ACCUMULATION={kept or 1}: the global batch is then {share}"
    first = global_batch(before, start.first_workers)
    rate = before.config.get("learning_rate", before.settings.learning_rate)
    if kept is not None:
        return f"global batch {first} as before: gradient_accumulation_steps {kept} instead of {_accumulation(before)}"
    steps = start.choice.max_steps if start.choice.name is not None else None
    schedule = f"the schedule at {steps} steps" if steps is not None else "the schedule is that of the YAML"
    batch = f"global batch {global_batch(after, start.workers)} instead of {first}"
    share = f"a step has {part} of the samples"
    return f"{batch}: learning_rate stays at {rate}, {schedule}; {share}"


def _accumulation(job: Job) -> int:
    return (job.settings.gradient_accumulation_steps or 1) if isinstance(job, LlamaFactoryJob) else 1
