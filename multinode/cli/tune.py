"""`multinode tune`: measure changes of a training by the time to its loss, or those of `advise` by speed."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from multinode.cli.advise import print_recommendations, read_recommendations
from multinode.cli.inputs import TrainingInput, parse_option, read_training
from multinode.cli.options import (
    Check,
    Fresh,
    HangTimeout,
    Hosts,
    JobWords,
    Json,
    LinkMeasured,
    Nodes,
    OnHang,
    Overrides,
    ScriptCommand,
    TrainingOptions,
    WorkersPerNode,
    complete_runs,
    expand_options,
    propose,
)
from multinode.cli.output import is_quiet, note, print_directory, print_document, print_screen
from multinode.cli.panels import examples
from multinode.cli.running import open_context
from multinode.errors import UsageError
from multinode.experiment.trial import parse_learning_rates
from multinode.job.launch_options import LaunchOptions
from multinode.launch.context import ExecuteOptions
from multinode.records.files import require_directory
from multinode.records.run_directory import runs_root
from multinode.units import parse_duration

if TYPE_CHECKING:
    from multinode.experiment.tune import Tuned
    from multinode.experiment.tuning import Tuning
    from multinode.experiment.tuning_request import TuningRequest
    from multinode.job.job import Job
    from multinode.launch.series import Resume
    from multinode.predict.advice import Recommendations
    from multinode.records.invocation import Invocation

# Judged by speed there is no loss to wait for: fewer steps of one run each.
_SEEDS, _STEPS, _LEAST_STEPS = 3, 64, 8
_STEPS_BY_SPEED = 20
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
# Of nodes and workers the file of the winner has its own.
_OF_RUNS = frozenset({"--nodes", "--workers-per-node"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class TuneOptions:
    """How long and how often each change is trained."""

    from_: Annotated[
        list[str] | None,
        typer.Option(
            "--from",
            metavar="RUN",
            autocompletion=complete_runs,
            help=(
                "Measure the speed of the changes that `advise` suggests for this run. Default job: the run's own. "
                "Repeatable."
            ),
        ),
    ] = None
    pick: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT",
            help="With --from: try only changes whose name contains this text. Combine two with `a + b`. Repeatable.",
        ),
    ] = None
    link_measured: LinkMeasured = None
    budget: Annotated[
        str,
        typer.Option(
            metavar="TIME",
            help="Time limit for all runs together, such as 20m or 2h. A run that does not fit is not started.",
        ),
    ] = "20m"
    seeds: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=20,
            metavar="N",
            help=("Interleaved repeats of each change, each with its own seed. Default: 3; 1 with --from."),
        ),
    ] = None
    learning_rates: Annotated[
        str | None,
        typer.Option(
            metavar="RATES",
            help=(
                "Train the first seed with each of these rates, such as 5e-4,1e-3,2e-3, and the other seeds with the "
                "best rate."
            ),
        ),
    ] = None
    steps: Annotated[
        int | None,
        typer.Option(
            min=3,
            max=1_000_000,
            metavar="N",
            help="Steps of the unchanged training; changes train on the same samples. Default: 64; 20 with --from.",
        ),
    ] = None
    candidates: Annotated[int, typer.Option(min=1, max=20, metavar="N", help="Try the best N changes.")] = 4
    eval_samples: Annotated[
        int,
        typer.Option(
            min=2,
            max=1_000_000,
            metavar="N",
            help="Number of samples to hold out if the job names no evaluation data.",
        ),
    ] = 64


def register(app: typer.Typer) -> None:
    """Add the verb to the command."""
    app.command(
        cls=ScriptCommand,
        epilog=examples(
            "tune --hosts hosts.txt --budget 1h train.yaml",
            "tune --hosts hosts.txt --from last --candidates 3",
            note="Launch the winner: multinode launch --with FILE. To resume, use more --seeds or a larger --budget.",
        ),
    )(expand_options(tune))


def tune(
    ctx: typer.Context,
    *,
    job: JobWords = None,
    hosts: Hosts = None,
    nodes: Nodes = None,
    workers_per_node: WorkersPerNode = None,
    set_: Overrides = None,
    options: TuneOptions,
    training: TrainingOptions,
    check: Check = True,
    hang_timeout: HangTimeout = 300.0,
    on_hang: OnHang = "stop",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="File for the winner. Default: with the runs.")
    ] = None,
    fresh: Fresh = False,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Measure failed runs again.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the changes to try and the time needed, and exit.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Find the change that reaches the loss of a training fastest. Run the same command again to resume."""
    from multinode.experiment.tuning_request import TuningRequest
    from multinode.launch.series import Resume

    _require_kind(ctx, by_speed=options.from_ is not None)
    if options.from_ is not None:
        execute = ExecuteOptions(kind="advise", stall_s=hang_timeout or None, on_stall=on_hang)
        given = read_training(ctx, job, training, hosts=hosts, nodes=nodes)
        _tune_speed(given, set_ or [], options, (execute, check, fresh), as_json=as_json)
        return
    if options.steps is not None and options.steps < _LEAST_STEPS:
        raise UsageError(f"--steps {options.steps}: a loss needs {_LEAST_STEPS} steps or more", hint="--steps 64")
    if output is not None:
        require_directory(output.parent)
    given = read_training(ctx, job, training, hosts=hosts, nodes=nodes, workers_per_node=workers_per_node)
    what_job = given.read_job(set_ or [])
    execute = ExecuteOptions(kind="tuning", stall_s=hang_timeout or None, on_stall=on_hang)
    launch_options = LaunchOptions(workers_per_node=given.workers_per_node)
    tuning = TuningRequest(
        launch=given.make_launch(what_job, launch_options, execute, check=check),
        steps=options.steps or _STEPS,
        seeds=options.seeds or _SEEDS,
        budget_s=parse_option("--budget", options.budget, parse_duration),
        most=options.candidates,
        evaluation_samples=options.eval_samples,
        learning_rates=()
        if options.learning_rates is None
        else parse_option("--learning-rates", options.learning_rates, parse_learning_rates),
        output=output,
    )
    resume = Resume(anew=fresh, retry_failed=retry_failed)
    if dry_run:
        _print_plan(tuning, resume, as_json=as_json)
        return
    tuned = _carry_out(tuning, resume)
    following = "" if is_quiet() else winner_command(tuned.tuning, given.invocation)
    if as_json:
        print_document(tuned)
    else:
        from multinode.experiment.tuning_screen import tuning_parts

        print_screen(tuning_parts(tuned.tuning, next_command=following))
    print_directory(tuned.directory)


