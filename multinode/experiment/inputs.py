"""What `sweep` and `tune` were asked for, and the runs that they make. Contacts no node."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from multinode.decoding import parse_option
from multinode.errors import UsageError
from multinode.experiment.grid_plan import (
    cell_arguments,
    cell_overrides,
    parse_arguments,
    parse_axes,
    parse_counts,
    plan_grid,
)
from multinode.experiment.sweep import CellTraining, GridRequest
from multinode.experiment.trial import parse_learning_rates
from multinode.experiment.tuning_request import TuningRequest
from multinode.job.deepspeed import parse_deepspeed_edits
from multinode.job.job import Job, LlamaFactoryJob, ScriptJob, override_text
from multinode.job.job_files import Change, load_job, load_script
from multinode.job.launch_options import LaunchOptions
from multinode.launch.context import ExecuteOptions, Launch
from multinode.launch.grid import Grid, GridCell
from multinode.launch.inputs import Count, Note, OnHang, Seconds, Training, TrainingInput, YamlAxes, read_training
from multinode.launch.series import Resume
from multinode.predict.advice import Recommendations
from multinode.predict.advise import advise_runs, measured_job
from multinode.predict.run_selection import read_rate
from multinode.predict.try_advice import Trials, changed_job
from multinode.profile.observed import steps_to_run
from multinode.records.files import require_directory
from multinode.records.run_directory import runs_root
from multinode.units import parse_duration

# Judged by speed there is no loss to wait for: fewer steps of one run each.
_SEEDS, _STEPS, _LEAST_STEPS = 3, 64, 8
_STEPS_BY_SPEED = 20


class SweepInput(TrainingInput, frozen=True, kw_only=True):
    """Options of `sweep`, without those of its table."""

    grid: YamlAxes = ()
    grid_arg: tuple[str, ...] = ()
    nodes: str | None = None
    workers_per_node: str | None = None
    steps: Annotated[int, Meta(ge=3)] | None = None
    minutes: Annotated[float, Meta(ge=0.05)] | None = None
    repeats: Annotated[int, Meta(ge=1, le=20)] = 1
    interleave: bool = True
    synthetic: bool = False
    check: bool = True
    hang_timeout: Seconds = 300.0
    # Nobody looks on: by default a cell that hangs does not hold up the others.
    on_hang: OnHang = "stop"
    fresh: bool = False
    retry_failed: bool = False

    @property
    def resume(self) -> Resume:
        """How an earlier sweep of the same request is treated."""
        return Resume(anew=self.fresh, retry_failed=self.retry_failed)

    def read(self, note: Note) -> GridRequest:
        """The grid of a YAML or a script over a cluster, and the job of every cell."""
        if self.steps is not None and self.minutes is not None:
            raise UsageError("--steps and --minutes are mutually exclusive", hint="use only one of them")
        nodes, workers = _counts("--nodes", self.nodes), _counts("--workers-per-node", self.workers_per_node)
        training = read_training(
            self,
            note,
            nodes=max(nodes, default=None),
            workers_per_node=max(workers, default=None),
            limits_nodes=False,
        )
        script = training.command.script
        axes, arguments = self._read_axes(script.argv if script is not None else None, [*self.set_, *training.settings])
        fixed = [*self.set_, *(() if arguments else _fixed(axes))]
        own = [f"{arguments[key]}={values[0]}" for key, values in axes.items() if key in arguments and len(values) == 1]
        plain = training.read_job(fixed)
        if isinstance(plain, ScriptJob):
            plain = _with_arguments(plain, own)
        cluster = training.nodes.cluster
        grid = Grid(
            settings={key: values for key, values in axes.items() if len(values) > 1},
            arguments={key: text for key, text in arguments.items() if len(axes[key]) > 1},
            nodes=nodes or (len(cluster.nodes),),
            workers_per_node=workers or (training.workers_per_node,),
            repeats=self.repeats,
            interleave=self.interleave,
        )
        cells = plan_grid(grid, cluster)
        execute = ExecuteOptions(kind="sweep", stall_s=self.hang_timeout or None, on_stall=self.on_hang)
        return GridRequest(
            launch=training.make_launch(plain, LaunchOptions(), execute, check=self.check),
            job=plain,
            grid=grid,
            cells=cells,
            jobs=_cell_jobs(plain, grid, cells, [*fixed, *training.settings], self.deepspeed_set),
            training=CellTraining(steps=self.steps, minutes=self.minutes, synthetic=self.synthetic),
        )

    def _read_axes(
        self, script: tuple[str, ...] | None, settings: Sequence[str]
    ) -> tuple[dict[str, tuple[Any, ...]], dict[str, str]]:
        """Values by key of a YAML, or by name of a script's argument, and those arguments as they are written."""
        if script is None:
            if self.grid_arg:
                raise UsageError(
                    "--grid-arg sweeps arguments of a script after --, which is missing",
                    hint="to sweep keys of a YAML job: --grid KEY=A,B",
                )
            axes = parse_axes(self.grid)
            twice = next((key for key in axes if any(text.startswith(f"{key}=") for text in settings)), None)
            if twice is not None:
                raise UsageError(f"{twice} is in both --set and --grid", hint="use only one of them")
            return axes, {}
        if self.grid:
            raise UsageError(
                "--grid sweeps keys of a YAML job; this is a script",
                hint="to sweep its arguments: --grid-arg --batch=1,2,4",
            )
        axes, arguments = parse_arguments(self.grid_arg)
        words = {word.partition("=")[0] for word in script}
        twice = next((argument for argument in arguments.values() if argument in words), None)
        if twice is not None:
            raise UsageError(f"{twice} is in both the script's arguments and --grid-arg", hint="use only one of them")
        return axes, arguments


