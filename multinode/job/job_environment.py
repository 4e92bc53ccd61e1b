"""JobEnvironment: variables and setup commands around a job on every node. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from multinode.cluster.cluster import Cluster
from multinode.cluster.hostfile import check_variable
from multinode.errors import UsageError
from multinode.job.job import LlamaFactoryJob, limit_steps, override_job

_THREADS = "OMP_NUM_THREADS"


class JobEnvironment(msgspec.Struct, frozen=True, kw_only=True):
    """Variables and setup commands of a job, the same on every node.

    Attributes:
        env: variables; they win over the hostfile's.
        forwarded: names whose values come from the controller's environment and are never shown.
        prelude: shell text that runs before the job, in its shell; None is none.
    """

    env: dict[str, str] = {}
    forwarded: tuple[str, ...] = ()
    prelude: str | None = None


def parse_job_environment(variables: Iterable[str], prelude: str | None, environ: Mapping[str, str]) -> JobEnvironment:
    """From `NAME=VALUE`, and `NAME`, which is looked up in `environ`; the last one of a name counts.

    Raises:
        UsageError: an entry is neither, or a name is not set here.
    """
    env: dict[str, str] = {}
    forwarded: dict[str, None] = {}
    for text in variables:
        name, equals, value = text.partition("=")
        if not check_variable(name):
            # The text may be a value without its name, so it is not repeated.
            raise UsageError("--env needs NAME or NAME=VALUE", hint="for example --env HF_TOKEN")
        forwarded.pop(name, None)
        if not equals:
            if name not in environ:
                raise UsageError(
                    f"--env {name}: the variable is not set here",
                    hint=f"export {name}=..., or --env {name}=VALUE",
                )
            value = environ[name]
            forwarded[name] = None
        if "\0" in value:
            raise UsageError(f"--env {name}: the value contains a NUL character")
        env[name] = value
    text = (prelude or "").strip()
    if "\0" in text:
        raise UsageError("--setup contains a NUL character")
    return JobEnvironment(env=env, forwarded=tuple(forwarded), prelude=text or None)


def with_same_threads(environment: JobEnvironment, cluster: Cluster, workers: Sequence[int]) -> JobEnvironment:
    """One thread per worker for runs to be compared, unless the user or the hostfile sets the number.

    torchrun sets OMP_NUM_THREADS to 1 if a node has several workers, and leaves it unset for one: the same worker
    would compute differently.

    Args:
        environment: of all runs.
        cluster: their nodes.
        workers: per node, of each run.
    """
    said = _THREADS in environment.env or any(_THREADS in node.env for node in cluster.nodes)
    if said or max(workers, default=1) == 1:
        return environment
    return msgspec.structs.replace(environment, env=environment.env | {_THREADS: "1"})


_LEAST_RATES = 2

DEFAULT_SEED = 42
"""Default of LLaMA-Factory and the Trainer."""


class TrialTraining(msgspec.Struct, frozen=True, kw_only=True):
    """How one run trains."""

    steps: int  # optimizer steps
    seed: int = DEFAULT_SEED  # of the weights that are new, the order of the data, and their split
    every: int = 1  # steps of a round in which nodes average; an evaluation comes at the end of one
    parts: int  # evaluations in a run, or fewer
    evaluation_samples: int  # that are held out

    @property
    def evaluation_steps(self) -> int:
        """From one evaluation to the next: whole rounds, as an evaluation ends one."""
        return self.every * math.ceil(self.steps / (self.parts * self.every))


def can_evaluate(job: LlamaFactoryJob) -> bool:
    """Whether LLaMA-Factory can hold out data: what was tokenized before is split already, or is not."""
    config = job.config
    return not config.get("tokenized_path") or bool(config.get("eval_dataset"))


def parse_learning_rates(text: str) -> tuple[float, ...]:
    """`5e-4,1e-3` as numbers, ascending: the first is the one least likely to diverge.

    Raises:
        ValueError: one is not a number between 0 and 1, or stands twice.
    """
    try:
        rates = sorted(float(part) for part in text.split(","))
    except ValueError:
        rates = []
    if len(set(rates)) < max(_LEAST_RATES, len(rates)) or not all(0 < rate < 1 for rate in rates):
        raise ValueError(f"{text!r} is not a list of distinct numbers between 0 and 1, such as 5e-4,1e-3,2e-3")
    return tuple(rates)


def trial_job(job: LlamaFactoryJob, training: TrialTraining) -> LlamaFactoryJob:
    """The job as it is trained for its figures and its loss."""
    every = training.evaluation_steps
    changed: dict[str, Any] = {"seed": training.seed}
    logged = job.config.get("logging_steps", 10)
    if type(logged) is not int or logged > every:
        changed["logging_steps"] = every
    if can_evaluate(job):
        changed |= {
            "eval_strategy": "steps",
            "eval_steps": every,
            "per_device_eval_batch_size": job.config.get("per_device_train_batch_size", 8),
        }
        if not job.config.get("eval_dataset"):
            changed["val_size"] = training.evaluation_samples
    return limit_steps(override_job(job, changed), training.steps)