def winner_command(tuning: Tuning, invocation: Invocation | None) -> str:
    """The launch with the best change; empty if none was found, or if nobody typed what it would train."""
    if not tuning.file or invocation is None:
        return ""
    return propose(invocation, "launch", first=("--with", tuning.file), without=_OF_RUNS)


def _require_kind(ctx: typer.Context, *, by_speed: bool) -> None:
    """Refuse what says nothing of how changes are judged here."""
    sources = ((name, ctx.get_parameter_source(name)) for name in (_BY_LOSS if by_speed else _BY_SPEED))
    names = [name for name, source in sources if source is not None and source.name == "COMMANDLINE"]
    if names:
        option = f"--{names[0].replace('_', '-')}"
        if by_speed:
            raise UsageError(f"{option} does not work with --from", hint=f"remove {option}")
        raise UsageError(f"{option} needs --from RUN", hint=f"add --from with a measured run, or remove {option}")


def _tune_speed(
    given: TrainingInput,
    settings: list[str],
    options: TuneOptions,
    how: tuple[ExecuteOptions, bool, bool],
    *,
    as_json: bool,
) -> None:
    """Short runs of the training as it stands and with the best changes; predicted gains beside measured ones."""
    from multinode.job.job import LlamaFactoryJob
    from multinode.predict.advice import best_tried
    from multinode.predict.try_advice import Trials, try_advice
    from multinode.profile.observed import steps_to_run

    recommendations = read_recommendations(options.from_, None, options.link_measured)
    # A script makes as many steps as its own arguments say.
    is_script = given.command.script is not None
    steps = [] if is_script else [f"max_steps={steps_to_run(options.steps or _STEPS_BY_SPEED)}"]
    what_job = _job(recommendations, given, [*settings, *steps])
    grad_compress = given.training.grad_compress or recommendations.settings.grad_compress
    given = dataclasses.replace(given, training=dataclasses.replace(given.training, grad_compress=grad_compress))
    launch = given.make_launch(what_job, LaunchOptions(), how[0], check=how[1])
    trials = Trials(count=options.candidates, repeats=options.seeds or 1, picks=tuple(options.pick or ()), fresh=how[2])
    with open_context(launch.cluster) as context:
        attempt = try_advice(launch, context, recommendations, trials)
    following = ""
    if (best := best_tried(attempt.recommendations.advice)) is not None:
        path = (what_job.config_path,) if isinstance(what_job, LlamaFactoryJob) else None
        following = propose(given.invocation, "launch", first=shlex.split(best.command), without=_OF_RUNS, job=path)
    print_recommendations(attempt.recommendations, as_json=as_json, next_command=following)
    print_directory(attempt.directory)


def _job(recommendations: Recommendations, given: TrainingInput, overrides: list[str]) -> Job:
    """The YAML or the script that was named; else the job that was measured, from its stored run."""
    from multinode.job.job_files import Change
    from multinode.predict.advise import measured_job
    from multinode.predict.try_advice import changed_job

    if given.names_job:
        return given.read_job(overrides)
    edits = tuple(given.training.deepspeed_set or ())
    return changed_job(measured_job(runs_root(), recommendations), Change(overrides=tuple(overrides), deepspeed=edits))


def _print_plan(tuning: TuningRequest, resume: Resume, *, as_json: bool) -> None:
    from multinode.experiment.tuning_request import plan_tuning
    from multinode.experiment.tuning_screen import plan_parts

    planned = plan_tuning(tuning, runs_root(), resume)
    if as_json:
        print_document(planned)
    else:
        print_screen(plan_parts(planned))


def _carry_out(tuning: TuningRequest, resume: Resume) -> Tuned:
    from multinode.experiment.tune import find_tuned
    from multinode.experiment.tune import tune as measure
    from multinode.experiment.tuning_request import require_tunable

    require_tunable(tuning)
    finished = find_tuned(tuning, runs_root(), resume)
    if finished is not None:
        note(f"tuning {finished.directory.name} has already measured this; use --fresh to measure again")
        return finished
    with open_context(tuning.launch.cluster) as context:
        return measure(tuning, context, resume)
