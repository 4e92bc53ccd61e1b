"""`multinode attach`, `stop` and `clean`: runs that go on, or lie, on their nodes."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from multinode.cli.early_verdict import IfSlower, require_terminal, running_verdict, watch
from multinode.cli.options import (
    Fetch,
    GracePeriod,
    HangTimeout,
    Hosts,
    Json,
    OnHang,
    Output,
    RunId,
    RunIds,
    complete_hosts,
    expand_options,
)
from multinode.cli.output import note, print_document
from multinode.cli.panels import examples
from multinode.cli.running import ExportOptions, NoticeOptions, default_output, fetch_results, open_context, tell_result
from multinode.errors import MultinodeError, UsageError
from multinode.launch.context import ExecuteOptions
from multinode.records.run_directory import runs_root
from multinode.units import format_count, format_size

if TYPE_CHECKING:
    from multinode.launch.node_runs import Cleaned, NodeStop
    from multinode.runs.stored_run import StoredRun

# The run's own hostfile is kept with it, so this is for a machine that did not launch it.
Elsewhere = Annotated[
    str | None,
    typer.Option(
        "--hosts", autocompletion=complete_hosts, help="Hostfile, if the run was launched from another machine."
    ),
]

_SECONDS_PER_DAY = 86400.0


def register(app: typer.Typer) -> None:
    """Add the verbs to the command."""
    app.command(epilog=examples("attach", "attach last --fetch out"))(expand_options(attach))
    app.command()(stop)
    app.command()(clean)


def attach(
    *,
    run_id: RunId = "last",
    hosts: Elsewhere = None,
    hang_timeout: HangTimeout = 300.0,
    on_hang: OnHang = "report",
    if_slower: IfSlower = "report",
    output: Output = None,
    notices: NoticeOptions,
    exports: ExportOptions,
    fetch: Fetch = None,
    as_json: Json = False,
) -> None:
    """Follow an active run again. Ctrl-C stops the run, unless it is detached.

    If another multinode process follows the run, as in a Slurm batch job, attach prints the records of that process.
    """
    from multinode.launch.attach import attach as follow
    from multinode.launch.attach import look_again, nodes_of

    require_terminal(if_slower)
    run = _known(run_id) if hosts is None else _known_elsewhere(hosts, run_id)
    if run.run.status != "running" and not run.directory.is_locked:
        missing = run.run.missing_bytes
        what = f"fetching {format_size(missing)} of missing records" if missing else "nothing to follow"
        note(f"{_over(run)}: {what}")
        if not (fetch or notices.are_wanted or missing):
            tell_result(look_again(run, note), as_json=as_json)
    if run.directory.is_locked:
        if if_slower != "report":
            raise UsageError(
                f"--if-slower-than-one-node {if_slower}: another multinode process is following this run",
                hint=f"see its verdict: multinode show {run.run.run_id}",
            )
        if exports.are_wanted:
            raise UsageError(
                "--export: another multinode process is following this run",
                hint=f"multinode export {run.run.run_id} --follow tensorboard:DIR",
            )
        _watch(run, fetch, as_json=as_json)
    cluster = nodes_of(run)
    with (
        open_context(cluster, leaves=run.run.detached, output=output or default_output()) as context,
        watch(context, if_slower),
        notices.watch(context) as tell_end,
        exports.watch(context),
    ):
        options = ExecuteOptions(leave_on_stop=run.run.detached, stall_s=hang_timeout or None, on_stall=on_hang)
        launched = follow(run, context, options)
        not_fetched = fetch_results(context, launched, cluster, fetch)
        tell_end(launched.run)
    tell_result(launched, as_json=as_json, not_fetched=not_fetched)


def _watch(run: StoredRun, fetch: list[str] | None, *, as_json: bool) -> NoReturn:
    from multinode.cli.runs import print_followed
    from multinode.launch.attach import follow_logs, look_again

    if fetch:
        raise UsageError(
            "--fetch: another multinode process is following this run", hint="attach again after it has ended"
        )
    note(
        f"another multinode process is following run {run.run.run_id}: showing its records until the run ends; press "
        f"Ctrl-C to leave"
    )
    if run.run.kind == "launch" and (verdict := running_verdict(run.run.run_id)[1]):
        note(verdict)
    ranks = tuple(node.node_rank for node in run.run.nodes)
    chunks = follow_logs(run, ranks, None)
    with contextlib.suppress(KeyboardInterrupt):
        if as_json:
            for _ in chunks:
                continue
        else:
            print_followed(chunks, len(ranks), None)
    tell_result(look_again(run), as_json=as_json)


def stop(
    run_id: RunId = "last", hosts: Elsewhere = None, grace_period: GracePeriod = 10.0, as_json: Json = False
) -> None:
    """Stop a run on all its nodes with SIGTERM, then SIGKILL after the grace period, and verify that it has ended."""
    from multinode import api
    from multinode.launch.attach import has_ended, look_again, nodes_of
    from multinode.launch.attach import stop as stop_run

    run = _known(run_id) if hosts is None or run_id == "last" else _known_here(run_id)
    if run is None:
        try:
            run = _known_elsewhere(hosts, run_id)
        except MultinodeError as error:
            # Node 0 has no plan of it, or cannot be asked: then each node stops what it knows of the run.
            note(str(error))
            _stop_without_record(hosts, run_id, grace_period, as_json=as_json)
    cluster = nodes_of(run, api.load_nodes(hosts, note=note)[0] if hosts is not None else None)
    if has_ended(run):
        if as_json:
            print_document(look_again(run))
        else:
            typer.echo(f"{_over(run)}: nothing to stop")
        raise typer.Exit(0)
    with open_context(cluster) as context:
        launched = stop_run(run, context, grace_period, cluster)
    tell_result(launched, as_json=as_json, codes={"stopped": 0, "failed": 0})


def _stop_without_record(hosts: str | None, run_id: str, grace_s: float, *, as_json: bool) -> NoReturn:
    from multinode import api
    from multinode.launch.node_runs import stop_by_id

    cluster, _ = api.load_nodes(hosts, note=note)
    with open_context(cluster) as context:
        nodes = stop_by_id(context.agent, cluster, run_id, grace_s)
    if as_json:
        print_document({"schema": "multinode.stop/2", "nodes": nodes})
    for node in nodes if not as_json else ():
        typer.echo(f"{node.node}: {node.error or _describe_stop(node)}")
    raise typer.Exit(3 if any(node.error for node in nodes) else int(any(node.processes_left for node in nodes)))


def clean(
    run_ids: RunIds = None,
    hosts: Hosts = None,
    older_than: Annotated[
        float, typer.Option(min=0.0, metavar="DAYS", help="Without RUN, clean the runs that are older than this.")
    ] = 7.0,
    as_json: Json = False,
) -> None:
    """Remove the files of finished runs from their nodes. Logs and results on this machine are kept."""
    from multinode import api

    cluster, _ = api.load_nodes(hosts, note=note)
    with api.connect(cluster) as context:
        from multinode.launch.node_runs import clean as clean_nodes
        from multinode.launch.node_runs import find_runs

        named = find_runs(context.agent, cluster, runs_root(), run_ids) if run_ids else None
        cleaned = clean_nodes(context.agent, cluster, named, older_than * _SECONDS_PER_DAY)
    if as_json:
        print_document({"schema": "multinode.clean/2", "nodes": cleaned})
    for node in cleaned if not as_json else ():
        typer.echo(f"{node.node}: {node.error or _describe_cleaned(node)}")
    raise typer.Exit(3 if any(node.error for node in cleaned) else 0)


def _describe_stop(node: NodeStop) -> str:
    if not node.runs:
        return "it does not know this run"
    left = (
        (f"{node.processes_left} of its processes are still running")
        if node.processes_left
        else "none of its processes are left"
    )
    return f"{', '.join(node.runs)} stopped; {left}"


def _describe_cleaned(node: Cleaned) -> str:
    removed = f"{format_count(len(node.removed), 'run')} removed, {format_size(node.size_bytes)}"
    own = [run for run in node.kept if run not in node.machines]
    others = [f"{run} ({node.machines[run]})" for run in node.kept if run in node.machines]
    goes_on = f"; kept because still running: {', '.join(own)}" if own else ""
    elsewhere = f"; kept because still running on another machine: {', '.join(others)}" if others else ""
    written = f"; kept because a job has written files there: {', '.join(node.code_kept)}" if node.code_kept else ""
    return f"{removed}{goes_on}{elsewhere}{written}"


def _over(run: StoredRun) -> str:
    ended_s = run.run.ended_s
    at = f" at {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(ended_s))}" if ended_s is not None else ""
    return f"run {run.run.run_id} has ended{at} ({run.run.outcome})"


def _known(run_id: str) -> StoredRun:
    from multinode.launch.attach import find_recorded

    return find_recorded(runs_root(), run_id)


def _known_here(run_id: str) -> StoredRun | None:
    try:
        return _known(run_id)
    except UsageError:
        return None


def _known_elsewhere(hosts: str | None, run_id: str) -> StoredRun:
    from multinode import api
    from multinode.launch.attach import find_on_nodes

    cluster, text = api.load_nodes(hosts, note=note)
    with api.connect(cluster) as context:
        return find_on_nodes(context.agent, cluster, text, context.runs, run_id)
