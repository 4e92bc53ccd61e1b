"""What `sweep` was asked for, and the runs that it makes. Contacts no node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from multinode.errors import UsageError
from multinode.job.deepspeed import parse_deepspeed_edits
from multinode.job.job import Job, ScriptJob, override_text
from multinode.job.job_files import load_job, load_script
from multinode.launch.context import ExecuteOptions
from multinode.launch.inputs import Note, OnHang, Seconds, TrainingInput, YamlAxes, read_training
from multinode.series.grid import Grid, GridCell
from multinode.series.series import Resume
from multinode.sweep.grid_plan import (
    cell_arguments,
    cell_overrides,
    parse_arguments,
    parse_axes,
    parse_counts,
    plan_grid,
)
from multinode.sweep.measure import CellTraining, GridRequest


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
        script = training.read_job(()) if training.command.script is not None else None
        takes_options = script is not None and script.training is not None
        axes, arguments = self._read_axes(
            script.program if script is not None and not takes_options else None,
            [*self.set_, *training.settings],
            takes_options=takes_options,
        )
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
            launch=training.make_launch(plain, execute, check=self.check),
            job=plain,
            grid=grid,
            cells=cells,
            jobs=_cell_jobs(plain, grid, cells, self.deepspeed_set),
            training=CellTraining(steps=self.steps, minutes=self.minutes, synthetic=self.synthetic),
        )

    def _read_axes(
        self, script: tuple[str, ...] | None, settings: Sequence[str], *, takes_options: bool = False
    ) -> tuple[dict[str, tuple[Any, ...]], dict[str, str]]:
        """Values by key of a YAML, or by name of a script's argument, and those arguments as they are written."""
        if script is None:
            if self.grid_arg and not takes_options:
                raise UsageError(
                    "--grid-arg sweeps arguments of a script after --, which is missing",
                    hint="to sweep keys of a YAML job: --grid KEY=A,B",
                )
            # For a script whose options are keys, --grid-arg sweeps keys, as --grid does.
            axes = parse_axes(self.grid) | parse_arguments(self.grid_arg)[0]
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
        given = {word.partition("=")[0] for word in script}
        twice = next((argument for argument in arguments.values() if argument in given), None)
        if twice is not None:
            raise UsageError(f"{twice} is in both the script's arguments and --grid-arg", hint="use only one of them")
        return axes, arguments


def _counts(option: str, text: str | None) -> tuple[int, ...]:
    return parse_counts(option, text) if text is not None else ()


def _cell_jobs(plain: Job, grid: Grid, cells: Sequence[GridCell], deepspeed_edits: Sequence[str]) -> dict[str, Job]:
    """The job of each cell by its label, exactly as `launch` would make it of the same `--set`, or arguments.

    A setting may name another file, a model or a DeepSpeed JSON; so each is read as a job of its own.
    """
    if isinstance(plain, ScriptJob):
        return {cell.label: _with_arguments(plain, cell_arguments(grid, cell)) for cell in cells}
    path, edits = Path(plain.config_path), parse_deepspeed_edits(deepspeed_edits)
    given = [override_text(key, plain.config[key]) for key in plain.overridden]
    made: dict[tuple[str, ...], Job] = {}
    for cell in cells:
        settings = cell_overrides(cell)
        if settings not in made:
            made[settings] = load_job(path, (*given, *settings), edits, plain.text, like=plain.command)
    return {cell.label: made[cell_overrides(cell)] for cell in cells}


def _with_arguments(script: ScriptJob, arguments: Sequence[str]) -> Job:
    """The script with more arguments, one of which may name a file."""
    return load_script(msgspec.structs.replace(script, argv=(*script.argv, *arguments)))


def _fixed(axes: Mapping[str, Sequence[Any]]) -> list[str]:
    """What has one value, as `launch` takes it."""
    return [override_text(key, values[0]) for key, values in axes.items() if len(values) == 1]
