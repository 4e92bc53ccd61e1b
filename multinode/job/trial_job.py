"""A short training whose loss is compared: its seed, its steps, and evaluations on held-out data. Pure."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from multinode.job.job import LlamaFactoryJob, limit_steps, override_job

_LEAST_RATES = 2

DEFAULT_SEED = 42
"""LLaMA-Factory's own, and the Trainer's."""


class TrialTraining(msgspec.Struct, frozen=True, kw_only=True):
    """How one run trains.

    Attributes:
        steps: optimizer steps.
        seed: of the weights that are new, the order of the data, and their split.
        every: steps of a round in which nodes average; an evaluation comes at the end of one.
        parts: evaluations in a run, or fewer.
        evaluation_samples: that are held out.
    """

    steps: int
    seed: int = DEFAULT_SEED
    every: int = 1
    parts: int
    evaluation_samples: int

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
        raise ValueError(f"{text!r} is not a list of different numbers between 0 and 1, such as 5e-4,1e-3,2e-3")
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
