"""`multinode tune`: measure changes of a training, by the time to its loss or by its speed."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from multinode.cli.inputs import fill
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
    read_invocation,
)
from multinode.cli.output import is_quiet, note, print_blocks, print_directory, print_document
from multinode.cli.panels import examples
from multinode.cli.running import open_context
from multinode.records.run_directory import runs_root

if TYPE_CHECKING:
    from multinode.records.invocation import Invocation
    from multinode.series.series import Resume
    from multinode.tune.judge import Tuning
    from multinode.tune.request import TuningRequest

# Of nodes and workers the file of the winner has its own.
_OF_RUNS = frozenset({"--nodes", "--workers-per-node"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class TuneOptions:
    """How changes are chosen and judged, and how long and how often each is trained."""

    judge: Annotated[
        Literal["loss", "speed"],
        typer.Option(
            help=(
                "Compare changes by the time that they need to reach the final loss of the unchanged job (loss), "
                "or by samples/s (speed)."
            )
        ),
    ] = "loss"
    from_: Annotated[
        list[str] | None,
        typer.Option(
            "--from",
            metavar="RUN",
            autocompletion=complete_runs,
            help=(
                "Try the changes that `advise` predicts from this run, instead of measuring the unchanged "
                "training first. Without a job, use the job of this run. Repeatable."
            ),
        ),
    ] = None
    pick: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT",
            help="Only try changes whose name contains this text. Write `a + b` to combine two changes. Repeatable.",
        ),
    ] = None
    link_measured: LinkMeasured = None
    budget: Annotated[
        str,
        typer.Option(
            metavar="TIME",
            help=(
                "Time limit for all runs together, such as 20m or 2h. multinode does not start a run that would "
                "exceed it."
            ),
        ),
    ] = "20m"
    seeds: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=20,
            metavar="N",
            help=(
                "Number of repeats of each change. They are interleaved, and each has its own seed. Default: 3, or 1 "
                "with --judge speed."
            ),
        ),
    ] = None
    learning_rates: Annotated[
        str | None,
        typer.Option(
            metavar="RATES",
            help=(
                "Run the first seed with each of these learning rates (such as 5e-4,1e-3,2e-3), and the other "
                "seeds with the best one."
            ),
        ),
    ] = None
    steps: Annotated[
        int | None,
        typer.Option(
            min=3,
            max=1_000_000,
            metavar="N",
            help=(
                "Number of steps of the unchanged job. With --judge loss, every change is trained on the same "
                "samples. Only averaging between nodes is trained on more samples. Default: 64, or 20 measured steps "
                "with --judge speed."
            ),
        ),
    ] = None
    candidates: Annotated[
        int, typer.Option(min=1, max=20, metavar="N", help="Number of changes to try, best first.")
    ] = 4
    eval_samples: Annotated[
        int,
        typer.Option(
            min=2,
            max=1_000_000,
            metavar="N",
            help="Number of samples to hold out for evaluation if the job names no evaluation data.",
        ),
    ] = 64


def register(app: typer.Typer) -> None:
    """Add the verb to the command."""
    app.command(
        cls=ScriptCommand,
        epilog=examples(
            "tune --hosts hosts.txt --budget 1h train.yaml",
            "tune --hosts hosts.txt --judge speed --from last --candidates 3",
            note="To use the result: multinode launch --with FILE. To measure more, raise --seeds or --budget.",
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
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="File to write the best change to. Default: in the directory of the runs.",
        ),
    ] = None,
    fresh: Fresh = False,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Measure failed runs again.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the changes to try and the time needed, and exit.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Find the change with which a training job reaches a given loss fastest, or runs fastest.

    If the command is interrupted, run it again to resume.
    """
    from multinode.tune.inputs import TuneInput, refuse_other_judge
    from multinode.tune.measure import measure_tuned

    sources = ((name, ctx.get_parameter_source(name)) for name in ctx.params)
    refuse_other_judge(
        {name for name, source in sources if source is not None and source.name == "COMMANDLINE"}, options.judge
    )
    given = fill(
        TuneInput,
        ctx,
        job,
        options,
        training,
        hosts=hosts,
        nodes=nodes,
        workers_per_node=workers_per_node,
        set_=set_,
        check=check,
        hang_timeout=hang_timeout,
        on_hang=on_hang,
        output=output,
        fresh=fresh,
        retry_failed=retry_failed,
    )
    tuning, resume = given.read(note), given.resume
    if dry_run:
        _print_plan(tuning, resume, as_json=as_json)
        return
    tuned = measure_tuned(tuning, resume, open_context, note)
    following = "" if is_quiet() else winner_command(tuned.tuning, read_invocation(ctx))
    if as_json:
        print_document(tuned)
    else:
        from multinode.render.sheet import NextCommand
        from multinode.tune.screen import show

        commands = (NextCommand("Launch it", following),) if following else ()
        print_blocks((*show(tuned.tuning), *commands))
    print_directory(tuned.directory)


def winner_command(tuning: Tuning, invocation: Invocation | None) -> str:
    """The launch with the best change; empty if none was found, or if nobody typed what it would train."""
    if not tuning.file or invocation is None:
        return ""
    return propose(invocation, "launch", first=("--with", tuning.file), without=_OF_RUNS)


def _print_plan(tuning: TuningRequest, resume: Resume, *, as_json: bool) -> None:
    from multinode.tune.request import plan_tuning
    from multinode.tune.screen import show_plan

    planned = plan_tuning(tuning, runs_root(), resume)
    if as_json:
        print_document(planned)
    else:
        print_blocks(show_plan(planned))
