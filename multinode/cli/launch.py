"""`multinode launch`: run a training on every node."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from multinode.cli.early_verdict import IfSlower, require_terminal, watch
from multinode.cli.inputs import fill
from multinode.cli.options import (
    Check,
    Fetch,
    GracePeriod,
    HangTimeout,
    Hosts,
    JobWords,
    Json,
    LeverOptions,
    NcclInspector,
    Nodes,
    OnHang,
    Output,
    Overrides,
    Profile,
    SampleHz,
    ScriptCommand,
    Synthetic,
    Trace,
    TraceRanks,
    TrainingOptions,
    With,
    WorkersPerNode,
    expand_options,
)
from multinode.cli.output import note, print_document
from multinode.cli.panels import examples
from multinode.cli.running import (
    ExportOptions,
    NoticeOptions,
    Restarts,
    default_output,
    fetch_results,
    open_context,
    tell_result,
)
from multinode.launch.inputs import LaunchInput

if TYPE_CHECKING:
    from multinode.launch.context import Launch
    from multinode.launch.restart import RestartOptions


def register(app: typer.Typer) -> None:
    """Add the verb to the command."""
    app.command(
        cls=ScriptCommand,
        epilog=examples(
            "launch --hosts hosts.txt train.yaml",
            "launch --hosts hosts.txt --set learning_rate=1e-4 --detach train.yaml",
            "launch --hosts hosts.txt -- train.py --lr 1e-4",
            "launch --hosts hosts.txt -- --max-restarts=3 train.py",
            note="Put options of the engine's own launcher before the script, as in the last example.",
        ),
    )(expand_options(launch))


def launch(
    ctx: typer.Context,
    *,
    job: JobWords = None,
    hosts: Hosts = None,
    nodes: Nodes = None,
    workers_per_node: WorkersPerNode = None,
    set_: Overrides = None,
    with_: With = None,
    synthetic: Synthetic = False,
    training: TrainingOptions,
    levers: LeverOptions,
    check: Check = True,
    lease: Annotated[
        float,
        typer.Option(
            min=5.0,
            metavar="SECONDS",
            rich_help_panel="Run control",
            help="How long the job keeps running on the nodes after they lose contact with this command.",
        ),
    ] = 120.0,
    grace_period: GracePeriod = 10.0,
    log_limit: Annotated[
        str,
        typer.Option(
            metavar="SIZE",
            rich_help_panel="Run control",
            help=(
                "Maximum size of the job's log on each node, at least 1M. If the log exceeds it, multinode drops "
                "the oldest output, but keeps the beginning and errors. 0 disables the limit."
            ),
        ),
    ] = "2G",
    detach: Annotated[
        bool,
        typer.Option(
            "--detach",
            "-d",
            rich_help_panel="Run control",
            help="Exit as soon as the job is running on every node. The job then keeps running without this command.",
        ),
    ] = False,
    hang_timeout: HangTimeout = 300.0,
    on_hang: OnHang = "report",
    if_slower: IfSlower = "report",
    output: Output = None,
    restarting: Restarts,
    notices: NoticeOptions,
    exports: ExportOptions,
    fetch: Fetch = None,
    profile: Profile = True,
    trace: Trace = None,
    trace_ranks: TraceRanks = None,
    nccl_inspector: NcclInspector = False,
    sample_hz: SampleHz = 1.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print each node's command and exit.")] = False,
    as_json: Json = False,
) -> None:
    """Run a training job on every node with the right ranks, and follow it to the end."""
    from multinode import api

    require_terminal(if_slower, detach=detach)
    given = fill(
        LaunchInput,
        ctx,
        job,
        training,
        levers,
        restarting,
        notices,
        exports,
        hosts=hosts,
        nodes=nodes,
        workers_per_node=workers_per_node,
        set_=set_,
        with_=with_,
        synthetic=synthetic,
        check=check,
        lease=lease,
        grace_period=grace_period,
        log_limit=log_limit,
        detach=detach,
        hang_timeout=hang_timeout,
        on_hang=on_hang,
        profile=profile,
        trace=trace,
        trace_ranks=trace_ranks,
        nccl_inspector=nccl_inspector,
        sample_hz=sample_hz,
        fetch=fetch,
    )
    training_launch, again = given.read(note)
    if dry_run:
        _print_plan(training_launch, again, as_json=as_json)
        return
    with (
        open_context(training_launch.cluster, output=output or default_output()) as context,
        watch(context, if_slower),
        notices.watch(context) as tell_end,
        exports.watch(context),
    ):
        launched = api.launch(training_launch, context, again)
        not_fetched = fetch_results(context, launched, training_launch.cluster, fetch)
        tell_end(launched.run)
    if detach and notices.are_wanted:
        note("to be notified when the run ends, follow it with the same notification options: multinode attach")
    tell_result(launched, as_json=as_json, not_fetched=not_fetched)


def _print_plan(launch: Launch, restarts: RestartOptions | None, *, as_json: bool) -> None:
    from multinode import api
    from multinode.records.plan import plan_text

    plan = api.plan(launch, restarts)
    if as_json:
        print_document(plan)
    else:
        typer.echo(plan_text(plan))
