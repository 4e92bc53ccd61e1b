"""`multinode check`: what would break a training on these nodes, and what mends it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from multinode.cli.inputs import read_cluster, read_job
from multinode.cli.live import show_stage
from multinode.cli.options import Hosts, Json, MasterPort, Nodes
from multinode.cli.output import print_document, print_table
from multinode.cli.running import open_agent

if TYPE_CHECKING:
    from multinode.workflows.check.check import CheckReport

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the verb to the command."""
    app.command()(check)


def check(
    job: Annotated[Path | None, typer.Argument(help="LLaMA-Factory YAML; its paths are checked too.")] = None,
    hosts: Hosts = None,
    nodes: Nodes = None,
    master_port: MasterPort = 29500,
    bandwidth: Annotated[
        bool | None,
        typer.Option(help="Stream for a moment between all pairs; by default up to 8 nodes.", show_default=False),
    ] = None,
    as_json: Json = False,
) -> None:
    """Look at every node and at the network between them; say what would break a training, and what mends it."""
    cluster, _ = read_cluster(hosts, nodes)
    what = read_job(job, None, []) if job is not None else None
    with open_agent(cluster) as agent, show_stage() as say:
        from multinode.workflows.check.check import CheckOptions, check_cluster

        report = check_cluster(agent, cluster, what, CheckOptions(master_port=master_port, bandwidth=bandwidth), say)
    if as_json:
        print_document(report)
    else:
        _print_report(report, f"{f' --hosts {hosts}' if hosts else ''}{f' {job}' if job else ''}")
    raise typer.Exit(3 if report.unreached else 0 if report.ok else 1)


def _print_report(report: CheckReport, arguments: str) -> None:
    from multinode.report.check.check_table import check_matrix, findings_text, next_step

    nodes = [(node.name, node.reached) for node in report.nodes]
    print_table(check_matrix(nodes, report.checks, report.findings))
    if report.findings:
        typer.echo(findings_text(report.findings))
    typer.echo(next_step(report.findings, f"multinode check{arguments}", f"multinode launch{arguments}"))
