"""`multinode launch`: run a training on every node."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from multinode.cli.inputs import read_cluster, read_job
from multinode.cli.notices import NoticeOptions
from multinode.cli.options import (
    SCRIPT,
    Check,
    Fetch,
    GracePeriod,
    HangTimeout,
    Hosts,
    Json,
    NcclInspector,
    Nodes,
    OnHang,
    Overrides,
    Profile,
    SampleHz,
    ScriptCommand,
    Synthetic,
    Trace,
    TraceRanks,
    TrainingOptions,
    WorkersPerNode,
    expand_options,
)
from multinode.cli.output import note, print_document
from multinode.cli.running import fetch_results, open_context, tell_result
from multinode.core.run.planning import LaunchOptions
from multinode.core.run.restart import RestartOptions
from multinode.errors import UsageError
from multinode.launch.request import ExecuteOptions
from multinode.units import parse_duration

if TYPE_CHECKING:
    from multinode.workflows.run.context import Launch

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the verb to the command."""
    app.command(
        cls=ScriptCommand,
        epilog="A plain script: multinode launch --hosts H [OPTIONS] -- train.py --its --arguments. Options of the "
        "engine's own launcher go before the script: -- --max-restarts=3 train.py",
    )(expand_options(launch))


def launch(
    ctx: typer.Context,
    *,
    job: Annotated[
        Path | None,
        typer.Argument(metavar="JOB", help="LLaMA-Factory YAML; without one, the settings' or configs/default.yaml."),
    ] = None,
    hosts: Hosts = None,
    nodes: Nodes = None,
    workers_per_node: WorkersPerNode = None,
    set_: Overrides = None,
    synthetic: Synthetic = False,
    training: TrainingOptions,
    check: Check = True,
    lease: Annotated[
        float,
        typer.Option(
            min=5.0,
            metavar="SECONDS",
            rich_help_panel="Run control",
            help="How long the nodes keep running without contact to this command.",
        ),
    ] = 120.0,
    grace_period: GracePeriod = 10.0,
    detach: Annotated[
        bool,
        typer.Option(
            "--detach",
            "-d",
            rich_help_panel="Run control",
            help="Leave once the job runs on every node; it needs no lease then.",
        ),
    ] = False,
    hang_timeout: HangTimeout = 300.0,
    on_hang: OnHang = "report",
    restarts: Annotated[
        int,
        typer.Option(
            min=0,
            max=1000,
            metavar="N",
            rich_help_panel="Run control",
            help="Start a run that fails again from its last complete checkpoint, so often at the most.",
        ),
    ] = 0,
    node_wait: Annotated[
        str,
        typer.Option(
            metavar="TIME",
            rich_help_panel="Run control",
            help="How long a restart waits for a node that cannot be reached: 90s, 10m, 2h.",
        ),
    ] = "10m",
    restart_after_oom: Annotated[
        bool,
        typer.Option(
            "--restart-after-oom", rich_help_panel="Run control", help="Restart a run that ran out of memory, too."
        ),
    ] = False,
    notices: NoticeOptions,
    fetch: Fetch = None,
    profile: Profile = True,
    trace: Trace = None,
    trace_ranks: TraceRanks = None,
    nccl_inspector: NcclInspector = False,
    sample_hz: SampleHz = 1.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print each node's command and start nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Run a training on every node, with matching ranks, and follow it to its end."""
    from multinode.core.run.synthetic import with_synthetic

    nodes_and_text = read_cluster(hosts, nodes)
    if detach and any(node.slurm_job is not None for node in nodes_and_text[0].nodes):
        raise UsageError(
            "--detach: Slurm ends what a step leaves behind, so a run in an allocation needs its controller there",
            hint="have a batch job of Slurm run both: multinode submit -N2 -- launch ...",
        )
    what_job = read_job(job, ctx.meta[SCRIPT], set_ or [], training.deepspeed_set)
    if synthetic:
        what_job = with_synthetic(what_job)
    options = LaunchOptions(
        workers_per_node=workers_per_node,
        profile=profile,
        trace_steps=trace,
        trace_ranks=tuple(trace_ranks or ()),
        nccl_inspector=nccl_inspector,
        sample_interval_s=1 / sample_hz,
    )
    execute = ExecuteOptions(
        lease_s=None if detach else lease,
        grace_s=grace_period,
        leave_when_running=detach,
        stall_s=hang_timeout or None,
        on_stall=on_hang,
    )
    what = training.make_training(nodes_and_text, what_job, options, execute, check=check)
    if restarts and detach:
        raise UsageError(
            "--restarts needs this command to stay: a detached run is not restarted",
            hint="leave out --detach; in Slurm, multinode submit keeps it there",
        )
    try:
        node_wait_s = parse_duration(node_wait)
    except ValueError as error:
        raise UsageError(f"--node-wait: {error}") from None
    again = RestartOptions(restarts=restarts, node_wait_s=node_wait_s, after_oom=restart_after_oom)
    if dry_run:
        _print_plan(what, as_json=as_json)
        return
    with open_context(what.cluster) as context, notices.watch(context) as tell_end:
        from multinode.workflows.run.launch import launch as run_launch
        from multinode.workflows.run.restart import launch_with_restarts

        launched = launch_with_restarts(what, context, again) if restarts else run_launch(what, context)
        not_fetched = fetch_results(context, launched, what.cluster, fetch)
        tell_end(launched.run)
    if detach and notices.are_wanted:
        note("to be notified of its end, follow it with the same options: multinode attach")
    tell_result(launched, as_json=as_json, not_fetched=not_fetched)


def _print_plan(what: Launch, *, as_json: bool) -> None:
    from multinode.core.run.plan import redact_plan
    from multinode.report.run.plan_text import plan_text
    from multinode.workflows.run.launch import plan_offline

    plan = plan_offline(what)
    if as_json:
        print_document(redact_plan(plan))
    else:
        typer.echo(plan_text(plan))
