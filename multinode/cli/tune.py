"""`multinode tune`: which change reaches the loss of a training sooner; measured, judged, and written down."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from multinode.cli.inputs import parse_option, read_cluster, read_job
from multinode.cli.options import (
    SCRIPT,
    Check,
    HangTimeout,
    Hosts,
    JobFile,
    Json,
    Nodes,
    OnHang,
    Overrides,
    ScriptCommand,
    TrainingOptions,
    WorkersPerNode,
    expand_options,
    given_options,
)
from multinode.cli.output import is_quiet, note, print_directory, print_document, print_screen
from multinode.cli.running import open_context
from multinode.job.job_environment import parse_learning_rates
from multinode.job.planning import LaunchOptions
from multinode.launch.request import ExecuteOptions
from multinode.records.files import require_directory
from multinode.records.run_directory import runs_root
from multinode.units import parse_duration

if TYPE_CHECKING:
    from multinode.experiment.asked_tuning import AskedTuning
    from multinode.experiment.sweep import Resume
    from multinode.experiment.tune import Tuned

# Of the nodes and the workers the file has its own; seeds, steps and the like are the tuning's.
_FOR_LAUNCH = {"job", "hosts", "set_", *(field.name for field in dataclasses.fields(TrainingOptions))}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TuneOptions:
    """How long and how often each change is trained."""

    budget: Annotated[
        str,
        typer.Option(metavar="TIME", help="For all runs together: 20m, 2h; one that does not fit is not begun."),
    ] = "20m"
    seeds: Annotated[int, typer.Option(min=1, max=20, help="Train each with N seeds, in turns.")] = 3
    learning_rates: Annotated[
        str | None,
        typer.Option(
            metavar="RATES",
            help="Train the first seed with each of 5e-4,1e-3,2e-3, the others with each change's best.",
        ),
    ] = None
    steps: Annotated[
        int,
        typer.Option(min=8, max=1_000_000, help="Of the training as it stands; the others train on as many samples."),
    ] = 64
    candidates: Annotated[int, typer.Option(min=1, max=20, metavar="N", help="Try the best N changes.")] = 4
    eval_samples: Annotated[
        int, typer.Option(min=2, max=1_000_000, metavar="N", help="Hold out N samples, where the job names no others.")
    ] = 64


def register(app: typer.Typer) -> None:
    """Add the verb to the command."""
    app.command(
        cls=ScriptCommand,
        epilog="The winner is written as a file: multinode launch --with FILE; more --seeds or a larger --budget go on "
        "with what is measured.",
    )(expand_options(tune))


def tune(
    ctx: typer.Context,
    *,
    job: JobFile = None,
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
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the winner here; else with the runs.")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure all of it again.")] = False,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Measure again what failed.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be tried and how long that takes, and start nothing.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Find the change that reaches the loss of a training soonest; interrupted, the same command resumes it."""
    from multinode.experiment.asked_tuning import AskedTuning
    from multinode.experiment.sweep import Resume

    if output is not None:
        require_directory(output.parent)
    there = read_cluster(hosts, nodes)
    what_job = read_job(job, ctx.meta[SCRIPT], set_ or [], training.deepspeed_set)
    execute = ExecuteOptions(kind="tuning", stall_s=hang_timeout or None, on_stall=on_hang)
    launch_options = LaunchOptions(workers_per_node=workers_per_node)
    asked = AskedTuning(
        launch=training.make_training(there, what_job, launch_options, execute, check=check),
        steps=options.steps,
        seeds=options.seeds,
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
        _print_plan(asked, resume, as_json=as_json)
        return
    tuned = _carry_out(asked, resume)
    following = ""
    if tuned.tuning.file and not is_quiet():
        following = f"multinode launch --with {shlex.quote(tuned.tuning.file)}{given_options(ctx, _FOR_LAUNCH)}"
    if as_json:
        print_document(tuned)
    else:
        from multinode.experiment.tuning_screen import tuning_parts

        print_screen(tuning_parts(tuned.tuning, next_command=following))
    print_directory(tuned.directory)


def _print_plan(asked: AskedTuning, resume: Resume, *, as_json: bool) -> None:
    from multinode.experiment.asked_tuning import plan_tuning
    from multinode.experiment.tuning_screen import plan_parts

    planned = plan_tuning(asked, runs_root(), resume)
    if as_json:
        print_document(planned)
    else:
        print_screen(plan_parts(planned))


def _carry_out(asked: AskedTuning, resume: Resume) -> Tuned:
    """Measure what is left; where nothing is, no node is asked."""
    from multinode.experiment.asked_tuning import require_tunable
    from multinode.experiment.tune import find_tuned
    from multinode.experiment.tune import tune as measure

    require_tunable(asked)
    finished = find_tuned(asked, runs_root(), resume)
    if finished is not None:
        note(f"tuning {finished.directory.name} measured it already; --fresh measures all of it again")
        return finished
    with open_context(asked.launch.cluster) as context:
        return measure(asked, context, resume)