def _counts(option: str, text: str | None) -> tuple[int, ...]:
    return parse_counts(option, text) if text is not None else ()


def _cell_jobs(
    plain: Job, grid: Grid, cells: Sequence[GridCell], fixed: Sequence[str], deepspeed_edits: Sequence[str]
) -> dict[str, Job]:
    """The job of each cell by its label, exactly as `launch` would make it of the same `--set`, or arguments.

    A setting may name another file, a model or a DeepSpeed JSON; so each is read as a job of its own.
    """
    if isinstance(plain, ScriptJob):
        return {cell.label: _with_arguments(plain, cell_arguments(grid, cell)) for cell in cells}
    path, edits = Path(plain.config_path), parse_deepspeed_edits(deepspeed_edits)
    made: dict[tuple[str, ...], Job] = {}
    for cell in cells:
        settings = cell_overrides(cell)
        if settings not in made:
            made[settings] = load_job(path, (*fixed, *settings), edits, plain.text)
    return {cell.label: made[cell_overrides(cell)] for cell in cells}


def _with_arguments(script: ScriptJob, arguments: Sequence[str]) -> ScriptJob:
    """The script with more arguments, one of which may name a file."""
    return load_script(msgspec.structs.replace(script, argv=(*script.argv, *arguments)))


def _fixed(axes: Mapping[str, Sequence[Any]]) -> list[str]:
    """What has one value, as `launch` takes it."""
    return [override_text(key, values[0]) for key, values in axes.items() if len(values) == 1]


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
        options = LaunchOptions(workers_per_node=training.workers_per_node)
        return TuningRequest(
            launch=training.make_launch(job, options, self._execute("tuning"), check=self.check),
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
        grad_compress = self.grad_compress or recommendations.settings.grad_compress
        training = msgspec.structs.replace(
            training, given=msgspec.structs.replace(training.given, grad_compress=grad_compress)
        )
        return SpeedRequest(
            launch=training.make_launch(job, LaunchOptions(), self._execute("advise"), check=self.check),
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
