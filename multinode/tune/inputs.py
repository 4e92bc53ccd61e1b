"""What `tune` was asked for, and the runs that it makes. Contacts no node."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from multinode.decoding import parse_option
from multinode.errors import UsageError
from multinode.job.job import Job
from multinode.job.job_files import Change, changed_job
from multinode.launch.context import ExecuteOptions, Launch
from multinode.launch.inputs import Count, Note, OnHang, Seconds, Training, TrainingInput, read_training
from multinode.model.workload import JobSettings, read_settings
from multinode.predict.recommendations import measured_job, stored_sources, training_today
from multinode.predict.run_selection import CONTRAST, read_rate
from multinode.predict.training_state import TrainingState
from multinode.records.benchmark import Benchmark
from multinode.records.files import require_directory
from multinode.records.run_directory import runs_root
from multinode.series.series import Resume
from multinode.tune.request import TuningRequest
from multinode.tune.trial import Judge, parse_learning_rates
from multinode.units import parse_duration

# A speed needs fewer steps than a loss, and one run.
_SEEDS, _STEPS, _LEAST_STEPS = 3, 64, 8
_STEPS_BY_SPEED = 20


# What says nothing of a speed.
_OF_LOSS = ("learning_rates", "eval_samples")


def refuse_other_judge(names: Collection[str], judge: Judge) -> None:
    """Refuse options of `tune` that say nothing of how changes are judged here.

    Args:
        names: those that were given.
        judge: how changes are judged.
    """
    name = next((name for name in _OF_LOSS if judge == "speed" and name in names), None)
    if name is not None:
        option = f"--{name.replace('_', '-')}"
        raise UsageError(f"{option} does not work with --judge speed", hint=f"remove {option}")


class TuneInput(TrainingInput, frozen=True, kw_only=True):
    """Options of `tune`."""

    nodes: Count | None = None
    workers_per_node: Count | None = None
    judge: Judge = "loss"
    from_: tuple[str, ...] = ()
    pick: tuple[str, ...] = ()
    link_measured: str | None = None
    budget: str = "20m"
    seeds: Annotated[int, Meta(ge=1, le=20)] | None = None
    learning_rates: str | None = None
    steps: Annotated[int, Meta(ge=3, le=1_000_000)] | None = None
    candidates: Annotated[int, Meta(ge=1, le=20)] = 4
    eval_samples: Annotated[int, Meta(ge=2, le=1_000_000)] = 64
    check: bool = True
    hang_timeout: Seconds = 300.0
    on_hang: OnHang = "stop"
    output: str | None = None
    fresh: bool = False
    retry_failed: bool = False

    @property
    def resume(self) -> Resume:
        """How an earlier tuning of the same request is treated."""
        return Resume(anew=self.fresh, retry_failed=self.retry_failed)

    def read(self, note: Note) -> TuningRequest:
        """What is tuned, and how it is judged."""
        by_loss = self.judge == "loss"
        if by_loss and self.steps is not None and self.steps < _LEAST_STEPS:
            raise UsageError(
                f"--steps {self.steps}: --judge loss needs at least {_LEAST_STEPS} steps", hint="--steps 64"
            )
        output = Path(self.output) if self.output is not None else None
        if output is not None:
            require_directory(output.parent)
        link_measured = read_rate("--link-measured", self.link_measured)
        sources = stored_sources(runs_root(), self.from_)
        today = training_today(runs_root(), sources, link_measured=link_measured) if sources else None
        training = read_training(self, note, nodes=self.nodes, workers_per_node=self.workers_per_node)
        if today is not None:
            levers = today.settings.levers.joined(training.levers)
            training = msgspec.structs.replace(training, levers=levers)
        job = self._job(training, sources, today)
        execute = ExecuteOptions(kind="tuning", stall_s=self.hang_timeout or None, on_stall=self.on_hang)
        launch = training.make_launch(job, execute, check=self.check, workers_per_node=training.workers_per_node)
        if today is not None:
            _require_measured(launch, today)
        return TuningRequest(
            launch=launch,
            judge=self.judge,
            sources=sources,
            layout=today.scenario.layout if today is not None else None,
            picks=self.pick,
            link_measured=link_measured,
            steps=self.steps or (_STEPS if by_loss else _STEPS_BY_SPEED),
            seeds=self.seeds or (_SEEDS if by_loss else 1),
            budget_s=parse_option("--budget", self.budget, parse_duration),
            most=self.candidates,
            evaluation_samples=self.eval_samples,
            learning_rates=()
            if self.learning_rates is None
            else parse_option("--learning-rates", self.learning_rates, parse_learning_rates),
            output=output,
        )

    def _job(self, training: Training, sources: Sequence[str], today: TrainingState | None) -> Job:
        """The YAML or the script that was named; else the job that was measured, from its stored run."""
        if training.names_job or today is None:
            return training.read_job(self.set_)
        change = Change(overrides=self.set_, deepspeed=self.deepspeed_set)
        return changed_job(measured_job(runs_root(), sources, today.settings), change)


def _require_measured(launch: Launch, today: TrainingState) -> None:
    if isinstance(launch.job, Benchmark):
        return
    settings, measured = read_settings(launch.job), today.settings
    names = [name for name in JobSettings.__struct_fields__ if name != "levers"]
    pairs = {name.replace("_", " "): (getattr(settings, name), getattr(measured, name)) for name in names}
    layout = today.scenario.layout
    pairs["workers per node"] = launch.workers_per_node, None if layout.unequal else layout.workers_per_node
    pairs = {name: both for name, both in pairs.items() if None not in both}
    # A lever that is not used is known.
    pairs |= launch.levers.compared(measured.levers)
    differing = [
        f"{name} is {ours!r}, but {theirs!r} was measured" for name, (ours, theirs) in pairs.items() if ours != theirs
    ]
    if differing:
        raise UsageError(
            f"this job differs from the measured one: {'; '.join(differing)}",
            hint=f"omit JOB to use the stored job, or measure this job first: {CONTRAST}",
        )
