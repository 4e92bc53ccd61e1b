"""`multinode nccl-test`: what the network really gives, whether that is normal, and the cause if not."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from multinode.cli.inputs import make_launch, parse_option, read_nodes, with_environment
from multinode.cli.options import (
    Check,
    Details,
    HangTimeout,
    Hosts,
    Json,
    NodeOptions,
    Nodes,
    OnHang,
    Overrides,
    expand_options,
    given_options,
    read_invocation,
)
from multinode.cli.output import choose_form, fail_gate, note, print_document, print_screen, print_table
from multinode.cli.panels import examples
from multinode.cli.running import open_context
from multinode.cluster.hostfile_variables import with_variables
from multinode.errors import UsageError
from multinode.job.launch_options import LaunchOptions
from multinode.launch.context import ExecuteOptions
from multinode.records.files import read_text, write_text
from multinode.units import parse_size

if TYPE_CHECKING:
    from multinode import api
    from multinode.launch.context import Launch
    from multinode.network.measure import Extent
    from multinode.network.size_scan import ScanReport

# A training waits longer for a node that cannot be reached; a measurement with such a gap is worth nothing.
_LEASE_S = 30.0


def register(app: typer.Typer) -> None:
    """Add the verb to the command."""
    app.command(
        "nccl-test",
        epilog=examples("nccl-test --hosts hosts.txt", "nccl-test --hosts hosts.txt --pairs all_reduce sendrecv"),
    )(expand_options(nccl_test))


def nccl_test(
    ctx: typer.Context,
    *,
    collectives: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[COLLECTIVE]...",
            help="all_reduce, all_gather, reduce_scatter, broadcast, all_to_all or sendrecv. Default: all_reduce.",
        ),
    ] = None,
    hosts: Hosts = None,
    nodes: Nodes = None,
    local: Annotated[
        int | None, typer.Option(min=2, metavar="N", help="Run N workers on this machine, without nodes and SSH.")
    ] = None,
    workers_per_node: Annotated[
        int | None, typer.Option(min=1, help="Workers per node. Default: one, or the slots with --like.")
    ] = None,
    begin: Annotated[str, typer.Option("-b", "--begin", help="Smallest size: 8, 64K, 128M.")] = "64K",
    end: Annotated[str, typer.Option("-e", "--end", help="Largest size.")] = "64M",
    factor: Annotated[int, typer.Option("-f", "--factor", help="Factor between sizes.")] = 4,
    step: Annotated[
        str | None, typer.Option("-i", "--step", metavar="SIZE", help="Increment between sizes, instead of -f.")
    ] = None,
    iters: Annotated[int, typer.Option("-n", "--iters", min=1, help="Timed iterations per size.")] = 20,
    warmup_iters: Annotated[int, typer.Option("-w", "--warmup-iters", min=1, help="Warm-up iterations.")] = 2,
    verify: Annotated[
        int, typer.Option("-c", "--verify", min=0, help="Number of times to verify the values; 0: never.")
    ] = 1,
    dtype: Annotated[
        str, typer.Option("-d", "--dtype", help="int8, uint8, int32, int64, half, bfloat16, float or double.")
    ] = "float",
    op: Annotated[str, typer.Option("-o", "--op", help="Reduction: sum, prod, max, min or avg.")] = "sum",
    max_seconds: Annotated[
        float, typer.Option(min=0.1, help="Time limit per size. Reduces the iterations, but not below 5.")
    ] = 5.0,
    backend: Annotated[
        str | None, typer.Option(help="nccl, gloo, xccl (Intel) or hccl (Ascend). Default: that of the nodes' GPUs.")
    ] = None,
    like: Annotated[
        Path | None,
        typer.Option(metavar="JOB.yaml", help="Measure the messages of this training, instead of -b, -e and -f."),
    ] = None,
    set_: Overrides = None,
    tcp: Annotated[
        bool,
        typer.Option("--tcp/--no-tcp", help="Measure raw TCP between the nodes, interleaved with the largest size."),
    ] = True,
    pairs: Annotated[bool, typer.Option("--pairs", help="Also measure every pair of nodes to find outliers.")] = False,
    compare: Annotated[
        str | None, typer.Option(metavar="RUN", help="Show changes since this earlier nccl-test.")
    ] = None,
    tune: Annotated[
        bool,
        typer.Option(
            "--tune",
            help="Measure NCCL settings for sockets, algorithms, protocols and buffers, and report their gain.",
        ),
    ] = False,
    repeats: Annotated[int, typer.Option(min=2, max=20, help="With --tune: repeats per setting.")] = 3,
    write: Annotated[
        bool, typer.Option("--write", help="With --tune: write the best settings to every line of the hostfile.")
    ] = False,
    fresh: Annotated[
        bool,
        typer.Option(
            "--fresh",
            help="With --tune: measure everything again. Default: the same command resumes what was interrupted.",
        ),
    ] = False,
    form: Annotated[Literal["table", "nccl-tests"], typer.Option("--format", help="Output format.")] = "table",
    output: Annotated[
        Path | None,
        typer.Option("--output", metavar="FILE", help="Write a chart of busbw over size to this .html file."),
    ] = None,
    min_busbw: Annotated[
        float | None,
        typer.Option(
            min=0.0, metavar="GB/S", help="Exit with code 1 if the best busbw of a collective is below this (GB/s)."
        ),
    ] = None,
    common: NodeOptions,
    check: Check = True,
    hang_timeout: HangTimeout = 300.0,
    on_hang: OnHang = "report",
    details: Details = False,
    as_json: Json = False,
) -> None:
    """Measure collectives between the nodes with their own torch: the speed, whether it is normal, and why.

    Columns, units and busbw are as in nccl-tests.
    """
    from multinode import api
    from multinode.network.measure import check_reduction
    from multinode.records.benchmark import BACKENDS, DTYPE_BYTES, REDOPS, check_choice

    sizes = api.scan_sizes(
        parse_option("-b", begin, parse_size),
        parse_option("-e", end, parse_size),
        factor=factor,
        step_bytes=parse_option("-i", step, parse_size) if step is not None else None,
    )
    test = api.CollectiveTest(
        messages=api.scan_messages(collectives or ["all_reduce"], sizes),
        dtype=check_choice("dtype", dtype, tuple(DTYPE_BYTES)),
        redop=check_choice("op", op, REDOPS),
        iters=iters,
        warmup_iters=warmup_iters,
        max_seconds=max_seconds,
        check=verify,
        backend=check_choice("backend", backend, BACKENDS) if backend is not None else None,
    )
    check_reduction(op, dtype)
    training = api.load_job(like, set_ or []) if like is not None else None
    if set_ and training is None:
        raise UsageError("--set changes the job of --like, which is missing", hint="add --like JOB.yaml")
    if local is not None and workers_per_node is not None:
        raise UsageError("--local already sets the number of workers", hint="remove --workers-per-node")
    if tune and (pairs or compare or output or local is not None or min_busbw is not None):
        raise UsageError(
            "--tune measures one test with several settings between nodes; it cannot be combined with --pairs, "
            "--compare, --output, --min-busbw or --local"
        )
    if (write or fresh) and not tune:
        raise UsageError(
            f"--{'write' if write else 'fresh'} is an option of --tune, which is missing", hint="add --tune"
        )
    choose_form(None, output, {".html": "html", ".htm": "html"})
    # A training uses all slots; bare sizes are of the network between the nodes.
    workers = local or workers_per_node or (None if training is not None else 1)
    launch = make_launch(
        _cluster(hosts, nodes, local),
        test,
        with_environment(LaunchOptions(workers_per_node=workers, command=read_invocation(ctx)), common),
        ExecuteOptions(lease_s=_LEASE_S, stall_s=hang_timeout or None, on_stall=on_hang),
        check=check,
    )
    if tune:
        _tune(launch, api.Extent(like=training, fresh=fresh), repeats, write=write, details=details, as_json=as_json)
        return
    with open_context(launch.cluster, local=local is not None) as context:
        extent = api.Extent(tcp=tcp, pairs=pairs, compare=compare, like=training)
        report = api.nccl_test(launch, context, extent)
    if output is not None:
        _write_page(report, output)
    if as_json:
        print_document(report)
    else:
        _print_report(report, form, like, details=details, given=given_options(ctx, {"--hosts", "--nodes"}))
    for collective in dict.fromkeys(row.collective for row in report.rows):
        best = max(row.busbw_gb_per_s for row in report.rows if row.collective == collective)
        if min_busbw is not None and best < min_busbw:
            fail_gate(f"{collective} reaches {best:.4g} GB/s busbw, below --min-busbw {min_busbw:g}")
    raise typer.Exit(1 if any(row.num_wrong for row in report.rows) or not report.rows else 0)


def _tune(launch: Launch, extent: Extent, repeats: int, *, write: bool, details: bool, as_json: bool) -> None:
    from multinode.network.nccl_tuning import env_keys, tune_parts, tune_warnings
    from multinode.network.tune import nccl_tune

    path = Path(launch.cluster.source)
    if write and not (path.is_file() and read_text(path, "the hostfile") == launch.hostfile):
        raise UsageError(
            f"--write changes a hostfile, but {launch.cluster.source} is not one",
            hint="without --write, multinode prints the keys",
        )
    with open_context(launch.cluster) as context:
        report = nccl_tune(launch, extent, repeats, context)
    if as_json:
        print_document(report)
    else:
        print_screen(tune_parts(report, details=details))
    if write and report.winner:
        for line in tune_warnings(report) if as_json else ():
            note(line)
        write_text(path, with_variables(launch.hostfile, report.winner))
        note(f"{path}: {env_keys(report)} on the line of every node")


def _cluster(hosts: str | None, nodes: int | None, local: int | None) -> api.Nodes:
    try:
        return read_nodes(hosts, nodes, local)
    except UsageError as error:
        if hosts is not None or nodes is not None:
            raise
        also = "to run without nodes: multinode nccl-test --local 2"
        raise UsageError(error.message, hint=f"{error.hint}; {also}" if error.hint else also) from error


def _print_report(report: ScanReport, form: str, like: Path | None, *, details: bool, given: str) -> None:
    from multinode.network.screen import nccl_tests_text, next_step, pair_table, scan_lines, scan_parts

    if form != "nccl-tests":
        print_screen(scan_parts(report, details=details))
        typer.echo(next_step(report, given, str(like) if like is not None else _default_job()))
        return
    typer.echo(nccl_tests_text(report.rows, report.test, report.devices))
    if report.tcp.pairs:
        print_table(pair_table(report.tcp.pairs, report.odd, nodes=report.nodes), prefix="# ")
    for line in scan_lines(report):
        typer.echo(f"# {line}")


def _default_job() -> str | None:
    """Empty, as the default job need not be named; None if there is none."""
    from multinode.records.settings import default_job, load_settings

    try:
        default_job(load_settings(Path.cwd()), Path.cwd())
    except UsageError:
        return None
    return ""


def _write_page(report: ScanReport, path: Path) -> None:
    from multinode.network.charts import scan_page

    write_text(path, scan_page(report))
    note(f"chart: {path}")
