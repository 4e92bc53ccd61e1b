"""What `tune` was asked for, and the runs that it makes. Contacts no node."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from multinode.decoding import parse_option
from multinode.errors import UsageError
from multinode.job.job import Job, LlamaFactoryJob
from multinode.job.job_files import Change
from multinode.launch.context import ExecuteOptions, Launch
from multinode.launch.inputs import Count, Note, OnHang, Seconds, Training, TrainingInput, read_training
from multinode.predict.advice import Recommendations
from multinode.predict.recommendations import advise_runs, measured_job
from multinode.predict.run_selection import read_rate
from multinode.profile.observed import steps_to_run
from multinode.records.files import require_directory
from multinode.records.run_directory import runs_root
from multinode.series.series import Resume
from multinode.tune.by_speed import Trials, changed_job
from multinode.tune.request import TuningRequest
from multinode.tune.trial import parse_learning_rates
from multinode.units import parse_duration

# Judged by speed there is no loss to wait for: fewer steps of one run each.
_SEEDS, _STEPS, _LEAST_STEPS = 3, 64, 8
_STEPS_BY_SPEED = 20


class SpeedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Which advised changes are measured by their speed."""

    launch: Launch  # the unchanged job, cut to a few steps
    recommendations: Recommendations
    trials: Trials

    @property
    def config_path(self) -> str | None:
        """The YAML of the job; None of a script."""
        return self.launch.job.config_path if isinstance(self.launch.job, LlamaFactoryJob) else None


_BY_LOSS = (
    "budget",
    "learning_rates",
    "eval_samples",
    "workers_per_node",
    "output",
    "retry_failed",
    "dry_run",
)
_BY_SPEED = ("pick", "link_measured")


def refuse_other_kind(names: Collection[str], *, by_speed: bool) -> None:
    """Refuse options of `tune` that say nothing of how changes are judged here.

    Args:
        names: those that were given.
        by_speed: whether `--from` is among them.
    """
    name = next((name for name in (_BY_LOSS if by_speed else _BY_SPEED) if name in names), None)
    if name is None:
        return
    option = f"--{name.replace('_', '-')}"
    if by_speed:
        raise UsageError(f"{option} does not work with --from", hint=f"remove {option}")
    raise UsageError(f"{option} needs --from RUN", hint=f"add --from with a measured run, or remove {option}")


class TuneInput(TrainingInput, frozen=True, kw_only=True):
    """Options of `tune`."""

    nodes: Count | None = None
    workers_per_node: Count | None = None
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
        """What is tuned by the time to a loss."""
        if self.steps is not None and self.steps < _LEAST_STEPS:
            raise UsageError(f"--steps {self.steps}: a loss needs {_LEAST_STEPS} steps or more", hint="--steps 64")
        output = Path(self.output) if self.output is not None else None
        if output is not None:
            require_directory(output.parent)
        training = read_training(self, note, nodes=self.nodes, workers_per_node=self.workers_per_node)
        job = training.read_job(self.set_)
        return TuningRequest(
            launch=training.make_launch(
                job, self._execute("tuning"), check=self.check, workers_per_node=training.workers_per_node
            ),
            steps=self.steps or _STEPS,
            seeds=self.seeds or _SEEDS,
            budget_s=parse_option("--budget", self.budget, parse_duration),
            most=self.candidates,
            evaluation_samples=self.eval_samples,
            learning_rates=()
            if self.learning_rates is None
            else parse_option("--learning-rates", self.learning_rates, parse_learning_rates),
            output=output,
        )

    def read_by_speed(self, note: Note) -> SpeedRequest:
        """Which changes that `advise` suggests for the runs of `--from` are measured."""
        training = read_training(self, note, nodes=self.nodes)
        recommendations = advise_runs(
            runs_root(), self.from_, link_measured=read_rate("--link-measured", self.link_measured)
        )
        # A script makes as many steps as its own arguments say.
        is_script = training.command.script is not None
        steps = [] if is_script else [f"max_steps={steps_to_run(self.steps or _STEPS_BY_SPEED)}"]
        job = self._measured_job(recommendations, training, [*self.set_, *steps])
        levers = recommendations.settings.levers.joined(training.levers)
        training = msgspec.structs.replace(training, levers=levers)
        return SpeedRequest(
            launch=training.make_launch(job, self._execute("advise"), check=self.check),
            recommendations=recommendations,
            trials=Trials(count=self.candidates, repeats=self.seeds or 1, picks=self.pick, fresh=self.fresh),
        )

    def _measured_job(self, recommendations: Recommendations, training: Training, overrides: Sequence[str]) -> Job:
        """The YAML or the script that was named; else the job that was measured, from its stored run."""
        if training.names_job:
            return training.read_job(overrides)
        change = Change(overrides=tuple(overrides), deepspeed=self.deepspeed_set)
        return changed_job(measured_job(runs_root(), recommendations), change)

    def _execute(self, kind: str) -> ExecuteOptions:
        return ExecuteOptions(kind=kind, stall_s=self.hang_timeout or None, on_stall=self.on_hang)
