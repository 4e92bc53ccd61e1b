"""`multinode nccl-test`: the bandwidth of all-reduce over the nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from multinode.cli.options import Check, Hosts, Json, MasterPort, Nodes, WorkersPerNode

if TYPE_CHECKING:
    from multinode.workflows.nccl_test import CollectiveReport

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the verb to the command."""
    app.command("nccl-test")(nccl_test)


def nccl_test(
    hosts: Hosts = None,
    nodes: Nodes = None,
    workers_per_node: WorkersPerNode = 1,
    begin: Annotated[str, typer.Option("-b", "--begin", help="Smallest size: 8, 64K, 128M.")] = "64K",
    end: Annotated[str, typer.Option("-e", "--end", help="Largest size.")] = "64M",
    factor: Annotated[int, typer.Option("-f", "--factor", help="Each size is this many times the one before.")] = 4,
    iters: Annotated[int, typer.Option("-n", "--iters", min=1, help="Timed iterations of each size.")] = 20,
    warmup_iters: Annotated[
        int, typer.Option("-w", "--warmup-iters", min=1, help="Iterations before the timed ones.")
    ] = 2,
    max_seconds: Annotated[
        float, typer.Option(min=0.1, help="Fewer iterations where a size would take longer; never under 5.")
    ] = 5.0,
    backend: Annotated[str | None, typer.Option(help="nccl or gloo; else nccl where there is a GPU.")] = None,
    master_port: MasterPort = 29500,
    check: Check = True,
    as_json: Json = False,
) -> None:
    """Measure all-reduce over the nodes with their own torch: nccl-tests' columns, against the line rate."""
    from multinode.cli.inputs import parse_option, read_cluster
    from multinode.cli.output import print_document
    from multinode.cli.running import outside
    from multinode.core.collective_test import CollectiveTest, check_backend, sweep_sizes
    from multinode.core.planning import LaunchOptions
    from multinode.launch.request import ExecuteOptions
    from multinode.transport.archive import load_archive
    from multinode.units import parse_size
    from multinode.workflows.launch import Launch
    from multinode.workflows.nccl_test import nccl_test as run_test

    cluster, text = read_cluster(hosts, nodes)
    sizes = sweep_sizes(parse_option("-b", begin, parse_size), parse_option("-e", end, parse_size), factor)
    what = Launch(
        cluster=cluster,
        hostfile=text,
        job=CollectiveTest(
            sizes_bytes=sizes,
            iters=iters,
            warmup_iters=warmup_iters,
            max_seconds=max_seconds,
            backend=check_backend(backend),
        ),
        options=LaunchOptions(workers_per_node=workers_per_node, master_port=master_port, agent=load_archive().path),
        execute=ExecuteOptions(kind="nccl-test"),
        check=check,
    )
    with outside(cluster) as around:
        report = run_test(what, around)
    if as_json:
        print_document(report)
    else:
        _print_report(report)
    raise typer.Exit(1 if any(row.num_wrong for row in report.rows) or not report.rows else 0)


def _print_report(report: CollectiveReport) -> None:
    from multinode.cli.output import print_table
    from multinode.report.collective_table import collective_table

    title = f"{report.op}, {report.backend}, {report.world_size} workers on {len(report.nodes)} nodes"
    print_table(collective_table(report.rows, title))
    typer.echo(report.verdict)
